"""Honest timing: what is measured of each variant and how, so that none has an advantage over another."""

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
from .process import Caches, clean_up, do_what_is_done_once, fast_kernels, little_garbage
from .profile import host_time, profile
from .report import OUT_OF_MEMORY, Figures, Result, Row, first_line, is_out_of_memory
from .session import Plan, Session
from .variants import VARIANTS, Setting, Variant, has_lightning


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
    progress: ProgressBar


def run(
    figures: Figures,
    jobs: Sequence[Job],
    keys: Sequence[str],
    setting: Setting,
    plan: Plan,
    save: Callable[[], None] = lambda: None,
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

    Raises:
        CaseError: a job's function returned something that cannot be trained, or has no such input.
        ImportError: a job's model is of a package that is not installed.
    """
    profiled = plan.profile and setting.device.type == "cuda"
    progress = ProgressBar(len(jobs) * len(keys) * (2 if profiled else 1))
    compiles = any(VARIANTS[key].compiles for key in keys)
    with fast_kernels(setting.device), Caches() as caches:
        caches.callback(progress.clear)
        do_what_is_done_once(setting.device, compiles=compiles, lightning="lightning" in keys)
        caches.enter_context(little_garbage())
        common = _Run(figures, setting, plan, save, caches, progress)
        for job in jobs:
            _measure_all(job, keys, common)
        for job, result in zip(jobs, figures.results, strict=True) if profiled else ():
            _profile_all(job, result, common)


def _measure_all(job: Job, keys: Sequence[str], run: _Run) -> None:
    errors = {key: _does_not_fit(key, job.model, run.figures) for key in keys}
    case, no_case = (None, "") if all(errors.values()) else _case_of(job, run.setting)
    result = Result(job.model, job.batch if case is None else case.batch_size)
    run.figures.results.append(result)
    expected = None if case is None else Expectations(case, run.setting, run.plan, run.figures.notes)
    for key in keys:
        run.progress.show(f"{job.model}, batch {result.batch}: {key}")
        row = Row(key, VARIANTS[key].label_on(run.setting.device), error=errors[key] or no_case)
        if case is not None and expected is not None and not row.error:
            with run.caches.of(result.model, result.batch, row.variant):
                problem = measure(row, case, run.setting, run.plan, expected)
            if problem:
                run.figures.notes.append(f"No host time of {row.label}, {job.model}, batch {result.batch}: {problem}.")
        result.rows.append(row)
        run.save()


def _case_of(job: Job, setting: Setting) -> tuple[Case | None, str]:
    """Return the job's case with its input in place; or none, and why: there is no room for its batches."""
    case = None
    try:
        case = job.make()
        return ready(case, setting.policy.params, setting.device, setting.source), ""
    except CaseError as error:
        if case is None:
            raise  # it names the function
        raise CaseError(f"{job.model}: {error}") from None
    except RuntimeError as error:
        if not is_out_of_memory(error):
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
        quick: take only those of the usual ones that need no time to set up.
        sweep: take only those as well, because each of them is set up for many batch sizes.
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


def measure(row: Row, case: Case, setting: Setting, plan: Plan, expected: Expectations) -> str:
    """Build the row's variant, train it, time it, and fill in the row. What it raises becomes the row's error.

    Returns:
        Why the row has times but none of the host, "" if this did not fail.
    """
    problem = ""
    try:
        problem = _measure(row, VARIANTS[row.variant], case, setting, plan, expected)
    except Exception as error:  # whatever a compiler or a user's function raises: the other variants go on
        row.error = first_line(error)
    clean_up(setting.device)
    return problem


def _measure(row: Row, variant: Variant, case: Case, setting: Setting, plan: Plan, expected: Expectations) -> str:
    known = expected.of(variant.whole)  # before anything is built: it takes memory, and cleans up behind itself
    session = Session(case.batches, setting.device, plan)
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
    except Exception as error:  # more memory than the steps had, say: their times stand
        return first_line(error)
    return ""
