"""The preflight: an ordinary training step, watched so that it shows every line which cannot be captured."""

import functools
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._torch.autograd.autograd import ENGINE_CODE, ENGINE_ENTRIES, graph_nodes
from ..._torch.autograd.backward_thread import run_backwards_here
from ..._torch.tensors import modes as torch_modes
from ..._torch.tensors.fake_tensors import is_fake
from ..._torch.tensors.fast_paths import autocast_of_parts
from ..._torch.tensors.modes import WatchingMode, enter, leave
from ..._torch.tensors.operators import (
    CROSS_ENTROPY_ENTRY,
    HOST_COPIES,
    LIFT_FRESH,
    LIST_READS,
    PRINT_ENTRY,
    OperationCall,
    call_from_binding,
    host_waits,
    op_builtin,
)
from ..._undo import Undo, keep_warning_filters, replace
from ..._user_line import SourceLocation, UserLineFinder, compiler_runs, real_frame, warn_at, wraps_operations
from ..host.replaced import replace_here
from ..host.uploads import Uploads
from .draw_record import DrawRecorder
from .host_random import HostSources
from .host_values import receive
from .reseeding import GeneratorWatch, getters, setters
from .uncapturable import (
    DRAW_ON_DEVICE,
    PRINT,
    READ,
    SMOOTHED,
    WAITS,
    Problem,
    Watched,
    host_copy,
    host_wait,
    list_read,
    problem_of,
    problems_of,
    remedy,
    sets_generator,
)

wraps_operations(__file__)

_Key = tuple[str, str]  # line and what of a finding


class Finding(NamedTuple):
    """A line of the step that cannot be captured, and why.

    Attributes:
        line: `file:line: source` of the innermost line that is neither torch's nor ampkit's; "" if there is none.
        what: what happens there.
        advice: what to write instead.
        count: how often it happened.
        ms: milliseconds that the host spent in it, all times together; None if that cannot be measured. The host is
            slower under the preflight, so it waits less than in other steps.
        graph_only: whether only a graph rules it out. Otherwise the host waits for the device.
        caller: where `line` is one of an installed package, the line of the user's own that led to it.
    """

    line: str
    what: str
    advice: str
    count: int  # type: ignore[assignment]  # hides tuple.count
    ms: float | None = None
    graph_only: bool = False
    caller: str = ""


def describe(findings: Sequence[Finding]) -> str:
    """Return a text with one line per finding under a heading; "" if there are no findings."""
    if not findings:
        return ""
    lines = len({finding.line or finding.what for finding in findings})
    rows = [f"{lines} line{'s' if lines > 1 else ''} of the step cannot be captured:"]
    for finding in findings:
        caller = f", called from {finding.caller}" if finding.caller else ""
        where = f"{finding.line}{caller} - " if finding.line else ""
        times = f" ({finding.count} times)" if finding.count > 1 else ""
        rows.append(f"  {where}{finding.what}{times}. {finding.advice}")
    return "\n".join(rows)


class Preflight(WatchingMode):
    """Context for a training step that finds what cannot be captured in it.

    It finds waits for the device, copies between host and device, and random numbers that a graph would freeze, in
    forward, backward and optimizer. On a CPU, where graphs are emulated for tests, CPU tensors stand for tensors on the
    device. There, of the copies to the host it finds `tolist`, `numpy` and `torch.tensor` of a list of tensors, because
    others copy nothing. It ignores what torch's own code does there, because torch's CPU optimizers keep step counts on
    the host.

    The step has the same bits as without the preflight. It is slower, by dozens of microseconds per operation.

    Args:
        device: where the step computes.
        generators: CUDA generators beside the default one that a graph is captured with.
        graphed: whether to advise how to write it in a graphed step. Otherwise the advice is for any step.
        observers: called with each call of an operation. Another dispatch mode would change kernels.
        located: called with the line and the problem of each finding where it is found, also of one found before, and
            with the autograd node that it belongs to, if that is known.
        draws: records the draws on the host that may be made ahead of a graph. Without it, each of them is a finding.
        bitmaps: how long those are that Reducers of DDP copy to the device, to find unused parameters.
        uploads: has operations get constants that it uploads. Without it, each copy of theirs is a finding.
        knows_numbers: returns ahead of each operation whether a capture can be given the numbers that it reads.

    Sync: none of its own, but one wait at its end where other threads run.
    """

    def __init__(
        self,
        device: torch.device,
        generators: Sequence[torch.Generator] = (),
        *,
        graphed: bool = True,
        observers: Sequence[Callable[[OperationCall], object]] = (),
        located: Callable[[str, str, Any], object] | None = None,
        draws: DrawRecorder | None = None,
        bitmaps: Sequence[int] = (),
        uploads: Uploads | None = None,
        knows_numbers: Callable[..., bool] = lambda *_: False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated in torch
        self._watched = Watched(device, tuple(generators), tuple(bitmaps))
        self._graphed = graphed
        self._observers = observers
        self._located = located
        self._draws = draws
        self._uploads, self._knows_numbers = uploads, knows_numbers
        self._found: dict[_Key, Finding] = {}
        self._explained: set[str] = set()  # keys of places whose wait was reported with its operation
        self._covered: dict[str, _Key] = {}  # lines for which one finding is enough, with its key
        self._waits: int | None = None  # how often the operation that runs has waited; None outside of operations
        self._stepped_aside = False  # whether a node of this backward has run without this mode
        self._reported = False  # whether a call runs that has been reported as a whole
        self._sets_generator = False  # whether a call runs that sets a generator
        self._sets_next = False  # whether the same call goes on to set another generator

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, in the order of first occurrence. The same problem on the same line is one finding."""
        return list(self._found.values())

    def __enter__(self) -> "Preflight":
        self._thread = threading.get_ident()
        self._user_line = UserLineFinder(sys._getframe(1), skip_torch=self._watched.device.type == "cpu")
        self._host_sources = HostSources()
        self._generator_watch = GeneratorWatch(self._watched.device, self._watched.generators)
        self._undo = Undo()
        try:
            self._undo.__enter__()
            self._watch_warnings(self._undo)
            self._watch_backward(self._undo)
            self._watch_calls(self._undo)
            for owner, name in getters():
                replace_here(self._undo, owner, name, self._read_state)
            for called, owner, name in setters():
                replace_here(self._undo, owner, name, functools.partial(self._set_generator, called))
            receive(self._undo, lambda problem, line: self._add(problem, SourceLocation(line)))
            if self._draws is not None:
                self._draws.begin(self._undo)
            enter(self._undo, self)
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            leave(self)
            if kind is None:
                self.look_for_draws()
                self._report_draws(self._host_sources.drawn_from_pairs())
        finally:
            self._undo.close()
        if kind is None and self._draws is not None:
            self._draws.end()
            for problem, place in self._draws.refused:
                self._add(problem, place)

    # ------------------------------------------------------------------------------------------------------- detectors

    def _watch_warnings(self, undo: Undo) -> None:
        """Have torch warn of each wait for the device. The user sees none of these warnings, but all others."""
        keep_warning_filters(undo)
        if not torch.is_anomaly_enabled():
            warnings.filterwarnings("ignore", _ANOMALY)
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", module=re.escape(__name__) + "$")  # see `_on_warning`
        warnings.filterwarnings("always", _WAIT)
        self._show = warnings.showwarning
        replace(undo, warnings, "showwarning", self._on_warning)
        before = torch.cuda.get_sync_debug_mode() if self._watched.device.type == "cuda" else None
        self._user_warned = before == 1  # as the user has asked; with 2, a wait raises, as the user wants it
        if before == 0:
            undo.note(self._stop_warnings)
            torch.cuda.set_sync_debug_mode("warn")

    def _stop_warnings(self) -> None:
        """Set the sync debug mode back, then wait until other threads, which it warns too, have ended their waits.

        A thread is warned at the end of its wait. After this function, the user would see that warning.
        """
        torch.cuda.set_sync_debug_mode("default")
        if threading.active_count() > 1:
            torch.cuda.synchronize(self._watched.device)
            time.sleep(0.01)  # gives them the interpreter

    def _watch_backward(self, undo: Undo) -> None:
        """Have the backward run in this thread, where modes see it, and autograd nodes keep the line that made them."""
        self._checks_nan = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
        if self._checks_nan:
            reads = "torch.autograd.detect_anomaly() reads every gradient on the host"
            self._add(Problem(reads, "Switch it off, or pass check_nan=False."), SourceLocation())
        if not torch.is_anomaly_enabled():  # otherwise the user wants to see the stacks
            self._user_line.note_lines_alone(undo)
        undo.note(torch.set_anomaly_enabled, torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
        torch.set_anomaly_enabled(True, self._checks_nan)
        run_backwards_here(undo)
        for owner, name in ENGINE_ENTRIES:
            replace(undo, owner, name, functools.partial(self._run_backward, getattr(owner, name)))

    def _watch_calls(self, undo: Undo) -> None:
        """Replace functions that wait where neither a dispatch mode nor the sync debug mode sees it."""
        replace_here(undo, *PRINT_ENTRY, functools.partial(self._call_reported, PRINT))
        replace_here(undo, *CROSS_ENTROPY_ENTRY, self._cross_entropy)
        if self._watched.device.type == "cuda":
            for name, owner, attribute in host_waits():
                replace_here(undo, owner, attribute, functools.partial(self._call_reported, host_wait(name)))
        else:  # of a tensor on CUDA these are operations, or copies that the sync debug mode sees
            for owner, name in HOST_COPIES:
                replace_here(undo, owner, name, functools.partial(self._read, Tensor, host_copy(name), 0))
            for owner, name, place in LIST_READS:
                replace_here(undo, owner, name, functools.partial(self._read, (list, tuple), list_read(name), place))

    def _read(
        self, kind: Any, problem: Problem, place: int, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Report a problem if the argument at this place is of this type and has tensors of the device in it."""
        if not self._reported:  # printing reads too
            given = args[place] if len(args) > place else kwargs.get("data", kwargs.get("obj"))
            if isinstance(given, kind) and self._watched.has(given):
                self._report(problem)
        return original(*args, **kwargs)

    def _read_state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state = original(*args, **kwargs)
        self._generator_watch.reads(state)
        return state

    def _set_generator(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._sets_generator:
            return original(*args, **kwargs)
        puts_back = "set_rng_state" in name
        self.look_for_draws()
        self._sets_generator = True
        try:
            result = original(*args, **kwargs)
        finally:
            self._sets_generator = False
        self._generator_watch.was_set()  # so that it is not reported again
        states = args[0] if args else kwargs.get("new_state", kwargs.get("new_states"))
        if not (puts_back and self._generator_watch.may_be_put_back(states)):
            self._report(sets_generator(name))
        # `torch.manual_seed`, called by a name that was imported earlier, goes on to set the host's generator.
        self._sets_next = not puts_back and real_frame().f_code.co_filename == torch.random.__file__
        return result

    def _cross_entropy(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take the place of the function that computes it, which has another form under a dispatch mode."""
        weight, reduction, smoothing = (*args[2:4], *args[5:6], 0.0, 0.0, 0.0)[:3]
        if weight is None or reduction != _MEAN or not smoothing or args[1].is_floating_point():
            return original(*args, **kwargs)
        with torch_modes.without_dispatch_modes():
            return self._call_reported(SMOOTHED, original, *args, **kwargs)

    def _call_reported(self, problem: Problem, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take the place of a function that is a problem itself."""
        if problem is PRINT and not self._watched.has(args):
            return original(*args, **kwargs)
        key, start = self._report(problem), time.perf_counter()  # reported first, see `_on_wait`
        outer, self._reported = self._reported, True
        try:
            return original(*args, **kwargs)
        finally:
            self._reported = outer
            self._spent(key, time.perf_counter() - start)

    # ---------------------------------------------------------------------------------------------------------- events

    def __torch_dispatch__(self, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation below autograd and report what is wrong with it."""
        kwargs = kwargs or {}
        if any(map(is_fake, kinds)):
            return op(*args, **kwargs)
        self.look_for_draws()
        if self._uploads is not None:
            args = self._uploads.operands(op, args, kwargs)
        known = self._knows_numbers(op, args, kwargs)
        outer, self._waits = self._waits, 0
        start = time.perf_counter()
        try:
            # A call through a binding warns of a wait before it returns, while it is known which operation has waited.
            # But it would change how subclasses are dispatched.
            plain = hasattr(op, "overloadpacket") and all(kind is Tensor for kind in kinds)
            with autocast_of_parts(op):
                try:
                    result = call_from_binding(op_builtin(op), (), args, kwargs) if plain else op(*args, **kwargs)
                except SystemError:  # it has warned that it waits, and then raised an error
                    result = op(*args, **kwargs)
        finally:
            waits, self._waits = self._waits, outer
        seconds = time.perf_counter() - start
        call = OperationCall(op, args, kwargs, result)
        problems = [] if known else problems_of(call, self._watched, waited=bool(waits))
        if self._draws is not None:
            problems = self._draws.judged(call, problems, self._user_line)
        keys = [self._report(problem) for problem in problems]
        # LIFT_FRESH is dispatched after its work was done, so that its time says nothing.
        if problems and not (problems[0].graph_only or op is LIFT_FRESH):
            self._spent(keys[0], seconds)
        for observer in self._observers:
            observer(call)
        return result

    def _on_warning(self, message: Any, category: Any, filename: str, *where: Any) -> None:
        """Take the place of `warnings.showwarning`."""
        if re.match(_WAIT, str(message)):
            if threading.get_ident() == self._thread:
                self._on_wait()
            if self._user_warned:
                self._show(message, category, filename, *where)
        elif filename == __file__:  # by an operation that this file called
            warn_at(real_frame(), message, category)
        else:
            self._show(message, category, filename, *where)

    def _on_wait(self) -> None:
        if self._waits is not None:
            self._waits += 1
            return
        # The wait is in no operation that was dispatched here. Its warning comes late, when a binding returns.
        place = self._user_line()
        late = self._stepped_aside and real_frame().f_code is ENGINE_CODE
        if place is not None and place.key not in self._explained and not (late or compiler_runs()):
            self._add(WAITS, place)

    def look_for_draws(self) -> None:
        """Report draws of random numbers on the host, and generators that were set, since this was called last."""
        self._report_draws(self._host_sources.drawn_from())
        named, self._sets_next = self._sets_next, False
        if self._generator_watch.was_set() and not named:
            self._add(sets_generator("something here or just before"), self._user_line() or SourceLocation())

    def _report_draws(self, sources: list[str]) -> None:
        for name in sources:
            thread = ", or in another thread" * (threading.active_count() > 1)
            where = f"here or in a line that ran just before{thread}"
            what = f"draws from {name}, {where}, and a graph would freeze the number"
            self._add(Problem(what, DRAW_ON_DEVICE, graph_only=True), self._user_line() or SourceLocation())

    def _run_backward(self, engine: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run autograd's engine, with hooks on the nodes that must run without this mode."""
        if threading.get_ident() != self._thread:
            return engine(outputs, *args, **kwargs)
        outer, self._stepped_aside = self._stepped_aside, False
        found = [(node, problem_of(node)) for node in graph_nodes(outputs)]
        hooks = [hook for node, problem in found if problem for hook in self._step_aside(node, problem)]
        try:
            return engine(outputs, *args, **kwargs)
        finally:
            self._stepped_aside = outer
            for hook in hooks:
                hook.remove()

    def _step_aside(self, node: Any, problem: Problem) -> Iterator[Any]:
        """Yield hooks that let a node run without this mode, under which it would compute something else."""
        began: list[tuple[_Key | None, float]] = []

        def step_aside(grads: Any) -> None:
            key = self._report(problem, node)
            torch_modes.step_aside(self)
            self._stepped_aside = True
            began.append((key, time.perf_counter()))

        def measure(*grads: Any) -> None:
            key, start = began.pop()
            self._spent(key, time.perf_counter() - start)

        yield node.register_prehook(step_aside)
        yield node.register_hook(measure)

    def _report(self, problem: Problem, node: Any = None) -> _Key | None:
        """Add a problem of the line that runs, or that made this autograd node. Return its key, None if ignored."""
        place = self._user_line(node)
        in_engine = place is not None and (place.backward or not place.line)
        if place is None or compiler_runs() or (in_engine and self._checks_nan and problem is READ):
            return None
        self._explained.add(place.key)
        if place.line and place.line in self._covered:
            self._tell(problem, place, node)
            return self._covered[place.line]
        key = self._add(problem, place, node)
        if problem.whole_line:
            self._covered[place.line] = key
        return key

    def _add(self, problem: Problem, place: SourceLocation, node: Any = None) -> _Key:
        self._tell(problem, place, node)
        what = f"{problem.what}, in {place.inside}" if place.inside and not place.backward else problem.what
        if place.backward and (place.line, what) not in self._found:
            what = f"{what}, in its backward"
        key = place.line, what
        known = self._found.get(key)
        if known is None:
            advice = remedy(place) or (problem.advice if self._graphed else problem.elsewhere or problem.advice)
            known = Finding(place.line, what, advice, 0, graph_only=True, caller=place.caller)
        graph_only = known.graph_only and problem.graph_only
        self._found[key] = known._replace(count=known.count + 1, graph_only=graph_only)
        return key

    def _tell(self, problem: Problem, place: SourceLocation, node: Any) -> None:
        if self._located is not None:
            self._located(place.line, problem.what, node)

    def _spent(self, key: _Key | None, seconds: float) -> None:
        if key is not None:
            known = self._found[key]
            self._found[key] = known._replace(ms=(known.ms or 0.0) + 1e3 * seconds)


_MEAN = 1  # torch.nn._reduction.get_enum("mean")
# What the sync debug mode and anomaly mode say (c10/cuda/CUDAFunctions.cpp, csrc/autograd/python_anomaly_mode.cpp).
_WAIT = "called a synchronizing CUDA operation"
_ANOMALY = r"(Error detected in \S+\. (Traceback of|No) forward)|(\s*Previous calculation was induced by )"
