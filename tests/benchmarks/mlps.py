"""Three small MLPs, whose step is launches and kernels rather than arithmetic: models for `python -m ampkit bench`.

    PYTHONPATH=tests/benchmarks python -m ampkit bench --model mlps:tiny -b 64 --policy bfloat16 --input device \
        --variants reduce-overhead graphed graphed-default graphed-max
"""

import functools
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LABELS = 10


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), y)


def mlp(batch: int, widths: list[int]) -> tuple[Any, nn.Module, Any, list[tuple[Tensor, Tensor]]]:
    """Return a case of the benchmark: a chain of linear layers with ReLU between them."""
    torch.manual_seed(0)
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    batches = [(torch.randn(batch, widths[0]), torch.randint(LABELS, (batch,))) for _ in range(4)]
    return loss_fn, nn.Sequential(*layers[:-1]), functools.partial(torch.optim.AdamW, lr=1e-3), batches


def tiny(batch: int) -> Any:
    """Three layers, 6 tensors."""
    return mlp(batch, [32, 64, 64, LABELS])


def small(batch: int) -> Any:
    """Four layers, 8 tensors."""
    return mlp(batch, [64, 256, 256, 256, LABELS])


def deep(batch: int) -> Any:
    """Seventeen layers of 512, 34 tensors."""
    return mlp(batch, [512] * 18)
