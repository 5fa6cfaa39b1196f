"""A training step on two ranks, written in several ways: milliseconds, memory, set-up, bits, and time lost to NCCL.

    python tests/benchmarks/many_gpus.py                           all models and ways on two GPUs
    python tests/benchmarks/many_gpus.py --models llama --ways torch graphed one-gpu --json FILE
    python tests/benchmarks/many_gpus.py --small --device cpu      tiny models with gloo and emulated graphs

One process per rank does everything. Models: ResNet-50, batch 32 per rank, and GPT-2 small, 8 x 512 words per rank,
under DDP; a Llama of 1.1 billion parameters, 2 x 2048 words per rank, under fully_shard (each block and the rest) with
MixedPrecisionPolicy (bfloat16, gradients reduced in float32). All: bfloat16, clipping to norm 1, fused AdamW, one batch
that stays on the device. Ways:

    torch            torch's own loop
    torch-compile    the same with torch.compile(DistributedDataParallel(model)), or block.compile() before fully_shard
    graphed          ampkit.graphed_step
    graphed-default  ampkit.graphed_step(compile="default")
    graphed-inner    ampkit.graphed_step of DistributedDataParallel(torch.compile(model)), or of compiled blocks
    one-gpu          ampkit.graphed_step of the model alone, on every GPU by itself (policy="bfloat16")

Columns:

    ms        the median over repeats of a step of the slowest rank, and the fastest and the slowest repeat
    MiB       the peak of what torch reserves, the largest rank's
    set-up s  from the wrapping of the model to the end of the eighth call
    nccl ms   the time per step in which kernels of NCCL run, from a profile; also those that wait for the other rank
    exposed   the part of that in which no other kernel runs
    bits      whether losses and weights of ten captured steps have the bits of graph="off", with deterministic
              algorithms; not of one-gpu. Ways with compiled code are compared on the small models: each comparison
              compiles twice

Each row is printed when it is measured, and before it what is being measured, with seconds from the start. The table at
the end has the profiles, too. A run that is cut, by SIGTERM, SIGALRM or Ctrl-C, ends its ranks and prints that table.

The line below each model has the captured step on two ranks less that on one GPU. Under fully_shard that is no measure
of NCCL alone: a rank updates half of the weights, and one GPU all of them, and their casts differ too.
"""

import argparse
import functools
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))  # ranks are started by path, and have only this folder

from ddp_train import JobError, Started, join
from many_gpus_models import MODELS, SMALL, Model, loss_fn
from models import repeatable

import ampkit
from ampkit._commands.bench.process import Caches, clean_up, fast_kernels, pay_one_time_costs
from ampkit._commands.bench.profile import length, union

WAYS = ("torch", "torch-compile", "graphed", "graphed-default", "graphed-inner", "one-gpu")
COMPILED = ("torch-compile", "graphed-default", "graphed-inner")
PROFILED = ("torch", "graphed")
MAX_NORM, LEARNING_RATE = 1.0, 1e-4
SETUP_CALLS = 8  # a step under DDP is captured in its sixth call
CHECKED_STEPS = 10
PROFILED_STEPS = 10
NCCL = "nccl"  # how the names of its kernels begin, in lower case
Row = dict[str, Any]


class Plan(NamedTuple):
    """How thoroughly to measure.

    Attributes:
        warm_up: steps before the first repeat; ranks vote in each of ampkit's first 16 replays.
        repeats: how many times are taken.
        seconds: how long each of them is, about.
    """

    warm_up: int = 30
    repeats: int = 5
    seconds: float = 0.4


# --------------------------------------------------------------------------------------------------------------- a step


class Training:
    """A model that is trained in one way.

    Args:
        model: what is trained.
        way: one of `WAYS`.
        device: this rank's.
        graph: "auto", "emulate", or "off".
    """

    def __init__(self, model: Model, way: str, device: torch.device, graph: str) -> None:
        self.device = device
        self.net = wrapped(model.on(device), model, way, device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=LEARNING_RATE, fused=True)
        self.autocast = not model.sharded or way == "one-gpu"  # MixedPrecisionPolicy casts otherwise
        self.step: Any = None
        if way in ("torch", "torch-compile"):
            whole = way == "torch-compile" and not model.sharded
            self.forward = torch.compile(self.net) if whole else self.net
            return
        self.step = ampkit.graphed_step(
            loss_fn,
            self.net,
            self.optimizer,
            policy="bfloat16" if self.autocast else None,
            max_norm=MAX_NORM,
            graph=graph,
            compile="default" if way == "graphed-default" else None,
            on_failure="raise" if graph != "off" else "eager",
        )

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Do one step; return its loss."""
        if self.step is not None:
            loss: Tensor = self.step(inputs, labels).loss
            return loss
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            loss = loss_fn(self.forward, inputs, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def weights(self) -> list[Tensor]:
        """Return copies of this rank's weights."""
        return [getattr(param, "_local_tensor", param).detach().clone() for param in self.net.parameters()]

    def close(self) -> None:
        """Free the graphs."""
        if self.step is not None:
            self.step.close()


def wrapped(net: nn.Module, model: Model, way: str, device: torch.device) -> nn.Module:
    """Return the model as people wrap it for this way."""
    if way == "one-gpu":
        return net
    if not model.sharded:
        inner = torch.compile(net) if way == "graphed-inner" else net
        ids = [device] if device.type == "cuda" else None
        return DistributedDataParallel(inner, device_ids=ids, gradient_as_bucket_view=True)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.blocks:
        if way in ("torch-compile", "graphed-inner"):
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=low)
    return fully_shard(net, mesh=mesh, mp_policy=low)


# --------------------------------------------------------------------------------------------------------- measurements


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the largest of each value over the ranks."""
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, in order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def seconds(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Return the time of so many calls, begun by all ranks together."""
    dist.barrier()
    wait(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    wait(device)
    return time.perf_counter() - start


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(model: Model, way: str, device: torch.device, graph: str, plan: Plan) -> Row:
    """Return time, memory and set-up of one way."""
    on_cuda = device.type == "cuda"
    before = torch.cuda.memory_reserved(device) if on_cuda else 0
    batch = model.batch(device, dist.get_rank())
    dist.barrier()
    start = time.perf_counter()
    training = Training(model, way, device, graph)
    if on_cuda:
        torch.cuda.empty_cache()  # of the model before fully_shard has split it
        torch.cuda.reset_peak_memory_stats(device)
    call = functools.partial(training, *batch)
    for _ in range(SETUP_CALLS):
        call()
    wait(device)
    setup = time.perf_counter() - start
    seconds(call, plan.warm_up - SETUP_CALLS, device)
    (each,) = slowest([seconds(call, 5, device) / 5], device)
    count = max(3, int(plan.seconds / each))
    ms = slowest([1e3 * seconds(call, count, device) / count for _ in range(plan.repeats)], device)
    row: Row = {"ms": statistics.median(ms), "fastest": min(ms), "slowest": max(ms)}
    row["setup_s"] = slowest([setup], device)[0]
    if on_cuda:
        mib = [torch.cuda.max_memory_reserved(device) >> 20, before >> 20]
        row["peak_mib"], row["reserved_before_mib"] = map(list, zip(*gathered(mib), strict=True))
    if training.step is not None:
        report = training.step.report()
        row["replays"], row["failure"] = report.replays, report.failure
        row["compiled"] = list(report.compiled)
    training.close()
    return row


def nccl_times(events: Iterable[tuple[str, float, float]]) -> tuple[float, float]:
    """Return how long kernels of NCCL run, and for how much of it no other kernel does.

    Args:
        events: name, start and end of what a device did, in any unit.
    """
    events = list(events)
    nccl = [(start, end) for name, start, end in events if name.lower().startswith(NCCL)]
    others = [(start, end) for name, start, end in events if not name.lower().startswith(NCCL)]
    return length(union(nccl)), length(union(nccl + others)) - length(union(others))


def profile(model: Model, way: str, device: torch.device, graph: str, plan: Plan) -> Row:
    """Return the milliseconds per step of NCCL's kernels, and of those beside no other kernel; of the slowest rank."""
    training = Training(model, way, device, graph)
    call = functools.partial(training, *model.batch(device, dist.get_rank()))
    seconds(call, plan.warm_up, device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        seconds(call, PROFILED_STEPS, device)
    on_device = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    training.close()
    nccl, exposed = slowest([us / PROFILED_STEPS / 1e3 for us in nccl_times(on_device)], device)
    return {"nccl_ms": nccl, "exposed_ms": exposed}


def bits(model: Model, way: str, device: torch.device, graph: str) -> Row:
    """Return whether ten steps with graphs have the bits of eager ones on all ranks, and their losses on this one."""
    for strict in (True, False):
        try:
            with repeatable(strict):
                losses, weights = train(model, way, device, "off")
                clean_up(device)
                captured, captured_weights = train(model, way, device, graph)
        except RuntimeError as error:
            if "deterministic" not in str(error) or not strict:
                raise
            clean_up(device)  # a kernel has no deterministic form
            continue
        same = [torch.equal(a, b) for a, b in zip([losses, *weights], [captured, *captured_weights], strict=True)]
        return {"bitwise": all(gathered(all(same))), "deterministic": strict, "losses": captured.tolist()}
    raise AssertionError  # the second attempt has returned or raised


def train(model: Model, way: str, device: torch.device, graph: str) -> tuple[Tensor, list[Tensor]]:
    """Return the losses and weights of a training on a new batch in each step."""
    training = Training(model, way, device, graph)
    torch.manual_seed(5)
    batches = (model.batch(device, 100 * call + dist.get_rank()) for call in range(CHECKED_STEPS))
    losses = torch.stack([training(*batch).clone() for batch in batches])
    weights = training.weights()
    if graph != "off" and not training.step.replays:
        raise RuntimeError("no step was captured")
    training.close()
    return losses, weights


# ------------------------------------------------------------------------------------------------------------- one rank


class Rank:
    """One rank of the job, which measures all rows.

    Args:
        args: the options of the command line.
        device: where this rank trains.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.graph = "auto" if device.type == "cuda" else "emulate"
        self.plan = Plan(12, 2, 0.05) if args.small else Plan()
        self.models = SMALL if args.small else MODELS
        self.rows: list[Row] = []
        self.started = time.monotonic()

    def run(self) -> None:
        """Measure all rows; then compare their bits; then profile, which slows down what runs after it."""
        compiles = any(way in COMPILED for way in self.args.ways)
        with warnings.catch_warnings(), fast_kernels(self.device), Caches() as caches:
            warnings.simplefilter("ignore")
            pay_one_time_costs(self.device, compiles=compiles, lightning=False)
            for name, way in itertools.product(self.args.models, self.args.ways):
                self.rows.append({"model": name, "way": way})
                self._try(caches, self.rows[-1], measure, self.models[name], self.plan)
            for row in self.rows:
                if "error" not in row and row["way"] not in ("torch", "torch-compile", "one-gpu"):
                    is_small = row["way"] in COMPILED
                    row["bits_of"] = "small" if is_small else "the same"
                    self._try(caches, row, bits, (SMALL if is_small else self.models)[row["model"]])
            for row in self.rows if self.device.type == "cuda" else ():
                if "error" not in row and row["way"] in self.args.profiled:
                    self._try(caches, row, profile, self.models[row["model"]], self.plan)

    def _try(self, caches: Caches, row: Row, call: Callable[..., Row], model: Model, *args: Any) -> None:
        """Fill in a row, save and print it. What all ranks raise alike becomes its error. Otherwise the others wait,
        until the timeout.
        """
        start = time.monotonic()
        self._say(f"{start - self.started:6.1f} s: {call.__name__} {row['model']} {row['way']}")
        try:
            with caches.of(row["model"], row["way"]):
                row.update(call(model, row["way"], self.device, self.graph, *args))
        except NotImplementedError as error:
            row["error"] = f"refused: {error}"
        except Exception as error:  # of a compiler; the other ways are measured all the same
            traceback.print_exc()
            row["error"] = f"{call.__name__}: {type(error).__name__}: {error}"
        clean_up(self.device)
        row["seconds"] = round(row.get("seconds", 0) + time.monotonic() - start, 1)
        self._save()
        self._say(table_line(row))

    def _say(self, line: str) -> None:
        if dist.get_rank() == 0:
            print(line, flush=True)

    def _save(self) -> None:
        """Write all rows so far, so that they are there if a later one ends the job."""
        if dist.get_rank() == 0:
            on_cuda = self.device.type == "cuda"
            about = {
                "device": torch.cuda.get_device_name(self.device) if on_cuda else "CPU",
                "torch": torch.__version__,
                "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_cuda else None,
                "ranks": dist.get_world_size(),
                "seconds": round(time.monotonic() - self.started, 1),
                "rows": self.rows,
            }
            new = Path(f"{self.args.json}.new")
            new.write_text(json.dumps(about, indent=1) + "\n")
            new.replace(self.args.json)


# ---------------------------------------------------------------------------------------------------------------- table


HEAD = (
    f"{'model':<12} {'way':<16} {'ms':>8} {'(fastest to slowest)':>20} {'MiB':>7} {'set-up s':>8} {'nccl ms':>8} "
    f"{'exposed':>8}  bits"
)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as lines, with a line below each model that compares two ranks with one GPU."""
    lines = [HEAD]
    for name in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == name]
        lines += map(table_line, of_model)
        ms = {row["way"]: row.get("ms") for row in of_model}
        if ms.get("graphed") and ms.get("one-gpu"):
            lines.append(f"{name:<12} two ranks less one GPU, graphed: {ms['graphed'] - ms['one-gpu']:.3f} ms")
    return "\n".join(lines)


def table_line(row: Row) -> str:
    """Return one line of the table."""
    head = f"{row['model']:<12} {row['way']:<16}"
    if "ms" not in row:
        return f"{head} {row['error'][:110]}"
    spread = f"({row['fastest']:.3f} to {row['slowest']:.3f})"
    mib = f"{max(row['peak_mib']):7d}" if "peak_mib" in row else f"{'':7}"
    nccl = [f"{row[name]:8.3f}" if name in row else " " * 8 for name in ("nccl_ms", "exposed_ms")]
    judged = {True: "yes", False: "NO", None: ""}[row.get("bitwise")]
    judged += " (small model)" if judged and row["bits_of"] == "small" else ""
    judged += "" if row.get("deterministic", True) else " (not all kernels are deterministic)"
    error = f"  {row['error'][:110]}" if "error" in row else ""
    return f"{head} {row['ms']:8.3f} {spread:>20} {mib} {row['setup_s']:8.1f} {' '.join(nccl)}  {judged}{error}"


# ----------------------------------------------------------------------------------------------------------------- main


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["resnet50", "gpt2", "llama"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[way for way in WAYS if way != "graphed-inner"])
    parser.add_argument("--profiled", nargs="*", choices=WAYS, default=PROFILED, help="ways that are profiled, too")
    parser.add_argument("--small", action="store_true", help="tiny models and few repeats")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too, each as soon as it is measured")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=560, help="seconds, for the whole job")
    return parser.parse_args(argv)


@contextmanager
def cut_by_signals() -> Iterator[None]:
    """Context in which SIGTERM and SIGALRM interrupt this process as Ctrl-C does."""

    def interrupt(number: int, _: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGALRM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(argv: Sequence[str], args: argparse.Namespace) -> int:
    """Start the ranks, and print what they measure as they do, also if one of them fails or this process is to end."""
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(args.json or f"{folder}/rows.json").absolute()
        file.unlink(missing_ok=True)
        problem: BaseException | None = None
        options = (*argv, "--json", str(file))
        try:
            with cut_by_signals(), Started(*options, ranks=args.ranks, timeout=args.timeout, script=__file__) as job:
                job.rows(follow=lambda line: line.startswith("{") or print(line, flush=True))
        except (JobError, KeyboardInterrupt) as error:
            problem = error
        measured = json.loads(file.read_text()) if file.exists() else {"rows": []}
    rows = measured.pop("rows")
    print("", table(rows), "", json.dumps(measured), sep="\n", flush=True)
    if problem is not None:
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
    return 1 if problem or any("error" in row and not row["error"].startswith("refused") for row in rows) else 0


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    if "RANK" not in os.environ:
        return start(argv, args)
    if args.device == "cpu":
        torch.set_num_threads(1)
    try:
        Rank(args, join(args.device)).run()
    except Exception:
        traceback.print_exc()
        os._exit(1)  # an interpreter that ends right after it joined sometimes aborts, as gloo's threads still run
    print(json.dumps({"rank": dist.get_rank()}), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
