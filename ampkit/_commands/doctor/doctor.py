"""The command `doctor`: trains the loop that `module:function` returns for some steps, and reports its faults."""

import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..._capture.engine.options import WARM_UP
from ..._capture.graph.report import Report, shares_text
from ..._errors import AmpkitError, UsageError
from ..._precision.fake_tensors import can_save_for_backward
from ..._precision.policy import Policy, changes_model
from ..._text import ProgressBar, size_text
from ..._torch.tensors.fake_tensors import is_limit_of_fake_tensors
from ..._user_line import user_line
from ...debug._memory.forecast import forecast
from ..bench.profile import ALL_STEPS, device_work
from ..bench.report import is_out_of_memory
from .faults import CHECKS, Fault
from .subjects import DoctorError, load_subject
from .trial import Trial

_TIMED_STEPS = 10
_IN_PLACE = "Graphs stay valid if memory is written to in place instead (copy_, add_)."
_NAMED = 6  # constants of the host that the report names
_UNCHECKED_ON_CPU = (
    "copies from pageable memory, and waits other than for a value or a shape",
    "operations that are not deterministic on CUDA only",
    "the speed-up by a capture, which is computed from the time of the device",
)


@dataclass
class Diagnosis:
    """The faults of a training loop. Prints as a report."""

    name: str  # module:function
    device: str  # of the model
    findings: list[Fault] = field(default_factory=list)  # the worst first
    unchecked: list[str] = field(default_factory=list)  # the checks that could not be made, and why
    figures: dict[str, Any] = field(default_factory=dict)  # what was measured, by name, for the JSON file
    notes: list[str] = field(default_factory=list)  # the figures in sentences

    @property
    def exit_code(self) -> int:
        """0 if nothing was found, 1 otherwise."""
        return int(bool(self.findings))

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps({**asdict(self), "torch": torch.__version__, "exit_code": self.exit_code}, indent=1)

    def __str__(self) -> str:
        count = f"{len(self.findings)} finding{'s' if len(self.findings) != 1 else ''}"
        lines = [
            f"{self.name} on {self.device}, torch {torch.__version__}: {count if self.findings else 'no findings'}"
        ]
        for found in self.findings:
            times = f" ({found.count} times)" if found.count > 1 else ""
            waited = f", {found.ms:.3f} ms" if found.ms else ""
            lines += ["", f"{found.severity:8}{found.kind}: {found.line or '(no line of yours)'}"]
            lines += [f"{'':8}called from {found.caller}"] if found.caller else []
            lines += [f"{'':8}{found.what}{times}{waited}", f"{'':8}{found.advice}"]
        lines += ["", *self.notes] if self.notes else []
        if self.unchecked:
            lines += ["", "Not checked:", *(f"  {text}" for text in self.unchecked)]
        return "\n".join(lines)


def diagnose(
    name: str,
    find: Callable[[], Callable[[], Any]],
    policy: Policy | None = None,
    *,
    lightning: bool = False,
    bar: bool = True,
) -> Diagnosis:
    """Train the loop that a function of the user's returns for a few eager steps, and return its faults.

    For the arguments see `load_subject`. With `bar`, a terminal shows a progress bar.

    Raises:
        DoctorError: if the loop cannot be trained. Its cause is the exception of the user's code, if there was one.
        UsageError: if `find` raises it.
    """
    progress = ProgressBar(len(CHECKS) + 3, bar)
    try:
        progress.show("the first step")
        try:
            trial = Trial(load_subject(name, find, policy, lightning))
            trial.run()  # makes the optimizer's state
        except UsageError:
            raise
        except Exception as error:  # whatever the user's code raises
            raise DoctorError(f"{name}: {_error_text(error)}") from error
        on_cuda = trial.device.type == "cuda"
        diagnosis = Diagnosis(name, torch.cuda.get_device_name(trial.device) if on_cuda else str(trial.device))
        for title, check in CHECKS.items():
            progress.show(title)
            with _unchecked_if_it_fails(diagnosis, title):
                diagnosis.findings += check(trial)
        if all(len(records) < 2 for records in trial.records.values()):
            why = "no two steps had batches of the same layout, so none could be compared"
            diagnosis.unchecked.append(f"host state: {why}")
        diagnosis.findings.sort(key=lambda found: found.rank)
        _add_outcome(diagnosis, trial)
        progress.show("speed-up by a capture")
        if on_cuda:
            with _unchecked_if_it_fails(diagnosis, "speed-up by a capture"):
                _add_speed_up(diagnosis, trial)
        else:
            why = "the model is on the CPU" if torch.cuda.is_available() else "there is no CUDA device"
            diagnosis.unchecked += [f"{text} ({why})" for text in _UNCHECKED_ON_CPU]
        progress.show("memory")
        with _unchecked_if_it_fails(diagnosis, "memory"):
            _add_memory(diagnosis, trial)
        return diagnosis
    finally:
        progress.clear()


def _error_text(error: Exception) -> str:
    where = user_line(error)
    return f"{type(error).__name__}: {error}{f' ({where})' if where else ''}"


@contextmanager
def _unchecked_if_it_fails(diagnosis: Diagnosis, title: str) -> Iterator[None]:
    """Context that reports an error under "Not checked", so that the other checks go on. Its text is in the figures."""
    try:
        yield
    except Exception as error:  # the user's code may fail after a first step that went well
        diagnosis.unchecked.append(f"{title}: {_why_unchecked(error)}")
        diagnosis.figures.setdefault("errors", {})[title] = _error_text(error)


def _why_unchecked(error: Exception) -> str:
    """Return in words why a check could not be made: in those of the error only if they are ampkit's."""
    cause = error.__cause__ or error
    line = user_line(cause)
    where = f": {line}" if line else ""
    if isinstance(cause, Exception) and is_limit_of_fake_tensors(cause):
        return f"the step needs the value of a tensor, and a forecast computes shapes alone{where}"
    if is_out_of_memory(cause):
        return f"the memory did not suffice{where}"
    if line:
        return f"your code raised an exception, which --json names{where}"
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    raised_by = str(frame.f_globals.get("__name__", "torch"))
    if isinstance(error, (AmpkitError, ValueError)) and raised_by.partition(".")[0] == "ampkit":
        return str(error)
    return f"{raised_by} raised an exception, which --json names"


# -------------------------------------------------------------------------------------------------------------- figures


def _add_outcome(diagnosis: Diagnosis, trial: Trial) -> None:
    """Say what ampkit captures of this loop, and what the step lacks to be captured whole."""
    in_the_way = [found.line or found.what for found in diagnosis.findings if found.severity == "high"]
    by, names = trial.subject.by, ", ".join(type(each).__name__ for each in trial.uncapturable)
    parts = f"forward and backward, with {names} stepping eagerly behind the graph"
    parts += ", or in it as long as all its numbers stay as they are" if trial.may_be_constant else ""
    possible = "the whole function" if by == "graphed" else parts if trial.why_apart else "the whole step"
    diagnosis.figures["outcome"] = "in parts" if trial.why_apart else "whole"
    report: Report | None = None
    title = "modules that are captured by themselves" if in_the_way else "constants of the host"
    with _unchecked_if_it_fails(diagnosis, title):
        report = trial.emulated()
    constants = () if report is None else report.constants
    diagnosis.figures["constants"] = [each._asdict() for each in constants]
    # What no single step shows, such as a parameter that is moved to other memory.
    if not in_the_way and by == "graphed" and report is not None and (why := _why_not_replayed(report)):
        why, _, rest = why.partition("\n")
        in_the_way = [why]
        diagnosis.findings.insert(0, Fault("high", "capture", trial.subject.line, why, rest or _IN_PLACE))
    if not in_the_way:
        diagnosis.notes.append(f"{by} captures {possible}.")
        values = [each for each in constants if not each.is_code]  # of functions and modules only how many
        texts = ((each.path, each.value, each.not_compared) for each in values[:_NAMED])
        named = [f"{path} ({f'not compared: {why}' if why else value})" for path, value, why in texts]
        more = len(constants) - len(named)
        rest = f" and {more} more, which step.constants() lists" if more else ""
        if named:
            diagnosis.notes.append(f"Its graphs hold what it reads on the host: {', '.join(named)}{rest}.")
        return
    split = report if report is not None and (report.parts or report.updates) else None
    diagnosis.figures["outcome"] = "eager" if split is None else "in parts"
    diagnosis.figures["split"] = [] if split is None else list(split.split)
    captured = "nothing. "
    if split is not None:
        what = "modules one by one" if split.parts else "the update of the parameters by itself"
        known = [found.line for found in diagnosis.findings if found.line]  # not to be said again
        new = [text for text in split.split if not any(line in text for line in known)]
        captured = "\n  ".join([f"{what}:", *new]) + "\n"
        diagnosis.figures["shares"] = split.shares
        if split.shares:
            diagnosis.notes.append(f"Of the time of an eager step: {shares_text(split.shares)}.")
    them = "that finding" if diagnosis.findings[0].kind == "capture" else in_the_way[0]
    them = them if len(in_the_way) == 1 else f"the {len(in_the_way)} findings of severity high"
    diagnosis.notes.append(f"{by} captures {captured}Without {them} it captures {possible}.")


def _why_not_replayed(report: Report) -> str:
    """Return why some or all calls of a function were not replayed, "" if they were."""
    again = next((reason for reason in report.eager if reason.startswith(f"{WARM_UP} again: ")), "")
    return report.failure or ("" if report.graphs else again.partition(": ")[2])


def _add_speed_up(diagnosis: Diagnosis, trial: Trial) -> None:
    """Measure how long a step takes, and how long host and device are busy in it. A capture removes the host's time."""
    trial = trial.with_options(scheduler=None)  # it may have few steps left
    torch.cuda.synchronize(trial.device)
    start = time.perf_counter()
    for _ in range(_TIMED_STEPS):
        trial.run()
    torch.cuda.synchronize(trial.device)
    step_ms = (time.perf_counter() - start) / _TIMED_STEPS * 1e3
    took = []  # by calls when no work is queued on the device
    for _ in range(_TIMED_STEPS):
        torch.cuda.synchronize(trial.device)
        start = time.perf_counter()
        trial.run()
        took.append(time.perf_counter() - start)
    host_ms = statistics.median(took) * 1e3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(ALL_STEPS):  # so many `device_work` expects
            trial.run()
        torch.cuda.synchronize(trial.device)
    work = device_work(profiler.events() or ())
    if not work.kernels:
        diagnosis.unchecked.append("speed-up by a capture: torch.profiler saw no kernel")
        return
    device_ms, kernels = work.busy_us / ALL_STEPS / 1e3, work.kernels / ALL_STEPS
    times = {"step_ms": step_ms, "host_ms": host_ms, "device_ms": device_ms}
    diagnosis.figures["capture"] = {**times, "kernels": kernels}
    diagnosis.notes.append(
        f"A step takes {step_ms:.2f} ms; the host is busy for {host_ms:.2f} ms, the device for {device_ms:.2f} ms "
        f"({kernels:.0f} kernels). A capture can make it up to {step_ms / device_ms:.1f} times as fast."
    )


def _add_memory(diagnosis: Diagnosis, trial: Trial) -> None:
    """Forecast the memory of a step without a policy and under the user's. The forecast for CUDA needs no GPU."""
    if trial.subject.by == "graphed" or len(trial.subject.optimizers) > 1:
        diagnosis.unchecked.append("memory: it is forecast for one loss and one optimizer")
        return
    policy = trial.subject.options.get("policy")
    policy = Policy.parse(policy) if isinstance(policy, str) else policy
    device = "cuda" if can_save_for_backward("cuda") else "cpu"
    # A policy that changes the model has been applied to it, so the model without the policy no longer exists.
    policies = [policy] if policy is not None and changes_model(policy) else dict.fromkeys((None, policy))
    subject, (args, kwargs) = trial.subject, trial.kept[0]
    parts = subject.loss_fn, subject.model, subject.optimizers[0], kwargs or args
    peaks = {str(each): forecast(*parts, policy=each, device=device).peak for each in policies}
    diagnosis.figures["memory"] = {"device": device, "peak_bytes": peaks}
    under = {name: "without a policy" if name == "None" else f"under {name}" for name in peaks}
    texts = (f"{size_text(peak)} {under[name]}" for name, peak in peaks.items())
    diagnosis.notes.append(f"Memory of a step on {device}, forecast: {', '.join(texts)}.")
