"""The copy of a model that is forecast under `fully_shard`: it is split by the user's own function."""

from collections.abc import Callable

import torch
from torch import nn

from ..._arguments import check_at_least, check_callable, wrong
from ..._capture.ranks.shards import is_sharded
from ..._torch.ranks.fake_ranks import real_values
from ..._torch.ranks.sharding import ShardedModules


def check_shard(model: nn.Module, shard: object, ranks: object) -> None:
    """Raise a `ValueError` for a model that is split already, or arguments of `forecast` with which none can be."""
    if is_sharded(model) or len(ShardedModules(model)):
        raise ValueError(
            "debug.forecast(model): it is under fully_shard, and such a model cannot be copied. Pass the model as it "
            "was before, and the function that calls fully_shard on its blocks and on the model: "
            "debug.forecast(loss_fn, model, optimizer, batch, shard=wrap, ranks=8). Or record a step: "
            "ampkit.debug.memory(...)."
        )
    if shard is None and ranks is None:
        return
    if shard is None:
        raise wrong("debug.forecast", "ranks", ranks, "shard=... beside it, a function that calls fully_shard")
    check_callable("debug.forecast", "shard", shard, "shard(model) that calls fully_shard on modules of the model")
    check_at_least("debug.forecast", "ranks", ranks, 1, "over how many ranks shard=... splits the model")
    if not torch.distributed.is_available():
        raise ValueError("debug.forecast(shard=...): this torch was built without torch.distributed. Use one with it.")
    if torch.distributed.is_initialized():
        raise ValueError(
            "debug.forecast(shard=...): this process has a process group, and the forecast needs one of its own. Call "
            "it before init_process_group, or in a process by itself, without torchrun."
        )


def apply_shard(model: nn.Module, shard: Callable[[nn.Module], object], device: str) -> None:
    """Have the user's function put the fake copy of a model under `fully_shard`.

    Raises a `ValueError` if it has wrapped nothing, or if the parameters are not the same ones, or elsewhere.
    """
    shapes = [param.shape for param in model.parameters()]
    with real_values():
        shard(model)
    modules = ShardedModules(model)
    if not len(modules):
        raise ValueError(
            "debug.forecast(shard=...): it has not called fully_shard on the model that it was given, or on one of its "
            "modules. Write shard=lambda model: fully_shard(model), for example."
        )
    if [param.shape for param in model.parameters()] != shapes:
        raise ValueError(
            "debug.forecast(shard=...): the model has other parameters afterwards, or in another order, so the "
            "optimizer cannot be copied. Change the model before you make its optimizer. shard may only wrap modules."
        )
    for name, param in model.named_parameters():
        if param.device.type != device:
            raise ValueError(
                f"debug.forecast(device={device!r}, shard=...): {name} is on {param.device} afterwards. Let shard make "
                f"no mesh, or init_device_mesh({device!r}, ...), and use no CPUOffloadPolicy."
            )
    modules.keep_shards()
