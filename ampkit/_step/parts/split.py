"""A training step in parts: which modules are captured, when, and whether that is faster than an eager step."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from ..._capture.engine.engine import Engine
from ..._capture.engine.layouts import IN_PARTS, Layout, Splitter
from ..._capture.engine.options import Options
from ..._capture.graph.capture_query import captures
from ..._capture.graph.report import NOR_IN_PARTS
from ..._capture.graph.timing import Clock, Durations, Shares
from ..._capture.keys.key import Key
from ..._capture.ranks.ranks import Ranks
from ..._capture.state.kept_gradients import KeptGradients
from ..._torch.tensors.modes import modes
from ..._undo import Undo
from ..training_step import Phase
from .module_choice import Choice, chosen
from .module_runs import ModuleRuns, runs_in
from .module_survey import ModuleCall, Survey
from .part_memory import PartMemory
from .parts import CHANGED, Parts
from .split_update import Update

_FEWEST = 6  # kernels of a forward: to launch the two graphs of a module takes about as long as these
_TIMED = 5  # calls of each kind, to find out which is faster
_SHOWN = 4  # reasons
_SUCH_A_LINE = "such a line is in it"  # as the message names before
_MODEL = "the model"  # the module at the path ""
_SURVEYED = "looking for modules to capture"
_NO_MODULE = "no module can be captured by itself, and this micro-batch does not end its window"
COMPILES = "compile= compiles forward and backward"  # why a step that does so is not done in parts
NamedModules = Callable[[], Iterable[tuple[str, nn.Module]]]


class Divided(Protocol):
    """What is done in parts: a training step, or a function of the user's.

    Attributes:
        kept: where `in_parts` keeps gradients of parameters; None if it does not.
    """

    @property
    def kept(self) -> KeptGradients | None: ...

    def __call__(self, phase: Phase, *args: Any, **kwargs: Any) -> Any:
        """Do it."""

    def watched(self, watching: AbstractContextManager[None], phase: Phase, *args: Any, **kwargs: Any) -> Any:
        """Do it, forward and backward within a context."""

    def in_parts(self, phase: Phase, *args: Any, **kwargs: Any) -> Any:
        """Do what comes before the update of the parameters, if that is a part of its own."""

    def begin_parts(self) -> None:
        """Let go of memory that only graphs of whole steps need."""

    def leave_pools(self) -> None:
        """Let go of gradients in the memory of graphs that are about to be freed, unless a step on them is to come."""


class StepSplitter(Splitter):
    """Does the steps in parts whose layout cannot be captured as a whole.

    Args:
        step: the step.
        modules: returns the modules that may be captured, by name, each once.
        update: the update of the parameters.
        why_never: why nothing is ever done in parts, if that is known already; else "".
        eager: classes of modules that are not to be captured, and why.
    """

    def __init__(
        self,
        step: Divided,
        modules: NamedModules,
        update: Update,
        options: Options,
        ranks: Ranks,
        device: torch.device,
        *,
        why_never: str = "",
        eager: Mapping[type[nn.Module], str] = MappingProxyType({}),
    ) -> None:
        self._step, self._modules, self._update, self._eager = step, modules, update, eager
        self._options, self._device = options, device
        wanted = options.on_failure == "parts" and options.graph != "off"
        if options.memory_budget is not None:
            why_never = "memory_budget= is for graphs of whole steps"
        if ranks.several:
            why_never = "several processes train together (DistributedDataParallel, fully_shard)"
        self._why_never = why_never if wanted else "unwanted"
        self._why_not: dict[str, None] = {}
        self._problems: dict[str, None] = {}  # of layouts that are done in parts
        # The layouts keep them, so that they end with these.
        self._splits: weakref.WeakValueDictionary[Any, Split] = weakref.WeakValueDictionary()
        self._by_layout: weakref.WeakKeyDictionary[Layout, Split] = weakref.WeakKeyDictionary()

    def takes(self, key: Key, layout: Layout) -> bool:
        """Return whether the calls of a layout are done in parts from now on, because of its `problem`."""
        if self._why_never == "unwanted" or not layout.problem:
            return False
        hindrances = {
            "it cannot be told what the modules read": layout.unreadable,
            "the code is told that it is being captured (capturing=True)": layout.answer.sees_capture,
            "autocast is on around the step. Pass a policy instead": torch.is_autocast_enabled(self._device.type),
            "torch.compile has compiled a part of the step, or is at work in it": not layout.rehearsal.numbers,
        }
        reason = self._why_never or next((why for why, is_so in hindrances.items() if is_so), "")
        kind = key.spec, key.settings, key.phase.others
        split = self._splits.get(kind)
        if split is not None:
            reason = reason or split.refusal
        elif not reason and len(self._splits) >= self._options.max_graphs:
            reason = f"max_graphs={self._options.max_graphs} layouts are done in parts already"
        if reason:
            self._why_not[reason] = None
            return False
        if split is None:
            split = Split(self._step, self._modules, self._update, self._device, self._options, self._eager)
            self._splits[kind] = split
        self._by_layout[layout] = split
        self._problems[layout.problem] = None
        layout.refuse(IN_PARTS)
        return True

    @property
    def has_parts(self) -> bool:
        """Whether some layout is done in parts, or may be."""
        return any(not split.refusal for split in self._splits.values())

    def call(self, engine: Engine, layout: Layout, phase: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do a call of a layout that is done in parts."""
        split = self._by_layout[layout]
        if not split.refusal and not captures.recorded:
            outputs = split.call(engine, phase, args, kwargs)
            if words := split.first_words():
                engine.warn_once("parts", f"{layout.problem}\nThe step is done in parts: {words}")
            if split.refusal:
                self._why_not[split.refusal] = None
                engine.refuse(layout, f"{layout.problem}\n{NOR_IN_PARTS}{split.refusal}")
            return outputs
        layout.refuse("cannot be captured")
        return engine.run(layout.refusal, lambda: self._step(phase, *args, **kwargs))

    def fields(self) -> dict[str, Any]:
        """Return the fields of the report that say what is captured."""
        splits = list(self._splits.values())
        said = [split.words() for split in splits]
        words = [line for captured, _ in said for line in captured]
        lines = dict.fromkeys(line for split in splits for line in split.lines)
        reasons = [f"cannot be captured: {line}" for line in lines]
        # Others than lines that a survey has found, too.
        reasons += [f"not captured whole: {why}" for why in self._problems if not any(line in why for line in lines)]
        updates, shares = 0, {}
        if words:
            report = self._update.report
            updates = 0 if report is None else report.graphs
            words = [*reasons, *words, *self._update.words()]
            words += [line for _, eager in said for line in eager]
            most = max(splits, key=lambda split: split.calls)
            shares = {} if most.parts is None else most.shares.by_part("eager")  # sync: waits for the measured calls
        words += [f"not in parts: {reason}" for reason in self._why_not]
        return {
            "parts": tuple(part for split in splits if split.parts is not None for part in split.parts.reports()),
            "updates": updates,
            "shares": shares,
            "split": tuple(dict.fromkeys(words)),
        }

    @property
    def nbytes(self) -> int:
        """Bytes that the graphs take."""
        parts = [split.parts for split in list(self._splits.values()) if split.parts is not None]
        report = self._update.report
        return (0 if report is None else report.bytes) + sum(each.memory.nbytes for each in parts)

    def close(self) -> None:
        """Release what is captured."""
        for split in list(self._splits.values()):
            split.reset()
        self._update.close()


class Split:
    """The parts of one layout of the batch.

    Its first two calls are watched by a `Survey`, or three if there are neighbours in an `nn.Sequential` that may be
    captured together: the first one finds these. The next ones are eager, and timed. Then modules are captured, and
    calls in parts are timed. Where no module can be captured, the update of the parameters still is.
    """

    def __init__(
        self,
        step: Divided,
        modules: NamedModules,
        update: Update,
        device: torch.device,
        options: Options,
        eager: Mapping[type[nn.Module], str],
    ) -> None:
        self._step, self._modules, self._update = step, modules, update
        self._device, self._options, self._left = device, options, eager
        self._is_timed = is_timed(options)  # else a split that is slower than eager steps is not given up
        self.clock = Clock(device if device.type == "cuda" else None)
        self._eager, self._in_parts = Durations(_TIMED), Durations(_TIMED)
        self._surveys: list[Survey] = []  # kept until all modules are captured
        self._failed: dict[ModuleCall, str] = {}
        self.lines: dict[str, None] = {}  # that a graph cannot contain, as surveys have shown
        self._runs: ModuleRuns | None = None  # before the first survey
        self._choice: Choice | None = None
        self.parts: Parts | None = None  # made when it is known what to capture
        self.calls = 0  # that were done in parts
        self.shares = Shares(self.clock)  # how the time of a call is shared, see `Report`
        self._said = False
        self.refusal = ""  # why its calls are eager, "" if they are done in parts, or may be

    def call(self, engine: Engine, phase: Phase, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do a call."""
        why = "numerics are measured" if phase.observed else ""
        if not why and self.parts is not None and (why := self.parts.why_not_now()) == CHANGED:
            self._give_up(f"{why}. Register hooks before the first step")
        if not why and self.parts is None and len(self._surveys) < 2:  # first, for often there is nothing to capture
            return self._survey(engine, phase, args, kwargs)
        if why or (self._is_timed and self._eager.wanted):
            start = self.clock.now()
            outputs = engine.run(why or _SURVEYED, lambda: self._step(phase, *args, **kwargs))
            if not why and phase.last:
                self._eager.add(start, self.clock.now())
            return outputs
        return self._call_in_parts(engine, phase, args, kwargs)

    def _call_in_parts(self, engine: Engine, phase: Phase, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.parts is not None  # made behind the last survey, or the split has been refused
        assert self._choice is not None  # made with the parts
        how = IN_PARTS if self._choice.calls or phase.last else _NO_MODULE
        settled = phase.last and not self._surveys and self._update.is_settled
        timed = settled and self._is_timed and self._in_parts.wanted
        # Where the parts are not given up. The marks inside of a call would lengthen it.
        shares = self.shares if settled and not timed and self.shares.wanted else None
        start = self.clock.now() if timed else None
        if shares is not None:
            shares.begin()
        with self.parts.installed(self._step.kept, shares):
            outputs = engine.run(how, lambda: self._step.in_parts(phase, *args, **kwargs))
        with nullcontext() if shares is None or not self._update.name else shares.measured(self._update.name):
            outputs = self._update.done(phase, outputs)
        if self._surveys:
            failed = {part.call: part.failure for part in self.parts.all if part.failure}
            if failed:  # the modules inside of those that could not be captured are worth a try
                self._failed |= failed
                self.reset()
                self._choose()
            else:
                self._surveys.clear()
        self.calls += 1
        self._check_that_something_is_captured()
        if shares is not None:
            shares.end()
        if timed and not self.refusal:
            self._in_parts.add(start, self.clock.now())
            if not self._in_parts.wanted:
                eager, in_parts = self._eager.median_ms(), self._in_parts.median_ms()  # sync: waits for them, once
                if eager is not None and in_parts is not None and in_parts > eager:
                    self._give_up(f"in parts a step takes {in_parts:.3g} ms, and an eager one {eager:.3g} ms")
        return outputs

    def _survey(self, engine: Engine, phase: Phase, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._step.begin_parts()
        runs = ModuleRuns({}, {}) if self._runs is None else self._runs
        named = [*self._modules(), *runs.named()]
        may_stop = self._options.host_writes == "ignore"
        generators, places = self._options.generators, engine.places_and_values()
        survey = Survey(named, self._device, generators, self._left, *places, writes_may_stop=may_stop)

        @contextmanager
        def watching(noting: AbstractContextManager[Any]) -> Iterator[None]:
            with noting, runs.installed(), survey.watching():
                yield

        def step(noting: AbstractContextManager[Any]) -> Any:
            with Undo() as undo:
                undo.note(modes())
                outputs = self._step.watched(watching(noting), phase, *args, **kwargs)
                undo.forget()
            return outputs

        outputs = engine.run_noted(_SURVEYED, step)
        self.lines |= survey.lines
        if self._runs is None:
            self._runs = runs_in(survey.calls, _FEWEST)
            if self._runs.units:  # two more calls are to show how they are called as modules
                return outputs
        self._surveys.append(survey)
        if len(self._surveys) == 2:
            self._choose()
            self._check_that_something_is_captured()
        return outputs

    def _choose(self) -> None:
        first, second = self._surveys
        self._choice = chosen(first, second, _FEWEST, self._failed)
        memory = PartMemory(self._device, self._options.graph == "emulate", self._options.generators)
        assert self._runs is not None  # known behind the first survey
        self.parts = Parts(self._choice, self._runs, memory)

    def _check_that_something_is_captured(self) -> None:
        """Give the split up if there is neither a module to capture nor the update."""
        if self.refusal or self._choice is None or self._choice.calls:
            return
        if why := self._update.why_eager:
            self._give_up(f"{self._no_module()}, {why}")

    def _no_module(self) -> str:
        assert self._choice is not None  # or nothing is known
        found = _summed_up(self._choice.reasons).items()
        reasons = [f"{names}: {_SUCH_A_LINE if why in self.lines else why}" for names, why in found]
        more = f"; and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
        return f"no module can be captured by itself ({'; '.join(reasons[:_SHOWN]) or 'none is called'}{more})"

    def _give_up(self, why: str) -> None:
        self.refusal = f"{why.rstrip('.')}."  # it ends with a message, or with a clause
        self.reset()

    def reset(self) -> None:
        """Free the graphs."""
        if self.parts is not None:
            self._step.leave_pools()
            self.parts.reset()
            self.parts = None
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # no eager call can use what is cached for the pools

    def first_words(self) -> str:
        """Return in words what is to be captured, once, as soon as that is known; else ""."""
        if self._said or self.parts is None or self._choice is None:
            return ""
        self._said = True
        names = dict.fromkeys(call.name for calls in self._choice.calls.values() for call in calls.values())
        named = [*(name or _MODEL for name in names), *filter(None, [self._update.name])]
        if len(named) == 1:
            what = f"{named[0]} gets graphs of its own"
        else:
            what = f"{', and '.join([', '.join(named[:-1]), named[-1]])} each get graphs of their own"
        why = "" if self._choice.calls else f": {self._no_module()}"
        return f"{what}, and the rest stays eager{why}. report() says what was captured."

    def words(self) -> tuple[list[str], list[str]]:
        """Return in words what is captured; and what is not, and which calls of captured modules were not replayed."""
        if self.parts is None or self._choice is None:
            return [], []
        reports = self.parts.reports()
        calls = Counter(part.module for part in reports)
        names = [(name or _MODEL) + f" ({count} calls in a step)" * (count > 1) for name, count in calls.items()]
        reasons = self._choice.reasons
        within = [name or _MODEL for name, why in reasons.items() if why in self.lines]
        words: list[str] = []
        if within:
            who = "it contains" if len(within) == 1 else "they contain"
            words.append(f"eager: {', '.join(within)}: {who} such a line")
        words += [f"eager: {names}: {why}" for names, why in _summed_up(reasons).items() if why not in self.lines]
        for part in reports:
            words += [f"eager x{count}: {part.module or _MODEL}: {reason}" for reason, count in part.eager.items()]
        return [f"captured by itself: {', '.join(names) or 'no module'}"], words


def _summed_up(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons by what they hold for. Modules in one with the same reason are only counted."""

    def around(name: str) -> str | None:
        """Return the name of the outermost module around this one that has the same reason, None if none has."""
        parts = name.split(".")
        paths = ("", *(".".join(parts[:i]) for i in range(1, len(parts))))
        return next((path for path in paths if path != name and reasons.get(path) == reasons[name]), None)

    inside = Counter(map(around, reasons))
    tops = [name for name in reasons if around(name) is None]
    counted = {name: f", and {inside[name]} in it" if inside[name] else "" for name in tops}
    return {f"{name or _MODEL}{counted[name]}": reasons[name] for name in tops}


def is_timed(options: Options) -> bool:
    """Return whether calls are timed. Those with emulated graphs are slower than eager ones."""
    return options.graph == "auto"
