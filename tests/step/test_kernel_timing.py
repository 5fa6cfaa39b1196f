"""How kernels are timed that Inductor chooses from: by one launch behind the other, where they are short."""

import importlib
import math
from typing import Any

import pytest
import torch

from ampkit._torch.device import kernel_timing


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
