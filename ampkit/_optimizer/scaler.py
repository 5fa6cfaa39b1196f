"""The loss scale, kept on the device: scale, unscale, step, update. Only reads and a few optimizers wait for it."""

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from .._arguments import read_max_norm, read_positive, wrong
from .._torch.optimizers import announce_step, supports_amp_scaling
from .._undo import Undo, call
from .device_scale import DeviceScale, SkipWatch
from .device_step import (
    Prepared,
    any_found,
    can_be_prepared,
    clip_coefficient,
    clip_unscaled_,
    divide_and_clip_,
    total_norm,
)
from .rollback import StepChanges
from .scale_rule import SMALLEST, ScaleLimits, read_arguments, read_new_scale, read_number, read_state
from .scaled_step import ScaledStep
from .sharded import ONE_RANK, OverRanks, on_shards
from .step_kind import gradients, scales_in_kernel, skips_by_itself, summed_parameters, takes_scale
from .update.state_form import step_of

_WITHOUT_GRADIENT = "without gradient"  # our entry in what torch's scaler keeps per optimizer until `update`
_NO_GRADIENT = "no parameter of the optimizer has a gradient. Call scaler.scale(loss).backward() before step()."


class ScalerStats(NamedTuple):
    """The counters of a `GradScaler` as host numbers, read by `GradScaler.stats`.

    Attributes:
        steps: optimizer steps that were asked for.
        skipped: those of them that were skipped.
        scale: the loss scale.
        grad_norm: norm of the unscaled gradients of the last step before clipping, None if none was computed.
    """

    steps: int
    skipped: int
    scale: float
    grad_norm: float | None


class GradScaler(DeviceScale):
    """A `torch.amp.GradScaler` that does not wait for the device, and whose scale can be bounded.

    `step` computes the norm of the gradients. If the norm is not finite the step is skipped, on the device. How it is
    skipped depends on the optimizer:

    - `Adam`, `AdamW`, `SGD` and `Adagrad` with `fused=True`: the kernel returns without a change. Otherwise it divides
      the gradients by `scale / clip_coefficient` as it reads them. (torch 2.11 has no such Adagrad on CUDA.)
    - Any optimizer with `capturable=True`, or on the CPU with that argument, and `SGD`: the gradients are unscaled and
      clipped in one pass, and a step that must be skipped is undone bit by bit.
    - An optimizer whose `step` is not torch.optim's, a subclass included: its first steps are watched, and wait for the
      device. If they only change tensors in place, later steps are undone like those above.
    - Others (they change something on the host, or have step hooks): `found_inf` is read on the host, as torch does,
      with one warning on CUDA.

    The arguments are those of `torch.amp.GradScaler` and more. Either class loads the other's `state_dict`.

    Args:
        *args: as in torch: device, init_scale, growth_factor, backoff_factor, growth_interval, enabled.
        hysteresis: with 2, the first overflow after the scale grew does not move it, and each later one does; with 3,
            the first two do not. Steps that overflow are skipped in any case. 1 is torch's rule; Megatron-LM uses 2.
        min_scale: the scale does not fall below this. None is 2**-126, the smallest scale whose reciprocal float32
            holds. Torch's scaler has no such floor: its scale falls to 0, nothing is skipped any more, and weights
            become nan. The floor costs a kernel on one number in each `update`, and changes no bit of a scale above it.
        max_scale: the scale does not grow above this.
        dynamic: False keeps the scale constant. Steps that overflow are still skipped.
        **kwargs: as `args`, by name.

    Raises:
        ValueError: an argument has an impossible value, or two of them contradict each other; the message names them.

    Attributes:
        grad_norm: the norm of the unscaled gradients of the last `step`, before clipping: float32 (float64 if a
            gradient is), shape (), on the device. None before the first step, and where no norm was computed.
        found_inf: 1.0 if the last `step` was skipped, else 0.0: float32, shape (), on the device. None if disabled.
        steps: how many optimizer steps were asked for, float64, shape (), on the device. None before the first `scale`.
        skipped: how many of these were skipped, in a tensor of the same kind. None before the first `scale`.
    """

    def __init__(
        self,
        *args: Any,
        hysteresis: int = 1,
        min_scale: float | None = None,
        max_scale: float | None = None,
        dynamic: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(read_arguments(args, kwargs), ScaleLimits(hysteresis, min_scale, max_scale, dynamic))
        self.grad_norm: Tensor | None = None
        self._scaled_step = ScaledStep()

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which `update` grows the scale; with 1 it does not grow."""
        where = "GradScaler.set_growth_factor"
        self._growth_factor = read_number(where, "growth_factor", new_factor, argument="new_factor")

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which `update` multiplies the scale after an overflow; with 1 it does not fall."""
        where = "GradScaler.set_backoff_factor"
        self._backoff_factor = read_number(where, "backoff_factor", new_factor, argument="new_factor")

    def set_growth_interval(self, new_interval: int) -> None:
        """Set after how many iterations without an overflow the scale grows."""
        where = "GradScaler.set_growth_interval"
        self._growth_interval = read_number(where, "growth_interval", new_interval, argument="new_interval")

    def is_undecided(self) -> bool:
        """Return whether the last `step` waited for the device only to learn what the optimizer changes."""
        return self._scaled_step.undecided

    def changes_of(self, optimizer: torch.optim.Optimizer) -> StepChanges:
        """Return what is known of the tensors that an optimizer's step changes."""
        return self._scaled_step.changes_of(optimizer)

    def scale(self, outputs: Any) -> Any:
        """Return a tensor, or the tensors of an iterable, multiplied by the scale; unchanged if disabled.

        Raises:
            ValueError: `outputs` contains something else than tensors.
        """
        try:
            return super().scale(outputs)
        except (RecursionError, TypeError) as error:
            raise wrong("GradScaler.scale", "outputs", outputs, "a tensor, or an iterable of tensors") from error

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, so that they can be read or changed before `step`.

        Raises:
            ValueError: it is no optimizer.
            RuntimeError: `unscale_` or `step` was already called for it since the last `update`.
        """
        _check_optimizer("GradScaler.unscale_", optimizer)
        super().unscale_(optimizer)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        **kwargs: Any,
    ) -> float | None:
        """Unscale the gradients, clip their global norm, and step; change nothing if a gradient is not finite.

        Args:
            optimizer: its gradients are scaled, unless `unscale_(optimizer)` was called before. If the user has set
                `optimizer.grad_scale` of a fused optimizer, its gradients are divided by that tensor too, as in torch.
            *args: passed on to `optimizer.step`, as in torch.
            max_norm: clip the norm over all unscaled gradients to this; None does not clip. A fused kernel clips the
                gradients as it reads them, so `param.grad` keeps its norm.
            norm_type: order of the norm, above 0; inf is the largest magnitude.
            **kwargs: passed on to `optimizer.step`.

        Returns:
            What `optimizer.step` returned.

        Raises:
            ValueError: it is no optimizer, no parameter has a gradient, or `max_norm` or `norm_type` is not above 0. A
                fused optimizer may step without a gradient, as in torch; then `update` raises if no other optimizer
                had one.
            RuntimeError: `step` was already called for it since the last `update`, or it was given a closure.

        Sync: none, except for the last two kinds of optimizers that the class lists. A skipped step leaves parameters,
        moments and step counts as they were.
        """
        _check_optimizer("GradScaler.step", optimizer)
        max_norm = read_max_norm("GradScaler.step", max_norm)
        norm_type = read_positive("GradScaler.step", "norm_type", norm_type, "inf for the largest magnitude")
        try:
            return call(self._step, optimizer, max_norm, norm_type, args, kwargs)
        except Exception:
            raise
        except BaseException:  # an interrupt: the user's loop goes on with another iteration
            if self._enabled:
                self._per_optimizer_states.pop(id(optimizer), None)
            raise

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None,
        norm_type: float,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> float | None:
        with Undo() as undo, on_shards(optimizer) as over_ranks:
            undo.note(torch.set_grad_enabled, torch.is_grad_enabled())  # an interrupt may come within `no_grad`
            step = partial(step_of(optimizer), *args, **kwargs)
            self._scaled_step.undecided = False
            if not self._scales:
                self.grad_norm, divisor = clip_unscaled_(optimizer, max_norm, norm_type, over_ranks)
                self.found_inf = self._look([optimizer], self.grad_norm, over_ranks)
                stepped = self._step_measured(optimizer, divisor, None, step)
                self._count()
                return stepped
            first = next(iter(inspect.signature(optimizer.step).parameters), "") if args and callable(args[0]) else ""
            if "closure" in kwargs or first == "closure":
                raise RuntimeError(
                    "GradScaler.step: a closure cannot be used with an enabled scaler. Call backward() first."
                )
            state = self._per_optimizer_states[id(optimizer)]
            if state["stage"] is OptState.STEPPED:
                raise RuntimeError(
                    "GradScaler.step: step() has already been called since the last update(). Call update() once after "
                    "the steps of all optimizers, before any of them steps again."
                )
            grads = gradients(optimizer)
            if not grads and not scales_in_kernel(optimizer) and not supports_amp_scaling(optimizer):
                raise ValueError(f"GradScaler.step({type(optimizer).__name__}): {_NO_GRADIENT}")
            announce_step(optimizer)
            state[_WITHOUT_GRADIENT] = not grads
            if any(grad.is_sparse for grad in grads) or skips_by_itself(optimizer):
                return self._step_as_torch(optimizer, max_norm, norm_type, *args, **kwargs)
            self.grad_norm, self.found_inf, divisor = self._measured([optimizer], grads, norm_type, over_ranks)
            clip = None if max_norm is None else clip_coefficient(self.grad_norm, max_norm)
            stepped = self._step_measured(optimizer, divisor, clip, step)
            self._count()
            return stepped

    def step_together(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        max_norm: float | None,
        steps: Mapping[torch.optim.Optimizer, Callable[[], Any]] = MappingProxyType({}),
    ) -> None:
        """Unscale the gradients of several optimizers, clip the norm over all of them, and step each, as `step` does.

        Change nothing if a gradient of one of them is not finite. Those in `steps` step by what is there instead of by
        `optimizer.step`. Sync: as for `step`.
        """
        grads = gradients(*optimizers)
        self._scaled_step.undecided = False
        divisor = None
        if self._scales:
            for optimizer in optimizers:
                self._per_optimizer_states[id(optimizer)][_WITHOUT_GRADIENT] = not gradients(optimizer)
            self.grad_norm, self.found_inf, divisor = self._measured(optimizers, grads, 2.0, ONE_RANK)
        else:
            self.grad_norm = None if max_norm is None or not grads else total_norm(grads, grads[0].device)
            self.found_inf = self._look(optimizers, self.grad_norm)
        clip = None if self.grad_norm is None or max_norm is None else clip_coefficient(self.grad_norm, max_norm)
        for optimizer in optimizers:
            self._step_measured(optimizer, divisor, clip, steps.get(optimizer) or step_of(optimizer))
        self._count()

    def _measured(
        self, optimizers: Sequence[Any], grads: list[Tensor], norm_type: float, over_ranks: OverRanks
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return norm and `found_inf` of the unscaled gradients, and what they are still to be divided by, or None."""
        scale, _ = self._check_scale_growth_tracker("step")
        is_unscaled = self._per_optimizer_states[id(optimizers[0])]["stage"] is OptState.UNSCALED
        divisor = None if is_unscaled else scale
        optimizer, *others = optimizers
        preset = getattr(optimizer, "grad_scale", None) if not others and takes_scale(optimizer) else None
        if preset is not None:
            preset = preset.reshape(()).to(scale.device, non_blocking=True)
            divisor = preset if divisor is None else divisor * preset
        norm = total_norm(grads, scale.device, norm_type, over_ranks)
        unscaled = norm if divisor is None else norm / divisor
        if is_unscaled:
            found = self._found_in(optimizers, scale.device)
        else:  # also 1 for nan; two kernels, isfinite takes four. Made in the default dtype, which may be float64
            found = torch.where(norm < torch.inf, 0.0, 1.0).float()
        return unscaled, found, divisor

    def _step_measured(
        self, optimizer: torch.optim.Optimizer, divisor: Tensor | None, clip: Tensor | None, step: Callable[[], Any]
    ) -> float | None:
        """Step or skip, by the `found_inf` that was measured."""
        grads = gradients(optimizer)
        state: dict[str, Any] = self._per_optimizer_states[id(optimizer)] if self._scales else {}
        if self.found_inf is not None and state.get("stage") is OptState.READY:
            state["found_inf_per_device"] = {self.found_inf.device: self.found_inf} if grads else {}
        stepped = self._scaled_step.step(optimizer, grads, self.found_inf, divisor, clip, step)
        state["stage"] = OptState.STEPPED
        return stepped

    @property
    def _scales(self) -> bool:
        """Whether losses are scaled, so that gradients are still to be divided."""
        return self._enabled

    def _look(
        self, optimizers: Sequence[torch.optim.Optimizer], norm: Tensor | None, over_ranks: OverRanks = ONE_RANK
    ) -> Tensor | None:
        """Return whether to skip the step on these gradients, which are not scaled; None to do it in any case."""
        return None

    def unscale_all(self, optimizers: Sequence[torch.optim.Optimizer]) -> Tensor | None:
        """Call `unscale_` for each. Return 1.0 if a gradient is not finite, else 0.0: shape (), on the device.

        None without a loss scale. Sync: none.
        """
        for optimizer in optimizers:
            self.unscale_(optimizer)
        if not self._enabled:
            return None
        scale, _ = self._check_scale_growth_tracker("unscale_")
        return self._found_in(optimizers, scale.device)

    def _found_in(self, optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> Tensor:
        """Return 1.0 if a look at the gradients of these has found something in this iteration, else 0.0."""
        states = [self._per_optimizer_states[id(optimizer)] for optimizer in optimizers]
        return any_found((t for state in states for t in state["found_inf_per_device"].values()), device)

    def prepare(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> Prepared | None:
        """Unscale and clip the gradients, as the first half of `step`; `step_prepared` is the second half.

        Together they leave the bits that `step` leaves. The scaler keeps nothing from one to the other, so that this
        half may be in a graph, and the optimizer may step behind it.

        Args:
            optimizer: its gradients are unscaled and clipped in memory. `unscale_` may have been called for it.
            max_norm: clip the 2-norm over all unscaled gradients to this; None does not clip.

        Returns:
            What was measured; None if nothing was done, because only `step` can do it. Sync: none.
        """
        if not can_be_prepared(optimizer):
            return None
        if not self._scales:
            return self._clipped(optimizer, max_norm)
        grads = gradients(optimizer)
        norm, found_inf, divisor = self._measured([optimizer], grads, 2.0, ONE_RANK)
        clip = None if max_norm is None else clip_coefficient(norm, max_norm)
        divide_and_clip_(optimizer, grads, divisor, clip)
        return Prepared(norm, found_inf)

    def prepare_apart(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> Prepared | None:
        """Unscale the gradients, and then clip them, as a loop does that is written with torch alone.

        A fused optimizer without clipping unscales in its kernel in such a loop, too.

        Arguments are those of `prepare`. Returns what was measured; None if nothing was done, because `step` does what
        torch does. Sync: none.
        """
        grads = gradients(optimizer)
        sparse = any(grad.is_sparse for grad in grads)
        if not grads or sparse or skips_by_itself(optimizer) or (max_norm is None and takes_scale(optimizer)):
            return None
        if not self._scales:
            return self._clipped(optimizer, max_norm)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        found_inf = self._found_in([optimizer], grads[0].device)
        if max_norm is None:
            return Prepared(total_norm(grads, grads[0].device), found_inf)
        return Prepared(torch.nn.utils.clip_grad_norm_(summed_parameters(optimizer), max_norm), found_inf)

    def _clipped(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> Prepared:
        norm = None if max_norm is None else torch.nn.utils.clip_grad_norm_(summed_parameters(optimizer), max_norm)
        return Prepared(norm, self._look([optimizer], norm))

    def step_prepared(self, optimizer: torch.optim.Optimizer, found: Prepared, *args: Any) -> None:
        """Step an optimizer, or skip its step, whose gradients have been prepared by `prepare`. Sync: as for `step`.

        Args:
            optimizer: what steps.
            found: what `prepare` has returned.
            args: of `optimizer.step`, if the scaler is not enabled.
        """
        self.grad_norm, self.found_inf = found
        self._scaled_step.undecided = False
        self._step_measured(optimizer, None, None, partial(step_of(optimizer), *args))
        self._count()

    def _step_as_torch(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None, norm_type: float, *args: Any, **kwargs: Any
    ) -> float | None:
        """Step as torch's scaler does, for sparse gradients and for optimizers that skip by themselves.

        It unscales the gradients in memory and reads `found_inf` on the host.
        """
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY and (max_norm is not None or not supports_amp_scaling(optimizer)):
            self.unscale_(optimizer)
        self.grad_norm = None
        if max_norm is not None:
            self.grad_norm = torch.nn.utils.clip_grad_norm_(summed_parameters(optimizer), max_norm, norm_type)
        result = super().step(optimizer, *args, **kwargs)
        self.found_inf = self._found_in([optimizer], scale.device)
        self._count()
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale by the rule, or set it to `new_scale` (a float or a tensor of shape ()).

        The scale backs off if a step of this iteration was skipped and `hysteresis` is used up. It grows after
        `growth_interval` iterations without an overflow. It stays within `min_scale` and `max_scale`. Sync: none.

        Raises:
            ValueError: no optimizer that stepped had a gradient, or `new_scale` is no number above 0.
        """
        if not self._enabled:
            return
        try:
            new_scale = read_new_scale(new_scale, self._device)
            states = self._per_optimizer_states.values()
            if new_scale is None and states and all(state.get(_WITHOUT_GRADIENT) for state in states):
                self._per_optimizer_states.clear()
                raise ValueError(f"GradScaler.update: {_NO_GRADIENT}")
            self.watch_skips()
            if new_scale is not None:
                super().update(new_scale)
                return
            if self._limits.is_torchs_rule:
                super().update()
                self._check_scale_growth_tracker("update")[0].clamp_(min=SMALLEST)
                return
            scale, tracker = self._check_scale_growth_tracker("update")
            assert self._patience is not None  # made with the scale
            found = any_found((t for state in states for t in state["found_inf_per_device"].values()), scale.device)
            before, count = scale.clone(), tracker.clone()
            super().update()
            overflow = found > 0
            grew = ~overflow & (count + 1 == self._growth_interval)
            self._limits.apply_(scale, before, self._patience, overflow, grew)
        except Exception:
            raise
        except BaseException:
            self._per_optimizer_states.clear()  # an interrupt ends the iteration; else every later `step` raises
            raise

    def stats(self) -> ScalerStats:
        """Return the counters as host numbers. Waits for the device, once."""
        if not self._enabled or self._scale is None:
            return ScalerStats(int(self._init_counts[0]), int(self._init_counts[1]), self.get_scale(), None)
        assert self.steps is not None  # made with the scale, as the next
        assert self.skipped is not None
        norm = torch.full_like(self._scale, math.nan) if self.grad_norm is None else self.grad_norm
        packed = torch.stack([part.double() for part in (self.steps, self.skipped, self._scale, norm)])
        steps, skipped, scale, grad_norm = packed.tolist()  # sync
        return ScalerStats(int(steps), int(skipped), scale, None if self.grad_norm is None else grad_norm)

    def state_dict(self) -> dict[str, Any]:
        """Return scale, counters and rule as host numbers, {} if disabled. Waits for the device."""
        if not self._enabled:
            return {}
        stats = self.stats()
        patience = self._init_patience if self._patience is None else int(self._patience.item())
        own = {"steps": stats.steps, "skipped": stats.skipped, "_patience": patience}
        return {**super().state_dict(), **self.rule(), **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of this class or of `torch.amp.GradScaler` in place, or raise and change nothing.

        From torch's, the rest of the rule keeps its values and the counters start at 0. Does nothing if disabled.

        Raises:
            ValueError: an entry is missing, or has an impossible value. The message names it.
            RuntimeError: it is empty, as that of a disabled scaler.
        """
        if not self._enabled:
            return
        new = read_state(state_dict, self.rule())
        super().load_state_dict(new)
        self._limits = ScaleLimits(**{name: new[name] for name in ScaleLimits._fields})
        self._init_counts = (float(new["steps"]), float(new["skipped"]))
        self._init_patience = new["_patience"]
        if self.steps is not None and self.skipped is not None and self._patience is not None:
            self.steps.fill_(self._init_counts[0])
            self.skipped.fill_(self._init_counts[1])
            self._patience.fill_(self._init_patience)

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_skip_watch": None, "_scaled_step": copy.copy(self._scaled_step)}
        if self._enabled:
            own = self.state_dict()
            state["_init_counts"] = (float(own["steps"]), float(own["skipped"]))
            state["_init_patience"] = own["_patience"]
        return {**state, **dict.fromkeys(("grad_norm", "found_inf", "steps", "skipped", "_patience"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_skip_watch": SkipWatch()})


def _check_optimizer(where: str, optimizer: Any) -> None:
    """Raise a `ValueError` unless this is an optimizer. It need not inherit from torch's."""
    if not hasattr(optimizer, "param_groups") or not callable(getattr(optimizer, "step", None)):
        raise wrong(where, "optimizer", optimizer, "an optimizer, such as torch.optim.AdamW(model.parameters())")
