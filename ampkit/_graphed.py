"""One call of a captured function: same input? warm-up, capture, replay, or eager; and the count of each."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ._errors import CaptureError, CaptureWarning
from ._graph import CudaGraph, EmulatedGraph, Graph
from ._inputs import Spec, StaticInputs, describe_change, read_batch
from ._state import Generation, TrainingState
from ._torch import tree_flatten, tree_unflatten

WARM_UP = "warm-up"


@dataclass(frozen=True)
class Report:
    """What happened to the calls of a step so far.

    Attributes:
        graphs: graphs that are alive.
        captures: graphs captured so far, those that were dropped since included.
        replays: calls that were one graph launch.
        eager: eager calls by reason.
        bytes: device memory that only graphs use: pools and static inputs.
        skipped: optimizer steps that the loss scale skipped.
        failure: why capture was given up, or None.
    """

    graphs: int
    captures: int
    replays: int
    eager: dict[str, int]
    bytes: int
    skipped: int
    failure: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict that `json` takes."""
        return asdict(self)

    def __str__(self) -> str:
        calls = self.replays + sum(self.eager.values())
        head = (
            f"{calls} steps: {self.replays} replayed, {sum(self.eager.values())} eager, {self.skipped} skipped; "
            f"{self.graphs} graph(s), {self.bytes / 2**20:.1f} MiB"
        )
        reasons = [f"  eager x{count}: {reason}" for reason, count in self.eager.items()]
        return "\n".join([head, *reasons, *([f"  not captured: {self.failure}"] if self.failure else [])])


class _Captured:
    """A graph and what it was captured for."""

    def __init__(self, graph: Graph, inputs: StaticInputs) -> None:
        self.graph = graph
        self.inputs = inputs

    @property
    def nbytes(self) -> int:
        return self.graph.nbytes + self.inputs.nbytes


class Graphed:
    """Calls `fn(*args, **kwargs)`, first eagerly, then by replaying a graph of it.

    The first input layout that was called `warmup` times is captured at its next call. Other layouts run eagerly. If
    the state was changed from outside (see `Generation`), the graph is dropped and warm-up starts again.

    Args:
        fn: function of tensors that changes only `state`; returns a tree of tensors and None.
        state: what it may change.
        device: where the inputs must be.
        graph: "auto", "emulate" or "off".
        warmup: eager calls before a capture.
        on_failure: "eager" or "raise".
        generators: CUDA generators beside the default one.
        blocker: why `fn` cannot be captured, if that is known already; else "".
        name: what messages call it.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        state: TrainingState,
        *,
        device: torch.device,
        graph: str,
        warmup: int,
        on_failure: str,
        generators: Sequence[torch.Generator],
        blocker: str,
        name: str,
    ) -> None:
        self._fn = fn
        self._state = state
        self._device = device
        self._kind = graph
        self._warmup = warmup
        self._on_failure = on_failure
        self._generators = generators
        self._name = name
        self._stream = torch.cuda.Stream(device) if graph == "auto" and device.type == "cuda" else None
        self._refused = "graph='off'" if graph == "off" else ""
        self._failure: str | None = None
        self._captured: _Captured | None = None
        self._generation: Generation | None = None
        self._warm: Counter[Spec] = Counter()
        self._warm_up = WARM_UP
        self._stale = False  # warned already
        self._eager: Counter[str] = Counter()
        self.captures = 0
        self.replays = 0
        if graph == "auto" and device.type != "cuda":
            blocker = f"the model is on {device}, and CUDA graphs need a CUDA device."
        if blocker and graph != "off":
            self._refuse(blocker)

    def _refuse(self, reason: str) -> None:
        """Never capture, for this reason: warn once and stay eager, or raise if the user asked for that."""
        if self._on_failure == "raise":
            raise CaptureError(f"{self._name}: {reason}")
        self._refused = self._failure = reason
        message = f"{self._name}: {reason} Training goes on eagerly; graph='off' says so without a warning."
        warnings.warn(message, CaptureWarning, stacklevel=4)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `fn` returns, in tensors of its own."""
        spec, leaves = read_batch(args, kwargs, self._device)
        if self._refused:
            return self._run(self._refused, args, kwargs)
        self._drop_if_stale()
        if self._captured is None:
            if self._warm[spec] < self._warmup:
                self._warm[spec] += 1
                return self._run(self._warm_up, args, kwargs)
            if not self._capture(spec, leaves):
                return self._run(self._refused, args, kwargs)
        assert self._captured is not None  # set by _capture
        if self._captured.inputs.spec != spec:
            return self._run(describe_change(self._captured.inputs.spec, spec), args, kwargs)
        self._captured.inputs.copy_(leaves)
        outputs = self._captured.graph.replay()
        self.replays += 1
        return _copied(outputs)

    def report(self, skipped: int = 0) -> Report:
        """Return the counts so far. Reads the allocator, not the device."""
        return Report(
            graphs=int(self._captured is not None),
            captures=self.captures,
            replays=self.replays,
            eager=dict(self._eager),
            bytes=self._captured.nbytes if self._captured else 0,
            skipped=skipped,
            failure=self._failure,
        )

    def close(self) -> None:
        """Drop the graph and give its memory back. The next call warms up and captures again."""
        if self._captured is not None:
            self._captured.graph.reset()
        self._captured = None
        self._warm.clear()

    def _run(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._eager[reason] += 1
        if self._stream is None:
            return _copied(self._fn(*args, **kwargs))
        # The same stream for warm-up, capture and stragglers: what autograd and cuBLAS keep per stream exists once.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                return _copied(self._fn(*args, **kwargs))
        finally:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _drop_if_stale(self) -> None:
        generation = self._state.generation()
        if self._generation is not None and generation != self._generation:
            changes = self._generation.changes(generation)
            self._warm_up = f"{WARM_UP} again: {changes}"
            if not self._stale:
                message = (
                    f"{self._name}: {changes}. Each such change takes {self._warmup} eager steps and a new capture."
                )
                warnings.warn(message, CaptureWarning, stacklevel=4)
            self._stale = True
            self.close()
        self._generation = generation

    def _capture(self, spec: Spec, leaves: list[Any]) -> bool:
        """Capture for this layout; on failure leave everything as before the call and return False, or raise."""
        inputs = StaticInputs(spec, leaves)
        graph: Graph = EmulatedGraph() if self._stream is None else CudaGraph(self._stream, self._generators)
        before = self._state.tensors()
        try:
            graph.capture(lambda: self._fn(*inputs.args, **inputs.kwargs))
            _refuse_rebound(self._state.rebound_since(before))
        except CaptureError as error:
            graph.reset()
            self._state.rebind(before)
            self._give_up(error)
            return False
        self._captured = _Captured(graph, inputs)
        self.captures += 1
        return True

    def _give_up(self, error: CaptureError) -> None:
        if self._on_failure == "raise":
            raise CaptureError(f"{self._name}: {error}") from error
        self._failure = str(error)
        self._refused = "capture failed"
        warnings.warn(f"{self._name}: {error} Training goes on eagerly.", CaptureWarning, stacklevel=5)


def _refuse_rebound(paths: list[str]) -> None:
    if paths:
        raise CaptureError(
            f"{', '.join(paths[:3])}: made or rebound in the step; a replay would neither read nor keep the new "
            "value. Change tensors in place (copy_, add_), and make them before the step."
        )


def _copied(tree: Any) -> Any:
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
