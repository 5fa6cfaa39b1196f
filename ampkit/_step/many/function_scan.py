"""Many calls of a function at once: the slices of stacked inputs go through graphs of up to 16 calls, or one by one."""

from collections.abc import Callable
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

    def run(self, stack: Stack, single: Callable[..., Any], behind: Callable[[int], object], first: list[Any]) -> Any:
        """Do the calls of a stack; return their outputs, stacked.

        `single(args, kwargs)` does one call. `behind(n)` is called behind a launch of n calls. `first` has the outputs
        of the first calls, which were done already.
        """
        self._warming = False

        def launched(start: int) -> tuple[int, Any] | None:
            found = self._launched(stack, start)
            if found is not None:
                behind(found[0])
            return found

        def one(i: int) -> Any:
            return single(*stack.inputs(i))

        pieces = in_order(stack, launched, one, first, partial(joined, join=torch.stack, begin=0, words=WORDS))
        return joined(pieces, torch.cat, 1, WORDS)

    def _launched(self, stack: Stack, start: int) -> tuple[int, Any] | None:
        """Do calls from this one on by one launch. Return None, and do nothing, if there is no graph for them."""
        count = min(MOST, stack.count - start)
        number = self._engine.settings_number() if self._may_launch and count in _LENGTHS else None
        if number is None:
            return None
        # A graph that reads a rate of the user's between two calls, see `_calls`, has its address.
        addresses = tuple(rate.data_ptr() for rate in self._rates())
        steps = Steps(
            key=Key(stack.spec_of(MOST), (WORDS.method, addresses), number),
            singles=[Key(stack.spec, self._phase, number)],
            lengths=_LENGTHS,
            captured=self._calls,
            eager=self._calls,
        )
        # What is left behind warm-up calls is a length that no later scan may have.
        graph = self._engine.find(steps, count, may_capture=count == MOST or not self._warming)
        self._warming = self._warming or graph is None
        if graph is None:
            return None
        rows = slice(start, start + count)
        leaves = [leaf[rows] if isinstance(leaf, Tensor) else leaf for leaf in stack.leaves]
        graph.inputs.refuse_shared(leaves)  # before the launch is counted
        return count, self._engine.launch(steps, count, leaves)

    def _rates(self) -> list[Tensor]:
        """Return the learning rates that are tensors of the user's."""
        return [rate for groups in self._function.groups for rate in groups.given_tensors()]

    def _calls(self, count: int, noting: Noting, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do this many calls with the slices of a stack, as a graph records it. Return their outputs, stacked."""
        leaves, tree = flatten(args, kwargs)
        outputs = []
        rates = self._rates()
        for i in range(count):
            given, named = sliced(leaves, tree, i)
            before = [*map(version, rates)]
            with noting():
                output = self._function(self._phase, *given, **named)
            outputs.append(copied(output))  # a later call may change what it is
            if before != [*map(version, rates)]:
                # Each call reads copies of the rates, which the engine brings up to date in front of it.
                if any(rate.device != self.device for rate in rates):
                    raise CaptureError("it changes a learning rate that is a tensor on the host.")
                for groups in self._function.groups:
                    groups.refresh()
        return joined(outputs, torch.stack, 0, WORDS)
