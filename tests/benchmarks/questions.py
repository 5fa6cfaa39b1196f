"""What a question about the input costs: a step that looks at its padding mask, beside the same step without a look.

    PYTHONPATH=. python tests/benchmarks/questions.py                  on a GPU

A transformer encoder (6 layers of 512, batches of 32 times 128, bfloat16, fused AdamW). The ways take turns, each call
in a loop that waits for nothing but what the step itself waits for. Milliseconds per step, the median of the blocks.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ampkit


class Encoder(nn.Module):
    """Leaves out the padding mask where it masks nothing, as transformers does."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
        self.layers, self.looks = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), looks

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        padding = None if self.looks and mask.all() else ~mask
        out: Tensor = self.layers(x, src_key_padding_mask=padding if self.looks else None)
        return out


def made(looks: bool, graph: str, device: str) -> Callable[..., Any]:
    torch.manual_seed(0)
    model = Encoder(looks).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def loss_fn(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        return model(x, mask).float().square().mean()

    return ampkit.graphed_step(loss_fn, model, optimizer, policy="bfloat16", graph=graph)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    graph = "auto" if args.device == "cuda" else "emulate"
    rows, length = (32, 128) if args.device == "cuda" else (2, 8)
    x = torch.randn(rows, length, 512, device=args.device)
    mask = torch.ones(rows, length, dtype=torch.bool, device=args.device)
    print(torch.cuda.get_device_name() if args.device == "cuda" else "cpu", torch.__version__)
    ways = {"eager": (True, "off"), "graphed, looks": (True, graph), "graphed, looks at nothing": (False, graph)}
    steps = {name: made(looks, way, args.device) for name, (looks, way) in ways.items()}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for block in range(args.blocks + 1):  # the first one warms up
        for name, step in steps.items():
            if args.device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(args.steps):
                step(x, mask)
            if args.device == "cuda":
                torch.cuda.synchronize()
            found[name] += [1e3 * (time.perf_counter() - start) / args.steps] * (block > 0)
    for name, ms in found.items():
        print(f"{name:26s} {statistics.median(ms):8.3f} ms ({min(ms):.3f} to {max(ms):.3f})", flush=True)


if __name__ == "__main__":
    main()
