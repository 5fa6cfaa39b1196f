"""Checks of the arguments that `graphed_step` and `graphed` get."""

import inspect
import sys
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from .._arguments import check_at_least, check_callable, check_choice, check_instance, read_all, wrong
from .._batches.buckets import Buckets, is_auto
from .._capture.preflight.sparse_gradients import refuse_sparse, why_not_dense
from .._capture.ranks.ranks import Ranks
from .._capture.ranks.shards import free_whole_parameters
from .._errors import AmpkitWarning
from .._optimizer.nonfinite import SKIP, STOP, NonfiniteGuard
from .._optimizer.scaler import GradScaler
from .._optimizer.sharded import shard_group
from .._optimizer.step_kind import broken_kernel, parameters, skips_by_itself, why_not_called
from .._optimizer.update.state_form import StateForm
from .._precision.dtypes import as_dtype
from .._precision.module_rules import ModuleRules, why_not_applied
from .._precision.policy import Policy
from .._torch.optimizers import has_lost_fused
from .._torch.tensors.tensors import sharded_class
from .._user_line import running_place, users_level
from .observer import Observer

# What loops of torch, Lightning, transformers, accelerate and timm call the arguments of graphed_step.
NAMES_ELSEWHERE = {
    **dict.fromkeys(("accumulate_grad_batches", "accumulation_steps", "gradient_accumulation_steps"), "accumulate"),
    **dict.fromkeys(("clip", "clip_grad", "clip_grad_norm", "clip_norm", "grad_clip"), "max_norm"),
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm"), "max_norm"),
    **dict.fromkeys(("amp_dtype", "autocast", "dtype", "mixed_precision", "precision"), "policy"),
    "grad_scaler": "scaler",
    "lr_scheduler": "scheduler",
}


class Scheduler(Protocol):
    """A learning-rate scheduler of torch.optim.lr_scheduler that needs no metric."""

    def step(self) -> None:
        """Set the next learning rate."""


def read_scaler(scaler: GradScaler | None, policy: Policy | None, device: torch.device) -> GradScaler:
    """Return the given scaler, or one that is enabled if the policy needs it. Raise a `ValueError` if it is torch's."""
    if scaler is None:
        return GradScaler(device.type, enabled=policy is not None and policy.needs_scaling)
    if not isinstance(scaler, GradScaler):
        raise ValueError(
            f"graphed_step(scaler={type(scaler).__module__}.{type(scaler).__name__}): it waits for the device. Pass an "
            "ampkit.GradScaler, which takes the same arguments and loads the same state_dict."
        )
    return scaler


def read_guard(
    nonfinite: str | None,
    scaler: GradScaler,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    device: torch.device,
    after_step: object,
    ranks: Ranks,
) -> GradScaler:
    """Return what looks for gradients that are not finite: a guard if there is to be one, else the scaler.

    Raise a `ValueError` if there is a loss scale, and a `NotImplementedError` if a guard cannot see the gradients.
    """
    if nonfinite is None:
        return scaler
    check_choice("graphed_step", "nonfinite", nonfinite, (SKIP, STOP))
    where = f"graphed_step(nonfinite={nonfinite!r})"
    if scaler.is_enabled() and nonfinite == SKIP:
        raise ValueError(f"{where}: the loss scale skips such steps already. Leave out nonfinite=.")
    if scaler.is_enabled():
        raise ValueError(
            f"{where}: with a loss scale, gradients that overflow are a part of training: the step is skipped, and the "
            "scale falls. Leave out nonfinite=, or compute in bfloat16 without a scaler, policy='bfloat16'."
        )
    if problem := why_not_dense([model]):
        raise NotImplementedError(f"{where}: it does not look into sparse gradients. {problem}")
    for each in optimizers:
        if skips_by_itself(each):
            raise NotImplementedError(
                f"{where}: {type(each).__name__} looks for values that are not finite by itself, if it is given a "
                "scaler. Use AdamW, Adam or SGD with fused=True."
            )
        if any(isinstance(param, sharded_class()) for param in parameters(each)) and shard_group(each) is None:
            raise NotImplementedError(
                f"{where}: parameters are split over ranks, which would not skip together: {type(each).__name__} does "
                "not step each element by itself, or they are not split by fully_shard alone. Use AdamW, Adam or SGD."
            )
    if ranks.sharded and after_step is not None:
        raise NotImplementedError(
            f"{where}: what after_step changes is not put back under fully_shard. Call it behind the step, or leave "
            "out nonfinite=."
        )
    return NonfiniteGuard(device.type, stops=nonfinite == STOP)


def device_of(model: nn.Module, policy: Policy | None) -> torch.device:
    """Return the one device of the parameters.

    Raise a `ValueError` if the dtype of one that is trained is not the policy's. A frozen base may have any.
    """
    devices = {param.device: name for name, param in model.named_parameters()}
    if len(devices) != 1:
        found = ", ".join(f"{name} on {device}" for device, name in devices.items()) or "no parameters"
        raise ValueError(
            f"graphed_step(model): expected parameters on one device, found {found}. Use model.to(device)."
        )
    if policy is not None and policy.modules:
        if problem := why_not_applied(model, ModuleRules(policy.modules, policy.params, policy.output)):
            raise ValueError(f"graphed_step(policy={str(policy)!r}): {problem}")
    elif policy is not None:
        for name, param in model.named_parameters():
            if param.requires_grad and param.is_floating_point() and param.dtype is not policy.params:
                raise ValueError(
                    f"graphed_step(policy={str(policy)!r}): parameter {name} is {param.dtype}. "
                    f"Use model.to({policy.params}), or a policy with params={str(param.dtype).removeprefix('torch.')}."
                )
    return next(iter(devices))


def read_declared(
    modules: Sequence[nn.Module] | None, optimizers: Sequence[torch.optim.Optimizer], scaler: object
) -> tuple[Sequence[nn.Module] | None, Sequence[torch.optim.Optimizer]]:
    """Return what `graphed` was told that its function changes. Raise a `ValueError` if it is of other kinds."""
    if modules is not None:
        modules = read_all("graphed", "modules", modules, nn.Module, "a tuple of torch.nn.Module, or None to find them")
    expected = "a tuple of torch.optim.Optimizer"
    optimizers = read_all("graphed", "optimizers", optimizers, torch.optim.Optimizer, expected)
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise ValueError(
            f"graphed(scaler={type(scaler).__module__}.{type(scaler).__name__}): expected an ampkit.GradScaler, which "
            "takes the same arguments and never waits for the device."
        )
    return modules, optimizers


def device_of_all(modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> torch.device | None:
    """Return the device of the modules and of what the optimizers hold, None if there is no tensor.

    Raise a `ValueError` if they are on several ones, or if an optimizer computes wrong values.
    """
    for module in modules:
        free_whole_parameters(module)
    devices = {tensor.device for module in modules for tensor in (*module.parameters(), *module.buffers())}
    devices |= {param.device for optimizer in optimizers for param in parameters(optimizer)}
    if len(devices) > 1:
        found = ", ".join(map(str, devices))
        raise ValueError(
            "graphed(modules, optimizers): expected parameters and buffers on one device, found "
            f"{found}. Use module.to(device)."
        )
    for i, optimizer in enumerate(optimizers):
        if broken := broken_kernel(optimizer):
            raise ValueError(f"graphed(optimizers): optimizers[{i}]: {broken}")
    return devices.pop() if devices else None


def read_optimizers(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    model: nn.Module,
    max_norm: float | None,
    *,
    rounds: bool = False,
) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that were given. Raise a `ValueError` unless they can train this model.

    `rounds` says whether they step float32 copies of low-precision parameters, see `StateForm`.
    """
    given: Any = optimizer
    several = isinstance(given, (list, tuple))
    optimizers: tuple[torch.optim.Optimizer, ...] = tuple(given) if several else (given,)
    expected = "a torch.optim.Optimizer, such as torch.optim.AdamW(model.parameters(), fused=True), or a list of them"
    if not optimizers:
        raise wrong("graphed_step", "optimizer", optimizer, expected)
    known, taken = set(model.parameters()), set[Any]()
    for number, each in enumerate(optimizers):
        name = f"optimizer[{number}]" if several else "optimizer"
        check_instance("graphed_step", name, each, torch.optim.Optimizer, expected)
        if problem := why_not_called(each) or ("" if rounds else broken_kernel(each)):
            raise ValueError(f"graphed_step({name}): {problem}")
        if has_lost_fused(each):
            warnings.warn(
                f"graphed_step({name}): a state that was loaded has put fused=None over the fused=True that it was "
                "made with. Behind load_state_dict write: for group in optimizer.param_groups: group['fused'] = True.",
                AmpkitWarning,
                stacklevel=users_level(),
            )
        for i, group in enumerate(each.param_groups):
            strangers = [param for param in group["params"] if param not in known]
            if strangers:
                raise ValueError(
                    f"graphed_step({name}): param_groups[{i}] holds {len(strangers)} parameters that are not the "
                    f"model's, the first of shape {tuple(strangers[0].shape)}. Make the optimizer from "
                    "model.parameters() after model.to(device), and put parameters of the loss into the model."
                )
            if twice := [param for param in group["params"] if param in taken]:
                raise ValueError(
                    f"graphed_step({name}): param_groups[{i}] holds {len(twice)} parameters that another optimizer "
                    f"steps too, the first of shape {tuple(twice[0].shape)}. Give each parameter to one of them."
                )
        taken.update(param for group in each.param_groups for param in group["params"])
        refuse_sparse(model, each, max_norm)
        if len(optimizers) > 1 and skips_by_itself(each):
            raise ValueError(f"graphed_step({name}): {type(each).__name__} skips by itself, which only one alone can.")
    return optimizers


def read_schedulers(
    where: str, scheduler: Any, optimizers: Sequence[torch.optim.Optimizer] | None
) -> tuple[Scheduler, ...]:
    """Return the schedulers that were given. Raise a `ValueError` unless they are for these optimizers, if known."""
    if scheduler is None:
        return ()
    schedulers = tuple(scheduler) if isinstance(scheduler, (list, tuple)) else (scheduler,)
    for each in schedulers:
        if isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError(
                f"{where}(scheduler=ReduceLROnPlateau): it needs a metric; call its step(metric) yourself."
            )
        if isinstance(each, type) or not callable(getattr(each, "step", None)):
            has_step = "an object with a method step(), as in torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n)"
            raise wrong(where, "scheduler", each, f"{has_step}, a list of them, or None")
        if optimizers is None:
            continue
        if not optimizers:
            raise ValueError(
                f"{where}(scheduler={type(each).__name__}): there is no optimizer behind whose steps it could be "
                "stepped. Pass the one that the function steps in optimizers=(...), or step it yourself."
            )
        other = getattr(each, "optimizer", None)
        known = [optimizer.param_groups for optimizer in optimizers]
        if isinstance(other, torch.optim.Optimizer) and not any(other.param_groups is groups for groups in known):
            raise ValueError(
                f"{where}(scheduler={type(each).__name__}): it was made for another {type(other).__name__}, so "
                "it would not change the rates of this optimizer. Make it from the optimizer that you pass."
            )
    return schedulers


def with_optimizers_of(
    schedulers: Sequence[Scheduler], optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[torch.optim.Optimizer, ...]:
    """Return these optimizers, and those of the schedulers that are not among them."""
    known = [*optimizers]
    for own in (getattr(each, "optimizer", None) for each in schedulers):
        if isinstance(own, torch.optim.Optimizer) and all(own.param_groups is not each.param_groups for each in known):
            known.append(own)
    return tuple(known)


def read_state_form(
    where: str,
    moments: object,
    policy: Policy | None,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    has_copies: bool = False,
) -> StateForm | None:
    """Return in which form the optimizers keep weights and state, None if as torch's.

    `has_copies` says whether other ranks have the same parameters, which all have to step alike. Raises a `ValueError`
    or a `NotImplementedError` if they cannot step in it, and warns if the second moment could not fall.
    """
    if moments is not None and as_dtype(moments) is not torch.bfloat16:
        raise wrong(where, "moments", moments, "'bfloat16', or None for the dtype of the parameters")
    rounding = None if policy is None else policy.rounding
    if moments is None and rounding is None:
        return None
    form = StateForm(moments is not None, rounding)
    given = f"{where}({f'moments={moments!r}' if rounding is None else f'policy=Policy(rounding={rounding!r})'})"
    if has_copies and rounding == "stochastic":
        raise NotImplementedError(
            f"{given}: several ranks have the same weights (DistributedDataParallel, or a mesh with copies). They draw "
            "other random bits, so that these would differ. Pass rounding='kahan', or split all by fully_shard."
        )
    for optimizer in optimizers:
        if problem := form.why_not(optimizer):
            raise ValueError(f"{given}: {problem}.")
        if beta := form.never_falls(optimizer):
            warnings.warn(
                f"{given}: with betas=(..., {beta}) the average of squared gradients changes by less per step than "
                "rounding to nearest in bfloat16 undoes, so that it grows and never falls. Pass "
                "betas=(0.9, 0.95), or up to 0.996; or Policy(params='bfloat16', rounding='stochastic').",
                AmpkitWarning,
                stacklevel=users_level(),
            )
    return form


def read_buckets(where: str, buckets: object) -> Buckets | None:
    """Return how batches are padded. Raise a `ValueError` if it cannot be told."""
    if isinstance(buckets, str) and buckets == "auto":
        return Buckets("auto", "auto")
    if buckets is None or isinstance(buckets, Buckets):
        return buckets
    raise wrong(where, "buckets", buckets, "ampkit.Buckets(batch=(16, 32, 64)), 'auto' or None")


def read_given_buckets(buckets: object) -> Buckets | None:
    """Return how the arguments of `graphed` are padded. Raise a `ValueError` unless its sizes are given."""
    found = read_buckets("graphed", buckets)
    if found is not None and is_auto(found.batch):
        raise ValueError(
            f"graphed(buckets={found}): a function may return several losses, or none, so that it cannot be told "
            "whether they see the padding, as graphed_step does before it pads to sizes of its choice. Pass sizes: "
            "buckets=Buckets(batch=(16, 32), length=(128, 256))."
        )
    return found


def hint_at_one_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any) -> None:
    """Warn where a line makes a second step of a model, an optimizer and a loss, as in a function for one epoch."""
    made = _made.setdefault(model, set())
    this = weakref.ref(optimizer), getattr(loss_fn, "__code__", type(loss_fn)), running_place(sys._getframe(1))
    if this in made:
        warnings.warn(_MADE_AGAIN, AmpkitWarning, stacklevel=users_level())
    made.add(this)


_made: "weakref.WeakKeyDictionary[nn.Module, set[tuple[Any, ...]]]" = weakref.WeakKeyDictionary()
_MADE_AGAIN = (
    "graphed_step: there was a step of this model, this optimizer and this loss before. Each one warms up, captures "
    "graphs of its own, and begins with its own loss scale. Make it once, in front of the loop over epochs, and pass "
    "it on."
)


def check_kinds(
    model: object,
    loss_fn: Any,
    accumulate: object,
    after_every: object,
    buckets: object,
    numerics: object,
    before_step: object,
) -> None:
    """Raise a `ValueError` unless these arguments are of the kinds that they must be."""
    expected = "a torch.nn.Module. The order is (loss_fn, model, optimizer)"
    check_instance("graphed_step", "model", model, nn.Module, expected)
    check_at_least("graphed_step", "accumulate", accumulate, 1, "the number of calls per optimizer step")
    check_at_least("graphed_step", "after_every", after_every, 1, "the number of optimizer steps")
    check_callable("graphed_step", "loss_fn", loss_fn, "loss_fn(model, *batch) that returns the loss")
    if before_step is not None:
        check_callable("graphed_step", "before_step", before_step, "a function of the model, or None")
    if isinstance(buckets, Buckets):
        check_takes_mask("graphed_step", "loss_fn", loss_fn, buckets.mask, "model, ...")
    if numerics is not None and not isinstance(numerics, Observer):
        expected = "what ampkit.debug.numerics(model, every=100) returned, or None"
        raise wrong("graphed_step", "numerics", numerics, expected)


def check_takes_mask(where: str, name: str, fn: Any, mask: str, others: str) -> None:
    """Raise a `ValueError` unless a function takes the mask of `Buckets`, beside its other arguments."""
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # some functions of C have none
        return
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = parameters.get(mask)
    if not takes_all and (named is None or named.kind not in (named.KEYWORD_ONLY, named.POSITIONAL_OR_KEYWORD)):
        raise ValueError(
            f"{where}(buckets=...): {name} has no argument {mask!r}, by which it gets the mask of real samples. Write "
            f"{name}({others}, *, {mask}), and leave out the padding: (losses * {mask}).sum() / {mask}.sum()."
        )
