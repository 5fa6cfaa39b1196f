"""How kernels are timed that Inductor chooses from, short ones by one launch behind the other; what is Inductor's."""

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ampkit._torch.device import kernel_timing
from ampkit._user_line import compiler_runs


@pytest.fixture
def benchmarker() -> Any:
    return importlib.import_module("torch._inductor.runtime.benchmarking").benchmarker


def test_inductor_asks_ampkit_for_short_kernels_alone(benchmarker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is long, or is to be timed in another way, is left to Inductor; behind the context all is as before."""
    found = {"short": 0.25, "long": None}
    monkeypatch.setattr(type(benchmarker), "benchmark_gpu", lambda self, function, **options: ("inductor", options))
    monkeypatch.setattr(kernel_timing, "milliseconds_of", lambda function: found[function()])
    on_cuda: dict[str, Any] = {"device": "cuda", "rep": 40}
    with kernel_timing.timed_back_to_back():
        assert benchmarker.benchmark(lambda: "short", **on_cuda) == 0.25
        assert benchmarker.benchmark(lambda: "long", **on_cuda)[0] == "inductor"
        assert benchmarker.benchmark(lambda: "short", return_mode="all", **on_cuda)[1]["return_mode"] == "all"
    assert benchmarker.benchmark(lambda: "short", **on_cuda)[0] == "inductor"
    assert "benchmark_gpu" not in vars(benchmarker)


def test_an_error_leaves_no_change(benchmarker: Any) -> None:
    """A kernel that fails is Inductor's to handle."""
    with pytest.raises(RuntimeError, match="no valid kernel"), kernel_timing.timed_back_to_back():
        raise RuntimeError("no valid kernel")
    assert "benchmark_gpu" not in vars(benchmarker)


@pytest.mark.cuda
def test_a_short_kernel_and_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of a short kernel are launched in one go; a long one is not timed."""
    small, large = torch.ones(64, 64, device="cuda"), torch.ones(8192, 8192, device="cuda")
    calls = []

    def short() -> None:
        calls.append(torch.mm(small, small))

    with monkeypatch.context() as patch:
        patch.setattr(kernel_timing, "LONG_MS", math.inf)  # other processes may keep the GPU busy
        found = kernel_timing.milliseconds_of(short)
    assert found is None or found > 0  # None: the GPU was so busy that the host could not keep up with its queue
    assert len(calls) >= 1 + kernel_timing.REPEATS + kernel_timing.CALLS
    assert kernel_timing.milliseconds_of(lambda: torch.mm(large, large)) is None


TORCH = str(Path(torch.__file__).parent)
USER, OPS, INDUCTOR = ("step.py", "step"), (f"{TORCH}/_ops.py", "torch._ops"), (f"{TORCH}/_inductor/a.py", "torch._a")
TRITON = "/usr/lib/python3/site-packages/triton/testing.py", "triton.testing"
WRITTEN = "/tmp/torchinductor_me/ab/cab.py", "torch._inductor.runtime.compile_tasks.cab"
STACKS: dict[str, tuple[bool, list[tuple[str, str]]]] = {  # files and modules, the innermost last
    "it times kernels": (True, [USER, INDUCTOR]),
    "it waits": (True, [USER, WRITTEN, INDUCTOR, OPS]),
    "ampkit times kernels for it": (True, [USER, WRITTEN, INDUCTOR, (kernel_timing.__file__, "ampkit.a"), OPS]),
    "triton times kernels for it": (True, [USER, WRITTEN, INDUCTOR, TRITON, OPS]),
    "triton times the user's": (False, [USER, TRITON, OPS]),
    "code that it has written": (False, [USER, INDUCTOR, WRITTEN, OPS]),
    "a graph that it has traced": (False, [USER, INDUCTOR, ("<eval_with_key>.7", "None"), OPS]),
    "what dynamo runs as it is": (False, [USER, (f"{TORCH}/_dynamo/eval_frame.py", "torch._dynamo.eval_frame"), OPS]),
    "the user's code within": (False, [USER, INDUCTOR, USER, OPS]),
}


@pytest.mark.parametrize("case", STACKS)
def test_whether_the_compiler_runs(case: str) -> None:
    """What it asks, waits for, copies or draws is no line of a step, but what the code does that it has compiled is."""
    expected, stack = STACKS[case]
    call: Callable[[], bool] = compiler_runs
    for file, module in reversed(stack):
        scope: dict[str, Any] = {"call": call, "__name__": module}
        exec(compile("def called(): return call()", file, "exec"), scope)
        call = scope["called"]
    assert call() is expected


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_compiler_runs_while_it_compiles() -> None:
    """Also in a function of the user's that it calls then."""
    found: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.append(compiler_runs())
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert (found, compiler_runs()) == ([True], False)
