"""One rank of several, without the others and without a device: its process group, and what `fully_shard` asks for."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.overrides import TorchFunctionMode

from ..._undo import Undo, replace
from ..guard import private

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_ASKS_FOR_DEVICE = ("_fsdp_init", "_fsdp_state", "_fsdp_param_group", "_fsdp_collectives")  # its modules that do


@contextmanager
def fake_rank(ranks: int, device_type: str) -> Iterator[None]:
    """Context in which this process is the first of so many ranks. Collectives change nothing, and wait for nobody.

    `fully_shard` takes its CUDA streams and events from stand-ins, so that it needs no device, also for shards on
    "cuda". They are put in place for the whole process. No process group may be initialized when this is entered.
    """
    with Undo() as undo:
        undo.note(setattr, sys, "excepthook", sys.excepthook)  # torch replaces it, to put the rank before each line
        undo.note(_end_process_group)
        importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
        distributed: Any = torch.distributed
        distributed.init_process_group("fake", rank=0, world_size=ranks)
        # Without a mesh, fully_shard makes one of the accelerator. The machine may have another one, or none.
        private(torch._C, "_get_accelerator")
        replace(undo, torch._C, "_get_accelerator", lambda *_: torch.device(device_type))
        if device_type == "cuda":
            for name in _ASKS_FOR_DEVICE:
                module = importlib.import_module(f"{_FULLY_SHARD}.{name}")
                own = private(module, "_get_device_handle")
                replace(
                    undo,
                    module,
                    "_get_device_handle",
                    lambda kind="cuda", own=own: _NO_DEVICE if kind == "cuda" else own(kind),
                )
            replace(undo, torch.accelerator, "current_stream", _NO_DEVICE.current_stream)
        yield


def _end_process_group() -> None:
    distributed: Any = torch.distributed
    if distributed.is_initialized():
        distributed.destroy_process_group()
    # DTensor keeps results by their meshes, and a mesh of other ranks that come later could be equal to one of these.
    debug = importlib.import_module("torch.distributed.tensor.debug")
    private(debug, "_clear_sharding_prop_cache")()


@contextmanager
def real_values() -> Iterator[None]:
    """Context within that of a mode of fake tensors, in which new tensors on the CPU have values, as meshes need them.

    New tensors on CUDA, and all that is computed from fake ones, are fake.
    """
    with private(fake_tensor, "unset_fake_temporarily")() as mode:
        assert mode is not None  # it is called within the mode
        with _CudaIsFake(mode):
            yield


class _CudaIsFake(TorchFunctionMode):
    """Runs what makes a tensor on CUDA within a mode of fake tensors."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        devices = (value for value in (*args, *kwargs.values()) if isinstance(value, (str, torch.device)))
        on_cuda = func is Tensor.cuda or any(str(device).partition(":")[0] == "cuda" for device in devices)
        with self._mode if on_cuda else nullcontext():
            return func(*args, **kwargs)


def _nothing(*_: object) -> None:
    """Take the place of a method that works on a device."""


class _Event:
    """Stands for a CUDA event."""

    record = synchronize = _nothing


class _Stream:
    """Stands for the default stream of CUDA device 0."""

    stream_id = 0
    device_index = 0
    device_type = 1  # CUDA, in torch's enumeration of device types (torch/headeronly/core/DeviceType.h)
    wait_stream = wait_event = _nothing

    def record_event(self, event: object = None) -> _Event:
        """Return an event."""
        return _Event()


# Stands for the module `torch.cuda`, with what `fully_shard` calls of it.
_NO_DEVICE = SimpleNamespace(
    Event=_Event,
    Stream=lambda priority=0: _Stream(),
    current_device=lambda: 0,  # the index that fake tensors have
    current_stream=lambda device=None: _Stream(),
    stream=nullcontext,
)
