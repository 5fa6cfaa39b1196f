"""Values that a graph would freeze, and that only others know of: whoever knows reports a read, and it is refused."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampkit
from ampkit._capture.engine.record import record
from ampkit._capture.graph.graph import EmulatedGraph
from ampkit._capture.preflight.host_values import receive, report_read
from ampkit._capture.preflight.uncapturable import Problem
from ampkit._capture.ranks.ranks import Ranks
from ampkit._capture.state.state import TrainingState
from ampkit._undo import Undo

PROBLEM = Problem("reads the clock, and a graph would freeze it", "Read it behind the step.", graph_only=True)
LINE = "loss.py:1: `clock.now`"
SAID = f"{LINE} - {PROBLEM.what}. {PROBLEM.advice}"


def test_the_last_receiver_is_told() -> None:
    """Without one, nothing happens; behind the context, the one before is told again."""
    told: list[str] = []
    report_read(PROBLEM, LINE)
    with Undo() as undo:
        receive(undo, lambda problem, line: told.append("outer"))
        with Undo() as inner:
            receive(inner, lambda problem, line: told.append("inner"))
            report_read(PROBLEM, LINE)
        report_read(PROBLEM, LINE)
    report_read(PROBLEM, LINE)
    assert told == ["inner", "outer"]


@pytest.mark.parametrize(("warmup", "calls"), [(3, (1, 2, 3)), (3, (2,)), (3, (3,)), (5, (4,)), (5, (5,))])
def test_a_read_in_any_call_but_the_first(warmup: int, calls: tuple[int, ...]) -> None:
    """The warning has the line once, also where only one call of the warm-up reads."""
    count = 0

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        if count in calls:
            report_read(PROBLEM, LINE)
        return model(x).square().mean()

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = ampkit.graphed_step(loss, model, optimizer, graph="emulate", on_failure="eager", warmup=warmup)
    for _ in range(warmup):
        step(torch.ones(2, 4))
    with pytest.warns(ampkit.CaptureWarning, match=re.escape(SAID)) as caught:
        step(torch.ones(2, 4))
    for _ in range(3):
        step(torch.ones(2, 4))
    assert str(caught[0].message).count(LINE) == 1
    assert (len(caught), step.replays) == (1, 0)


def test_what_only_the_first_call_reads() -> None:
    """It may have been kept, and later calls find it."""
    kept: list[int] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if not kept:
            report_read(PROBLEM, LINE)
            kept.append(1)
        return model(x).square().mean()

    model = nn.Linear(4, 2)
    step = ampkit.graphed_step(loss, model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), graph="emulate")
    for _ in range(6):
        step(torch.ones(2, 4))
    assert step.replays == 3


class Runs(EmulatedGraph):
    """Calls the function in the capture, as a CUDA graph does."""

    def capture(self, fn: Callable[[], Any], context: Any = nullcontext, then: Any = None) -> None:
        fn()


def test_a_read_in_the_capture_alone() -> None:
    """The capture fails, and the next one is told nothing of it."""
    state, ranks = TrainingState({"model": nn.Linear(4, 2)}, []), Ranks(None, torch.device("cpu"))
    rest: Any = nullcontext, lambda outputs: outputs, state, ranks, lambda: None
    with pytest.raises(ampkit.CaptureError, match=re.escape(SAID)):
        record(Runs(), lambda: report_read(PROBLEM, LINE), *rest)
    assert record(Runs(), lambda: None, *rest) is None


def test_a_read_in_the_capture_of_a_module() -> None:
    """Its calls are eager then, and the warning has the line."""

    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            report_read(PROBLEM, LINE)
            return super().forward(x)

    with pytest.warns(ampkit.CaptureWarning, match=re.escape(SAID)):
        module = ampkit.make_graphed_callables(Reads(4, 2), (torch.ones(2, 4),), graph="emulate")
    module(torch.ones(2, 4))
    assert module.forward.eager == {"not captured": 1}
