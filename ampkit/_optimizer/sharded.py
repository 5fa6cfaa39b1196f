"""Optimizer steps on the parameters of `fully_shard`: each rank steps its own shards, and all ranks share one norm."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from .._torch.ranks.sharding import as_shard, mesh_group
from .._torch.tensors.tensors import local_shard, sharded_class
from .._undo import Undo
from .step_kind import parameters, torch_class

# Their steps do the same to each element, whatever the others are. So a step of the shards is a step of the whole.
_ELEMENTWISE = (Adam, AdamW, SGD, Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop)


@dataclass(frozen=True, eq=False)
class OverRanks:
    """What makes the norms of whole gradients of the norms of their shards."""

    _group: Any = None  # the ranks that have the shards; None if gradients are not split, or torch has DTensors

    def __bool__(self) -> bool:
        return self._group is not None

    def norms(self, norms: Tensor, norm_type: float) -> Tensor:
        """Return the norms over all ranks, of those of the shards: shape (n,). One is not finite if a shard's is not.

        Each rank gets the same bits, those of torch.nn.utils.clip_grad_norm_, which computes them in the same way.
        Sync: none. One all_reduce of n numbers.
        """
        if self._group is None:
            return norms
        if norm_type == torch.inf:
            largest = torch.where(norms < torch.inf, norms, torch.inf)  # a maximum may leave out nan
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=self._group)
            return largest
        powers = norms**norm_type
        torch.distributed.all_reduce(powers, group=self._group)
        result: Tensor = powers ** (1.0 / norm_type)
        return result


ONE_RANK = OverRanks()


def shard_group(optimizer: Optimizer) -> Any:
    """Return the process group that all parameters are split over, if a step does the same to each element; or None."""
    params, kind = parameters(optimizer), sharded_class()
    groups: dict[int, Any] = {}
    if params and isinstance(params[0], kind) and torch_class(optimizer) in _ELEMENTWISE:
        of_each = [mesh_group(param) if isinstance(param, kind) else None for param in params]
        groups = {id(group): group for group in of_each}
    return next(iter(groups.values())) if len(groups) == 1 else None


@contextmanager
def on_shards(optimizer: Optimizer) -> Iterator[OverRanks]:
    """Context for a step, in which the optimizer has this rank's shards as plain tensors: parameters, gradients, state.

    Kernels of torch that do not take DTensors take these, and the others run without the host time of DTensor's
    dispatch. State that the step makes is a DTensor afterwards, as torch's own steps make it. Does nothing unless all
    parameters are split over one process group, and the step does the same to each element.
    """
    group = shard_group(optimizer)
    if group is None:
        yield ONE_RANK
        return
    state = optimizer.state
    with Undo() as undo:
        undo.note(setattr, optimizer, "state", state)
        shards: defaultdict[Tensor, Any] = defaultdict(dict)
        owners: dict[Tensor, Any] = {}
        for param_group in optimizer.param_groups:
            undo.note(param_group.__setitem__, "params", param_group["params"])
            own = []
            for param in param_group["params"]:
                local: Any = local_shard(param)
                if param.grad is not None:
                    undo.note(setattr, local, "grad", None)
                    local.grad = local_shard(param.grad)
                if param in state:
                    shards[local] = {key: local_shard(value) for key, value in state[param].items()}
                owners[local] = param
                own.append(local)
            param_group["params"] = own
        undo.note(_keep, state, shards, owners)
        optimizer.state = shards
        yield OverRanks(group)


def _keep(state: Any, shards: dict[Tensor, Any], owners: dict[Tensor, Any]) -> None:
    """Write what the step has made or replaced to the state of the whole parameters."""
    for local, after in shards.items():
        param = owners[local]
        if not after and param not in state:
            continue
        before = state[param]
        for key, value in after.items():
            if key not in before or local_shard(before[key]) is not value:
                is_part = isinstance(value, Tensor) and value.dim() and value.shape == local.shape
                before[key] = as_shard(value, param) if is_part else value
