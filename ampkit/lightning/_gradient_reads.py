"""Which hooks of a fit use gradients. A captured step leaves no gradients, so hooks are watched while they run."""

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
from .._user_line import line_text, running_place, users_level

# Lightning calls these between backward and the optimizer's step.
BEFORE_STEP = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
# When it calls these, the gradients of the last step are still there.
_AFTER_STEP = ("on_train_batch_end", "on_train_epoch_end")
_LIBRARIES = ("lightning.", "pytorch_lightning.", "ampkit.")  # their callbacks use no gradients
_GRAD: Any = Tensor.grad  # the descriptor; a function mode receives its methods as the function that is called
_GRAD_METHODS = {_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__}
_ADVICE = (
    "To log the norm of the gradients, use ampkit/grad_norm. To change a gradient, use tensor.register_hook in "
    "training_step."
)
_HOOK_ENDED = (
    "There was no gradient this time, so the hook was ended there. From the next optimizer step on, Lightning trains "
    "without ampkit."
)


class GradientUses(TorchFunctionMode):
    """Runs the hooks of a fit and notices each use of a parameter's gradient, also in functions that a hook calls.

    Where it is `strict`, a use after a step of ampkit is an error. Otherwise it is a warning, and the hook ends there.
    """

    def __init__(self, module: nn.Module, callbacks: Sequence[Any], strict: bool) -> None:
        super().__init__()
        self._module = module
        self.strict = strict
        self._hooks = [
            _WatchedHook(owner, name, self)
            for owner in (module, *callbacks)
            if not type(owner).__module__.startswith(_LIBRARIES)
            for name in (*BEFORE_STEP, *_AFTER_STEP)
            if is_overridden(name, owner)
        ]
        self._running: _WatchedHook | None = None
        self.hooks_before_step = [str(hook) for hook in self._hooks if hook.name in BEFORE_STEP]
        self.gradients_exist = True  # as long as Lightning does the steps
        self.problem = ""  # which hook uses gradients, on which line, and what to write instead
        self.after_captured_step = False  # whether a hook used gradients there; the user was warned then

    def restore_hooks(self) -> None:
        """Give all objects their own hooks back."""
        for hook in self._hooks:
            del vars(hook.owner)[hook.name]
            if hook.before is not None:
                vars(hook.owner)[hook.name] = hook.before
        self._hooks = []

    def run(self, hook: "_WatchedHook", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a hook and return what it returns."""
        outer, self._running = self._running, hook
        try:
            with self:
                return hook.function(*args, **kwargs)
        except _NoGradientError as error:
            if self.strict:
                raise CaptureError(f"AmpkitCallback: {self.problem}") from error
            if not self.after_captured_step:
                message = f"AmpkitCallback: {self.problem} {_HOOK_ENDED}"
                warnings.warn(message, CaptureWarning, stacklevel=users_level())
            self.after_captured_step = True
            return None
        finally:
            self._running = outer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _GRAD_METHODS and not (self.problem and self.gradients_exist) and id(args[0]) in self._parameters:
            hook, frame = self._running, sys._getframe(1)
            assert hook is not None  # the mode is on while a hook runs
            module = frame.f_globals.get("__name__", "")
            in_zero_grad = frame.f_code.co_name == "zero_grad" and module.startswith("torch.")
            if not (in_zero_grad and hook.name in _AFTER_STEP):  # the next step clears the gradients anyway
                line = hook.line(frame)
                self.problem = f"{hook} uses gradients, which a captured step does not leave: {line}. {_ADVICE}"
                if not self.gradients_exist:
                    raise _NoGradientError
        return func(*args, **(kwargs or {}))

    @functools.cached_property
    def _parameters(self) -> set[int]:
        return {id(param) for param in self._module.parameters()}  # a callback may train a model of its own


class _NoGradientError(Exception):
    """Ends a hook that uses a gradient which does not exist."""


class _WatchedHook:
    """Replaces a hook of an object, and calls it by `GradientUses.run`. A copy of the object gets the hook itself."""

    def __init__(self, owner: Any, name: str, uses: GradientUses) -> None:
        self.function = getattr(owner, name)
        self.name = name
        self.owner = owner
        self._uses = uses
        self.before = vars(owner).get(name)
        functools.update_wrapper(self, self.function)
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._uses.run(self, args, kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)

    def __str__(self) -> str:
        return f"{type(self.owner).__name__}.{self.name}"

    def line(self, frame: FrameType) -> str:
        """Return the line of the hook from which, over any number of calls, this frame was called."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        outer: FrameType | None = frame
        while outer is not None and outer.f_code is not code:
            outer = outer.f_back
        place = running_place(frame) if outer is None else (outer.f_code.co_filename, outer.f_lineno)
        return line_text(*place) if place else "a line without a file"
