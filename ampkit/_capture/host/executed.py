"""Which instructions of the user's functions are executed in a call."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from ..._torch.compile import never_compile_by_itself, original_code
from ..._undo import Undo, replace
from .code import CodePlace, attributes_read_whole, attributes_set, codes_in, texts_loaded

# Python's own: `sys` may have others in their place.
_set_trace, _trace_function = sys.settrace, sys.gettrace
MONITORING: Any = getattr(sys, "monitoring", None)  # new in Python 3.12; before that, a step is traced and profiled
_NAME = "ampkit"
_IDS = (3, 4, 2, 5, 1, 0)  # of tools; the last ones are meant for optimizers, coverage and debuggers
_MOST = 1_000_000  # executed instructions, where each one is a call of a function


def monitoring_tool(undo: Undo, watched: Callable[[], Iterable[CodeType]] = tuple) -> int | None:
    """Return the number of a tool of `sys.monitoring`, until that is undone; None if other tools have all of them.

    `watched` returns the code for which it has events of its own, which end then, too.
    """
    tool = next((number for number in _IDS if MONITORING.get_tool(number) is None), None)
    if tool is not None:
        undo.note(_end_tool, tool, watched)
        MONITORING.use_tool_id(tool, _NAME)
        MONITORING.restart_events()  # in functions of which an earlier call has told all
    return tool


def _end_tool(tool: int, watched: Callable[[], Iterable[CodeType]]) -> None:
    if MONITORING.get_tool(tool) == _NAME:
        for code in watched():
            MONITORING.set_local_events(tool, code, 0)
        MONITORING.set_events(tool, 0)
        for event in (MONITORING.events.INSTRUCTION, MONITORING.events.PY_START, MONITORING.events.PY_RESUME):
            MONITORING.register_callback(tool, event, None)
        MONITORING.free_tool_id(tool)


@dataclass(eq=False)
class Executed:
    """Notes which instructions are executed. Where it cannot tell, it takes each instruction for executed.

    It cannot if a debugger or a coverage tool uses what it would use itself, also from within the call.
    """

    compiled: set[CodeType] = field(default_factory=set)  # what torch.compile's code contains
    _seen: dict[CodeType, set[int]] = field(default_factory=dict)
    _watch: Callable[[FrameType], None] | None = None  # None if it cannot tell
    _count: int = 0  # of executed instructions, while it traces
    _has_ended: bool = False
    _tool: int = -1
    _monitored: set[CodeType] = field(default_factory=set)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Context for a call, in which `watch` can be called."""
        with Undo() as undo:
            if MONITORING is not None:
                if (tool := monitoring_tool(undo, lambda: self._monitored)) is not None:
                    MONITORING.register_callback(tool, MONITORING.events.INSTRUCTION, self._on_instruction)
                    self._tool, self._watch = tool, self._monitor
            elif _trace_function() is None:
                self._begin_to_trace(undo)
            yield
            self._see_whether_it_was_ended()
            self._has_ended = True

    def watch(self, frame: FrameType) -> None:
        """Take note of what a function executes, which has just been called, and functions that are defined in it."""
        self._see_whether_it_was_ended()
        if self._watch is None:
            return
        if frame.f_code not in self._seen:
            for code in (frame.f_code, *codes_in(frame.f_code)):
                self._seen.setdefault(code, set())
        self._watch(frame)

    @property
    def watches_each_call(self) -> bool:
        """Whether `watch` is to be called in each call of a function, and not in one alone."""
        return self._watch == self._trace

    def knows(self, code: CodeType) -> bool:
        """Return whether it can tell what is executed of this code."""
        self._see_whether_it_was_ended()
        return self._watch is not None and code in self._seen and code not in self.compiled

    def has(self, place: CodePlace) -> bool:
        """Return whether an instruction has been executed."""
        return not (self.knows(place.code) and self._seen[place.code].isdisjoint(range(place.first, place.last + 1)))

    def names(self, code: CodeType, candidates: Set[str]) -> dict[str, CodePlace]:
        """Return those of some names and texts that code has read attributes by, or loaded, and where it did so."""
        found: dict[str, CodePlace] = {}
        for name, first, last in texts_loaded(code):
            if name in candidates and name not in found and self.has(place := CodePlace(code, first, last)):
                found[name] = place
        return found if self.knows(code) else {**dict.fromkeys(candidates, CodePlace(code, 0, 0)), **found}

    def attributes_set(self, code: CodeType) -> Iterator[str]:
        """Yield the names of the attributes that code has set or deleted."""
        yield from (name for name, place in attributes_set(code) if self.has(place))

    def attributes_read_whole(self, code: CodeType) -> Iterator[str]:
        """Yield the names of the attributes of which code may have read all entries."""
        yield from (name for name, place in attributes_read_whole(code) if self.has(place))

    def _see_whether_it_was_ended(self) -> None:
        """See whether the call has ended the tracing, as tools do that set a trace function from C."""
        if self._watch == self._trace and not self._has_ended and _trace_function() is not _trace_nothing:
            self._let_go()

    def _monitor(self, frame: FrameType) -> None:
        if frame.f_code not in self._monitored:
            self._monitored.add(frame.f_code)
            MONITORING.set_local_events(self._tool, frame.f_code, MONITORING.events.INSTRUCTION)

    def _on_instruction(self, code: CodeType, offset: int) -> Any:
        self._seen[code].add(offset)
        return MONITORING.DISABLE  # once is enough

    # ------------------------------------------------------------------------------------- before Python 3.12: tracing

    def _begin_to_trace(self, undo: Undo) -> None:
        thread = threading.get_ident()

        def set_trace(function: Any) -> None:
            if threading.get_ident() == thread:
                self._let_go()
            _set_trace(function)

        undo.note(_stop_tracing)
        replace(undo, sys, "settrace", set_trace)
        replace(undo, sys, "gettrace", _users_trace_function)
        _set_trace(_trace_nothing)
        self._watch = self._trace

    def _let_go(self) -> None:
        """Give Python's trace function away, and have the functions that are called now be traced as any others."""
        if self._watch is not None:
            self._watch = None
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                self._put_back(frame)
                frame = frame.f_back

    def _put_back(self, frame: FrameType) -> None:
        if original_code(frame.f_code) is None and frame.f_code in self._seen:  # what dynamo makes may have no hash
            frame.f_trace_lines, frame.f_trace_opcodes = True, False
            if frame.f_trace == self._on_event:  # a debugger has set its own before it came here
                frame.f_trace = None

    def _trace(self, frame: FrameType) -> None:
        frame.f_trace_lines, frame.f_trace_opcodes, frame.f_trace = False, True, self._on_event

    def _on_event(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "opcode":
            self._seen[frame.f_code].add(frame.f_lasti)
            self._count += 1
        if self._count > _MOST:  # a long loop, which would take minutes
            self._let_go()
            _set_trace(None)
        if event == "return":  # a generator may go on under a debugger; otherwise it is called again
            self._put_back(frame)
        return None if event == "return" or self._watch is None else self._on_event


def _trace_nothing(*_: object) -> None:
    """Have Python trace the functions whose frames ask for it, and no others."""


def _users_trace_function() -> Any:
    """Take the place of `sys.gettrace`: code that asks for a debugger is told of none."""
    found = _trace_function()
    return None if found is _trace_nothing else found


def _stop_tracing() -> None:
    """Leave a trace function of the user's where it is, as that of a debugger with which the user goes on."""
    if _trace_function() is _trace_nothing:
        _set_trace(None)


for _function in (_trace_nothing, Executed._on_event, Executed._on_instruction):
    never_compile_by_itself(_function)
