"""Many calls of a function at once: the slices of stacked inputs go through graphs of up to 16 calls, or one by one."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..._capture.engine.engine import Engine
from ..._capture.engine.multi_step import Noting, Steps
from ..._capture.graph.cache import copied
from ..._capture.keys.inputs import flatten
from ..._capture.keys.key import Key
from ..._errors import CaptureError
from ..._torch.tensors.tensors import version
from ..step_function import StepFunction
from ..training_step import Phase
from .rates_ahead import RatesAhead, RateTables, may_step_ahead
from .scan import MOST
from .slices import in_order
from .stack import Stack, Words, joined, sliced

WORDS = Words("scan", "call", "calls", "function", "what the function returned")
_LENGTHS = range(2, MOST + 1)  # one call is a single call


class FunctionScan:
    """Does the calls of a stack: as many as possible in graphs of several calls, the others one by one.

    Args:
        engine: calls the function.
        function: what it calls.
        phase: of each call.
        device: where the inputs must be.
        may_launch: whether to launch several calls at once, where there are graphs.
    """

    def __init__(
        self, engine: Engine, function: StepFunction, phase: Phase, device: torch.device, *, may_launch: bool
    ) -> None:
        self._engine, self._function, self._phase, self._may_launch = engine, function, phase, may_launch
        self.device: torch.device = device
        self._warming = False  # whether a call of this scan was made to get a graph
        self._ahead = RatesAhead(function.groups, MOST)
        self._moves: dict[Key, tuple[bool, ...]] = {}  # of each schedule whether the calls of a graph move it
        self._key: Key | None = None  # of the graph that was looked for last
        own = [groups.param_groups for groups in function.groups]
        self._may_launch &= all(
            may_step_ahead(scheduler) and any(scheduler.optimizer.param_groups is each for each in own)
            for scheduler in (schedule.scheduler for schedule in function.schedules)
        )

    def run(self, stack: Stack, single: Callable[..., Any], behind: Callable[[int], object], first: list[Any]) -> Any:
        """Do the calls of a stack; return their outputs, stacked.

        `single(args, kwargs)` does one call and returns a `FunctionOutput`. With `schedules=False` it steps no
        scheduler. `behind(n)` is called behind a launch of n calls. `first` has what the first calls returned, which
        were done already.
        """
        self._warming = False

        def launched(start: int) -> tuple[int, Any] | None:
            return self._launched(stack, start, single, behind)

        def one(i: int) -> Any:
            output = single(*stack.inputs(i))
            if self._key is not None:
                self._moves[self._key] = output.moves
            return output.returned

        pieces = in_order(stack, launched, one, first, partial(joined, join=torch.stack, begin=0, words=WORDS))
        return joined(pieces, torch.cat, 1, WORDS)

    def _launched(
        self, stack: Stack, start: int, single: Callable[..., Any], behind: Callable[[int], object]
    ) -> tuple[int, Any] | None:
        """Do calls from this one on by one launch. Return None, and do nothing, if there is no graph for them."""
        count, schedules = min(MOST, stack.count - start), self._function.schedules
        self._key = None
        number = self._engine.settings_number() if self._may_launch and count in _LENGTHS else None
        if number is None:
            return None
        # A graph that reads a rate of the user's between two calls, see `_calls`, has its address.
        addresses = tuple(rate.data_ptr() for rate in self._rates())
        tables: RateTables | None = None
        if schedules:  # whose rates are read ahead of the launch
            if addresses or not all(groups.read_tensors() for groups in self._function.groups):
                return None
            tables = self._ahead.tables()
        key = self._key = Key(stack.spec_of(MOST), (WORDS.method, addresses), number)
        steps = Steps(
            key=key,
            singles=[Key(stack.spec, self._phase, number)],
            lengths=_LENGTHS,
            captured=partial(self._calls, key, tables),
            eager=partial(self._calls, key, tables),
        )
        # What is left behind warm-up calls is a length that no later scan may have.
        graph = self._engine.find(steps, count, may_capture=count == MOST or not self._warming)
        self._warming = self._warming or graph is None
        if graph is None or (schedules and key not in self._moves):  # an emulated graph has made no call yet
            return None
        rows = slice(start, start + count)
        leaves = [leaf[rows] if isinstance(leaf, Tensor) else leaf for leaf in stack.leaves]
        graph.inputs.refuse_shared(leaves)  # before the launch is counted
        if schedules:
            moving = [each for each, moves in zip(schedules, self._moves[key], strict=True) if moves]
            known = self._ahead.step(moving, count)
            if known < count:
                return known, self._with_rates(known, stack, start, single)
        outputs = self._engine.launch(steps, count, leaves)
        behind(count)
        return count, outputs

    def _with_rates(self, calls: int, stack: Stack, start: int, single: Callable[..., Any]) -> Any:
        """Do calls one by one that schedulers were stepped ahead of."""
        outs = []
        with self._ahead.one_by_one() as put_rates:
            for i in range(calls):
                put_rates(i)
                outs.append(single(*stack.inputs(start + i), schedules=False).returned)
        return joined(outs, torch.stack, 0, WORDS)

    def _rates(self) -> list[Tensor]:
        """Return the learning rates that are tensors of the user's."""
        return [rate for groups in self._function.groups for rate in groups.given_tensors()]

    def _calls(
        self,
        key: Key,
        tables: RateTables | None,
        count: int,
        noting: Noting,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Do this many calls with the slices of a stack, as a graph records it. Return their outputs, stacked."""
        leaves, tree = flatten(args, kwargs)
        outputs = []
        rates = self._rates()
        for i in range(count):
            given, named = sliced(leaves, tree, i)
            before = [*map(version, rates)]
            with noting(), nullcontext() if tables is None else tables.reading(i):
                output = self._function(self._phase, *given, **named)
            if i and output.moves != self._moves[key]:
                raise CaptureError("some of its calls step an optimizer with a scheduler, and others do not.")
            self._moves[key] = output.moves
            outputs.append(copied(output.returned))  # a later call may change what it is
            if before != [*map(version, rates)]:
                # Each call reads copies of the rates, which the engine brings up to date in front of it.
                if any(rate.device != self.device for rate in rates):
                    raise CaptureError("it changes a learning rate that is a tensor on the host.")
                for groups in self._function.groups:
                    groups.refresh()
        return joined(outputs, torch.stack, 0, WORDS)
