"""Public models under one line of graphed_step, as a table: captured or not, eager's bits or not, and how fast.

    python tests/benchmarks/zoo.py --shard 1/8 --json FILE     every 8th row, on a GPU; goes on where FILE ends
    python tests/benchmarks/zoo.py --graph emulate --only timm/resnet18 'torch/*'    without a GPU
    python tests/benchmarks/zoo.py --table FILE [FILE ...]     prints the markdown table from such files
    python tests/benchmarks/zoo.py --table FILE ... --write docs/models.md    writes it there, without zoo_unseen.py

Each row trains a small model with default flags and random weights for a few steps, once with `graph="off"` and once
with the default flags of graphed_step, from one seed and under deterministic algorithms, and compares losses,
parameters, buffers, optimizer state and random state bit by bit. Nothing is downloaded.

Code that asks whether it is being captured may be told so from some call on. Such a row is compared with eager steps
that are told so from the first call on, in a second pair of runs if it was not told so from there itself.
"""

import argparse
import copy
import fnmatch
import gc
import importlib.metadata
import json
import math
import os
import random
import re
import statistics
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import foreign_models
import marked
import numpy
import torch
import zoo_models
import zoo_small
import zoo_transformers
import zoo_unseen
from marked import cells
from models import State, differing, distance, repeatable
from torch import Tensor
from zoo_models import Batch, Row, Training

import ampkit

ROWS: dict[str, Row] = {**zoo_models.ROWS, **zoo_transformers.ROWS, **zoo_small.ROWS, **zoo_unseen.ROWS}
STEPS = 9  # 3 of warm-up, or 4 where the preflight looks twice
LONGER = 4  # times as many, where nothing was captured for no reason
REPEATS = 5
SECONDS = 0.15  # of steps per repeat
MARK = "zoo.py --table"  # the block of docs/models.md
DEVICE_LOST = 3  # exit code: the process can do nothing more with its GPU


# ---------------------------------------------------------------------------------------------------------------- train


class Subject:
    """The model of a row, with the same weights and batches in each run."""

    def __init__(self, row: Row, device: str) -> None:
        self.row, self.device = row, device
        with seeded(0):
            self._start = row.build().train()

    def _training(self, options: dict[str, Any]) -> Training:
        """Return a step over a copy of the model, moved to the device as users do."""
        return self.row.training(copy.deepcopy(self._start).to(self.device), options)

    def batch(self, seed: int) -> Batch:
        made = self.row.sample(torch.Generator().manual_seed(seed))
        return {name: tensor.to(self.device) for name, tensor in made.items()}

    def train(self, steps: int, **options: Any) -> tuple[State, ampkit.Report]:
        """Train from the seed; return losses, state and random state, and the step's report."""
        training = self._training(options)
        with seeded(5):
            losses = [loss_of(training.step(**self.batch(seed))) for seed in range(steps)]
            state = {"losses": torch.stack(losses).float(), **random_state(self.device)}
        for part, module in training.modules.items():
            tensors = [*module.named_parameters(), *module.named_buffers()]
            state |= {f"{part}.{name}": tensor.detach().clone() for name, tensor in tensors}
        for i, optimizer in enumerate(training.optimizers):
            for j, values in enumerate(optimizer.state.values()):
                numbers = {name: value for name, value in values.items() if isinstance(value, Tensor | int | float)}
                of = f"of parameter {j} of optimizer {i}"
                state |= {f"{name} {of}": torch.as_tensor(value).clone() for name, value in numbers.items()}
        report = training.step.report()
        training.step.close()
        return {name: tensor for name, tensor in state.items() if tensor.numel()}, report

    def milliseconds(self, **options: Any) -> list[float]:
        """Return the time of a step in each repeat, on one batch that stays on the GPU."""
        training, batch = self._training(options), self.batch(0)
        times = foreign_models.repeats(lambda: training.step(**batch), REPEATS, SECONDS)
        training.step.close()
        return times


def loss_of(returned: Any) -> Tensor:
    """Return what a step returned as one tensor: its loss, or the losses of a graphed function."""
    if isinstance(returned, tuple) and not hasattr(returned, "loss"):
        return torch.stack([loss.detach() for loss in returned])
    loss: Tensor = returned.loss.detach().clone()
    return loss


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators that a model may draw from; those of Python and numpy are then as they were."""
    before = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])


def random_state(device: str) -> State:
    """Return the states of these generators as tensors."""
    _, keys, position, *_ = numpy.random.get_state()
    state = {
        "cpu random state": torch.get_rng_state(),
        "random state of Python": torch.tensor(random.getstate()[1]),
        "random state of numpy": torch.tensor([*keys.tolist(), position]),
    }
    return state | ({"cuda random state": torch.cuda.get_rng_state()} if device == "cuda" else {})


# ---------------------------------------------------------------------------------------------------------------- check


def check(subject: Subject, graph: str, steps: int) -> dict[str, Any]:
    """Compare a graphed run with an eager one under deterministic algorithms; where they differ, eager with itself."""
    try:
        return _check(subject, graph, steps, strict=True)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
    return _check(subject, graph, steps, strict=False)  # an operation has no deterministic form


def _check(subject: Subject, graph: str, steps: int, strict: bool) -> dict[str, Any]:
    with repeatable(strict):
        eager, _ = subject.train(steps, graph="off")
        graphed, report = subject.train(steps, graph=graph)
        told: dict[str, bool] = {} if report.told_since is None else {"capturing": True}
        if told:
            eager, _ = subject.train(steps, graph="off", **told)
        if told and report.told_since != 1:
            graphed, _ = subject.train(steps, graph=graph, **told)
        names = differing(graphed, eager)
        again = subject.train(steps, graph="off", **told)[0] if names or not strict else eager
    noise = distance(again, eager) if differing(again, eager) else 0.0
    return {
        "outcome": report.outcome,
        "bits": "equal" if not names else "eager differs" if noise else "differs",
        "distance": distance(graphed, eager) if names else 0.0,
        "eager_distance": noise,
        "differing": names[:5],
        "deterministic": strict,
        "compared": "as told" if told and report.told_since == 1 else "capturing=True" if told else "default",
        "last_loss": float(graphed["losses"][-1].mean()),
        "captures": report.captures,
        "replays": report.replays,
        "in_parts": report.in_parts,
        "not_in_parts": [text for text in report.split if text.startswith("not in parts")],
        "told_since": report.told_since,
        "in_the_way": in_the_way(report.failure or "\n".join(report.split)),
        "failure": report.failure,
        "eager_optimizer": report.eager_optimizer,
    }


def in_the_way(failure: str | None) -> str | None:
    """Return the first line of the user's code that the message names, as package/file.py:number."""
    found = re.search(r"(\S+\.py):(\d+)", failure or "")
    return f"{short(found[1])}:{found[2]}" if found else None


def short(file: str) -> str:
    """Return a file relative to where Python imports its package from."""
    listed = {path for folder in sys.path if folder for path in (folder, str(Path(folder).resolve()))}
    folders = sorted(listed, key=len, reverse=True)
    inside = [folder for folder in folders if file.startswith(folder + os.sep)]
    return file[len(inside[0]) + 1 :] if inside else Path(file).name


def speed(subject: Subject, graph: str) -> dict[str, Any]:
    """Return milliseconds per step, eager and graphed: the median of the repeats, the smallest and the largest."""
    found: dict[str, Any] = {}
    for name, kind in (("eager", "off"), ("graphed", graph)):
        times = subject.milliseconds(graph=kind)
        found[f"{name}_ms"] = round(statistics.median(times), 3)
        found[f"{name}_range_ms"] = [round(min(times), 3), round(max(times), 3)]
    return found


def measure(
    name: str, graph: str, device: str, steps: int = STEPS, timed: bool = False, policy: str = ""
) -> dict[str, Any]:
    """Return the row of one model. A model that cannot be built or trained has an `error` in place of a verdict.

    Args:
        name: in ROWS.
        graph: of graphed_step.
        device: "cuda", or "cpu".
        steps: of each run.
        timed: whether to take times too.
        policy: the precision; "" for the one of the row.
    """
    row = replace(ROWS[name], policy=policy or ROWS[name].policy)
    found: dict[str, Any] = {"name": name, "library": row.library, "version": None, "policy": row.policy}
    found |= {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__}
    found |= {"graph": graph, "note": row.note}
    try:
        found["version"] = importlib.metadata.version(row.library)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            subject = Subject(row, device)
            found |= check(subject, graph, steps)
            if found["outcome"] == "eager" and place_text(found) == "":
                found |= check(subject, graph, LONGER * steps)  # draws decide, and each outcome has a warm-up
            if timed:
                found |= speed(subject, graph)
    except Exception as error:  # the table goes on
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = (str(error).splitlines() or [""])[0]
        found["error"] = f"{type(error).__name__}: {text} ({short(place.filename)}:{place.lineno})"
    return found


# ---------------------------------------------------------------------------------------------------------------- table


def bits_text(row: dict[str, Any]) -> str:
    """Return how the bits of the graphed run compare with those of the eager run."""
    with_told = {"capturing=True": "; both with capturing=True", "as told": "; eager with capturing=True"}
    text = {
        "equal": "equal",
        "differs": f"differs by {row['distance']:.1e}",
        "eager differs": f"eager itself differs by {row['eager_distance']:.1e} (graphed by {row['distance']:.1e})",
    }[row["bits"]]
    vacuous = "" if math.isfinite(row["last_loss"]) else "; the loss is not finite"
    return text + with_told.get(row["compared"], "") + vacuous


def place_text(row: dict[str, Any]) -> str:
    """Return the line that stands in the way of a graph, or else the first sentence of the reason."""
    if row["in_the_way"]:
        return f"`{row['in_the_way']}`"
    if reason := row["failure"] or row["eager_optimizer"]:
        return str(reason).split(". ")[0].split("\n")[0].removesuffix(".")
    return f"nothing, once told that it is captured (call {row['told_since']})" if row["told_since"] else ""


def times_text(row: dict[str, Any]) -> str:
    if "eager_ms" not in row:
        return ""
    texts = []
    for name in ("eager", "graphed"):
        low, high = row[f"{name}_range_ms"]
        texts.append(f"{row[f'{name}_ms']:.2f} ({low:.2f} to {high:.2f})")
    return f"{texts[0]} | {texts[1]} | {row['eager_ms'] / row['graphed_ms']:.2f}"


def line(row: dict[str, Any]) -> str:
    """Return what is printed of a row when it is done."""
    texts = [row["error"]] if "error" in row else [row["outcome"], bits_text(row), place_text(row), times_text(row)]
    return f"{row['name']}: {', '.join(text for text in texts if text)}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return sentences that count the rows, and two sections with a table: of the rows with times, and of all rows."""
    rows = sorted(rows, key=lambda row: str(row["name"]))
    timed = [row for row in rows if "eager_ms" in row]
    times = ["## Times", "", "| model | eager, ms (range) | graphed, ms (range) | times as fast |", "|---|---|---|---|"]
    times += [cells(shown(row), *times_text(row).split(" | ")) for row in timed]
    outcomes = ["## All rows", "", "| model | in a graph | bits | what stands in the way |", "|---|---|---|---|"]
    for row in rows:
        if "error" in row:
            known = ("not trained", "", row["error"])
        else:
            known = (row["outcome"], bits_text(row), place_text(row))
        outcomes.append(cells(shown(row), *known))
    return "\n".join([summary(rows), *(["", *times] if timed else []), "", *outcomes])


def shown(row: dict[str, Any]) -> str:
    """Return the name of the row, with its precision where that is one word and not bfloat16, and its note."""
    precision = "" if row["policy"] == "bfloat16" or "=" in row["policy"] else row["policy"]
    about = ", ".join(filter(None, (precision, row["note"])))
    return row["name"] + (f" ({about})" if about else "")


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return how many rows had which outcome, with which bits."""
    trained = [row for row in rows if "error" not in row]
    outcomes = [f"{sum(row['outcome'] == kind for row in trained)} {kind}" for kind in ("whole", "in parts", "eager")]
    bits = [sum(row["bits"] == kind for row in trained) for kind in ("equal", "eager differs", "differs")]
    libraries = sorted({f"{row['library']} {row['version']}" for row in trained})
    return (
        f"{len(rows)} rows, {len(rows) - len(trained)} that could not be trained. In a graph: {', '.join(outcomes)}. "
        f"Bits: {bits[0]} equal, {bits[1]} where eager itself differs, {bits[2]} that differ. "
        f"{', '.join(sorted({row['device'] for row in rows}))}; {', '.join(libraries)}."
    )


def read(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the rows in these files, the last one of each name; a line that was cut off is left out."""
    found: dict[str, dict[str, Any]] = {}
    for text in (text for file in files if file.exists() for text in file.read_text().splitlines()):
        try:
            row = json.loads(text)
        except json.JSONDecodeError:
            continue
        found[row["name"]] = row
    return list(found.values())


def append(file: Path, row: dict[str, Any]) -> None:
    """Add a line for this row, behind a line that was cut off if there is one."""
    cut_off = file.exists() and not (file.read_text() or "\n").endswith("\n")
    with file.open("a") as lines:
        lines.write("\n" * cut_off + json.dumps(row) + "\n")


# ----------------------------------------------------------------------------------------------------------------- main


def chosen(only: Sequence[str], shard: str) -> list[str]:
    """Return the names of the rows that match one of the patterns, of these the ones of the shard."""
    names = [name for name in ROWS if not only or any(fnmatch.fnmatchcase(name, pattern) for pattern in only)]
    part, parts = (int(number) for number in shard.split("/"))
    if not 1 <= part <= parts:
        raise ValueError(f"--shard {shard}: expected a number from 1 to {parts} before the slash.")
    return names[part - 1 :: parts]


def device_lost() -> bool:
    """Return whether an error has left this process without its GPU."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return bool(torch.ones(1, device="cuda").item() != 1)
    except RuntimeError:
        return True


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="rows of these names or patterns")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="every Nth row, from the Ith on")
    parser.add_argument("--graph", choices=["auto", "emulate", "off"], default="auto", help="of graphed_step")
    parser.add_argument("--policy", default="", help="the precision of all rows, in place of their own")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of the comparison, more than 4")
    parser.add_argument("--no-speed", action="store_true", help="check the bits alone; as without a GPU")
    parser.add_argument("--json", metavar="FILE", type=Path, help="append one line per row; rows in it are skipped")
    parser.add_argument("--table", nargs="+", metavar="FILE", type=Path, help="print the table of these files, and end")
    parser.add_argument("--write", metavar="PAGE", type=Path, help="with --table: write it into this page instead")
    parser.add_argument("--list", action="store_true", help="print the names of the rows, and end")
    args = parser.parse_args(argv)
    if args.table:
        rows = read(args.table)
        if args.write:
            marked.write(args.write, MARK, table([row for row in rows if row["name"] not in zoo_unseen.ROWS]))
        else:
            print(table(rows))
        return 0
    names = chosen(args.only, args.shard)
    if args.list:
        print("\n".join(names))
        return 0
    if not names:
        parser.error(f"no row matches {' '.join(args.only)}. Pass --list for the names.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and args.graph == "auto":
        parser.error("torch finds no CUDA device here. Pass --graph emulate.")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first use of cuBLAS
    done = {row["name"]: row for row in read([args.json] if args.json else [])}
    rows = [done[name] for name in names if name in done]
    for name in (name for name in names if name not in done):
        timed = device == "cuda" and not args.no_speed
        row = measure(name, args.graph, device, args.steps, timed, args.policy)
        gc.collect()
        lost = device == "cuda" and device_lost()
        print(line(row), flush=True)
        rows.append(row)
        if args.json:
            append(args.json, row)
        if lost:
            print("The GPU answers no more in this process. Run the command again to go on with the next row.")
            return DEVICE_LOST
    print(summary(rows))
    return 1 if any(row.get("bits") == "differs" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
