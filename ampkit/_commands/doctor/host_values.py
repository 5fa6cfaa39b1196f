"""Whether two steps do the same: compares the calls of torch that the user's lines make, with their host arguments."""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from traceback import walk_stack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..._torch.autograd.autograd import ENGINE_ENTRIES
from ..._torch.tensors.modes import function_modes, without_torch_function
from ..._undo import Undo, replace
from ..._user_line import UserLineFinder

_OPTIMIZERS = str(Path(torch.optim.__file__).parent)
_MOST_ITEMS = 64  # a longer list is recorded as its hash
_ATTRIBUTES = ("__get__", "__set__")  # a function mode also sees when attributes of tensors are read or set
# Function modes do not see these functions, so they are replaced.
_FROM_HOST = ("from_numpy", "frombuffer")


class TorchCall(NamedTuple):
    """A call of torch."""

    line: str  # `file:line: source` of the user's line that led to it
    name: str  # of the function
    values: tuple[str, ...]  # the arguments as text, in order; a tensor is "a tensor", whatever it contains


class HostCallRecorder(TorchFunctionMode):
    """Context that records the calls of torch that the user's lines make, in forward, backward and hooks.

    Calls of an optimizer are left out, because its learning rate and step count differ rightly. Calls inside code from
    torch.compile are not seen. Sync: none. Keeps no tensor alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[TorchCall] = []
        self._to_undo = ExitStack()

    def __enter__(self) -> "HostCallRecorder":
        self._find_user_line = UserLineFinder(sys._getframe(1), skip_torch=True)
        with ExitStack() as entered:
            entered.enter_context(torch.autograd.set_multithreading_enabled(False))  # the mode sees this thread only
            undo = entered.enter_context(Undo())
            for name in _FROM_HOST:
                replace(undo, torch, name, partial(self._recorded, name, getattr(torch, name)))
            for owner, name in ENGINE_ENTRIES:
                replace(undo, owner, name, partial(self._with_mode_on, getattr(owner, name)))
            self._to_undo = entered.pop_all()
        super().__enter__()  # type: ignore[no-untyped-call]  # not annotated in torch
        return self

    def __exit__(self, *error: Any) -> None:
        with self._to_undo:
            super().__exit__(*error)  # type: ignore[no-untyped-call]  # not annotated in torch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name not in _ATTRIBUTES and not torch.compiler.is_compiling():
            self._record(name, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _recorded(self, name: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._record(name, args, kwargs)
        return original(*args, **kwargs)

    def _with_mode_on(self, engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call an entry to autograd's engine, and keep this mode on: torch turns it off inside `Tensor.backward`."""
        if self in function_modes():
            return engine(*args, **kwargs)
        super().__enter__()  # type: ignore[no-untyped-call]  # not annotated in torch
        try:
            return engine(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]  # not annotated in torch

    def _record(self, name: str, args: Any, kwargs: Any) -> None:
        place = self._find_user_line()
        # A function mode does not see built-in backwards, only what other modes call on their tensors.
        if place is None or not place.line or place.backward:
            return
        # torch wraps the step of every optimizer, the user's too.
        if any(frame.f_code.co_filename.startswith(_OPTIMIZERS) for frame, _ in walk_stack(sys._getframe(1))):
            return
        with without_torch_function():
            values = *map(_value_text, args), *(f"{key}={_value_text(kwargs[key])}" for key in sorted(kwargs))
            self.calls.append(TorchCall(place.line, name, values))


def _value_text(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device, type(None))):
        return repr(value)
    if isinstance(value, slice):
        return ":".join("" if end is None else _value_text(end) for end in (value.start, value.stop, value.step))
    if isinstance(value, (tuple, list)):
        items = [_value_text(item) for item in value]
        text = f"({', '.join(items)})" if isinstance(value, tuple) else f"[{', '.join(items)}]"
        return text if len(items) <= _MOST_ITEMS else f"{len(items)} items with hash {hash(text)}"
    if type(value).__module__ == "numpy":  # an array or a scalar, and no reason to import it
        return f"an array of shape {value.shape} with hash {hash(value.tobytes())}" if value.ndim else repr(value)
    return f"a {type(value).__qualname__}"


def differences(one: Sequence[TorchCall], other: Sequence[TorchCall]) -> Iterator[tuple[str, str]]:
    """Yield the user's line and a description of each argument that differs between two records.

    After the first call that only one of them has, it is not known which calls correspond.
    """
    for left, right in itertools.zip_longest(one, other):
        if left is None or right is None or left[:2] != right[:2]:
            names = [f"calls {call.name}" if call else "ends" for call in (left, right)]
            if left and right and left.line != right.line:
                names[1] = f"{names[1]} in {right.line}"
            call = left or right
            assert call is not None  # one of two records is the longer one
            yield call.line, f"a step {names[0]} here, where another step {names[1]}"
            return
        if left.values != right.values:
            pairs = itertools.zip_longest(left.values, right.values, fillvalue="nothing")
            different = next((a, b) for a, b in pairs if a != b)
            a, b = (text if len(text) <= 60 else f"{text[:57]}..." for text in different)
            yield left.line, f"{left.name} takes {a} in one step and {b} in another"
