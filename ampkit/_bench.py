"""Honest timing: what is measured of each variant and how, so that none has an advantage over another."""

import copy
import itertools
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._bench_cases import Batch, Case, CaseError, ready
from ._bench_process import Caches, clean_up, do_what_is_done_once, fast_kernels, little_garbage
from ._bench_report import OUT_OF_MEMORY, Figures, Result, Row
from ._bench_variants import VARIANTS, Setting, Variant, feed, has_lightning, torch_amp
from ._graph import CudaGraph

# By how much of its fall the loss may differ from the expected one at any time, by the dtype of compute, if rounding
# makes no larger difference. On a CPU float32 and bfloat16 differed by up to 1.2% (mlp, resnet18-cifar, a small
# gpt2-like), a learning rate 1.25 times as high by 10% or more, no schedule by 43%, no clipping by 50%.
TOLERANCE = {torch.float32: 0.02, torch.float16: 0.03, torch.bfloat16: 0.05}
LEAST_FALL = 0.05  # of the first loss
NUDGED_RUNS = 2
# A run from nudged weights went further from the first run than so many times what two others told in 1 of 168 cases
# (eight runs of a resnet50 on 64x64 images, batch 8, bfloat16, where noise is 15% of the fall).
NOISE_FACTOR = 4.0
LARGEST_TOLERANCE = 0.5  # of the fall; where noise asks for more, a loss that passes says little
PROFILED_STEPS = 10
LEAD_IN, LEAD_OUT = 3, 1  # steps before and after these: the device has nothing queued when the profiler starts
ALL_STEPS = LEAD_IN + PROFILED_STEPS + LEAD_OUT
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
    """One table: the name of a model, how to make it with its data, and the batch size that was asked for."""

    model: str
    make: Callable[[], Case]
    batch: int


class _Run(NamedTuple):
    """What the measurements of one run have in common: arguments of `run`, and what it makes of them."""

    figures: Figures
    setting: Setting
    plan: Plan
    save: Callable[[], None]
    caches: Caches
    progress: "_Bar"


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
        setting: policy, device and input.
        plan: how thoroughly.
        save: called after each measurement.
        bar: show on a terminal how far it is.

    Raises:
        CaseError: a job's function returned something that cannot be trained, or has no such input.
        ImportError: a job's model is of a package that is not installed.
    """
    profiled = plan.profile and setting.device.type == "cuda"
    progress = _Bar(len(jobs) * len(keys) * (2 if profiled else 1), bar)
    compiles = any(VARIANTS[key].compiles for key in keys)
    with fast_kernels(setting.device), Caches() as caches:
        do_what_is_done_once(setting.device, compiles=compiles, lightning="lightning" in keys)
        caches.enter_context(little_garbage())
        common = _Run(figures, setting, plan, save, caches, progress)
        for job in jobs:
            _measure_all(job, keys, common)
        for job, result in zip(jobs, figures.results, strict=True) if profiled else ():
            _profile_all(job, result, common)
    progress.clear()


def _measure_all(job: Job, keys: Sequence[str], run: _Run) -> None:
    errors = {key: _does_not_fit(key, job.model, run.figures) for key in keys}
    case, problem = (None, "") if all(errors.values()) else _case_of(job, run.setting)
    result = Result(job.model, job.batch if case is None else case.batch_size)
    run.figures.results.append(result)
    expected = None if case is None else _Expectations(case, run.setting, run.plan, run.figures.notes)
    for key in keys:
        run.progress.show(f"{job.model}, batch {result.batch}: {key}")
        row = Row(key, VARIANTS[key].label_on(run.setting.device), error=errors[key] or problem)
        if case is not None and expected is not None and not row.error:
            with run.caches.of(result.model, result.batch, row.variant):
                measure(row, case, run.setting, run.plan, expected)
        result.rows.append(row)
        run.save()


def _case_of(job: Job, setting: Setting) -> tuple[Case | None, str]:
    """Return the job's case with its input in place; or none, and why: there is no room for its batches."""
    case = job.make()
    try:
        return ready(case, setting.policy.params, setting.device, setting.source), ""
    except CaseError as error:
        raise CaseError(f"{job.model}: {error}") from None
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
    clean_up(setting.device)
    return None, OUT_OF_MEMORY


def _does_not_fit(key: str, model: str, figures: Figures) -> str:
    """Return what to say of a variant that ran out of memory on a smaller batch of this model, "" if it did not."""
    for result in figures.results:
        for row in result.rows:
            if (result.model, row.variant, row.error) == (model, key, OUT_OF_MEMORY):
                return f"{OUT_OF_MEMORY} at batch {result.batch} already"
    return ""


def _profile_all(job: Job, result: Result, run: _Run) -> None:
    rows = [row for row in result.rows if not row.error]
    case, problem = _case_of(job, run.setting) if rows else (None, "")
    for row in result.rows:
        run.progress.show(f"{job.model}, batch {result.batch}: profile of {row.variant}")
        if row in rows and case is not None:
            with run.caches.of(result.model, result.batch, row.variant):
                problem = profile(row, case, run.setting)
        if row in rows and problem:
            run.figures.notes.append(f"No profile of {row.label}, {job.model}, batch {result.batch}: {problem}.")
        run.save()


def select(
    keys: Sequence[str] | None, device: torch.device, quick: bool = False, sweep: bool = False
) -> tuple[list[str], list[str]]:
    """Return which variants to measure, and notes on what is left out or not what it seems.

    Args:
        keys: those that were asked for; None for the usual ones.
        device: where to measure.
        quick: of the usual ones, only those that take no time to set up.
        sweep: likewise, for they are to be set up for many batch sizes.
    """
    notes = []
    few = quick or sweep
    usual = [key for key, variant in VARIANTS.items() if variant.default and (variant.quick or not few)]
    wanted = usual if keys is None else [key for key in VARIANTS if key in keys]
    if quick:
        notes.append("--quick: few repeats.")
    if few and keys is None:
        notes.append("Left out unless --variants names them: torch.compile, float32 and Lightning.")
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
        "input": setting.source,
        "command": command,
        "repeats": plan.repeats,
        "seconds_per_repeat": plan.seconds,
        "checked_steps": plan.checked,
        "tolerance": TOLERANCE[setting.policy.compute],
    }


# --------------------------------------------------------------------------------------------------------- one variant


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
    if known is not None:
        known.judge(session.losses, row)
    row.report = None if loop.report is None else loop.report()
    if loop.step is not None and setting.device.type == "cuda":
        row.host_us, row.launch_us = _host_time(loop.step, case, setting)


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
    def ends(self) -> range:
        """The last of the checked steps in each pass over the batches, or in each half where there are too many."""
        n = max(1, min(len(self._batches), self._plan.checked // 2))
        return range(n + self._plan.checked % n, self._plan.checked + 1, n)

    @property
    def losses(self) -> list[float]:
        """The mean loss of each of these passes. Waits for the device."""
        n = self.ends.step
        return [float(torch.stack([loss.float() for loss in self._losses[end - n : end]]).mean()) for end in self.ends]

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


class Expected(NamedTuple):
    """The losses that a variant is to have, and by how much they may differ.

    Losses that differ by rounding part exponentially. So noise is small in early passes, in which a variant that does
    something else is off already, whatever noise is in later ones.

    Attributes:
        losses: means over each pass over the batches.
        fall: what these fall by, at least `LEAST_FALL`: the unit of the following.
        noise: by how much runs are apart that differ by rounding alone, at most, up to each pass.
        tolerances: of each pass.
        ends: the last step of each pass.
    """

    losses: list[float]
    fall: float
    noise: list[float]
    tolerances: list[float]
    ends: Sequence[int]

    @classmethod
    def of(cls, runs: Sequence[list[float]], floor: float, ends: Sequence[int]) -> "Expected":
        """Return what follows from the losses of eager runs.

        Args:
            runs: the one to compare with, and others that started from nudged weights.
            floor: the tolerance where there is no noise.
            ends: the last step of each pass.
        """
        losses = runs[0]
        fall = max(max(losses) - min(losses), LEAST_FALL * abs(losses[0])) or 1.0  # 0.0: a loss that is 0 throughout
        noise = list(itertools.accumulate((_spread(part) / fall for part in zip(*runs, strict=True)), max))
        return cls(losses, fall, noise, [max(floor, NOISE_FACTOR * part) for part in noise], ends)

    def judge(self, losses: Sequence[float], row: Row) -> None:
        """Fill in the row what its losses say. Nan is off in any pass: rounding does not lead there."""
        differences = [abs(a - b) / self.fall for a, b in zip(losses, self.losses, strict=True)]
        passes = list(zip(differences, self.tolerances, self.noise, strict=True))
        row.expected = self.losses[-1]
        row.difference, row.tolerance, row.noise = max(passes, key=lambda part: part[0] / part[1])
        row.off = any(math.isnan(part) or part > most for part, most, _ in passes)
        row.compared = max(
            (end for end, most in zip(self.ends, self.tolerances, strict=True) if most <= LARGEST_TOLERANCE), default=0
        )


def _spread(losses: Sequence[float]) -> float:
    return math.inf if any(map(math.isnan, losses)) else max(losses) - min(losses)


class _Expectations:
    """What the variants of one case are to come to: eager runs with torch AMP, apart from theirs.

    Three runs each: from the case's weights, and twice from weights that are nudged by as much as rounding to the dtype
    of compute may change them. How far these go apart is what kernels that round differently, or in another order in
    each run, may make of the same step.

    They come first. What the process does once only (start CUDA, let cuDNN choose its kernels) is done in them.

    Args:
        case: what is trained.
        setting: policy and device.
        plan: how many steps are checked.
        notes: gets a sentence that says why there are no expected losses, where there are none.
    """

    def __init__(self, case: Case, setting: Setting, plan: Plan, notes: list[str]) -> None:
        self._case, self._setting, self._plan, self._notes = case, setting, plan, notes
        self._known = {True: self._run(True)}

    def of(self, whole: bool) -> Expected | None:
        """Return the expected losses of each pass over the batches; None if they could not be had.

        Args:
            whole: of a step with clipping and schedule, on all batches; else without, on the first batch alone.

        It may train, and frees what it took: no variant may be alive.
        """
        if whole not in self._known:
            self._known[whole] = self._run(whole)
        return self._known[whole]

    def _run(self, whole: bool) -> Expected | None:
        try:
            runs = [self._losses(whole, nudged) for nudged in range(1 + NUDGED_RUNS)]
        except Exception as error:
            size = self._case.batch_size
            self._notes.append(f"No expected losses for batch {size}, torch AMP failed: {_first_line(error)}.")
            return None
        finally:
            clean_up(self._setting.device)
        return Expected.of(runs, TOLERANCE[self._setting.policy.compute], self._session(whole).ends)

    def _losses(self, whole: bool, nudged: int) -> list[float]:
        case = replace(self._case, model=nudge(self._case.model, self._rounding(), nudged)) if nudged else self._case
        session = self._session(whole)
        torch_amp(case, self._setting, whole=whole).train(session.checked_steps(), session.on_loss)
        return session.losses

    def _rounding(self) -> torch.dtype:
        compute = self._setting.policy.compute
        # TF32, which is allowed, has the mantissa of float16.
        return torch.float16 if compute == torch.float32 and self._setting.device.type == "cuda" else compute

    def _session(self, whole: bool) -> "_Session":
        batches = self._case.batches
        return _Session(batches if whole else [batches[0]] * len(batches), self._setting.device, self._plan)


def nudge(model: nn.Module, dtype: torch.dtype, seed: int) -> nn.Module:
    """Return a copy with each parameter changed at random, by as much as rounding to this dtype may change it."""
    made = torch.Generator().manual_seed(seed)
    half_unit = torch.finfo(dtype).eps / 2
    model = copy.deepcopy(model)
    with torch.no_grad():
        for param in filter(Tensor.is_floating_point, model.parameters()):
            param.mul_(1 + half_unit * (2 * torch.rand(param.shape, generator=made) - 1).to(param.dtype))
    return model


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def _first_line(error: BaseException) -> str:
    if _is_out_of_memory(error):
        return OUT_OF_MEMORY
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


# ---------------------------------------------------------------------------------------------------------------- host


def _host_time(step: Callable[..., Tensor], case: Case, setting: Setting) -> tuple[float, float | None]:
    """Return the microseconds until a call returns with nothing queued, and those of the launch of its graph in it."""
    batches = itertools.cycle(list(feed(case.batches, case, setting)))
    calls, launches = [], []
    with _launches() as took:
        for _ in range(HOST_CALLS):
            batch = next(batches)
            torch.cuda.synchronize(setting.device)
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
    seen = device_work(events)
    if not seen.kernels:
        return "torch.profiler saw no kernel"
    row.busy_ms, row.kernels = seen.busy_us / ALL_STEPS / 1e3, seen.kernels / ALL_STEPS
    row.idle_share, row.copy_share = seen.idle_share, seen.copy_share
    return ""


def _profiled_steps(batches: Sequence[Batch], device: torch.device, events: list[Any]) -> Iterator[Batch]:
    forever = itertools.cycle(batches)
    yield from itertools.islice(forever, 20)
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        yield from itertools.islice(forever, ALL_STEPS)
        torch.cuda.synchronize(device)
    events.extend(profiler.events() or ())


class DeviceWork(NamedTuple):
    """What a device did in `ALL_STEPS`. Shares are of the time of the `PROFILED_STEPS` among them.

    Attributes:
        busy_us: microseconds in which at least one kernel ran. Copies within the device and fills count as kernels.
        kernels: how many ran, without copies and fills.
        idle_share: the share of time in which neither a kernel nor a copy ran.
        copy_share: the share in which only copies from or to the host ran, which another engine of the device does.
    """

    busy_us: float
    kernels: int
    idle_share: float
    copy_share: float


Interval = tuple[float, float]


def device_work(events: Iterable[Any]) -> DeviceWork:
    """Return what a device did. Streams that work at the same time count once.

    Args:
        events: of torch.profiler. Those of the host, and annotations, do not count.
    """
    events = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
    computing = [event for event in events if not event.name.startswith(("Memcpy HtoD", "Memcpy DtoH"))]
    kernels = sum(not event.name.startswith(("Memcpy", "Memset")) for event in computing)
    busy, at_work = _union(computing), _union(events)
    if not kernels:
        return DeviceWork(0.0, 0, 0.0, 0.0)
    # Steps leave no mark on the device's time: the middle of the time stands for the steps in the middle.
    first, last = at_work[0][0], at_work[-1][1]
    step = (last - first) / ALL_STEPS
    window = first + LEAD_IN * step, last - LEAD_OUT * step
    worked, computed = (_length(some, window) / (window[1] - window[0]) for some in (at_work, busy))
    return DeviceWork(_length(busy), kernels, 1 - worked, worked - computed)


def _union(events: Iterable[Any]) -> list[Interval]:
    """Return disjoint intervals, in order, in which at least one of the events was going on."""
    covered: list[Interval] = []
    for start, stop in sorted((event.time_range.start, event.time_range.end) for event in events):
        if covered and start <= covered[-1][1]:
            covered[-1] = covered[-1][0], max(covered[-1][1], stop)
        else:
            covered.append((start, stop))
    return covered


def _length(disjoint: Iterable[Interval], window: Interval = (-math.inf, math.inf)) -> float:
    return sum(max(0.0, min(stop, window[1]) - max(start, window[0])) for start, stop in disjoint)


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
