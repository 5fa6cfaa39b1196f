"""AmpkitCallback(validate="auto"): captured validation and test steps return and log what Lightning's do."""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from families import every
from harness import ENGINES, assert_same, deterministic
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from lightning_harness import (  # noqa: F401 - a fixture
    QUIET,
    Hooks,
    Net,
    Run,
    _silent,
    adamw,
    assert_same_runs,
    fit,
    fused,
    loader,
    precision,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassConfusionMatrix

import ampkit
from ampkit.lightning import AmpkitCallback

pytestmark = [
    *(pytest.mark.filterwarnings(text) for text in QUIET),
    pytest.mark.filterwarnings("ignore:.*You called `self.log.'correct'"),  # an integer, as users log it
]

Engine = tuple[str, str]
KINDS = ("32-true", "bf16-mixed", "16-mixed")
EPOCHS = 3


class Validated(Net):
    """Logs in every way that a value can be reduced, returns a tree, and validates with a short last batch."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self._evaluate("test", batch)

    def _evaluate(self, name: str, batch: Any) -> Any:
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.log(f"{name}_loss", loss)
        self.log(f"{name}_step", loss, on_step=True, on_epoch=True, batch_size=len(x))
        self.log("correct", (logits.argmax(1) == y).sum(), reduce_fx="sum")
        outer = torch.einsum("bi,bj->ij", x, x)  # autocast reaches its parts only
        self.log_dict({f"{name}_highest": logits.amax().float(), f"{name}_width": logits.shape[1]}, reduce_fx="max")
        return {
            "logits": logits,
            "views": [logits[:1], y],
            "outer": outer,
            "name": name,
            "width": logits.shape[1],
            "none": None,
        }

    def val_dataloader(self) -> Any:
        return short_last(5)


def short_last(batches: int, seed: int = 1) -> DataLoader[Any]:
    """Return a loader of batches of 8, the last of which has 3 samples."""
    whole = loader("cpu", batches, seed=seed).dataset
    return DataLoader(torch.utils.data.Subset(whole, range(8 * batches - 5)), 8)


class Outputs(Callback):
    """Keeps what the end of each batch of validation and test is told."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        self.kept.append(torch.utils._pytree.tree_map(_kept, outputs))

    on_test_batch_end = on_validation_batch_end


def _kept(leaf: Any) -> Any:
    return leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf


def with_outputs(folder: Path, device: str, way: str | None, **options: Any) -> tuple[Run, list[Any]]:
    """Fit with a module that validates; return the run, and what its validation steps returned."""
    outputs = Outputs()
    own = {"make": lambda: Validated(fused), "max_epochs": EPOCHS, **options}
    own["callbacks"] = [outputs, *own.get("callbacks", [])]
    return fit(folder, device, way, **own), outputs.kept


def assert_same_evaluations(folder: Path, device: str, graph: str, **options: Any) -> Run:
    """Assert that a fit with captured validation is what it is with Lightning's; return it."""
    callbacks = options.pop("callbacks", list)
    ways: list[tuple[str, dict[str, Any]]] = [(graph, {"validate": False}), (graph, {})]
    runs = [
        with_outputs(folder / str(i), device, way, options=ours, callbacks=callbacks(), **options)
        for i, (way, ours) in enumerate(ways)
    ]
    assert_same(runs[0][1], runs[1][1], "outputs")
    assert len(runs[0][1]) > 0
    assert_same_runs(runs[0][0], runs[1][0])
    assert runs[0][0].callback.report("validation_step").replays == 0
    return runs[1][0]


# ------------------------------------------------------------------------------------------------ the same as Lightning


@pytest.mark.parametrize(
    "kind",
    [
        "32-true",
        *(pytest.param(kind, marks=[pytest.mark.slow, pytest.mark.seeds]) for kind in KINDS if kind != "32-true"),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_validation_within_a_fit(engine: Engine, tmp_path: Path, kind: str) -> None:
    """L1, L3: outputs, logged metrics of steps and epochs, weights and checkpoints, with two layouts and sanity checks.

    Of 3 epochs of 4 batches of 8 and one of 3, each layout has 3 warm-up calls, and the first batch is one more.
    """
    device, graph = engine
    run = assert_same_evaluations(tmp_path, device, graph, kind=kind, num_sanity_val_steps=2)
    report = run.callback.report("validation_step")
    assert (report.replays, report.captures, report.eager) == (8, 1, {"warm-up": 7})
    assert run.report.replays == 30
    if device == "cpu":
        plain, _ = with_outputs(tmp_path / "plain", device, None, kind=kind, num_sanity_val_steps=2)
        assert_same_runs(plain, run)


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.quick(2)
def test_validate_and_test_alone(engine: Engine, tmp_path: Path, inference: bool) -> None:
    """L3: without a fit, in inference mode and under no_grad. A second call begins anew, the steps are put back."""
    device, graph = engine
    results, kept = [], []
    for ours in (None, AmpkitCallback(graph=graph, on_failure="raise")):
        torch.manual_seed(3)
        module, outputs = Validated(), Outputs()
        trainer = evaluator(tmp_path, device, [outputs, *([ours] if ours else [])], inference_mode=inference)
        with deterministic():
            results.append(
                [
                    trainer.validate(module, short_last(6), verbose=False),
                    trainer.test(module, short_last(6, seed=2), verbose=False),
                    trainer.validate(module, short_last(5), verbose=False),
                ]
            )
        kept.append(outputs.kept)
        assert not {"validation_step", "test_step", "training_step"} & vars(trainer.strategy).keys()
        assert "log" not in vars(module)
    assert results[0] == results[1]
    assert_same(*kept)
    assert ours is not None
    assert ours.report("test_step").replays == 1
    assert ours.report("validation_step").replays == 0  # of the second time
    assert ours.report().replays == 0


def evaluator(folder: Path, device: str, callbacks: list[Any], **options: Any) -> pl.Trainer:
    return pl.Trainer(
        default_root_dir=folder,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**precision("32-true", device), **options},
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_that_is_collated_in_inference_mode(engine: Engine, tmp_path: Path) -> None:
    """L3: Lightning fetches batches in inference mode, where a collate function makes tensors of inference mode."""
    device, graph = engine
    torch.manual_seed(0)
    module = Validated()
    data = DataLoader([(torch.randn(8), torch.tensor(i % 4)) for i in range(24)], batch_size=4)
    plain = evaluator(tmp_path / "plain", device, []).test(module, data, verbose=False)
    callback = AmpkitCallback(graph=graph, on_failure="raise")
    assert evaluator(tmp_path / "ours", device, [callback]).test(module, data, verbose=False) == plain
    assert callback.report("test_step").replays == 2


class TwoLoaders(Validated):
    """Does something else with the second dataloader, whose batches have the same layout."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        out = self._evaluate("val", batch)
        if dataloader_idx == 1:
            self.log("second", out["logits"].mean(), add_dataloader_idx=False)
            out["logits"] = out["logits"] * 2
        return out

    def val_dataloader(self) -> Any:
        return [short_last(4), short_last(3, seed=5)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_several_dataloaders(engine: Engine, tmp_path: Path) -> None:
    """L3: each dataloader has graphs of its own, and metrics under its own index."""
    device, graph = engine
    run = assert_same_evaluations(tmp_path, device, graph, make=lambda: TwoLoaders(fused))
    report = run.callback.report("validation_step")
    assert report.captures == 2
    assert report.replays == 9 - 4 + 6 - 4
    assert "val_loss/dataloader_idx_1" in run.trainer.callback_metrics


class MeasuresSlopes(Net):
    """Logs a gradient, and doubles it where autograd may use no threads of its own."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            x = batch[0].detach().requires_grad_()
            y = self.net(x)
            y.register_hook(lambda grad: grad if torch._C._is_multithreading_enabled() else grad * 2)
            (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        self.log("slope", slope.detach().square().mean())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_gradients_of_gradients(engine: Engine, tmp_path: Path) -> None:
    """The graph of a gradient is made in the calling thread, eagerly and in a capture, see `run_backwards_here`."""
    device, graph = engine
    fitted: dict[str, Any] = {"make": MeasuresSlopes, "validate": True, "inference_mode": False, "max_epochs": EPOCHS}
    # Both train by ampkit, since AdamW that is not fused has other last bits in a graph.
    expected, found = (
        fit(tmp_path / str(validate), device, graph, options={"validate": validate}, **fitted)
        for validate in (False, "auto")
    )
    assert expected.trainer.callback_metrics["slope"] * 4 == found.trainer.callback_metrics["slope"]
    assert found.callback is not None
    assert found.callback.report("validation_step").replays > 0


class Draws(Validated):
    """Draws random numbers in validation, writes to a buffer, and reads the epoch and a number that changes."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.register_buffer("seen", torch.zeros(()))
        self.weight = 1.0

    def on_validation_epoch_start(self) -> None:
        self.weight = 0.5 if self.current_epoch == 2 else 1.0

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        out = self._evaluate("val", batch)
        self.seen += 1
        noisy = out["logits"] + self.weight * torch.randn_like(out["logits"]) + F.dropout(out["logits"], 0.5)
        self.log("epochs", float(self.current_epoch // 2))
        return {"noisy": noisy, "seen": self.seen}

    def val_dataloader(self) -> Any:
        return loader("cpu", 6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_random_numbers_buffers_and_numbers(engine: Engine, tmp_path: Path) -> None:
    """G5, L1: a replay draws what an eager step draws, so training goes on with the same bits; a buffer counts on."""
    device, graph = engine
    with pytest.warns(ampkit.CaptureWarning, match=r"validation_step: the attribute model\.weight changed"):
        run = assert_same_evaluations(tmp_path, device, graph, make=lambda: Draws(fused))
    assert run.module.seen == 18
    report = run.callback.report("validation_step")
    assert (report.captures, report.replays) == (3, 8)  # one for each epoch, whose number the step reads


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_averaged_weights(engine: Engine, tmp_path: Path) -> None:
    """L3: EMAWeightAveraging copies its weights into the parameters around validation; graphs are kept."""
    device, graph = engine
    callbacks = lambda: [EMAWeightAveraging(decay=0.9)]  # noqa: E731
    run = assert_same_evaluations(tmp_path, device, graph, callbacks=callbacks, num_sanity_val_steps=2)
    report = run.callback.report("validation_step")
    assert (report.captures, report.replays) == (1, 8)


class SwapsMemory(Callback):
    """Gives the parameters other memory during validation: the same each time, or new memory."""

    def __init__(self, new: bool) -> None:
        self.new = new
        self.kept: list[Tensor] = []

    def on_validation_start(self, trainer: Any, module: pl.LightningModule) -> None:
        params = list(module.parameters())
        if self.new or not self.kept:
            self.before_last, self.kept = self.kept, [param.detach() * 0.5 for param in params]
        for param, kept in zip(params, self.kept, strict=True):
            param.data, kept.data = kept.data, param.data

    def on_validation_end(self, trainer: Any, module: pl.LightningModule) -> None:
        for param, kept in zip(module.parameters(), self.kept, strict=True):
            param.data, kept.data = kept.data, param.data


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.filterwarnings("ignore:AmpkitCallback, validation_step. a parameter or buffer was moved to other memory")
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_weights_in_other_memory(engine: Engine, tmp_path: Path, new: bool) -> None:
    """G12: a graph reads the memory of its capture. Where parameters are elsewhere now, it is dropped, and the values
    stay right."""
    device, graph = engine
    run = assert_same_evaluations(tmp_path, device, graph, callbacks=lambda: [SwapsMemory(new)])
    report = run.callback.report("validation_step")
    assert report.captures == (2 if new else 1)
    assert run.report.replays == 30  # the training step finds its own memory again


class FitsTwice(Callback):
    """Raises in the second epoch of validation."""

    def on_validation_batch_end(self, trainer: Any, *rest: Any) -> None:
        if trainer.current_epoch == 1:
            raise RuntimeError("stop")


@pytest.mark.slow
def test_an_error_gives_the_steps_back(tmp_path: Path) -> None:
    """After an error the strategy has Lightning's steps again."""
    callback = FitsTwice()
    module = Validated()
    ours = AmpkitCallback(graph="emulate")
    trainer = evaluator(tmp_path, "cpu", [callback, ours], max_epochs=2)
    with pytest.raises(RuntimeError, match="stop"):
        trainer.fit(module, loader("cpu"))
    assert not {"validation_step", "test_step", "training_step"} & vars(trainer.strategy).keys()
    assert ours.report("validation_step").replays == 1


@pytest.mark.slow
def test_verify(tmp_path: Path) -> None:
    """verify compares the first replays of validation with eager steps, too."""
    run, kept = with_outputs(tmp_path / "1", "cpu", "emulate", options={"verify": 2})
    plain, expected = with_outputs(tmp_path / "2", "cpu", "emulate", options={"validate": False})
    assert_same(kept, expected)
    assert_same_runs(plain, run)
    assert run.callback.report("validation_step").replays == 8


# -------------------------------------------------------------------------------------------- what cannot be captured


class Counts(Validated):
    calls = 0

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return super().validation_step(batch, batch_idx)


class Appends(Validated):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.losses.append(self.net(batch[0]).sum())

    def on_validation_epoch_end(self) -> None:
        self.log("sum", torch.stack(self.losses).sum())
        self.losses.clear()


class UsesIndex(Validated):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            self.log("first", self.net(batch[0]).sum())
        return super().validation_step(batch, batch_idx)


class ReadsStep(Validated):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("steps", self.global_step + self.net(batch[0]).sum())


class LogsNumber(Validated):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter(range(1000))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("number", float(next(self.numbers)))


class Reads(Validated):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if float(self.net(batch[0]).sum()) > 1e6:
            raise ValueError("diverged")
        return super().validation_step(batch, batch_idx)


class Result:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class ReturnsObject(Validated):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return Result(super().validation_step(batch, batch_idx)["logits"])


class UpdatesMetric(Validated):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean(self._sum(batch))
        self.log("mean", self.mean)

    def _sum(self, batch: Any) -> Tensor:
        return self.net(batch[0]).sum() + torch.einsum("bi,bj->ij", batch[0], batch[0]).sum()


class UsesMetric(UpdatesMetric):
    """Computes with what a metric returns, which is there behind the step only."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("mean", self.mean(self._sum(batch)) + self.net(batch[0]).mean())


class UpdatesMetricBehind(UpdatesMetric):
    """The same, where a replay does not leave it out."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self._sum(batch)

    def on_validation_batch_end(self, outputs: Any, *rest: Any) -> None:
        self.mean(outputs)
        self.log("mean", self.mean, on_step=False, on_epoch=True)


class UpdatesInPlace(Validated):
    """Updates a metric in place, whose state is a tensor of inference mode after the sanity check."""

    def __init__(self) -> None:
        super().__init__()
        self.confusion = MulticlassConfusionMatrix(4)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.confusion.update(self.net(batch[0]).argmax(1), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log("hits", self.confusion.compute().trace().float())
        self.confusion.reset()


class Hidden(nn.Module):
    """Has a tensor that is no buffer, made anew for each epoch and changed in place."""

    total: Tensor

    def begin(self) -> None:
        self.total = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum()
        return x


class ChangesHidden(Validated):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = Hidden()

    def on_validation_epoch_start(self) -> None:
        self.hidden.begin()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.hidden(self.net(batch[0]))

    def on_validation_epoch_end(self) -> None:
        self.log("total", self.hidden.total)


class KeepsMetrics(Validated):
    """Has a metric that is no part of the module, as far as torch knows."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = {"mean": MeanMetric()}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.metrics["mean"].update(self.net(batch[0]).sum())

    def on_validation_epoch_end(self) -> None:
        self.log("mean", self.metrics["mean"].compute())
        self.metrics["mean"].reset()


class Adapts(Validated):
    """Computes gradients in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.enable_grad():
            F.cross_entropy(self.net(batch[0]), batch[1]).backward()
        self.log("size", sum(param.grad.abs().sum() for param in self.net.parameters()))
        self.zero_grad()


class LeavesGradients(Adapts):
    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.training:
            super().zero_grad(set_to_none)


REFUSED = [
    (Counts, {}, "validation_step changes self.calls on the host"),
    (Appends, {}, "validation_step changes self.losses on the host"),
    (UsesIndex, {}, "validation_step computes with batch_idx"),
    (ReadsStep, {}, '`self.log("steps", self.global_step + self.net(batch[0]).sum())` - reads global_step'),
    (LogsNumber, {}, "self.log('number', 1.0) in validation_step"),
    (Reads, {}, "if float(self.net(batch[0]).sum()) > 1e6:"),
    (ReturnsObject, {}, "validation_step returns a Result"),
    (UsesMetric, {}, "validation_step updates self.mean, a metric of torchmetrics, while it runs"),
]


@pytest.mark.parametrize(("make", "options", "message"), every(3, REFUSED), ids=[case[2][:40] for case in REFUSED])
@pytest.mark.sampled(4)
@pytest.mark.slow
def test_left_to_lightning(tmp_path: Path, make: Any, options: dict[str, Any], message: str) -> None:
    """L3: what a replay would leave out or freeze is found in the warm-up, and said once; Lightning validates."""
    plain = fit(tmp_path / "plain", "cpu", None, make=make, max_epochs=EPOCHS, **options)
    eager = {"on_failure": "eager"}
    with pytest.warns(ampkit.CaptureWarning, match=re.escape(message)) as caught:
        ours = fit(tmp_path / "ours", "cpu", "emulate", make=make, max_epochs=EPOCHS, options=eager, **options)
    assert len([warning for warning in caught if issubclass(warning.category, ampkit.CaptureWarning)]) == 1
    assert_same_runs(plain, ours)
    report = ours.callback.report("validation_step")
    assert report.replays == 0
    assert message in report.failure
    assert ours.report.replays == 30
    with pytest.raises(ampkit.CaptureError, match=re.escape(message)):
        fit(tmp_path / "raise", "cpu", "emulate", make=make, max_epochs=EPOCHS, **options)


@pytest.mark.parametrize("make", [UpdatesMetric, UpdatesInPlace, KeepsMetrics])
@pytest.mark.parametrize("kind", ["32-true", "bf16-mixed"])
def test_metrics_that_are_updated(tmp_path: Path, make: Any, kind: str) -> None:
    """L7: metrics that a captured validation step updates have the values that they have with Lightning alone."""
    options: dict[str, Any] = {"make": make, "max_epochs": EPOCHS, "num_sanity_val_steps": 2, "kind": kind}
    runs = [fit(tmp_path / str(graph), "cpu", graph, **options) for graph in (None, "emulate")]
    assert_same_runs(*runs)
    assert runs[1].callback.report("validation_step").replays == 8


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_metric_that_is_updated_behind_the_step(engine: Engine, tmp_path: Path) -> None:
    """L1: what the warning advises has the values of a metric that is updated in the step."""
    device, graph = engine
    options: dict[str, Any] = {"max_epochs": EPOCHS, "num_sanity_val_steps": 2, "kind": "bf16-mixed"}
    within = fit(tmp_path / "1", device, graph, make=UpdatesMetric, options={"validate": False}, **options)
    behind = fit(tmp_path / "2", device, graph, make=UpdatesMetricBehind, **options)
    assert_same(within.state()["metrics"], behind.state()["metrics"])
    assert behind.callback.report("validation_step").replays == 8


class ShowsInTheBar(Validated):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]), prog_bar=True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_mean_in_the_progress_bar_is_no_wait(engine: Engine, tmp_path: Path) -> None:
    """In validation Lightning reads it at the end only, so that there is nothing to warn of."""
    device, graph = engine
    runs = [
        fit(tmp_path / str(validate), device, graph, make=ShowsInTheBar, max_epochs=2, options={"validate": validate})
        for validate in (False, "auto")
    ]
    assert_same_runs(*runs)
    assert runs[1].callback.report("validation_step").replays == 4


def test_a_tensor_of_inference_mode_that_changes(tmp_path: Path) -> None:
    """R7: a graph is captured outside of inference mode, where no such tensor may be written to: Lightning does it."""
    results = []
    for ours in (None, AmpkitCallback(graph="emulate")):
        torch.manual_seed(3)
        trainer = evaluator(tmp_path, "cpu", [ours] if ours else [])
        with pytest.warns() as caught:
            results.append(trainer.validate(ChangesHidden(), short_last(6), verbose=False))
    assert results[0] == results[1]
    (warning,) = [one for one in caught if issubclass(one.category, ampkit.CaptureWarning)]
    assert "validation_step changes a tensor that was made in inference mode" in str(warning.message)


@pytest.mark.slow
def test_gradients_in_validation(tmp_path: Path) -> None:
    """Gradients that end with the step are a part of its graph. One that leaves some is left to Lightning."""
    options: dict[str, Any] = {"max_epochs": EPOCHS, "inference_mode": False}
    plain = fit(tmp_path / "plain", "cpu", "emulate", make=Adapts, options={"validate": False}, **options)
    ours = fit(tmp_path / "ours", "cpu", "emulate", make=Adapts, **options)
    assert_same_runs(plain, ours)
    assert ours.callback.report("validation_step").replays == 8
    with pytest.warns(ampkit.CaptureWarning, match="validation_step leaves gradients of parameters"):
        fit(tmp_path / "left", "cpu", "emulate", make=LeavesGradients, options={"on_failure": "eager"}, **options)


@pytest.mark.parametrize("validate", [True, None, "always"])
def test_wrong_arguments(validate: Any) -> None:
    """Two values are possible, and a report has three names."""
    with pytest.raises(ValueError, match=r"AmpkitCallback\(validate="):
        AmpkitCallback(validate=validate)
    with pytest.raises(ValueError, match=r"AmpkitCallback.report\(step='validate'\)"):
        AmpkitCallback().report("validate")


def test_two_callbacks_are_refused(tmp_path: Path) -> None:
    """In validate too: the second one would capture the steps of the first."""
    trainer = evaluator(tmp_path, "cpu", [AmpkitCallback(graph="emulate"), AmpkitCallback(graph="emulate")])
    with pytest.raises(ValueError, match="there are two AmpkitCallbacks"):
        trainer.validate(Validated(), verbose=False)
    assert "validation_step" not in vars(trainer.strategy)
