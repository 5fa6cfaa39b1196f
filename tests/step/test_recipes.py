"""The recipes of docs/recipes.md have the bits of the same training without a graph, and of the other library's loop.

The functions and classes under test are those of the page, so that what users copy is what is compared.
"""

import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, bits
from models import repeatable
from torch import Tensor, nn

import ampkit

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
RATE = 2**-10  # float32 represents it exactly, so that a step on CUDA has the bits of a loop with a Python float

Batch = dict[str, Tensor]


@functools.cache
def recipe(package: str) -> dict[str, Any]:
    """Run the block of the page that needs this package, and return its names."""
    code = re.search(rf"^```python\n(# needs: {package}\n.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert code is not None
    namespace: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(code[1], str(PAGE), "exec"), namespace)
    return namespace


@pytest.fixture(autouse=True)
def repeatable_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first use of cuBLAS
    with repeatable(strict=True):
        yield


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> dict[str, Any]:
    """Return the bits of everything that the training has changed."""
    state: dict[str, Any] = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    for i, values in enumerate(optimizer.state.values()):
        state |= {f"{key} of parameter {i}": bits(torch.as_tensor(value)) for key, value in values.items()}
    return state | {"losses": bits(torch.stack(losses)), "random numbers": bits(torch.rand(4))}


# ---------------------------------------------------------------------------------------------------------- transformers


def texts(device: str, lengths: tuple[int, ...]) -> list[Batch]:
    """Return batches of four texts, padded to the longest; the last batch has fewer texts."""
    made = torch.Generator().manual_seed(1)
    tokens = [torch.randint(100, (length,), generator=made) for length in lengths]
    collate = recipe("transformers")["collate"]
    batches = [collate(tokens[i : i + 4]) for i in range(0, len(tokens), 4)]
    return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]


LENGTHS = (9, 14, 11, 5, 20, 31, 24, 18) * 5 + (7, 8)
BUCKETS = ampkit.Buckets(batch=(4,), length=(16, 32), pad={"batch['labels']": -100})


def language_model(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    from transformers import LlamaForCausalLM

    config = recipe("transformers")["config"]
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)


def padded_batches(device: str, graph: str, policy: str | None, max_norm: float | None) -> tuple[Any, ampkit.Report]:
    model, optimizer = language_model(device)
    options: dict[str, Any] = {"policy": policy, "max_norm": max_norm, "graph": graph}
    loss_fn = recipe("transformers")["loss_fn"]
    step = ampkit.graphed_step(loss_fn, model, optimizer, buckets=BUCKETS, capturing=True, **options)
    torch.manual_seed(5)
    losses = [step(**batch).loss for batch in texts(device, LENGTHS)]
    return state_of(model, optimizer, losses), step.report()


@pytest.mark.parametrize("policy", [None, "bfloat16"])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_padded_batches_of_transformers(engine: tuple[str, str], policy: str | None) -> None:
    pytest.importorskip("transformers")
    device, graph = engine
    eager, _ = padded_batches(device, "off", policy, 1.0)
    graphed, report = padded_batches(device, graph, policy, 1.0)
    assert (report.captures, report.replays) == (2, 5)
    assert_same(graphed, eager)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_padded_batches_have_the_bits_of_a_torch_loop(engine: tuple[str, str]) -> None:
    pytest.importorskip("transformers")
    device, graph = engine
    graphed, _ = padded_batches(device, graph, None, None)
    model, optimizer = language_model(device)
    torch.manual_seed(5)
    losses = []
    for batch in texts(device, LENGTHS):
        padded = BUCKETS.pad_batch((), batch)[1]
        assert not padded["attention_mask"].all()
        optimizer.zero_grad()
        loss = model(**{name: padded[name] for name in batch}).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert_same(graphed, state_of(model, optimizer, losses))
