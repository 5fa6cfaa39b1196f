"""The loss scale, kept on the device: scale, unscale, clip, skip, update. Never reads a tensor from the host."""

from typing import Any

import torch
from torch import Tensor
from torch.amp import grad_scaler as upstream
from torch.amp.grad_scaler import OptState

from ._optim import (
    clip_coefficient,
    gradients,
    is_one_pass,
    kernel_scaling,
    seed_momentum,
    step_clipped,
    total_norm,
)


class GradScaler(upstream.GradScaler):
    """A `torch.amp.GradScaler` that never waits for the device with a fused optimizer.

    With `Adam`, `AdamW`, `SGD` or (CPU only) `Adagrad` built with `fused=True`, `step` reads the gradients once, for
    their norm. A norm that is not finite makes the optimizer's kernel return without a change; otherwise the kernel
    divides by `scale / clip_coefficient` as it reads the gradients. With any other optimizer `step` does what torch
    does, which reads `found_inf` on the host.

    Takes the arguments of `torch.amp.GradScaler`, and exchanges `state_dict` with it in both directions.

    Attributes:
        grad_norm: the norm of the unscaled gradients of the last `step`, before clipping: float32, shape (), on the
            device. None before the first step, and where no norm was computed.
        found_inf: 1.0 if the last `step` was skipped, else 0.0: float32, shape (), on the device. None if disabled.
        skipped: how many optimizer steps were skipped so far: float64, shape (), on the device. None before the first
            `scale`. Read it with `int(scaler.skipped)`, which waits for the device.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.grad_norm: Tensor | None = None
        self.found_inf: Tensor | None = None
        self.skipped: Tensor | None = None
        self._init_skipped = 0.0

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        # float64, so that `+= found_inf` is one kernel and counts are exact to 2**53.
        self.skipped = torch.full((), self._init_skipped, dtype=torch.float64, device=dev)

    def materialize(self, device: torch.device) -> None:
        """Create scale and counters on `device` now rather than in the first `scale`.

        Inside a capture their fill would become part of the graph and reset the scale in every replay.
        """
        if self._enabled and self._scale is None:
            self._lazy_init_scale_growth_tracker(device)

    def step(
        self, optimizer: torch.optim.Optimizer, *args: Any, max_norm: float | None = None, **kwargs: Any
    ) -> float | None:
        """Unscale the gradients, clip their global norm, and step; change nothing if a gradient is not finite.

        Args:
            optimizer: its gradients are scaled, or unscaled by `unscale_(optimizer)` before. A tensor that the user put
                in `optimizer.grad_scale` divides the gradients too, as in torch.
            *args: passed on to `optimizer.step`.
            max_norm: clip the norm of all unscaled gradients to this; None does not clip. Folded into the kernel, so
                that `param.grad` keeps its norm.
            **kwargs: passed on to `optimizer.step`.

        Returns:
            What `optimizer.step` returned.

        Raises:
            ValueError: `max_norm` is not above 0, or no parameter has a gradient.
            RuntimeError: a second `step` without `update` in between, or a closure.

        Sync: none with a fused optimizer; torch's own with others. A skipped step leaves parameters, moments and step
        counts as they were.
        """
        check_max_norm("GradScaler.step", max_norm)
        if not self._enabled:
            result, self.grad_norm = step_clipped(optimizer, max_norm, *args, **kwargs)
            return result  # type: ignore[no-any-return]  # the optimizer's own type
        if not is_one_pass(optimizer):
            return self._step_two_passes(optimizer, max_norm, *args, **kwargs)
        if args or "closure" in kwargs:
            raise RuntimeError(
                "GradScaler.step: a closure cannot be used with an enabled scaler. Call backward() first."
            )
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("GradScaler.step: step() has already been called since the last update().")
        divisor, found_inf = self._fold(optimizer, state, max_norm)
        stepped: float | None = None
        if seed_momentum(optimizer) or not found_inf.item():  # sync: first steps of SGD with dampening only
            with kernel_scaling(optimizer, divisor, found_inf):
                stepped = optimizer.step(**kwargs)
        state["stage"] = OptState.STEPPED
        self._count_skip(found_inf)
        return stepped

    def _fold(self, optimizer: Any, state: dict[str, Any], max_norm: float | None) -> tuple[Tensor | None, Tensor]:
        """Return what the fused kernel takes: the divisor of the gradients and `found_inf`. Sets `grad_norm` too."""
        scale, _ = self._check_scale_growth_tracker("step")
        grads = _require_gradients(optimizer)
        unscaled = state["stage"] is OptState.UNSCALED
        preset = getattr(optimizer, "grad_scale", None)
        divisor = None if unscaled else scale
        if preset is not None:
            preset = preset.reshape(()).to(scale.device, non_blocking=True)
            divisor = preset if divisor is None else divisor * preset
        self.grad_norm = None
        if not unscaled or max_norm is not None:
            norm = total_norm(grads, scale.device)
            self.grad_norm = norm if divisor is None else norm / divisor
        if unscaled:
            found_inf = _any_device(state["found_inf_per_device"], scale.device)
        else:
            found_inf = torch.where(norm < torch.inf, 0.0, 1.0)  # also 1 for nan; two kernels, isfinite takes four
            state["found_inf_per_device"] = {scale.device: found_inf}
        self.found_inf = found_inf
        if max_norm is None:
            return divisor, found_inf
        assert self.grad_norm is not None  # set above
        coefficient = clip_coefficient(self.grad_norm, max_norm)
        # nan or 0 comes from a norm that is not finite: the step is skipped, but the divisor must stay a number.
        coefficient = torch.where(coefficient > 0, coefficient, 1.0)
        return (coefficient.reciprocal() if divisor is None else divisor / coefficient), found_inf

    def _step_two_passes(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None, *args: Any, **kwargs: Any
    ) -> float | None:
        """Torch's way: unscale the gradients in memory, read `found_inf` on the host, step or not."""
        scale, _ = self._check_scale_growth_tracker("step")
        _require_gradients(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        self.grad_norm = None
        if max_norm is not None:
            params = (p for group in optimizer.param_groups for p in group["params"])
            self.grad_norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
        self.found_inf = _any_device(state["found_inf_per_device"], scale.device)
        result = super().step(optimizer, *args, **kwargs)
        self._count_skip(self.found_inf)
        return result

    def _count_skip(self, found_inf: Tensor) -> None:
        assert self.skipped is not None  # set with the scale
        self.skipped.add_(found_inf)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's entries and `skipped`, as host numbers. Waits for the device. Empty if disabled."""
        state = super().state_dict()
        if self._enabled:
            state["skipped"] = self._init_skipped if self.skipped is None else self.skipped.item()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of this class or of `torch.amp.GradScaler` (which has no `skipped`: 0), in place."""
        super().load_state_dict(state_dict)
        if self._enabled:
            self._init_skipped = float(state_dict.get("skipped", 0.0))
            if self.skipped is not None:
                self.skipped.fill_(self._init_skipped)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled:
            state["_init_skipped"] = self._init_skipped if self.skipped is None else self.skipped.item()
        return {**state, "grad_norm": None, "found_inf": None, "skipped": None}


def check_max_norm(where: str, max_norm: float | None) -> None:
    """Raise a `ValueError` unless `max_norm` is None or a number above 0 (inf included: measure, do not clip)."""
    if max_norm is not None and not (isinstance(max_norm, (int, float)) and max_norm > 0):
        raise ValueError(f"{where}(max_norm={max_norm!r}): must be a number > 0, or None to disable clipping.")


def _require_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    grads = gradients(optimizer)
    if not grads:
        raise ValueError(
            f"GradScaler.step({type(optimizer).__name__}): no parameter of the optimizer has a gradient. "
            "Call scaler.scale(loss).backward() before step()."
        )
    return grads


def _any_device(found_inf: dict[torch.device, Tensor], device: torch.device) -> Tensor:
    """Return 1.0 if any is above 0, else 0.0. torch sums them, and its kernels test for 1: two devices would pass."""
    found = [tensor.to(device, non_blocking=True) for tensor in found_inf.values()]
    return torch.stack(found).amax().clamp(max=1.0)
