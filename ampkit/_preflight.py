"""Which lines of a step a CUDA graph cannot hold: all found in one eager step, which computes what it would anyway."""

import contextlib
import functools
import inspect
import linecache
import os
import random
import re
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _torch


class Finding(NamedTuple):
    """Something that a CUDA graph cannot hold.

    Attributes:
        line: `file:line: source` of the innermost line that is neither torch's nor ampkit's; "" if there is none.
        what: what happens there.
        advice: what to write instead.
        count: how often it happened.
    """

    line: str
    what: str
    advice: str
    count: int  # type: ignore[assignment]  # hides tuple.count


def describe(findings: Sequence[Finding]) -> str:
    """Return a text of one line per finding under a head line; "" if there are none."""
    if not findings:
        return ""
    lines = len({finding.line or finding.what for finding in findings})
    rows = [f"{lines} line{'s' if lines > 1 else ''} of the step cannot be captured:"]
    for line, what, advice, count in findings:
        where, times = f"{line} - " if line else "", f" ({count} times)" if count > 1 else ""
        rows.append(f"  {where}{what}{times}. {advice}")
    return "\n".join(rows)


class Preflight:
    """Context in which one training step runs as it would without, and what a CUDA graph cannot hold is written down.

    It sees what waits for the device, copies between host and device, and random numbers that a graph would freeze, in
    forward, backward and optimizer. On a CPU device, where the engine is emulated for tests, CPU tensors stand for the
    device's; there is no copy to see then, and what happens in torch's own code alone does not count, for its CPU
    optimizers keep step counts on the host.

    The step has the bits that it would have, but for `cross_entropy` with both class weights and label smoothing where
    some targets are ignored: under any dispatch mode, torch sums the weights in another order. It is slower: dozens
    of microseconds per operation.

    Args:
        device: where the step computes.
        generators: CUDA generators beside the default one that a graph would know.

    Sync: none of its own, but one wait at its end where other threads run.
    """

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator] = ()) -> None:
        self._watched = _Watched(device, tuple(generators))
        self._observer = _Observer(self._run)
        self._found: dict[tuple[str, str], Finding] = {}
        self._named: set[str] = set()  # places of which it is known why they wait
        self._op: str | None = None  # the operation that runs
        self._waits = 0  # how often it waited so far
        self._stepped_aside = False  # in this backward
        self._left = ExitStack()

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, in the order in which it first happened, equal things on one line as one."""
        return list(self._found.values())

    def __enter__(self) -> "Preflight":
        self._thread = threading.get_ident()
        self._blame = _Blame(sys._getframe(1), self._watched.device)
        self._sources = [_Source(name, read) for name, read in _HOST_SOURCES.items()]
        with ExitStack() as entered:
            self._watch_warnings(entered)
            self._watch_backward(entered)
            self._watch_calls(entered)
            entered.enter_context(self._observer)
            self._left = entered.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._look_for_draws()
        finally:
            self._left.__exit__(kind, error, stack)

    # ------------------------------------------------------------------------------------------------------- detectors

    def _watch_warnings(self, entered: ExitStack) -> None:
        """Have torch warn of each wait for the device, and take these warnings, and no others, from the user."""
        entered.enter_context(warnings.catch_warnings())
        if not torch.is_anomaly_enabled():
            warnings.filterwarnings("ignore", _ANOMALY)
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", module=re.escape(__name__) + "$")  # see `_shown_as`
        warnings.filterwarnings("always", _WAIT)
        self._show = warnings.showwarning
        entered.enter_context(_replaced(warnings, "showwarning", self._on_warning))
        self._told = False  # the user asked to be warned of waits
        if self._watched.device.type == "cuda":
            before = torch.cuda.get_sync_debug_mode()
            self._told = before == 1
            if before == 0:  # 2 raises at a wait, as the user wants it
                entered.callback(self._stop_telling, before)
                torch.cuda.set_sync_debug_mode("warn")

    def _stop_telling(self, before: int) -> None:
        """Set the sync debug mode back, and let other threads, which it tells too, come to the end of their waits.

        A thread is warned when its wait is over. Later than this, the warning would come under the user's filters.
        """
        torch.cuda.set_sync_debug_mode(before)
        if threading.active_count() > 1:
            torch.cuda.synchronize(self._watched.device)
            time.sleep(0.01)  # gives them the interpreter

    def _watch_backward(self, entered: ExitStack) -> None:
        """Have the backward run in this thread, where modes see it, and its nodes know where they were made."""
        self._checks_nan = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
        if self._checks_nan:
            self._add(_NAN_CHECK, _Place("", "", False))
        entered.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=self._checks_nan))
        entered.enter_context(torch.autograd.set_multithreading_enabled(False))
        for owner, name in _torch.ENGINE_ENTRIES:
            entered.enter_context(_replaced(owner, name, self._backward_by(getattr(owner, name))))

    def _watch_calls(self, entered: ExitStack) -> None:
        """Have the functions call here that neither a dispatch mode nor the sync debug mode sees."""
        printed = _Problem("prints a tensor, which reads it", "Return it in aux and print it after the step.")
        self._announce(entered, *_torch.PRINT_ENTRY, printed)
        if self._watched.device.type == "cuda":
            for name, owner, attribute in _torch.host_waits():
                problem = _Problem(f"{name} waits for the device", "Wait after the step.")
                self._announce(entered, owner, attribute, problem)

    def _announce(self, entered: ExitStack, owner: Any, name: str, problem: "_Problem") -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def announced(*args: Any, **kwargs: Any) -> Any:
            tensors = _tensors(args)
            if threading.get_ident() == self._thread and (not tensors or self._watched.has(tensors)):
                self._report(problem)
            return original(*args, **kwargs)

        entered.enter_context(_replaced(owner, name, announced))

    # ---------------------------------------------------------------------------------------------------------- events

    def _run(self, op: Any, kinds: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and report what is wrong with it."""
        if any(map(_torch.is_fake, kinds)):
            return op(*args, **kwargs)
        self._look_for_draws()
        outer, self._op, self._waits = (self._op, self._waits), _name(op), 0
        try:
            # A binding between, to learn of waits while it is known who waits. It changes how subclasses dispatch.
            plain = hasattr(op, "overloadpacket") and all(kind is Tensor for kind in kinds)
            result = _torch.call_from_binding(op, (), args, kwargs) if plain else op(*args, **kwargs)
        finally:
            waits = self._waits
            self._op, self._waits = outer
        check = _check_of(op)
        problems = list(check(_Call(_name(op), args, kwargs, result), self._watched)) if check else []
        for problem in problems:
            self._report(problem)
        if waits and not problems:
            self._report(_Problem(f"{_name(op)} waits for the device", _STAY))
        return result

    def _on_warning(self, message: Any, category: Any, filename: str, lineno: int, *more: Any, **named: Any) -> None:
        """Take the place of `warnings.showwarning`."""
        if re.match(_WAIT, str(message)):
            if threading.get_ident() == self._thread:
                self._on_wait()
            if self._told:
                self._show(message, category, filename, lineno, *more, **named)
        elif filename == __file__:
            _shown_as(message, category, _real_frame(sys._getframe(1)))
        else:
            self._show(message, category, filename, lineno, *more, **named)

    def _on_wait(self) -> None:
        if self._op is not None:
            self._waits += 1
            return
        # Not within an operation that was dispatched here. Its message comes late, at the end of the binding.
        place = self._blame()
        late = _real_frame(sys._getframe(1)).f_code is _torch.ENGINE_CODE and self._stepped_aside
        if place is not None and place.key not in self._named and not late:
            self._add(_Problem("waits for the device", _STAY), place)

    def _look_for_draws(self) -> None:
        """Report what drew random numbers on the host since the last look."""
        for source in self._sources:
            if source.has_changed():
                where = "here or just before" + (" or in another thread" if threading.active_count() > 1 else "")
                problem = _Problem(f"draws from {source.name}, {where}, which a graph would freeze", _DRAW_ON_DEVICE)
                self._add(problem, self._blame() or _Place("", "", False))

    def _backward_by(self, engine: Callable[..., Any]) -> Callable[..., Any]:
        """Return autograd's engine with another first look at the graph."""

        @functools.wraps(engine)
        def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return engine(outputs, *args, **kwargs)
            outer, self._stepped_aside = self._stepped_aside, False
            hooks = [
                node.register_prehook(functools.partial(self._step_aside, node))
                for node in _nodes(outputs)
                if _looks_at_values(node)
            ]
            try:
                return engine(outputs, *args, **kwargs)
            finally:
                self._stepped_aside = outer
                for hook in hooks:
                    hook.remove()

        return run

    def _step_aside(self, node: Any, grads: Any) -> None:
        """Let a node run unobserved, which under a dispatch mode would compute otherwise, and without waiting."""
        self._report(_Problem(f"{node.name()} looks at values on the host", _OTHER_BACKWARD), node)
        _torch.step_aside(self._observer)
        self._stepped_aside = True

    def _report(self, problem: "_Problem", node: Any = None) -> None:
        """Add a problem of the line that runs, or that made this node of the graph."""
        place = self._blame(node)
        in_engine = place is not None and (place.backward or not place.line)
        if place is None or (in_engine and self._checks_nan and problem is _READ):
            return
        self._add(problem, place)
        self._named.add(place.key)

    def _add(self, problem: "_Problem", place: "_Place") -> None:
        what = f"{problem.what}, in {place.inside}" if place.inside else problem.what
        if place.backward and (place.line, what) not in self._found:
            what = f"{what}, in its backward"
        known = self._found.get((place.line, what), Finding(place.line, what, problem.advice, 0))
        self._found[place.line, what] = known._replace(count=known.count + 1)


class _Observer(_torch.TorchDispatchMode):
    """Hands every operation below autograd to a function."""

    supports_higher_order_operators = True

    def __init__(self, run: Callable[[Any, Sequence[type], tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as it is; else torch.compile runs it eagerly, and never compiles what is new here."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, types, args, kwargs or {})


@contextlib.contextmanager
def _replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, before)


# ---------------------------------------------------------------------------------------------------- what is wrong


class _Problem(NamedTuple):
    what: str
    advice: str


_STAY = "Do it before or after the step, or with operations that stay on the device."
_KEEP_SHAPE = "Use torch.where or masked_fill, which keep the shape."
_DRAW_ON_DEVICE = "Draw with torch on the device, or before the step and pass the numbers in as a tensor."
_OTHER_BACKWARD = "Write it with other operations (exp and log, torch.where), or as a torch.autograd.Function."

_READ = _Problem(
    "waits for the device to read a value (.item(), float(tensor), `if tensor:`)",
    "Keep the value on the device (torch.where), or return it in aux and read it after the step.",
)
_MASK = _Problem("a boolean mask as an index waits for the device to count what it selects", _KEEP_SHAPE)
_HOST_DRAW = _Problem("draws random numbers on the host, which a graph would freeze", _DRAW_ON_DEVICE)
_GENERATOR = _Problem("draws from a CUDA generator that the graph does not know", "Pass generators=[generator].")
_NAN_CHECK = _Problem(
    "torch.autograd.detect_anomaly() reads every gradient on the host", "Switch it off, or pass check_nan=False."
)

# What the sync debug mode and anomaly mode say (c10/cuda/CUDAFunctions.cpp, csrc/autograd/python_anomaly_mode.cpp).
_WAIT = "called a synchronizing CUDA operation"
_ANOMALY = r"(Error detected in \S+\. (Traceback of|No) forward)|(\s*Previous calculation was induced by )"


class _Watched(NamedTuple):
    """Where the step computes, and the CUDA generators that a graph would know beside the default ones."""

    device: torch.device
    generators: tuple[torch.Generator, ...]

    def has(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether any of these tensors is on such a device."""
        here = (tensor for tensor in tensors if tensor.device.type == self.device.type)
        return any(not _torch.is_fake(type(tensor)) for tensor in here)


class _Call(NamedTuple):
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


_Check = Callable[[_Call, _Watched], Iterator[_Problem]]


@functools.cache
def _check_of(op: Any) -> _Check | None:
    """Return what finds the problems of an operation's call, None if it can have none."""
    name, tags = _name(op), getattr(op, "tags", ())
    if op is torch.ops.aten.where.default:  # as `nonzero` does, in inference mode
        return _depends_on_data
    if getattr(op, "namespace", "") == "aten" and name in _CHECKS:
        return _CHECKS[name]
    if torch.Tag.data_dependent_output in tags:
        return _reads
    if torch.Tag.dynamic_output_shape in tags:
        return _depends_on_data
    if torch.Tag.nondeterministic_seeded in tags:
        return _draws
    return None


def _reads(call: _Call, watched: _Watched) -> Iterator[_Problem]:
    if watched.has(_tensors(call.args)):
        yield _READ if call.name in _SINGLE_READS else _Problem(f"{call.name} waits for the device", _READ.advice)


def _depends_on_data(call: _Call, watched: _Watched) -> Iterator[_Problem]:
    if watched.has(_tensors((call.args, call.kwargs))):
        yield _Problem(f"{call.name} waits for the device: the shape of its result depends on data", _KEEP_SHAPE)


def _repeats(call: _Call, watched: _Watched) -> Iterator[_Problem]:
    counts = call.args[1] if len(call.args) > 1 else call.args[0]  # a number in inference mode, if the user gave one
    if watched.has(_tensors(counts)) and call.kwargs.get("output_size") is None:
        yield _Problem("repeat_interleave waits for the device to count its result", "Pass output_size=.")


def _encodes(call: _Call, watched: _Watched) -> Iterator[_Problem]:
    if watched.has(_tensors(call.args)) and len(call.args) == 1:
        yield _Problem("one_hot waits for the device to count the classes", "Pass num_classes=.")


def _indexes(call: _Call, watched: _Watched) -> Iterator[_Problem]:
    indices = _tensors(call.args[1])
    if not watched.has(_tensors(call.args[0])):
        return
    for index in indices:
        if index.numel():
            yield from _copied(index, call.args[0], watched)
    masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
    if masks and not (len(masks) == len(indices) == 1 and _is_fill(*call.args[2:])):
        yield _MASK


def _is_fill(value: Any = None, accumulate: bool = False, *more: Any) -> bool:
    """Return whether `x[mask] = value` is a `masked_fill_`, as at::native::canDispatchToMaskedFill decides it."""
    return isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu" and not accumulate


def _copies(call: _Call, watched: _Watched) -> Iterator[_Problem]:
    if call.name == "lift_fresh":  # `torch.tensor(data, device=...)` hides its copy from dispatch modes, not this
        pairs = [(None, call.result)]
    elif call.name in ("_foreach_copy_", "_foreach_copy"):
        pairs = list(zip(call.args[1], call.args[0], strict=True))
    elif call.name in ("copy_", "copy"):
        pairs = [(call.args[1], call.args[0])]
    else:
        pairs = [(call.args[0], call.result)]
    for source, target in pairs:
        yield from _copied(source, target, watched)


def _copied(source: Tensor | None, target: Tensor, watched: _Watched) -> Iterator[_Problem]:
    """Yield a problem if this copy, from new host memory if there is no source, crosses over."""
    kinds = ("cpu" if source is None else source.device.type, target.device.type)
    if watched.device.type == "cpu" or not target.numel():
        return
    if kinds == (watched.device.type, "cpu"):
        advice = "Keep it on the device, or return it in aux and copy it after the step."
        yield _Problem(f"copies from the device to {_memory(target)} memory", advice)
    elif kinds == ("cpu", watched.device.type):
        advice = "Make the tensor on the device (torch.full, torch.arange) or before the step, or pass it in."
        yield _Problem(f"copies from {_memory(source)} memory to the device", advice)


def _memory(tensor: Tensor | None) -> str:
    return "pinned host" if tensor is not None and tensor.is_pinned() else "pageable host"


def _draws(call: _Call, watched: _Watched) -> Iterator[_Problem]:
    results, generator = _tensors(call.result), call.kwargs.get("generator")
    if watched.device.type != "cpu" and results and all(tensor.device.type == "cpu" for tensor in results):
        yield _HOST_DRAW
    elif generator is not None and generator.device.type == "cuda" == watched.device.type:
        known = (*watched.generators, *torch.cuda.default_generators)
        if not any(_torch.is_same_generator(generator, other) for other in known):
            yield _GENERATOR


_SINGLE_READS = ("_local_scalar_dense", "item", "is_nonzero")
# Of ATen, by name. Others by their tags. `linalg_lstsq` has the tag of a shape that depends on data; its solutions have
# none, and if a solver waits, the sync debug mode tells.
_CHECKS: dict[str, _Check | None] = {
    **dict.fromkeys(_SINGLE_READS, _reads),
    **dict.fromkeys(("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"), _indexes),
    **dict.fromkeys(("_to_copy", "to", "copy_", "copy", "_foreach_copy_", "_foreach_copy", "lift_fresh"), _copies),
    "repeat_interleave": _repeats,
    "one_hot": _encodes,
    "linalg_lstsq": None,
}


def _name(op: Any) -> str:
    packet = getattr(op, "overloadpacket", None)
    return str(packet.__name__ if packet is not None else op.name())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _torch.tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _nodes(outputs: Any) -> Iterator[Any]:
    """Yield every node of the graph behind what a backward starts from: tensors and `GradientEdge`s."""
    left: list[Any] = [output.grad_fn if isinstance(output, Tensor) else output.node for output in outputs]
    seen: set[Any] = {None}
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            yield node
            left += [following for following, _ in node.next_functions]


def _looks_at_values(node: Any) -> bool:
    """Return whether a built-in node reads on the host what is in a tensor, but not so under a dispatch mode.

    Such a mode makes tensors "subclass-like", for which some formulas of csrc/autograd/FunctionsManual.cpp have another
    form, of other rounding. All operations in torch's own test samples were tried, forward and backward.
    """
    name = str(node.name())
    if name.startswith("MaskedFillBackward"):  # the gradient of the value, where that is a tensor
        return len(node.next_functions) > 1 and node.next_functions[1][0] is not None
    return name.startswith(("ProdBackward", "CumprodBackward"))


class _Source:
    """A source of random numbers on the host that is not torch's.

    Args:
        name: what messages call it.
        read: returns its state, None while it is not in use.
    """

    def __init__(self, name: str, read: Callable[[], Any]) -> None:
        self.name = name
        self._read = read
        self._state = read()

    def has_changed(self) -> bool:
        """Return whether numbers were drawn since the last look."""
        before, self._state = self._state, self._read()
        return before is not None and before != self._state


def _numpy_state() -> Any:
    numpy_random = sys.modules.get("numpy.random")
    return None if numpy_random is None else _comparable(numpy_random.get_state(legacy=False))


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


_HOST_SOURCES: dict[str, Callable[[], Any]] = {"Python's random": random.getstate, "numpy.random": _numpy_state}


# --------------------------------------------------------------------------------------------------- whose line it is


class _Place(NamedTuple):
    """Where something happened.

    Attributes:
        line: the user's, "" if there is none.
        inside: torch's or ampkit's line that it led to, "" if it says no more.
        backward: it happened in a built-in backward, and `line` is of its forward.
    """

    line: str
    inside: str
    backward: bool

    @property
    def key(self) -> str:
        """What tells places apart."""
        return self.line or self.inside


class _Blame:
    """Finds the user's line.

    Args:
        entered: the frame that entered the context. Its callers are not to be blamed.
        device: on a CPU, what happens in torch's code alone, or in its optimizers, counts for nothing.
    """

    def __init__(self, entered: FrameType, device: torch.device) -> None:
        entered = _entering(entered)
        self._depth = len(list(_frames(entered)))
        self._callers = traceback.format_stack(entered.f_back) if entered.f_back else []
        self._lenient = device.type == "cpu"

    def __call__(self, node: Any = None) -> _Place | None:
        """Return where the caller is called from, or where `node` was made; None if that does not count."""
        frames = list(_frames(_real_frame(sys._getframe(1))))
        node, inside = node or _torch.current_node(), ""
        for frame in frames[: max(len(frames) - self._depth + 1, 0)]:
            if _is_users(frame.f_code.co_filename, frame.f_globals.get("__name__", "")):
                line = _line(frame.f_code.co_filename, frame.f_lineno)
                return None if self._lenient and inside.startswith(_OPTIMIZERS) else _Place(line, inside, False)
            if node is not None and frame.f_code is _torch.ENGINE_CODE and (line := self._forward_line(node)):
                return _Place(line, "", True)
            inside = inside or _short(frame)
        return None if self._lenient else _Place("", inside, False)

    def _forward_line(self, node: Any) -> str:
        made = _torch.forward_stack(node)
        if made[: len(self._callers)] == self._callers:
            made = made[len(self._callers) :]
        entries = [match.groups() for match in map(_ENTRY.match, made) if match]
        return next((_line(file, int(number)) for file, number in reversed(entries) if _is_users(file)), "")


_ENTRY = re.compile(r'  File "(.+)", line (\d+), in ')  # of traceback.format_stack
_FOLDERS = tuple(f"{Path(module).parent}{os.sep}" for module in (torch.__file__, __file__))
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_OPTIMIZERS = f"torch{os.sep}optim{os.sep}"
# Between an operation, or a warning, and the line that it stands on.
_WRAPPERS = (
    __file__,
    f"{_FOLDERS[0]}_compile.py",
    f"{_FOLDERS[0]}_dynamo{os.sep}eval_frame.py",
    warnings.catch_warnings.__init__.__code__.co_filename,
)
# Files of torch whose lines say no more than the user's line does.
_THIN = ("_tensor", "_tensor_str", "functional", "_jit_internal", "_ops", "__init__", "streams", "graph")


def _is_users(filename: str, module: str = "") -> bool:
    """Return whether a frame is neither torch's (code that it generates included) nor ampkit's nor Python's own."""
    if filename.startswith((*_FOLDERS, "<eval_with_key>", "<frozen ", "<string>")) or module.startswith("torch."):
        return False
    return not filename.startswith(_STDLIB) or "-packages" in filename


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _entering(frame: FrameType) -> FrameType:
    """Return the frame in which a context was entered, if need be through an `ExitStack` or a `contextmanager`."""
    if frame.f_code.co_flags & inspect.CO_GENERATOR and frame.f_back and _is_contextlib(frame.f_back):
        frame = frame.f_back
    return next(outer for outer in _frames(frame) if not _is_contextlib(outer))


def _is_contextlib(frame: FrameType) -> bool:
    return frame.f_code.co_filename == contextlib.__file__


def _real_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame, from this one on, that would be there without the preflight."""
    return next(f for f in _frames(frame) if f.f_code.co_filename not in _WRAPPERS)


def _line(filename: str, number: int) -> str:
    return f"{filename}:{number}: `{linecache.getline(filename, number).strip()}`"


def _short(frame: FrameType) -> str:
    """Return `torch/optim/adam.py:345`, "" for code that says no more than its caller's line."""
    filename = frame.f_code.co_filename
    folder = next((folder for folder in _FOLDERS if filename.startswith(folder)), None)
    if folder is None or filename in _WRAPPERS or Path(filename).stem in _THIN:
        return ""
    return f"{os.path.relpath(filename, Path(folder).parent)}:{frame.f_lineno}"


def _shown_as(message: Any, category: Any, frame: FrameType) -> None:
    """Issue a warning that `Preflight._run` held up, under the user's filters, as if its operation had issued it."""
    scope = frame.f_globals
    registry = scope.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, scope["__name__"], registry)
