"""How a job of several processes ends: graphs are given up first, and gloo's threads end while Python is still running.

Two things would keep a process from ending. `destroy_process_group` waits for ever while a CUDA graph holds work of
NCCL's communicator (torch 2.11). And gloo's threads need Python's lock to let go of the tensors of their last
collective, some time after that collective is over:

- Whoever drops the last reference to the process group waits for these threads. Python's own reference releases the
  lock meanwhile (`IntrusivePtrNoGilDestructor` in torch/csrc/distributed/c10d/init.cpp), but the C++ `Reducer` of a
  `DistributedDataParallel` model does not: if it outlives `destroy_process_group()`, the two wait for each other.
- A thread that asks for the lock while the interpreter is being finalized aborts the process ("terminate called without
  an active exception").

So Python keeps a reference to the process group of every model, and drops it at exit, behind the model's.
"""

import atexit
import gc
import weakref
from typing import Any, Protocol

import torch
from torch import nn

from .._torch.distributed import call_before_process_group_ends


class Closable(Protocol):
    """What holds graphs."""

    def close(self) -> None:
        """Give them up."""


_models: "weakref.WeakSet[nn.parallel.DistributedDataParallel]" = weakref.WeakSet()
_groups: list[Any] = []  # the process groups of these models
_graphs: "weakref.WeakSet[Closable]" = weakref.WeakSet()


def keep_process_group(model: nn.parallel.DistributedDataParallel) -> None:
    """Keep the process group of a model until the process ends, or until a later model comes when this one is gone."""
    groups = [other.process_group for other in _models]
    _groups[:] = [group for group in _groups if group in groups]
    _models.add(model)
    if model.process_group not in _groups:
        _groups.append(model.process_group)


def close_before_end(graphs: Closable) -> None:
    """Have graphs given up before the default process group is destroyed, or else at exit."""
    call_before_process_group_ends(_close_all)
    _graphs.add(graphs)


def _close_all() -> None:
    for graphs in list(_graphs):
        graphs.close()
    _graphs.clear()


@atexit.register
def _end() -> None:
    """Give up the graphs, and let gloo's threads end while they can still get Python's lock."""
    _close_all()
    if not _groups:
        return
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
        torch.distributed.destroy_process_group()  # the script did not. NCCL's might wait for the other processes
    for thing in gc.get_objects():  # also a model that no step of ampkit's has met, or that is garbage in a cycle
        if issubclass(type(thing), nn.parallel.DistributedDataParallel):
            for name in ("logger", "reducer", "process_group"):  # whoever has the Reducer has the group
                vars(thing).pop(name, None)
    _groups.clear()
