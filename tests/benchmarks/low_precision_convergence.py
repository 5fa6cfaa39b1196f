"""Training in low precision beside float32: the losses of a GPT, 2,000 steps, several seeds of each way to train it.

    PYTHONPATH=. python tests/benchmarks/low_precision_convergence.py --plot curves.svg --json curves.json
    PYTHONPATH=. python tests/benchmarks/low_precision_convergence.py --only kahan 8-bit --seconds 200
    PYTHONPATH=. python tests/benchmarks/low_precision_convergence.py --small    tiny, on a CPU: does it run

The model is a Llama of width 2048 whose Linear layers, but the head, can be float8. It learns the source of Python's
standard library. With one seed, all ways have the same initial weights, batches and learning rates. The rate is that of
GPT-3 with 175 billion parameters, and like there it falls to a tenth: an update of AdamW is a part of the rate, and
half the distance of bfloat16 numbers is 6e-5 where a weight is 0.02, so that rounding to nearest undoes most updates.
Each step is one of `ampkit.graphed_step`, without torch.compile but for the update of 8-bit states, which torchao
compiles itself.

Each way and seed has a process of its own, many at once on each GPU. It writes its losses to a file in --folder as it
goes. What is in this folder already is not trained again, so that a run that was cut goes on where --only, or the same
command, is given again; a training that was cut begins anew.

Loss on held-out text is that of the weights after the last step. The distance of a way is the mean over its seeds less
that of float32 or bfloat16, in units of the spread: the standard deviation between seeds, over all ways. Two seeds
differ in weights and batches, and two ways with one seed in neither, so a distance within 2 is no difference.
"""

import argparse
import functools
import itertools
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from draw_bench import figure_class
from float8_layers import Llama, Width
from lengths import texts
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit
from ampkit._errors import UsageError
from ampkit._precision.float8 import RECIPES
from ampkit._precision.module_rules import float8_layers

CHUNK = 20  # steps between two lines of a file, and between two points of the curves
LAST = 100  # steps whose mean is the training loss
MAX_NORM = 1.0


class Size(NamedTuple):
    """How much is trained."""

    model: Width  # with the batch
    steps: int
    rate: float
    held_out: int  # batches


GPT3_RATE = 6e-5  # table 2.1 of arXiv:2005.14165
LARGE = Size(Width(2048, 2048, 16, 2, 2048, 8, 128), 2000, GPT3_RATE, 64)
SMALL = Size(Width(64, 64, 2, 2, 64, 2, 16), 60, 3e-3, 4)


def adamw_8bit(params: Any, **options: Any) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, **options)


class Way(NamedTuple):
    """How a model is trained."""

    policy: ampkit.Policy
    moments: str | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = functools.partial(torch.optim.AdamW, fused=True)


def in_float8(recipe: str) -> Way:
    return Way(ampkit.Policy(compute="bfloat16", modules={r"blocks\.\d+": recipe}))


def in_bfloat16(rounding: str | None) -> Way:
    return Way(ampkit.Policy(params="bfloat16", compute="bfloat16", rounding=rounding))


WAYS = {
    "float32": Way(ampkit.Policy()),
    "bfloat16": Way(ampkit.Policy.parse("bfloat16")),
    "float8-tensorwise": in_float8("float8_tensorwise"),
    "float8-rowwise": in_float8("float8_rowwise"),
    "stochastic": in_bfloat16("stochastic"),
    "kahan": in_bfloat16("kahan"),
    "plain-bfloat16": in_bfloat16(None),
    "moments": Way(ampkit.Policy.parse("bfloat16"), moments="bfloat16"),
    "8-bit": Way(ampkit.Policy.parse("bfloat16"), optimizer=adamw_8bit),
}
REFERENCES = ("float32", "bfloat16")
Run = dict[str, Any]  # of one way and seed


def loss_fn(model: Callable[..., Tensor], ids: Tensor) -> Tensor:
    """Return the loss, computed in float32 in all ways."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def initial_model(size: Size, seed: int) -> nn.Module:
    """Return a model on the CPU, whose weights depend on the seed alone."""
    torch.manual_seed(seed)
    model = Llama(size.model)
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.02)
    return model


def batches(text: Tensor, size: Size, seed: int) -> Iterator[Tensor]:
    """Yield pieces of a text from places that depend on the seed alone."""
    length = size.model.length + 1
    starts = torch.randint(
        len(text) - length, (size.steps, size.model.batch, 1), generator=torch.Generator().manual_seed(seed)
    )
    inside = torch.arange(length, device=text.device)
    for places in starts.to(text.device):
        yield text[places + inside]


def share_of_rate(step: int, steps: int) -> float:
    """Return the share of the learning rate: it rises over a twentieth of the steps, and falls to a tenth."""
    rising = steps // 20
    return (
        (step + 1) / rising if step < rising else 0.55 + 0.45 * math.cos(math.pi * (step - rising) / (steps - rising))
    )


def loss_on(text: Tensor, model: nn.Module, policy: ampkit.Policy, size: Size) -> float:
    """Return the loss of a trained model on a text."""
    pieces = text.unfold(0, size.model.length + 1, size.model.length)
    model.eval()
    with torch.no_grad(), policy.autocast(text.device.type):
        found = [loss_fn(model, ids) for ids in pieces.split(size.model.batch)[: size.held_out]]
    return torch.stack(found).double().mean().item()


def train(name: str, seed: int, args: argparse.Namespace) -> None:
    """Train one way with one seed, and write to its file."""
    begun = time.monotonic()
    way, size, device = WAYS[name], args.size, torch.device(args.device)
    text = torch.cat(texts(size.model.vocab, "**/*.py")).to(device)
    held_out = size.held_out * size.model.batch * size.model.length + 1
    model = way.policy.apply(initial_model(size, seed).to(device))
    optimizer = way.optimizer(model.parameters(), lr=size.rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, size.steps))
    step = ampkit.graphed_step(
        loss_fn,
        model,
        optimizer,
        policy=way.policy,
        moments=way.moments,
        max_norm=MAX_NORM,
        scheduler=schedule,
        graph="auto" if device.type == "cuda" else "emulate",
    )
    torch.manual_seed(seed)
    with (args.folder / f"{name}-{seed}.jsonl").open("w", buffering=1) as file:

        def write(**entries: Any) -> None:
            print(json.dumps(entries), file=file)

        write(size=size, tokens=len(text))
        losses: list[Tensor] = []
        for batch in batches(text[:-held_out], size, seed):
            losses.append(step(batch).loss)
            if len(losses) == CHUNK:
                write(losses=torch.stack(losses).tolist())
                losses.clear()
        write(
            held_out=loss_on(text[-held_out:], model, way.policy, size),
            float8_layers=sum(layer.form in RECIPES for layer in float8_layers(model).values()),
            parameters=sum(param.numel() for param in model.parameters()),
            replays=step.replays,
            seconds=round(time.monotonic() - begun, 1),
            report=str(step.report()),
        )
    step.close()


def read(args: argparse.Namespace, name: str, seed: int) -> Run:
    """Return what a process has written so far. Without "held_out", it has not come to its end."""
    file = args.folder / f"{name}-{seed}.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    found: Run = {"losses": []}
    for line in lines:
        if line.endswith("\n"):  # else it was cut
            entries = json.loads(line)
            found["losses"] += entries.pop("losses", [])
            found |= entries
    if "size" in found and found.pop("size") != json.loads(json.dumps(args.size)):
        raise UsageError(f"{file} is of a training of another size. Give another --folder, or delete it.")
    return found


def run_all(args: argparse.Namespace) -> dict[tuple[str, int], str]:
    """Train all ways in processes of their own; return the errors of those that failed or were cut."""
    waiting = [job for job in itertools.product(args.only, args.seeds) if "held_out" not in read(args, *job)]
    places = [f"cuda:{i}" for i in range(args.gpus)] if args.device == "cuda" else ["cpu"]
    free = places * (args.together or math.ceil(len(waiting) / len(places)))
    running: dict[tuple[str, int], tuple[subprocess.Popen[str], str]] = {}
    errors: dict[tuple[str, int], str] = {}
    try:
        while waiting or running:
            while waiting and free:
                place = free.pop(0)
                job = waiting.pop(0)
                running[job] = started(*job, place, args), place
            for job, (process, place) in [*running.items()]:
                if process.poll() is not None:
                    free.append(place)
                    del running[job]
                    if process.returncode != 0:
                        written = (args.folder / "{}-{}.err".format(*job)).read_text().strip().splitlines()
                        errors[job] = written[-1] if written else f"exit status {process.returncode}"
            if time.monotonic() - args.begun > args.seconds:
                break
            time.sleep(0.1)
    except KeyboardInterrupt:
        print("cut", flush=True)
    finally:
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            process.wait()
    return errors | {job: "cut" for job in [*running, *waiting]}


def started(name: str, seed: int, place: str, args: argparse.Namespace) -> "subprocess.Popen[str]":
    options = ["--small"] * args.small + ["--steps", str(args.size.steps), "--rate", str(args.size.rate)]
    command = [sys.executable, __file__, "--train", name, str(seed), "--device", place, "--folder", str(args.folder)]
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ}
    if place == "cpu":
        environment["TORCHDYNAMO_DISABLE"] = "1"  # C++ takes minutes to compile
    with (args.folder / f"{name}-{seed}.err").open("w") as errors:
        return subprocess.Popen([*command, *options], env=environment, stderr=errors, text=True)


def final(run: Run) -> dict[str, float]:
    """Return the two losses that are compared, if there are both."""
    return (
        {"training": statistics.fmean(run["losses"][-LAST:]), "held-out": run["held_out"]} if "held_out" in run else {}
    )


def rows_of(runs: dict[str, dict[int, Run]]) -> list[dict[str, Any]]:
    """Return a row for each way: both losses of each seed, and the distances from float32 and bfloat16."""
    losses = {
        (name, kind): [loss[kind] for run in of_seed.values() if (loss := final(run))]
        for name, of_seed in runs.items()
        for kind in ("training", "held-out")
    }
    rows = []
    for name, of_seed in runs.items():
        layers = {run["float8_layers"] for run in of_seed.values() if "float8_layers" in run}
        row: dict[str, Any] = {"way": name, "steps": min(len(run["losses"]) for run in of_seed.values())}
        row["float8 layers"] = layers.pop() if len(layers) == 1 else None
        for kind in ("training", "held-out"):
            own = row[kind] = losses[name, kind]
            between = [statistics.variance(found) for (_, k), found in losses.items() if k == kind and len(found) > 1]
            spread = math.sqrt(statistics.fmean(between)) if between else 0.0
            for other in REFERENCES:
                theirs = losses.get((other, kind))
                known = own and theirs and spread > 0
                distance = (statistics.fmean(own) - statistics.fmean(theirs)) / spread if known else None
                row[f"{kind} from {other}"] = distance
            row[f"{kind} spread"] = spread
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""

    def shown(value: Any) -> str:
        if isinstance(value, list):
            return ", ".join(f"{loss:.4f}" for loss in value) or "cut"
        return "" if value is None else f"{value:+.1f}" if isinstance(value, float) else str(value)

    titles = [title for title in rows[0] if not title.endswith("spread")]
    lines = [titles, ["---"] * len(titles), *([shown(row[title]) for title in titles] for row in rows)]
    spreads = ", ".join(f"{kind} {rows[0][f'{kind} spread']:.4f}" for kind in ("training", "held-out"))
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    known = rows[0]["training spread"] > 0
    return f"{text}\n\nOne unit of the distances, the standard deviation between seeds: {spreads}." if known else text


def curve(runs: dict[int, Run], window: int) -> list[float]:
    """Return the loss over seeds and windows of steps."""
    steps = min(len(run["losses"]) for run in runs.values()) // window * window
    means = torch.tensor([run["losses"][:steps] for run in runs.values()], dtype=torch.float64).mean(0)
    return [round(loss, 5) for loss in means.unflatten(0, (-1, window)).mean(1).tolist()] if steps else []


def draw(runs: dict[str, dict[int, Run]], title: str, path: Path) -> None:
    """Draw the losses, and how far they are from those of float32, into an image file.

    Raises:
        FiguresError: if matplotlib is not installed, or cannot write this kind of file.
    """
    figure = figure_class(path)(figsize=(9, 4.2), dpi=130, layout="constrained")
    figure.suptitle(title, fontsize=10)
    left, right = figure.subplots(1, 2)
    reference = curve(runs[REFERENCES[0]], CHUNK) if REFERENCES[0] in runs else []
    for i, (name, of_seed) in enumerate(runs.items()):
        losses = curve(of_seed, CHUNK)
        steps = [CHUNK * (n + 1) for n in range(len(losses))]
        left.plot(steps, losses, color=f"C{i}", linewidth=1, label=name)
        apart = [loss - other for loss, other in zip(losses, reference, strict=False)]
        right.plot(steps[: len(apart)], apart, color=f"C{i}", linewidth=1)
    left.set_ylabel(f"training loss, mean of seeds and {CHUNK} steps")
    right.set_ylabel(f"the same, less that of {REFERENCES[0]}")
    for axes in (left, right):
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path, transparent=True)


def report(args: argparse.Namespace, errors: dict[tuple[str, int], str]) -> None:
    """Print the table, and write the files that the user asked for."""
    runs = {name: {seed: read(args, name, seed) for seed in args.seeds} for name in args.only}
    rows = rows_of(runs)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    size = args.size
    title = f"{size.model.layers} blocks of width {size.model.width}, {size.steps} steps of {size.model.batch} x "
    title += f"{size.model.length} tokens, rate {size.rate}, {device}, torch {torch.__version__}"
    print(title, table(rows), sep="\n")
    for job in itertools.product(args.only, args.seeds):
        run = runs[job[0]][job[1]]
        behind = " ".join(line for line in run.get("report", "").splitlines() if "eager behind" in line)
        said = errors.get(job) or behind or "no replay" * (run.get("replays") == 0)
        print(f"{job[0]}, seed {job[1]}: {run.get('seconds')} s, {run.get('replays')} replays. {said}")
    print(f"all: {time.monotonic() - args.begun:.0f} s", flush=True)
    if args.json is not None:
        command = shlex.join(["python", "tests/benchmarks/low_precision_convergence.py", *args.argv])
        content = {"title": title, "command": command, "steps per point": CHUNK, "rows": rows, "curves": {}}
        for name, of_seed in runs.items():
            content["curves"][name] = curve(of_seed, CHUNK)
            content[name] = {seed: {**run, "losses": None} for seed, run in of_seed.items()}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    if args.plot is not None:
        draw(runs, title, args.plot)


def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=[*WAYS], metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="default: all")
    parser.add_argument("--together", type=int, help="processes at once on each GPU; default: all")
    parser.add_argument("--steps", type=int, help="how many steps each training has")
    parser.add_argument("--rate", type=float, help="the highest learning rate")
    parser.add_argument("--small", action="store_true", help="tiny models on a CPU, two at once")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop then, and print what there is")
    parser.add_argument("--folder", type=Path, default=Path("convergence"), help="where the losses are written")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and curves to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves into this image file")
    parser.add_argument("--train", nargs=2, metavar=("WAY", "SEED"), help="train this one in this process")
    args = parser.parse_args(argv)
    args.argv, args.begun = argv, time.monotonic()
    if args.small:
        args.device, args.together = "cpu", args.together or 2
    size = SMALL if args.small else LARGE
    args.size = size._replace(steps=args.steps or size.steps, rate=args.rate or size.rate)
    if args.size.steps % CHUNK:
        parser.error(f"--steps {args.steps}: expected a multiple of {CHUNK}")
    return args


def main(argv: list[str]) -> int:
    args = parsed(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.train:
        warnings.simplefilter("ignore")
        train(args.train[0], int(args.train[1]), args)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if args.plot is not None:
            figure_class(args.plot)  # check before training that it can be drawn
        errors = run_all(args)
        report(args, errors)
    except UsageError as error:
        sys.exit(f"error: {error}")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
