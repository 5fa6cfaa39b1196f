"""Every test leaves torch as it found it; tests that need a GPU are skipped where there is none."""

import gc
import importlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

# Small operations of two workers would wait for each other's threads. Set before torch is imported, here and in the
# processes that tests start, of which torchrun's get one thread each in any case.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

# `torch.manual_seed` notes the stack of its caller for each kind of device that is missing: 3 ms under pytest.
for kind in (torch.cuda, torch.xpu, torch.mtia):
    if not kind.is_available():
        kind.manual_seed_all = lambda seed: None  # type: ignore[method-assign, attr-defined]


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m does not ask for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what `quick` and `sampled` leave to `make test-all`, as seeds what is left to `make test-seeds`."""
    seen: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for item in items:
        family = item.nodeid.partition("[")[0]
        if any(item.get_closest_marker(name) for name in ("cuda", "multigpu")):
            continue
        mark = item.get_closest_marker("sampled")
        if mark is not None and not chosen(seen[family], mark.args[0]):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.seeds)
        else:
            quick = item.get_closest_marker("quick")
            share = 1 if quick is None else quick.args[0]
            if not chosen(kept[family], share * (1 if mark is None else 2)):
                item.add_marker(pytest.mark.slow)
            kept[family] += 1
        seen[family] += 1


def chosen(index: int, step: int) -> bool:
    """Return whether this is one of each `step` cases, along a diagonal: not always the same value of an argument."""
    return (index + index // step) % step == 0


def global_state() -> dict[str, Any]:
    """Return the process-wide torch settings that a step could change, by name."""
    state = {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "matmul TF32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn TF32": torch.backends.cudnn.allow_tf32,
        # What the names above do not tell: set_float32_matmul_precision("highest") makes "ieee" of "none".
        "matmul precision": torch.backends.cuda.matmul.fp32_precision,
        "matmul precision on the CPU": torch.backends.mkldnn.matmul.fp32_precision,
        "convolution precision": torch.backends.cudnn.conv.fp32_precision,
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "cudnn deterministic": torch.backends.cudnn.deterministic,
        "deterministic algorithms": torch.get_deterministic_debug_mode(),
        "threads": torch.get_num_threads(),
    }
    for device_type in ("cpu", "cuda"):
        state[f"{device_type} autocast"] = torch.is_autocast_enabled(device_type)
        state[f"{device_type} autocast dtype"] = torch.get_autocast_dtype(device_type)
    if torch.cuda.is_available():
        state["sync debug mode"] = torch.cuda.get_sync_debug_mode()
        state["current stream"] = torch.cuda.current_stream()
    return state


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before, rng = global_state(), torch.get_rng_state()
    cuda_rng = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    torch.manual_seed(0)
    yield
    torch.set_rng_state(rng)
    if cuda_rng:
        torch.cuda.set_rng_state_all(cuda_rng)
    after = global_state()
    leaks = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not leaks, f"the test left torch changed (before, after): {leaks}"


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> None:
    """Hide what earlier files made from the garbage collector and from the search for modules before each capture.

    Half a million objects are left by the collection of all tests: each of these searches would take over 0.1 s.
    """
    importlib.import_module("torch._dynamo")  # a tenth of a million more; the first optimizer would import it later
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect nine thousand tests, which stay, without looking for garbage among them: that takes 6 s of 15."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("multigpu") and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


def sections() -> dict[str, list[str]]:
    """Return what the tests of this process have to say at the end, by title."""
    modules = {
        "autocast_samples": "operations with an autocast kernel that ran",
        "setups": "random training set-ups, graphed and eager",
        "scan_setups": "random training set-ups, by scans and windows, and by eager single calls",
        "split_setups": "random training set-ups, in parts and eagerly",
        "compile_setups": "random training set-ups, compiled, graphed and without a graph",
        "cut_setups": "random training set-ups that ask the device questions, graphed and eager",
        "hostile": "random set-ups that try to make a graph differ from eager",
        "interrupts": "interrupts at lines of ampkit",
    }
    # Imported by the tests that ran, if any did.
    return {title: list(sys.modules[name].summary()) for name, title in modules.items() if name in sys.modules}


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)  # of a process of pytest-xdist
    if output is not None:
        output["sections"] = sections()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before, nothing left behind."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, compiled code comes from AOTAutograd alone."""
    from harness import leave_out_inductor

    if not torch.cuda.is_available():
        leave_out_inductor(monkeypatch)


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models stay in parts where a GPU shows that their steps are slower in parts."""
    monkeypatch.setattr("ampkit._step.parts.split.is_timed", lambda options: False)


@pytest.fixture
def no_device_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code may ask whether it is being captured. Without a driver, torch raises an error where it is asked."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("ampkit._capture.graph.capture_query._is_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many processes `-n auto` starts: none beside this one where they would share a GPU."""
    return 0 if torch.cuda.is_available() else len(os.sched_getaffinity(0))


class OfWorkers:
    """Collects the sections of pytest-xdist's processes."""

    def __init__(self) -> None:
        self.sections: list[tuple[str, list[str]]] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        found = getattr(node, "workeroutput", {}).get("sections", {})
        self.sections += [(f"{title} ({node.gateway.id})", lines) for title, lines in found.items()]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(OfWorkers(), "sections of workers")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    workers: Any = terminalreporter.config.pluginmanager.get_plugin("sections of workers")
    for title, lines in (*sections().items(), *workers.sections):
        if lines:
            terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)
