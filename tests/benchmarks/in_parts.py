"""Steps with a line that no graph can hold: torch AMP, ampkit all eager, and ampkit in parts; bits and milliseconds.

    python tests/benchmarks/in_parts.py                     on a GPU, under 120 s
    python tests/benchmarks/in_parts.py --graph emulate     without a GPU: outcomes and bits alone

Each row trains a small model with random weights. Losses, parameters, buffers, optimizer state and random state of the
run in parts are compared bit by bit with those of an eager run, under deterministic algorithms where all operations
have such a form. The outcome is that of the run that is timed. The times are of one step, between two waits for the
device: the median of the repeats, the smallest and the largest. Nothing is downloaded. A row whose library is missing
says so.
"""

import argparse
import copy
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import zoo
import zoo_models
import zoo_small
import zoo_transformers
from torch import Tensor, nn
from zoo_models import Batch, Row, adamw

import ampkit

STEPS = 24  # 3 of warm-up, 3 that are looked at, 5 that are timed, 2 that capture, 5 that are timed, more
REPEATS = 5
SECONDS = 0.25  # of steps per repeat
WIDTH = 256


class Speech(nn.Module):
    """A small encoder of sound: convolutions and a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Sequential(
            nn.Conv1d(80, WIDTH, 3, 2, 1), nn.GELU(), nn.Conv1d(WIDTH, WIDTH, 3, 2, 1), nn.GELU(), nn.Dropout(0.1)
        )
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, sounds: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.into(sounds).transpose(1, 2)))
        return logits.transpose(1, 2)


def speech(made: torch.Generator) -> Batch:
    labels = torch.randint(1, 32, (8, 12), generator=made)
    return {"sounds": torch.randn(8, 80, 200, generator=made), "labels": labels}


class Field(nn.Module):
    """The right hand side of a differential equation, of a size at which a call has a dozen kernels."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (4, 64, 64, 64, 64, 4)
        pairs = [(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
        self.net = nn.Sequential(*[layer for pair in pairs for layer in pair][:-1])

    def forward(self, moment: Tensor, state: Tensor) -> Tensor:
        slope: Tensor = self.net(state)
        return slope


class Reads(nn.Module):
    """A deep perceptron that reads one number in the middle."""

    def __init__(self) -> None:
        super().__init__()
        half = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU())]
        self.first, self.second = nn.Sequential(*half), nn.Sequential(*copy.deepcopy(half))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images)
        scale = hidden.detach().float().abs().mean().item()
        logits: Tensor = self.head(self.second(hidden / max(scale, 1e-3)))
        return logits


def vectors(made: torch.Generator) -> Batch:
    return {"images": torch.randn(64, WIDTH, generator=made), "labels": torch.randint(10, (64,), generator=made)}


def uncached(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return what makes the same model of transformers without a cache of keys and values."""

    def make() -> nn.Module:
        model: Any = build()
        model.config.use_cache = False
        return model

    return make


def flat() -> nn.Module:
    """A perceptron in one flat `nn.Sequential`, in whose middle a module reads a number."""
    half = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU())]
    return nn.Sequential(*half, Reading(), *copy.deepcopy(half), nn.Linear(WIDTH, 10))


class Reading(nn.Module):
    """Divides by a number that the host reads."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden / max(hidden.detach().float().abs().mean().item(), 1e-3)


def rows() -> dict[str, Row]:
    as_numbers = zoo_small.align(lambda number, value, device: (value,) * number)
    mixtral = next(row for name, row in zoo_transformers.ROWS.items() if "mixtral" in name.lower())
    return {
        "MLP, one .item()": Row("torch", Reads, vectors, zoo_models.classify),
        "flat nn.Sequential, one .item()": Row("torch", flat, vectors, zoo_models.classify),
        "CTC, lengths in a tuple": Row("torch", Speech, speech, as_numbers),
        "RetinaNet": Row("torchvision", zoo_models.small_retinanet, zoo_models.boxes, zoo_models.detect),
        "GCN": zoo_small.ROWS["torch_geometric/GCN"],
        "torchdiffeq rk4": Row("torchdiffeq", Field, zoo_small.trajectory, zoo_small.solve("rk4"), policy="float32"),
        "Mixtral, float32": replace(mixtral, policy="float32"),
        "Mixtral, float32, use_cache=False": replace(mixtral, policy="float32", build=uncached(mixtral.build)),
    }


def torch_amp(subject: zoo.Subject) -> Callable[[], object]:
    """Return a step as torch's documentation writes it."""
    row, device = subject.row, subject.device
    model = copy.deepcopy(subject._start).to(device)
    optimizer, batch = adamw(model), subject.batch(0)
    low = None if row.policy == "float32" else getattr(torch, row.policy)

    def step() -> None:
        optimizer.zero_grad()
        with nullcontext() if low is None else torch.autocast(device, dtype=low):
            loss = row.loss(model, **batch)
        loss.backward()
        optimizer.step()

    return step


def milliseconds(step: Callable[[], object], warm_up: int) -> list[float]:
    """Return the time of a step in each repeat."""

    def seconds(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(warm_up)
    count = max(3, int(SECONDS / (seconds(5) / 5)))
    return [1e3 * seconds(count) / count for _ in range(REPEATS)]


def ampkit_ms(subject: zoo.Subject, **options: Any) -> tuple[list[float], ampkit.Report]:
    training, batch = subject._training(options), subject.batch(0)
    times = milliseconds(lambda: training.step(**batch), STEPS)
    report = training.step.report()
    training.step.close()
    return times, report


def shown(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"


def measured(row: Row, graph: str) -> str:
    """Return the line of a row."""
    device = "cuda" if graph == "auto" else "cpu"
    subject = zoo.Subject(row, device)
    checked = zoo.check(subject, graph, STEPS)
    text = f"bits {checked['bits']} in {STEPS} calls, {checked['in_parts']} of them in parts"
    if not checked["deterministic"]:
        text += " (an operation has no deterministic form)"
    if graph != "auto":
        return f"{checked['outcome']}; {text}"
    amp = milliseconds(torch_amp(subject), 10)
    eager, _ = ampkit_ms(subject, graph="off")
    parts, report = ampkit_ms(subject)
    # Both runs decide by times whether parts are given up, so they may decide differently where the times are close.
    if report.outcome != checked["outcome"]:
        text += f", and {checked['outcome']} behind these ({'; '.join(checked['not_in_parts'])})"
    text += f"; ms: torch AMP {shown(amp)}, ampkit eager {shown(eager)}, by default {shown(parts)}"
    return f"{report.outcome}; {text}\n{report}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--graph", choices=("auto", "emulate"), default="auto")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of rows")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    for name, row in rows().items():
        if args.only and not any(part in name for part in args.only):
            continue
        start = time.perf_counter()
        try:
            text = measured(row, args.graph)
        except ImportError as error:
            text = f"not installed: {error.name}"
        print(f"{name}: {text}\n  [{time.perf_counter() - start:.0f} s]", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
