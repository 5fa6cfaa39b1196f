"""What torch does on a GPU, event by event: who gets the callbacks of its GPU trace, and what is kept of the events."""

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
from .._torch.autograd.autograd import current_node
from .._torch.device.gpu_trace import GPU_TRACE_KINDS, activate_gpu_trace, deactivate_gpu_trace, gpu_trace_registries
from .._user_line import line_text, running_place, users_level

KINDS = tuple(GPU_TRACE_KINDS)
_SHOWN = 5  # lines of each kind in the printed table: with ten kinds it still fits on a screen


class TraceEvent(NamedTuple):
    """One thing that torch did, or was about to do, on a GPU.

    Attributes:
        kind: "event_creation", "event_deletion", "event_record", "event_wait", "memory_allocation",
            "memory_deallocation", "stream_creation", "device_synchronization", "stream_synchronization" or
            "event_synchronization". A synchronization is reported before the host waits.
        line: `file:line: source` of the innermost line that is neither torch's nor ampkit's. If no such line runs, as
            in autograd's own threads, it is "backward of" and the name of the autograd node, or else "".
        seconds: `time.perf_counter()` when torch reported the event.
        thread: `threading.get_ident()` of the thread that did it.
        event: the CUDA event, as in `torch.cuda.Event.cuda_event`, for the kinds that have one.
        stream: the CUDA stream, as in `torch.cuda.Stream.cuda_stream`, for the kinds that have one.
        address: the address of the block of memory, as in `tensor.data_ptr()`, for the kinds that have one.
    """

    kind: str
    line: str
    seconds: float
    thread: int
    event: int | None = None
    stream: int | None = None
    address: int | None = None


class Trace:
    """The events that `ampkit.debug.trace` received. They can be read while it listens, too. Prints as a table.

    It is a context manager. `start` and `stop` do the same without a `with` block.
    """

    def __init__(
        self, listener: Callable[[TraceEvent], object] | None, kinds: tuple[str, ...], lines: bool, max_events: int
    ) -> None:
        self._listener, self._kinds, self._finds_lines = listener, kinds, lines
        self._error: BaseException | None = None
        self._listens = False
        self._in_listener = threading.local()
        self._uncounted: deque[TraceEvent] = deque()
        self._counting = threading.Lock()
        self._counts = Counter(dict.fromkeys(kinds, 0))
        self._lines: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
        self._events: deque[TraceEvent] = deque(maxlen=min(max_events, sys.maxsize))

    @property
    def counts(self) -> dict[str, int]:
        """How many events of each kind there were, for the kinds that it listens to."""
        self._count()
        return dict(self._counts)

    @property
    def lines(self) -> dict[str, dict[str, int]]:
        """How many events each line caused, by kind, the most first. Lines are as in `TraceEvent.line`."""
        self._count()
        return {kind: dict(lines.most_common()) for kind, lines in self._lines.items()}

    @property
    def events(self) -> list[TraceEvent]:
        """The last `max_events` events, in the order in which they happened."""
        self._count()
        return list(self._events)

    @property
    def dropped(self) -> int:
        """How many events are counted, but no longer in `events`, because there were more than `max_events`."""
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

    def start(self) -> "Trace":
        """Listen from now on, and return itself. Earlier events are kept.

        Raises:
            AmpkitError: this torch has no GPU trace.
            ValueError: it is listening already.
        """
        if self._listens:
            raise ValueError("trace: it listens already; make another one with ampkit.debug.trace().")
        built = torch.backends.cuda.is_built()
        registries = gpu_trace_registries() if built else None
        if registries is None:
            why = "has no GPU trace callbacks" if built else "was built without CUDA, and has no GPU trace"
            raise AmpkitError(
                f"trace: torch {torch.__version__} {why}. Install a CUDA build of torch that ampkit was checked on. "
                "ampkit.debug.find_syncs finds the lines at which the host waits without it."
            )
        if not torch.cuda.is_available():
            warnings.warn(
                "trace: there is no CUDA device, so there will be no events.", AmpkitWarning, stacklevel=users_level()
            )
        self._listens = True
        with _listening_lock:
            # `_dispatch` stays in torch's lists of callbacks for good, since it could not be removed safely. Another
            # thread that goes through such a list at that moment would skip somebody else's callback; and if the list
            # were replaced, a callback that is added at that moment would be lost.
            for kind, registry in registries.items():
                if _CALLBACKS[kind] not in registry.callback_list:
                    registry.add_callback(_CALLBACKS[kind])
            for kind in self._kinds:
                _listening[kind] = (*_listening[kind], self)
            activate_gpu_trace()
        return self

    def stop(self) -> None:
        """Stop listening. Does nothing if it is not listening.

        Raises:
            BaseException: the error that the listener raised, if it did. It was not called again after that.
        """
        self._stop_listening()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> "Trace":
        return self.start()

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is None:
            self.stop()
            return
        self._stop_listening()
        if self._error is not None:  # the error of the block takes precedence
            warnings.warn(f"trace: the listener raised {self._error!r}.", AmpkitWarning, stacklevel=users_level())

    def _stop_listening(self) -> None:
        self._listens = False
        with _listening_lock:
            for kind in self._kinds:
                _listening[kind] = tuple(trace for trace in _listening[kind] if trace is not self)
            lists = {kind: registry.callback_list for kind, registry in (gpu_trace_registries() or {}).items()}
            others = any(callback is not _CALLBACKS[kind] for kind, found in lists.items() for callback in found)
            if not any(_listening.values()) and not others:
                deactivate_gpu_trace()

    def _on_event(self, kind: str, handles: tuple[int, ...], frame: FrameType) -> None:
        """Take an event. Never raises: torch would write the error to a log and go on."""
        if not self._listens:  # stopped while this event was on its way
            return
        try:
            line = ""
            place = running_place(frame) if self._finds_lines else None
            if place is not None:
                line = line_text(*place)
            elif self._finds_lines and (node := current_node()) is not None:
                line = f"backward of {node.name()}"
            named = dict(zip(GPU_TRACE_KINDS[kind], handles, strict=True))
            event = TraceEvent(kind, line, time.perf_counter(), threading.get_ident(), **named)
            self._uncounted.append(event)
            self._count(wait=False)
            # It is not called for what it does on the GPU itself: that would never end.
            if self._listener is not None and self._error is None and not getattr(self._in_listener, "now", False):
                self._in_listener.now = True
                try:
                    self._listener(event)
                finally:
                    self._in_listener.now = False
        except BaseException as error:
            self._error = self._error or error

    def _count(self, *, wait: bool = True) -> None:
        """Count the events in the queue, or do nothing if they are being counted and this does not wait.

        Events come from several threads. They also come while another event is counted: counting makes objects, so
        Python may collect garbage there, which frees tensors. Such events are only put in the queue. The count that is
        under way takes them, or the next one.
        """
        if not self._counting.acquire(blocking=wait):
            return
        try:
            while self._uncounted:
                event = self._uncounted.popleft()
                self._counts[event.kind] += 1
                if self._finds_lines:
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
    """Listen to what torch does on a GPU: events, memory, streams, and waits of the host.

    ::

        with ampkit.debug.trace() as recorded:
            step(*batch)
        print(recorded)                                  # counts, and the lines that caused them
        recorded.counts["stream_synchronization"]

    The events are those of torch's own code, in any thread. What cuDNN, NCCL or another library does by itself causes
    none, and neither does the replay of a graph. Memory events are those of the caching allocator, when it hands out a
    block or takes it back. Several traces may listen at the same time. Nothing is read from the device or changed.

    While a trace listens, each event costs a call into Python, and an exception that frees GPU memory on its way may
    become a SystemError without a message, which is torch's error (pytorch#181865). So use it to look at a run, but do
    not measure times in it. torch itself cannot end its GPU trace. ampkit ends it when the last trace stops, unless
    somebody else has registered callbacks.

    Args:
        listener: called with each `TraceEvent` when it happens, inside torch's own call, so it must be quick. If it
            raises, it is not called again, and its error is raised at the end of the block.
        kinds: the kinds of events to listen to, as `TraceEvent` names them; all by default.
        lines: whether to find the line of each event, which takes microseconds.
        max_events: how many of the last events to keep. Counts and lines are complete without them.

    Returns:
        A `Trace`. It listens within its `with` block, or from `start()` to `stop()`.

    Raises:
        ValueError: a kind does not exist, or `max_events` is negative.

    Sync: none.
    """
    if listener is not None:
        check_callable("trace", "listener", listener, "a function of a TraceEvent, or None")
    if not isinstance(kinds, (tuple, list)) or not all(isinstance(kind, str) and kind in KINDS for kind in kinds):
        raise wrong("trace", "kinds", kinds, f"a sequence of {', '.join(KINDS)}")
    check_flag("trace", "lines", lines)
    check_at_least("trace", "max_events", max_events, 0, "the number of events that are kept")
    return Trace(listener, tuple(dict.fromkeys(kinds)), lines, max_events)


# The traces that listen, by kind. Tuples are replaced, never changed, so that an event sees either the old or the new.
_listening: dict[str, tuple[Trace, ...]] = dict.fromkeys(KINDS, ())
# Reentrant: garbage that is collected while it is held frees tensors, and a listener that hears of it may stop a trace.
_listening_lock = threading.RLock()


def _dispatch(listening: dict[str, tuple[Trace, ...]], kind: str, *handles: int) -> None:
    for each in listening[kind]:
        each._on_event(kind, handles, sys._getframe(1))


# Each has `_listening` as an argument: torch still calls them at exit, when Python has emptied this module.
_CALLBACKS = {kind: functools.partial(_dispatch, _listening, kind) for kind in KINDS}
