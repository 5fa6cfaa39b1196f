"""Which faults a training step can have, how each is found in a few eager steps, and what to write instead."""

import copy
import functools
import itertools
import re
import sys
import warnings
from collections import Counter, UserDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from ..._batches.prefetch import prefetch
from ..._capture.inputs import Spec, path, read_batch
from ..._capture.preflight import Preflight
from ..._optimizer.step_kind import why_not_capturable
from ..._precision.op_recorder import ONE_NAME, OpRecorder
from ..._step.graphed_step import GraphedStep, graphed_step
from ..._text import dtype_name
from ..._torch.compile import without_compiled_code
from ..._torch.modes import TorchDispatchMode
from ..._torch.operators import call_from_binding
from ..._torch.tree import tree_flatten
from ..._user_line import UserLineFinder
from .host_values import Call, CallRecorder, differences

SEVERITIES = ("high", "medium", "low")
MOST_BATCHES = 32  # whose shapes are looked at
KEPT_BATCHES = 4  # to step on
LOW = (torch.float16, torch.bfloat16)
# Sums of many exponentials or squares, which autocast on CUDA has in float32 or cuDNN keeps so inside.
_WANTS_FLOAT32 = {"_softmax": "softmax", "_log_softmax": "log_softmax", "batch_norm": "batch_norm"}


@dataclass(frozen=True)
class Fault:
    """Something that keeps a step from being captured, makes it slow or imprecise.

    Attributes:
        severity: "high": the step cannot be captured. "medium": it can, but is slow or imprecise. "low": the rest.
        kind: in one or two words.
        line: `file:line: source` of the user's, "" where none is known.
        what: what happens there.
        advice: what to write instead.
        count: how often it happened.
        ms: how long the host waited for it, None where that is not known.
    """

    severity: str
    kind: str
    line: str
    what: str
    advice: str
    count: int = 1
    ms: float | None = None

    @property
    def rank(self) -> tuple[int, float, int]:
        """By which the worst come first."""
        return SEVERITIES.index(self.severity), -(self.ms or 0.0), -self.count


class Origins(TorchFunctionMode):
    """Context that notes which line of the user's makes which tensor, optimizer, scheduler and loader.

    May be entered again. Sync: none. Keeps nothing alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: Any = WeakIdKeyDictionary()
        self._entered = ExitStack()

    def of(self, *things: object) -> str:
        """Return `file:line: source` of the first of some objects whose line is known, "" if none is."""
        return next((self._lines[thing] for thing in things if thing in self._lines), "")

    def __enter__(self) -> "Origins":
        self._blame = UserLineFinder(sys._getframe(1), skip_torch=False)
        for kind in (torch.optim.Optimizer, LRScheduler, ReduceLROnPlateau, DataLoader):
            self._watch(kind)
        super().__enter__()  # type: ignore[no-untyped-call]  # not annotated in torch
        return self

    def __exit__(self, *error: Any) -> None:
        with self._entered:
            super().__exit__(*error)  # type: ignore[no-untyped-call]  # not annotated in torch

    def _watch(self, kind: Any) -> None:
        made = kind.__init__

        @functools.wraps(made)
        def __init__(thing: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - in its place
            self._note(thing)
            made(thing, *args, **kwargs)

        self._entered.callback(setattr, kind, "__init__", made)
        kind.__init__ = __init__

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for thing in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(thing, Tensor):
                self._note(thing)
        return result

    def _note(self, thing: object) -> None:
        place = self._blame()
        if place is not None and place.line:
            self._lines[thing] = place.line


@dataclass
class Subject:
    """A training loop to be looked at.

    Attributes:
        line: `file:line: source` of the function that made it, named where nothing closer is known.
        loss_fn: see `graphed_step`.
        model: see `graphed_step`.
        optimizer: see `graphed_step`.
        batches: iterable of batches; a tuple or list is the arguments behind the model, a dict the keyword arguments.
        options: further arguments of `graphed_step`.
        origins: where things were made.
        whole: a batch is one argument, whatever it is.
    """

    line: str
    loss_fn: Callable[..., Any]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterable[Any]
    options: dict[str, Any]
    origins: Origins
    whole: bool = False


@dataclass
class Trial:
    """A subject in training: eager steps on its first batches, in order and again.

    Args:
        subject: the training loop. It is trained.

    Raises:
        ValueError: what `graphed_step` raises, or there is no batch.
        InputMismatch: a batch that no graph can take.
    """

    subject: Subject
    step: GraphedStep = field(init=False)
    device: torch.device = field(init=False)
    specs: list[Spec] = field(init=False, default_factory=list)
    lines: list[str] = field(init=False, default_factory=list)  # per spec, where its batch was made
    kept: list[tuple[Any, Any]] = field(init=False, default_factory=list)
    records: dict[Any, list[list[Call]]] = field(init=False, default_factory=dict)  # of calls with one input each
    waits: set[str] = field(init=False, default_factory=set)  # lines that no graph can hold
    _seen: set[Any] = field(init=False, default_factory=set)
    _next: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        self.step = self._step(self.subject.options)
        self.device = next(self.subject.model.parameters()).device
        with self.subject.origins:
            for batch in itertools.islice(self.subject.batches, MOST_BATCHES):
                self._take(batch)
        if not self.kept:
            raise ValueError("there is no batch")
        self._next = itertools.cycle(range(len(self.kept)))

    def _step(self, options: dict[str, Any]) -> GraphedStep:
        subject = self.subject
        return graphed_step(subject.loss_fn, subject.model, subject.optimizer, **{**options, "graph": "off"})

    def _take(self, batch: Any) -> None:
        tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]
        line = self.subject.origins.of(*tensors)  # before it is copied: a copy is made here
        moved = next(iter(prefetch([batch], self.device)))
        args, kwargs = self._arguments(moved)
        buckets = self.subject.options.get("buckets")
        padded_args, padded = (args, kwargs) if buckets is None else buckets.pad_batch(args, kwargs)
        self.specs.append(read_batch(padded_args, padded, self.device)[0])
        self.lines.append(line)
        if len(self.kept) < KEPT_BATCHES:
            self.kept.append((args, kwargs))

    def _arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(batch, (dict, UserDict)) and not self.subject.whole:
            return (), dict(batch)
        several = isinstance(batch, (tuple, list)) and not self.subject.whole
        return tuple(batch) if several else (batch,), {}

    def without_schedule(self) -> "Trial":
        """Return the same without its scheduler, which may not have many steps left."""
        other = copy.copy(self)
        other.step = self._step({key: value for key, value in self.subject.options.items() if key != "scheduler"})
        return other

    def run(self, *, recorded: bool = False) -> None:
        """Do one optimizer step, and note what the user's lines call, if asked to."""
        for place in range(self.subject.options.get("accumulate", 1)):
            i = next(self._next)
            args, kwargs = self.kept[i]
            key = self.specs[i], place
            # What a first call makes and keeps (a mask, a table), later ones do not make.
            if recorded and key in self._seen:
                with CallRecorder() as recorder:
                    self.step(*args, **kwargs)
                self.records.setdefault(key, []).append(recorder.calls)
            else:
                self.step(*args, **kwargs)
            self._seen.add(key)

    @property
    def is_compared(self) -> bool:
        """Whether at least two calls with the same input were recorded."""
        return any(len(records) > 1 for records in self.records.values())


# ---------------------------------------------------------------------------------------------------- without a step


def optimizer_faults(trial: Trial) -> Iterator[Fault]:
    """Yield what is wrong with the optimizer: uncapturable or unfused."""
    optimizer = trial.subject.optimizer
    name, line = type(optimizer).__name__, trial.subject.origins.of(optimizer) or trial.subject.line
    if blocker := why_not_capturable(optimizer):
        what, _, advice = blocker.partition(". ")
        yield Fault("high", "optimizer", line, what, advice)
    elif not all(group.get("fused", True) for group in optimizer.param_groups):
        what = f"{name} without fused=True reads and writes the parameters several times in a step"
        yield Fault("medium", "optimizer", line, what, f"Write {name}(..., fused=True).")


def shape_faults(trial: Trial) -> Iterator[Fault]:
    """Yield a fault if not all batches are alike."""
    loader, origins = trial.subject.batches, trial.subject.origins
    advice = "Drop the short batch (DataLoader(..., drop_last=True)), or pad to a few sizes (buckets=ampkit.Buckets)."
    (usual, _), *others = Counter(trial.specs).most_common()
    if others:
        odd = next(i for i, spec in enumerate(trial.specs) if spec != usual)
        what = (
            f"{len(others) + 1} layouts in {len(trial.specs)} batches, each a warm-up and a graph of its own: "
            f"{_odd_leaf(usual, trial.specs[odd])}, in batch {odd}"
        )
        line = trial.lines[odd] or origins.of(loader) or trial.subject.line
        yield Fault("medium", "changing shapes", line, what, advice, sum(spec != usual for spec in trial.specs))
    elif (rest := _rest(loader)) and "buckets" not in trial.subject.options:
        what = f"the last batch has {rest} samples, the others more: a warm-up and a graph of its own"
        yield Fault("medium", "changing shapes", origins.of(loader) or trial.subject.line, what, advice)


def _odd_leaf(usual: Spec, odd: Spec) -> str:
    if usual.tree != odd.tree:
        return f"{odd.tree.num_leaves} leaves, not {usual.tree.num_leaves}, or another tree"
    i = next(i for i, (a, b) in enumerate(zip(usual.leaves, odd.leaves, strict=True)) if a != b)
    return f"{path(odd.tree, i)} is {odd.leaves[i]}, not {usual.leaves[i]}"


def _rest(loader: Any) -> int:
    """Return how many samples a loader's last batch has, if there are others and it is shorter than they; else 0."""
    if not isinstance(loader, DataLoader) or not loader.batch_size or loader.drop_last:
        return 0
    sampler: Any = loader.sampler
    samples = len(sampler) if hasattr(sampler, "__len__") else 0  # that of an IterableDataset has no length
    return samples % loader.batch_size if samples > loader.batch_size else 0


def pinning_faults(trial: Trial) -> Iterator[Fault]:
    """Yield a fault if a loader leaves its batches in pageable memory."""
    loader = trial.subject.batches
    if trial.device.type == "cuda" and isinstance(loader, DataLoader) and not loader.pin_memory:
        what = "batches come in pageable memory, which the host has to copy once more before the device can"
        line = trial.subject.origins.of(loader) or trial.subject.line
        yield Fault("low", "pageable copy", line, what, "Write DataLoader(..., pin_memory=True).")


# ----------------------------------------------------------------------------------------------------- in a step or two


def blocking_faults(trial: Trial) -> Iterator[Fault]:
    """Yield what a graph cannot hold: waits, copies, random numbers of the host."""
    generators = trial.subject.options.get("generators", ())
    with Preflight(trial.device, generators) as preflight:
        trial.run(recorded="torch._dynamo" not in sys.modules)  # or compiled code would be compiled anew for the record
    for found in preflight.findings:
        trial.waits.add(found.line)
        # An optimizer that reads its step count has a fault of its own, with the line to write instead.
        if found.line or "torch/optim/" not in found.what:
            ms = found.ms if trial.device.type == "cuda" and not found.graph_only else None
            yield Fault("high", _kind(found.what), found.line, found.what, found.advice, found.count, ms)


def _kind(what: str) -> str:
    if "draws" in what:
        return "host random numbers"
    return "pageable copy" if "pageable" in what else "blocking line"


def schedule_faults(trial: Trial) -> Iterator[Fault]:
    """Yield each hyperparameter that changes from step to step and that a graph would freeze.

    Not a learning rate: `graphed_step` feeds it to the graph through a tensor, float or not.
    """
    groups = trial.subject.optimizer.param_groups
    scheduler = trial.subject.options.get("scheduler")
    before = [_frozen(group) for group in groups]
    with without_compiled_code():
        for _ in range(2):
            trial.run(recorded=True)
    changed = {key: None for old, group in zip(before, groups, strict=True) for key in old if old[key] != group[key]}
    name = type(scheduler).__name__
    line = trial.subject.origins.of(scheduler) or trial.subject.line
    for key in changed:
        what = f"param_groups[...][{key!r}] changes between steps: a graph has it frozen, so each change is a capture"
        advice = "Keep it constant, or change it rarely. A learning rate may change: the step feeds it to the graph."
        if hasattr(scheduler, "cycle_momentum") or name == "OneCycleLR":
            advice = f"Write {name}(..., cycle_momentum=False)."
        yield Fault("medium", "schedule", line, what, advice)


def _frozen(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group that a graph would freeze."""
    fed = ("params", "lr", "initial_lr")
    return {key: value for key, value in group.items() if key not in fed and not isinstance(value, Tensor)}


def kernel_faults(trial: Trial) -> Iterator[Fault]:
    """Yield what runs in too low a precision or cannot be repeated bit by bit."""
    recorder, autocast = OpRecorder(trial.subject.model), _Autocast(trial.device)
    with recorder, autocast, _KernelWatch(recorder, autocast) as watch:
        trial.run(recorded=True)
    params = [param.dtype for param in trial.subject.model.parameters() if param.is_floating_point()]
    cast = "Keep the model in float32 and let a policy cast: policy='float16'." if set(params) & set(LOW) else ""
    for (line, what), modules in watch.imprecise.items():
        advice = cast or "Cast its input: .float(), or x.softmax(-1, dtype=torch.float32)."
        what = f"{what}{_within(modules)}"
        yield Fault("medium", "low precision", line or trial.subject.line, what, advice, modules.total())
    for (line, op), count in watch.unrepeatable.items():
        advice = "Use an operation that torch.use_deterministic_algorithms lists, or give up comparing bit by bit."
        what = f"{op} has no deterministic kernel: two equal steps differ in their last bits"
        yield Fault("low", "nondeterministic", line or trial.subject.line, what, advice, count)


def host_faults(trial: Trial) -> Iterator[Fault]:
    """Yield what differs between the steps so far, by operation or by number, where their inputs have one layout.

    Not on lines that wait: a number that was read from the device varies with it.
    """
    found: Counter[tuple[str, str]] = Counter()
    lines: dict[str, str] = {}
    for records in trial.records.values():
        for other in records[1:]:
            for line, what in differences(records[0], other):
                found[line, lines.setdefault(line, what)] += 1
    for (line, what), count in found.items():
        if line not in trial.waits:
            what = f"{what}, with inputs of one layout: a graph would repeat one of them"
            advice = (
                "Pass what varies in as a tensor of the batch, or keep it in a buffer that is changed in place. Draw "
                "random numbers on the device."
            )
            yield Fault("high", "host state", line, what, advice, count)


def _within(modules: Counter[str]) -> str:
    """Return in words which modules these are, "" for the model itself."""
    first, *others = modules
    more = f" and {len(others)} more modules" if others else ""
    return f" in {first or 'the model'}{more}" if first or others else ""


class _Autocast(TorchFunctionMode):
    """Context that knows whether autocast is on in the call that runs. Below autograd, torch says that it is off."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device.type
        self.on = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.on = torch.is_autocast_enabled(self._device)
        return func(*args, **(kwargs or {}))


class _KernelWatch(TorchDispatchMode):
    """Context in which one step runs, and which of its operations are imprecise or not repeatable is written down.

    What torch warns of, other than that, is not shown: an earlier step has shown it.
    """

    def __init__(self, recorder: OpRecorder, autocast: _Autocast) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated in torch
        self._recorder = recorder
        self._autocast = autocast
        self._left = ExitStack()
        self.imprecise: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)  # modules by line and what
        self.unrepeatable: Counter[tuple[str, str]] = Counter()  # by line and operation

    def __enter__(self) -> "_KernelWatch":
        self._blame = UserLineFinder(sys._getframe(1), skip_torch=False)
        with ExitStack() as entered:
            entered.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", _UNREPEATABLE)
            warnings.showwarning = self._on_warning  # catch_warnings puts it back
            entered.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
            torch.set_deterministic_debug_mode("warn")
            # So that a backward runs in this thread, and its nodes know where they were made (`UserLineFinder`).
            entered.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
            entered.enter_context(torch.autograd.set_multithreading_enabled(False))
            self._left = entered.pop_all()
        super().__enter__()  # type: ignore[no-untyped-call]  # not annotated in torch
        return self

    def __exit__(self, *error: Any) -> None:
        with self._left:
            super().__exit__(*error)  # type: ignore[no-untyped-call]  # not annotated in torch

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have dynamo do what it does without this mode."""
        return True

    def __torch_dispatch__(self, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain = hasattr(op, "overloadpacket") and all(kind is Tensor for kind in kinds)
        # A binding between, so that a warning comes while the operation runs, not at the end of the backward.
        result = call_from_binding(op, (), args, kwargs) if plain else op(*args, **kwargs)
        if plain:
            self._look(op.overloadpacket.__name__, (args, kwargs), result)
        return result

    def _look(self, name: str, inputs: Any, result: Any) -> None:
        op = _WANTS_FLOAT32.get(ONE_NAME.get(name, name))
        # Autocast has a softmax in float32 on CUDA, but not on the CPU.
        if op is None or (self._autocast.on and "softmax" in op):
            return
        first = result[0] if isinstance(result, (tuple, list)) else result
        leaves = [leaf for leaf in (*tree_flatten(inputs)[0], first) if isinstance(leaf, Tensor)]
        dtypes = {leaf.dtype for leaf in leaves if leaf.is_floating_point() and leaf.numel()}
        if dtypes and dtypes <= set(LOW):
            what = f"{op} computes in {dtype_name(first.dtype)}"
            self.imprecise[self._line(), what][self._recorder.module] += 1

    def _on_warning(self, message: Any, *where: Any, **more: Any) -> None:
        match = re.match(_UNREPEATABLE, str(message))
        if match:
            self.unrepeatable[self._line(), match[1]] += 1

    def _line(self) -> str:
        place = self._blame()
        return "" if place is None else place.line


# What torch warns of (ATen/Context.cpp, alertNotDeterministic). It warns of cuBLAS in other words, which a workspace in
# the environment settles.
_UNREPEATABLE = r"(\S+) does not have a deterministic implementation"

# In the order in which they run, by what a progress bar calls them.
CHECKS: dict[str, Callable[[Trial], Iterator[Fault]]] = {
    "optimizer": optimizer_faults,
    "shapes": shape_faults,
    "pinned memory": pinning_faults,
    "blocking lines": blocking_faults,
    "schedule": schedule_faults,
    "kernels": kernel_faults,
    "host state": host_faults,  # compares what the steps before it have recorded
}
