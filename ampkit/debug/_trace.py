"""What torch does on a GPU, event by event: who listens to its trace callbacks, and what is kept of what they hear."""

import functools
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch

from .._arguments import check_at_least, check_callable, check_flag, wrong
from .._errors import AmpkitError, AmpkitWarning
from .._torch.autograd import current_node
from .._torch.streams import GPU_TRACE_KINDS, activate_gpu_trace
from .._user_line import running_line, users_level

KINDS = tuple(GPU_TRACE_KINDS)
_SHOWN = 5  # lines per kind in the printed table


class TraceEvent(NamedTuple):
    """One thing that torch did, or was about to do, on a GPU.

    Attributes:
        kind: "event_creation", "event_deletion", "event_record", "event_wait", "memory_allocation",
            "memory_deallocation", "stream_creation", "device_synchronization", "stream_synchronization" or
            "event_synchronization". Of a synchronization, it is told before the host waits.
        line: `file:line: source` of the innermost line that is neither torch's nor ampkit's. Where none runs, as in
            autograd's own threads, "backward of" and the name of the node; else "".
        seconds: `time.perf_counter()` when it was told.
        thread: `threading.get_ident()` of the thread that did it.
        event: the CUDA event, as in `torch.cuda.Event.cuda_event`, for the kinds that have one.
        stream: the CUDA stream, as in `torch.cuda.Stream.cuda_stream`, for the kinds that have one.
        address: of the block of memory, as in `tensor.data_ptr()`, for the kinds that have one.
    """

    kind: str
    line: str
    seconds: float
    thread: int
    event: int | None = None
    stream: int | None = None
    address: int | None = None


class Trace:
    """What `ampkit.debug.trace` heard, while it listens and afterwards. Prints as a table.

    A context manager; `start` and `stop` do the same where there is no block.
    """

    def __init__(
        self, listener: Callable[[TraceEvent], object] | None, kinds: tuple[str, ...], lines: bool, max_events: int
    ) -> None:
        self._listener, self._kinds, self._blames = listener, kinds, lines
        self._error: BaseException | None = None
        self._listens = False
        self._telling = threading.local()
        self._heard: deque[TraceEvent] = deque()  # not counted yet
        self._counting = threading.Lock()
        self._counts = Counter(dict.fromkeys(kinds, 0))
        self._lines: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
        self._events: deque[TraceEvent] = deque(maxlen=min(max_events, sys.maxsize))

    @property
    def counts(self) -> dict[str, int]:
        """How many events there were of each kind that it listens to."""
        self._count()
        return dict(self._counts)

    @property
    def lines(self) -> dict[str, dict[str, int]]:
        """How many events each line was the reason of, by kind, the most first. Lines are as in `TraceEvent.line`."""
        self._count()
        return {kind: dict(lines.most_common()) for kind, lines in self._lines.items()}

    @property
    def events(self) -> list[TraceEvent]:
        """The last `max_events` events, in the order in which they happened."""
        self._count()
        return list(self._events)

    @property
    def dropped(self) -> int:
        """How many events are counted, but not among `events`, because there were more than `max_events`."""
        self._count()
        return sum(self._counts.values()) - len(self._events)

    def to_dict(self) -> dict[str, Any]:
        """Return counts, lines and events as a dict that `json.dumps` takes."""
        return {
            "counts": self.counts,
            "lines": self.lines,
            "events": [event._asdict() for event in self.events],
            "dropped": self.dropped,
        }

    def __str__(self) -> str:
        rows = [f"{sum(self.counts.values())} events of the GPU trace:"]
        lines = self.lines
        for kind, count in sorted(self.counts.items(), key=lambda item: -item[1]):
            rows.append(f"{count:8}  {kind}")
            shown = list(lines[kind].items())
            rows += [f"{times:18}  {line or '(no line of Python)'}" for line, times in shown[:_SHOWN]]
            if shown[_SHOWN:]:
                rows.append(f"{sum(times for _, times in shown[_SHOWN:]):18}  on {len(shown) - _SHOWN} other lines")
        return "\n".join(rows)

    # ------------------------------------------------------------------------------------------------ listening or not

    def start(self) -> "Trace":
        """Listen from now on, and return itself. What was heard before is kept.

        Raises:
            AmpkitError: this torch has no GPU trace.
            ValueError: it listens already.
        """
        if self._listens:
            raise ValueError("trace: it listens already; make another one with ampkit.debug.trace().")
        _register()
        if not torch.cuda.is_available():
            warnings.warn(
                "trace: there is no CUDA device, so nothing will be heard.", AmpkitWarning, stacklevel=users_level()
            )
        self._listens = True
        with _changing:
            for kind in self._kinds:
                _listening[kind] = (*_listening[kind], self)
        return self

    def stop(self) -> None:
        """Listen no longer. Does nothing if it does not listen.

        Raises:
            BaseException: what the listener raised, if it did; it was not called again after that.
        """
        self._unregister()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> "Trace":
        return self.start()

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is None:
            self.stop()
            return
        self._unregister()
        if self._error is not None:  # the error of the block goes first
            warnings.warn(f"trace: the listener raised {self._error!r}.", AmpkitWarning, stacklevel=users_level())

    def _unregister(self) -> None:
        self._listens = False
        with _changing:
            for kind in self._kinds:
                _listening[kind] = tuple(trace for trace in _listening[kind] if trace is not self)

    # -------------------------------------------------------------------------------------------------------- an event

    def _hear(self, kind: str, handles: tuple[int, ...], frame: FrameType) -> None:
        """Take an event. Raises nothing: torch would write it to a log and go on."""
        if not self._listens:  # stopped while this event was on its way
            return
        try:
            line = _line_of(frame) if self._blames else ""
            named = dict(zip(GPU_TRACE_KINDS[kind], handles, strict=True))
            event = TraceEvent(kind, line, time.perf_counter(), threading.get_ident(), **named)
            self._heard.append(event)
            if self._counting.acquire(blocking=False):
                self._count_and_release()
            self._tell(event)
        except BaseException as error:
            self._error = self._error or error

    def _tell(self, event: TraceEvent) -> None:
        # What the listener itself does on the GPU is not told to it: it would be called without end.
        if self._listener is None or self._error is not None or getattr(self._telling, "now", False):
            return
        self._telling.now = True
        try:
            self._listener(event)
        finally:
            self._telling.now = False

    def _count(self) -> None:
        self._counting.acquire()
        self._count_and_release()

    def _count_and_release(self) -> None:
        """Count what was heard.

        Events come from several threads, and within the counting of another: it makes objects, so Python may collect
        garbage, which frees tensors. They are only queued there, and counted by who counts already, or next.
        """
        try:
            while self._heard:
                event = self._heard.popleft()
                self._counts[event.kind] += 1
                if self._blames:
                    self._lines[event.kind][event.line] += 1
                self._events.append(event)
        finally:
            self._counting.release()


def trace(
    listener: Callable[[TraceEvent], object] | None = None,
    *,
    kinds: Sequence[str] = KINDS,
    lines: bool = True,
    max_events: int = 0,
) -> Trace:
    """Listen to what torch does on a GPU: events, memory, streams, and where the host waits.

    ::

        with ampkit.debug.trace() as recorded:
            step(*batch)
        print(recorded)                                  # counts, and the lines that were the reason
        recorded.counts["stream_synchronization"]

    It hears what torch's own code does in any thread, not what cuDNN, NCCL or another library does by itself, and of a
    graph that is replayed nothing. Memory is what the caching allocator hands out and takes back. Any number may listen
    at the same time. It reads nothing off the device and changes nothing.

    torch cannot end its GPU trace. Once one has started, each later event of this process costs a call into Python,
    also while nobody listens: use it to look at a run, not in one that is timed.

    Args:
        listener: called with each `TraceEvent` where and when it happens, in torch's own call, so it must be quick. If
            it raises, it is not called again, and its error is raised where the block ends.
        kinds: what to listen to, of those that `TraceEvent` names; all by default.
        lines: find the line of each event, which takes microseconds.
        max_events: how many events to keep, the last ones. Counts and lines are complete without.

    Returns:
        A `Trace`, which listens within its `with` block, or from `start()` to `stop()`.

    Raises:
        ValueError: a kind that does not exist, or a negative `max_events`.

    Sync: none.
    """
    if listener is not None:
        check_callable("trace", "listener", listener, "a function of a TraceEvent, or None")
    if not isinstance(kinds, (tuple, list)) or not all(isinstance(kind, str) and kind in KINDS for kind in kinds):
        raise wrong("trace", "kinds", kinds, f"a sequence of {', '.join(KINDS)}")
    check_flag("trace", "lines", lines)
    check_at_least("trace", "max_events", max_events, 0, "the number of events that are kept")
    return Trace(listener, tuple(dict.fromkeys(kinds)), lines, max_events)


# Who listens, by kind. Tuples are replaced, never changed, so an event that is on its way sees one of them.
_listening: dict[str, tuple[Trace, ...]] = dict.fromkeys(KINDS, ())
_changing = threading.Lock()


def _fire(everybody: dict[str, tuple[Trace, ...]], kind: str, *handles: int) -> None:
    for listening in everybody[kind]:
        listening._hear(kind, handles, sys._getframe(1))


# They hold what they need: torch calls them still when Python, at its end, has emptied this module.
_CALLBACKS = {kind: functools.partial(_fire, _listening, kind) for kind in KINDS}


def _register() -> None:
    """Have torch call `_fire`.

    It stays in torch's lists. To take it off while another thread goes through a list would make that one skip a
    callback of someone else's, and a list that is replaced loses one that is added meanwhile.
    """
    built = torch.backends.cuda.is_built()
    registries = activate_gpu_trace() if built else None
    if registries is None:
        why = "has no GPU trace callbacks" if built else "was built without CUDA, and has no GPU trace"
        raise AmpkitError(
            f"trace: torch {torch.__version__} {why}. Install a CUDA build of torch that ampkit was checked on; "
            "ampkit.debug.find_syncs finds lines that wait without it."
        )
    with _changing:
        for kind, registry in registries.items():
            if _CALLBACKS[kind] not in registry.callback_list:
                registry.add_callback(_CALLBACKS[kind])


def _line_of(frame: FrameType) -> str:
    node = current_node()
    return running_line(frame) or (f"backward of {node.name()}" if node is not None else "")
