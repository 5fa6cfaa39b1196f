"""Every test leaves torch as it found it; tests that need a GPU are skipped where there is none."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch


def global_state() -> dict[str, Any]:
    """Return the process-wide torch settings that a step could change, by name."""
    state = {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "matmul TF32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn TF32": torch.backends.cudnn.allow_tf32,
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


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("multigpu") and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    sections = {
        "autocast_samples": "operations with an autocast kernel that ran",
        "setups": "random training set-ups, graphed and eager",
    }
    for name, title in sections.items():
        module = sys.modules.get(name)  # imported by the tests that ran, if any did
        lines = list(module.summary()) if module else []
        if lines:
            terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)
