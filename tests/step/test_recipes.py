"""The recipes of docs/recipes.md have the bits of the same training without a graph, and of the other library's loop.

The functions and classes under test are those of the page, so that what users copy is what is compared.
"""

import functools
import os
import random
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
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
    python, of_numpy = random.getstate(), numpy.random.get_state()  # the Trainer seeds both
    with repeatable(strict=True):
        yield
    random.setstate(python)
    numpy.random.set_state(of_numpy)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> dict[str, Any]:
    """Return the bits of everything that the training has changed. A nan would be equal to itself, so there is none."""
    assert all(bool(tensor.isfinite().all()) for tensor in (*model.state_dict().values(), *losses))
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
    """R2: batches with a padding mask are captured whole, with the bits of eager under the same answer."""
    pytest.importorskip("transformers")
    device, graph = engine
    eager, _ = padded_batches(device, "off", policy, 1.0)
    graphed, report = padded_batches(device, graph, policy, 1.0)
    assert (report.captures, report.replays) == (2, 5)
    assert_same(graphed, eager)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_padded_batches_have_the_bits_of_a_torch_loop(engine: tuple[str, str]) -> None:
    """R2: without clipping they have the bits of a loop without ampkit."""
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


def trained(kind: type, device: str, by_tokens: bool, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Train GPT-2, whose first and last weights are one, with this Trainer. Return it and the bits of its training.

    The loss is divided by the tokens of a window or, as for models that do not count them, by its micro-batches.
    """
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
    trainer.model_accepts_loss_kwargs = by_tokens
    trainer.train()
    logged = ("loss", "grad_norm", "learning_rate", "eval_loss")
    history = [{name: row[name] for name in logged if name in row} for row in trainer.state.log_history]
    assert len(history) == 12 + 2 + 1  # optimizer steps, evaluations, the summary
    state = state_of(model, trainer.optimizer, [])
    return trainer, {**state, "logged": history, "schedule": trainer.lr_scheduler.state_dict()["_last_lr"]}


OPTIONS: dict[str, tuple[bool, dict[str, Any]]] = {
    "float32": (False, {"by_tokens": True, "max_grad_norm": 0.5}),
    "bf16": (False, {"by_tokens": True, "bf16": True, "label_smoothing_factor": 0.1}),
    "mean of micro-batches": (True, {"by_tokens": False, "optim": "adafactor", "lr_scheduler_type": "cosine"}),
}


@pytest.mark.parametrize(("divides", "options"), OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_trainer_of_transformers(engine: tuple[str, str], divides: bool, options: dict[str, Any]) -> None:
    """Some options have the loss divided by the number of micro-batches, which is 1 in the last window of an epoch."""
    transformers = pytest.importorskip("transformers")
    device, _ = engine
    warns = pytest.warns(ampkit.CaptureWarning, match="current_gradient_accumulation_steps changed from 2 to 1")
    with warns if divides else nullcontext():
        graphed, state = trained(recipe("Trainer of transformers")["GraphedTrainer"], device, **options)
    _, plain = trained(transformers.Trainer, device, **options)
    assert_same(state, plain)
    # 11 batches in each epoch. The one of the last window needs warm-up calls of its own where it is divided.
    assert (graphed.graphed.captures, graphed.graphed.replays) == (1, 22 - 3 - 2 * divides)


# ----------------------------------------------------------------------------------------------------------- accelerate


def small_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))


def small_batches(device: str, count: int, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    batches = [(torch.randn(size, 16, generator=made), torch.randint(4, (size,), generator=made)) for _ in range(count)]
    return [(x.to(device), y.to(device)) for x, y in batches]


def accelerated(device: str, graph: str, precision: str) -> tuple[dict[str, Any], ampkit.Report | None]:
    """Train for four epochs of seven batches, two per optimizer step; with accelerate alone if `graph` is ""."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from torch.utils.data import DataLoader

    AcceleratorState._reset_state(reset_partial_state=True)  # of a Trainer of transformers that was tested before
    loss_fn = recipe("Accelerate")["loss_fn"]
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2, cpu=device == "cpu")
    if precision == "fp16":
        accelerator.scaler = ampkit.GradScaler(device, init_scale=2.0**40)  # the first steps are skipped
    net = small_net()
    fused = torch.optim.AdamW(net.parameters(), lr=RATE, fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(fused, 2, gamma=0.5)
    loader = DataLoader(small_batches("cpu", 7), batch_size=None)
    model, optimizer, loader = accelerator.prepare(net, fused, loader)
    losses, report = [], None
    if graph:
        options: dict[str, Any] = {"graph": graph, "scheduler": schedule, "accumulate": 2, "on_failure": "raise"}
        scaler = accelerator.scaler if precision == "fp16" else None
        step = ampkit.graphed_step(loss_fn, model, optimizer.optimizer, scaler=scaler, **options)
        for _ in range(4):
            losses += [step(x, y).loss for x, y in loader]
            step.flush()
        report = step.report()
    else:
        scheduler = accelerator.prepare(schedule)
        for _ in range(4):
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = loss_fn(model, x, y)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
    AcceleratorState._reset_state(reset_partial_state=True)
    return {**state_of(net, fused, losses), "rate": [group["lr"] for group in fused.param_groups]}, report


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_accelerate(engine: tuple[str, str], precision: str) -> None:
    pytest.importorskip("accelerate")
    graphed, report = accelerated(*engine, precision)
    assert report is not None
    assert (report.captures, report.replays) == (2, 28 - 6)
    assert_same(graphed, accelerated(engine[0], "off", precision)[0])
    assert_same(graphed, accelerated(engine[0], "", precision)[0])


@pytest.mark.cuda  # accelerate has no fp16 on the CPU
def test_accelerate_with_a_loss_scale() -> None:
    pytest.importorskip("accelerate")
    graphed, report = accelerated("cuda", "auto", "fp16")
    assert report is not None
    assert report.skipped > 0
    assert report.replays > 0
    assert_same(graphed, accelerated("cuda", "off", "fp16")[0])


# --------------------------------------------------------------------------------------------------------------- Fabric


def fabric_of(device: str, precision: str, scaler: torch.amp.GradScaler | None) -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision

    if scaler is None:
        return Fabric(accelerator=device, devices=1, precision=precision)
    return Fabric(accelerator=device, devices=1, plugins=MixedPrecision("16-mixed", device, scaler=scaler))


def with_fabric(device: str, graph: str, precision: str) -> tuple[dict[str, Any], int]:
    """Train for ten batches with the step of the recipe; with Fabric alone if `graph` is ""."""
    train_step = _unclipped if precision == "16-mixed" else recipe("Lightning Fabric")["train_step"]
    scaler: torch.amp.GradScaler | None = None
    if precision == "16-mixed":
        scaler = (ampkit.GradScaler if graph else torch.amp.GradScaler)(device, init_scale=2.0**40, growth_interval=3)
    fabric = fabric_of(device, precision, scaler)
    net = small_net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=RATE, fused=True))
    step: Any = functools.partial(train_step, fabric, model, optimizer)
    if graph:
        options: dict[str, Any] = {"optimizers": (optimizer.optimizer,), "scaler": scaler, "graph": graph}
        step = ampkit.graphed(modules=(model,), on_failure="raise", **options)(step)
    torch.manual_seed(5)
    outputs = [step(x, y) for x, y in small_batches(device, 40 if scaler else 10)]
    state = state_of(net, optimizer.optimizer, [loss.detach() for loss, _ in outputs])
    scale = {} if scaler is None else {"scale": scaler.get_scale()}
    return {**state, "norms": [bits(norm) for _, norm in outputs], **scale}, step.replays if graph else 0


def _unclipped(fabric: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Do the step of the recipe without clipping, which Fabric refuses to a fused optimizer with a loss scale."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    fabric.backward(loss)
    optimizer.step()
    return loss, torch.zeros_like(loss)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.sampled(2)
def test_fabric(engine: tuple[str, str], precision: str) -> None:
    pytest.importorskip("lightning")
    graphed, replays = with_fabric(*engine, precision)
    assert replays == 10 - 3
    assert_same(graphed, with_fabric(engine[0], "off", precision)[0])
    assert_same(graphed, with_fabric(engine[0], "", precision)[0])


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_fabric_with_a_loss_scale(engine: tuple[str, str]) -> None:
    pytest.importorskip("lightning")
    graphed, replays = with_fabric(*engine, "16-mixed")
    assert replays == 40 - 3
    assert graphed["scale"] < 2.0**40
    assert_same(graphed, with_fabric(engine[0], "off", "16-mixed")[0])
    assert_same(graphed, with_fabric(engine[0], "", "16-mixed")[0])


def test_fabric_in_mixed_precision_asks_for_its_own_backward() -> None:
    """Why the recipe has `graphed`: Fabric refuses any other backward than its own, but not in float32."""
    pytest.importorskip("lightning")
    loss_fn = lambda model, x, y: nn.functional.cross_entropy(model(x), y)  # noqa: E731
    ((x, y),) = small_batches("cpu", 1)
    for precision in ("32-true", "bf16-mixed"):
        net = small_net()
        model, optimizer = fabric_of("cpu", precision, None).setup(net, torch.optim.AdamW(net.parameters(), fused=True))
        step = ampkit.graphed_step(loss_fn, model, optimizer.optimizer, graph="emulate")
        if precision == "32-true":
            step(x, y)
            continue
        with pytest.raises(RuntimeError, match=r"requires you to call `fabric.backward\(loss\)`"):
            step(x, y)


# ----------------------------------------------------------------------------------------------------------------- timm


def with_timm(name: str, device: str, graph: str, policy: str | None) -> tuple[dict[str, Any], int]:
    """Train for nine mixed batches; with torch and timm alone if `graph` is ""."""
    import timm
    from timm.utils import ModelEmaV3

    page = recipe("timm with EMA and mixup")
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2} if "vit" in name else {}
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, drop_path_rate=0.1, **sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    average = ModelEmaV3(model, decay=0.9)
    step: Any = None
    if graph:
        options: dict[str, Any] = {"policy": policy, "graph": graph, "after_step": average.update}
        step = ampkit.graphed_step(page["loss_fn"], model, optimizer, on_failure="raise", **options)
    made = torch.Generator().manual_seed(1)
    torch.manual_seed(5)
    numpy.random.seed(5)
    losses = []
    for _ in range(9):
        images, labels = torch.randn(8, 3, 32, 32, generator=made), torch.randint(10, (8,), generator=made)
        images, targets = page["mixup"](images.to(device), labels.to(device))
        if graph:
            losses.append(step(images, targets).loss)
            continue
        optimizer.zero_grad()
        loss = page["loss_fn"](model, images, targets)
        loss.backward()
        optimizer.step()
        average.update(model)
        losses.append(loss.detach())
    averaged = {f"average of {key}": bits(tensor) for key, tensor in average.module.state_dict().items()}
    return {**state_of(model, optimizer, losses), **averaged}, step.replays if graph else 0


@pytest.mark.parametrize("policy", [None, "bfloat16"])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "mobilenetv3_small_050"])  # LayerNorm, and BatchNorm
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_timm_with_an_average(engine: tuple[str, str], name: str, policy: str | None) -> None:
    pytest.importorskip("timm")
    graphed, replays = with_timm(name, *engine, policy)
    assert replays == 9 - 3
    assert_same(graphed, with_timm(name, engine[0], "off", policy)[0])
    if policy is None:
        assert_same(graphed, with_timm(name, engine[0], "", policy)[0])
