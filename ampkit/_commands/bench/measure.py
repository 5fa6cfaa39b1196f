"""Measures variants one after another under the same conditions, so that none has an advantage over another."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..._text import ProgressBar
from .cases import Case, CaseError, ready
from .losses import TOLERANCE, Expectations
from .process import Caches, clean_up, fast_kernels, little_garbage, pay_one_time_costs
from .profile import host_time, profile
from .report import OUT_OF_MEMORY, Figures, Result, Row, cases, error_text, is_out_of_memory
from .session import Plan, TimedLoop
from .variants import VARIANTS, Setting, Variant, has_lightning


class Job(NamedTuple):
    """What one table shows."""

    model: str  # its name
    make: Callable[[], Case]
    batch: int  # the requested size


class _Run(NamedTuple):
    """What all measurements of one run share: some arguments of `run`, the caches and the progress bar."""

    figures: Figures
    setting: Setting
    plan: Plan
    save: Callable[[], None]
    caches: Caches
    progress: ProgressBar
    ends: float

    def over(self) -> str:
        """Return why nothing more is to be measured, "" if there is time left."""
        limit = f"the {self.plan.limit:g} s of --time-limit were over"
        return limit if time.monotonic() > self.ends else ""


def run(
    figures: Figures,
    jobs: Sequence[Job],
    keys: Sequence[str],
    setting: Setting,
    plan: Plan,
    save: Callable[[], None] = lambda: None,
) -> None:
    """Measure the variants of each job one after another. Each is built, measured and freed.

    Profiling comes last, on variants that are built again, because the profiler slows down what runs after it in the
    process (https://github.com/pytorch/pytorch/issues/144455).

    The figures get a result per job, and `save` is called after each measurement: if an exception ends the run, the
    results so far are valid. The jobs of a model are in order of batch size: a variant that ran out of memory is not
    tried on a larger batch.

    Raises:
        CaseError: if a job's function returned something that cannot be trained, or the case has no such input.
        ImportError: if a job's model needs a package that is not installed.
    """
    profiled = plan.profile and setting.device.type == "cuda"
    progress = ProgressBar(len(jobs) * len(keys) * (2 if profiled else 1))
    ends = time.monotonic() + plan.limit
    compiles = any(VARIANTS[key].compiles for key in keys)
    with fast_kernels(setting.device), Caches(plan.compiled_code) as caches:
        caches.callback(progress.clear)
        pay_one_time_costs(setting.device, compiles=compiles, lightning="lightning" in keys)
        caches.enter_context(little_garbage())
        common = _Run(figures, setting, plan, save, caches, progress, ends)
        for job in jobs:
            _measure_all(job, keys, common)
        for job, result in zip(jobs, figures.results, strict=True) if profiled else ():
            _profile_all(job, result, common)


def _measure_all(job: Job, keys: Sequence[str], run: _Run) -> None:
    over = run.over()
    too_large = {  # by variant: ran out of memory on a smaller batch of this model
        row.variant: f"{OUT_OF_MEMORY} at batch {result.batch} already"
        for result, row in cases(run.figures.results)
        if (result.model, row.error) == (job.model, OUT_OF_MEMORY)
    }
    errors = {key: over or too_large.get(key, "") for key in keys}
    case, no_case = (None, "") if all(errors.values()) else _case_of(job, run.setting)
    result = Result(job.model, job.batch if case is None else case.batch_size)
    run.figures.results.append(result)
    expected = None if case is None else Expectations(case, run.setting, run.plan, run.figures.notes)
    for key in keys:
        run.progress.show(f"{job.model}, batch {result.batch}: {key}")
        label, on_cpu = VARIANTS[key].label, run.setting.device.type != "cuda" and VARIANTS[key].on_cpu
        row = Row(key, on_cpu or label, error=errors[key] or no_case or run.over())
        if case is not None and expected is not None and not row.error:
            with run.caches.of(result.model, result.batch, row.variant):
                problem = measure(row, case, run.setting, run.plan, expected)
            if problem:
                run.figures.notes.append(f"No host time of {row.label}, {job.model}, batch {result.batch}: {problem}.")
        result.rows.append(row)
        run.save()


def _case_of(job: Job, setting: Setting) -> tuple[Case | None, str]:
    """Return the job's case with its batches in place and "", or None and an error if they do not fit into memory."""
    case = None
    try:
        case = job.make()
        return ready(case, setting.policy.params, setting.device, setting.source), ""
    except CaseError as error:
        if case is None:
            raise  # the message names the function
        raise CaseError(f"{job.model}: {error}") from None
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    clean_up(setting.device)
    return None, OUT_OF_MEMORY


def _profile_all(job: Job, result: Result, run: _Run) -> None:
    rows = [row for row in result.rows if not row.error]
    case, problem = _case_of(job, run.setting) if rows and not run.over() else (None, "")
    for row in result.rows:
        run.progress.show(f"{job.model}, batch {result.batch}: profile of {row.variant}")
        if row in rows and (over := run.over()):
            problem = over
        elif row in rows and case is not None:
            with run.caches.of(result.model, result.batch, row.variant):
                problem = profile(row, case, run.setting)
        if row in rows and problem:
            run.figures.notes.append(f"No profile of {row.label}, {job.model}, batch {result.batch}: {problem}.")
        run.save()


def select(
    keys: Sequence[str] | None, device: torch.device, quick: bool = False, sweep: bool = False
) -> tuple[list[str], list[str]]:
    """Return the names of the variants to measure, and notes for the reader of the figures.

    Of the default ones (`keys` is None), only those that are set up quickly are taken if this is to be quick, and for a
    sweep too, which sets up each again for every batch size.
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


def measure(row: Row, case: Case, setting: Setting, plan: Plan, expected: Expectations) -> str:
    """Build the row's variant, train it, time it, and fill in the row. An exception becomes the row's error.

    Returns:
        Why the host's time could not be measured, "" if it could, or if the row has an error.
    """
    problem = ""
    try:
        problem = _measure(row, VARIANTS[row.variant], case, setting, plan, expected)
    except Exception as error:  # of a compiler or a user's function; the other variants are measured all the same
        row.error = error_text(error)
    clean_up(setting.device)
    return problem


def _measure(row: Row, variant: Variant, case: Case, setting: Setting, plan: Plan, expected: Expectations) -> str:
    known = expected.of(variant.whole)  # before the variant is built, since this may train and frees all memory
    session = TimedLoop(case.batches, setting.device, plan, variant.together)
    loop = variant.build(case, setting)
    loop.train(session.steps(), session.on_loss)
    row.ms, row.fastest, row.slowest = statistics.median(session.ms), min(session.ms), max(session.ms)
    row.setup_s, row.peak_mib, row.setup_peak_mib = session.setup_s, session.peak_mib, session.setup_peak_mib
    row.loss = session.losses[-1]
    if known is not None:
        known.judge(session.losses, row)
    row.report = None if loop.report is None else loop.report()
    try:
        row.host_us, row.launch_us = (None, None) if loop.step is None else host_time(loop.step, case, setting)
    except Exception as error:  # it may need more memory than the steps, whose times are valid
        return error_text(error)
    return ""
