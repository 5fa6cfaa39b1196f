"""The loss scale, kept on the device: scale, unscale, clip, skip, update. Never reads a tensor from the host."""

import inspect
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import grad_scaler as upstream
from torch.amp.grad_scaler import OptState
from torch.nn.parameter import is_lazy

from .._arguments import read_positive, wrong
from .._errors import AmpkitWarning, CaptureError
from .._torch.optimizers import supports_amp_scaling
from .._torch.streams import is_capturing
from .._torch.tensors import foreach_add_
from .._undo import Undo, call
from .._user_line import users_level
from .device_step import (
    clip_coefficient,
    gradients,
    is_one_pass,
    is_revocable,
    kernel_scaling,
    multiply_,
    revocable_step,
    runs_beside_step,
    seed_momentum,
    skips_by_itself,
    step_clipped,
    takes_scale,
    torch_class,
    total_norm,
    undoable_step,
)
from .rollback import StepChanges
from .scale_rule import SMALLEST, check_limits, read_arguments, read_number, read_state
from .skip_watch import SkipWatch


class ScalerStats(NamedTuple):
    """What `GradScaler.stats` returns: host numbers.

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


class GradScaler(upstream.GradScaler):
    """A `torch.amp.GradScaler` that never waits for the device, and whose rule can be bounded.

    `step` reads the gradients once, for their norm; a norm that is not finite skips the step, on the device:

    - `Adam`, `AdamW`, `SGD` and (CPU only) `Adagrad` with `fused=True`: the kernel itself returns without a change, and
      otherwise divides by `scale / clip_coefficient` as it reads the gradients.
    - Any optimizer with `capturable=True`, and `SGD`: the gradients are unscaled and clipped in one pass, and the step
      is undone bit by bit (`_optim.revocable_step`).
    - An optimizer whose `step` is not torch.optim's, a subclass included: its first steps are watched, and wait for the
      device. If they change tensors alone, in place, then a step is undone like those above.
    - Others (they change something on the host, or have step hooks): `found_inf` is read on the host, as torch does,
      with one warning on CUDA.

    Takes the arguments of `torch.amp.GradScaler`, and exchanges `state_dict` with it in both directions.

    Args:
        *args: as in torch: device, init_scale, growth_factor, backoff_factor, growth_interval, enabled.
        hysteresis: how many overflows since the scale last grew it takes to back off; from then on each one does.
            They are skipped all the same. 1 is torch's rule; Megatron-LM uses 2.
        min_scale: the scale does not fall below this. None is 2**-126, the smallest whose reciprocal float32 holds.
            Torch's scaler has no floor: its scale falls to 0, at which nothing is skipped and weights become nan. Ours
            costs a kernel on one number in each `update`, and changes no bit of a scale above it.
        max_scale: the scale does not grow above this.
        dynamic: False keeps the scale constant. Steps that overflow are still skipped.
        **kwargs: as `args`, by name.

    Raises:
        ValueError: an argument that is no number that it could be, or a rule that contradicts itself; the message names
            the argument.

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
        super().__init__(**read_arguments(args, kwargs))
        self._hysteresis, self._min_scale, self._max_scale, self._dynamic = hysteresis, min_scale, max_scale, dynamic
        self.grad_norm: Tensor | None = None
        self.found_inf: Tensor | None = None
        self.steps: Tensor | None = None
        self.skipped: Tensor | None = None
        self._patience: Tensor | None = None  # overflows left until the scale backs off
        self._init_counts = (0.0, 0.0)
        self._init_patience = hysteresis
        self._skip_watch: SkipWatch | None = SkipWatch()
        self._warned = False
        self._undecided = False  # whether the last step was watched, or was to be
        self._changes: weakref.WeakKeyDictionary[torch.optim.Optimizer, StepChanges] | None = None  # not of torch.optim
        if self._enabled:
            self._check_rule()
            self._init_patience = self._hysteresis

    def _check_rule(self) -> None:
        check_limits("GradScaler", self._min_scale, self._max_scale)
        for name in ("hysteresis", "min_scale", "max_scale", "dynamic"):
            setattr(self, f"_{name}", read_number("GradScaler", name, self.rule()[name]))
        low, high = self._bounds()
        if not low <= self._init_scale <= high:
            raise ValueError(
                f"GradScaler(init_scale={self._init_scale!r}): it lies outside min_scale={self._min_scale!r} and "
                f"max_scale={self._max_scale!r}."
            )

    def _bounds(self) -> tuple[float, float]:
        low = SMALLEST if self._min_scale is None else max(self._min_scale, SMALLEST)
        # A number may be larger than float32 has, and yet be rounded to its largest one; torch refuses such a bound.
        return low, math.inf if self._max_scale is None else min(self._max_scale, torch.finfo(torch.float32).max)

    def set_growth_factor(self, new_factor: float) -> None:
        """Set by what `update` multiplies the scale; 1 keeps it from growing."""
        where = "GradScaler.set_growth_factor"
        self._growth_factor = read_number(where, "growth_factor", new_factor, argument="new_factor")

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set by what `update` multiplies the scale after an overflow; 1 keeps it from falling."""
        where = "GradScaler.set_backoff_factor"
        self._backoff_factor = read_number(where, "backoff_factor", new_factor, argument="new_factor")

    def set_growth_interval(self, new_interval: int) -> None:
        """Set how many iterations without an overflow it takes for the scale to grow."""
        where = "GradScaler.set_growth_interval"
        self._growth_interval = read_number(where, "growth_interval", new_interval, argument="new_interval")

    def rule(self) -> dict[str, Any]:
        """Return what decides how the scale moves, by name: host values, which a captured step has frozen."""
        return {
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "hysteresis": self._hysteresis,
            "min_scale": self._min_scale,
            "max_scale": self._max_scale,
            "dynamic": self._dynamic,
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return scale and counters by name, {} before the first `scale`. Aliasing: the live tensors."""
        named = {
            "scale": self._scale,
            "growth_tracker": self._growth_tracker,
            "steps": self.steps,
            "skipped": self.skipped,
            "patience": self._patience,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        # float64, so that `+= found_inf` is one kernel and counts are exact to 2**53.
        self.steps, self.skipped = (torch.full((), n, dtype=torch.float64, device=dev) for n in self._init_counts)
        self._patience = torch.full((), self._init_patience, dtype=torch.int32, device=dev)
        super()._lazy_init_scale_growth_tracker(dev)  # last: where there is a scale, there are the others

    def is_undecided(self) -> bool:
        """Return whether the last `step` waited for the device only to learn what the optimizer changes."""
        return self._undecided

    def materialize(self, device: torch.device) -> None:
        """Create scale and counters on `device` now rather than in the first `scale`.

        Inside a capture their fill would become part of the graph and reset the scale in every replay.
        """
        if self._enabled and self._scale is None:
            self._lazy_init_scale_growth_tracker(device)

    def scale(self, outputs: Any) -> Any:
        """Return a tensor, or each of those in an iterable, multiplied by the scale; as it is if disabled.

        Raises:
            ValueError: there is something else than tensors.
        """
        try:
            return super().scale(outputs)
        except (RecursionError, TypeError) as error:
            raise wrong("GradScaler.scale", "outputs", outputs, "a tensor, or an iterable of tensors") from error

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, before `step`, for whoever reads or changes them there.

        Raises:
            ValueError: it is no optimizer.
            RuntimeError: it was called already since the last `update`, or behind `step`.
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
            optimizer: its gradients are scaled, or unscaled by `unscale_(optimizer)` before. A tensor that the user put
                in `optimizer.grad_scale` divides the gradients of a fused optimizer too, as in torch.
            *args: passed on to `optimizer.step`, as in torch.
            max_norm: clip the norm of all unscaled gradients to this; None does not clip. Where it is folded into a
                fused kernel, `param.grad` keeps its norm.
            norm_type: order of the norm, above 0; inf is the largest magnitude.
            **kwargs: passed on to `optimizer.step`.

        Returns:
            What `optimizer.step` returned.

        Raises:
            ValueError: no optimizer, no gradient, or a `max_norm` or `norm_type` not above 0. A fused optimizer may
                step without, as in torch; then `update` raises if no other optimizer had a gradient.
            RuntimeError: a second `step` without `update` in between, or a closure.

        Sync: none but for the last two kinds of optimizers above. A skipped step leaves parameters, moments and step
        counts as they were.
        """
        _check_optimizer("GradScaler.step", optimizer)
        if max_norm is not None:
            max_norm = read_positive("GradScaler.step", "max_norm", max_norm, "None to disable clipping")
        norm_type = read_positive("GradScaler.step", "norm_type", norm_type, "inf for the largest magnitude")
        try:
            return call(self._step, optimizer, max_norm, norm_type, args, kwargs)
        except Exception:
            raise
        except BaseException:  # an interrupt, behind which the loop begins another iteration
            if self._enabled:
                self._per_optimizer_states.pop(id(optimizer), None)
            raise

    def _step(self, *arguments: Any) -> float | None:
        with Undo() as undo:
            undo.note(torch.set_grad_enabled, torch.is_grad_enabled())  # for an interrupt within `no_grad`
            return self._take_step(*arguments)

    def _take_step(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None,
        norm_type: float,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> float | None:
        if not self._enabled:
            result, self.grad_norm = step_clipped(optimizer, max_norm, norm_type, *args, **kwargs)
            return result  # type: ignore[no-any-return]  # the optimizer's own type
        _refuse_closure(optimizer, args, kwargs)
        self._undecided = False
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("GradScaler.step: step() has already been called since the last update().")
        grads = gradients(optimizer)
        if not grads and not is_one_pass(optimizer) and not supports_amp_scaling(optimizer):
            raise ValueError(f"GradScaler.step({type(optimizer).__name__}): {_NO_GRADIENT}")
        state[_WITHOUT_GRADIENT] = not grads
        if any(grad.is_sparse for grad in grads) or skips_by_itself(optimizer):
            return self._step_as_torch(optimizer, max_norm, norm_type, *args, **kwargs)
        divisor = self._check(optimizer, grads, state, norm_type)
        stepped = self._step_on_device(optimizer, grads, divisor, max_norm, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        self._count()
        return stepped

    def _check(self, optimizer: Any, grads: list[Tensor], state: dict[str, Any], norm_type: float) -> Tensor | None:
        """Set `grad_norm` and `found_inf`; return what the gradients are still to be divided by."""
        scale, _ = self._check_scale_growth_tracker("step")
        unscaled = state["stage"] is OptState.UNSCALED
        divisor = None if unscaled else scale
        preset = getattr(optimizer, "grad_scale", None) if takes_scale(optimizer) else None
        if preset is not None:
            preset = preset.reshape(()).to(scale.device, non_blocking=True)
            divisor = preset if divisor is None else divisor * preset
        norm = total_norm(grads, scale.device, norm_type)
        self.grad_norm = norm if divisor is None else norm / divisor
        if unscaled:
            self.found_inf = _any_device(state["found_inf_per_device"], scale.device)
        else:
            found = torch.where(norm < torch.inf, 0.0, 1.0)  # also 1 for nan; two kernels, isfinite takes four
            self.found_inf = found.float()  # made in the default dtype, which may be float64
            state["found_inf_per_device"] = {scale.device: self.found_inf} if grads else {}
        return divisor

    def _step_on_device(
        self,
        optimizer: torch.optim.Optimizer,
        grads: list[Tensor],
        divisor: Tensor | None,
        max_norm: float | None,
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        assert self.found_inf is not None  # set by _check
        if max_norm is not None:
            assert self.grad_norm is not None  # set by _check where there is a max_norm
            coefficient = clip_coefficient(self.grad_norm, max_norm)
            # nan or 0 comes from a norm that is not finite: the step is skipped, but the divisor must stay a number.
            coefficient = torch.where(coefficient > 0, coefficient, 1.0)
            divisor = coefficient.reciprocal() if divisor is None else divisor / coefficient
        scalable = takes_scale(optimizer) and (is_one_pass(optimizer) or max_norm is None)
        if divisor is not None and (not scalable or divisor.dtype is not torch.float32):  # which is what kernels take
            multiply_(grads, divisor.reciprocal())
            divisor = None
        if not takes_scale(optimizer):
            return self._skip_or_step(optimizer, grads, *args, **kwargs)
        stepped: float | None = None
        with kernel_scaling(optimizer, divisor, self.found_inf):
            if not is_one_pass(optimizer):
                stepped = self._skip_or_step(optimizer, grads, *args, **kwargs)
            elif seed_momentum(optimizer) or not self.found_inf.item():  # sync: only for a first step with dampening
                stepped = optimizer.step(*args, **kwargs)
        return stepped

    def _skip_or_step(
        self, optimizer: torch.optim.Optimizer, grads: list[Tensor], *args: Any, **kwargs: Any
    ) -> float | None:
        """Step, and undo it on the device if a gradient is not finite; where that cannot be, ask the host first."""
        assert self.found_inf is not None  # set by _check
        changes: StepChanges | None = None
        stepped: float | None = None
        if not takes_scale(optimizer) and (hidden := runs_beside_step(optimizer)):
            reason = f"has {hidden}, which must not run in a skipped step"
        elif torch_class(optimizer) is None:
            changes = self._changes_of(optimizer)
            changed, reason = changes.known(optimizer), changes.incomplete
            self._undecided = changed is None and not reason
            if changed is not None:
                return undoable_step(optimizer, self.found_inf, changed, *args, **kwargs)
        elif not seed_momentum(optimizer):
            reason = ""  # In its first step SGD ignores dampening, and only from the second step on can it be undone.
        elif is_revocable(optimizer):
            return revocable_step(optimizer, self.found_inf, *args, **kwargs)
        else:
            reason = "keeps its step count on the host"
        if is_capturing():
            reason = reason or "has not been watched enough to know what it changes"
            raise CaptureError(f"GradScaler.step: {type(optimizer).__name__} {reason}. {_IN_PLACE}")
        if reason:
            self._warn_of_read(optimizer, grads, reason)
        if not self.found_inf.item():  # sync
            stepped = optimizer.step(*args, **kwargs) if changes is None else changes.watch(optimizer, args, kwargs)
        return stepped

    def _changes_of(self, optimizer: torch.optim.Optimizer) -> StepChanges:
        if self._changes is None:
            self._changes = weakref.WeakKeyDictionary()  # made late: a scaler is copied and pickled without
        return self._changes.setdefault(optimizer, StepChanges())

    def _warn_of_read(self, optimizer: torch.optim.Optimizer, grads: list[Tensor], reason: str) -> None:
        if self._warned or not any(grad.is_cuda for grad in grads):
            return
        self._warned = True
        can = [word for word in ("fused", "capturable") if all(word in group for group in optimizer.param_groups)]
        name = type(optimizer).__name__
        remedy = f"Write {name}(..., {can[0]}=True)" if can else "AdamW(..., fused=True) can be"
        if not takes_scale(optimizer) and runs_beside_step(optimizer):
            remedy = "Call after the step what should run there"
        elif torch_class(optimizer) is None:
            remedy = _IN_PLACE.removesuffix(".")
        message = (
            f"GradScaler.step({name}): {name} {reason}; it cannot be skipped on the device, so every step waits for it."
            f" {remedy}."
        )
        warnings.warn(message, AmpkitWarning, stacklevel=users_level())

    def _step_as_torch(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None, norm_type: float, *args: Any, **kwargs: Any
    ) -> float | None:
        """Unscale in memory, read `found_inf` on the host: for sparse gradients and for amp support of other makers."""
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY and (max_norm is not None or not supports_amp_scaling(optimizer)):
            self.unscale_(optimizer)
        self.grad_norm = None
        if max_norm is not None:
            params = (p for group in optimizer.param_groups for p in group["params"])
            self.grad_norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        result = super().step(optimizer, *args, **kwargs)
        self.found_inf = _any_device(state["found_inf_per_device"], scale.device)
        self._count()
        return result

    def _count(self) -> None:
        assert self.found_inf is not None  # set by step
        assert self.steps is not None  # made with the scale, as the next
        assert self.skipped is not None
        foreach_add_([self.steps, self.skipped], [torch.ones_like(self.found_inf), self.found_inf])

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale by the rule, or set it to `new_scale` (a float or a tensor of shape ()).

        Back off if a step of this iteration was skipped and `hysteresis` is used up; grow after `growth_interval`
        iterations without an overflow; stay within `min_scale` and `max_scale`. Sync: none.

        Raises:
            ValueError: optimizers stepped, and none of them had a gradient; or `new_scale` is no number above 0.
        """
        try:
            if self._enabled:
                self._update(new_scale)
        except Exception:
            raise
        except BaseException:
            if self._enabled:
                self._per_optimizer_states.clear()  # an interrupt ends the iteration, or every later `step` would raise
            raise

    def _update(self, new_scale: float | Tensor | None) -> None:
        if new_scale is not None and not isinstance(new_scale, Tensor):
            new_scale = read_number("GradScaler.update", "scale", new_scale, argument="new_scale")
        elif new_scale is not None and not self._is_scale(new_scale):
            expected = f"a number above 0, or a tensor of one element on {self._device} without grad"
            raise wrong("GradScaler.update", "new_scale", new_scale, expected)
        states = self._per_optimizer_states.values()
        if new_scale is None and states and all(state.get(_WITHOUT_GRADIENT) for state in states):
            self._per_optimizer_states.clear()
            raise ValueError(f"GradScaler.update: {_NO_GRADIENT}")
        self.watch_skips()
        if new_scale is not None:
            super().update(new_scale)
            return
        if self._plain():
            super().update()
            self._check_scale_growth_tracker("update")[0].clamp_(min=SMALLEST)
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        assert self._patience is not None  # made with the scale
        found = _any_device(self._found_in_all(), scale.device)
        before, count = scale.clone(), tracker.clone()
        super().update()
        overflow = found > 0
        self._patience.sub_(overflow.int())  # may fall below 0: only its sign counts
        scale.copy_(torch.where(overflow & (self._patience > 0), before, scale))
        grew = ~overflow & (count + 1 == self._growth_interval)
        self._patience.copy_(torch.where(grew, self._hysteresis, self._patience))
        scale.clamp_(*self._bounds()) if self._dynamic else scale.copy_(before)

    def _is_scale(self, new: Tensor) -> bool:
        one = not is_lazy(new) and new.numel() == 1 and new.layout is torch.strided and not new.is_complex()
        return one and new.device.type == self._device and not new.requires_grad

    def _plain(self) -> bool:
        return self._dynamic and self._hysteresis == 1 and self._min_scale is None and self._max_scale is None

    def _found_in_all(self) -> dict[Any, Tensor]:
        states = self._per_optimizer_states.items()
        return {(key, dev): t for key, state in states for dev, t in state["found_inf_per_device"].items()}

    def watch_skips(self) -> None:
        """Warn, once, if the last 50 steps were all skipped. `update` does it, and a graphed step after a replay.

        Sync: none. The counters are copied to the host every 25 calls, and looked at in a later call.
        """
        if self._skip_watch is None or self.steps is None or self.skipped is None or is_capturing():
            return
        if count := self._skip_watch.look(self.steps, self.skipped):
            message = (
                f"GradScaler: the last {count} optimizer steps were all skipped, because a gradient was not finite in "
                "each, so the weights do not change any more. No scale helps where the loss or a weight is nan or inf: "
                "look at them, or at the first layer that overflows (ampkit.debug.numerics)."
            )
            warnings.warn(message, AmpkitWarning, stacklevel=users_level())

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Context in which `update` leaves `watch_skips` to the caller: what is captured must be what runs eagerly."""
        with Undo() as undo:
            undo.note(setattr, self, "_skip_watch", self._skip_watch)
            self._skip_watch = None
            yield

    def forgetting(self) -> Callable[[], None]:
        """Return what forgets each `step` and `unscale_` from now on that no `update` has followed: for a call that
        does not come to its end."""
        before = {key: dict(state) for key, state in self._per_optimizer_states.items()} if self._enabled else {}

        def forget() -> None:
            if not self._enabled:
                return
            self._per_optimizer_states.clear()
            self._per_optimizer_states.update(before)

        return forget

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
        """Return torch's entries, the counters and the rest of the rule, as host numbers. Empty if disabled. Waits."""
        if not self._enabled:
            return {}
        stats = self.stats()
        patience = self._init_patience if self._patience is None else int(self._patience.item())
        own = {"steps": stats.steps, "skipped": stats.skipped, "_patience": patience}
        return {**super().state_dict(), **self.rule(), **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of this class or of `torch.amp.GradScaler`, in place: the whole of it or nothing.

        What torch's does not have keeps its value (the rule) or starts anew (the counters). Does nothing if disabled.

        Raises:
            ValueError: an entry is missing, or is no number that it could be. The message names it.
            RuntimeError: it is empty, as that of a disabled scaler.
        """
        if not self._enabled:
            return
        new = read_state(state_dict, self.rule())
        super().load_state_dict(new)
        for name in ("hysteresis", "min_scale", "max_scale", "dynamic"):
            setattr(self, f"_{name}", new[name])
        self._init_counts = (float(new["steps"]), float(new["skipped"]))
        self._init_patience = new["_patience"]
        if self.steps is not None and self.skipped is not None and self._patience is not None:
            self.steps.fill_(self._init_counts[0])
            self.skipped.fill_(self._init_counts[1])
            self._patience.fill_(self._init_patience)

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_skip_watch": None}
        if self._enabled:
            own = self.state_dict()
            state["_init_counts"] = (float(own["steps"]), float(own["skipped"]))
            state["_init_patience"] = own["_patience"]
        return {**state, **dict.fromkeys(("grad_norm", "found_inf", "steps", "skipped", "_patience", "_changes"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_skip_watch": SkipWatch()})


def _check_optimizer(where: str, optimizer: Any) -> None:
    """Raise a `ValueError` unless this is an optimizer, of torch or of another maker."""
    if not hasattr(optimizer, "param_groups") or not callable(getattr(optimizer, "step", None)):
        raise wrong(where, "optimizer", optimizer, "an optimizer, such as torch.optim.AdamW(model.parameters())")


_IN_PLACE = "Keep its state in tensors on the device, and change them in place (copy_, add_)."
_WITHOUT_GRADIENT = "without gradient"  # in what is kept per optimizer until `update`
_NO_GRADIENT = "no parameter of the optimizer has a gradient. Call scaler.scale(loss).backward() before step()."


def _refuse_closure(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = "closure" in kwargs
    if args and callable(args[0]):
        given = given or next(iter(inspect.signature(optimizer.step).parameters), "") == "closure"
    if given:
        raise RuntimeError("GradScaler.step: a closure cannot be used with an enabled scaler. Call backward() first.")


def _any_device(found_inf: dict[Any, Tensor], device: torch.device) -> Tensor:
    """Return 1.0 if any is above 0, else 0.0. torch sums them, and its kernels test for 1: two devices would pass."""
    found = [tensor.to(device, non_blocking=True) for tensor in found_inf.values()]
    if not found:  # an optimizer that looks at its gradients itself, or has none
        return torch.zeros((), dtype=torch.float32, device=device)
    return torch.stack(found).amax().clamp(max=1.0)
