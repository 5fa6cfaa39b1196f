"""The road of a batch: which files of ampkit a replayed call goes through, in order.

    python tests/support/road.py

An emulated graph runs the captured function again where a real one launches kernels. What that calls is left out.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ampkit

PACKAGE = f"{Path(ampkit.__file__).parent}{os.sep}"
ENOUGH = 100  # calls behind which no replay is timed any more


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


@contextmanager
def noting() -> Iterator[list[Move]]:
    """Context that notes the moves from file to file made in it."""
    moves: list[Move] = []
    graph: list[FrameType] = []  # the frame of a replay

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and graph and frame is graph[0]:
            graph.clear()
        if event != "call" or graph or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        file, name = frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_name
        if file == "_capture/graph/graph.py" and name == "replay":
            graph.append(frame)
        if moves and moves[-1].file == file:
            moves[-1].functions.append(name)
        else:
            moves.append(Move(file, [name]))

    sys.setprofile(profile)
    try:
        yield moves
    finally:
        sys.setprofile(None)


def road_of_a_call() -> list[Move]:
    """Return the moves of a replayed call of graphed_step with default options."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)
    step = ampkit.graphed_step(lambda model, x, y: (model(x) - y).square().mean(), model, optimizer, graph="emulate")
    x, y = torch.ones(2, 4), torch.zeros(2, 4)
    for _ in range(ENOUGH):
        step(x, y)
    with noting() as moves:
        step(x, y)
    return moves


def road_of_a_batch() -> list[Move]:
    """Return the moves of a batch under a Lightning Trainer, from its beginning to that of the next."""
    # The road of a call needs no Lightning, whose import takes seconds.
    import lightning.pytorch as pl

    from ampkit.lightning import AmpkitCallback

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.125, fused=True)

    class Noting(pl.Callback):
        def __init__(self) -> None:
            self.noted = ExitStack()

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == ENOUGH:
                self.moves = self.noted.enter_context(noting())
            else:
                self.noted.close()

    observer = Noting()
    rows = torch.ones(2 * (ENOUGH + 5), 4)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[AmpkitCallback(graph="emulate"), observer],
    )
    trainer.fit(Net(), DataLoader(TensorDataset(rows, rows), batch_size=2))
    return observer.moves


if __name__ == "__main__":
    for title, road in (("a call of graphed_step", road_of_a_call()), ("a batch of a Trainer", road_of_a_batch())):
        print(f"{title}: {len({move.file for move in road})} files, {len(road)} moves", *road, "", sep="\n")
