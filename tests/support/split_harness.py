"""What several test files of steps in parts share: a module that is large enough to be captured, a comparison."""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from harness import assert_same, deterministic
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

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
