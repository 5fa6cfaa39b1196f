"""Which hooks of a fit use gradients, seen while they run: a captured step leaves none for them."""

import functools
import inspect
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._errors import CaptureError, CaptureWarning
from .._user_line import line_text, running_place

# Lightning calls these between backward and the optimizer's step.
_AMID_A_STEP = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
# When it calls these, the gradients of the last step are still there.
_BEHIND_A_STEP = ("on_train_batch_end", "on_train_epoch_end")
_LIBRARIES = ("lightning.", "pytorch_lightning.", "ampkit.")  # their callbacks use no gradients
_SLOT: Any = Tensor.grad  # of the class: the descriptor, whose methods a mode is given
_USES = {_SLOT.__get__, _SLOT.__set__, _SLOT.__delete__}


class GradientUses(TorchFunctionMode):
    """Runs the hooks of a fit so that each use of a parameter's gradient is noticed, however deep in what a hook calls.

    Args:
        module: the LightningModule.
        callbacks: those of the Trainer.
        strict: as the attribute.

    Attributes:
        strict: whether a use behind a step of ampkit is an error. Else it is a warning, and the hook ends there.
        amid: the hooks that Lightning calls between backward and the optimizer's step.
        there: whether Lightning does the steps, so that there are gradients to use.
        problem: which hook uses gradients, on which line, and what to write instead; "" if none has.
        late: whether it used them behind a step of ampkit, which was said.
    """

    def __init__(self, module: nn.Module, callbacks: Sequence[Any], strict: bool) -> None:
        super().__init__()
        self._module = module
        self.strict = strict
        self._hooks = [
            _Hook(owner, name, self)
            for owner in (module, *callbacks)
            if not type(owner).__module__.startswith(_LIBRARIES)
            for name in (*_AMID_A_STEP, *_BEHIND_A_STEP)
            if is_overridden(name, owner)
        ]
        self._running: _Hook | None = None
        self.amid = [str(hook) for hook in self._hooks if hook.name in _AMID_A_STEP]
        self.there = True
        self.problem = ""
        self.late = False

    def leave(self) -> None:
        """Put the hooks back as they were."""
        for hook in self._hooks:
            hook.put_back()
        self._hooks = []

    def run(self, hook: "_Hook", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a hook and return what it returns."""
        outer, self._running = self._running, hook
        try:
            with self:
                return hook.function(*args, **kwargs)
        except _NoGradientError as error:
            if self.strict:
                raise CaptureError(f"AmpkitCallback: {self.problem}") from error
            if not self.late:
                warnings.warn(f"AmpkitCallback: {self.problem} {_FROM_NOW_ON}", CaptureWarning, stacklevel=3)
            self.late = True
            return None
        finally:
            self._running = outer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _USES and not (self.problem and self.there) and id(args[0]) in self._parameters:
            self._used(sys._getframe(1))
        return func(*args, **(kwargs or {}))

    @functools.cached_property
    def _parameters(self) -> set[int]:
        return {id(param) for param in self._module.parameters()}  # a callback may train a model of its own

    def _used(self, frame: FrameType) -> None:
        hook = self._running
        assert hook is not None  # the mode is on while a hook runs
        if hook.name in _BEHIND_A_STEP and _in_zero_grad(frame):
            return  # it does what the next step would do
        self.problem = f"{hook} uses gradients, which a captured step does not leave: {hook.line(frame)}. {_ADVICE}"
        if not self.there:
            raise _NoGradientError


class _NoGradientError(Exception):
    """Ends a hook that uses a gradient which is not there."""


_ADVICE = (
    "Log ampkit/grad_norm in its place. What changes gradients belongs into training_step, as a hook of the tensor "
    "(tensor.register_hook)."
)
_FROM_NOW_ON = (
    "There was none this time, so the hook was ended there. From the next optimizer step on, training goes on as "
    "Lightning does it."
)


def _in_zero_grad(frame: FrameType) -> bool:
    return frame.f_code.co_name == "zero_grad" and frame.f_globals.get("__name__", "").startswith("torch.")


class _Hook:
    """Stands in the place of a hook of an object. A copy of the object has the hook itself."""

    def __init__(self, owner: Any, name: str, uses: GradientUses) -> None:
        self.function = getattr(owner, name)
        self.name = name
        self._owner = owner
        self._uses = uses
        self._before = vars(owner).get(name)
        functools.update_wrapper(self, self.function)
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._uses.run(self, args, kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._owner, self.name)

    def __str__(self) -> str:
        return f"{type(self._owner).__name__}.{self.name}"

    def put_back(self) -> None:
        """Give the object its own hook again."""
        del vars(self._owner)[self.name]
        if self._before is not None:
            vars(self._owner)[self.name] = self._before

    def line(self, frame: FrameType) -> str:
        """Return the line of the hook that a frame was called from."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        outer: FrameType | None = frame
        while outer is not None and outer.f_code is not code:
            outer = outer.f_back
        place = running_place(frame) if outer is None else (outer.f_code.co_filename, outer.f_lineno)
        return line_text(*place) if place else "a line without a file"
