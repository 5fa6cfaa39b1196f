"""Honest timing: what is measured of each variant and how, so that none has an advantage over another."""

import itertools
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._bench_cases import Batch, Case, ready
from ._bench_process import Caches, clean_up, do_what_is_done_once, fast_kernels
from ._bench_report import Figures, Result, Row
from ._bench_variants import VARIANTS, Setting, Variant, has_lightning, torch_amp
from ._graph import CudaGraph
from ._prefetch import prefetch

# By how much of its fall the loss may differ from the expected one at any time, by the dtype of compute. On a CPU
# float32 and bfloat16 differed by up to 1.9% (mlp, resnet18-cifar, a small gpt2-like), without clipping by 45% or more.
TOLERANCE = {torch.float32: 0.02, torch.float16: 0.03, torch.bfloat16: 0.05}
LEAST_FALL = 0.05  # of the first loss
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
    with fast_kernels(setting.device), Caches() as caches:
        do_what_is_done_once(
            setting.device, compiles=any(VARIANTS[key].compiles for key in keys), lightning="lightning" in keys
        )
        for job in jobs:
            case = ready(job.make(), setting.policy.params, setting.device)
            result = Result(job.model, case.batch_size)
            figures.results.append(result)
            expected = _Expectations(case, setting, plan, figures.notes)
            for key in keys:
                progress.show(f"{job.model}, batch {result.batch}: {key}")
                row = Row(key, VARIANTS[key].label_on(setting.device), error=_does_not_fit(key, job.model, figures))
                if not row.error:
                    with caches.of(result.model, result.batch, row.variant):
                        measure(row, case, setting, plan, expected)
                result.rows.append(row)
                save()
        if profiled:
            _profile_all(figures, jobs, setting, caches, progress, save)
    progress.clear()


def _does_not_fit(key: str, model: str, figures: Figures) -> str:
    """Return what to say of a variant that ran out of memory on a smaller batch of this model, "" if it did not."""
    for result in figures.results:
        for row in result.rows:
            if (result.model, row.variant, row.error) == (model, key, OUT_OF_MEMORY):
                return f"{OUT_OF_MEMORY} at batch {result.batch} already"
    return ""


def _profile_all(
    figures: Figures,
    jobs: Sequence[Job],
    setting: Setting,
    caches: Caches,
    progress: "_Bar",
    save: Callable[[], None],
) -> None:
    for job, result in zip(jobs, figures.results, strict=True):
        case = ready(job.make(), setting.policy.params, setting.device)
        for row in result.rows:
            progress.show(f"{job.model}, batch {result.batch}: profile of {row.variant}")
            with caches.of(result.model, result.batch, row.variant):
                problem = "" if row.error else profile(row, case, setting)
            if problem:
                figures.notes.append(f"No profile of {row.label}, {job.model}, batch {result.batch}: {problem}.")
            save()


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
            "No CUDA device: graphs are emulated by calling the step again, which is not faster than an eager step. "
            "Not measured here: how long kernels run and how many, host and launch time of a call, peak memory"
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
    try:
        _measure(row, VARIANTS[row.variant], case, setting, plan, expected)
    except Exception as error:  # whatever a compiler or a user's function raises: the other variants go on
        row.error = _first_line(error)
    clean_up(setting.device)


def _measure(row: Row, variant: Variant, case: Case, setting: Setting, plan: Plan, expected: "_Expectations") -> None:
    known = expected.of(variant.whole)  # before anything is built: it takes memory, and cleans up behind itself
    session = _Session(case.batches, setting.device, plan)
    loop = variant.build(case, setting)
    loop.train(session.steps(), session.on_loss)
    row.ms, row.fastest, row.slowest = statistics.median(session.ms), min(session.ms), max(session.ms)
    row.setup_s, row.peak_mib, row.setup_peak_mib = session.setup_s, session.peak_mib, session.setup_peak_mib
    row.loss = session.losses[-1]
    if known:
        row.expected = known[-1]
        row.difference = difference(session.losses, known)
        row.off = not row.difference <= TOLERANCE[setting.policy.compute]  # also where it is nan
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
        # The driver's queue fills, and clocks settle.
        yield from self._take(max(1, min(20, int(self._plan.seconds / 3 / typical))))
        self._now()
        self.setup_peak_mib = self._memory.restart()
        n = max(5, min(1000, int(self._plan.seconds / typical)))
        for _ in range(self._plan.repeats):
            start = self._now()
            yield from self._take(n)
            self.ms.append((self._now() - start) / n * 1e3)
        self.peak_mib = self._memory.peak_mib()

    @property
    def losses(self) -> list[float]:
        """The mean losses of each pass over the batches in the checked steps. Waits for the device."""
        n = max(1, min(len(self._batches), self._plan.checked // 2))
        passes = [self._losses[i : i + n] for i in range(len(self._losses) % n, len(self._losses), n)]
        return [float(torch.stack([loss.float() for loss in part]).mean()) for part in passes]  # sync

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

    Args:
        case: what is trained.
        setting: policy and device.
        plan: how many steps are checked.
        notes: gets a sentence that says why there are no expected losses, where there are none.
    """

    def __init__(self, case: Case, setting: Setting, plan: Plan, notes: list[str]) -> None:
        self._case, self._setting, self._plan, self._notes = case, setting, plan, notes
        self._known = {True: self._run(True)}

    def of(self, whole: bool) -> list[float]:
        """Return the expected losses of each pass over the batches; none if they could not be had.

        Args:
            whole: of a step with clipping and schedule, on all batches; else without, on the first batch alone.

        It may train, and frees what it took: no variant may be alive.
        """
        if whole not in self._known:
            self._known[whole] = self._run(whole)
        return self._known[whole]

    def _run(self, whole: bool) -> list[float]:
        device, batches = self._setting.device, self._case.batches
        session = _Session(batches if whole else [batches[0]] * len(batches), device, self._plan)
        try:
            torch_amp(self._case, self._setting, whole=whole).train(session.checked_steps(), session.on_loss)
            return session.losses
        except Exception as error:
            size = self._case.batch_size
            self._notes.append(f"No expected losses for batch {size}, torch AMP failed: {_first_line(error)}.")
            return []
        finally:
            clean_up(device)


def difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest difference of two curves, as a share of what the expected one falls by at most.

    One that hardly falls (`LEAST_FALL`) counts as if it fell by that: its rounding errors are not a difference.
    """
    fall = max(max(expected) - min(expected), LEAST_FALL * abs(expected[0]))
    differences = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences) / fall


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
    events: list[Any] = []
    try:
        steps = _profiled_steps(case.batches, setting.device, events)
        VARIANTS[row.variant].build(case, setting).train(steps, lambda loss: None)
    except Exception as error:
        return _first_line(error)
    finally:
        clean_up(setting.device)
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
