"""Modules that make sparse gradients, which no graph can have, because their size depends on data."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn


def why_not_dense(modules: Iterable[nn.Module]) -> str:
    """Return which module makes sparse gradients and what to write instead, "" if none does."""
    found = [layer for module in modules for layer in _sparse_layers(module)]
    if not found:
        return ""
    what, instead = found[0]
    more = f", and {len(found) - 1} more modules do" if len(found) > 1 else ""
    return (
        f"{what}{more}: their size depends on data, which no graph can hold. {instead} and an optimizer for dense "
        "gradients: AdamW, Adam or SGD with fused=True."
    )


def refuse_sparse(model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
    """Raise a `ValueError` if torch does not take the optimizer, or `max_norm`, together with sparse gradients."""
    for what, instead in _sparse_layers(model):
        if any(group.get("fused") for group in optimizer.param_groups):
            used = type(optimizer).__name__
            reason = f"{used} with fused=True takes none. {instead}."
            raise ValueError(f"graphed_step(optimizer={used}): {what}, and {reason}")
        if max_norm is not None:
            reason = f"torch has no norm of these. {instead}, or max_norm=None."
            raise ValueError(f"graphed_step(max_norm={max_norm!r}): {what}, and {reason}")


def _sparse_layers(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield which modules make sparse gradients, each with what to write instead."""
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and layer.weight.requires_grad:
            kind = type(layer).__name__
            what = f"{name or 'the model'} is {kind}(sparse=True), whose gradients are sparse"
            yield what, f"Write {kind}(..., sparse=False)"
