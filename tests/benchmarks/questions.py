"""What a question to the device costs: a step that asks about its input, or in the middle, beside one that does not.

    PYTHONPATH=. python tests/benchmarks/questions.py                  on a GPU

A transformer encoder (6 layers of 512, batches of 32 times 128) leaves out its padding mask where that masks nothing,
and a ResNet-18 (64 images of 64 times 64) does nothing with the answer; either checks that what its layers have
computed is finite. bfloat16, fused AdamW. The ways take turns, each call in a loop that waits for nothing but what the
step itself waits for. Milliseconds per step: the median of the blocks, the fastest and the slowest one.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import ampkit

NOTHING, INPUT, MIDDLE = "nothing", "about its input", "in the middle"  # the first computes what the last asks


class Encoder(nn.Module):
    """Leaves out the padding mask where it masks nothing, as transformers does."""

    def __init__(self, asks: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
        self.layers, self.asks = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), asks

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        padding = ~mask if self.asks == INPUT and not mask.all() else None
        out: Tensor = self.layers(x, src_key_padding_mask=padding)
        finite = out.isfinite().all()
        if self.asks == MIDDLE and not finite:
            raise ValueError("not finite")
        return out


class Images(nn.Module):
    """A ResNet-18 that checks its input, or its features."""

    def __init__(self, asks: str) -> None:
        super().__init__()
        self.net, self.asks = torchvision.models.resnet18(num_classes=10), asks

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.asks == INPUT and not mask.all():
            raise ValueError("an image is missing")
        out: Tensor = self.net(x)
        finite = out.isfinite().all()
        if self.asks == MIDDLE and not finite:
            raise ValueError("not finite")
        return out


MODELS: dict[str, tuple[Callable[[str], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "transformer": (Encoder, (32, 128, 512), (2, 8, 512)),  # with the shapes of batches on a GPU and on a CPU
    "resnet18": (Images, (64, 3, 64, 64), (2, 3, 32, 32)),
}


def made(model: str, asks: str, graph: str, device: str) -> Callable[..., Any]:
    torch.manual_seed(0)
    net = MODELS[model][0](asks).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

    def loss_fn(net: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        return net(x, mask).float().square().mean()

    return ampkit.graphed_step(loss_fn, net, optimizer, policy="bfloat16", graph=graph)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    graph = "auto" if on_gpu else "emulate"
    print(torch.cuda.get_device_name() if on_gpu else "cpu", torch.__version__)
    for model in args.models:
        x = torch.randn(MODELS[model][1 if on_gpu else 2], device=args.device)
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=args.device)
        ways = [(way, asks) for way in ("off", graph) for asks in (NOTHING, INPUT, MIDDLE)]
        steps = {(way, asks): made(model, asks, way, args.device) for way, asks in ways}
        found: dict[tuple[str, str], list[float]] = {way: [] for way in steps}
        for block in range(args.blocks + 1):  # the first one warms up
            for way, step in steps.items():
                if on_gpu:
                    torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(args.steps):
                    step(x, mask)
                if on_gpu:
                    torch.cuda.synchronize()
                found[way] += [1e3 * (time.perf_counter() - start) / args.steps] * (block > 0)
        for (way, asks), ms in found.items():
            name = f"{model}, {'eager' if way == 'off' else 'graphed'}, asks {asks}"
            print(f"{name:44s} {statistics.median(ms):8.3f} ms ({min(ms):.3f} to {max(ms):.3f})", flush=True)


if __name__ == "__main__":
    main()
