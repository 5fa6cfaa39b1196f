"""Float8 Linear layers: bfloat16, torchao's module swap, and ampkit's choice by timing, each compiled and captured.

    PYTHONPATH=. python tests/benchmarks/float8_layers.py               five layers and five models, on all GPUs
    PYTHONPATH=. python tests/benchmarks/float8_layers.py --rows layer mlp      the cases whose names begin so
    PYTHONPATH=. python tests/benchmarks/float8_layers.py --small --device cpu  tiny ones, emulated: does it run

A case is a model and its batch; a row is one way to train it: milliseconds of a step (median over repeats, least and
most), how many times as fast it is as the other ways (median over repeats of the quotient), peak MiB of the call that
captures and those behind it, layers in float8, the loss behind the warm-up. A line says whether ampkit's row holds what
is demanded of it, and one for each size what it was chosen by. torchao swaps the layers that ampkit considers.

Each row has a process of its own. As many cases as fit the memory of a GPU are set up at once: ampkit's ways call their
step once, which chooses, and then all ways compile and capture. A case is measured when all are ready, its ways in
turns, while the other processes of this GPU wait.
"""

import argparse
import math
import os
import queue
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from lengths import GPT
from processes import remote, serve
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit
from ampkit._commands.bench.process import fast_kernels
from ampkit._precision.float8_layers import PLAIN
from ampkit._precision.module_rules import float8_layers
from tests.benchmarks.models import torchvision_model

# Rows, inputs and outputs: ViT-B's MLP, a Llama of width 2048 and one of width 4096, a BERT, and one that is too small.
SHAPES = [(8192, 768, 3072), (16384, 2048, 8192), (16384, 4096, 14336), (4096, 1024, 4096), (2048, 512, 512)]
WAYS = ("bfloat16", "torchao", "ampkit")
WARM_UP = 8  # calls: the first chooses, one compiles, one is the rehearsal, one captures
NOT_SLOWER = 0.99  # of the speed of bfloat16, and of torchao's: 1% is what two measurements of the same code differ by
GIB, CONTEXT = 2**30, 0.75  # CONTEXT: GiB of a process beside what torch allocates


class Width(NamedTuple):
    """A Llama's sizes, and those of its batch."""

    width: int
    inner: int
    heads: int
    layers: int
    vocab: int = 32000
    batch: int = 8
    length: int = 1024


class Block(nn.Module):
    """A block of a Llama."""

    def __init__(self, of: Width) -> None:
        super().__init__()
        self.heads = of.heads
        self.norms = nn.ModuleList(nn.RMSNorm(of.width) for _ in range(2))
        self.qkv, self.out = nn.Linear(of.width, 3 * of.width, bias=False), nn.Linear(of.width, of.width, bias=False)
        self.gate, self.up = (nn.Linear(of.width, of.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(of.inner, of.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A Llama without rotary embeddings."""

    def __init__(self, of: Width) -> None:
        super().__init__()
        self.embed = nn.Embedding(of.vocab, of.width)
        self.blocks = nn.ModuleList(Block(of) for _ in range(of.layers))
        self.norm, self.head = nn.RMSNorm(of.width), nn.Linear(of.width, of.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def llama_loss(model: Callable[..., Tensor], ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def layer_loss(model: Callable[..., Tensor], x: Tensor) -> Tensor:
    return model(x).float().square().mean()


class Case(NamedTuple):
    """What is trained."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Tensor]
    loss: Callable[..., Tensor] = layer_loss
    gib: float = 1.0  # what a process may allocate, eager calls included
    gain: float = NOT_SLOWER  # how many times as fast as bfloat16 ampkit's way is to be
    policy: ampkit.Policy = ampkit.Policy(compute="float8")


def floats(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(shape, generator=generator, device=generator.device)


def words(most: int, *shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randint(most, shape, generator=generator, device=generator.device)


def layer(rows: int, inputs: int, outputs: int) -> Case:
    return Case(
        f"layer {rows}x{inputs}x{outputs}",
        lambda: nn.Sequential(nn.RMSNorm(inputs), nn.Linear(inputs, outputs, bias=False)),
        floats(rows, inputs),
        gib=2 + rows * outputs * 32 / GIB,
        policy=ampkit.Policy(compute="bfloat16", modules={"1": "float8_if_faster"}),
    )


def llama(of: Width, gib: float = 1.0, gain: float = NOT_SLOWER) -> Case:
    name = f"llama-{of.width}, {of.layers} blocks"
    return Case(name, lambda: Llama(of), words(of.vocab, of.batch, of.length + 1), llama_loss, gib, gain)


def mlp() -> nn.Module:
    return nn.Sequential(*(module for _ in range(6) for module in (nn.Linear(4096, 4096, bias=False), nn.GELU())))


SMALL = [layer(64, 32, 64), llama(Width(64, 128, 2, 2, 64, 2, 16))]
CASES = [
    llama(Width(2048, 8192, 16, 16), 44, 1.12),  # 1.2 billion parameters
    llama(Width(4096, 14336, 32, 3), 31, 1.3),
    Case("gpt2-124m", lambda: GPT(50304, 12, 768, 12), words(50304, 8, 513), llama_loss, 12),
    Case("mlp-4096", mlp, floats(16384, 4096), gib=8),
    Case("vit-b", partial(torchvision_model, "vit_b_16"), floats(32, 3, 224, 224), gib=7),
    *(layer(*sizes) for sizes in SHAPES),
]


# ------------------------------------------------------------------------------------------------------------- one row


def swapped_by_torchao(model: nn.Module, policy: ampkit.Policy, device: torch.device) -> nn.Module:
    """Have torchao swap the layers that ampkit would time."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    policy.apply(model)
    wanted = {path for path, layer in float8_layers(model).items() if layer.form != PLAIN}
    policy.remove(model)
    return convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=device.type == "cpu"),
        module_filter_fn=lambda _, path: path in wanted,
    )


def train(case: Case, way: str, device: torch.device, turn: float) -> Iterator[dict[str, Any]]:
    """Yield when the layers are chosen, then what is known behind the capture, then the milliseconds of each turn."""
    on_cuda = device.type == "cuda"
    torch.manual_seed(0)
    with device:
        model = case.model()
    policy = case.policy if way == "ampkit" else ampkit.Policy.parse("bfloat16")
    if way == "torchao":
        swapped_by_torchao(model, case.policy, device)
    elif way == "ampkit":
        policy.apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    options = {"graph": "auto", "compile": "default"} if on_cuda else {"graph": "emulate"}
    step = ampkit.graphed_step(case.loss, model, optimizer, policy=policy, max_norm=1.0, on_failure="raise", **options)
    batch = case.batch(torch.Generator(device).manual_seed(1))

    def timed(steps: int) -> float:
        begun = time.perf_counter()
        for _ in range(steps):
            out = step(batch)
        out.loss.item()
        return (time.perf_counter() - begun) / steps

    chooses = way == "ampkit"
    if chooses:
        timed(1)
    yield {}
    for _ in range(WARM_UP - chooses):
        if on_cuda and not step.captures:
            torch.cuda.reset_peak_memory_stats()
        loss = step(batch).loss
    layers = float8_layers(model).values()
    in_float8 = sum(type(module).__name__ == "Float8Linear" for module in model.modules())
    in_float8 += sum(layer.form != PLAIN for layer in layers)
    reasons = sorted({f"{layer.sizes}: {layer.reason} {layer.ms or ''}" for layer in layers})
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_cuda else 0.0
    yield {
        "ready": True,
        "loss": loss.item(),
        "in_float8": in_float8,
        "reasons": reasons,
        "peak": peak,
        "replays": step.replays,
    }
    steps = max(2, round(turn / timed(3)))
    while True:
        timed(1)
        yield {"ms": timed(steps) * 1e3}


# ------------------------------------------------------------------------------------------------------------ processes


def worker(case: Case, way: str, share: float, args: argparse.Namespace) -> None:
    """Train in this process, with at most a share of the memory of the GPU."""
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_per_process_memory_fraction(share)
    with warnings.catch_warnings(), fast_kernels(device):
        warnings.simplefilter("ignore")
        serve(train(case, way, device, args.turn))


def waves(cases: Sequence[Case], room: float, together: int) -> list[list[Case]]:
    """Return the cases in groups that fit so many GiB and processes, the large ones first."""
    found: list[list[Case]] = []
    for case in sorted(cases, key=lambda case: -case.gib):
        for wave in found:
            with_it = [*wave, case]
            gib = sum(each.gib + CONTEXT for each in with_it) * len(WAYS)
            if gib <= room and len(with_it) * len(WAYS) <= together:
                wave.append(case)
                break
        else:
            found.append([case])
    return found


def measure(cases: Sequence[Case], place: str, args: argparse.Namespace) -> None:
    """Set the cases up at once, then measure and print one after the other."""
    begun, rows = time.monotonic(), [(case, way) for case in cases for way in WAYS]
    share = (1 - CONTEXT * len(rows) / args.room) / sum(case.gib for case, _ in rows)
    threads = max(1, (os.cpu_count() or 1) // args.gpus // len(rows))
    command = [sys.executable, __file__, *args.argv, "--device", place, "--worker"]
    runs = [
        remote([*command, case.name, way, str(case.gib * share)], threads=threads, seconds=args.seconds)
        for case, way in rows
    ]
    found: list[dict[str, Any]] = [{"ms": []} for _ in rows]
    pool = ThreadPoolExecutor(len(rows))
    try:
        for _ in range(2):
            alive = [i for i, row in enumerate(found) if "error" not in row]
            for i, answer in zip(alive, pool.map(next, [runs[i] for i in alive]), strict=True):
                found[i] |= answer
        print(f"{', '.join(case.name for case in cases)}: ready after {time.monotonic() - begun:.0f} s", flush=True)
        for first, case in zip(range(0, len(rows), len(WAYS)), cases, strict=True):
            own = range(first, first + len(WAYS))
            for _ in range(args.repeats):
                for i in own:
                    answer = {} if "error" in found[i] else next(runs[i])
                    found[i]["ms"] += [answer.pop("ms")] if "ms" in answer else []
                    found[i] |= answer
            print(shown(case, {WAYS[i - first]: found[i] for i in own}), flush=True)
    finally:
        for run in runs:
            run.close()


# -------------------------------------------------------------------------------------------------------------- output


def times_as_fast(row: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the median of the quotients of turns that followed each other; nan if there are none."""
    quotients = [theirs / own for own, theirs in zip(row["ms"], other["ms"], strict=False)]
    return statistics.median(quotients) if quotients else math.nan


def shown(case: Case, rows: dict[str, dict[str, Any]]) -> str:
    """Return the lines of a case."""
    lines = []
    for way, row in rows.items():
        line = f"{case.name:24} {way:9}"
        if "error" in row:
            lines.append(f"{line} {row['error']}")
            continue
        line += f"{statistics.median(row['ms']):9.3f} ms ({min(row['ms']):.3f} to {max(row['ms']):.3f})"
        line += "".join(f"  {times_as_fast(row, rows[other]):.3f}x {other}" for other in WAYS[:2] if other != way)
        line += f"  {row['peak']:.0f} MiB  {row['in_float8']} layers in float8  loss {row['loss']:.4f}"
        lines += [f"{line}  {row['replays']} replays", *(f"      {reason}" for reason in row["reasons"])]
    ours = rows["ampkit"]
    demands = [("bfloat16", NOT_SLOWER), ("torchao", NOT_SLOWER), ("bfloat16", case.gain)]
    texts = []
    for other, least in dict.fromkeys(demands):
        speed = times_as_fast(ours, rows[other])
        holds = "not measured" if math.isnan(speed) else "yes" if speed >= least else "NO"
        texts.append(f"at least {least}x {other}: {holds}")
    return "\n".join([*lines, f"{case.name:24} {', '.join(texts)}"])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 1, help="default: all")
    parser.add_argument("--rows", nargs="+", default=[""], help="cases whose names begin so: layer, llama, vit-b, ...")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--together", type=int, default=99, help="processes at once on each GPU; default: what fits")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each way")
    parser.add_argument("--turn", type=float, default=0.25, help="seconds of a turn")
    parser.add_argument("--seconds", type=float, default=400, help="what is not set up by then is left out")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.argv = argv
    cases = {case.name: case for case in (SMALL if args.small else CASES) if case.name.startswith(tuple(args.rows))}
    if args.worker:
        name, way, share = args.worker
        worker(cases[name], way, float(share), args)
        return 0
    on_cuda = args.device == "cuda"
    args.room = torch.cuda.get_device_properties(0).total_memory / GIB if on_cuda else math.inf
    free: queue.Queue[str] = queue.Queue()
    for place in [f"cuda:{i}" for i in range(args.gpus)] if on_cuda else ["cpu"]:
        free.put(place)

    def on_free_place(wave: list[Case]) -> None:
        place = free.get()
        try:
            measure(wave, place, args)
        finally:
            free.put(place)

    name = torch.cuda.get_device_name() if on_cuda else "CPU"
    print(f"{args.gpus} x {name}, torch {torch.__version__}", flush=True)
    with ThreadPoolExecutor(args.gpus) as pool:
        list(pool.map(on_free_place, waves([*cases.values()], args.room, args.together)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
