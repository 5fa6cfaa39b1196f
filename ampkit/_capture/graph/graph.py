"""A CUDA graph: its pool and stream, capture and replay, the recovery from a failed capture; and its emulation."""

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..._errors import CaptureError, CaptureWarning
from ..._torch.autograd.autograd import one_stream
from ..._torch.device.allocator import drop_capture_from_allocator
from ..._torch.device.execution_trace import unrecorded
from ..._torch.tensors.modes import modes, without_modes
from ..._undo import Undo
from ..._user_line import user_line
from .capture_query import hidden_capture
from .pool import growing_segments, no_collection
from .turns import within_capture

MakeContext = Callable[[], AbstractContextManager[Any]]
Then = Callable[[Any], Any]


def same(outputs: Any) -> Any:
    return outputs


class OtherAnswerError(BaseException):
    """The host reads another answer in a replay than the one that the rest of the graph was captured with.

    Its text, if there is one, is another reason why the call is to be made eagerly. In an emulated graph it is raised
    in the user's code, which may catch each `Exception`.
    """


class Graph(Protocol):
    """A graph, emulated or not."""

    def capture(self, fn: Callable[[], Any], context: MakeContext = nullcontext, then: Then = same) -> None:
        """Record `then(fn())` without doing its work. `context` returns a context in which `fn` is called."""

    def replay(self) -> Any:
        """Do the recorded work; return what `then` returned. The next replay overwrites its tensors.

        Raises:
            OtherAnswerError: at a cut, the answer was another one. What comes behind it was not done.
        """

    def reset(self) -> None:
        """Release the graph and its memory."""


@dataclass(frozen=True, eq=False)
class GraphAround:
    """What graphs have in common that do more in a replay than the one in them."""

    _graph: Graph

    def capture(self, fn: Callable[[], Any], context: MakeContext = nullcontext, then: Then = same) -> None:
        """Record `then(fn())`, see `Graph`."""
        self._graph.capture(fn, context, then)

    def reset(self) -> None:
        """Release the graph, see `Graph`."""
        self._graph.reset()


@dataclass(eq=False)
class _Streams(threading.local):
    """The capture streams of this thread, by device and use. Two threads may capture at the same time."""

    by_use: dict[tuple[torch.device, str], torch.cuda.Stream] = field(default_factory=dict)


_streams = _Streams()


def capture_stream(device: torch.device, use: str = "steps") -> torch.cuda.Stream:
    """Return the stream on which this thread warms up and captures on this device, one for each use.

    cuBLAS keeps a workspace of 32 MiB (on an H100) for each stream and thread that used it. A graph uses the workspace
    of its capture, so two graphs that were captured on one stream must not run at the same time.
    """
    if (device, use) not in _streams.by_use:
        _streams.by_use[device, use] = torch.cuda.Stream(device)
    return _streams.by_use[device, use]


@dataclass(eq=False)
class Pool:
    """Device memory that several graphs share, so that the largest of them sets its size.

    The graphs use the same memory, one after the other. So they must not overlap in time, and a graph's outputs must be
    read before another graph of the pool is replayed. The memory is released with the last graph.
    """

    _handle: Any = None  # torch's token
    # A graph that is garbage-collected leaves.
    _graphs: "weakref.WeakSet[CudaGraph]" = field(default_factory=weakref.WeakSet)

    def __len__(self) -> int:
        return len(self._graphs)

    def enter(self, graph: "CudaGraph") -> Any:
        """Count a graph in and return the handle to capture it with."""
        if not self._graphs:
            # torch gives up a pool with its last graph and fails an internal assertion if it is named again.
            self._handle = torch.cuda.graph_pool_handle()
        self._graphs.add(graph)
        return self._handle

    @property
    def handle(self) -> Any:
        """Torch's token of it."""
        return self._handle

    def leave(self, graph: "CudaGraph") -> None:
        """Count a graph out."""
        self._graphs.discard(graph)

    @property
    def nbytes(self) -> int:
        """Bytes of its segments. It reads the allocator and does not wait for the device."""
        return sum(stop - start for start, stop in self.spans())

    def spans(self) -> list[tuple[int, int]]:
        """Return where its segments begin and end. It reads the allocator and does not wait for the device."""
        segments = torch.cuda.memory_snapshot(include_traces=False) if self._graphs else []
        own = [each for each in segments if tuple(each["segment_pool_id"]) == tuple(self._handle)]
        return [(each["address"], each["address"] + each["total_size"]) for each in own]


@dataclass(eq=False)
class CudaGraph:
    """A CUDA graph. Where it is cut, it is several of them, and the host reads an answer behind each one but the last.

    Args:
        stream: the side stream to capture on. `fn` must have run on it before, for cuBLAS workspaces and autograd's
            streams.
        pool: the memory that `fn` allocates from.
        generators: CUDA generators beside the default one that `fn` draws from. Another one could not be captured.
    """

    _stream: torch.cuda.Stream
    _pool: Pool
    _generators: Sequence[torch.Generator] = ()
    _graph: torch.cuda.CUDAGraph | None = None
    _outputs: Any = None
    _pieces: list[tuple[torch.cuda.CUDAGraph, torch.Tensor, bool]] = field(default_factory=list)  # those in front of it
    _captured: torch.cuda.CUDAGraph | None = None  # the piece that is being captured

    def capture(self, fn: Callable[[], Any], context: MakeContext = nullcontext, then: Then = same) -> None:
        """Record `then(fn())`. Nothing of it has run on the device when this returns.

        In user code, `torch.cuda.is_current_stream_capturing()` returns False during the capture.

        Raises:
            CaptureError: something in `fn` cannot be captured. It names the user's line. The process is as healthy as
                before, random numbers continue where they were, and the memory of the attempt is released.

        Sync: waits for the device, once.
        """
        assert self._graph is None  # one capture per object
        torch.cuda.synchronize(self._stream.device)
        torch.cuda.empty_cache()
        self._captured, handle = self._new_graph(), self._pool.enter(self)
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream), no_collection(), within_capture():
            try:
                torch.cuda.current_blas_handle()  # one per thread, and another thread may have warmed up
                with growing_segments():
                    self._captured.capture_begin(pool=handle, capture_error_mode=_CAPTURE_MODE)
                    with hidden_capture(self._stream), one_stream(), context():
                        outputs = fn()
                    self._outputs = then(outputs)
                    del outputs
                    is_empty = self._end_piece()
                if is_empty and not self._pieces:
                    warnings.warn(_EMPTY, CaptureWarning, stacklevel=1)
            except BaseException as error:
                self._outputs = None
                self._recover(self._captured, handle)
                if not isinstance(error, Exception):
                    raise  # KeyboardInterrupt and the like do not come from the step
                raise CaptureError(describe_failure(error)) from error
        self._graph, self._captured = self._captured, None

    def cut(self, asked: torch.Tensor, answer: bool) -> None:
        """End a piece where `fn` asks, and begin the next one, which a replay does only after the same answer."""
        with unrecorded():  # the beginning of a capture fills the states of generators
            self._end_piece()
            assert self._captured is not None  # set by capture
            self._pieces.append((self._captured, asked, answer))
            self._captured = self._new_graph()
            self._captured.capture_begin(pool=self._pool.handle, capture_error_mode=_CAPTURE_MODE)

    def _end_piece(self) -> bool:
        """End the capture of a piece. Return whether there is nothing in it."""
        assert self._captured is not None  # set by capture
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._captured.capture_end()
        return any("is empty" in str(warning.message) for warning in caught)

    def replay(self) -> Any:
        """Launch the graph on the current stream. Sync: at each cut. Aliasing: the outputs are its own memory."""
        assert self._graph is not None  # set by capture
        for piece, asked, answer in self._pieces:
            piece.replay()
            if is_true(asked) is not answer:
                raise OtherAnswerError
        self._graph.replay()
        return self._outputs

    def reset(self) -> None:
        """Release the graph, and the pool with its last one. Waits for the device, which may still be replaying."""
        self._outputs = None
        if self._graph is not None:
            torch.cuda.synchronize(self._stream.device)
            self._graph.reset()
            self._graph = None
            self._drop_pieces()
            self._pool.leave(self)

    def _drop_pieces(self) -> None:
        while self._pieces:
            self._pieces.pop()[0].reset()

    def _new_graph(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        return graph

    def _recover(self, graph: torch.cuda.CUDAGraph | None, handle: Any) -> None:
        """Bring the process back to where it was before `capture_begin`. Measured on torch 2.11, H100."""
        assert graph is not None  # set by capture
        self._captured = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "The CUDA Graph is empty"
                graph.capture_end()
        except RuntimeError:
            # The capture was invalid (a host sync), so capture_end gave up half-way. It leaves two things to do.
            with contextlib.suppress(RuntimeError):  # raised where capture_end got as far as doing it itself
                drop_capture_from_allocator(self._stream.device, handle)
            # The generators are still in capture mode, in which every later `torch.rand` and replay raises. The end of
            # any valid capture takes them out of it. A new generator state would, too, but graphs that were captured
            # earlier would then draw from the old one.
            valid = self._new_graph()
            valid.capture_begin(capture_error_mode="thread_local")
            torch.zeros((), device=self._stream.device)
            valid.capture_end()
            valid.reset()
        graph.reset()
        self._drop_pieces()
        self._pool.leave(self)
        torch.cuda.empty_cache()


@dataclass(eq=False)
class EmulatedGraph:
    """Runs the recorded function again in each replay. With it, all of ampkit but the graph is tested without a GPU."""

    _fn: Callable[[], Any] | None = None
    _make_context: MakeContext | None = None
    _then: Then = same

    def capture(self, fn: Callable[[], Any], context: MakeContext = nullcontext, then: Then = same) -> None:
        """Keep `fn`. It runs in the first replay for the first time, then in this context."""
        self._fn, self._make_context, self._then = fn, context, then

    def cut(self, asked: torch.Tensor, answer: bool) -> None:
        """End the replay where `fn` asks if that has another answer."""
        with without_modes():
            found = is_true(asked)
        if found is not answer:
            raise OtherAnswerError

    def replay(self) -> Any:
        """Run the function."""
        assert self._fn is not None  # set by capture
        context, self._make_context = self._make_context or nullcontext, None
        with Undo() as undo:
            undo.note(modes())
            with context():
                outputs = self._fn()
            outputs = self._then(outputs)
            undo.forget()
        return outputs

    def reset(self) -> None:
        """Forget the function."""
        self._fn = None


is_true = torch.Tensor.__bool__  # which is replaced in captures
_CAPTURE_MODE = "thread_local"  # a data loader or another thread may allocate and pin memory meanwhile
_EMPTY = "The captured step launched no CUDA kernel: a replay does nothing. Is the model on the device?"
_KEPT_GRAPH = (
    "Delete what keeps the autograd graph of an earlier step alive (`del loss`), and make DistributedDataParallel "
    "under a side stream: with torch.cuda.stream(torch.cuda.Stream()): ..."
)

# What torch 2.11's message has in it, and what to write instead. These errors have no type of their own.
_ADVICE = (
    (
        "when stream is capturing",
        "This line waits for the device (.item(), .tolist(), float(tensor), print(tensor), `if tensor:`, nonzero, a "
        "boolean mask). Keep the value on the device (torch.where), or return it in aux and read it after the step.",
    ),
    (
        "between CPU and CUDA tensors during CUDA graph capture",
        "This line copies between host and device. Make the tensor on the device before the step, or pass it in.",
    ),
    (
        "due to a previous error during capture",
        "An operation that waits for the device or copies to it raised within the step, and a try/except caught it.",
    ),
    (
        "fail_on_recompile",
        "torch.compile had not compiled this part of the step for this input. Raise warmup, or call it before.",
    ),
    ("AccumulateGrad", _KEPT_GRAPH),
    ("legacy stream depend on a capturing", _KEPT_GRAPH),
    (
        "out of memory",
        "The graph needs a pool beside the memory of eager steps. Reduce the batch, or pass graph='off'.",
    ),
    (
        "generator",
        "A CUDA generator other than the default one must be registered: graphed_step(..., generators=[generator]).",
    ),
)

_UNFORESEEN = " If your code did not raise this itself, please report it with the output of `python -m ampkit env`."


def describe_failure(error: BaseException) -> str:
    """Return one line that says where in the user's code a capture failed, why, and what to write instead."""
    reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
    unforeseen = _UNFORESEEN
    if not isinstance(error, RuntimeError):
        reason, unforeseen = f"{type(error).__name__}: {reason}", ""
    advice = next((f" {text}" for sign, text in _ADVICE if sign in str(error)), unforeseen)
    line = user_line(error)
    return f"capture failed{f' at {line}' if line else ''}: {reason}.{advice}"
