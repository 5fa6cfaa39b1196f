"""AmpkitCallback with automatic_optimization=False: captured steps that call backward and step the optimizers."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from families import every
from harness import ENGINES, assert_same
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.profilers import SimpleProfiler
from lightning_harness import (  # noqa: F401 - a fixture
    BATCHES,
    QUIET,
    RATE,
    Batches,
    Run,
    _silent,
    assert_same_runs,
    fit,
    loader,
)
from tape import taped
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

pytestmark = [
    *(pytest.mark.filterwarnings(text) for text in QUIET),
    pytest.mark.filterwarnings("ignore:.*no pre-optimization state was saved"),
]

Engine = tuple[str, str]
EPOCHS = 2


class Gan(pl.LightningModule):
    """Two networks and two optimizers, as in Lightning's own example."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.gen = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.disc = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))

    def generated(self, real: Tensor) -> Tensor:
        return self.gen(torch.randn(len(real), 4, device=self.device))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        real, _ = batch
        opt_g, opt_d = self.optimizers()
        self.toggle_optimizer(opt_g)
        loss = F.softplus(-self.disc(self.generated(real))).mean()
        self.log("gen", loss)
        opt_g.zero_grad()
        self.manual_backward(loss)
        nn.utils.clip_grad_norm_(self.gen.parameters(), 0.5)
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.toggle_optimizer(opt_d)
        loss = F.softplus(self.disc(self.generated(real).detach())).mean() + F.softplus(-self.disc(real)).mean()
        self.log_dict({"disc": loss, "batch": len(real)}, on_step=True, on_epoch=True)
        opt_d.zero_grad()
        self.manual_backward(loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        return {"loss": loss, "name": "gan"}

    def configure_optimizers(self) -> Any:
        gen = torch.optim.Adam(self.gen.parameters(), lr=RATE, betas=(0.5, 0.999), fused=True)
        return gen, torch.optim.Adam(self.disc.parameters(), lr=2 * RATE, fused=True)


def same_with_ampkit(
    folder: Path, device: str, graph: str, make: Callable[[], pl.LightningModule] = Gan, **options: Any
) -> Run:
    """Assert that a fit is the same with ampkit as without it; return it."""
    callbacks = options.pop("callbacks", list)
    plain = fit(folder / "plain", device, None, make=make, callbacks=callbacks(), **options)
    ours = fit(folder / "ours", device, graph, make=make, callbacks=callbacks(), **options)
    assert_same_runs(plain, ours)
    return ours


# --------------------------------------------------------------------------------------------------- what is captured


@pytest.mark.parametrize("kind", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_gan(tmp_path: Path, engine: Engine, kind: str) -> None:
    """L6: weights, moments, logs, counts and loss scale are the plain Trainer's, bit by bit."""
    run = same_with_ampkit(tmp_path, *engine, kind=kind)
    assert run.report.replays == EPOCHS * BATCHES - 3
    assert run.report.outcome == "whole"
    assert run.trainer.global_step == 2 * EPOCHS * BATCHES
    assert all(param.requires_grad for param in run.module.parameters())


@pytest.mark.parametrize("kind", ["32-true", "16-mixed"])
def test_what_a_graph_would_freeze(tmp_path: Path, kind: str) -> None:
    """L6: nothing of a captured GAN is a number of the host that a CUDA graph would not follow."""
    with taped():
        assert same_with_ampkit(tmp_path, "cpu", "emulate", kind=kind).report.replays == EPOCHS * BATCHES - 3


@pytest.mark.parametrize("captured_first", [True, False])
def test_resumed(tmp_path: Path, captured_first: bool) -> None:
    """L6: a checkpoint amid an epoch is the plain Trainer's, and either of them goes on from it."""

    def half(folder: Path, graph: str | None, **options: Any) -> Run:
        amid = ModelCheckpoint(dirpath=folder / "amid", every_n_train_steps=2 * 7, save_top_k=-1, filename="{step}")
        return fit(folder, "cpu", graph, make=Gan, data=Batches(loader("cpu")), callbacks=[amid], **options)

    whole = half(tmp_path / "whole", None)
    first = half(tmp_path / "first", "emulate" if captured_first else None)
    assert_same_runs(whole, first)
    saved = tmp_path / "first" / "amid" / "step=14.ckpt"
    graphs = ("emulate", None) if captured_first else (None, "emulate")
    resumed = [half(tmp_path / str(i), graph, seed=5, ckpt_path=saved) for i, graph in enumerate(graphs)]
    assert_same(*(run.state()["weights"] for run in resumed))
    assert_same(*(run.state()["moments"] for run in resumed))
    assert {run.trainer.global_step for run in resumed} == {2 * EPOCHS * BATCHES}
    assert max(run.report.replays for run in resumed if run.report) > BATCHES


class Closures(Gan):
    """Steps by closures, with toggles that are contexts; returns nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        opt_g, opt_d = self.optimizers()

        def closure() -> Tensor:
            opt_g.zero_grad()
            loss = F.softplus(-self.disc(self.generated(batch[0]))).mean()
            self.manual_backward(loss)
            self.log("gen", loss)
            return loss

        with opt_g.toggle_model():
            opt_g.step(closure=closure)
        with self.toggled_optimizer(opt_d):
            opt_d.zero_grad()
            self.manual_backward(F.softplus(-self.disc(batch[0])).mean())
            opt_d.step()


class Hooked(Gan):
    """Hooks within the step: they log, and change gradients and losses."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
        self.log("norm", torch.stack([grad.norm() for grad in grads]).norm())

    def on_after_backward(self) -> None:
        for param in self.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss * 0.25, *args, **kwargs)


class LeavesGradients(Gan):
    """One step's gradients are the next one's, and no toggle keeps the one optimizer from the other's parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        opt_g, opt_d = self.optimizers()
        opt_g.zero_grad()
        loss = F.softplus(-self.disc(self.generated(batch[0]))).mean()
        self.manual_backward(loss)
        opt_g.step()
        opt_d.step()
        opt_d.zero_grad()
        self.manual_backward(F.softplus(-self.disc(batch[0])).mean())
        return loss


class RawOptimizers(Gan):
    """Optimizers that are not wrapped, whose steps Lightning does not count."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        opt_g, opt_d = self.optimizers(use_pl_optimizer=False)
        loss = F.softplus(-self.disc(self.generated(batch[0]))).mean()
        loss.backward()
        opt_g.step()
        for each in (opt_g, opt_d):
            each.zero_grad()
        return loss


class Scheduled(Gan):
    """Schedulers are stepped behind the batch."""

    def configure_optimizers(self) -> Any:
        optimizers = super().configure_optimizers()
        return [*optimizers], [torch.optim.lr_scheduler.StepLR(each, 3, 0.5) for each in optimizers]

    def on_train_batch_end(self, *args: Any) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()


@pytest.mark.parametrize("make", [Closures, Hooked, LeavesGradients, RawOptimizers, Scheduled])
def test_steps_that_are_captured(tmp_path: Path, make: Any) -> None:
    """L6: closures, hooks within the step, gradients that are left, and schedulers behind the batch are captured."""
    for name, context in (("emulated", nullcontext()), ("taped", taped())):
        with context:
            run = same_with_ampkit(tmp_path / name, "cpu", "emulate", make=make)
        assert run.report.replays == EPOCHS * BATCHES - 3


class NotFused(Gan):
    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=RATE) for part in (self.gen, self.disc)]


@pytest.mark.parametrize("engine", ENGINES)
def test_optimizers_that_are_not_fused(tmp_path: Path, engine: Engine) -> None:
    """L6: they are captured with a loss scale, too. On a GPU a step in a graph has bias corrections in float32."""
    device, graph = engine
    plain = fit(tmp_path / "plain", device, None if device == "cpu" else "off", make=NotFused, kind="16-mixed")
    ours = fit(tmp_path / "ours", device, graph, make=NotFused, kind="16-mixed")
    assert_same_runs(plain, ours)
    assert ours.report.replays == EPOCHS * BATCHES - 3
    assert ours.report.skipped > 0


class Clips(Gan):
    """Clips by norm and by value, by Lightning's method."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        opt_g, opt_d = self.optimizers()
        with opt_g.toggle_model():
            opt_g.zero_grad()
            self.manual_backward(F.softplus(-self.disc(self.generated(batch[0]))).mean())
            self.clip_gradients(opt_g, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            opt_g.step()
        with opt_d.toggle_model():
            opt_d.zero_grad()
            self.manual_backward(F.softplus(self.disc(self.generated(batch[0]).detach())).mean())
            self.clip_gradients(opt_d, gradient_clip_val=0.01, gradient_clip_algorithm="value")
            opt_d.step()


class ClipsAsTorch(Clips):
    """Unscales and clips as a loop of torch's own does: `Clips` is refused by Lightning alone."""

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if (scaler := getattr(self.trainer.strategy.precision_plugin, "scaler", None)) is not None:
            scaler.unscale_(optimizer.optimizer)  # what Lightning steps, and not its wrapper
        clip = nn.utils.clip_grad_norm_ if gradient_clip_algorithm == "norm" else nn.utils.clip_grad_value_
        clip(params, gradient_clip_val)


class UnscalesAndClips(Clips):
    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if (scaler := getattr(self.trainer.strategy.precision_plugin, "scaler", None)) is not None:
            scaler.unscale_(optimizer.optimizer)
        super().clip_gradients(optimizer, *args, **kwargs)


class CountsClips(Clips):
    count = 0

    def on_after_backward(self) -> None:
        self.count += 1


@pytest.mark.parametrize("kind", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("engine", ENGINES)
def test_fused_optimizers_whose_gradients_lightning_clips(tmp_path: Path, engine: Engine, kind: str) -> None:
    """L6: they are clipped as if no loss scale were in them, in eager steps, in graphs, and in steps of Lightning."""
    device, graph = engine
    torchs = fit(tmp_path / "torchs", device, None, make=ClipsAsTorch, kind=kind)
    off = fit(tmp_path / "off", device, "off", make=Clips, kind=kind)
    ours = fit(tmp_path / "ours", device, graph, make=Clips, kind=kind)
    with pytest.warns(ampkit.CaptureWarning, match=r"training_step changes self\.count on the host"):
        left = fit(tmp_path / "left", device, graph, make=CountsClips, kind=kind, options={"on_failure": "eager"})
    unscaled = fit(tmp_path / "unscaled", device, graph, make=UnscalesAndClips, kind=kind)
    for run in (off, ours, left, unscaled):
        assert_same_runs(torchs, run)
    assert ours.report.replays == EPOCHS * BATCHES - 3
    with taped() if device == "cpu" else nullcontext():
        assert_same_runs(torchs, fit(tmp_path / "taped", device, graph, make=Clips, kind=kind))
    assert left.report.replays == 0
    assert (ours.report.skipped > 0) == (kind == "16-mixed")


def test_optimizer_steps_are_profiled(tmp_path: Path) -> None:
    """L6: Lightning's profiler counts the optimizer steps of replays, too."""
    profiler = SimpleProfiler()
    fit(tmp_path, "cpu", "emulate", make=Gan, profiler=profiler)
    assert len(profiler.recorded_durations["optimizer_step"]) == 2 * EPOCHS * BATCHES


def test_figures_are_counted_by_batches(tmp_path: Path) -> None:
    """S1, L6: a batch is one line of figures, under the number under which Lightning logs it."""
    run = fit(tmp_path, "cpu", "emulate", make=Gan, log_every_n_steps=4)
    rows = (Path(run.trainer.logger.log_dir) / "metrics.csv").read_text().splitlines()
    names = rows[0].split(",")
    found = [dict(zip(names, row.split(","), strict=True)) for row in rows[1:]]
    steps = {name: [row["step"] for row in found if row[name]] for name in ("ampkit/graph_replays", "gen")}
    assert steps["ampkit/graph_replays"] == steps["gen"] == ["3", "7", "11", "15", "19"]


# -------------------------------------------------------------------------------------------------------- what is not


class CountsSteps(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.log("steps", float(self.global_step))


class EverySecond(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        opt_g, opt_d = self.optimizers()
        self.manual_backward(F.softplus(-self.disc(self.generated(batch[0]))).mean() / 2)
        if (batch_idx + 1) % 2 == 0:
            for each in (opt_g, opt_d):
                each.step()
                each.zero_grad()


class CountsInAHook(Gan):
    count = 0

    def on_after_backward(self) -> None:
        self.count += 1


class SchedulesItself(Scheduled):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.lr_schedulers()[0].step()


class CallsItsBase(SchedulesItself):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class LeavesOutItsBase(SchedulesItself):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        Gan.training_step(self, batch, batch_idx)


class SetsRates(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.param_groups[0]["lr"] *= 0.9


class KeepsScheduler(Gan):
    """Has a scheduler that the Trainer does not know."""

    def configure_optimizers(self) -> Any:
        optimizers = super().configure_optimizers()
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizers[1], 0.5)
        return optimizers

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.schedule.step()


class SchedulesFirst(KeepsScheduler):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.schedule.step()
        Gan.training_step(self, batch, batch_idx)


class Stops(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        if len(batch[0]) == 3:
            raise StopIteration


class WithinTheStep(Callback):
    calls = 0

    def on_after_backward(self, *args: Any) -> None:
        self.calls += 1


def one_short() -> Any:
    return Batches([part[:3] for part in batch] if i == 5 else batch for i, batch in enumerate(loader("cpu")))


NOT_CAPTURED = [
    (CountsSteps, {}, 'self.log("steps", float(self.global_step))` - reads global_step of the Trainer'),
    (EverySecond, {}, "training_step computes with batch_idx"),
    (CountsInAHook, {}, "training_step changes self.count on the host"),
    (SchedulesItself, {}, "SchedulesItself.training_step reads self.lr_schedulers(), and a replay steps none"),
    (CallsItsBase, {}, "SchedulesItself.training_step reads self.lr_schedulers(), and a replay steps none"),
    (SetsRates, {}, "SetsRates.training_step reads param_groups, and 'lr' may be set there"),
    (KeepsScheduler, {}, "training_step steps a learning-rate scheduler"),
    (Stops, {"data": one_short}, "training_step raises StopIteration"),
    (Gan, {"callbacks": lambda: [WithinTheStep()]}, "WithinTheStep.on_after_backward is called in training_step"),
]


@pytest.mark.parametrize(
    ("make", "options", "message"), every(3, NOT_CAPTURED), ids=[case[2][:30] for case in NOT_CAPTURED]
)
def test_steps_that_are_not_captured(tmp_path: Path, make: Any, options: dict[str, Any], message: str) -> None:
    """L6: what a graph would not do is done as Lightning does it; one warning says why."""

    def run(folder: Path, graph: str | None) -> Run:
        own = {key: value() for key, value in options.items()}
        return fit(tmp_path / folder, "cpu", graph, make=make, options={"on_failure": "eager"}, **own)

    plain = run(tmp_path / "plain", None)
    with pytest.warns(ampkit.CaptureWarning, match=re.escape(message)) as caught:
        ours = run(tmp_path / "ours", "emulate")
    assert len([warning for warning in caught if issubclass(warning.category, ampkit.CaptureWarning)]) == 1
    assert_same_runs(plain, ours)
    assert ours.report.replays < 3


def test_only_a_step_that_runs_is_judged(tmp_path: Path) -> None:
    """L6: that of a base class does not count if nothing calls it."""
    assert same_with_ampkit(tmp_path, "cpu", "emulate", make=LeavesOutItsBase).report.replays == EPOCHS * BATCHES - 3


def test_warnings_are_at_the_line_that_calls_fit(tmp_path: Path) -> None:
    """L6: not at a line of Lightning's, whether found before the first batch or in it."""
    for make in (SchedulesItself, CountsInAHook):
        with pytest.warns(ampkit.CaptureWarning) as caught:
            fit(tmp_path, "cpu", "emulate", make=make, options={"on_failure": "eager"})
        files = {warning.filename for warning in caught if warning.category is ampkit.CaptureWarning}
        assert files == {fit.__code__.co_filename}


def test_a_scheduler_that_steps_before_its_optimizer(tmp_path: Path) -> None:
    """L6: what would be another step is an error."""
    with pytest.raises(ampkit.CaptureError, match="An optimizer has stepped after it, with the old rate"):
        fit(tmp_path, "cpu", "emulate", make=SchedulesFirst, options={"on_failure": "eager"})


def test_options_that_need_automatic_optimization(tmp_path: Path) -> None:
    """What belongs to a step that ampkit writes is refused by name."""
    for options in ({"numerics": 5}, {"memory": True}, {"compile": "default"}):
        with pytest.raises(NotImplementedError, match="needs automatic optimization"):
            fit(tmp_path, "cpu", "emulate", make=Gan, options=options)
