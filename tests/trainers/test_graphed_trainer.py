"""A Trainer of transformers with `GraphedTrainerMixin` has the bits of the Trainer without it."""

import json
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import trainer_setups
from harness import ENGINES, assert_same, bits
from models import repeatable
from ports import printed_by_two_ranks
from tape import taped
from torch import Tensor
from trainer_setups import graphed, state_of, taken_for_installed, trained, trainer_of

import ampkit
from ampkit.transformers import GraphedTrainerMixin
from ampkit.transformers._limits import PRIVATE_NAMES

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

Engine = tuple[str, str]

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def repeatable_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first use of cuBLAS
    python, of_numpy = random.getstate(), numpy.random.get_state()  # the Trainer seeds both
    with repeatable(strict=True), taken_for_installed():
        yield
    random.setstate(python)
    numpy.random.set_state(of_numpy)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


LINEAR = {"lr_scheduler_type": "linear", "warmup_steps": 3}  # on CUDA its rates are rounded to float32
OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16, labels smoothed": {"bf16": True, "label_smoothing_factor": 0.1},
    "mean of micro-batches": {"by_tokens": False, "bf16": True},
    "one micro-batch": {"gradient_accumulation_steps": 1, "weight_decay": 0.1},
    "an optimizer that counts on the host": {"optim": "adafactor"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.quick(3)
def test_equals_the_trainer(engine: Engine, options: dict[str, Any]) -> None:
    device, graph = engine
    if device == "cpu":
        options = {**LINEAR, **options}
    counts = pytest.warns(ampkit.CaptureWarning, match="the optimizer steps eagerly behind them")
    with counts if "optim" in options else nullcontext():
        trainer, state = trained(graphed(transformers.Trainer, graph=graph), device, **options)
    assert_same(state, trained(transformers.Trainer, device, **options)[1])
    report, short = trainer.graph_report(), options.get("gradient_accumulation_steps") == 1
    # The one micro-batch of a last window has its own layout, of which there are two calls.
    assert (report.captures, report.replays) == ((1, 22 - 4) if short else (2, 20 - 8))


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=str)
def test_nothing_of_the_host_is_frozen(precision: dict[str, Any]) -> None:
    """A tape holds what a CUDA graph would hold."""
    with taped():
        trainer, state = trained(graphed(transformers.Trainer, graph="emulate"), "cpu", **LINEAR, **precision)
    assert trainer.graph_report().replays == 20 - 8
    assert_same(state, trained(transformers.Trainer, "cpu", **LINEAR, **precision)[1])


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_clipping(engine: Engine) -> None:
    """It is ampkit's, so the last bits differ; with arithmetic="torch" they do not."""
    device, graph = engine
    plain, expected = trained(transformers.Trainer, device, max_grad_norm=0.25)
    kind = graphed(transformers.Trainer, graph=graph, arithmetic="torch")
    trainer, state = trained(kind, device, max_grad_norm=0.25)
    assert trainer.graph_report().replays == 20 - 8
    assert_same(state, expected)
    trainer, _ = trained(graphed(transformers.Trainer, graph=graph), device, max_grad_norm=0.25)
    for one, other in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    norms = [[row["grad_norm"] for row in each.state.log_history if "grad_norm" in row] for each in (trainer, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert min(norms[0]) > 0.25


class ChangesLoss(transformers.Trainer):
    """Changes the loss in training."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        first = inputs["input_ids"][0, 0]
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return self.changed(loss, first) if self.model.training else loss

    def changed(self, loss: Tensor, first: Tensor) -> Tensor:
        raise NotImplementedError


class Scaled(ChangesLoss):
    """Has a loss scale on the CPU too, where accelerate has none, and gradients that are not finite in some batches."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        device = "cpu" if self.args.use_cpu else "cuda"
        accelerator, scaler = self.accelerator, torch.amp.GradScaler(device, growth_interval=2)
        accelerator.scaler = scaler
        accelerator.unscale_gradients = lambda: scaler.unscale_(self.optimizer.optimizer)  # as accelerate does in fp16

    def changed(self, loss: Tensor, first: Tensor) -> Tensor:
        return loss * torch.where(first % 4 == 0, torch.inf, 1.0)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_loss_scale(engine: Engine, optim: str) -> None:
    """Skipped steps are skipped, and the schedule is where the Trainer has it, which gets its scale back.

    The Trainer leaves the schedule in a skipped step only if the optimizer is not fused.
    """
    device, graph = engine
    if device == "cuda" and optim == "adamw_torch":
        pytest.skip("the step is capturable there, and computes its bias correction in float32")
    options = {"lr_scheduler_type": "cosine" if device == "cpu" else "constant", "num_train_epochs": 4, "optim": optim}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*lr_scheduler.step")  # of the Trainer alone, whose first step is skipped
        plain, expected = trained(Scaled, device, **options)
        trainer, state = trained(graphed(Scaled, graph=graph), device, **options)
    for each in (expected, state):  # nan is no number to compare
        each["logged"] = [{**row, "grad_norm": str(row.get("grad_norm"))} for row in each["logged"]]
    assert_same(state, expected)
    report = trainer.graph_report()
    assert report.skipped > 1
    assert report.replays > 20
    assert type(trainer.accelerator.scaler) is torch.amp.GradScaler
    assert trainer.optimizer.scaler is trainer.accelerator.scaler
    assert trainer.accelerator.scaler.state_dict() == plain.accelerator.scaler.state_dict()


class Broken(ChangesLoss):
    """The losses of some batches are nan, and not their gradients."""

    def changed(self, loss: Tensor, first: Tensor) -> Tensor:
        return loss + torch.where(first % 4 == 0, torch.nan, 0.0)


@pytest.mark.parametrize("filters", [True, False])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_losses_that_are_not_finite(engine: Engine, filters: bool) -> None:
    """They are left out of what is logged, and the arguments are as before."""
    device, graph = engine
    options: dict[str, Any] = {"logging_nan_inf_filter": filters, "logging_steps": 3}
    trainer, state = trained(graphed(Broken, graph=graph), device, **options)
    _, plain = trained(Broken, device, **options)
    assert str(state["logged"]) == str(plain["logged"])
    assert ("nan" in str(plain["logged"])) is not filters
    assert trainer.args.logging_nan_inf_filter is filters
    assert_same({**state, "logged": 0}, {**plain, "logged": 0})


class Weighted(ChangesLoss):
    """Reads a number of its own in each step, that a callback changes."""

    weight = 1.0

    def changed(self, loss: Tensor, first: Tensor) -> Tensor:
        return loss * self.weight


class Lowers(transformers.TrainerCallback):
    """Lowers the weight of the loss after the fifth step."""

    trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            self.trainer.weight = 0.5


def test_a_number_of_a_loss_of_the_users() -> None:
    """A replay would not see that it changes, so the change is noticed, and said."""

    def run(kind: type) -> tuple[Any, dict[str, Any]]:
        lowers = Lowers()
        trainer = lowers.trainer = trainer_of(kind, "cpu", [lowers])
        trainer.train()
        return trainer, state_of(trainer)

    with taped(), pytest.warns(ampkit.CaptureWarning, match=r"self.weight changed from 1.0 to 0.5"):
        trainer, state = run(graphed(Weighted, graph="emulate"))
    assert trainer.graph_report().replays == 20 - 2 * 8
    assert_same(state, run(Weighted)[1])


class Clips(transformers.TrainerCallback):
    """Begins to clip after the fifth step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        args.max_grad_norm = 0.25 if state.global_step >= 5 else 0.0


def test_another_norm_to_clip_to() -> None:
    kind = graphed(transformers.Trainer, graph="emulate", arithmetic="torch")
    trainer, state = trained(kind, "cpu", callbacks=[Clips()])
    assert trainer.graph_report().replays == 2  # of the graphs that clip
    assert_same(state, trained(transformers.Trainer, "cpu", callbacks=[Clips()])[1])


class Reads(ChangesLoss):
    """Reads a number from the device in each step."""

    def changed(self, loss: Tensor, first: Tensor) -> Tensor:
        return loss * (1 + loss.item() / 1024)


def test_a_loss_that_reads_the_device(untimed: None) -> None:
    """The line is named, and the modules around it are captured one by one."""
    with pytest.warns(ampkit.CaptureWarning, match=r"loss.item\(\)"):
        trainer, state = trained(graphed(Reads, graph="emulate"), "cpu")
    assert "captured by itself: transformer.h.0" in str(trainer.graph_report())
    assert_same(state, trained(Reads, "cpu")[1])


class OfGradients(transformers.TrainerCallback):
    """Keeps a gradient of each optimizer step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen.append(bits(model.transformer.ln_f.bias.grad))


@pytest.mark.parametrize("kind", [transformers.Trainer, Scaled])
@pytest.mark.parametrize("engine", [*ENGINES, ("cpu", "tape")], ids=str)
def test_a_callback_that_reads_gradients(engine: Engine, kind: type) -> None:
    """It finds the gradients: the Trainer does clipping and optimizer step itself, and a warning says why."""
    device, graph = engine
    tape, graph = (taped(), "emulate") if graph == "tape" else (nullcontext(), graph)
    options = {"max_grad_norm": 0.5, "lr_scheduler_type": "cosine"}
    found, expected = OfGradients(), OfGradients()
    with tape, pytest.warns(ampkit.CaptureWarning, match="OfGradients.on_pre_optimizer_step may read gradients"):
        trainer, state = trained(graphed(kind, graph=graph), device, callbacks=[found], **options)
    _, plain = trained(kind, device, callbacks=[expected], **options)
    for each in (plain, state):  # nan is no number to compare
        each["logged"] = str(each["logged"])
    assert_same(state, plain)
    assert len(found.seen) == 12
    assert_same(found.seen, expected.seen)
    assert trainer.graph_report().replays > 4
    with pytest.raises(ampkit.CaptureError, match="OfGradients"):
        trained(graphed(kind, graph=graph, on_failure="raise"), device, callbacks=[OfGradients()])


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_resume(engine: Engine) -> None:
    """A run that is saved and resumed has the bits of one without a break, whichever of the two was graphed."""
    device, graph = engine
    options = {"eval_strategy": "no", "save_strategy": "steps", "save_steps": 7, "logging_steps": 100}
    kind = graphed(transformers.Trainer, graph=graph)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*config.dtype changed from None to 'float32'")  # by saving
        _, whole = trained(kind, device, **options)
    for resumes in (kind, transformers.Trainer):
        trainer = trainer_of(resumes, device, **options)
        trainer.train(resume_from_checkpoint="output/checkpoint-7")
        assert_same({**state_of(trainer), "logged": 0}, {**whole, "logged": 0})
    arguments = torch.load("output/checkpoint-7/training_args.bin", weights_only=False)
    assert arguments.logging_nan_inf_filter


def test_two_trainings() -> None:
    """The second one has graphs of its own, and the Trainer has its optimizer back behind each."""
    runs = []
    for kind in (graphed(transformers.Trainer, graph="emulate"), transformers.Trainer):
        trainer = trainer_of(kind, "cpu", lr_scheduler_type="cosine")
        for _ in range(2):
            trainer.train()
            assert "_own" not in vars(trainer.optimizer.step)
        runs.append(state_of(trainer))
    assert_same(*runs)


class OwnStep(transformers.Trainer):
    """Has a `training_step` of its own, as a Trainer of TRL."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs) * 2


def test_a_training_step_of_the_users() -> None:
    """Behind the mixin it is a part of the graph; in front of it, it is called behind each replay."""
    _, plain = trained(OwnStep, "cpu")
    behind, state = trained(graphed(OwnStep, graph="emulate"), "cpu")
    assert_same(state, plain)
    in_front = type("InFront", (OwnStep, graphed(transformers.Trainer, graph="emulate")), {})
    trainer, state = trained(in_front, "cpu")
    assert_same(state, plain)
    assert behind.graph_report().replays == trainer.graph_report().replays == 20 - 8


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match=r"Write class Late\(GraphedTrainerMixin, Trainer\)"):
        type("Late", (transformers.Trainer, GraphedTrainerMixin), {})
    trainer = trainer_of(graphed(transformers.Trainer, accumulate=2), "cpu")
    with pytest.raises(ValueError, match=r"before"):
        trainer.graph_report()
    with pytest.raises(ValueError, match=r"graph_options has 'accumulate': expected some of warmup"):
        trainer.train()
    with pytest.raises(ValueError, match=r"graph='cuda'"):
        trained(graphed(transformers.Trainer, graph="cuda"), "cpu")


UNSUPPORTED = {
    "torch_empty_cache_steps": {"torch_empty_cache_steps": 2},
    "sync_each_batch": {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
}


@pytest.mark.parametrize(("text", "options"), UNSUPPORTED.items())
def test_what_is_left_to_the_trainer(text: str, options: dict[str, Any]) -> None:
    with pytest.warns(ampkit.CaptureWarning, match=text):
        trainer, state = trained(graphed(transformers.Trainer, graph="emulate"), "cpu", **options)
    assert trainer.graph_report().replays == 0
    assert_same(state, trained(transformers.Trainer, "cpu", **options)[1])


def test_private_names() -> None:
    """They are there; of what an object gets when it is made, its code says so."""
    from accelerate.optimizer import AcceleratedOptimizer

    for name in PRIVATE_NAMES:
        owner, attribute = name.split(".")
        kind = {"Trainer": transformers.Trainer, "AcceleratedOptimizer": AcceleratedOptimizer}[owner]
        assert hasattr(kind, attribute) or attribute in kind.__init__.__code__.co_names


@pytest.mark.slow
@pytest.mark.ranks
def test_two_processes(tmp_path: Path) -> None:
    """Under DDP the bits are those of the Trainer; gradients are averaged once per optimizer step."""
    support = Path(trainer_setups.__file__).parent
    benchmarks = support.parent / "benchmarks"
    printed = printed_by_two_ranks(
        support / "trainer_ranks.py", str(tmp_path), folders=(benchmarks,), begins='{"float32"'
    )
    rows = json.loads(printed)
    assert not [row["differs"] for row in rows.values() if row["differs"]]
    assert [row["replays"] for row in rows.values()] == [28, 28, 32, 0]
    assert "ddp_find_unused_parameters=False" in rows["looks for unused parameters"]["failure"]
