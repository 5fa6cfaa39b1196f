"""What several test files of steps in parts share: a module that is large enough to be captured, a comparison."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import pytest
import torch
from harness import assert_same, deterministic
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit
from ampkit._step.training_step import TrainingStep

WIDTH = 16
Called = TypeVar("Called")


class Block(nn.Module):
    """Eight kernels or more. Its input is used twice, and the weight of `first` too."""

    def __init__(self, inputs: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(inputs), nn.Linear(inputs, inputs), nn.Linear(inputs, inputs)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(F.gelu(self.first(self.norm(x))))
        return x + self.dropout(torch.tanh(self.second(F.gelu(hidden))))


def finish_within(context: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what a step does behind its replay run in such a context."""
    finish = TrainingStep.finish

    def finished(*args: Any, **kwargs: Any) -> Any:
        with context():
            return finish(*args, **kwargs)

    monkeypatch.setattr(TrainingStep, "finish", finished)


def assert_same_as_eager(engine: tuple[str, str], train: Callable[[str], tuple[Called, Any]]) -> Called:
    """Train without graphs, then with them. Assert that both leave the same bits.

    Args:
        engine: one of `ENGINES`.
        train: gets the argument `graph`, and returns what it called, and what that returned and changed.

    Returns:
        What was called with graphs.
    """
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        (_, expected), (called, found) = train("off"), train(engine[1])
    assert_same(found, expected)
    return called
