"""Whether training goes the same way: loss curves of a captured step beside eager ones, and how far apart they are."""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .cases import Case, ready
from .plot import figure_class
from .process import clean_up, fast_kernels, little_garbage
from .report import without_nan
from .variants import VARIANTS, Setting

BATCHES = 64  # different ones, cycled
WINDOW = 25  # steps that are averaged before curves are compared

# Name, variant, seed. The second and the third differ from the first by what kernels leave open, and by the seed.
_RUNS = (
    ("torch AMP, eager", "amp", 0),
    ("the same again", "amp", 0),
    ("torch AMP, eager, other seed", "amp", 1),
    ("graphed_step", "graphed", 0),
)


@dataclass(frozen=True)
class Curves:
    """The losses of each run by step.

    Attributes:
        setting: device, versions, date, policy, command, by name.
        model: what was trained.
        batch: its batch size.
        losses: by name of the run.
    """

    setting: dict[str, Any]
    model: str
    batch: int
    losses: dict[str, list[float]]

    def distance(self, left: str, right: str) -> float:
        """Return how far two curves are apart: the mean difference of their averages over `WINDOW` steps."""
        a, b = (smooth(self.losses[name]) for name in (left, right))
        return float((a - b).abs().mean())

    def distances(self) -> dict[str, float]:
        """Return the distance of each other run from the first."""
        first, *others = self.losses
        return {name: self.distance(first, name) for name in others}

    def within_noise(self) -> bool:
        """Return whether the captured run is no further from the eager one than that is from another seed."""
        distances = self.distances()
        return distances["graphed_step"] <= distances["torch AMP, eager, other seed"]

    def __str__(self) -> str:
        steps = len(next(iter(self.losses.values())))
        told = [f"  {name:<30} {distance:.5f}" for name, distance in self.distances().items()]
        verdict = "graphed_step lies within the noise of two eager seeds."
        return "\n".join(
            [
                f"{self.setting['device']}, torch {self.setting['torch']}, {self.setting['policy']}",
                f"{self.model}, batch {self.batch}, {steps} steps: mean distance of the loss, averaged over "
                f"{min(WINDOW, steps)} steps, from that of torch AMP, eager:",
                *told,
                verdict if self.within_noise() else verdict.replace("lies within", "does NOT lie within"),
            ]
        )

    def to_json(self) -> str:
        """Return it as text for a file, with null for a loss that is nan, and for a distance from it."""
        parts = {"model": self.model, "batch": self.batch, "distances": self.distances(), "losses": self.losses}
        return json.dumps(without_nan({**self.setting, **parts}), indent=2, allow_nan=False) + "\n"


def run(model: str, make: Callable[..., Case], setting: Setting, described: dict[str, Any]) -> Curves:
    """Train as long as the schedule says eagerly, again, from another seed, and captured; return all losses.

    Args:
        model: what to call the case.
        make: makes it, called with `seed=` and `count=` (of batches).
        setting: policy, device, input, and how many steps.
        described: goes into the results.
    """
    losses = {}
    with fast_kernels(setting.device), little_garbage():
        for name, variant, seed in _RUNS:
            case = ready(make(seed=seed, count=BATCHES), setting.policy.params, setting.device, setting.source)
            losses[name] = _losses(VARIANTS[variant].build(case, setting).train, case, setting.schedule)
            clean_up(setting.device)
    return Curves(described, model, case.batch_size, losses)


def _losses(train: Callable[..., None], case: Case, steps: int) -> list[float]:
    taken: list[Tensor] = []
    train(itertools.islice(itertools.cycle(case.batches), steps), lambda loss: taken.append(loss.detach().clone()))
    return [float(loss) for loss in torch.stack(taken).float().cpu()]


def smooth(losses: Sequence[float]) -> Tensor:
    """Return the means of all runs of `WINDOW` losses, of all losses where there are fewer."""
    return torch.tensor(losses, dtype=torch.float64).unfold(0, min(WINDOW, len(losses)), 1).mean(1)


def draw(curves: Curves, path: Path) -> None:
    """Draw the curves into an image file: each loss thin, averages thick.

    Raises:
        FiguresError: matplotlib is not installed, or writes no such file.
    """
    figure = figure_class(path)(figsize=(8, 4.2), dpi=130, layout="constrained")
    axes = figure.subplots()
    for i, (name, losses) in enumerate(curves.losses.items()):
        means = smooth(losses).tolist()
        first = len(losses) - len(means) + 1
        axes.plot(range(1, len(losses) + 1), losses, color=f"C{i}", linewidth=0.5, alpha=0.35)
        axes.plot(range(first, len(losses) + 1), means, color=f"C{i}", linestyle=["-", ":", "-", "--"][i], label=name)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"training loss; thick: mean of {WINDOW} steps")
    axes.set_title(
        f"{curves.model}, batch {curves.batch}, {curves.setting['device']}, torch {curves.setting['torch']}",
        fontsize=10,
    )
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path)
