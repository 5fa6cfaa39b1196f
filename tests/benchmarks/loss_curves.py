"""The loss curve of a captured step next to eager ones, and how far they are apart.

    python tests/benchmarks/loss_curves.py 500 --plot curves.png
    python tests/benchmarks/loss_curves.py 500 --model resnet50 -b 32 --policy bfloat16 --json curves.json

It trains a model of `python -m ampkit bench`, or that of a function as `bench --model` takes it.
"""

import argparse
import itertools
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from draw_bench import figure_class
from torch import Tensor

from ampkit._commands.bench.arguments import jobs_of, usual_policy
from ampkit._commands.bench.cases import BATCH, BATCHES, INPUTS, Case, ready
from ampkit._commands.bench.measure import describe
from ampkit._commands.bench.process import clean_up, fast_kernels, little_garbage
from ampkit._commands.bench.report import without_nan
from ampkit._commands.bench.session import Plan
from ampkit._commands.bench.variants import VARIANTS, Setting
from ampkit._commands.output import policy
from ampkit._errors import UsageError

COUNT = 64  # number of different batches, used again and again
WINDOW = 25  # number of steps over which curves are averaged before they are compared

# Name, variant, seed. The second run shows what nondeterministic kernels change, the third what another seed changes.
_RUNS = (
    ("torch AMP, eager", "amp", 0),
    ("the same again", "amp", 0),
    ("torch AMP, eager, other seed", "amp", 1),
    ("graphed_step", "graphed", 0),
)


@dataclass(frozen=True)
class Curves:
    """The losses of each run, step by step.

    Attributes:
        setting: device, versions, date, policy, command, by name.
        model: the name of the model.
        batch: the batch size.
        losses: by the name of the run.
    """

    setting: dict[str, Any]
    model: str
    batch: int
    losses: dict[str, list[float]]

    def distance(self, left: str, right: str) -> float:
        """Return the mean distance of two curves, both averaged over `WINDOW` steps."""
        a, b = (smooth(self.losses[name]) for name in (left, right))
        return float((a - b).abs().mean())

    def distances(self) -> dict[str, float]:
        """Return the distance of each run from the first."""
        first, *others = self.losses
        return {name: self.distance(first, name) for name in others}

    def within_noise(self) -> bool:
        """Return whether the captured run is no further from the eager one than an eager run with another seed."""
        distances = self.distances()
        return distances["graphed_step"] <= distances["torch AMP, eager, other seed"]

    def __str__(self) -> str:
        steps = len(next(iter(self.losses.values())))
        rows = [f"  {name:<30} {distance:.5f}" for name, distance in self.distances().items()]
        verdict = "graphed_step lies within the noise of two eager seeds."
        return "\n".join(
            [
                f"{self.setting['device']}, torch {self.setting['torch']}, {self.setting['policy']}",
                f"{self.model}, batch {self.batch}, {steps} steps: mean distance of the loss, averaged over "
                f"{min(WINDOW, steps)} steps, from that of torch AMP, eager:",
                *rows,
                verdict if self.within_noise() else verdict.replace("lies within", "does NOT lie within"),
            ]
        )

    def to_json(self) -> str:
        """Return the curves as JSON. Where a loss is nan, it and its distances are null."""
        parts = {"model": self.model, "batch": self.batch, "distances": self.distances(), "losses": self.losses}
        return json.dumps(without_nan({**self.setting, **parts}), indent=2, allow_nan=False) + "\n"


def run(model: str, make: Callable[..., Case], setting: Setting, described: dict[str, Any]) -> Curves:
    """Train the runs of `_RUNS` for `setting.schedule` steps each, and return their losses.

    Args:
        model: the name of the case.
        make: makes the case, called with `seed=` and `count=` (the number of batches).
        setting: policy, device, input, and number of steps.
        described: the setting by name, for the results.
    """
    losses = {}
    with fast_kernels(setting.device), little_garbage():
        for name, variant, seed in _RUNS:
            case = ready(make(seed=seed, count=COUNT), setting.policy.params, setting.device, setting.source)
            losses[name] = _losses(VARIANTS[variant].build(case, setting).train, case, setting.schedule)
            clean_up(setting.device)
    return Curves(described, model, case.batch_size, losses)


def _losses(train: Callable[..., None], case: Case, steps: int) -> list[float]:
    taken: list[Tensor] = []
    train(itertools.islice(itertools.cycle(case.batches), steps), lambda loss: taken.append(loss.detach().clone()))
    return [float(loss) for loss in torch.stack(taken).float().cpu()]


def smooth(losses: Sequence[float]) -> Tensor:
    """Return the moving average over `WINDOW` losses, or over all losses if there are fewer."""
    return torch.tensor(losses, dtype=torch.float64).unfold(0, min(WINDOW, len(losses)), 1).mean(1)


def draw(curves: Curves, path: Path) -> None:
    """Draw the curves into an image file: losses as thin lines, averages as thick ones.

    Raises:
        FiguresError: if matplotlib is not installed, or cannot write this kind of file.
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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=int, help="how many steps each run has")
    parser.add_argument("--model", default="resnet18-cifar", help="as `python -m ampkit bench` takes it")
    parser.add_argument("-b", "--batch", type=int, help="the batch size")
    parser.add_argument("--policy", type=policy, help="dtypes; default: float16, on a CPU bfloat16")
    parser.add_argument("--input", choices=INPUTS, default="prefetch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the losses to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses into this image file")
    args = parser.parse_args(argv)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    setting = Setting(args.policy or usual_policy(device), device, args.input, args.steps)
    command = shlex.join(["python", "tests/benchmarks/loss_curves.py", *(sys.argv[1:] if argv is None else argv)])
    try:
        if args.plot is not None:
            figure_class(args.plot)  # check before training that it can be drawn
        (job,) = jobs_of(args.model, [args.batch or BATCHES.get(args.model, BATCH)])
        curves = run(args.model, job.make, setting, describe(setting, Plan(), command))
    except UsageError as error:
        sys.exit(f"{parser.prog}: error: {error}")
    print(curves)
    if args.json is not None:
        args.json.write_text(curves.to_json())
    if args.plot is not None:
        draw(curves, args.plot)


if __name__ == "__main__":
    main()
