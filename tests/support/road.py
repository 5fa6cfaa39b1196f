"""The road of a batch: which files of ampkit a replayed call of graphed_step goes through, in order.

    python tests/support/road.py

An emulated graph runs the captured function again where a real one launches kernels. What that calls is left out.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import ampkit

PACKAGE = f"{Path(ampkit.__file__).parent}{os.sep}"


class Move(NamedTuple):
    """A file, and what is called in it before another file is.

    Attributes:
        file: its path in ampkit/.
        functions: names of functions, in order.
    """

    file: str
    functions: list[str]

    def __str__(self) -> str:
        return f"{self.file:32} {', '.join(self.functions)}"


def road(call: Callable[[], object]) -> list[Move]:
    """Return the moves from file to file that a call makes."""
    moves: list[Move] = []
    graph: list[FrameType] = []  # the frame of a replay

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and graph and frame is graph[0]:
            graph.clear()
        if event != "call" or graph or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        file, name = frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_name
        if file == "_capture/graph.py" and name == "replay":
            graph.append(frame)
        if moves and moves[-1].file == file:
            moves[-1].functions.append(name)
        else:
            moves.append(Move(file, [name]))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return moves


def replayed_call() -> Callable[[], object]:
    """Return a call of a step with default options, which has been replayed often enough to be timed no more."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)
    step = ampkit.graphed_step(lambda model, x, y: (model(x) - y).square().mean(), model, optimizer, graph="emulate")
    x, y = torch.ones(2, 4), torch.zeros(2, 4)
    for _ in range(100):
        step(x, y)
    return lambda: step(x, y)


if __name__ == "__main__":
    made = road(replayed_call())
    print(*made, f"{len({move.file for move in made})} files, {len(made)} moves", sep="\n")
