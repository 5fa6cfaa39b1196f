"""How to be told that a process group ends, what its store is, and how its communicators are aborted."""

import functools
import gc
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from ..guard import private


def call_before_shutdown(callback: Callable[[Any], None]) -> None:
    """Have each process group call this, with itself, before it is shut down.

    torch has no hook for this. To replace `destroy_process_group` would not help, because code that ran
    `from torch.distributed import destroy_process_group` earlier would still call the old one. All of them call
    `ProcessGroup.shutdown`, for each group that they destroy.
    """
    kind: Any = torch.distributed.ProcessGroup
    shutdown = kind.shutdown
    if getattr(shutdown, "calls_first", None) is callback:
        return

    @functools.wraps(shutdown)
    def after_callback(group: Any, *args: Any, **kwargs: Any) -> Any:
        callback(group)
        return shutdown(group, *args, **kwargs)

    after_callback.calls_first = callback  # type: ignore[attr-defined] # a function takes any attribute
    kind.shutdown = after_callback


def own_store(group: Any, prefix: str, timeout: timedelta) -> Any:
    """Return a client of the group's store with a connection of its own.

    One that is shared blocks while another thread waits for a key. None if the group has no store.
    """
    distributed: Any = torch.distributed
    try:
        client = distributed.PrefixStore(prefix, group.get_group_store()).clone()
    except (AttributeError, NotImplementedError, RuntimeError):  # MPI, groups of tests, other torch versions
        return None
    client.set_timeout(timeout)
    return client


def aborts() -> list[Callable[[], None]]:
    """Return a function for each process group that has its communicators of NCCL give up, so that waits for them end.

    What their kernels compute from then on is garbage. ncclCommAbort ends the kernels at once, but returns only when
    the last CUDA graph with work of the communicator is gone: call each function in a thread of its own. Unlike
    `torch.distributed.distributed_c10d._abort_process_group`, they leave the groups registered, so that a
    `destroy_process_group()` of the user's finds them.
    """
    groups = private(torch.distributed.distributed_c10d, "_world").pg_names
    return [group.abort for group in list(groups)]


def drop_groups() -> None:
    """Have no model and no mesh of devices refer to a process group any more, so that its threads end with it.

    They cannot communicate afterwards.
    """
    sharding = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_common")
    mesh_info: Any = getattr(sharding, "DataParallelMeshInfo", ())
    mesh: Any = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", ())
    for thing in gc.get_objects():  # `type`: a proxy of the user's may do anything when it is asked for its class
        kind = type(thing)
        if issubclass(kind, nn.parallel.DistributedDataParallel):
            for name in ("logger", "reducer", "process_group"):  # the Reducer has a reference to the group
                vars(thing).pop(name, None)
        elif issubclass(kind, mesh_info):
            for name in ("shard_process_group", "replicate_process_group"):
                vars(thing).pop(name, None)
        elif issubclass(kind, mesh):
            vars(thing).pop("_pg_registry", None)
