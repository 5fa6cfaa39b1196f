"""Which sharded models a graph can hold: those that `fully_shard` has split, also where ranks have copies (HSDP)."""

from typing import Any

from torch import nn

from ..._torch.ranks.sharding import ShardedModules, copy_groups, mesh_group
from ..._torch.tensors.tensors import sharded_class


def is_sharded(model: nn.Module) -> bool:
    """Return whether a parameter of the model is split over processes."""
    kind = sharded_class()
    return any(isinstance(param, kind) for param in model.parameters())


def shard_groups(model: nn.Module) -> list[Any]:
    """Return the process groups over which the parameters are split, and over which the parts are copied, if any are.

    [] if no parameter is split, or if they are not split in one way only. The groups together connect all ranks.
    """
    kind = sharded_class()
    found = [[mesh_group(param), *copy_groups(param)] for param in model.parameters() if isinstance(param, kind)]
    alike = found and None not in found[0] and all(list(map(id, some)) == list(map(id, found[0])) for some in found)
    return found[0] if alike else []


def free_whole_parameters(model: nn.Module) -> None:
    """Give the modules of a model their sharded parameters, if a forward outside of a step has left them whole.

    Settings with which `fully_shard` keeps parameters whole are left to the user, and no graph can follow them.
    """
    modules = ShardedModules(model)
    if not modules.why_not_captured():
        modules.gather()


def refuse_sharded(where: str, model: nn.Module) -> None:
    """Raise a `NotImplementedError` if a step of this model cannot be captured because of how its parameters are split.

    `where` is the argument, and the function that the user has passed it to.
    """
    if problem := why_not_sharded(model):
        raise NotImplementedError(f"{where}: {problem} Or pass graph='off'.")


def why_not_sharded(model: nn.Module) -> str:
    """Return why a step of this model cannot be captured with its parameters split over processes, and what to write
    instead; "" if it can, or if none is split."""
    kind = sharded_class()
    modules = ShardedModules(model)
    if problem := modules.why_not_captured():
        return f"fully_shard: {problem}"
    named = dict(model.named_parameters())
    split: dict[str, Any] = {name: param for name, param in named.items() if isinstance(param, kind)}
    if not split:
        return ""
    for name, param in split.items():
        if not len(modules):
            return (
                f"parameter {name} is a DTensor placed as {param.placements}, as by parallelize_module, and no module "
                "is under fully_shard: only parameters that fully_shard splits are captured, tensor parallelism alone "
                "is not. Split the model with fully_shard instead."
            )
        mesh, placements = param.device_mesh, param.placements
        is_hybrid = mesh.ndim == 2 and placements[0].is_replicate() and placements[1].is_shard()
        if mesh.ndim > 1 and not is_hybrid:
            return (
                f"parameter {name} is a DTensor on a mesh of {mesh.ndim} dimensions, placed as {placements}: norm and "
                "overflow check are not implemented for tensor parallelism beside fully_shard. Pass fully_shard a mesh "
                "of one dimension, or for HSDP one of two, of which the first has the copies: "
                "init_device_mesh('cuda', (copies, shards))."
            )
        if not placements[-1].is_shard():
            return (
                f"parameter {name} is a DTensor with the placement {placements[0]}: only parameters that fully_shard "
                "splits are captured."
            )
    managed = set(map(id, modules.managed()))
    for name, param in named.items():
        if id(param) not in managed and (param.requires_grad or name in split):
            return (
                f"parameter {name} is not managed by fully_shard, so that no gradient of it would be averaged over the "
                "ranks. Call fully_shard(model) last, for what remains, or freeze it."
            )
    if not shard_groups(model):
        return "parameters are split over different process groups. Give each fully_shard the same mesh."
    return ""
