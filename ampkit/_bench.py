"""Honest timing: what is measured of each variant and how, so that none has an advantage over another."""

import gc
import itertools
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._bench_cases import Batch, Case
from ._bench_report import Figures, Result, Row
from ._bench_variants import VARIANTS, Setting, Variant, has_lightning, torch_amp
from ._graph import CudaGraph
from ._prefetch import prefetch
from ._torch import clear_cublas_workspaces, tree_flatten, tree_unflatten

# By how much of its fall the loss may differ from the expected one, by the dtype of compute. On a CPU float32 and
# bfloat16 differed by 0.1 to 1.1% of it (mlp, resnet18-cifar, a small gpt2-like), clipping or not by 27 to 111%.
TOLERANCE = {torch.float32: 0.02, torch.float16: 0.03, torch.bfloat16: 0.05}
LEAST_FALL = 0.05  # of the loss; one that falls by less counts as if it fell by that
PROFILED_STEPS = 10
HOST_CALLS = 30
MIB = 2**20


class Plan(NamedTuple):
    """How thoroughly to measure.

    Attributes:
        repeats: blocks of steps that are timed.
        seconds: length of a block, about.
        checked: steps from the start whose losses are compared. Warm-up, compilation and capture lie in them.
        profile: whether to measure how long kernels run.
    """

    repeats: int = 7
    seconds: float = 0.3
    checked: int = 20
    profile: bool = True


class Job(NamedTuple):
    """One table: the name of a model, and how to make it with its data."""

    model: str
    make: Callable[[], Case]


def run(
    figures: Figures,
    jobs: Sequence[Job],
    keys: Sequence[str],
    setting: Setting,
    plan: Plan,
    save: Callable[[], None] = lambda: None,
    bar: bool = True,
) -> None:
    """Measure variants of each job, one after another, each built anew and freed again.

    The profiler comes last, over variants that are built once more: it slows down what runs after it in a process
    (https://github.com/pytorch/pytorch/issues/144455).

    Args:
        figures: gets a result per job. What is in it when an exception ends this is valid.
        jobs: in order of batch size, for each model. A variant that ran out of memory is not tried on larger ones.
        keys: of the variants.
        setting: policy and device.
        plan: how thoroughly.
        save: called after each measurement.
        bar: show on a terminal how far it is.

    Raises:
        CaseError: a job's function returned something that cannot be trained.
        ImportError: a job's model is of a package that is not installed.
    """
    profiled = plan.profile and setting.device.type == "cuda"
    progress = _Bar(len(jobs) * len(keys) * (2 if profiled else 1), bar)
    too_large: dict[tuple[str, str], int] = {}
    with _fast_kernels(setting.device):
        for job in jobs:
            case = _on_host(job.make(), setting)
            result = Result(job.model, case.batch_size)
            figures.results.append(result)
            expected = _Expectations(case, setting, plan)
            figures.notes += expected.problems
            for key in keys:
                progress.show(f"{job.model}, batch {result.batch}: {key}")
                row = Row(key, VARIANTS[key].label_on(setting.device))
                if smaller := too_large.get((job.model, key)):
                    row.error = f"{OUT_OF_MEMORY} at batch {smaller} already"
                else:
                    measure(row, case, setting, plan, expected)
                if row.error == OUT_OF_MEMORY:
                    too_large[job.model, key] = result.batch
                result.rows.append(row)
                save()
        for job, result in zip(jobs if profiled else (), figures.results, strict=False):
            case = _on_host(job.make(), setting)
            for row in result.rows:
                progress.show(f"{job.model}, batch {result.batch}: profile of {row.variant}")
                if not row.error and (problem := profile(row, case, setting)):
                    figures.notes.append(f"No profile of {row.label}, {job.model}, batch {result.batch}: {problem}.")
                save()
    progress.clear()


def select(keys: Sequence[str] | None, quick: bool, device: torch.device) -> tuple[list[str], list[str]]:
    """Return which variants to measure, and notes on what is left out or not what it seems.

    Args:
        keys: those that were asked for; None for the usual ones.
        quick: of these, only those that take no time to set up.
        device: where to measure.
    """
    notes = []
    usual = [key for key, variant in VARIANTS.items() if variant.default and (variant.quick or not quick)]
    wanted = usual if keys is None else [key for key in VARIANTS if key in keys]
    if quick and keys is None:
        notes.append("--quick: few repeats, and no variant with torch.compile, float32 or Lightning.")
    if "lightning" in wanted and not has_lightning():
        wanted.remove("lightning")
        notes.append("Left out: Lightning with ampkit's callback, which needs pip install 'ampkit[lightning]'.")
    if device.type != "cuda":
        need = [VARIANTS[key].label for key in wanted if VARIANTS[key].needs_cuda]
        wanted = [key for key in wanted if not VARIANTS[key].needs_cuda]
        notes.append(
            "No CUDA device: graphs are emulated, by calling the step again, which is not faster than an eager step. Not "
            "measured here: how long kernels run and how many, host and launch time of a call, peak memory"
            + "".join(f", {label}" for label in need)
            + "."
        )
    return wanted, notes


def describe(setting: Setting, plan: Plan, command: str) -> dict[str, Any]:
    """Return what the figures depend on: device, versions, date, policy, thoroughness, command."""
    cuda = setting.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(setting.device) if cuda else f"CPU ({platform.machine()})",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        "policy": str(setting.policy),
        "command": command,
        "repeats": plan.repeats,
        "seconds_per_repeat": plan.seconds,
        "checked_steps": plan.checked,
        "tolerance": TOLERANCE[setting.policy.compute],
    }


# --------------------------------------------------------------------------------------------------------- one variant

OUT_OF_MEMORY = "out of memory"


def measure(row: Row, case: Case, setting: Setting, plan: Plan, expected: "_Expectations") -> None:
    """Build the row's variant, train it, time it, and fill in the row. What it raises becomes the row's error."""
    _clean_up(setting.device)
    try:
        _measure(row, VARIANTS[row.variant], case, setting, plan, expected)
    except Exception as error:  # whatever a compiler or a user's function raises: the other variants go on
        row.error = _first_line(error)
    _clean_up(setting.device)


def _measure(row: Row, variant: Variant, case: Case, setting: Setting, plan: Plan, expected: "_Expectations") -> None:
    session = _Session(case.batches, setting.device, plan)
    loop = variant.build(case, setting)
    loop.train(session.steps(), session.on_loss)
    row.ms, row.fastest, row.slowest = statistics.median(session.ms), min(session.ms), max(session.ms)
    row.setup_s, row.peak_mib, row.setup_peak_mib = session.setup_s, session.peak_mib, session.setup_peak_mib
    row.loss, (row.expected, allowed) = session.loss, expected.of(variant.whole)
    row.off = row.expected is not None and not abs(row.loss - row.expected) <= allowed  # also where it is nan
    row.report = None if loop.report is None else loop.report()
    if loop.step is not None and setting.device.type == "cuda":
        row.host_us, row.launch_us = _host_time(loop.step, case, setting.device)


class _Session:
    """The batches that one variant trains on, in order, with the time taken in between.

    A loop asks for a batch when it has called its step on the one before: so this sees all of the loop from where a
    loader is, whoever wrote the loop.

    Attributes:
        ms: milliseconds per step, one number per repeat.
        setup_s: see `Row`, as the following ones.
        peak_mib: None without CUDA.
        setup_peak_mib: likewise.
    """

    def __init__(self, batches: Sequence[Batch], device: torch.device, plan: Plan) -> None:
        self._batches = batches
        self._device = device
        self._plan = plan
        self._losses: list[Tensor] = []
        self._start = self._now()
        self._memory = _Memory(device)
        self.ms: list[float] = []
        self.setup_s = 0.0
        self.peak_mib: float | None = None
        self.setup_peak_mib: float | None = None

    def on_loss(self, loss: Tensor) -> None:
        """Take the loss of a step."""
        if len(self._losses) < self._plan.checked:
            self._losses.append(loss.detach().clone())  # the next replay of a graph overwrites it

    def steps(self) -> Iterator[Batch]:
        """Yield batches: the checked steps, each on its own; a warm-up; the timed blocks."""
        taken = [self._now()]
        for batch in self._take(self._plan.checked):
            yield batch
            taken.append(self._now())
        steps = [after - before for before, after in itertools.pairwise(taken)]
        typical = statistics.median(steps[len(steps) // 2 :])
        self.setup_s = max(0.0, taken[-1] - self._start - typical * len(steps))
        yield from self._take(min(20, int(0.1 / typical) + 1))  # clocks and the driver's queue settle
        self._now()
        self.setup_peak_mib = self._memory.restart()
        n = max(5, min(1000, int(self._plan.seconds / typical)))
        for _ in range(self._plan.repeats):
            start = self._now()
            yield from self._take(n)
            self.ms.append((self._now() - start) / n * 1e3)
        self.peak_mib = self._memory.peak_mib()

    @property
    def loss(self) -> float:
        """The mean loss of the last checked steps, one per batch. Waits for the device."""
        return self._mean(self._losses[-self._cycle :])

    @property
    def first_loss(self) -> float:
        """The mean loss of as many steps from the start. Waits for the device."""
        return self._mean(self._losses[: self._cycle])

    @property
    def _cycle(self) -> int:
        return max(1, min(len(self._batches), self._plan.checked // 2))

    def _mean(self, losses: Sequence[Tensor]) -> float:
        return float(torch.stack([loss.float() for loss in losses]).mean())  # sync

    def checked_steps(self) -> Iterator[Batch]:
        """Yield the batches of the checked steps alone."""
        return self._take(self._plan.checked)

    def _take(self, n: int) -> Iterator[Batch]:
        return (self._batches[i % len(self._batches)] for i in range(n))

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class _Memory:
    """Device memory beyond what was allocated when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._base = 0
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._base = torch.cuda.memory_allocated(self._device)

    def restart(self) -> float | None:
        """Return the most that was allocated so far, in MiB, and begin again."""
        if self._device is None:
            return None
        most = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return (most - self._base) / MIB

    def peak_mib(self) -> float | None:
        """Return the most that was in use since, in MiB, with what the pools of graphs hold but do not show."""
        if self._device is None:
            return None
        private = [part for part in torch.cuda.memory_snapshot() if tuple(part["segment_pool_id"]) != (0, 0)]
        hidden: int = sum(part["total_size"] - part["allocated_size"] for part in private)
        return (torch.cuda.max_memory_allocated(self._device) - self._base + hidden) / MIB


class _Expectations:
    """The losses that the variants of one case are to have: those of torch AMP, eager, run apart from them.

    These runs come first. What the process does once only (start CUDA, let cuDNN choose its kernels) is done in them.

    Attributes:
        problems: sentences that say why there are no expected losses; empty if there are.
    """

    def __init__(self, case: Case, setting: Setting, plan: Plan) -> None:
        self._case, self._setting, self._plan = case, setting, plan
        self.problems: list[str] = []
        self._known: dict[bool, tuple[float | None, float]] = {True: self._run(True)}

    def of(self, whole: bool) -> tuple[float | None, float]:
        """Return the expected loss, and by how much one may differ from it; None if it could not be had.

        Args:
            whole: of a step with clipping and schedule, on all batches; else without, on the first batch alone.
        """
        if whole not in self._known:
            self._known[whole] = self._run(whole)
        return self._known[whole]

    def _run(self, whole: bool) -> tuple[float | None, float]:
        device = self._setting.device
        session = _Session(self._case.batches if whole else self._case.batches[:1], device, self._plan)
        try:
            loop = torch_amp(self._case, self._setting, whole=whole)
            loop.train(session.checked_steps(), session.on_loss)
            fell = abs(session.first_loss - session.loss)
            return session.loss, TOLERANCE[self._setting.policy.compute] * max(fell, LEAST_FALL * abs(session.loss))
        except Exception as error:
            size = self._case.batch_size
            self.problems.append(f"No expected losses for batch {size}, torch AMP failed: {_first_line(error)}.")
            return None, 0.0


def _first_line(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        return OUT_OF_MEMORY
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


# ---------------------------------------------------------------------------------------------------------------- host


def _host_time(step: Callable[..., Tensor], case: Case, device: torch.device) -> tuple[float, float | None]:
    """Return the microseconds until a call returns with nothing queued, and those of the launch of its graph in it."""
    batches = itertools.cycle(list(prefetch(case.batches, device)))
    calls, launches = [], []
    with _launches() as took:
        for _ in range(HOST_CALLS):
            batch = next(batches)
            torch.cuda.synchronize(device)
            took.clear()
            start = time.perf_counter()
            step(*batch)
            calls.append(time.perf_counter() - start)
            launches.append(sum(took))
    launch = statistics.median(launches) * 1e6
    return statistics.median(calls) * 1e6, launch or None


@contextmanager
def _launches() -> Iterator[list[float]]:
    """Context that notes how many seconds each launch of a graph of ampkit's takes the host."""
    took: list[float] = []
    replay = CudaGraph.replay

    def timed(self: CudaGraph) -> Any:
        start = time.perf_counter()
        outputs = replay(self)
        took.append(time.perf_counter() - start)
        return outputs

    CudaGraph.replay = timed  # type: ignore[method-assign]
    try:
        yield took
    finally:
        CudaGraph.replay = replay  # type: ignore[method-assign]


# -------------------------------------------------------------------------------------------------------------- profile


def profile(row: Row, case: Case, setting: Setting) -> str:
    """Build the row's variant, find out for how long kernels run in a step and how many, and fill in the row.

    Returns:
        Why there are no such figures, "" if there are.
    """
    _clean_up(setting.device)
    events: list[Any] = []
    try:
        steps = _profiled_steps(case.batches, setting.device, events)
        VARIANTS[row.variant].build(case, setting).train(steps, lambda loss: None)
    except Exception as error:
        return _first_line(error)
    finally:
        _clean_up(setting.device)
    us, kernels = busy(events)
    if not kernels:
        return "torch.profiler saw no kernel"
    row.busy_ms, row.kernels = us / PROFILED_STEPS / 1e3, kernels / PROFILED_STEPS
    return ""


def _profiled_steps(batches: Sequence[Batch], device: torch.device, events: list[Any]) -> Iterator[Batch]:
    forever = itertools.cycle(batches)
    yield from itertools.islice(forever, 20)
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        yield from itertools.islice(forever, PROFILED_STEPS)
        torch.cuda.synchronize(device)
    events.extend(profiler.events() or ())


def busy(events: Iterable[Any]) -> tuple[float, int]:
    """Return for how many microseconds at least one kernel ran, and how many kernels ran.

    Copies within the device and fills count as time in which it is busy, not as kernels. Copies from and to the host do
    not count: another engine of the device does them meanwhile.

    Args:
        events: of torch.profiler.
    """
    work = [
        event
        for event in events
        if event.device_type.name == "CUDA"
        and not event.is_user_annotation
        and not event.name.startswith(("Memcpy HtoD", "Memcpy DtoH"))
    ]
    total, end = 0.0, float("-inf")
    for start, stop in sorted((event.time_range.start, event.time_range.end) for event in work):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total, sum(not event.name.startswith(("Memcpy", "Memset")) for event in work)


# ---------------------------------------------------------------------------------------------------------- the process


def _on_host(case: Case, setting: Setting) -> Case:
    """Return the case with batches in pinned memory, floating tensors in the dtype of the parameters."""

    def ready(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.to(setting.policy.params) if leaf.is_floating_point() else leaf
        return leaf.pin_memory() if setting.device.type == "cuda" else leaf

    leaves, tree = tree_flatten(list(case.batches))
    return replace(case, batches=tree_unflatten([ready(leaf) for leaf in leaves], tree))


def _clean_up(device: torch.device) -> None:
    """Leave nothing of the last variant behind: modules, compiled code, graphs, memory."""
    gc.collect()
    if "torch._dynamo" in sys.modules:  # nothing was compiled else, and the import takes a second
        torch.compiler.reset()
        gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        clear_cublas_workspaces()  # else the first variant on a stream would pay for all
        torch.cuda.empty_cache()


@contextmanager
def _fast_kernels(device: torch.device) -> Iterator[None]:
    """Context in which torch takes its fastest kernels for all variants, TF32 included, and torch.compile is quiet."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True), warnings.catch_warnings():
            for text in (
                "`torch.jit.script_method` is deprecated",  # inductor imports something that uses it
                "bf16 and fp16 are mixed",  # of its C++ for the CPU, which then does not vectorise
                "Please use the new API settings to control TF32",
            ):
                warnings.filterwarnings("ignore", text)
            warnings.filterwarnings("ignore", module="lightning")
            yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Bar:
    """A line on a terminal that says how much is done. Nothing where there is no terminal."""

    def __init__(self, total: int, shown: bool) -> None:
        self._total = total
        self._done = 0
        self._shown = shown and sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Count one part as begun."""
        if self._shown:
            filled = 24 * self._done // self._total
            line = f"[{'#' * filled}{'.' * (24 - filled)}] {self._done + 1}/{self._total} {text}"
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        self._done += 1

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
