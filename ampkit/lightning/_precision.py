"""What stands in the place of a Trainer's precision plugin, and leaves out what a step of ampkit has done."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor
from torch.amp import grad_scaler as upstream

from .._optimizer.scaler import GradScaler
from .._precision.policy import Policy
from .._undo import Undo


class Fit(Protocol):
    """What a plugin asks of the fit that it is in.

    Attributes:
        policy: of the user, None if there is none.
        device: of parameters and batches.
        scaler: takes the place of Lightning's.
        in_optimizer_step: Lightning is within the optimizer's step, which it enters for the last batch of a window.
        looking: Lightning does the first step.
    """

    policy: Policy | None
    device: torch.device
    scaler: GradScaler
    in_optimizer_step: bool
    looking: bool

    @property
    def plain(self) -> bool:
        """Whether Lightning does everything."""

    @property
    def stepped(self) -> bool:
        """Whether the batch under way had its backward, so that Lightning's must do nothing."""

    def begin(self) -> bool:
        """Return whether ampkit does the step of this batch."""


class StepPrecision(Precision):
    """Stands in front of the class of a Trainer's precision plugin: does nothing in a batch that was stepped."""

    ampkit: Fit

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]  # as upstream
        """Call the hooks of on_before_backward; leave out the loss scale."""
        if self.ampkit.stepped:
            return Precision.pre_backward(self, tensor, module)
        return super().pre_backward(tensor, module)

    def backward(self, tensor: Tensor, model: LightningModule, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]  # Lightning has it positional
        """Do nothing."""
        if not self.ampkit.stepped:
            super().backward(tensor, model, *args, **kwargs)

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, nor refuse to clip the gradients of a fused optimizer."""
        if not self.ampkit.stepped:
            super().clip_gradients(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # as above
        """Call the closure, in which the step is done, and the hooks of on_before_optimizer_step."""
        if not self.ampkit.begin():
            result = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
            self.ampkit.looking = False
            return result
        self.ampkit.in_optimizer_step = True
        try:
            with _next_step_is_the_closure(optimizer):
                return Precision.optimizer_step(self, optimizer, model=model, closure=closure, **kwargs)
        finally:
            self.ampkit.in_optimizer_step = False

    def forward_context(self) -> AbstractContextManager[None]:
        """Enter the policy's rules for operations, too."""
        policy = self.ampkit.policy
        if policy is None or not policy.ops:
            return super().forward_context()
        return self._under(policy, super().forward_context())

    @contextmanager
    def _under(self, policy: Policy, context: AbstractContextManager[None]) -> Iterator[None]:
        with context, policy.autocast(self.ampkit.device.type):
            yield

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Apply the policy's rules for modules, too."""
        module = super().convert_module(module)
        policy = self.ampkit.policy
        return policy.apply(module) if policy is not None and policy.modules else module

    def state_dict(self) -> dict[str, Any]:
        """Return what Lightning's own plugin would, and more only where the rule of the loss scale says more."""
        scaler = self.ampkit.scaler
        if self.ampkit.plain or not scaler.is_enabled():
            return super().state_dict()
        as_in_torch = scaler.rule().items() >= _RULE_OF_TORCH.items()
        return upstream.GradScaler.state_dict(scaler) if as_in_torch else scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the loss scale, of this plugin or of Lightning's."""
        if self.ampkit.plain or not self.ampkit.scaler.is_enabled():
            super().load_state_dict(state_dict)
        else:
            self.ampkit.scaler.load_state_dict(state_dict)


_RULE_OF_TORCH = {"hysteresis": 1, "min_scale": None, "max_scale": None, "dynamic": True}


def plugin_for(fit: Fit, plugin: Precision) -> Precision:
    """Return the plugin as an object of a subclass of the same name, which checkpoints key the loss scale by."""
    kind = type(plugin)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    new: StepPrecision = object.__new__(type(kind.__name__, (StepPrecision, kind), names))
    vars(new).update(vars(plugin))
    new.ampkit = fit
    if isinstance(new, MixedPrecision) and fit.scaler.is_enabled():
        new.scaler = fit.scaler
    return new


@contextmanager
def _next_step_is_the_closure(optimizer: Any) -> Iterator[None]:
    """Context in which the next `optimizer.step(closure)` only calls the closure, in which the step is the real one."""
    own = vars(optimizer).get("step")  # a scheduler's, that counts

    def step(closure: Callable[[], Any], **kwargs: Any) -> Any:
        put_back()
        return closure()

    def put_back() -> None:
        if vars(optimizer).get("step") is step:
            del optimizer.step
            if own is not None:
                optimizer.step = own

    with Undo() as undo:
        undo.note(put_back)
        optimizer.step = step
        yield
