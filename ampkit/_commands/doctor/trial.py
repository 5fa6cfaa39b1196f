"""A training loop that can be trained again and again, its first batches, and the lines that made its objects."""

import copy
import functools
import itertools
import sys
import warnings
from collections import Counter, UserDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from ..._batches.buckets import is_auto
from ..._batches.prefetch import prefetch
from ..._capture.graph.report import Report
from ..._capture.keys.inputs import Spec, read_batch
from ..._capture.preflight.questions import Wait
from ..._errors import CaptureWarning
from ..._optimizer.step_kind import may_be_constant, why_not_capturable
from ..._step.arguments import read_buckets
from ..._step.graphed import GraphedFunction, graphed
from ..._step.graphed_step import graphed_step
from ..._step.step_calls import GraphedStep
from ..._torch.tensors.tree import tree_flatten
from ..._user_line import UserLineFinder
from .host_values import HostCallRecorder, TorchCall

MOST_BATCHES = 32  # the first batches are read to compare their shapes
_SPLIT_CALLS = 9  # optimizer steps: two of warm-up, three that are looked at, one that captures, three that are timed
KEPT_BATCHES = 4  # the first few of them are kept and trained on


class Origins(TorchFunctionMode):
    """Context that notes the user's line that makes each tensor, optimizer, scheduler and data loader.

    It can be entered several times. Sync: none. It keeps none of these objects alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: Any = WeakIdKeyDictionary()
        self._entered = ExitStack()

    def of(self, *things: object) -> str:
        """Return `file:line: source` of the first of these objects whose line is known, "" if none is."""
        return next((self._lines[thing] for thing in things if thing in self._lines), "")

    def __enter__(self) -> "Origins":
        self._user_lines = UserLineFinder(sys._getframe(1), skip_torch=False)
        for kind in (torch.optim.Optimizer, LRScheduler, ReduceLROnPlateau, DataLoader):
            self._note_instances(kind)
        super().__enter__()  # type: ignore[no-untyped-call]  # not annotated in torch
        return self

    def __exit__(self, *error: Any) -> None:
        with self._entered:
            super().__exit__(*error)  # type: ignore[no-untyped-call]  # not annotated in torch

    def _note_instances(self, kind: Any) -> None:
        original = kind.__init__

        @functools.wraps(original)
        def __init__(thing: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - replaces a method of this name
            if line := self._user_lines.line():
                self._lines[thing] = line
            original(thing, *args, **kwargs)

        self._entered.callback(setattr, kind, "__init__", original)
        kind.__init__ = __init__

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for thing in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(thing, Tensor) and (line := self._user_lines.line()):
                self._lines[thing] = line
        return result


@dataclass
class Subject:
    """The training loop to examine: the arguments of `graphed_step`, or of `graphed`, and its batches.

    The items of a tuple or list are passed to `loss_fn` after the model, those of a dict as keyword arguments.
    """

    line: str  # `file:line: source` of the function that returned it, for faults without a line of their own
    loss_fn: Callable[..., Any]  # or the function for `graphed`
    model: nn.Module  # or a `ModuleList` of what the function changes
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    batches: Iterable[Any]
    options: dict[str, Any]
    origins: Origins  # knows the lines that made tensors and objects
    whole: bool = False  # whether a batch is passed as one argument, whatever its type
    by: str = "graphed_step"  # or "graphed": what captures it
    device: torch.device | None = None  # None: that of the model's parameters

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All optimizers."""
        return (self.optimizer,) if isinstance(self.optimizer, torch.optim.Optimizer) else tuple(self.optimizer)

    def step(self, **options: Any) -> GraphedStep | GraphedFunction:
        """Return the step, with these options instead of the user's."""
        options = {**self.options, **options}
        if self.by == "graphed":
            modules = tuple(self.model.children())
            return graphed(modules=modules, optimizers=self.optimizers, **options)(self.loss_fn)
        return graphed_step(self.loss_fn, self.model, self.optimizer, **options)


def arguments_of(batch: Any, whole: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return how a batch is passed: the items of a tuple, list or dict one by one, unless it is passed whole."""
    if isinstance(batch, (dict, UserDict)) and not whole:
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) and not whole else (batch,)), {}


class Trial:
    """A training loop with its first batches, on which it is trained eagerly, again and again.

    Raises:
        ValueError: if `graphed_step` raises it, or if there is no batch.
        InputMismatch: if a batch cannot be an input of a graph.
    """

    def __init__(self, subject: Subject) -> None:
        buckets = read_buckets("graphed_step", subject.options.get("buckets"))
        self.chooses_sizes = buckets is not None and is_auto(buckets.batch)
        if buckets is not None and self.chooses_sizes:
            # It would watch all calls of a trial. No bucket of 1 holds a batch, so that these stay as they come.
            ones = replace(buckets, batch=(1,), length=None if buckets.length is None else (1,))
            subject = replace(subject, options={**subject.options, "buckets": ones})
        self.subject = subject
        self.step = subject.step(graph="off")
        # The optimizers that cannot be captured, each with the reason.
        found = {optimizer: why_not_capturable(optimizer) for optimizer in subject.optimizers}
        self.uncapturable = {optimizer: why for optimizer, why in found.items() if why}
        self.why_apart = next(iter(self.uncapturable.values()), "")
        constant = subject.by == "graphed_step" and subject.options.get("scheduler") is None
        # Whether these can be captured all the same, as long as none of their numbers changes.
        self.may_be_constant = bool(self.why_apart) and constant and all(map(may_be_constant, self.uncapturable))
        self.device = subject.device or next(subject.model.parameters()).device
        self.specs: list[Spec] = []
        self.lines: list[str] = []  # for each of `specs`, the line that made its batch
        self.kept: list[tuple[Any, Any]] = []
        # What steps called: a list of calls per step, by layout of the batch and place in the window of micro-batches.
        self.records: dict[Any, list[list[TorchCall]]] = {}
        self.decisions = 0  # comparisons with random draws of the host, in one step
        self.waits: Counter[Wait] = Counter()  # for the answers to questions, in one step
        self.uncapturable_lines: set[str] = set()
        self._seen: set[Any] = set()
        with subject.origins:
            for batch in itertools.islice(subject.batches, MOST_BATCHES):
                self._keep(batch)
        if not self.kept:
            raise ValueError("there is no batch")
        self._next = itertools.cycle(range(len(self.kept)))

    def _keep(self, batch: Any) -> None:
        tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]
        line = self.subject.origins.of(*tensors)  # the copies below are not made by a line of the user's
        moved = next(iter(prefetch([batch], self.device)))
        args, kwargs = arguments_of(moved, self.subject.whole)
        buckets = self.subject.options.get("buckets")
        padded_args, padded = (args, kwargs) if buckets is None else buckets.pad_batch(args, kwargs)
        self.specs.append(read_batch(padded_args, padded, self.device)[0])
        self.lines.append(line)
        if len(self.kept) < KEPT_BATCHES:
            self.kept.append((args, kwargs))

    def with_options(self, **options: Any) -> "Trial":
        """Return this trial with other options of `graphed_step`."""
        other = copy.copy(self)
        other.step = self.subject.step(**options, graph="off")
        return other

    def run(self, *, recorded: bool = False) -> None:
        """Do one optimizer step. If `recorded`, record the calls of torch that the user's lines make."""
        for place in range(self.subject.options.get("accumulate", 1)):
            i = next(self._next)
            args, kwargs = self.kept[i]
            key = self.specs[i], place
            # The first call of a kind is not recorded: it may make something that is kept (a mask, a table).
            if recorded and key in self._seen:
                with HostCallRecorder() as recorder:
                    self.step(*args, **kwargs)
                self.records.setdefault(key, []).append(recorder.calls)
            else:
                self.step(*args, **kwargs)
            self._seen.add(key)

    def emulated(self) -> Report | None:
        """Return the report of a few steps with emulated graphs, on the first batch; None with `compile=`.

        Calls of a function have the first batch of each layout, because each may do something else.
        """
        subject = self.subject
        if subject.options.get("compile") is not None:
            return None  # see `StepSplitter`
        kept = dict(zip(reversed(self.specs[: len(self.kept)]), reversed(self.kept), strict=True))
        batches = [*kept.values()] if subject.by == "graphed" else self.kept[:1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CaptureWarning)
            with subject.step(graph="emulate", warmup=2, scheduler=None) as step:
                for _ in range(_SPLIT_CALLS * subject.options.get("accumulate", 1)):
                    for args, kwargs in batches:
                        step(*args, **kwargs)
                return step.report()
