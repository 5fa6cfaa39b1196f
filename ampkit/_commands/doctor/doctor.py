"""The command `doctor`: trains the loop that `module:function` returns for some steps, and reports its faults."""

import inspect
import json
import linecache
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..._capture.graph.report import Report, shares_text
from ..._errors import AmpkitError, UsageError
from ..._precision.fake_tensors import can_save_for_backward
from ..._precision.policy import Policy, changes_model
from ..._step.graphed_step import graphed_step
from ..._text import ProgressBar, size_text, type_text
from ..._torch.tensors.fake_tensors import is_limit_of_fake_tensors
from ..._user_line import line_text, user_line
from ...debug._memory.forecast import forecast
from ..bench.profile import ALL_STEPS, device_work
from ..bench.report import is_out_of_memory
from .faults import CHECKS, Fault
from .trial import Origins, Subject, Trial

RETURNED = (
    "(loss_fn, model, optimizer, batches) or (loss_fn, model, optimizer, batches, options): loss_fn(model, *batch) "
    "returns the loss; optimizer is an optimizer, or a function that makes one from parameters; batches is a loader or "
    "a list; options is a dict of further arguments of ampkit.graphed_step, such as {'policy': 'float16'}"
)
RETURNED_LIGHTNING = (
    "(LightningModule, batches) or (LightningModule, batches, options): batches is a dataloader or a list; options is "
    "a dict of further arguments of ampkit.graphed_step, such as {'policy': '16-mixed', 'max_norm': 1.0}"
)
_TIMED_STEPS = 10
_NAMED = 6  # constants of the host that the report names
_IGNORED_OPTIONS = ("graph", "warmup", "verify", "on_failure", "numerics")  # of graphed_step; the doctor sets these
_UNCHECKED_ON_CPU = (
    "copies from pageable memory, and waits other than for a value or a shape",
    "operations that are not deterministic on CUDA only",
    "the speed-up by a capture, which is computed from the time of the device",
)


class DoctorError(UsageError):
    """The training loop cannot be examined. The message says why and what to write instead."""


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


# ------------------------------------------------------------------------------------------------------------- the loop


def load_subject(name: str, find: Callable[[], Callable[[], Any]], policy: Policy | None, lightning: bool) -> Subject:
    """Return the training loop that a function of the user's returns, after checking its parts.

    Args:
        name: the name of the function in messages.
        find: imports and returns the function. Lines of the modules that it imports are noted too.
        policy: what the step is to run under, in place of the policy that the function returns.
        lightning: whether the function returns a LightningModule.

    Raises:
        DoctorError: the function returned something else. `find` and the user's code may raise other errors.
    """
    subject = _lightning_subject(name, find) if lightning else _subject(name, find)
    return subject if policy is None else replace(subject, options={**subject.options, "policy": policy})


def _subject(name: str, find: Callable[[], Callable[[], Any]]) -> Subject:
    """Return the training loop that a function of the user's returns in parts."""
    with Origins() as origins:
        function = find()
        made = function()
        if not isinstance(made, tuple) or len(made) not in (4, 5):
            raise DoctorError(f"{name} returned {type_text(made)}, expected {RETURNED}.")
        loss_fn, model, optimizer, batches = made[:4]
        if not isinstance(optimizer, torch.optim.Optimizer) and callable(optimizer) and isinstance(model, nn.Module):
            optimizer = optimizer(model.parameters())  # `bench` takes a function too
    options = _options(name, made[4] if len(made) == 5 else {})
    if not callable(loss_fn):
        raise DoctorError(f"{name} returned {type_text(loss_fn)} for loss_fn, expected {RETURNED}.")
    return Subject(_line_of(function), loss_fn, model, optimizer, batches, options, origins)


def _options(name: str, options: Any) -> dict[str, Any]:
    known = [key for key, arg in inspect.signature(graphed_step).parameters.items() if arg.kind is arg.KEYWORD_ONLY]
    if not isinstance(options, dict) or (strange := [key for key in options if key not in known]):
        found = f"the options {', '.join(map(repr, strange))}" if isinstance(options, dict) else type_text(options)
        raise DoctorError(f"{name} returned {found}, expected a dict of arguments of graphed_step: {', '.join(known)}.")
    return {key: value for key, value in options.items() if key not in _IGNORED_OPTIONS}


def _line_of(function: Callable[..., Any]) -> str:
    """Return `file:line: source` of a function, "" if it has no source."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    file, first = code.co_filename, code.co_firstlineno  # the line of a decorator, if there is one
    lines = ((number, linecache.getline(file, number).lstrip()) for number in range(first, first + 9))
    heads = (number for number, line in lines if line.startswith(("def ", "async def ")))
    return line_text(file, next(heads, first))


# ------------------------------------------------------------------------------------------------------------ Lightning


def _lightning_subject(name: str, find: Callable[[], Callable[[], Any]]) -> Subject:
    """Return the training loop that a Trainer would run for the user's LightningModule."""
    try:
        import lightning.pytorch as pl
    except ImportError as error:
        raise DoctorError("--lightning needs Lightning. Run: pip install 'ampkit[lightning]'") from error
    with Origins() as origins:
        function = find()
        made = function()
        if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], pl.LightningModule):
            raise DoctorError(f"{name} returned {type_text(made)}, expected {RETURNED_LIGHTNING}.")
        module = made[0].to("cuda") if torch.cuda.is_available() else made[0]  # as a Trainer does
        if not module.automatic_optimization:
            raise DoctorError(
                f"{name}: automatic_optimization is False, so training_step steps the optimizers itself. --lightning "
                "examines automatic optimization only."
            )
        optimizer, scheduler = _configured(name, module.configure_optimizers())
    options = _options(name, made[2] if len(made) == 3 else {})
    if scheduler is not None:
        options.setdefault("scheduler", scheduler)
    return Subject(_line_of(function), _lightning_loss, module, optimizer, made[1], options, origins, whole=True)


def _lightning_loss(module: Any, batch: Any) -> Any:
    wants_index = len(inspect.signature(module.training_step).parameters) > 1
    with warnings.catch_warnings():
        # Without a Trainer, self.log warns and does nothing.
        warnings.filterwarnings("ignore", "You are trying to `self.log")
        out = module.training_step(batch, 0) if wants_index else module.training_step(batch)
    return out["loss"] if isinstance(out, Mapping) else out


def _configured(name: str, made: Any) -> tuple[Any, Any]:
    """Return the optimizer, and the scheduler or None, from what `configure_optimizers` returned.

    A scheduler that is stepped once per epoch is left out.
    """
    optimizers, schedulers = made, []
    if isinstance(made, dict):
        optimizers, schedulers = [made.get("optimizer")], [made["lr_scheduler"]] if "lr_scheduler" in made else []
    elif isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], (tuple, list)):
        optimizers, schedulers = made
    optimizers = list(optimizers) if isinstance(optimizers, (tuple, list)) else [optimizers]
    if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.Optimizer):
        raise DoctorError(f"{name}: configure_optimizers returned {type_text(made)}, expected a single optimizer.")
    each_step = [part["scheduler"] for part in schedulers if isinstance(part, dict) and part.get("interval") == "step"]
    return optimizers[0], each_step[0] if each_step else None


# -------------------------------------------------------------------------------------------------------------- figures


def _add_outcome(diagnosis: Diagnosis, trial: Trial) -> None:
    """Say what `graphed_step` captures of this loop, and what the step lacks to be captured whole."""
    in_the_way = [found.line or found.what for found in diagnosis.findings if found.severity == "high"]
    parts = f"forward and backward, with {type(trial.subject.optimizer).__name__} stepping eagerly behind the graph"
    parts += ", or in it as long as all its numbers stay as they are" if trial.may_be_constant else ""
    possible = parts if trial.why_apart else "the whole step"
    diagnosis.figures["outcome"] = "in parts" if trial.why_apart else "whole"
    report: Report | None = None
    title = "modules that are captured by themselves" if in_the_way else "constants of the host"
    with _unchecked_if_it_fails(diagnosis, title):
        report = trial.emulated()
    constants = () if report is None else report.constants
    diagnosis.figures["constants"] = [each._asdict() for each in constants]
    if not in_the_way:
        diagnosis.notes.append(f"graphed_step captures {possible}.")
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
    them = in_the_way[0] if len(in_the_way) == 1 else f"the {len(in_the_way)} findings of severity high"
    diagnosis.notes.append(f"graphed_step captures {captured}Without {them} it captures {possible}.")


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
    policy = trial.subject.options.get("policy")
    policy = Policy.parse(policy) if isinstance(policy, str) else policy
    device = "cuda" if can_save_for_backward("cuda") else "cpu"
    # A policy that changes the model has been applied to it, so the model without the policy no longer exists.
    policies = [policy] if policy is not None and changes_model(policy) else dict.fromkeys((None, policy))
    subject, (args, kwargs) = trial.subject, trial.kept[0]
    parts = subject.loss_fn, subject.model, subject.optimizer, kwargs or args
    peaks = {str(each): forecast(*parts, policy=each, device=device).peak for each in policies}
    diagnosis.figures["memory"] = {"device": device, "peak_bytes": peaks}
    under = {name: "without a policy" if name == "None" else f"under {name}" for name in peaks}
    texts = (f"{size_text(peak)} {under[name]}" for name, peak in peaks.items())
    diagnosis.notes.append(f"Memory of a step on {device}, forecast: {', '.join(texts)}.")
