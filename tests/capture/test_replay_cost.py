"""What a replay costs the host, counted: operations, and instructions, which must not grow with the model."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from counts import Functions, Operations, instructions
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


class Cost(NamedTuple):
    operations: list[str]
    functions: int
    instructions: int


def replaying(layers: int, accumulate: int) -> Callable[[], None]:
    """Return what does the calls of one window, with the launch of the graphs left out."""
    blocks = (part for _ in range(layers) for part in (nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    step = ampkit.graphed_step(
        loss_fn,
        model,
        optimizer,
        policy="bfloat16",
        scaler=ampkit.GradScaler("cpu"),
        max_norm=1.0,
        accumulate=accumulate,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000),
        warmup=1,
        graph="emulate",
        host_writes="ignore",
    )
    batch = torch.randn(8, 4), torch.randint(4, (8,))

    def window() -> None:
        for _ in range(accumulate):
            step(*batch)

    for _ in range(3):  # warm-up, capture
        window()
    for _, captured in step._engine._cache:
        outputs = captured._graph.replay()
        captured._graph.replay = lambda outputs=outputs: outputs  # type: ignore[method-assign, misc]
    for _ in range(80):  # until calls are no longer timed
        window()
    return window


def cost_of_a_replay(layers: int, accumulate: int = 1) -> Cost:
    """Return what the calls of one window do on the host beside the launch of the graphs."""
    with Functions() as functions:
        window = replaying(layers, accumulate)
        functions.calls = 0
        window()
    window = replaying(layers, accumulate)
    with Operations() as operations:
        window()
    window()  # behind a dispatch mode a call looks at the whole state again, once
    with instructions() as count:
        window()
    return Cost(operations.seen, functions.calls, count[0])


COPIES_IN, COPY_OUT = ["aten.copy_.default"] * 2, "aten.copy_.default"


def test_the_operations_of_a_replay() -> None:
    """The learning rate, a copy per input, one for loss, norm and skip: nothing else touches the device.

    With Python 3.11 a call takes 1,829 instructions, 310 of them to look at torch's settings.
    """
    cost = cost_of_a_replay(3)
    assert cost.operations == ["aten.fill_.Scalar", *COPIES_IN, COPY_OUT]
    assert cost.instructions < 2500


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.seeds)])
@pytest.mark.slow
def test_no_step_of_the_interpreter_per_parameter(accumulate: int) -> None:
    """A call on ten times as many parameters runs the same operations, functions and bytecode instructions.

    So the look whether the batch shares memory with the state is one search in a list, however large the state is.
    """
    small, large = cost_of_a_replay(1, accumulate), cost_of_a_replay(10, accumulate)
    assert small.operations == large.operations
    assert small.functions == large.functions
    assert small.instructions == large.instructions
