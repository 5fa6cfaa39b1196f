"""ampkit.lightning: what a Trainer does with the callback is what it does without, to the last bit."""

import csv
import re
import subprocess
import sys
import warnings
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import lightning_ddp
import pytest
import torch
from families import every
from harness import ENGINES, assert_same, bits
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning_harness import QUIET, RATE, Batches, Net, _silent, adamw, assert_same_runs, fit, fused, halving, loader  # noqa: F401
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

import ampkit
from ampkit.lightning import AmpkitCallback

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]

Engine = tuple[str, str]
KINDS = ("32-true", "bf16-mixed", "16-mixed")


# ------------------------------------------------------------------------------------------------ the same as Lightning


# The cases that are not slow: every two values of two arguments meet in one of them.
QUICK = [
    ("32-true", 1, None, "step"),
    ("32-true", 3, 0.1, "epoch"),
    ("bf16-mixed", 1, 0.1, "epoch"),
    ("bf16-mixed", 3, None, "step"),
    ("16-mixed", 1, None, "epoch"),
    ("16-mixed", 3, 0.1, "step"),
]


@pytest.mark.parametrize(
    ("kind", "accumulate", "clip", "interval"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(KINDS, (1, 3), (None, 0.1), ("step", "epoch"))
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.sampled(8)
def test_equals_lightning(
    engine: Engine, tmp_path: Path, kind: str, accumulate: int, clip: float | None, interval: str
) -> None:
    """L1: weights, moments, global_step, learning rate, logged metrics, hook counts, outputs of each batch, checkpoint
    keys and loss scale are those of Lightning without ampkit, bit by bit.

    Where clipping is folded into a division that torch does in separate passes, and so rounds otherwise (float16; fused
    kernels, which alone are the same on CUDA), the reference is ampkit without a graph. The next two tests compare with
    Lightning.
    """
    device, graph = engine
    folded = clip is not None and (kind == "16-mixed" or device == "cuda")
    make = fused if device == "cuda" else adamw
    options: dict[str, Any] = {"kind": kind, "accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    runs = [
        fit(tmp_path / str(way), device, way, make=lambda: Net(make, halving, interval), **options)
        for way in ("off" if folded else None, graph)
    ]
    assert_same_runs(*runs)
    report = runs[1].report
    assert report.replays == 22 - 3 * (3 if accumulate == 3 else 1)
    assert report.captures == (3 if accumulate == 3 else 1)
    assert (report.skipped > 0) == (kind == "16-mixed")


@pytest.mark.parametrize("kind", ["32-true", "bf16-true"])  # Lightning refuses it in bf16-mixed, too
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_fused_clipping_that_clips_nothing_equals_lightning(engine: Engine, tmp_path: Path, kind: str) -> None:
    """L1: a limit that no gradient reaches is a division by 1, which is exact."""
    device, graph = engine
    runs = [
        fit(tmp_path / str(way), device, way, make=lambda: Net(fused), kind=kind, gradient_clip_val=1e4)
        for way in (None, graph)
    ]
    assert_same_runs(*runs)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_clipping_of_float16_is_that_of_lightning(tmp_path: Path, accumulate: int) -> None:
    """L1: it rounds once where Lightning rounds twice; the steps that are skipped are the same."""
    options: dict[str, Any] = {"kind": "16-mixed", "gradient_clip_val": 0.1, "accumulate_grad_batches": accumulate}
    plain, ours = (fit(tmp_path / str(way), "cpu", way, **options) for way in (None, "emulate"))
    for left, right in zip(plain.module.parameters(), ours.module.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)
    assert plain.state()["loss scale"] == ours.state()["loss scale"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_clipping_by_value_equals_lightning(engine: Engine, tmp_path: Path, kind: str) -> None:
    """L1: gradient_clip_algorithm="value" clamps the unscaled gradients, and an overflow still skips."""
    device, graph = engine
    way = fused if device == "cuda" else adamw
    reference = None if device == "cpu" or kind == "32-true" else "off"  # Lightning refuses mixed, fused and clipped
    options: dict[str, Any] = {"kind": kind, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    runs = [fit(tmp_path / str(g), device, g, make=lambda: Net(way), **options) for g in (reference, graph)]
    assert_same_runs(*runs)
    assert runs[1].report.replays == 19


@pytest.mark.parametrize("kind", ["bf16-true", "16-true"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_half_precision_modules(engine: Engine, tmp_path: Path, kind: str) -> None:
    """The module's parameters are of the low dtype, and there is no loss scale."""
    device, graph = engine
    make = fused if device == "cuda" else adamw
    runs = [fit(tmp_path / str(way), device, way, make=lambda: Net(make), kind=kind) for way in (None, graph)]
    assert_same_runs(*runs)
    assert runs[1].report.replays == 19


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_fused_float16_with_clipping(engine: Engine, tmp_path: Path) -> None:
    """L5: Lightning refuses it; here it works, and a graph computes what eager steps do."""
    device, graph = engine
    options: dict[str, Any] = {"make": lambda: Net(fused), "kind": "16-mixed", "gradient_clip_val": 0.1}
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(tmp_path / "lightning", device, None, **options)
    runs = [fit(tmp_path / way, device, way, **options) for way in ("off", graph)]
    assert_same_runs(*runs)
    assert runs[1].report.replays == 19
    assert runs[1].report.skipped > 0


class Forms(Net):
    """Returns the loss as a tensor of shape (1,), logs values that the step itself changes."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y).reshape(1)
        self.log("bias", self.net[0].bias[0])
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("engine", ENGINES)
def test_other_forms_of_training_step(engine: Engine, tmp_path: Path) -> None:
    """No batch_idx, a loss of shape (1,), and a parameter that is logged as it was before the step."""
    device, graph = engine
    runs = [fit(tmp_path / str(way), device, way, make=lambda: Forms(fused)) for way in (None, graph)]
    assert_same_runs(*runs)
    assert runs[1].report.replays == 19


# ---------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.sampled(2)
def test_resume(engine: Engine, tmp_path: Path, kind: str) -> None:
    """L2: graphed to plain, plain to graphed, graphed to graphed, from the end of an epoch and from the middle of one:
    all end with the bits of a run that was never stopped, and resume with the same loss scale."""
    device, graph = engine
    make = lambda: Net(fused if device == "cuda" else adamw, halving, "step", dropout=0.0)  # noqa: E731
    options: dict[str, Any] = {"make": make, "kind": kind, "max_epochs": 4, "logger": False}
    whole = fit(tmp_path / "whole", device, None, data=Batches(loader(device)), **options)
    for (first, second), stops in {
        (graph, None): ("step",),
        (None, graph): ("epoch",),
        (graph, graph): ("epoch", "step"),
    }.items():
        for stop in stops:
            folder = tmp_path / f"{first}-{second}-{stop}"
            until: dict[str, Any] = {"max_epochs": 2} if stop == "epoch" else {"max_steps": 15, "max_epochs": 4}
            middle = ModelCheckpoint(folder / "middle", every_n_train_steps=15, save_top_k=-1)
            part = fit(
                folder / "1", device, first, data=Batches(loader(device)), **{**options, **until, "callbacks": [middle]}
            )
            saved = part.checkpoint if stop == "epoch" else next((folder / "middle").glob("*.ckpt"))
            rest = fit(folder / "2", device, second, data=Batches(loader(device)), ckpt_path=saved, seed=17, **options)
            names = ("weights", "global step", "rates", "moments", "loss scale", "schedulers")
            expected, got = whole.state(), rest.state()
            assert_same({name: expected[name] for name in names}, {name: got[name] for name in names}, str(folder))
            assert rest.report is None or rest.report.replays > 0


@pytest.mark.parametrize("accumulate", [2, 4])
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_resume_within_a_window(tmp_path: Path, accumulate: int) -> None:
    """L2: Lightning drops what the window had so far; so do we."""
    ends = []
    for way in (None, "emulate"):
        options: dict[str, Any] = {"make": lambda: Net(dropout=0.0), "accumulate_grad_batches": accumulate}
        options["logger"] = False
        each = ModelCheckpoint(tmp_path / str(way) / "each", every_n_train_steps=1, save_top_k=-1)
        fit(tmp_path / str(way) / "1", "cpu", way, data=Batches(loader("cpu")), callbacks=[each], **options)
        saved = sorted((tmp_path / str(way) / "each").glob("*step=2.ckpt"))[0]
        ends.append(fit(tmp_path / str(way) / "2", "cpu", way, data=Batches(loader("cpu")), ckpt_path=saved, **options))
    assert_same(ends[0].state(), ends[1].state())


@pytest.mark.slow
def test_a_rule_of_the_loss_scale_is_saved(tmp_path: Path) -> None:
    """What torch's scaler does not have is in the checkpoint, beside what it has, and Lightning can load it."""
    rule = ampkit.GradScaler("cpu", init_scale=2.0**15, growth_interval=2, hysteresis=3, max_scale=2.0**16)
    run = fit(tmp_path / "1", "cpu", "emulate", kind="16-mixed", options={"scaler": rule})
    saved = run.state()["loss scale"]
    assert saved["hysteresis"] == 3
    again = ampkit.GradScaler("cpu", growth_interval=2, hysteresis=3, max_scale=2.0**16)
    options: dict[str, Any] = {"kind": "16-mixed", "max_epochs": 3}
    more = fit(tmp_path / "2", "cpu", "emulate", ckpt_path=run.checkpoint, options={"scaler": again}, **options)
    assert more.state()["loss scale"]["steps"] == saved["steps"] + 11
    plain = fit(tmp_path / "3", "cpu", None, ckpt_path=run.checkpoint, **options)
    assert plain.trainer.scaler.get_growth_interval() == 2


# ----------------------------------------------------------------------------------------------- the rest of a Trainer


@pytest.mark.parametrize("engine", ENGINES)
def test_callbacks_of_lightning(engine: Engine, tmp_path: Path) -> None:
    """L3: ModelCheckpoint, EarlyStopping, LearningRateMonitor, EMA and validation between training steps."""
    device, graph = engine
    runs = []
    for way in (None, graph):
        callbacks: list[Any] = [
            EarlyStopping("val_loss", patience=4, min_delta=0.02),
            LearningRateMonitor(),
            EMAWeightAveraging(decay=0.9),
            ModelCheckpoint(tmp_path / str(way) / "best", monitor="val_loss"),
        ]
        module = lambda: Net(fused if device == "cuda" else adamw, halving, "step")  # noqa: E731
        options: dict[str, Any] = {"validate": True, "val_check_interval": 4, "num_sanity_val_steps": 2}
        runs.append(fit(tmp_path / str(way), device, way, make=module, callbacks=callbacks, max_epochs=6, **options))
    assert runs[0].trainer.global_step < 66  # it was stopped
    left, right = (run.state() for run in runs)
    assert_same(left, right)
    assert runs[0].logged() == runs[1].logged()
    assert runs[1].report.replays > 10


SCHEDULERS = {
    "one cycle": (lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, RATE, total_steps=22, pct_start=0.5), "step"),
    "plateau": (lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5), "epoch"),
    "plateau per step": (lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5), "step"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.filterwarnings("ignore:AmpkitCallback. param_groups.0...betas..")
@pytest.mark.slow
def test_schedulers(engine: Engine, tmp_path: Path, name: str) -> None:
    """OneCycleLR moves the betas with every step, each of which is another graph; plateaus need a metric."""
    device, graph = engine
    make = fused if device == "cuda" else adamw
    scheduler, interval = SCHEDULERS[name]
    # A captured step on CUDA reads the rate as float32, which these are not.
    reference = "off" if device == "cuda" else None
    options: dict[str, Any] = {"validate": True, "val_check_interval": 1 if interval == "step" else 1.0}
    runs = [
        fit(tmp_path / str(way), device, way, make=lambda: Net(make, scheduler, interval), **options)
        for way in (reference, graph)
    ]
    assert_same_runs(*runs)
    assert (runs[1].report.replays > 0) == (name != "one cycle")


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 7, "accumulate_grad_batches": 2},
        {"overfit_batches": 4, "max_epochs": 3},
        {"max_steps": 9, "max_epochs": -1},
        {"accumulate_grad_batches": 20},
        {"callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 3})], "max_epochs": 3},
    ],
    ids=["limit", "overfit", "max_steps", "window longer than an epoch", "accumulation changes"],
)
@pytest.mark.sampled(3)
@pytest.mark.slow
def test_parts_of_epochs(tmp_path: Path, options: dict[str, Any]) -> None:
    """Lightning says which batches there are, and which of them ends a window."""
    runs = []
    for way in (None, "emulate"):
        own = {key: value() if callable(value) else value for key, value in options.items()}
        runs.append(fit(tmp_path / str(way), "cpu", way, **own))
    assert_same_runs(*runs)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_fit_twice_and_test_after(engine: Engine, tmp_path: Path) -> None:
    """L3: the Trainer and the module are left as they were: a second fit, a test, another Trainer without ampkit."""
    device, graph = engine
    ends = []
    for way in (None, graph):
        run = fit(tmp_path / str(way), device, way, kind="16-mixed", make=lambda: Net(adamw))
        assert type(run.trainer.precision_plugin) is MixedPrecision
        assert type(run.trainer.scaler) is torch.amp.GradScaler
        assert "training_step" not in vars(run.trainer.strategy)
        assert "log" not in vars(run.module)
        tested = run.trainer.test(run.module, loader(device, 3, seed=2), verbose=False)
        run.trainer.fit_loop.max_epochs = 4
        torch.manual_seed(5)
        run.trainer.fit(run.module, loader(device))
        other = pl.Trainer(
            max_epochs=1,
            accelerator="gpu" if device == "cuda" else "cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        other.fit(run.module, loader(device))
        weights = {name: bits(tensor) for name, tensor in run.module.state_dict().items()}
        ends.append({"weights": weights, "tested": tested, "scale": run.trainer.scaler.state_dict()})
        assert run.callback is None or run.callback.report().replays > 0
    if device == "cpu":  # on CUDA a captured AdamW without fused kernels computes by other formulas
        assert_same(*ends)


class Sized(Net):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return loader("cpu", batches=64 // self.batch_size, size=self.batch_size)

    val_dataloader = train_dataloader


@pytest.mark.filterwarnings("ignore:AmpkitCallback. the optimizer's state was replaced")
@pytest.mark.filterwarnings("ignore:.*Detected call of `lr_scheduler.step")
@pytest.mark.slow
def test_batch_size_finder(tmp_path: Path) -> None:
    """L3: a tuned batch size is the same, and training begins from the state before the search."""
    found = []
    for way in (None, "emulate"):
        finder = BatchSizeFinder(init_val=2, max_trials=3, steps_per_trial=5)
        torch.manual_seed(0)
        module = Sized()
        callbacks: list[Any] = [finder, *([AmpkitCallback(graph=way)] if way else [])]
        trainer = pl.Trainer(
            default_root_dir=tmp_path,
            max_epochs=2,
            accelerator="cpu",
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module)
        weights = {name: bits(tensor) for name, tensor in module.state_dict().items()}
        found.append({"size": finder.optimal_batch_size, "step": trainer.global_step, "weights": weights})
    assert_same(*found)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_verify(engine: Engine, tmp_path: Path) -> None:
    """verify compares replays with eager steps, which takes two steps' time and changes nothing."""
    device, graph = engine
    make = lambda: Net(fused)  # noqa: E731
    runs = [fit(tmp_path / str(n), device, graph, make=make, options={"verify": n}) for n in (0, 2)]
    assert_same_runs(*runs)


# ----------------------------------------------------------------------------------------------------- its own readings


@pytest.mark.slow
def test_readings_reach_every_logger(tmp_path: Path) -> None:
    """Loss scale, skipped steps, gradient norm, speed, replays: every log_every_n_steps, under the step they are of."""
    run = fit(tmp_path, "cpu", "emulate", kind="16-mixed", gradient_clip_val=0.1, log_every_n_steps=5)
    with (Path(run.trainer.logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["ampkit/graph_replays"]]
    assert [int(row["step"]) for row in rows] == [4, 9, 14, 19]
    assert [float(row["ampkit/graph_replays"]) for row in rows] == [2, 7, 12, 17]
    assert 0 < float(rows[-1]["ampkit/skipped_steps"]) <= run.report.skipped
    for row in rows:
        assert float(row["ampkit/loss_scale"]) in (2.0**k for k in range(10, 24))
        assert float(row["ampkit/samples_per_second"]) > 0
        assert row["ampkit/grad_norm"]


def test_readings_have_what_there_is(tmp_path: Path) -> None:
    """Without a loss scale and without clipping there is no scale, nothing to skip, and no norm."""
    run = fit(tmp_path, "cpu", "emulate", log_every_n_steps=5)
    header = (Path(run.trainer.logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {name for name in header if name.startswith("ampkit/")} == {
        "ampkit/graph_replays",
        "ampkit/replay_share",
        "ampkit/samples_per_second",
        "ampkit/ms_per_step",
    }


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_readings_reach_the_progress_bar(tmp_path: Path, bar: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Both bars of Lightning show them, beside what the module logs for the bar."""
    shown: list[dict[str, Any]] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            shown.append(trainer.progress_bar_callback.get_metrics(trainer, trainer.lightning_module))

    progress = bar()
    options: dict[str, Any] = {"enable_progress_bar": True, "log_every_n_steps": 4, "callbacks": [progress, Look()]}
    fit(tmp_path, "cpu", "emulate", gradient_clip_val=1.0, logger=False, **options)
    assert {"grad_norm", "samples/s", "replays"} <= shown[-1].keys()
    assert 0 < int(shown[-1]["replays"].removesuffix("%")) < 100  # the share of all batches
    assert "get_metrics" not in vars(progress)


# -------------------------------------------------------------------------------------------- what cannot be captured


class OwnStep(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class OwnClip(Net):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for param in self.parameters():
            param.grad.mul_(0.5)


class OwnZero(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.01, max_iter=2)


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=RATE)


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[-1] = nn.LazyLinear(10)


class Bounded(torch.amp.GradScaler):
    """A loss scale that never falls below 256, as torch's cannot be told to."""

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)
        assert self._scale is not None
        self._scale.clamp_(min=256.0)


class Renamed(torch.amp.GradScaler):
    """Torch's, by another name."""


def scaled_by(kind: type[torch.amp.GradScaler]) -> dict[str, Any]:
    plugin = partial(MixedPrecision, "16-mixed", "cpu")
    return {"kind": "16-mixed", "plugins": lambda: [plugin(kind("cpu", init_scale=64.0))]}


LEFT_TO_LIGHTNING = [
    (Net, scaled_by(Bounded), "the Trainer's loss scale, Bounded, has a method update of its own"),
    (Lazy, {}, "has no shape yet, because a lazy module makes it when it is first called"),
    (OwnStep, {}, "OwnStep.optimizer_step changes what a step does"),
    (OwnClip, {}, "OwnClip.configure_gradient_clipping changes"),
    (OwnZero, {}, "OwnZero.optimizer_zero_grad changes"),
    (lambda: Net(lbfgs), {}, "LBFGS computes the loss several times"),
    (lambda: Net(plain_sgd), {}, "Write SGD(..., fused=True)"),
    (Net, {"kind": "64-true"}, "Trainer(precision='64-true'), DoublePrecision"),
    (Net, {"callbacks": lambda: [StochasticWeightAveraging(1e-2, swa_epoch_start=1)]}, "StochasticWeightAveraging"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("make", "options", "message"), every(3, LEFT_TO_LIGHTNING), ids=[case[2][:30] for case in LEFT_TO_LIGHTNING]
)
def test_left_to_lightning(tmp_path: Path, make: Any, options: dict[str, Any], message: str) -> None:
    """L3: what a graph would not do, Lightning does as it always did; one warning says why."""
    own = {"max_epochs": 3} | {key: value() if callable(value) else value for key, value in options.items()}
    data: Any = loader("cpu")
    if options.get("kind") == "64-true":
        data = Batches((x.double(), y) for x, y in data)
    plain = fit(tmp_path / "plain", "cpu", None, make=make, data=data, **own)
    own = {"max_epochs": 3} | {key: value() if callable(value) else value for key, value in options.items()}
    with pytest.warns(ampkit.CaptureWarning, match=re.escape(message)) as caught:
        ours = fit(tmp_path / "ours", "cpu", "emulate", make=make, data=data, options={"on_failure": "eager"}, **own)
    assert len([warning for warning in caught if issubclass(warning.category, ampkit.CaptureWarning)]) == 1
    assert_same_runs(plain, ours)
    assert ours.report.replays == 0
    with pytest.raises(ampkit.CaptureError, match=re.escape(message)):
        fit(tmp_path / "raise", "cpu", "emulate", make=make, data=data, **own)


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, torch.amp.grad_scaler.GradScaler, Renamed, Bounded])
@pytest.mark.sampled(2)
def test_scalers_that_ampkit_replaces(tmp_path: Path, kind: type[torch.amp.GradScaler]) -> None:
    """L1: one that does what torch's does, by whatever name, and any other one if the callback has been given one."""
    options = {"scaler": ampkit.GradScaler("cpu", init_scale=64.0)} if kind is Bounded else {}
    own = {key: value() if callable(value) else value for key, value in scaled_by(kind).items()}
    run = fit(tmp_path, "cpu", "emulate", options=options, **own)
    assert run.report.replays > 0
    assert own["plugins"][0].scaler.get_scale() == 64.0


def adafactor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=RATE)


BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


@pytest.mark.sampled(4)
# With a loss scale, this optimizer can only be skipped by the host, as without ampkit.
@pytest.mark.filterwarnings("ignore:.*Adafactor keeps its step count on the host:ampkit.AmpkitWarning")
@pytest.mark.parametrize(
    ("kind", "accumulate", "clip"),
    [
        ("32-true", 1, {}),
        ("bf16-mixed", 3, {}),
        ("16-mixed", 1, {}),
        ("32-true", 1, BY_VALUE),
        ("16-mixed", 3, BY_VALUE),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_an_optimizer_that_no_graph_can_hold_steps_behind_the_graph(
    engine: Engine, tmp_path: Path, kind: str, accumulate: int, clip: dict[str, Any]
) -> None:
    """L1, R2: forward and backward are replayed; weights, logged metrics and hook counts are those of Lightning."""
    device, graph = engine
    options: dict[str, Any] = {"kind": kind, "accumulate_grad_batches": accumulate, **clip}
    plain = fit(tmp_path / "plain", device, None, make=lambda: Net(adafactor, halving), **options)
    with pytest.warns(ampkit.CaptureWarning, match="forward and backward are captured") as caught:
        ours = fit(
            tmp_path / "ours",
            device,
            graph,
            make=lambda: Net(adafactor, halving),
            options={"on_failure": "parts"},
            **options,
        )
    assert len([warning for warning in caught if issubclass(warning.category, ampkit.CaptureWarning)]) == 1
    assert_same_runs(plain, ours)
    assert ours.report.replays == 22 - 3 * accumulate
    assert ours.report.outcome == "in parts"


class NeedsClosure(torch.optim.SGD):
    """Does forward and backward by the closure, as sharpness-aware minimization does: once, or at two places."""

    def __init__(self, params: Any, places: int) -> None:
        super().__init__(params, lr=0.1)
        self.places = places

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]  # the closure is no option
        assert closure is not None, "step() needs its closure"
        with torch.enable_grad():
            loss = closure()
        for param in self.param_groups[0]["params"] if self.places > 1 else ():
            param.add_(param.grad, alpha=0.05)
        if self.places > 1:
            with torch.enable_grad():
                closure()
        super().step()
        return loss


@pytest.mark.parametrize(("places", "accumulate"), [(1, 1), pytest.param(1, 3, marks=pytest.mark.seeds), (2, 1)])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_an_optimizer_that_needs_its_closure(engine: Engine, tmp_path: Path, places: int, accumulate: int) -> None:
    """L1: it gets one. If it does forward and backward more often than once, the fit is left to Lightning."""
    device, graph = engine
    options: dict[str, Any] = {
        "make": lambda: Net(lambda params: NeedsClosure(params, places), dropout=0.0),
        "accumulate_grad_batches": accumulate,
    }
    plain = fit(tmp_path / "plain", device, None, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ampkit.CaptureWarning)
        ours = fit(tmp_path / "ours", device, graph, options={"on_failure": "parts"}, **options)
    assert_same_runs(plain, ours)
    said = [str(warning.message) for warning in caught if issubclass(warning.category, ampkit.CaptureWarning)]
    refused = ["NeedsClosure.step() has called its closure 2 times" in text for text in said]
    assert any(refused) is (places == 2)
    assert bool(ours.report.replays) is (places == 1)


class UsesIndex(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._shared(batch, batch_idx)

    def _shared(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1]) * (2.0 if index % 2 else 1.0)


class PassesIndex(UsesIndex):
    def _shared(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])


class Counts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        return F.cross_entropy(self.net(batch[0]), batch[1])


class Appends(Net):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss


class UsesMetric(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        weighted = loss * self.mean(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return weighted


class LogsNumber(Net):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter(range(1000))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("number", float(next(self.numbers)))
        return F.cross_entropy(self.net(batch[0]), batch[1])


class SkipsBatches(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss if batch[2] else None


class Holder:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


class TakesHolder(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch.x), batch.y)


def with_flags(device: str) -> Any:
    return Batches((x, y, i % 3 != 2) for i, (x, y) in enumerate(loader(device)))


STEPPED_EAGERLY = [
    (UsesIndex, None, {}, "training_step computes with batch_idx"),
    (Counts, None, {}, "training_step changes self.seen on the host"),
    (Appends, None, {}, "training_step changes self.losses on the host"),
    (UsesMetric, None, {}, "training_step updates self.mean, a metric of torchmetrics, while it runs"),
    (LogsNumber, None, {}, "self.log('number', 1.0) in training_step"),
    (SkipsBatches, with_flags, {}, "training_step returned no loss"),
    (SkipsBatches, with_flags, {"accumulate_grad_batches": 3}, "training_step returned no loss"),
    (TakesHolder, lambda device: Batches(Holder(x, y) for x, y in loader(device)), {}, "the batch contains a Holder"),
]


@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`")
@pytest.mark.parametrize(
    ("make", "data", "options", "message"),
    STEPPED_EAGERLY,
    ids=[str(i) + case[3][:25] for i, case in enumerate(STEPPED_EAGERLY)],
)
@pytest.mark.sampled(2)
def test_stepped_eagerly(tmp_path: Path, make: Any, data: Any, options: dict[str, Any], message: str) -> None:
    """What a graph would freeze or leave out is noticed in the warm-up, and said once; the steps are Lightning's."""
    batches = None if data is None else data("cpu")
    plain = fit(tmp_path / "plain", "cpu", None, make=make, data=batches, **options)
    eager = {"on_failure": "eager"}
    with pytest.warns(ampkit.CaptureWarning, match=re.escape(message)) as caught:
        ours = fit(tmp_path / "ours", "cpu", "emulate", make=make, data=batches, options=eager, **options)
    assert len([warning for warning in caught if issubclass(warning.category, ampkit.CaptureWarning)]) == 1
    assert_same_runs(plain, ours)
    assert ours.report.replays == 0
    assert message in ours.report.failure
    with pytest.raises(ampkit.CaptureError, match=re.escape(message)):
        fit(tmp_path / "raise", "cpu", "emulate", make=make, data=batches, **options)


@pytest.mark.slow
def test_batch_idx_may_be_passed_on(tmp_path: Path) -> None:
    """An argument that goes to another method and is used there by nobody changes nothing."""
    assert fit(tmp_path, "cpu", "emulate", make=PassesIndex).report.replays == 19


class Weighted(Net):
    """Reads a number that somebody changes between epochs, and the number of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0

    def on_train_epoch_start(self) -> None:
        self.weight = 0.5**self.current_epoch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss * self.weight + (0.1 * loss if self.current_epoch > 0 else 0.0)


class WeightedByHparams(Net):
    """The number is in `self.hparams`, beside others and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"weight": 1.0, "name": "net", "widths": [8, 8]})

    def on_train_epoch_start(self) -> None:
        self.hparams.weight = 0.5**self.current_epoch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1]) * self.hparams.weight


class WeightedByConfig(Net):
    """The number is in an object, beside a dict whose entry is read by a text."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(loss=SimpleNamespace(weight=1.0), more={"power": 1.0, "epoch": 0})

    def on_train_epoch_start(self) -> None:
        self.config.loss.weight = 0.5**self.current_epoch
        self.config.more["epoch"] += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.config.more["number"] = batch_idx

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1]) * self.config.loss.weight
        return loss ** self.config.more["power"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Weighted, r"the attribute model\.weight changed from 1\.0 to 0\.5"),
        pytest.param(WeightedByHparams, "", marks=pytest.mark.seeds),
        pytest.param(
            WeightedByConfig,
            r"the attribute model\.config\.loss\.weight changed from 1\.0 to 0\.5",
            marks=pytest.mark.seeds,
        ),
    ],
)
@pytest.mark.slow
def test_numbers_of_the_module_are_part_of_the_key(engine: Engine, make: type[Net], says: str, tmp_path: Path) -> None:
    """A graph is of one value of each number that training_step reads; another value has its own."""
    device, graph = engine
    runs = [fit(tmp_path / "reference", device, None if device == "cpu" else "off", make=make, max_epochs=3)]
    with pytest.warns(ampkit.CaptureWarning, match=says) if says else nullcontext():
        runs.append(fit(tmp_path / graph, device, graph, make=make, max_epochs=3))
    assert_same_runs(*runs)
    assert runs[1].report.captures == 3
    assert runs[1].report.replays == 33 - 9


class WeightedPerBatch(Weighted):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.weight = 1.0 / (1 + batch_idx)


@pytest.mark.slow
def test_a_number_that_changes_with_every_batch(tmp_path: Path) -> None:
    """A graph for each batch would never be replayed."""
    plain = fit(tmp_path / "plain", "cpu", None, make=WeightedPerBatch)
    with pytest.warns(ampkit.CaptureWarning, match=r"the attribute model\.weight changed from 1\.0 to 0\.5.*fill_"):
        ours = fit(tmp_path / "ours", "cpu", "emulate", make=WeightedPerBatch, options={"on_failure": "eager"})
    assert_same_runs(plain, ours)


class Counts(Net):
    """Has a counter, which training_step reads behind a condition that is false."""

    def __init__(self) -> None:
        super().__init__()
        self.batches, self.debug, self.step = 0, False, 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches, self.step = self.batches + 1, self.step + 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.debug and self.batches % 2 == 0:
            raise ValueError("a mistake")
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss


def test_a_counter_behind_a_condition(tmp_path: Path) -> None:
    """R7: a number that the step does not read changes nothing; nor does one whose name Lightning's code has."""
    ours = fit(tmp_path, "cpu", "emulate", make=Counts)
    assert (ours.report.captures, ours.report.replays) == (1, 19)


class AsksForSlopes(Net):
    """Penalizes the slope of the logits over the batch, as many write it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._penalized(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            loss = self._penalized(batch)
        self.log("val_loss", loss)

    def _penalized(self, batch: Any) -> Tensor:
        x, y = batch
        x.requires_grad_()
        logits = self.net(x)
        (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return F.cross_entropy(logits, y) + slope.square().mean()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_step_that_asks_for_a_gradient_of_its_batch(engine: Engine, tmp_path: Path) -> None:
    """Training and validation get a batch that is new for autograd, also where a loader gives out the same tensors."""
    device, graph = engine
    options: dict[str, Any] = {"make": AsksForSlopes, "validate": True, "inference_mode": False}
    # On CUDA the order in which torch adds up gradients of gradients, and so their bits, depends on earlier operations.
    alone = "off" if device == "cuda" else None
    expected = fit(tmp_path / "off", device, alone, data=Batches(loader(device)), **options)
    batches = list(loader(device))
    found = fit(tmp_path / "on", device, graph, data=Batches(batches), **options)
    assert_same_runs(expected, found)
    assert not any(x.requires_grad for x, _ in batches)
    assert (found.report.captures, found.report.failure) == (1, None)
    assert found.callback is not None
    assert found.callback.report("validation_step").replays > 0


class Reads(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if float(loss.detach()) > 1e6:
            raise ValueError("diverged")
        return loss


@pytest.mark.parametrize("engine", ENGINES)
def test_a_read_of_the_device_is_named(engine: Engine, tmp_path: Path) -> None:
    """The preflight names the line of training_step, and training goes on with the bits of Lightning."""
    device, graph = engine
    plain = fit(tmp_path / "plain", device, None, make=Reads if device == "cpu" else lambda: Reads(fused))
    eager = {"on_failure": "eager"}
    make = Reads if device == "cpu" else lambda: Reads(fused)
    with pytest.warns(ampkit.CaptureWarning, match=r"test_lightning\.py:\d+: `if float\(loss.detach\(\)\) > 1e6"):
        ours = fit(tmp_path / "ours", device, graph, make=make, options=eager)
    assert_same_runs(plain, ours)
    assert ours.report.replays == 0


class QuietHooks(Net):
    def on_after_backward(self) -> None:
        self.backwards = getattr(self, "backwards", 0) + 1


def test_hooks_are_told(tmp_path: Path) -> None:
    """Hooks after the backward are still called; a warning says once that the optimizer has stepped by then."""
    with pytest.warns(ampkit.AmpkitWarning, match=r"QuietHooks\.on_after_backward.* called after the optimizer"):
        run = fit(tmp_path, "cpu", "emulate", make=QuietHooks)
    assert run.report.replays == 18  # Lightning did the first step, to see whether the hook uses gradients
    assert run.module.backwards == 22


@pytest.mark.slow
def test_prog_bar_is_advised_against_once(tmp_path: Path) -> None:
    """On a GPU a value for the bar is read on every batch: said once. On a CPU nothing waits."""

    class Bars(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, prog_bar=True)
            return loss

    device, graph = ("cuda", "auto") if torch.cuda.is_available() else ("cpu", "emulate")
    make = lambda: Bars(fused)  # noqa: E731
    if device == "cpu":
        fit(tmp_path, device, graph, make=make)
        return
    with pytest.warns(ampkit.AmpkitWarning, match=r"self\.log\('loss', \.\.\., prog_bar=True\)") as caught:
        fit(tmp_path, device, graph, make=make)
    assert len([warning for warning in caught if "prog_bar=True" in str(warning.message)]) == 1


# ------------------------------------------------------------------------------------------------------------- policies


def test_policy_and_precision_must_agree(tmp_path: Path) -> None:
    """Two that differ are an error that shows both; the Trainer is left as it was."""
    with pytest.raises(ValueError, match=r"compute=float16.*Trainer\(precision='bf16-mixed'\).*compute=bfloat16"):
        fit(tmp_path, "cpu", "emulate", kind="bf16-mixed", options={"policy": "float16"})


@pytest.mark.slow
def test_rules_for_operations_hold_in_training_and_validation(tmp_path: Path) -> None:
    """A policy with a rule computes otherwise than one without, and leaves nothing behind."""
    seen: dict[str, torch.dtype] = {}

    class Look(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss: Tensor = super().training_step(batch, batch_idx)
            seen["training"] = self.net(batch[0]).dtype
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            seen["validation"] = self.net(batch[0]).dtype

    options: dict[str, Any] = {"make": Look, "kind": "bf16-mixed", "validate": True}
    fit(tmp_path / "1", "cpu", "emulate", options={"policy": "bfloat16"}, **options)
    assert seen == {"training": torch.bfloat16, "validation": torch.bfloat16}
    fit(tmp_path / "2", "cpu", "emulate", options={"policy": "bfloat16,ops={linear:float32}"}, **options)
    assert seen == {"training": torch.float32, "validation": torch.float32}


@pytest.mark.slow
def test_rules_for_modules_hold_while_fit_runs(tmp_path: Path) -> None:
    """The module follows them without being asked to, and is itself again behind the fit."""
    policy = ampkit.Policy(compute="bfloat16", modules={nn.Linear: "float32"})
    run = fit(tmp_path, "cpu", "emulate", kind="bf16-mixed", options={"policy": policy})
    assert run.report.replays == 19
    assert type(run.module) is Net
    assert type(run.module.net[0]) is nn.Linear


# ------------------------------------------------------------------------------------------------------- two processes


@pytest.mark.slow
def test_two_processes() -> None:
    """L4: gloo on the CPU. Weights are equal on both ranks and to those without ampkit; metrics are each rank's own."""
    options = ["--accumulate", "3", "--kind", "bf16-mixed", "--clip", "0.1"]
    plain = lightning_ddp.launch("--graph", "none", *options)
    ours = lightning_ddp.launch("--graph", "emulate", *options)
    assert [row.pop("replays") for row in plain] == [0, 0]
    assert [row.pop("replays") for row in ours] == [10, 10]  # Lightning did the first of the windows
    assert plain == ours
    assert ours[0]["weights"] == ours[1]["weights"]


@pytest.mark.slow
@pytest.mark.ranks
def test_two_processes_verify_together() -> None:
    """L4: both ranks compare the same replays with eager steps, and go on with the bits of Lightning alone."""
    plain = lightning_ddp.launch("--graph", "none")
    ours = lightning_ddp.launch("--graph", "emulate", "--verify", "3")
    assert [row.pop("replays") for row in plain] == [0, 0]
    assert [row.pop("replays") for row in ours] == [18, 18]  # of 22: Lightning did the first
    assert plain == ours


@pytest.mark.slow
def test_two_processes_decide_together() -> None:
    """L4: what one rank finds in its warm-up keeps both eager, and neither waits for the other for ever."""
    rows = lightning_ddp.launch("--graph", "emulate", "--one-rank-counts")
    assert [row["replays"] for row in rows] == [0, 0]
    assert "another rank found" in rows[0]["failure"]
    assert "training_step changes self.seen" in rows[1]["failure"]
    assert rows[0]["weights"] == rows[1]["weights"]


@pytest.mark.slow
def test_two_processes_end_after_an_error() -> None:
    """L4: graphs are closed before the process group is, however the fit ends."""
    assert [row["failed"] for row in lightning_ddp.launch("--graph", "emulate", "--raise-at", "6")] == [True, True]


@pytest.mark.cuda
@pytest.mark.multigpu
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), [("32-true", []), ("16-mixed", ["--accumulate", "3"])], ids=str)
def test_two_gpus(kind: str, options: list[str]) -> None:
    """L4: NCCL. Equal to Lightning without ampkit on every rank, and the job ends."""
    common = ["--device", "cuda", "--epochs", "6", "--kind", kind, *options]
    with (
        lightning_ddp.started("--graph", "none", *common) as without,
        lightning_ddp.started("--graph", "auto", *common) as graphed,
    ):
        plain, ours = without.rows(), graphed.rows()
    assert [row.pop("replays") for row in plain] == [0, 0]
    assert all(row.pop("replays") > 20 for row in ours)
    assert plain == ours
    assert ours[0]["weights"] == ours[1]["weights"]


@pytest.mark.cuda
@pytest.mark.multigpu
@pytest.mark.slow
def test_two_gpus_end_after_an_error() -> None:
    """L4: an error behind a capture does not leave a graph that NCCL waits for."""
    rows = lightning_ddp.launch("--device", "cuda", "--graph", "auto", "--epochs", "4", "--raise-at", "20")
    # 20 steps: the first is Lightning's, as in each fit of several ranks, and 5 are the warm-up of DDP.
    assert [(row["failed"], row["replays"]) for row in rows] == [(True, 14), (True, 14)]


# ------------------------------------------------------------------------------------------------------------ the edges


def test_an_error_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    """What training_step raises comes out, and Lightning's own parts are back."""

    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_rank == 0 and float(batch[0].sum()) != 0 and self.calls == 6:
                raise KeyError("a mistake of the user")
            return F.cross_entropy(self.net(batch[0]), batch[1])

        calls = 0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            type(self).calls += 1

    kept: list[pl.Trainer] = []

    class Keep(Callback):
        def setup(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            kept.append(trainer)

    with pytest.warns(ampkit.CaptureWarning), pytest.raises(KeyError, match="a mistake of the user"):
        fit(tmp_path, "cpu", "emulate", make=Fails, callbacks=[Keep()], options={"on_failure": "eager"})
    (trainer,) = kept
    assert type(trainer.precision_plugin) is Precision
    assert "training_step" not in vars(trainer.strategy)
    assert "step" not in vars(trainer.optimizers[0])


@pytest.mark.slow
def test_two_callbacks_are_an_error(tmp_path: Path) -> None:
    """Each would capture the other."""
    with pytest.raises(ValueError, match="there are two AmpkitCallbacks"):
        fit(tmp_path, "cpu", "emulate", callbacks=[AmpkitCallback(graph="emulate")])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graph": "on"}, r"AmpkitCallback\(graph='on'\): expected one of 'auto', 'emulate', 'off'"),
        ({"on_failure": "ignore"}, r"on_failure='ignore'\): expected one of 'parts', 'eager', 'raise'"),
        ({"warmup": 0}, r"warmup=0\): expected an int of at least 1"),
        ({"memory_budget": 0}, r"memory_budget=0\): must be a number > 0"),
        ({"scaler": torch.amp.GradScaler("cpu")}, r"pass an ampkit\.GradScaler"),
        ({"policy": "float7"}, r"Legal: float32"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    """Said at once, with what is expected."""
    with pytest.raises(ValueError, match=message):
        AmpkitCallback(**options)


def test_rounding_of_parameters_is_refused() -> None:
    """A Trainer's optimizer may step by itself, which would round its parameters to nearest."""
    with pytest.raises(NotImplementedError, match="rounding of parameters is for graphed_step"):
        AmpkitCallback(policy="params=bfloat16,rounding=kahan")


@pytest.mark.slow
def test_report_before_and_after(tmp_path: Path) -> None:
    """Before a fit it is empty; behind one it still tells of the graphs that there were."""
    assert AmpkitCallback().report().replays == 0
    report = fit(tmp_path, "cpu", "emulate").report
    assert (report.graphs, report.captures, report.replays) == (1, 1, 19)
    assert report.eager == {"warm-up": 3}


@pytest.mark.slow
def test_on_a_cpu_it_says_that_it_captures_nothing(tmp_path: Path) -> None:
    """graph="auto" without a GPU: one warning, and the steps of Lightning."""
    plain = fit(tmp_path / "plain", "cpu", None)
    with pytest.warns(ampkit.CaptureWarning, match="CUDA graphs need a CUDA device"):
        ours = fit(tmp_path / "ours", "cpu", "auto", options={"on_failure": "eager"})
    assert_same_runs(plain, ours)


@pytest.mark.slow
def test_import_without_lightning() -> None:
    """`import ampkit` does not need it; `import ampkit.lightning` says what to install."""
    code = """
import sys
import warnings
import ampkit
assert not [name for name in sys.modules if name.startswith("lightning")]
sys.modules["lightning"] = None
try:
    import ampkit.lightning
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'ampkit[lightning]'" in done.stdout
