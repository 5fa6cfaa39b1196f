"""The faults that a training step can have, how a few eager steps show each, and what to write instead."""

import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from ..._capture.engine.fallback import IN_AUX
from ..._capture.engine.variation import DRAWS_ADVICE
from ..._capture.host.host_tensors import HostTensors
from ..._capture.host.uploads import Uploads
from ..._capture.keys.inputs import TensorSpec, path
from ..._capture.preflight.preflight import Finding
from ..._capture.preflight.watched_call import WatchedCall
from ..._precision.op_recorder import ONE_NAME, OpRecorder
from ..._text import dtype_name
from ..._torch.compile import without_compiled_code
from ..._torch.tensors.modes import WatchingMode
from ..._torch.tensors.operators import call_from_binding
from ..._torch.tensors.tree import tree_flatten
from ..._user_line import UserLineFinder
from .host_values import differences
from .trial import Trial

SEVERITIES = ("high", "medium", "low")
LOW = (torch.float16, torch.bfloat16)
# They sum many exponentials or squares. Autocast on CUDA runs them in float32, or cuDNN does so inside its kernel.
_WANTS_FLOAT32 = {"_softmax": "softmax", "_log_softmax": "log_softmax", "batch_norm": "batch_norm"}
# The kinds of uncapturable lines, by a word in what is said of them. The first that fits counts.
_KINDS = (("draws", "host random numbers"), ("pageable", "pageable copy"), ("", "blocking line"))
# The warning of torch (ATen/Context.cpp, alertNotDeterministic). That of cuBLAS has other words, and is no fault of the
# code: the environment variable CUBLAS_WORKSPACE_CONFIG makes cuBLAS deterministic.
_UNREPEATABLE = r"(\S+) does not have a deterministic implementation"
_EACH_VALUE = "A few kinds of step may have graphs of their own; pass a number that has many values in a tensor."
_AHEAD = (
    "question about the batch",
    "the host asks the device about the batch: each combination of answers takes a graph of its own, and a call waits "
    "for the step before it to ask",
    "Check batches before the loop or in the loader, or use torch.where instead of a branch.",
)
_AT_A_CUT = (
    "question to the device",
    "the host asks the device about more than the batch: the graph is cut there, and a call waits for the answer "
    "before it goes on",
    "Use torch.where instead of a branch.",
)
_NOT_FROZEN = ("params", "lr", "initial_lr")  # entries of a parameter group that a graph does not freeze


@dataclass(frozen=True)
class Fault:
    """Something that keeps a step from being captured, or makes it slow or imprecise.

    "high" means that the step cannot be captured, "medium" that it can, but is slow or imprecise. All else is "low".
    """

    severity: str
    kind: str  # a name of one or two words
    line: str  # the user's line as `file:line: source`, "" if it is not known
    what: str
    advice: str  # what to write instead
    count: int = 1
    ms: float | None = None  # how long the host waited there, None if that is not known
    caller: str = ""  # where `line` is one of an installed package, the line of the user's own that led to it

    @property
    def rank(self) -> tuple[int, float, int]:
        """Sort key that puts the worst faults first."""
        return SEVERITIES.index(self.severity), -(self.ms or 0.0), -self.count


def optimizer_faults(trial: Trial) -> Iterator[Fault]:
    """Yield a fault for each optimizer that cannot be captured, or is not fused."""
    for optimizer in trial.subject.optimizers:
        name, line = type(optimizer).__name__, trial.subject.origins.of(optimizer) or trial.subject.line
        if blocker := trial.uncapturable.get(optimizer):
            what, _, advice = blocker.partition(". ")
            unless = ", unless all its numbers stay as they are" if trial.may_be_constant else ""
            if trial.subject.by == "graphed":
                yield Fault("high", "optimizer", line, f"{what}: so the function is not captured whole", advice)
                continue
            what = f"{what}: it steps eagerly behind the graph of forward and backward{unless}"
            yield Fault("medium", "optimizer", line, what, advice)
        elif not all(group.get("fused", True) for group in optimizer.param_groups):
            what = f"{name} without fused=True reads and writes the parameters several times per step"
            yield Fault("medium", "optimizer", line, what, f"Write {name}(..., fused=True).")


def shape_faults(trial: Trial) -> Iterator[Fault]:
    """Yield a fault if batches differ in layout: each layout needs a graph of its own."""
    loader, origins = trial.subject.batches, trial.subject.origins
    advice = "Drop the short batch (DataLoader(..., drop_last=True)), or pad to a few sizes (buckets=ampkit.Buckets)."
    kind = "changing shapes"
    (usual, _), *others = Counter(trial.specs).most_common()
    if trial.chooses_sizes:
        return
    if others:
        odd, spec = next((i, spec) for i, spec in enumerate(trial.specs) if spec != usual)
        if usual.tree != spec.tree:
            differs = f"the structure differs: {spec.tree.num_leaves} leaves, usually {usual.tree.num_leaves}"
        else:
            i = next(i for i, (a, b) in enumerate(zip(usual.leaves, spec.leaves, strict=True)) if a != b)
            differs = f"{path(spec.tree, i)} is {spec.leaves[i]}, not {usual.leaves[i]}"
            pairs = zip(usual.leaves, spec.leaves, strict=True)
            if not any(isinstance(each, TensorSpec) for pair in pairs if pair[0] != pair[1] for each in pair):
                kind, advice = "constants of the batch", _EACH_VALUE
        what = (
            f"{len(trial.specs)} batches have {len(others) + 1} layouts, and each needs a warm-up and a graph of its "
            f"own: in batch {odd}, {differs}"
        )
        line = trial.lines[odd] or origins.of(loader) or trial.subject.line
        severity = "low" if advice is _EACH_VALUE else "medium"
        yield Fault(severity, kind, line, what, advice, sum(spec != usual for spec in trial.specs))
    elif (size := _short_batch_size(loader)) and "buckets" not in trial.subject.options:
        what = f"the last batch has {size} samples, fewer than the others: it needs a warm-up and a graph of its own"
        yield Fault("medium", "changing shapes", origins.of(loader) or trial.subject.line, what, advice)


def _short_batch_size(loader: Any) -> int:
    """Return how many samples the last batch has if it is shorter than the batches before it, 0 if it is not."""
    if not isinstance(loader, DataLoader) or not loader.batch_size or loader.drop_last:
        return 0
    sampler: Any = loader.sampler
    samples = len(sampler) if hasattr(sampler, "__len__") else 0  # the sampler of an IterableDataset has no length
    return samples % loader.batch_size if samples > loader.batch_size else 0


def pinning_faults(trial: Trial) -> Iterator[Fault]:
    """Yield a fault if the loader leaves its batches in pageable memory."""
    loader = trial.subject.batches
    if trial.device.type == "cuda" and isinstance(loader, DataLoader) and not loader.pin_memory:
        what = (
            "batches are in pageable memory, so the host copies them to pinned memory before the device can read them"
        )
        line = trial.subject.origins.of(loader) or trial.subject.line
        yield Fault("low", "pageable copy", line, what, "Write DataLoader(..., pin_memory=True).")


def blocking_faults(trial: Trial) -> Iterator[Fault]:
    """Yield what a graph cannot contain: waits for the device, copies, random numbers drawn on the host."""
    findings, in_optimizer = _preflight(trial)
    trial.may_be_constant = trial.may_be_constant and not in_optimizer
    is_clean = len(findings) == len(in_optimizer)
    has_clean_branch = False
    if not is_clean and trial.subject.options.get("capturing", "auto") == "auto":  # the same look as graphed_step's
        told, in_optimizer_told = _preflight(trial.with_options(capturing=True))
        has_clean_branch = len(told) == len(in_optimizer_told)
    for found in findings:
        trial.uncapturable_lines.add(found.line)
        # `optimizer_faults` reports an optimizer that reads its step count, with the line to write instead.
        if not found.line and "torch/optim/" in found.what:
            continue
        ms = found.ms if trial.device.type == "cuda" and not found.graph_only else None
        kind = next(kind for word, kind in _KINDS if word in found.what)
        severity, what, advice = "high", found.what, found.advice
        if trial.subject.by == "graphed":  # which has no aux
            advice = IN_AUX.sub(r"\1", advice)
        if found in in_optimizer:
            severity, what = "medium", f"{what}, in the optimizer's step, which is eager"
        elif has_clean_branch:
            left = "on a branch that graphed_step leaves: told that it is being captured, the code takes another one"
            severity, what = "low", f"{what}, {left}"
            advice = "Pass capturing=True to train on the other branch from the first step on."
        yield Fault(severity, kind, found.line, what, advice, found.count, ms, found.caller)
    if trial.decisions:
        what = (
            f"the host decides by {trial.decisions} comparison(s) of random draws in a step: each outcome takes a "
            "graph of its own, and steps cannot be compared with each other to find what else varies"
        )
        yield Fault("low", "host random numbers", "", what, DRAWS_ADVICE)
    for wait, count in trial.waits.items():
        kind, what, advice = _AT_A_CUT if wait.cuts else _AHEAD
        yield Fault("low", kind, wait.line, what, wait.remedy or advice, count)


def _preflight(trial: Trial) -> tuple[list[Finding], list[Finding]]:
    """Return what a step does that a graph cannot contain, and what of it an optimizer does that is not captured."""
    bounds: list[int] = []
    with ExitStack() as stack:
        generators = trial.subject.options.get("generators", ())
        leaves, uploads = tree_flatten(trial.kept)[0], Uploads(trial.device, HostTensors())
        state = dict(trial.subject.model.named_buffers())
        watched = WatchedCall(trial.device, leaves, state, uploads, generators)
        preflight = stack.enter_context(watched.preflight)
        stack.enter_context(watched.recording())
        for optimizer in trial.uncapturable:
            for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
                stack.callback(register(lambda *_: bounds.append(len(preflight.findings))).remove)
        trial.run(recorded="torch._dynamo" not in sys.modules)  # recording recompiles compiled code
    path = None if watched.draws is None else watched.draws.path
    trial.decisions = 0 if path is None else len(path.outcomes)
    asked = watched.questions.asked()
    trial.waits = Counter(() if asked is None else asked.waits)
    steps = zip(bounds[::2], bounds[1::2], strict=True)
    return preflight.findings, [found for step in steps for found in preflight.findings[slice(*step)]]


def schedule_faults(trial: Trial) -> Iterator[Fault]:
    """Yield each hyperparameter that changes from step to step and that a graph would freeze.

    Learning rates are left out: `graphed_step` gives them to the graph in a tensor.
    """
    groups = [group for optimizer in trial.subject.optimizers for group in optimizer.param_groups]
    scheduler = trial.subject.options.get("scheduler")
    before = [
        {key: value for key, value in group.items() if key not in _NOT_FROZEN and not isinstance(value, Tensor)}
        for group in groups
    ]
    with without_compiled_code():
        for _ in range(2):
            trial.run(recorded=True)
    changed = {key: None for old, group in zip(before, groups, strict=True) for key in old if old[key] != group[key]}
    name = type(scheduler).__name__
    line = trial.subject.origins.of(scheduler) or trial.subject.line
    for key in changed:
        what = f"param_groups[...][{key!r}] changes between steps: a graph freezes it, so each new value is captured"
        advice = "Keep it constant, or change it rarely. Only the learning rate may change in every step."
        if hasattr(scheduler, "cycle_momentum") or name == "OneCycleLR":
            advice = f"Write {name}(..., cycle_momentum=False)."
        yield Fault("medium", "schedule", line, what, advice)


def kernel_faults(trial: Trial) -> Iterator[Fault]:
    """Yield the operations that run in too low a precision, or whose result differs from run to run."""
    recorder, autocast = OpRecorder(trial.subject.model), _Autocast(trial.device)
    with recorder, autocast, _KernelWatch(recorder, autocast) as watch:
        trial.run(recorded=True)
    params = [param.dtype for param in trial.subject.model.parameters() if param.is_floating_point()]
    cast = "Keep the model in float32 and let a policy cast: policy='float16'." if set(params) & set(LOW) else ""
    for (line, what), modules in watch.imprecise.items():
        advice = cast or "Cast its input: .float(), or x.softmax(-1, dtype=torch.float32)."
        first, *more = modules
        if first or more:  # otherwise it is the model itself alone
            what += f" in {first or 'the model'}{f' and {len(more)} more modules' if more else ''}"
        yield Fault("medium", "low precision", line or trial.subject.line, what, advice, modules.total())
    for (line, op), count in watch.unrepeatable.items():
        advice = "Use an operation that torch.use_deterministic_algorithms lists, or do not compare bit by bit."
        what = f"{op} has no deterministic kernel: two equal steps differ in their last bits"
        yield Fault("low", "nondeterministic", line or trial.subject.line, what, advice, count)


def host_faults(trial: Trial) -> Iterator[Fault]:
    """Yield the calls and numbers that differ between recorded steps whose batches have the same layout.

    Lines that cannot be captured are left out: a number that they read from the device may differ rightly. Steps in
    which the host decides by random draws, or by what is in the batch, differ rightly, too, and are not compared.
    """
    found: Counter[tuple[str, str]] = Counter()
    lines: dict[str, str] = {}
    if trial.decisions or trial.waits:
        return
    for records in trial.records.values():
        for other in records[1:]:
            for line, what in differences(records[0], other):
                found[line, lines.setdefault(line, what)] += 1
    for (line, what), count in found.items():
        if line not in trial.uncapturable_lines:
            what = f"{what}, for batches of the same layout: a graph would repeat what it captured"
            advice = (
                "Pass the varying value as a tensor of the batch, or keep it in a buffer that is changed in place. "
                "Draw random numbers on the device."
            )
            yield Fault("high", "host state", line, what, advice, count)


class _Autocast(TorchFunctionMode):
    """Context that knows whether autocast is on in the current call. Below autograd, torch says it is off."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device.type
        self.on = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.on = torch.is_autocast_enabled(self._device)
        return func(*args, **(kwargs or {}))


class _KernelWatch(WatchingMode):
    """Context that notes which operations of a step are imprecise, or differ from run to run. Hides other warnings."""

    def __init__(self, recorder: OpRecorder, autocast: _Autocast) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated in torch
        self._recorder = recorder
        self._autocast = autocast
        self._to_undo = ExitStack()
        self.imprecise: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)  # modules, by line and description
        self.unrepeatable: Counter[tuple[str, str]] = Counter()  # by line and operation

    def __enter__(self) -> "_KernelWatch":
        self._user_lines = UserLineFinder(sys._getframe(1), skip_torch=False)
        with ExitStack() as entered:
            entered.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", _UNREPEATABLE)
            warnings.showwarning = self._on_warning  # catch_warnings puts it back
            entered.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
            torch.set_deterministic_debug_mode("warn")
            # `UserLineFinder` needs a backward that runs in this thread and knows which forward made it.
            entered.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
            entered.enter_context(torch.autograd.set_multithreading_enabled(False))
            self._to_undo = entered.pop_all()
        super().__enter__()  # type: ignore[no-untyped-call]  # not annotated in torch
        return self

    def __exit__(self, *error: Any) -> None:
        with self._to_undo:
            super().__exit__(*error)  # type: ignore[no-untyped-call]  # not annotated in torch

    def __torch_dispatch__(self, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain = hasattr(op, "overloadpacket") and all(kind is Tensor for kind in kinds)
        # Called through a binding, so that torch warns while the operation runs, not at the end of the backward.
        result = call_from_binding(op, (), args, kwargs) if plain else op(*args, **kwargs)
        name = op.overloadpacket.__name__ if plain else ""
        wants = _WANTS_FLOAT32.get(ONE_NAME.get(name, name))
        # Autocast casts softmax to float32 on CUDA, though not on the CPU, where this step may run.
        if wants is None or (self._autocast.on and "softmax" in wants):
            return result
        first = result[0] if isinstance(result, (tuple, list)) else result
        leaves = [leaf for leaf in (*tree_flatten((args, kwargs))[0], first) if isinstance(leaf, Tensor)]
        dtypes = {leaf.dtype for leaf in leaves if leaf.is_floating_point() and leaf.numel()}
        if dtypes and dtypes <= set(LOW):
            what = f"{wants} computes in {dtype_name(first.dtype)}"
            self.imprecise[self._user_lines.line(), what][self._recorder.module] += 1
        return result

    def _on_warning(self, message: Any, *where: Any, **more: Any) -> None:
        if match := re.match(_UNREPEATABLE, str(message)):
            self.unrepeatable[self._user_lines.line(), match[1]] += 1


# All checks in the order in which they run, by their names in the progress bar.
CHECKS: dict[str, Callable[[Trial], Iterator[Fault]]] = {
    "optimizer": optimizer_faults,
    "shapes": shape_faults,
    "pinned memory": pinning_faults,
    "blocking lines": blocking_faults,
    "schedule": schedule_faults,
    "kernels": kernel_faults,
    "host state": host_faults,  # compares the steps that the checks before it have recorded
}
