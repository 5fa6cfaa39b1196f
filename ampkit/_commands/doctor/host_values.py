"""Whether two steps do the same: the calls of torch that the user's lines make, and their arguments on the host."""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..._torch.autograd import ENGINE_ENTRIES
from ..._torch.modes import function_modes, without_torch_function
from ..._user_line import UserLineFinder

_OPTIMIZERS = str(Path(torch.optim.__file__).parent)
_MOST_ITEMS = 64  # of a list, in a record; a longer one is kept as its hash
_ATTRIBUTES = ("__get__", "__set__")  # of tensors, which a function mode is told of too
# Neither is given to function modes.
_FROM_HOST = ("from_numpy", "frombuffer")


class Call(NamedTuple):
    """A call of torch.

    Attributes:
        line: `file:line: source` of the user's line that led to it.
        name: of the function.
        values: the arguments in words, in order; that of a tensor says no more than that it is one.
    """

    line: str
    name: str
    values: tuple[str, ...]


class Difference(NamedTuple):
    """What two steps do otherwise.

    Attributes:
        line: `file:line: source` of the user's line, "" if there is none.
        what: the difference in words.
    """

    line: str
    what: str


class CallRecorder(TorchFunctionMode):
    """Context that records the calls of torch that the user's lines make, in forward, backward and hooks.

    Calls of an optimizer are left out: its learning rate and its step counts vary by right. What torch.compile made is
    not looked into. Sync: none. Keeps no tensor alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._left = ExitStack()

    def __enter__(self) -> "CallRecorder":
        self._blame = UserLineFinder(sys._getframe(1), skip_torch=True)
        with ExitStack() as entered:
            entered.enter_context(torch.autograd.set_multithreading_enabled(False))  # the mode sees this thread only
            for name in _FROM_HOST:
                original = getattr(torch, name)
                entered.callback(setattr, torch, name, original)
                setattr(torch, name, self._recording(name, original))
            for owner, name in ENGINE_ENTRIES:
                original = getattr(owner, name)
                entered.callback(setattr, owner, name, original)
                setattr(owner, name, self._within(original))
            self._left = entered.pop_all()
        super().__enter__()  # type: ignore[no-untyped-call]  # not annotated in torch
        return self

    def __exit__(self, *error: Any) -> None:
        with self._left:
            super().__exit__(*error)  # type: ignore[no-untyped-call]  # not annotated in torch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name not in _ATTRIBUTES and not torch.compiler.is_compiling():
            self._record(name, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _recording(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            self._record(name, args, kwargs)
            return original(*args, **kwargs)

        return recorded

    def _within(self, engine: Callable[..., Any]) -> Callable[..., Any]:
        """Return autograd's engine with this mode on: it is off within `Tensor.backward`, which it is told of."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self in function_modes():
                return engine(*args, **kwargs)
            super(CallRecorder, self).__enter__()  # type: ignore[no-untyped-call]  # not annotated in torch
            try:
                return engine(*args, **kwargs)
            finally:
                super(CallRecorder, self).__exit__(None, None, None)  # type: ignore[no-untyped-call]  # not annotated in torch

        return run

    def _record(self, name: str, args: Any, kwargs: Any) -> None:
        place = self._blame()
        # Of a built-in backward no function mode is told, but of what other modes ask of its tensors.
        if place is not None and place.line and not place.backward and not _in_an_optimizer():
            with without_torch_function():
                self.calls.append(Call(place.line, name, tuple(_values(args, kwargs))))


def _in_an_optimizer() -> bool:
    """Return whether a step of an optimizer, torch's or the user's, leads here: torch wraps each in a function."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OPTIMIZERS):
            return True
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return False


def _values(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[str]:
    for value in args:
        yield _in_words(value)
    for name in sorted(kwargs):
        yield f"{name}={_in_words(kwargs[name])}"


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device, type(None))):
        return repr(value)
    if isinstance(value, slice):
        return ":".join("" if end is None else _in_words(end) for end in (value.start, value.stop, value.step))
    if isinstance(value, (tuple, list)):
        items = [_in_words(item) for item in value]
        text = f"({', '.join(items)})" if isinstance(value, tuple) else f"[{', '.join(items)}]"
        return text if len(items) <= _MOST_ITEMS else f"{len(items)} items with hash {hash(text)}"
    if type(value).__module__ == "numpy":  # an array or a scalar, and no reason to import it
        return f"an array of shape {value.shape} with hash {hash(value.tobytes())}" if value.ndim else repr(value)
    return f"a {type(value).__qualname__}"


def differences(one: Sequence[Call], other: Sequence[Call]) -> Iterator[Difference]:
    """Yield what two records do not share: each argument that differs, and then the first call that does.

    Behind a call that only one of them has, nothing is known to belong together.
    """
    for left, right in itertools.zip_longest(one, other):
        if left is None or right is None or left[:2] != right[:2]:
            yield _other_call(left, right)
            return
        if left.values != right.values:
            yield Difference(left.line, f"{left.name} takes {_first_that_differs(left, right)}")


def _other_call(left: Call | None, right: Call | None) -> Difference:
    names = [f"calls {call.name}" if call else "ends" for call in (left, right)]
    call = left or right
    assert call is not None  # one of two records is the longer one
    if left and right and left.line != right.line:
        names[1] = f"{names[1]} in {right.line}"
    return Difference(call.line, f"a step {names[0]} here, where another step {names[1]}")


def _first_that_differs(left: Call, right: Call) -> str:
    pairs = itertools.zip_longest(left.values, right.values, fillvalue="nothing")
    one, other = next((a, b) for a, b in pairs if a != b)
    return f"{_short(one)} in one step and {_short(other)} in another"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
