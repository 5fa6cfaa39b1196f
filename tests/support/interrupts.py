"""A KeyboardInterrupt at every line of ampkit that a call executes, and what the step is worth behind it.

`python tests/support/interrupts.py --all` tries every line; the suite tries every so many.
"""

import argparse
import copy
import functools
import gc
import os
import sys
import threading
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from conftest import global_state
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit
from ampkit._callables import passes as _passes
from ampkit._capture.graph import capture_query as _capturing
from ampkit._capture.graph import pool as _segments
from ampkit._capture.graph import turns as _turns
from ampkit._capture.preflight.preflight import getters, setters
from ampkit._torch import optimizers as torch_optimizers
from ampkit._torch.autograd.autograd import ENGINE_ENTRIES
from ampkit._torch.device import execution_trace as torch_execution_trace
from ampkit._torch.device.execution_trace import execution_trace
from ampkit._torch.tensors.operators import HOST_COPIES, LIST_READS, PRINT_ENTRY

PACKAGE = str(Path(ampkit.__file__).parent) + os.sep
_REPLAYS_WITHIN = 10  # calls behind an interrupt: warm-up, preflight and rehearsal again at most

# Moments that no interrupt can have in CPython, though a tracer can: the file, the line, and why.
_LOCK = "leaving a lock in a `with` is one step of C (bpo-29988)"
_CONTEXT_IN_C = "leaving torch's context is one step of C"
IMPOSSIBLE = {
    ("_capture/graph/turns.py", "with self._turns.lock:"): _LOCK,
    ("_capture/graph/pool.py", "with self._lock:"): _LOCK,
    ("_capture/graph/capture_query.py", "with _lock:"): _LOCK,
    ("_callables/shared_memory.py", "with _lock:"): _LOCK,
    ("_callables/graphed_callable.py", "with self._shared.call():"): _LOCK,
    ("_capture/state/watch.py", "with without_torch_function():"): _CONTEXT_IN_C,
    ("_capture/preflight/undeclared.py", "with without_torch_function():"): _CONTEXT_IN_C,
    ("_torch/device/execution_trace.py", "with without_torch_function():"): _CONTEXT_IN_C,
}


class Line(NamedTuple):
    """A line of ampkit."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.file.removeprefix(PACKAGE)}:{self.number}: {self.source}"

    @property
    def source(self) -> str:
        return _lines_of(self.file)[self.number - 1].strip()


@functools.cache
def _lines_of(file: str) -> list[str]:
    return Path(file).read_text().splitlines()


@contextmanager
def on_lines(visit: Callable[[Line], None]) -> Iterator[None]:
    """Call `visit` before each line of ampkit that this thread executes. What it raises is raised there."""

    def trace(frame: types.FrameType, event: str, _: object) -> Any:
        if event == "call":
            return trace if frame.f_code.co_filename.startswith(PACKAGE) else None
        if event == "line":
            visit(Line(frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class Moment(NamedTuple):
    """When a line is reached for so manieth a time."""

    line: Line
    time: int

    def __str__(self) -> str:
        return f"{self.line} (time {self.time})"

    @property
    def is_possible(self) -> bool:
        if self.line.source.startswith(
            "try:"
        ):  # nothing at which CPython looks for a signal, and no handler of 3.11 covers it
            return False
        return self.time == 1 or (self.line.file.removeprefix(PACKAGE), self.line.source) not in IMPOSSIBLE


def moments_of(call: Callable[[], object]) -> list[Moment]:
    """Return when a call reaches lines of ampkit: each for the first time and for the last, in order."""
    times: Counter[Line] = Counter()
    with on_lines(lambda line: times.update([line])):
        call()
    found = [Moment(line, time) for line, most in times.items() for time in sorted({1, most})]
    return [moment for moment in found if moment.is_possible]


def interrupted_at(moment: Moment, call: Callable[[], object]) -> KeyboardInterrupt | None:
    """Call, with an interrupt at one moment; return the exception that came out.

    Its traceback keeps every frame alive, as a notebook does with the last exception: no generator is closed early.
    """
    left = [moment.time]

    def visit(reached: Line) -> None:
        if left and reached == moment.line:
            left[0] -= 1
            if not left[0]:
                left.clear()
                raise KeyboardInterrupt

    try:
        with on_lines(visit):
            call()
    except KeyboardInterrupt as error:
        return error
    if not left:
        raise AssertionError("the interrupt was swallowed")
    return None


# ------------------------------------------------------------------------------------------------------- set-ups


class Net(nn.Module):
    """Weights that autocast only casts, which get working copies, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.first(x))))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) * weight


def batch(overflow: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same batch each time; one whose gradients are not finite if asked."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)
    return x, y, torch.tensor(torch.inf if overflow else 1.0)


class Job:
    """Something that trains by calls, and all state of it."""

    window = 1  # calls per optimizer step
    keeps_calls = False  # whether the frames of an interrupted call keep something that the next calls wait for

    def __init__(self, graph: str) -> None:
        self.graph = graph
        torch.manual_seed(0)
        self.model = Net()
        self.scaler: Any = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.holders: list[Any] = [self.model]  # of state that has state_dict, beside optimizers and scaler
        self.counted: Any = None  # has `replays`
        self.made()
        self.parameters = dict(self.model.named_parameters())
        self.rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]

    def made(self) -> None:
        raise NotImplementedError

    def call(self, overflow: bool = False) -> Any:
        raise NotImplementedError

    def end_window(self) -> None:
        """Begin a new window of micro-batches, where there are windows."""

    def replace_state(self) -> None:
        """Replace memory that graphs read, so that the next call drops them."""
        for optimizer in self.optimizers:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def twin(self) -> "Job":
        """Return an eager job in the same state."""
        other = type(self)("off")
        for mine, others in zip(self.holders, other.holders, strict=True):
            others.load_state_dict(copy.deepcopy(mine.state_dict()))
        for mine, others in zip(self.optimizers, other.optimizers, strict=True):
            others.load_state_dict(copy.deepcopy(mine.state_dict()))
        if self.scaler is not None and self.scaler.is_enabled():
            other.scaler.load_state_dict(self.scaler.state_dict())
        return other

    def values(self) -> dict[str, Tensor]:
        """Return copies of all tensors."""
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for i, optimizer in enumerate(self.optimizers):
            for j, state in enumerate(optimizer.state.values()):
                found |= {f"optimizer {i}.{j}.{k}": v for k, v in state.items() if isinstance(v, Tensor)}
        if self.scaler is not None and self.scaler.is_enabled():
            found |= {f"scaler.{name}": tensor for name, tensor in self.scaler.tensors().items()}
        return {name: tensor.detach().clone() for name, tensor in found.items()}


class Float16(Job):
    """float16 with loss scale and clipping."""

    def made(self) -> None:
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)]
        self.scaler = ampkit.GradScaler("cpu", init_scale=256.0)
        self.step = self.counted = ampkit.graphed_step(
            loss_fn, self.model, self.optimizers[0], policy="float16", scaler=self.scaler, max_norm=1.0,
            accumulate=self.window, graph=self.graph,
        )  # fmt: skip

    def call(self, overflow: bool = False) -> Any:
        return self.step(*batch(overflow)).loss

    def end_window(self) -> None:
        self.step.flush()


class Accumulating(Float16):
    """The same over two micro-batches."""

    window = 2


class BFloat16(Job):
    """bfloat16 with working weights, momentum, a schedule, an average of the weights, and a replay that is verified."""

    def made(self) -> None:
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, fused=True)]
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.99)
        average = torch.optim.swa_utils.AveragedModel(self.model)
        self.holders += [schedule, average]
        self.step = self.counted = ampkit.graphed_step(
            loss_fn, self.model, self.optimizers[0], policy="bfloat16", max_norm=1.0, scheduler=schedule,
            after_step=average.update_parameters, graph=self.graph, verify=int(self.graph != "off"),
        )  # fmt: skip
        self.scaler = self.step.scaler

    def call(self, overflow: bool = False) -> Any:
        return self.step(*batch(overflow)).loss


class Launches(NamedTuple):
    """Counts the launches of a step's scans or windows."""

    step: ampkit.GraphedStep

    @property
    def replays(self) -> int:
        return self.step.report().launches


class Scanning(Job):
    """Three steps per call, with a schedule that is stepped ahead of them."""

    def made(self) -> None:
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)]
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.99)
        self.holders.append(schedule)
        self.step = ampkit.graphed_step(
            loss_fn, self.model, self.optimizers[0], policy="float16", max_norm=1.0, scheduler=schedule,
            scaler=ampkit.GradScaler("cpu", init_scale=256.0), graph=self.graph,
        )  # fmt: skip
        self.scaler, self.counted = self.step.scaler, Launches(self.step)

    def call(self, overflow: bool = False) -> Any:
        return self.step.scan(*(torch.stack([part] * 3) for part in batch(overflow))).loss


class Windowing(Scanning):
    """Both micro-batches of an optimizer step per call."""

    def made(self) -> None:
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)]
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.99)
        self.holders.append(schedule)
        self.step = ampkit.graphed_step(
            loss_fn, self.model, self.optimizers[0], policy="float16", max_norm=1.0, scheduler=schedule, accumulate=2,
            scaler=ampkit.GradScaler("cpu", init_scale=256.0), graph=self.graph,
        )  # fmt: skip
        self.scaler, self.counted = self.step.scaler, Launches(self.step)

    def call(self, overflow: bool = False) -> Any:
        return self.step.window(*(torch.stack([part] * 2) for part in batch(overflow))).loss


class TwoOptimizers(Job):
    """A function that steps two optimizers under one scaler."""

    def made(self) -> None:
        first = [*self.model.first.parameters(), *self.model.norm.parameters()]
        self.optimizers = [
            torch.optim.SGD(first, lr=0.05, momentum=0.9, fused=True),
            torch.optim.AdamW(self.model.head.parameters(), lr=1e-2, fused=True),
        ]
        self.scaler = scaler = ampkit.GradScaler("cpu", init_scale=256.0)
        optimizers, model = self.optimizers, self.model

        @ampkit.graphed(modules=(model,), optimizers=tuple(optimizers), scaler=scaler, graph=self.graph)
        def train(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_fn(model, x, y, weight)
            model.zero_grad()
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer, max_norm=1.0)
            scaler.update()
            return loss

        self.train = self.counted = train

    def call(self, overflow: bool = False) -> Any:
        return self.train(*batch(overflow))


class Callables(Job):
    """A model whose forward and backward are graphs, in a loop of the user's own with a loss scale."""

    keeps_calls = True  # an autograd graph, which may still be backpropagated

    def made(self) -> None:
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)]  # a step that can be undone
        self.scaler = ampkit.GradScaler("cpu", init_scale=256.0)
        self.counted = None

    def call(self, overflow: bool = False) -> Any:
        if self.counted is None:
            ampkit.make_graphed_callables(self.model, (batch()[0],), graph=self.graph)
            self.counted = self.model.forward
        self.optimizers[0].zero_grad()
        loss = loss_fn(self.model, *batch(overflow))
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizers[0], max_norm=1.0)
        self.scaler.update()
        return loss.detach()


@contextmanager
def few_objects() -> Iterator[None]:
    """Context in which the search for undeclared modules does not look at all objects that were there before."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Phase(NamedTuple):
    """Which call is interrupted."""

    name: str
    before: int  # calls
    overflow: bool = False
    replaced: bool = False  # memory of the state, right before


WARM_UP = Phase("warm-up", 1)
PREFLIGHT = Phase("preflight", 0)
REHEARSAL = Phase("rehearsal", 2)
CAPTURE = Phase("capture", 3)
REPLAY = Phase("replay", 4)
SKIPPED = Phase("skipped step", 1, overflow=True)
SKIPPED_REPLAY = Phase("skipped replay", 4, overflow=True)
STALE = Phase("dropped graphs", 5, replaced=True)
ALL = (WARM_UP, PREFLIGHT, REHEARSAL, CAPTURE, REPLAY, SKIPPED, SKIPPED_REPLAY, STALE)
WINDOWS = tuple(Phase(f"{name} of micro-batch {i}", before) for name, before, i in (
    ("warm-up", 2, 1), ("warm-up", 3, 2), ("preflight", 0, 1), ("capture", 6, 1), ("capture", 7, 2), ("replay", 9, 2)
))  # fmt: skip
CASES: dict[type[Job], tuple[Phase, ...]] = {
    Float16: ALL,
    BFloat16: (WARM_UP, PREFLIGHT, REHEARSAL, CAPTURE, REPLAY, STALE),
    Accumulating: WINDOWS,
    Scanning: tuple(
        Phase(name, i) for i, name in enumerate(("warm-up", "capture of a step", "capture of a series", "launch"))
    ),
    Windowing: tuple(
        Phase(name, before)
        for name, before in (("warm-up", 1), ("capture of the calls", 3), ("capture of the window", 4), ("launch", 5))
    ),
    TwoOptimizers: ALL,
    Callables: (Phase("capture", 0), Phase("replay", 1), Phase("skipped step", 1, overflow=True)),
}


# --------------------------------------------------------------------------------------------------------- state


def process_state() -> dict[str, Any]:
    """Return what of the process, and of this thread, a call could leave changed."""
    owners = [*ENGINE_ENTRIES, *HOST_COPIES, *(entry[:2] for entry in LIST_READS)]
    owners += [PRINT_ENTRY, *getters(), *((owner, name) for _, owner, name in setters())]
    owners += [(torch.overrides, "has_torch_function"), (torch.cuda.graphs, "_cuda_isCurrentStreamCapturing")]
    owners += [(warnings, "showwarning"), (sys.modules.get("torch._dynamo.eval_frame"), "_maybe_set_eval_frame")]
    torch.autocast_increment_nesting()
    return {
        **global_state(),
        "autocast nesting": torch.autocast_decrement_nesting(),
        "inference mode": torch.is_inference_mode_enabled(),
        "function modes": torch.overrides._get_current_function_mode_stack(),
        "dispatch modes": torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        "within a dispatch mode": torch.utils._python_dispatch.is_in_torch_dispatch_mode(),
        "anomaly mode": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "autograd threads": torch.autograd.is_multithreading_enabled(),
        "warning filters": list(warnings.filters),
        "functions": {f"{owner}.{name}": getattr(owner, name, None) for owner, name in owners},
        "optimizer hooks": [len(table) for table in torch_optimizers.HOOKS_OF_ALL],
        "collection": gc.isenabled(),
        "recording": (_capturing.captures.recorded, set(_passes.Passes.recording)),
        "made for captures": (set(_segments.no_collection._users), set(_segments.no_recompile._users)),
        "capture": (_turns._here.captures, _capturing.captures.answer, dict(_capturing._answers)),
        "a trace can be written": trace_works(),
        "torch functions": torch._C._is_torch_function_enabled(),
        "logging": torch_execution_trace._log_level().value if torch_execution_trace._log_level() is not None else None,
        "locks": turn_is_free(),
        "threads": threading.active_count(),
        "random numbers": torch.get_rng_state().tolist(),
    }


def trace_works() -> bool:
    with execution_trace() as trace:
        return trace.begun


def turn_is_free() -> bool:
    """Return whether another thread could make a call now."""
    return not _turns.turns_on(torch.device("cpu")).lock._is_owned()


def differences(before: dict[str, Any], after: dict[str, Any]) -> str:
    return ", ".join(f"{name} was {was}, is {after[name]}" for name, was in before.items() if was != after[name])


def problem_behind(job: Job, before: dict[str, Any]) -> str:
    """Return what is wrong with a job that was interrupted, "" if nothing."""
    if left := differences(before, process_state()):
        return f"left on: {left[:500]}"
    start = job.values()
    in_a_row = 0
    for _ in range(_REPLAYS_WITHIN * job.window):
        count = 0 if job.counted is None else job.counted.replays
        job.call()
        in_a_row = in_a_row + 1 if job.counted.replays > count else 0
        if in_a_row == 2 * job.window:
            break
    else:
        return f"no replays in {_REPLAYS_WITHIN * job.window} calls"
    job.end_window()
    if problem := why_not_training(job, start):
        return problem
    if left := differences(before, process_state()):
        return f"left on after more calls: {left[:500]}"
    twin, count = job.twin(), job.counted.replays
    for _ in range(job.window):
        mine, others = job.call(), twin.call()
        if not torch.equal(mine, others):
            return f"loss {mine} of a replay, {others} of an eager step"
    if job.counted.replays != count + job.window:
        return "calls are not replays any more"
    mine, others = job.values(), twin.values()
    wrong = [name for name in others if not torch.equal(mine[name], others[name])]
    return f"{wrong} differ from an eager step" if wrong else ""


def why_not_training(job: Job, start: dict[str, Tensor]) -> str:
    now, names = job.values(), dict(job.model.named_parameters())
    if any(names[name] is not param for name, param in job.parameters.items()):
        return "the model has other parameters"
    if any(param.dtype is not torch.float32 for param in names.values()):
        return "the model has parameters in low precision"
    if same := [name for name in names if torch.equal(start[f"model.{name}"], now[f"model.{name}"])]:
        return f"{same} do not change"
    if not all(tensor.isfinite().all() for tensor in now.values()):
        return "not finite"
    for optimizer, rates in zip(job.optimizers, job.rates, strict=True):
        found = [group["lr"] for group in optimizer.param_groups]
        if any(type(a) is not type(b) for a, b in zip(found, rates, strict=True)):
            return f"learning rates {found}"
        if left := {"grad_scale", "found_inf"} & vars(optimizer).keys():
            return f"the optimizer has {left}"
    if job.scaler.is_enabled() and job.scaler._per_optimizer_states:
        return "the scaler waits for update()"
    return ""


@dataclass
class Broken:
    """A step that an interrupt broke."""

    kind: str
    phase: str
    moment: Moment
    problem: str

    def __str__(self) -> str:
        return f"{self.kind}, {self.phase}, {self.moment} -> {self.problem}"


counts: Counter[str] = Counter()


def begun(kind: type[Job], phase: Phase) -> tuple[Job, Callable[[], object]]:
    """Return a job and the call to interrupt."""
    job = kind("emulate")
    for _ in range(phase.before):
        job.call()
    if phase.replaced:
        job.replace_state()
    return job, lambda: job.call(phase.overflow)


def moments(kind: type[Job], phase: Phase) -> list[Moment]:
    """Return when to interrupt."""
    _, call = begun(kind, phase)
    return moments_of(call)


def trial(kind: type[Job], phase: Phase, moment: Moment) -> Broken | None:
    """Interrupt at one moment; return what broke, None if nothing."""
    job, call = begun(kind, phase)
    before = process_state()
    try:
        error = interrupted_at(moment, call)
        counts["interrupts"] += error is not None
        counts["lines that were not reached again"] += error is None
        if job.keeps_calls:
            error = None
        problem = problem_behind(job, before)
        del error  # and with it every frame, generators in the middle of a context included
        if not problem and (left := differences(before, process_state())):
            problem = f"left on when the frames were gone: {left[:500]}"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if not problem:
        return None
    counts["broken steps"] += 1
    return Broken(kind.__name__, phase.name, moment, problem)


def summary() -> Iterator[str]:
    """Yield what was interrupted."""
    if counts:
        yield (
            f"interrupts: {counts['interrupts']} lines in {counts['calls']} calls, {counts['broken steps']} broken "
            f"steps, {counts['lines that were not reached again']} lines not reached again"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every line, rather than every 40th")
    parser.add_argument("--case", choices=[kind.__name__ for kind in CASES])
    parser.add_argument("--phase")
    parser.add_argument("--stride", type=int, default=40)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--line", help="file:number")
    options = parser.parse_args(argv)
    with few_objects():
        run(options)
    print(*summary(), sep="\n")


def run(options: argparse.Namespace) -> None:
    for kind, phases in CASES.items():
        for phase in phases:
            if options.case in (None, kind.__name__) and options.phase in (None, phase.name):
                counts["calls"] += 1
                found = moments(kind, phase)
                if options.line:
                    found = [moment for moment in found if options.line in str(moment)]
                print(f"{kind.__name__}, {phase.name}: {len(found)} moments", flush=True)
                for moment in found[options.offset :: 1 if options.all or options.line else options.stride]:
                    if broken := trial(kind, phase, moment):
                        print(broken, flush=True)


if __name__ == "__main__":
    main()
