"""Many steps per call: the slices of stacked inputs go through graphs of up to 16 steps, or one by one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..._batches.padding import Padding
from ..._capture.engine.engine import Engine
from ..._capture.engine.fallback import StepDoneError
from ..._capture.engine.multi_step import Noting, Steps
from ..._capture.keys.inputs import flatten
from ..._capture.keys.key import Key
from ..._undo import Undo, replace
from ..schedule import Schedule
from ..training_step import PartOfStep, StepOutput, TrainingStep
from .rates_ahead import RatesAhead, RateTables, may_step_ahead
from .slices import Slices, in_order, micro_batches
from .stack import SCAN, Stack, StackedOutputs, concatenated, stacked

MOST = 16  # calls per launch; a window of micro-batches that begins within these is done to its end
# What a launch counts for until the host reads whether training has stopped: as 16, it would wait for the one before.
_CALLS_OF_A_LAUNCH = 4


class Scan:
    """Does the calls of a stack: as many as possible in graphs of several steps, the others one by one.

    The inputs of each call are padded, if the step pads.
    """

    def __init__(
        self,
        engine: Engine,
        step: TrainingStep,
        slices: Slices,
        optimizers: Sequence[torch.optim.Optimizer],
        schedules: Sequence[Schedule],
        padding: Padding | None,
    ) -> None:
        self._engine, self._step, self._padding = engine, step, padding
        self._slices, self._window, self._size = slices, slices.window, slices.size
        schedule = self._schedule = next(iter(schedules), None)
        known = schedule is None or may_step_ahead(schedule.scheduler)
        # An optimizer that does not read its rate from a tensor would not see the rates that are set ahead.
        known = known and (schedule is None or step.capturable) and len(optimizers) == 1 and len(schedules) <= 1
        self._may_launch = known and step.observer is None and not step.ranks.several
        # In windows; one call is a single call.
        self._lengths = range(1 + (slices.size == 1), -(-MOST // slices.size) + 1)
        self._rates = RatesAhead([step.groups], self._lengths[-1])
        self._warming = False  # whether a call of this scan was made to get a graph

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepOutput:
        """Do the calls of a stack; return their outputs, stacked."""
        pad = None if self._padding is None else self._padding.stack
        stack = Stack(args, kwargs, self._step.device, SCAN, pad)
        self._warming = False

        def launched(start: int) -> tuple[int, StackedOutputs] | None:
            piece = self._launched(stack, start)
            return None if piece is None else (len(piece.loss), piece)

        return concatenated(in_order(stack, launched, partial(self._slices.call, stack), (), stacked))

    def _launched(self, stack: Stack, start: int) -> StackedOutputs | None:
        """Do windows from this call on by one launch. Return None, and do nothing, if there is no graph for them."""
        windows = min(self._lengths[-1], (stack.count - start) // self._size)
        if not self._may_launch or self._window.count or windows not in self._lengths:
            return None
        if self._step.calls_after_step_apart or (self._padding is not None and self._padding.why_eager):
            return None
        number = self._engine.settings_number()
        if self._step.place.behind or not (self._schedule is None or self._step.groups.read_tensors()):
            return None
        if self._step.may_change_rates:  # the rates of all calls are read ahead of the launch
            return None
        phases = self._slices.phases(stack.spec)
        if number is None or phases is None:
            return None
        tables = self._rates.tables()
        steps = Steps(
            key=Key(stack.spec_of(self._lengths[-1] * self._size), phases, number),
            singles=[Key(stack.spec, phase, number) for phase in phases],
            lengths=self._lengths,
            captured=partial(_windows, self._step.captured, tables, self._size),
            eager=partial(_windows, self._step, tables, self._size),
        )
        # What is left behind warm-up calls is a length that no later scan may have.
        graph = self._engine.find(steps, windows, may_capture=windows == self._lengths[-1] or not self._warming)
        self._warming = self._warming or graph is None
        if graph is None:
            return None
        rows = slice(start, start + windows * self._size)
        leaves = [leaf[rows] if isinstance(leaf, Tensor) else leaf for leaf in stack.leaves]
        self._window.refuse_stopped(_CALLS_OF_A_LAUNCH)
        graph.inputs.refuse_shared(leaves)  # before the schedule moves on
        known = self._rates.step([] if self._schedule is None else [self._schedule], windows)
        if known < windows:
            return self._with_rates(known, stack, start)
        failure: StepDoneError | None = None
        try:
            out: StackedOutputs = self._engine.launch(steps, windows, leaves)
        except StepDoneError as error:
            out, failure = error.outputs, error
        self._window.launched(None if out.grad_norms is None else out.grad_norms[-1], windows)
        if failure is not None:
            raise failure
        return out

    def _with_rates(self, windows: int, stack: Stack, start: int) -> StackedOutputs:
        """Do windows one by one that the scheduler was stepped ahead of."""
        outs = []
        with Undo() as undo, self._rates.one_by_one() as put_rates:
            replace(undo, self._window, "after", None)
            for window in range(windows):
                put_rates(window)
                begin = start + window * self._size
                outs += [self._slices.call(stack, begin + place) for place in range(self._size)]
        return stacked(outs)


def _windows(
    call: Callable[..., PartOfStep],
    tables: RateTables,
    size: int,
    windows: int,
    noting: Noting,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> StackedOutputs:
    """Do this many windows of `size` micro-batches with the slices of a stack, as a graph records it."""
    leaves, tree = flatten(args, kwargs)
    done: list[PartOfStep] = []
    for window in range(windows):
        places = range(window * size, (window + 1) * size)
        with tables.reading(window):
            done += micro_batches(call, leaves, tree, places, noting)
    return stacked([part.output for part in done], views=True)
