"""The precision plugin that replaces a Trainer's own, and leaves out what a step of ampkit has already done."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.amp import grad_scaler as upstream

from .._optimizer.scaler import GradScaler
from .._optimizer.step_kind import parameters
from .._precision.policy import Policy
from .._torch.optimizers import is_unscaled, supports_amp_scaling
from .._torch.tensors.tensors import version

_RULE_OF_TORCH = {"hysteresis": 1, "min_scale": None, "max_scale": None, "dynamic": True}
_CALLS_CLOSURE = "Write a loop of your own, and capture forward and backward by ampkit.graphed."
# The hooks of a module that nobody has overridden, which do nothing.
_NOT_OVERRIDDEN = [
    LightningModule.on_before_optimizer_step,
    LightningModule.configure_gradient_clipping,
    LightningModule.clip_gradients,
]


class FitProtocol(Protocol):
    """What the plugin reads and sets of the fit that it belongs to. `_fit.Fit` explains each name."""

    policy: Policy | None
    device: torch.device
    scaler: GradScaler
    in_optimizer_step: bool
    first_step_by_lightning: bool
    backward_done: bool
    problem: str
    closure_problem: str | None
    steps_in_module: bool

    def prepare_step(self) -> bool: ...


class StepPrecision(Precision):
    """First base of a subclass of the Trainer's plugin class. Does nothing in a batch whose step ampkit has done."""

    fit: FitProtocol

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]  # as upstream
        """Call the on_before_backward hooks. Do not scale the loss if ampkit has done the backward."""
        if self.fit.backward_done:
            return Precision.pre_backward(self, tensor, module)
        return super().pre_backward(tensor, module)

    def backward(self, tensor: Tensor, model: LightningModule, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]  # Lightning has it positional
        """Do nothing if ampkit has done the backward."""
        if not self.fit.backward_done:
            super().backward(tensor, model, *args, **kwargs)

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Do nothing if ampkit has clipped. In manual optimization clip the gradients of a fused optimizer, too.

        Upstream refuses that, as the optimizer unscales them in its step. Here a loss scale stays in them, if there is
        one. Sync: none.
        """
        if self.fit.steps_in_module and supports_amp_scaling(optimizer):
            scaler = self.scaler if isinstance(self, MixedPrecision) else None
            raw = getattr(optimizer, "optimizer", optimizer)  # of a LightningOptimizer
            if scaler is not None and clip_val > 0 and not is_unscaled(scaler, raw):
                _clip_scaled(parameters(optimizer), scaler, clip_val, gradient_clip_algorithm)
            else:
                Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)
        elif not self.fit.backward_done:
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # as above
        """Call the on_before_optimizer_step hooks and the closure, which does the whole step."""
        if self.fit.steps_in_module:  # and this is a part of its step, as all others
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        hooked = _is_hooked(model)
        if not self.fit.prepare_step():
            if self.fit.problem:
                return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
            uses = ClosureUses(optimizer, closure)
            result = super().optimizer_step(optimizer, model=model, closure=uses, **kwargs)
            self.fit.first_step_by_lightning = False
            self.fit.closure_problem = self.fit.closure_problem or uses.problem
            return result
        original = vars(optimizer).get("step")  # schedulers replace it to count steps

        def step(closure: Callable[[], Any], **kwargs: Any) -> Any:
            """Only call the closure, which steps the optimizer itself."""
            _put_back(optimizer, step, original)
            return closure()

        try:  # twice, so that one interrupt at any moment leaves nothing behind
            try:
                self.fit.in_optimizer_step = True
                if not hooked:
                    return closure()
                optimizer.step = step
                return Precision.optimizer_step(self, optimizer, model=model, closure=closure, **kwargs)
            finally:
                _put_back(optimizer, step, original)
                self.fit.in_optimizer_step = False
        finally:
            _put_back(optimizer, step, original)
            self.fit.in_optimizer_step = False

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Enter the autocast of the policy too, if it has rules for operations."""
        policy = self.fit.policy
        rules = nullcontext() if policy is None or not policy.ops else policy.autocast(self.fit.device.type)
        with super().forward_context(), rules:
            yield

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Apply the policy's rules for modules too."""
        module = super().convert_module(module)
        policy = self.fit.policy
        return policy.apply(module) if policy is not None and policy.modules else module

    def state_dict(self) -> dict[str, Any]:
        """Return what Lightning's plugin would return, unless the loss scale has settings that torch's has not."""
        scaler = self.fit.scaler
        if self.fit.problem or not scaler.is_enabled():
            return super().state_dict()
        works_like_torch = scaler.rule().items() >= _RULE_OF_TORCH.items()
        return upstream.GradScaler.state_dict(scaler) if works_like_torch else scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the loss scale from a state dict of this plugin or of Lightning's."""
        if self.fit.problem or not self.fit.scaler.is_enabled():
            super().load_state_dict(state_dict)
        else:
            self.fit.scaler.load_state_dict(state_dict)


def _clip_scaled(
    params: Sequence[Tensor], scaler: upstream.GradScaler, limit: float, algorithm: GradClipAlgorithmType
) -> None:
    """Clip gradients that hold a loss scale as if they did not: their norm, or each element. Sync: none.

    With a scale that is a power of two, the unscaled gradients have the bits that clipping them would give. What is
    not finite stays so, and the step is skipped.
    """
    grads = [param.grad for param in params if param.grad is not None]
    if not grads:
        return
    scale = scaler.scale(torch.ones((), device=grads[0].device))
    if algorithm == GradClipAlgorithmType.NORM:
        torch.nn.utils.clip_grads_with_norm_(params, limit, torch.nn.utils.get_total_norm(grads) / scale)
        return
    bound = limit * scale
    for grad in grads:
        grad.copy_(torch.where(grad.isfinite(), grad.clamp(-bound, bound), grad))


class ClosureUses:
    """The closure that an optimizer's step gets from Lightning. It does forward and backward of the batch.

    ampkit does them before it calls `step()`. That is the same if the step begins with one call of the closure.
    """

    def __init__(self, optimizer: Any, closure: Callable[[], Any]) -> None:
        self._optimizer, self._closure = optimizer, closure
        self._before = self._versions()
        self._calls, self._changed_before = 0, False

    def __call__(self) -> Any:
        """Do forward and backward."""
        self._changed_before = self._changed_before or (not self._calls and self._versions() != self._before)
        self._calls += 1
        return self._closure()

    @property
    def problem(self) -> str:
        """Why ampkit cannot do forward and backward before the step, and what to write instead; "" if it can."""
        name = f"{type(self._optimizer).__name__}.step()"
        if self._changed_before:
            return f"{name} changes parameters before it calls its closure. {_CALLS_CLOSURE}"
        if self._calls != 1:
            return f"{name} has called its closure {self._calls} times, and not once. {_CALLS_CLOSURE}"
        return ""

    def _versions(self) -> list[int]:
        return [version(param) for param in parameters(self._optimizer)]


def plugin_for(fit: FitProtocol, plugin: Precision) -> Precision:
    """Return a copy of the plugin that leaves out what ampkit has done.

    Its class is a subclass of the same name, because checkpoints store the loss scale under the name of the class.
    """
    kind = type(plugin)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    new: StepPrecision = object.__new__(type(kind.__name__, (StepPrecision, kind), names))
    vars(new).update(vars(plugin))
    new.fit = fit
    if isinstance(new, MixedPrecision) and fit.scaler.is_enabled():
        new.scaler = fit.scaler
    return new


def _is_hooked(model: LightningModule) -> bool:
    """Return whether anybody sees what Lightning does between backward and optimizer step: hooks, or a profiler.

    Those of its hooks that nobody has overridden do nothing, but Lightning takes as long as a replay to call them.
    """
    trainer: Any = model.trainer
    own = (model.on_before_optimizer_step, model.configure_gradient_clipping, model.clip_gradients)
    functions = [getattr(hook, "__func__", None) for hook in own]
    if type(trainer.profiler) is not PassThroughProfiler or functions != _NOT_OVERRIDDEN:
        return True
    hooks = (getattr(callback.on_before_optimizer_step, "__func__", None) for callback in trainer.callbacks)
    return any(hook is not Callback.on_before_optimizer_step for hook in hooks)


def _put_back(optimizer: Any, replacement: Any, original: Any) -> None:
    if vars(optimizer).get("step") is replacement:
        del optimizer.step
        if original is not None:
            optimizer.step = original
