"""Float8 Linear layers: bfloat16, torchao's module swap, and ampkit's choice by timing, each compiled and captured.

    python tests/benchmarks/float8_layers.py                          all cases: single layers, and two Llamas
    python tests/benchmarks/float8_layers.py --rows layer --times     single layers, and the times that are chosen by
    python tests/benchmarks/float8_layers.py --rows llama-2048 --ways bfloat16 ampkit --layers 16
    python tests/benchmarks/float8_layers.py --small --device cpu     tiny ones, emulated, which shows that it runs

A case is a model and its batch; a row is one way to train it: milliseconds of a step (median over repeats, least and
most), peak MiB, the loss of the last step, and how many layers compute in float8. torchao swaps the layers that ampkit
considers, and leaves the first one and the last one alone, too. Where `--layers` is given, a Llama has so many blocks.
"""

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit
from ampkit._commands.bench.process import clean_up, fast_kernels
from ampkit._precision.float8_layers import PLAIN
from ampkit._precision.module_rules import float8_layers
from ampkit._step.compile.compiled import INDUCTOR_OPTIONS
from ampkit._step.compile.float8_timing import TimedLayer, times_of
from ampkit._torch.compile import Compiler

# Rows, inputs and outputs: ViT-B's MLP, a Llama of width 2048 and one of width 4096, a BERT, and one that is too small.
SHAPES = [(8192, 768, 3072), (16384, 2048, 8192), (16384, 4096, 14336), (4096, 1024, 4096), (2048, 512, 512)]
WAYS = ("bfloat16", "torchao", "ampkit")
WARM_UP = 8  # calls: the first chooses, one compiles, one is the rehearsal, one captures


class Width(NamedTuple):
    """A Llama's sizes, and those of its batch."""

    width: int
    inner: int
    heads: int
    layers: int
    vocab: int = 32000
    batch: int = 8
    length: int = 1024


LLAMAS = {"llama-2048": Width(2048, 8192, 16, 8), "llama-4096": Width(4096, 14336, 32, 3)}
SMALL = {"llama-2048": Width(64, 128, 2, 2, 64, 2, 16)}


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
    loss: Callable[..., Tensor]
    policy: ampkit.Policy


def cases(args: argparse.Namespace) -> list[Case]:
    """Return the cases whose names begin as the user wrote."""
    found = []
    named = ampkit.Policy(compute="bfloat16", modules={"1": "float8_if_faster"})
    for rows, inputs, outputs in [(64, 32, 64)] if args.small else SHAPES:
        found.append(
            Case(
                f"layer {rows}x{inputs}x{outputs}",
                lambda i=inputs, o=outputs: nn.Sequential(nn.RMSNorm(i), nn.Linear(i, o, bias=False)),
                lambda generator, r=rows, i=inputs: torch.randn(r, i, generator=generator, device=generator.device),
                layer_loss,
                named,
            )
        )
    for name, of in (SMALL if args.small else LLAMAS).items():
        of = of._replace(layers=args.layers) if args.layers else of
        size = of.batch, of.length + 1
        found.append(
            Case(
                f"{name}, {of.layers} blocks",
                lambda of=of: Llama(of),
                lambda generator, of=of, size=size: torch.randint(
                    of.vocab, size, generator=generator, device=generator.device
                ),
                llama_loss,
                ampkit.Policy(compute="float8"),
            )
        )
    return [case for case in found if not args.rows or case.name.startswith(tuple(args.rows))]


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


def measure(case: Case, way: str, device: torch.device, args: argparse.Namespace) -> str:
    """Return the row of one way."""
    on_cuda = device.type == "cuda"
    clean_up(device)
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
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
    begun = time.perf_counter()
    for _ in range(WARM_UP):
        out = step(batch)
    out.loss.item()
    set_up = time.perf_counter() - begun
    found = []
    for _ in range(args.repeats):
        begun = time.perf_counter()
        for _ in range(args.steps):
            out = step(batch)
        loss = out.loss.item()
        found.append((time.perf_counter() - begun) / args.steps * 1e3)
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_cuda else 0.0
    layers = float8_layers(model).values()
    in_float8 = sum(type(module).__name__ == "Float8Linear" for module in model.modules())
    in_float8 += sum(layer.form != PLAIN for layer in layers)
    row = f"{statistics.median(found):9.3f} ms ({min(found):.3f} to {max(found):.3f}) {peak:8.0f} MiB"
    row += f"  loss {loss:.4f}, {in_float8} layers in float8, set up in {set_up:.1f} s, {step.replays} replays"
    reasons = {f"{layer.sizes}: {layer.reason} {layer.ms or ''}" for layer in layers}
    step.close()
    return "\n".join([row, *(f"      {reason}" for reason in sorted(reasons))])


def print_times(device: torch.device) -> None:
    """Print what a choice of single layers is made by."""
    for recipe in ("float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp"):
        for sizes in SHAPES:
            layer = TimedLayer(recipe, sizes, False, torch.float32)
            for name, compiler in (("eager", None), ("compiled", Compiler(INDUCTOR_OPTIONS["default"]))):
                print(
                    f"{recipe:26} {'x'.join(map(str, sizes)):18} {name:9}",
                    times_of(layer, device, compiler),
                    flush=True,
                )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", nargs="+", help="cases whose names begin so: layer, llama-2048, llama-4096")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--times", action="store_true", help="print the times that layers are chosen by, too")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--layers", type=int, help="blocks of each Llama")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    with warnings.catch_warnings(), fast_kernels(device):
        warnings.simplefilter("ignore")
        if args.times and device.type == "cuda":
            print_times(device)
        for case in cases(args):
            for way in args.ways:
                try:
                    print(f"{case.name:24} {way:9}", measure(case, way, device, args), flush=True)
                except Exception as error:  # whatever it is, it is the row
                    print(f"{case.name:24} {way:9} {type(error).__name__}: {error}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
