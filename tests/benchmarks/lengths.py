"""A small GPT on texts of 16 to 512 tokens, padded to the longest of each batch: `buckets="auto"` beside eager loops.

    PYTHONPATH=. python tests/benchmarks/lengths.py    5,000 calls on a GPU
    PYTHONPATH=. python tests/benchmarks/lengths.py --device cpu --tiny --words 256 --batch 2 --calls 250 \
        --eager-calls 50 --checked 250

The text is the source of Python's standard library: what stands between double empty lines is a text, and its words and
signs are its tokens. The ways: torch's own loop on batches as they come, `graphed_step(graph="off")` on batches that
are padded, and the same with graphs. Tokens per second are those of the texts, without any padding: over all calls with
warm-up and captures, and over the second half of the calls. The eager ways make fewer calls, because they are slower
and have no warm-up. Then the losses and weights of the two padded ways, bit by bit, under deterministic algorithms:
fewer calls, because these are slower.
"""

import argparse
import random
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import ampkit
from tests.benchmarks.models import repeatable

SHORTEST, LONGEST = 17, 513  # so that 16 to 512 have a next one
MAX_NORM = 1.0
POOL = 16  # batches


class Block(nn.Module):
    """Causal attention and two linear layers. Padding is behind each text, so that no token of it sees any."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    """Embeddings of words and positions, blocks, and a score for each word."""

    def __init__(self, words: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(LONGEST, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(x)))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return the mean over the tokens that have a next one. Labels say what is padding, so no mask is needed."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def texts(vocabulary: int, files: str = "*.py") -> list[Tensor]:
    """Return the texts of `SHORTEST` tokens at least, cut behind `LONGEST`, in an order that is always the same."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for file in sorted(path for path in folder.glob(files) if "site-packages" not in path.parts):
        pieces = re.split(r"\n\s*\n\s*\n", file.read_text(encoding="utf-8", errors="replace"))
        found += [re.findall(r"\w+|[^\w\s]", piece)[:LONGEST] for piece in pieces]
    found = [words for words in found if len(words) >= SHORTEST]
    common = Counter(word for words in found for word in words).most_common(vocabulary - 1)
    numbers = {word: number for number, (word, _) in enumerate(common, 1)}
    random.Random(0).shuffle(found)
    return [torch.tensor([numbers.get(word, 0) for word in words]) for words in found]


def batches(data: list[Tensor], size: int, calls: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and the next ones, padded to the longest text of the batch, as a collate function does.

    Texts of like lengths come together, as with `group_by_length`: the batches of `POOL` are cut from sorted texts.
    """
    order = random.Random(1)
    starts: list[int] = []
    for _ in range(calls):
        if not starts:
            pool = sorted(order.sample(data, POOL * size), key=len)
            starts = order.sample(range(0, len(pool), size), POOL)
        start = starts.pop()
        chosen = pool[start : start + size]
        yield (
            pad_sequence([text[:-1] for text in chosen], batch_first=True),
            pad_sequence([text[1:] for text in chosen], batch_first=True, padding_value=-100),
        )


def of_torch(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, low: bool) -> Callable[..., Tensor]:
    """Return a step written with torch alone."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=low):
            loss = loss_fn(model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return loss.detach()

    return step


def timed(way: str, args: argparse.Namespace, data: list[Tensor], calls: int) -> tuple[list[Tensor], list[float], Any]:
    """Return losses and weights, tokens per second over all calls and over the second half, and the step."""
    torch.manual_seed(0)
    sizes = (args.words, 2, 32, 2) if args.tiny else (args.words, args.layers, args.width, args.width // 64)
    model = GPT(*sizes).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    if way == "torch":
        step: Any = of_torch(model, optimizer, args.device, not args.tiny)
    else:
        buckets = ampkit.Buckets("auto", "auto", pad={"batch[1]": -100})
        policy = None if args.tiny else "bfloat16"
        options: dict[str, Any] = {"policy": policy, "max_norm": MAX_NORM, "buckets": buckets, "graph": way}
        step = ampkit.graphed_step(loss_fn, model, optimizer, **options)
    ready = [*batches(data, args.batch, calls)]
    real = [int((y != -100).sum()) for _, y in ready]
    half, losses, marks = calls // 2, [], []
    wait = torch.cuda.synchronize if args.device == "cuda" else (lambda: None)
    for call, batch in enumerate(ampkit.prefetch(ready, args.device)):
        if call in (0, half):
            wait()
            marks.append(time.perf_counter())
        out = step(*batch)
        losses.append(out if way == "torch" else out.loss)
    wait()
    end = time.perf_counter()
    rates = [sum(real) / (end - marks[0]), sum(real[half:]) / (end - marks[1])]
    return [*losses, *(param.detach() for param in model.parameters())], rates, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--eager-calls", type=int, default=1000)
    parser.add_argument("--checked", type=int, default=400, help="calls of the comparison")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--words", type=int, default=8192, help="size of the vocabulary")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers in float32")
    args = parser.parse_args()
    data = texts(args.words)
    lengths = sorted(map(len, data))
    print(
        f"{len(data)} texts of {lengths[0]} to {lengths[-1]} tokens, {lengths[len(lengths) // 2]} in the middle",
        flush=True,
    )
    graph = "auto" if args.device == "cuda" else "emulate"
    names = {"torch": "torch's loop, as it comes", "off": "graph='off', padded", graph: "graphed_step"}
    first: list[float] = []
    for way, name in names.items():
        _, rates, step = timed(way, args, data, args.calls if way == graph else args.eager_calls)
        first = first or rates
        beside = ", ".join(f"{rate / other:.2f}x" for rate, other in zip(rates, first, strict=True))
        print(f"{name:28}{rates[0]:12,.0f} tokens/s, {rates[1]:12,.0f} in the second half ({beside})", flush=True)
        if way == graph:
            report = step.report()
            print(f"{report.replays / args.calls:.2%} of {args.calls} calls replayed, {report.graphs} graphs\n{report}")
        del step
    with repeatable(strict=True):
        eager, graphed = (timed(way, args, data, args.checked)[0] for way in ("off", graph))
    same = all(map(torch.equal, eager, graphed))
    print(f"losses and weights of {args.checked} padded calls: {'the same bits' if same else 'DIFFERENT BITS'}")


if __name__ == "__main__":
    main()
