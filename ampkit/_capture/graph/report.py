"""What happened to the calls of a step so far: counts, graphs, memory, times, and how they are printed."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

NOR_IN_PARTS = "Nor is it done in parts: "  # stands before the reason, in a failure


class GraphReport(NamedTuple):
    """One graph that is alive.

    Attributes:
        layout: the input it serves; with `accumulate`, also which micro-batch of an optimizer step.
        bytes: device memory that came with it: what the pool grew by in its capture, and its input buffers. Graphs
            share a pool, so a graph adds little if it fits into what others have taken.
        replays: how often it was replayed.
        eager_ms: time of an eager call with this input, see `Report`; None if it was not measured.
        replay_ms: time of a replay; None if it was not measured.
    """

    layout: str
    bytes: int
    replays: int
    eager_ms: float | None = None
    replay_ms: float | None = None


@dataclass(frozen=True)
class Report:
    """What happened to the calls of a step so far.

    Attributes:
        graphs: graphs that are alive.
        captures: graphs captured so far, dropped ones included.
        evictions: graphs that were dropped to make room for others.
        replays: calls that were one graph launch.
        eager: eager calls by reason.
        bytes: device memory that only graphs use: their pools and static inputs. Inputs of modules are left out.
        input_bytes: those of the static inputs alone, into which each call copies its batch.
        per_graph: the graphs that are alive, the least recently used first.
        skipped: optimizer steps that the loss scale, or `nonfinite=`, skipped.
        failure: why something was not captured, or why no graph was replayed in the last calls; None if neither is so.
        eager_ms: time of an eager step: the median over warm-up calls, without the first and the last one of each
            input, which are slower, and without the preflight, which is the second one from the third input on. None if
            there was no other, as with `warmup=2`. On CUDA it is the time from the first work of the call on its stream
            to the last, with the time in which the stream waited for the host.
        replay_ms: time of a replayed step: the median over the 2nd to the 9th replay of a graph, measured in the same
            way. With several graphs, both times are means over the graphs, weighted by their replays.
        saved_s: seconds that replays have saved so far: the difference of the two times, multiplied by the replays of
            the graphs for which both are known. It is below 0 if replays are slower.
        told_since: the number of the call from which on `torch.cuda.is_current_stream_capturing()` answers True in all
            calls, because the branch for False cannot be captured; None if there is none (`capturing="auto"`).
        eager_optimizer: why the optimizer steps eagerly behind each graph (`on_failure="parts"`). The times above do
            not include its step. None if its step is captured, or if there are to be no graphs.
        eager_after_step: why `after_step` is called eagerly behind each graph, in the same way.
        compile_s: seconds that calls took in which parts of the step were compiled (`compile=`); None without it.
        compiled: in words, what was compiled, and why the rest was not; empty without `compile=`.
        launches: graph launches of several calls each, by `GraphedStep.scan` and `GraphedStep.window`, or by
            `GraphedFunction.scan`. They are no part of `replays`.
        scanned: optimizer steps, or calls of a function, that these launches did.
        micro_batches: with `accumulate`, how many calls were one micro-batch, and how many optimizer steps they and
            `flush` have made; None without it.
        in_parts: calls in which modules, or the update of the parameters, were captured by themselves. They are no part
            of `replays` and `eager`.
        parts: the modules that are captured one by one, see `PartReport`.
        updates: graphs of the update of the parameters that are alive, in a step that is done in parts.
        shares: which share of the time of a step in parts each part takes. The keys are the path of a captured module
            (all its calls, forward and backward), "the update of the parameters", and "eager" for the rest. The time
            is that of the device; "eager" includes the time in which the device waits for Python. Three calls of the
            layout with the most calls were measured. It is empty if there was none. With emulated graphs it is the
            time of an eager step.
        split: in words, what is captured one by one, and why the rest is not; empty where nothing is to be.
        emulated: whether there is no graph (`graph="emulate"`): a replay calls the step again, and is not faster.
        constants: the values of the host that graphs hold, see `GraphedStep.constants`.
        waits: in words, which lines of the step ask the device what calls wait for, and what to write instead.
        padding: in words, to which sizes batches are padded, and what it costs; empty without `buckets="auto"`.
        verified: in words, how many replays `verify=` has compared with eager calls, and what of them; None without it.
            Modules that are captured one by one are not compared.
        stopped: in words, why and since when no step changes a weight (`nonfinite="stop"`); None if they do.
        float8: in words, how many Linear layers compute in float8; empty without such a rule.
    """

    graphs: int = 0
    captures: int = 0
    evictions: int = 0
    replays: int = 0
    eager: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    per_graph: tuple[GraphReport, ...] = ()
    skipped: int = 0
    failure: str | None = None
    eager_ms: float | None = None
    replay_ms: float | None = None
    saved_s: float | None = None
    told_since: int | None = None
    eager_optimizer: str | None = None
    eager_after_step: str | None = None
    compile_s: float | None = None
    compiled: tuple[str, ...] = ()
    input_bytes: int = 0
    launches: int = 0
    scanned: int = 0
    micro_batches: tuple[int, int] | None = None
    in_parts: int = 0
    parts: tuple[Any, ...] = ()
    updates: int = 0
    shares: dict[str, float] = field(default_factory=dict)
    split: tuple[str, ...] = ()
    emulated: bool = False
    constants: tuple[Any, ...] = ()
    waits: tuple[str, ...] = ()
    padding: tuple[str, ...] = ()
    verified: str | None = None
    stopped: str | None = None
    float8: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        """What graphs hold now: "whole", the step; "in parts", a part of it; "eager", nothing."""
        in_parts = bool(self.parts or self.updates)
        if not self.graphs:
            return "in parts" if in_parts else "eager"
        return "in parts" if self.eager_optimizer or in_parts else "whole"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict that `json` takes; of the constants how many there are."""
        return {
            **asdict(replace(self, constants=())),
            "constants": len(self.constants),
            "per_graph": [graph._asdict() for graph in self.per_graph],
            "parts": [part._asdict() for part in self.parts],
        }

    def __str__(self) -> str:
        calls = self.replays + self.in_parts + sum(self.eager.values())
        in_parts = f"{self.in_parts} in parts, " if self.in_parts else ""
        whole = " of whole steps" if self.in_parts else ""
        made, then = f"{calls} steps", f"{self.scanned} more steps"
        if self.micro_batches is not None:
            micro_batches, steps = self.micro_batches
            made = f"{micro_batches} micro-batches ({steps} optimizer steps)"
            then = f"then {self.scanned} optimizer steps"
        head = (
            f"{made}: {self.replays} replayed, {in_parts}{sum(self.eager.values())} eager, "
            f"{self.skipped} skipped; {self.graphs} graph(s){whole}, {self.bytes / 2**20:.1f} MiB"
        )
        head += f" ({self.input_bytes / 2**20:.1f} of them for inputs)" * (self.input_bytes >= _SHOWN_BYTES)
        head += f"; {then} in {self.launches} launches of scan or window" * bool(self.launches)
        times = [f"  {self._times()}"] if self.replay_ms is not None and not self.emulated else []
        times += ["  emulated: a replay calls the step again, and only a graph would save time"] * self.emulated
        graphs = [f"  graph {g.bytes / 2**20:.1f} MiB, replayed x{g.replays}: {g.layout}" for g in self.per_graph]
        reasons = [f"  eager x{count}: {reason}" for reason, count in self.eager.items()]
        told = [f"  from call {self.told_since} on, code that asks whether it is being captured is told so"]
        reasons += told if self.told_since is not None else []
        reasons += [f"  eager behind each graph: {self.eager_optimizer}"] if self.eager_optimizer else []
        reasons += (
            [f"  after_step is called behind each graph: {self.eager_after_step}"] if self.eager_after_step else []
        )
        failure = [f"  not captured: {self.failure}"] if self.failure else []
        compared = sum(not each.not_compared for each in self.constants)
        held = f"  {len(self.constants)} values of the host are constants, {compared} of them compared in each call"
        reasons += [held] if self.constants else []
        reasons += [f"  {line}" for line in self.waits]
        compiled = [] if self.compile_s is None else [f"  calls that compiled took {self.compile_s:.1f} s"]
        said = [f"not in parts: {line.partition(NOR_IN_PARTS)[2]}" for line in (self.failure or "").splitlines()]
        compiled += [f"  {part}" for part in (*self.compiled, *self.split) if part not in said]
        compiled += [f"  time of a step in parts: {shares_text(self.shares)}"] if self.shares else []
        padding = [f"  {line}" for line in (*self.padding, *self.float8)]
        reasons += [f"  verify: {self.verified}"] if self.verified is not None else []
        stopped = [f"  stopped: {self.stopped}"] if self.stopped else []
        return "\n".join([head, *stopped, *failure, *times, *graphs, *padding, *reasons, *compiled])

    def _times(self) -> str:
        assert self.replay_ms is not None  # or there is nothing to say
        replay = f"a replay takes {_milliseconds(self.replay_ms)}"
        if self.eager_ms is None:
            return replay
        saved = "" if self.saved_s is None or self.saved_s < 1 else f", {self.saved_s:.0f} s saved so far"
        ratio = self.eager_ms / self.replay_ms
        times = f"{ratio:.2g}x" if ratio < 100 else f"{ratio:.0f}x"
        return f"{replay}, an eager step took {_milliseconds(self.eager_ms)}: {times}{saved}"


def shares_text(shares: dict[str, float]) -> str:
    """Return shares of a time as text."""
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items())


_SHOWN_BYTES = 2**20 // 20  # what rounds to 0.1 MiB


def _milliseconds(value: float) -> str:
    return f"{value:.3g} ms" if value < 1000 else f"{value:.0f} ms"
