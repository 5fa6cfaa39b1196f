"""Function modes and dispatch modes: which are entered, and how code runs without them."""

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import BuiltinFunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device, _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from ..._undo import Undo, replace
from ..guard import private
from .fast_paths import note_autocast_of_fast_paths

_push_function_mode, _pop_function_mode = (private(torch.overrides, name) for name in ("_push_mode", "_pop_mode"))
# function_mode_stack(): the function modes that are entered, outermost first.
function_mode_stack: Callable[[], list[Any]] = private(torch.overrides, "_get_current_function_mode_stack")
function_mode_count: Callable[[], int] = private(torch._C, "_len_torch_function_stack")


def function_modes() -> list[Any]:
    """Return the function modes that are entered, outermost first, without those that only watch for ampkit."""
    return [mode for mode in function_mode_stack() if not isinstance(mode, UnseenFunctionMode)]


# The function mode that torch.set_default_device enters, and a torch.device that is used as a context.
DeviceContext: Any = private(_device, "DeviceContext")
# without_modes(): a context in which no function mode and no dispatch mode is entered.
without_modes: Callable[[], AbstractContextManager[Any]] = private(_python_dispatch, "_disable_current_modes")


class UnseenFunctionMode(TorchFunctionMode):
    """A function mode with which ampkit watches a step. It changes nothing, so it is no part of the step's policy."""


class WatchingMode(TorchDispatchMode):
    """A dispatch mode that watches a step: it lets compiled code run as it is, and torch.cond and flex_attention too.

    Otherwise torch.compile would run compiled code eagerly, and compile nothing new.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


@contextmanager
def unseen_function_mode(mode: object) -> Iterator[None]:
    """Context in which `torch.overrides.has_torch_function` ignores this mode, if no other mode is entered.

    nn.MultiheadAttention and nn.TransformerEncoderLayer ask that function, and run slower kernels if it says yes.
    """
    asked = private(torch.overrides, "has_torch_function")

    def has_torch_function(args: Iterable[Any]) -> bool:
        if [*map(id, function_mode_stack())] != [id(mode)]:
            return bool(asked(args))
        _pop_function_mode()
        try:  # no generator, which would enter the mode again whenever it is closed
            return bool(asked(args))
        finally:
            _push_function_mode(mode)

    with Undo() as undo:
        replace(undo, torch.overrides, "has_torch_function", has_torch_function)
        yield


_shows_copies, _show_copies = (private(torch._C, f"{name}only_lift_cpu_tensors") for name in ("_", "_set_"))


def show_copies_of_numbers(undo: Undo) -> None:
    """Have this thread's dispatch modes see how `x[[0, 2]]` copies the numbers to the device, until that is undone.

    Otherwise torch copies them before a dispatch mode sees anything (NOTE in csrc/utils/tensor_new.h). It does so where
    it compiles, too: compiled code then has the numbers on the device, and copies nothing.
    """
    frames: Any = importlib.import_module("torch._dynamo.convert_frame")
    compile_frame = private(frames, "_compile")

    def compiled(*args: Any, **kwargs: Any) -> Any:
        with Undo() as compiling:
            compiling.note(_show_copies, _shows_copies())
            _show_copies(False)
            return compile_frame(*args, **kwargs)

    replace(undo, frames, "_compile", compiled)
    undo.note(_show_copies, _shows_copies())
    _show_copies(True)


def step_aside(mode: TorchDispatchMode) -> None:
    """Leave a dispatch mode, if it is the innermost one. Called in a hook before an autograd node runs.

    Autograd puts the modes back once the node has run.
    """
    if private(_python_dispatch, "_get_current_dispatch_mode")() is mode:
        private(_python_dispatch, "_pop_mode")()


_FLAGS_OF_DISPATCH_MODES = tuple(
    name
    for name in (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_any_mode_without_ignore_compile_internals",
    )
    if hasattr(_python_dispatch, name)
)
_dispatch_modes = private(_python_dispatch, "_get_current_dispatch_mode_stack")
_push_dispatch_mode, _pop_dispatch_mode = (private(_python_dispatch, name) for name in ("_push_mode", "_pop_mode"))
_tell_of_dispatch_modes = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
uses_autograd_threads: Callable[[], bool] = private(torch._C, "_is_multithreading_enabled")
let_autograd_use_threads: Callable[[bool], None] = private(torch._C, "_set_multithreading_enabled")


def modes() -> Callable[[], None]:
    """Return what puts this thread's modes back to what they are now: gradients, autocast, anomaly mode, threads of
    autograd, the stream; and what takes off the dispatch and function modes that were entered since.

    For what an interrupt has left on: torch's contexts are Python, too, and one that is interrupted in `__enter__` or
    `__exit__` leaves its mode as it is.
    """
    set_modes: list[Callable[[], object]] = [
        functools.partial(torch.set_anomaly_enabled, torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        functools.partial(let_autograd_use_threads, uses_autograd_threads()),
        functools.partial(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()),
        functools.partial(private(torch._C, "_set_grad_enabled"), torch.is_grad_enabled()),
    ]
    for kind in ("cpu", "cuda"):
        set_modes.append(functools.partial(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind)))
        set_modes.append(functools.partial(torch.set_autocast_dtype, kind, torch.get_autocast_dtype(kind)))
    if torch.cuda.is_initialized():
        set_modes.append(functools.partial(torch.cuda.set_stream, torch.cuda.current_stream()))
    dispatch, functions, nesting = len(_dispatch_modes()), len(function_mode_stack()), _autocast_nesting()
    put_back_flags = _dispatch_flags()

    def put_back() -> None:
        while len(function_mode_stack()) > functions:  # first: they see what is called below
            _pop_function_mode()
        while len(_dispatch_modes()) > dispatch:
            _pop_dispatch_mode()
        put_back_flags()
        for set_mode in set_modes:
            set_mode()
        while _autocast_nesting() > nesting:
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()

    return put_back


def _dispatch_flags() -> Callable[[], None]:
    """Return what tells torch again whether a dispatch mode is on, as it is now."""
    flags = {name: getattr(_python_dispatch, name) for name in _FLAGS_OF_DISPATCH_MODES}

    def put_back() -> None:
        vars(_python_dispatch).update(flags)
        if _tell_of_dispatch_modes is not None and flags:
            _tell_of_dispatch_modes(flags["_is_in_any_mode_without_ignore_compile_internals"])

    return put_back


def enter(undo: Undo, mode: TorchDispatchMode | TorchFunctionMode) -> None:
    """Enter a dispatch mode or a function mode until that is undone.

    `with mode` takes off whichever mode is on at its end: in a generator that is closed late, one of somebody else.
    """
    if isinstance(mode, TorchDispatchMode):
        undo.note(_dispatch_flags())
        note_autocast_of_fast_paths(undo)
        undo.note(leave, mode)
        TorchDispatchMode.__enter__(mode)
    else:
        undo.note(leave, mode)
        TorchFunctionMode.__enter__(mode)


def leave(mode: TorchDispatchMode | TorchFunctionMode) -> None:
    """Take a mode off, and those of its kind that were entered in it, if it is on."""
    dispatch = isinstance(mode, TorchDispatchMode)
    entered, pop = (_dispatch_modes, _pop_dispatch_mode) if dispatch else (function_mode_stack, _pop_function_mode)
    while any(other is mode for other in entered()):
        pop()


def _autocast_nesting() -> int:
    """Return how many autocast contexts are entered."""
    return int(call_each((torch.autocast_increment_nesting, torch.autocast_decrement_nesting))[1])


def call_each(functions: Iterable[Any]) -> list[Any]:
    """Call functions of C's one behind the other, in one step of the interpreter: no interrupt comes between them, nor
    between taking one from an iterator and calling it."""
    return [*map(BuiltinFunctionType.__call__, functions)]


# within_transform(): whether a transform of torch.func (vmap, grad, jvp) runs. The tensors of the code in it have no
# memory of their own.
within_transform: Callable[[], bool] = private(torch._C, "_are_functorch_transforms_active")

# is_any_autocast_enabled(): whether autocast is on for some kind of device. It is faster than to ask for two kinds.
is_any_autocast_enabled: Callable[[], bool] = private(torch._C, "_is_any_autocast_enabled")

_saved_tensors_hooks = private(torch._C._autograd, "_top_saved_tensors_default_hooks")
# saved_tensors_hooks(): the innermost hooks that pack and unpack what autograd saves, None if there are none.
saved_tensors_hooks: Callable[[], tuple[Any, Any] | None] = functools.partial(_saved_tensors_hooks, True)

# Context without function modes and `__torch_function__`, for what ampkit asks of tensors between operations.
without_torch_function: Callable[[], AbstractContextManager[None]] = private(torch._C, "DisableTorchFunction")


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Context without the dispatch modes that are entered: none of them sees what runs in it."""
    entered = list(_dispatch_modes())

    def enter_again() -> None:
        for mode in entered[len(_dispatch_modes()) :]:
            _push_dispatch_mode(mode)

    with Undo() as undo:
        undo.note(enter_again)
        while _dispatch_modes():
            _pop_dispatch_mode()
        yield
