"""Which training step a value of `compile=` asks for, and which models can be compiled."""

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..._arguments import check_choice
from ..._capture.engine.options import Options
from ..._capture.ranks.reducers import why_not_compiled
from ..._capture.ranks.shards import is_sharded, why_not_sharded
from ..._torch.compile import compiled_part
from ..training_step import TrainingStep
from .compiled import CompiledTrainingStep
from .compiled_shards import ShardedCompiledStep

COMPILE = ("default", "max")
_COMPILED_WARMUP = 3  # calls: one is not compiled, one compiles, one is the rehearsal


def check_compile(where: str, compile: object, model: nn.Module, loss_fn: object, observer: object) -> None:
    """Raise a `ValueError` or a `NotImplementedError` unless a step can be compiled, or is not to be."""
    if compile is None:
        return
    check_choice(where, "compile", compile, COMPILE)
    _refuse_compiled(where, compile, {"model": model}, "loss_fn", loss_fn)
    if problem := why_not_compiled(model) or (why_not_sharded(model) if is_sharded(model) else ""):
        raise NotImplementedError(f"{where}(compile={compile!r}): {problem} Or pass compile=None.")
    if observer is not None:
        raise NotImplementedError(
            f"{where}(compile={compile!r}, numerics=...): compiled code has no modules whose outputs could be "
            "measured. Pass compile=None while you measure."
        )


def check_compiled_modules(
    where: str, compile: object, modules: Mapping[str, nn.Module], name: str, function: object
) -> None:
    """Raise a `ValueError` or a `NotImplementedError` unless the modules of a function can be compiled."""
    if not modules:
        raise ValueError(
            f"{where}(compile={compile!r}): modules=() declares no module that could be compiled. Pass those that the "
            "function calls, or compile=None."
        )
    _refuse_compiled(where, compile, modules, name, function)
    inside = [part for module in modules.values() for part in module.modules()]
    if any(isinstance(part, DistributedDataParallel) for part in inside) or any(map(is_sharded, modules.values())):
        raise NotImplementedError(
            f"{where}(compile={compile!r}): modules under DistributedDataParallel or fully_shard are compiled by "
            "graphed_step alone. Use that, or pass compile=None."
        )


def _refuse_compiled(
    where: str, compile: object, modules: Mapping[str, nn.Module], name: str, function: object
) -> None:
    if part := compiled_part(modules, name, function):
        raise ValueError(
            f"{where}(compile={compile!r}): {part} is compiled already. Pass it as it was before torch.compile, or "
            "compile=None."
        )


def step_maker(compile: str | None, options: Options, *, sharded: bool) -> Callable[..., TrainingStep]:
    """Return what makes the step. `sharded` says whether the model is under `fully_shard`."""
    if compile is None:
        return TrainingStep
    raises = options.on_failure == "raise"
    kind = ShardedCompiledStep if sharded else CompiledTrainingStep
    return partial(kind, compile=compile, raises=raises, generators=options.generators)


def warmup_of(warmup: int, compile: str | None) -> int:
    """Return how many warm-up calls there are. What is no number above 0 is refused later."""
    if compile is None or not isinstance(warmup, int) or warmup <= 0:
        return warmup
    return max(warmup, _COMPILED_WARMUP)
