"""How a job of several processes ends: graphs are released first, and gloo's threads end while Python is still running.

Two things would keep a process from ending. `destroy_process_group` waits for ever while there is a CUDA graph with
work of NCCL's communicator (torch 2.11). And gloo's threads need Python's lock to release the tensors of their last
collective, some time after that collective is over:

- When the last reference to the process group is dropped, the thread that drops it waits for gloo's threads. If it is a
  reference of Python's, the lock is released meanwhile (`IntrusivePtrNoGilDestructor` in
  torch/csrc/distributed/c10d/init.cpp). If it is that of the C++ `Reducer` of a `DistributedDataParallel` model, the
  lock is not released. So if the `Reducer` outlives `destroy_process_group()`, the threads wait for each other.
- A thread that asks for the lock while the interpreter is being finalized aborts the process ("terminate called without
  an active exception").

So ampkit keeps references to the process groups of every model, and drops them at exit, after those of the model. What
is under `fully_shard`, and meshes of devices, have references of Python's.

The other ranks are told of the end before the graphs are released, which waits for the device, and so perhaps for them.
"""

import atexit
import functools
import multiprocessing.util
import sys
import weakref
from typing import Any, Protocol

import torch
from torch import nn

from ..._torch.ranks.distributed import call_before_shutdown, drop_groups
from .heartbeat import end_heartbeats, stop_heartbeats
from .held_up import last_resort


class Closable(Protocol):
    """An object that has graphs."""

    def close(self) -> None:
        """Release the graphs."""


_groups: list[tuple["weakref.ref[nn.Module]", list[Any]]] = []  # the process groups of models of several ranks
_graphs: "weakref.WeakSet[Closable]" = weakref.WeakSet()


def keep_process_groups(model: nn.Module, groups: list[Any]) -> None:
    """Keep the process groups of a model until the process ends. Drop those of models that are gone."""
    _groups[:] = [(other, kept) for other, kept in _groups if other() is not None and other() is not model]
    _groups.append((weakref.ref(model), groups))


def close_before_end(graphs: Closable) -> None:
    """Have graphs released before a process group is destroyed, at exit at the latest."""
    _graphs.add(graphs)


@functools.cache
def tell_end() -> None:
    """Have the other ranks told when this process ends, or destroys a process group."""
    call_before_shutdown(_end_group)
    # Processes of multiprocessing leave without atexit, but not without this. Others do both.
    multiprocessing.util.Finalize(None, _end, exitpriority=0)


def _end_group(group: Any) -> None:
    """Release the graphs before a group's communicators, which would wait for them for ever."""
    end_heartbeats(_error(), group.group_name)
    _close_all()  # a function may use a group that ampkit does not know
    stop_heartbeats(group.group_name)


def _close_all() -> None:
    for graphs in list(_graphs):
        graphs.close()
    _graphs.clear()


def _error() -> BaseException | None:
    """Return the error that this process ends with, None if there is none."""
    # In a `finally` clause the first is what it was entered with; at exit the second is what was not caught.
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):
        return None if error.code in (None, 0) else error.__context__ or error
    return error


@atexit.register
def _end() -> None:
    """Release the graphs, and let gloo's threads end while they can still get Python's lock."""
    end_heartbeats(_error())
    _close_all()
    if stop_heartbeats():
        last_resort()  # what follows may wait for the ranks that are gone
    if not _groups:
        return
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
        torch.distributed.destroy_process_group()  # as the script did not; NCCL's might wait for other processes
    drop_groups()  # also those of models without a step of ampkit's, and of garbage in cycles
    _groups.clear()
