"""The recipes of docs/recipes.md have the bits of the same training without a graph, and of the other library's loop.

The functions and classes under test are those of the page, so that what users copy is what is compared.
"""

import functools
import os
import re
from collections.abc import Iterator
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
def recipe(heading: str) -> dict[str, Any]:
    """Run the block under this heading of the page, and return its names."""
    code = re.search(rf"^## {heading}\n.*?^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
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
    return state | {"losses": [bits(loss) for loss in losses], "random numbers": bits(torch.rand(4))}


# --------------------------------------------------------------------------------------------------------- transformers


def texts(device: str, lengths: tuple[int, ...]) -> list[Batch]:
    """Return batches of four texts, padded to the longest; the last batch has fewer texts."""
    made = torch.Generator().manual_seed(1)
    tokens = [torch.randint(100, (length,), generator=made) for length in lengths]
    collate = recipe("Padded batches of transformers")["collate"]
    batches = [collate(tokens[i : i + 4]) for i in range(0, len(tokens), 4)]
    return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]


LENGTHS = (9, 14, 11, 5, 20, 31, 24, 18) * 5 + (7, 8)
BUCKETS = ampkit.Buckets(batch=(4,), length=(16, 32), pad={"batch['labels']": -100})


def language_model(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    from transformers import LlamaForCausalLM

    config = recipe("Padded batches of transformers")["config"]
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)


def padded_batches(device: str, graph: str, policy: str | None, max_norm: float | None) -> tuple[Any, ampkit.Report]:
    model, optimizer = language_model(device)
    options: dict[str, Any] = {"policy": policy, "max_norm": max_norm, "graph": graph}
    loss_fn = recipe("Padded batches of transformers")["loss_fn"]
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


# -------------------------------------------------------------------------------------------------------------- Trainer


def trained(kind: type, device: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Train GPT-2, whose first and last weights are one, with this Trainer. Return it and the bits of its training."""
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    arguments = TrainingArguments(
        "output",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=device == "cpu",
        dataloader_pin_memory=False,
        **options,
    )
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (22, 12), generator=made)
    mask = (torch.arange(12) < 9).long()  # each batch has padding, so that attention takes one kernel in all of them
    data = [{"input_ids": row, "attention_mask": mask, "labels": row.where(mask > 0, -100)} for row in ids]
    sizes = {"vocab_size": 64, "n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 12}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, use_cache=False))
    trainer = kind(model, arguments, train_dataset=data, eval_dataset=data[:4])
    trainer.train()
    logged = ("loss", "grad_norm", "learning_rate", "eval_loss")
    history = [{name: row[name] for name in logged if name in row} for row in trainer.state.log_history]
    assert len(history) == 12 + 2 + 1  # optimizer steps, evaluations, the summary
    state = state_of(model, trainer.optimizer, [])
    return trainer, {**state, "logged": history, "schedule": trainer.lr_scheduler.state_dict()["_last_lr"]}


@pytest.mark.parametrize("options", [{}, {"bf16": True, "label_smoothing_factor": 0.1}], ids=["float32", "bf16"])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_trainer_of_transformers(engine: tuple[str, str], options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    device, _ = engine
    graphed, state = trained(recipe("Trainer of transformers")["GraphedTrainer"], device, max_grad_norm=0.5, **options)
    _, plain = trained(transformers.Trainer, device, max_grad_norm=0.5, **options)
    assert_same(state, plain)
    # 11 batches in each epoch: the last window has one, and is a layout of its own, which needs two more warm-up calls.
    assert (graphed.graphed.captures, graphed.graphed.replays) == (1, 22 - 3 - 2)
