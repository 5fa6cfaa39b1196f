"""The code that Inductor writes for a GPU, on a machine without one.

Tensors are fake, and what asks the driver is told of an H200. So lowering, fusion and code generation are those of a
GPU. Nothing is compiled by Triton, and nothing runs.
"""

import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.device_interface import CudaInterface
from torch._subclasses import fake_tensor
from torch.utils import _triton

from ampkit._torch.compile import cause_of

_H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=140 << 30,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block_optin=232448,
    L2_cache_size=60 << 20,
)


class _WrittenError(Exception):
    """The code is written, and cannot run here."""


class _Driver:
    """What Triton asks its driver for."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


class _Device:
    """Context that makes a device the current one."""

    def __init__(self, index: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...


@contextmanager
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Context in which tensors are fake, also on "cuda", and Inductor writes code for an H200."""
    if torch.cuda.is_available():
        pytest.skip("torch would remember what it was told, and the tests that use the GPU with it")
    driver = pytest.importorskip("triton").runtime.driver
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: _H200,
        "get_compute_capability": lambda device=None: 90,
        "is_bf16_supported": lambda including_emulation=False: True,
    }
    with monkeypatch.context() as patch:
        for name, answer in answers.items():
            patch.setattr(CudaInterface, name, staticmethod(answer))
        patch.setattr(CudaInterface, "device", _Device)
        for name in ("current_device", "get_device_properties"):
            patch.setattr(CudaInterface.Worker, name, staticmethod(answers[name]))
        for name in ("current_device", "get_device_properties", "is_bf16_supported"):
            patch.setattr(torch.cuda, name, answers[name])
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch.setattr(fake_tensor, "init_gpu_context", lambda device: None)
        patch.setattr(driver, "_active", _Driver(), raising=True)
        _triton.has_triton.cache_clear()
        config = importlib.import_module("torch._inductor.config")
        # Folding constants computes on the device. What caches hold is not written again.
        settings = {"joint_graph_constant_folding": False, "compile_threads": 1, "fx_graph_cache": False}
        autograd = importlib.import_module("torch._functorch.config")
        with config.patch(settings), autograd.patch(enable_autograd_cache=False), fake_tensor.FakeTensorMode():
            yield
    _triton.has_triton.cache_clear()


def kernels(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> list[str]:
    """Return the kernels that `call()` would launch, by the names that Inductor gives them, for `h200`.

    Args:
        monkeypatch: of the test.
        call: calls a function that ampkit has torch.compile compile, for the first time.
    """
    lowering = importlib.import_module("torch._inductor.graph").GraphLowering  # takes seconds, and warns
    sources: list[str] = []
    codegen = lowering.codegen

    def written(self: Any) -> Any:
        sources.append(codegen(self)[0].value)
        raise _WrittenError

    with monkeypatch.context() as patch:
        patch.setattr(lowering, "codegen", written)
        try:
            call()
        except Exception as error:
            if not isinstance(cause_of(error), _WrittenError):
                raise
    assert sources, "nothing was compiled"
    return [name for source in sources for name in re.findall(r"(\w+)\.run\(", source)]
