"""Updates per second of SAC's and PPO's learners, batches on the device: torch's ways beside ampkit's.

    PYTHONPATH=. python tests/benchmarks/rl_learners.py                all ways on a GPU, at most 300 s
    PYTHONPATH=. python tests/benchmarks/rl_learners.py --profile      where the time of a call goes
    PYTHONPATH=. python tests/benchmarks/rl_learners.py --quick        does it run, on the CPU too

Sizes are CleanRL's for HalfCheetah: 17 observations, 6 actions, batches of 256 and minibatches of 64. There is no
simulator: a learner is what a library can change. First losses and parameters behind 100 updates beside a plain loop,
bit by bit, under deterministic algorithms. Then updates per second of each way, the median of 5 repeats (least to
most). Each way has a process of its own; all of these are set up at once, and measured one after the other, while the
others wait. With --together all ways follow each other in one process. "K a call" is `scan`: one call, and one launch,
for K updates, each with a batch of its own; all other ways make a call per update.

--profile prints microseconds per update: `wall` of calls in a row; `host` of a call that finds the device idle, split
into before, in and behind the launch of the graph; `device`, the sum of the kernels, and their number, as
torch.profiler sees them. Where `wall` is `host`, the gap is on the host; where it is `device`, it is kernels.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ampkit
from tests.benchmarks.models import differing, repeatable
from tests.benchmarks.rl_algorithms import PPO, SAC, Learner

Batch = tuple[Tensor, ...]
Call = Callable[..., Any]
ALGORITHMS: dict[str, type[Learner]] = {"SAC": SAC, "PPO": PPO}
REPEATS, BATCHES, CHECKED = 5, 32, 100


@dataclass(frozen=True)
class Sizes:
    """What a run of the benchmark measures."""

    device: str
    seconds: float  # per way
    updates: int  # per call of the ways that make several
    backend: str  # of torch.compile
    width: int | None  # of hidden layers; None for CleanRL's

    @property
    def graph(self) -> str:
        """What `ampkit.graphed` is told."""
        return "auto" if self.device == "cuda" else "emulate"

    def learner(self, algorithm: str, adam: str, *, compiled: bool = False) -> Learner:
        """Return a learner with its weights from seed 0."""
        torch.manual_seed(0)
        learner = ALGORITHMS[algorithm](self.device, adam, self.width)
        if compiled:
            for name in learner.losses:
                setattr(learner, name, torch.compile(getattr(learner, name), backend=self.backend))
        return learner

    def batches(self, algorithm: str, several: bool) -> list[Batch]:
        """Return the batches of calls, or stacks of them."""
        torch.manual_seed(1)
        made = [ALGORITHMS[algorithm].batch(self.device) for _ in range(BATCHES)]
        if not several:
            return made
        turned = [(made + made)[i : i + self.updates] for i in range(0, BATCHES, 2)]
        return [tuple(map(torch.stack, zip(*some, strict=True))) for some in turned]


# ------------------------------------------------------------------------------------------------------------ the ways


def eager(sizes: Sizes, algorithm: str) -> Call:
    return sizes.learner(algorithm, "foreach").update


def compiled(sizes: Sizes, algorithm: str) -> Call:
    return sizes.learner(algorithm, "foreach", compiled=True).update


def hand_made(sizes: Sizes, algorithm: str) -> Call:
    return by_hand(sizes.learner(algorithm, "capturable").update, sizes.batches(algorithm, False)[0])


def hand_made_fused(sizes: Sizes, algorithm: str) -> Call:
    return by_hand(sizes.learner(algorithm, "fused").update, sizes.batches(algorithm, False)[0])


def compiled_hand_made(sizes: Sizes, algorithm: str) -> Call:
    return by_hand(sizes.learner(algorithm, "capturable", compiled=True).update, sizes.batches(algorithm, False)[0])


def compiled_hand_made_fused(sizes: Sizes, algorithm: str) -> Call:
    return by_hand(sizes.learner(algorithm, "fused", compiled=True).update, sizes.batches(algorithm, False)[0])


def tensordicts(sizes: Sizes, algorithm: str) -> Call:
    try:
        from tensordict.nn import CudaGraphModule
    except ImportError as error:
        raise NotHereError("CudaGraphModule needs tensordict: pip install tensordict") from error
    return CudaGraphModule(sizes.learner(algorithm, "capturable").update)  # type: ignore[no-any-return]


def graphed(sizes: Sizes, algorithm: str) -> Call:
    return captured(sizes, sizes.learner(algorithm, "fused"))


def graphed_compiled(sizes: Sizes, algorithm: str) -> Call:
    return captured(sizes, sizes.learner(algorithm, "fused", compiled=True))


def graphed_many(sizes: Sizes, algorithm: str) -> Call:
    return captured(sizes, sizes.learner(algorithm, "fused"), several=True)


def graphed_compiled_many(sizes: Sizes, algorithm: str) -> Call:
    return captured(sizes, sizes.learner(algorithm, "fused", compiled=True), several=True)


WAYS: dict[str, Callable[[Sizes, str], Call]] = {
    "eager": eager,
    "compile": compiled,
    "hand-made graph": hand_made,
    "hand-made graph, fused Adam": hand_made_fused,
    "compile + hand-made graph": compiled_hand_made,
    "compile + hand-made, fused Adam": compiled_hand_made_fused,
    "tensordict CudaGraphModule": tensordicts,
    "graphed": graphed,
    "graphed, compiled losses": graphed_compiled,
    "graphed, K a call": graphed_many,
    "graphed, compiled losses, K a call": graphed_compiled_many,
}


class NotHereError(Exception):
    """This machine lacks what a way needs."""


def by_hand(update: Call, example: Batch) -> Call:
    """Return what people write: warm up on a side stream, capture once; copy in, replay, copy out."""
    if not torch.cuda.is_available():
        raise NotHereError("a graph made by hand needs a GPU")
    static, side = [tensor.clone() for tensor in example], torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            update(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = update(*static)

    def call(*batch: Tensor) -> list[Tensor]:
        torch._foreach_copy_(static, list(batch))
        graph.replay()
        return [output.clone() for output in outputs]

    return call


def captured(sizes: Sizes, learner: Learner, *, several: bool = False) -> Call:
    """Return the update under `ampkit.graphed`, or its `scan`, which does `several`."""
    function = ampkit.graphed(modules=learner.modules, optimizers=learner.optimizers, graph=sizes.graph)(learner.update)
    return function.scan if several else function


# ---------------------------------------------------------------------------------------------------------------- bits


def trained(sizes: Sizes, algorithm: str, way: str | None) -> tuple[dict[str, Tensor], int]:
    """Return losses and state behind 100 updates or a few more, by a way of ampkit or by a plain loop; and replays."""
    learner, several = sizes.learner(algorithm, "fused"), way is not None and way.endswith("K a call")
    stacks = sizes.batches(algorithm, True)
    calls = [stacks[i % len(stacks)] for i in range(-(-CHECKED // sizes.updates))]
    if not several:
        calls = [tuple(tensor[i] for tensor in stack) for stack in calls for i in range(sizes.updates)]
    call: Call = learner.update if way is None else captured(sizes, learner, several=several)
    torch.manual_seed(2)
    made = [call(*batch) for batch in calls]
    together = torch.cat if several else torch.stack
    found = {f"losses {i}": together(losses) for i, losses in enumerate(zip(*made, strict=True))}
    for number, module in enumerate(learner.modules):
        found |= {f"{number}.{name}": tensor for name, tensor in module.state_dict().items()}
    for number, optimizer in enumerate(learner.optimizers):
        for place, state in optimizer.state_dict()["state"].items():
            found |= {f"optimizer {number}.{place}.{name}": tensor for name, tensor in state.items()}
    graphs = getattr(call, "__self__", call)
    report = graphs.report() if isinstance(graphs, ampkit.GraphedFunction) else None
    replays = 0 if report is None else report.replays + report.launches
    return {name: tensor.clone() for name, tensor in found.items()}, replays


def print_bits(sizes: Sizes, algorithm: str) -> None:
    """Print which tensors differ from those of a plain loop, which has the same Adam."""
    with repeatable(strict=True):
        expected, _ = trained(sizes, algorithm, None)
        for way in ("graphed", "graphed, K a call"):
            found, replays = trained(sizes, algorithm, way)
            wrong = differing(found, expected)
            text = f"{replays} launches, {len(wrong)} of {len(found)} tensors are not those of a plain loop {wrong[:3]}"
            print(f"{algorithm} {way:36s} {text}", flush=True)


# --------------------------------------------------------------------------------------------------------------- speed


def wait(sizes: Sizes) -> None:
    """Wait for the device."""
    if sizes.device == "cuda":
        torch.cuda.synchronize()


def measured(sizes: Sizes, algorithm: str, way: str, ready: Callable[[], object]) -> dict[str, Any]:
    """Set a way up, wait until it may be measured, and return updates per second."""
    torch._dynamo.reset()
    several, start = way.endswith("K a call"), time.perf_counter()
    call, batches = WAYS[way](sizes, algorithm), sizes.batches(algorithm, several)
    for batch in batches[:8]:
        call(*batch)
    wait(sizes)
    setup, rates = time.perf_counter() - start, []
    ready()
    for _ in range(REPEATS):
        calls, start = 0, time.perf_counter()
        while time.perf_counter() - start < sizes.seconds / REPEATS:
            for batch in batches:
                call(*batch)
            calls += len(batches)
            wait(sizes)
        rates.append(calls * (sizes.updates if several else 1) / (time.perf_counter() - start))
    found = {"updates_per_s": statistics.median(rates), "least": min(rates), "most": max(rates), "setup_s": setup}
    return {**found, **told(call)}


def told(call: Any) -> dict[str, str]:
    """Return what a way of ampkit says of the calls that it has not replayed, beside the warm-up."""
    function = getattr(call, "__self__", call)
    if not isinstance(function, ampkit.GraphedFunction):
        return {}
    report = function.report()
    eager = {reason: count for reason, count in report.eager.items() if reason != "warm-up"}
    why = " ".join(filter(None, (str(eager) if eager else "", report.failure)))
    return {"why": why[:300]} if why else {}


# ------------------------------------------------------------------------------------------------------------- profile


@contextmanager
def launches_timed() -> Iterator[list[tuple[float, float]]]:
    """Context in which the beginning and the end of each launch of a CUDA graph is noted."""
    noted: list[tuple[float, float]] = []
    replay = torch.cuda.CUDAGraph.replay

    def timed(graph: torch.cuda.CUDAGraph) -> None:
        start = time.perf_counter()
        replay(graph)
        noted.append((start, time.perf_counter()))

    torch.cuda.CUDAGraph.replay = timed  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]


def profiled(sizes: Sizes, algorithm: str, way: str, ready: Callable[[], object]) -> dict[str, Any]:
    """Return microseconds per update: of calls in a row, of the host, of kernels; and how many kernels there are."""
    several = way.endswith("K a call")
    call, batches = WAYS[way](sizes, algorithm), sizes.batches(algorithm, several)
    for batch in batches[:8]:
        call(*batch)
    ready()
    per = 1e6 / (sizes.updates if several else 1)
    before, within, behind, count = [], [], [], 100
    with launches_timed() as noted:
        for i in range(count):
            wait(sizes)
            noted.clear()
            start = time.perf_counter()
            call(*batches[i % len(batches)])
            end = time.perf_counter()
            first, last = (noted[0][0], noted[-1][1]) if noted else (start, end)
            before, within, behind = [*before, first - start], [*within, last - first], [*behind, end - last]
    wait(sizes)
    start = time.perf_counter()
    for i in range(count):
        call(*batches[i % len(batches)])
    wait(sizes)
    wall = (time.perf_counter() - start) / count
    activities = [
        torch.profiler.ProfilerActivity.CUDA if sizes.device == "cuda" else torch.profiler.ProfilerActivity.CPU
    ]
    with torch.profiler.profile(activities=activities) as profile:
        for i in range(10):
            call(*batches[i % len(batches)])
        wait(sizes)
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(event.time_range.elapsed_us() for event in kernels) / 10
    host = {"before": before, "launch": within, "behind": behind}
    figures = {"wall": wall * per, **{name: statistics.median(times) * per for name, times in host.items()}}
    return {**figures, "device": busy * per / 1e6, "kernels": len(kernels) * per / 1e7, **told(call)}


# ------------------------------------------------------------------------------------------------------------- command


def shown(algorithm: str, way: str, found: dict[str, Any]) -> str:
    """Return the line of a way."""
    if "error" in found:
        return f"{algorithm} {way:36s} {found['error']}"
    why = f"  {found.pop('why')}" if "why" in found else ""
    figures = "  ".join(f"{name} {value:.1f}" for name, value in found.items())
    return f"{algorithm} {way:36s} {figures}{why}"


def one(
    args: argparse.Namespace, sizes: Sizes, algorithm: str, way: str, ready: Callable[[], object]
) -> dict[str, Any]:
    """Return the figures of a way, or the error that it raised."""
    try:
        return (profiled if args.profile else measured)(sizes, algorithm, way, ready)
    except Exception as error:  # a row of the table says so, and the other ways go on
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


def worker(args: argparse.Namespace, sizes: Sizes) -> None:
    """Measure a way in this process, when the other end of the pipe says so."""

    def ready() -> None:
        print("ready", flush=True)
        sys.stdin.readline()

    found = one(args, sizes, args.algorithms[0], args.ways[0], ready)
    print(json.dumps(found), flush=True)


def in_processes(algorithm: str, ways: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Set all ways up at once, in a process each; yield the figures of one after the other."""
    options = [option for option in sys.argv[1:] if option in ("--quick", "--profile")]
    processes = []
    for way in ways:
        command = [sys.executable, __file__, *options, "--algorithms", algorithm, "--ways", way, "--worker"]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    try:
        first = [process.stdout.readline() for process in processes if process.stdout is not None]
        for way, process, line in zip(ways, processes, first, strict=True):
            if line.strip() == "ready":
                line, _ = process.communicate("go\n")
            yield way, json.loads(line) if line.strip() else {"error": f"its process ended with {process.wait()}"}
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="small networks, few calls, torch.compile without Inductor"
    )
    parser.add_argument("--profile", action="store_true", help="where the time of a call goes")
    parser.add_argument("--together", action="store_true", help="all ways in this process, one after the other")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help="names of rows")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    quick = args.quick or device == "cpu"
    seconds, backend = (0.02, "aot_eager") if quick else (1.0, "inductor")
    sizes = Sizes(device, seconds, 4 if quick else 16, backend, 16 if quick else None)
    if args.worker:
        worker(args, sizes)
        return
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu, emulated graphs"
    print(name, torch.__version__, f"K = {sizes.updates}", flush=True)
    for algorithm in args.algorithms:
        if not args.profile:
            print_bits(sizes, algorithm)
        here = ((way, one(args, sizes, algorithm, way, lambda: None)) for way in args.ways)
        for way, found in here if args.together else in_processes(algorithm, args.ways):
            print(shown(algorithm, way, found), flush=True)


if __name__ == "__main__":
    main()
