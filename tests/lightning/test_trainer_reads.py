"""What a step reads of its Trainer: it counts where it is read, and modules around such a line are captured."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from families import few
from harness import ENGINES
from lightning_harness import QUIET, Net, Run, _silent, adamw, assert_same_runs, fit, fused, halving  # noqa: F401
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

pytestmark = [pytest.mark.usefixtures("untimed"), *(pytest.mark.filterwarnings(text) for text in QUIET)]

Engine = tuple[str, str]


class Reads(Net):
    """A module with two parts, whose step multiplies its loss by what `factor` returns."""

    def __init__(self, optimizer: Any = adamw) -> None:
        super().__init__(optimizer, halving, "step")
        norms = nn.LayerNorm(16), nn.LayerNorm(16)
        self.first = nn.Sequential(nn.Linear(8, 16), norms[0], nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2))
        self.net = nn.Sequential(nn.Linear(16, 16), norms[1], nn.GELU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.net(self.first(x)), y) * self.factor()
        self.log("loss", loss)
        return {"loss": loss}

    def factor(self) -> float:
        return 1.0


class LogsNowAndThen(Reads):
    def factor(self) -> float:
        if self.global_step % 5 == 0:
            self.log("number", self.global_step * 1.0)
        return 1.0


class ByTrainer(Reads):
    def factor(self) -> float:
        return 1.0 + self.trainer.global_step / 8


class ByName(Reads):
    def factor(self) -> float:
        return 1.0 + float(getattr(self, "global_" + "step"))


class OfLoop(Reads):
    def factor(self) -> float:
        return 1.0 + self.trainer.fit_loop.epoch_loop.total_batch_idx


class LastBatch(Reads):
    def factor(self) -> float:
        return 2.0 if self.trainer.is_last_batch else 1.0


class Rate(Reads):
    def factor(self) -> float:
        self.log("rate", self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        return 1.0 + 64 * self.lr_schedulers().get_last_lr()[0]  # type: ignore[union-attr]


class OfStrategy(Reads):
    def factor(self) -> float:
        return 1.0 + 64 * self.trainer.strategy.optimizers[0].param_groups[0]["lr"]


class Metrics(Reads):
    def factor(self) -> float:
        return 1.0 + len(self.trainer.progress_bar_metrics) + len(self.trainer.callback_metrics)


class ReadsItsLog(Reads):
    """Reads back what the same step has logged, which Lightning has at once."""

    def factor(self) -> Any:
        self.log("scale", self.first[0].weight.abs().mean())
        self.log("number", 0.5, on_step=True, on_epoch=True)
        return self.trainer.callback_metrics["scale"] + self.trainer.logged_metrics["number_step"]


class WritesToLogger(Reads):
    def factor(self) -> float:
        self.logger.log_metrics({"steps": 1.0}, step=0)  # type: ignore[union-attr]
        return 1.0


class Schedule:
    """Reads the number of the step for a module, which tells nothing of it."""

    def __init__(self, module: pl.LightningModule) -> None:
        self.owner = module

    def factor(self) -> float:
        return 1.0 + self.owner.global_step / 8


class ByHelper(Reads):
    def __init__(self, optimizer: Any = adamw) -> None:
        super().__init__(optimizer)
        self.schedules = (Schedule(self),)

    def factor(self) -> float:
        return self.schedules[0].factor()


class InBackward(Reads):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        hidden = self.first(x)
        hidden.register_hook(lambda grad: grad * (1.0 + self.global_step))
        return F.cross_entropy(self.net(hidden), y)


KINDS: dict[type[Reads], str] = {
    LogsNowAndThen: "global_step",
    ByTrainer: "global_step",
    ByName: "global_step",
    OfLoop: "fit_loop",
    LastBatch: "is_last_batch",
    Rate: "optimizers",
    OfStrategy: "optimizers",
    Metrics: "progress_bar_metrics",
    ReadsItsLog: "callback_metrics",
    WritesToLogger: "logger",
    ByHelper: "global_step",
    InBackward: "global_step",
}


def runs_of(engine: Engine, folder: Path, kind: Callable[[Any], pl.LightningModule], **options: Any) -> list[Run]:
    """Train by Lightning alone and with ampkit, and assert that the two are the same."""
    device, graph = engine
    ways: list[str | None] = [None, graph]
    found = [
        fit(folder / str(way), device, way, make=lambda: kind(fused), options={"on_failure": "parts"}, **options)
        for way in ways
    ]
    assert_same_runs(*found)
    return found


@pytest.mark.sampled(10)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulate", few([1, 3], (1,)))
def test_modules_around_a_read_are_captured(engine: Engine, tmp_path: Path, kind: type[Reads], accumulate: int) -> None:
    """L1, R4: what is read is right in each step; the warning names the line, and what to write instead."""
    line = f"reads {KINDS[kind]} of the Trainer, and a graph would freeze its value."
    with pytest.warns(ampkit.CaptureWarning, match=re.escape(line)) as caught:
        _, ours = runs_of(engine, tmp_path, kind, accumulate_grad_batches=accumulate)
    (said,) = [str(warning.message) for warning in caught if warning.category is ampkit.CaptureWarning]
    assert said.count(line) == 1
    assert f"{__file__}:" in said
    if KINDS[kind] == "global_step":
        assert "belongs in on_train_batch_end" in said
        assert "log_every_n_steps" in said
    report = ours.report
    assert (report.replays, report.outcome, report.updates) == (0, "in parts", 1), str(report)
    parts = {"net"} if kind is InBackward else {"first", "net"}  # the hook belongs to the output of `first`
    assert {part.module for part in report.parts} == parts


class Behind(Reads):
    """Reads all of this behind conditions that are false, and lets one of them become true."""

    debug, late = False, False

    def factor(self) -> float:
        if self.debug and self.global_step % 5 == 0:
            self.log("number", self.global_step * 1.0)
        if self.debug:
            return 1.0 + len(self.trainer.callback_metrics) + len(self.loggers)
        return 1.0 + self.global_step if self.late else 1.0

    def on_train_epoch_start(self) -> None:
        self.late = self.current_epoch == 2


@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_what_is_not_read_keeps_nothing_from_being_captured(engine: Engine, tmp_path: Path) -> None:
    """R7: whole steps are replayed, until a condition becomes true. Then calls are watched anew."""
    _, ours = runs_of(engine, tmp_path, Behind, max_epochs=4)
    assert (ours.report.captures, ours.report.replays) == (1, 8 + 11 + 11)
    assert ours.report.in_parts == 11 - 3 - 2
    assert "return 1.0 + self.global_step if self.late else 1.0` - reads global_step" in str(ours.report)


class Scales(nn.Module):
    """A part that reads the number of the step by itself."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), *(nn.Tanh() for _ in range(4)))
        self.schedules = (Schedule(module),)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.schedules[0].factor()


class ByPart(Reads):
    def __init__(self, optimizer: Any = adamw) -> None:
        super().__init__(optimizer)
        self.scales = Scales(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(self.scales(self.first(batch[0]))), batch[1])


@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_part_that_reads_is_not_captured(engine: Engine, tmp_path: Path) -> None:
    """R7: what is in it is, and the modules beside it."""
    _, ours = runs_of(engine, tmp_path, ByPart)
    assert [part.module for part in ours.report.parts] == ["first", "scales.inner", "net"]
    assert "eager: scales: it contains such a line" in str(ours.report)


@pytest.mark.parametrize("on_failure", ["eager", "raise"])
@pytest.mark.slow
def test_all_or_nothing(tmp_path: Path, on_failure: str) -> None:
    """L3: with the other values of `on_failure` nothing is captured, or the fit ends; the line is named as well."""
    options: dict[str, Any] = {"make": LogsNowAndThen, "options": {"on_failure": on_failure}}
    message = r"`if self\.global_step % 5 == 0:` - reads global_step of the Trainer"
    if on_failure == "raise":
        with pytest.raises(ampkit.CaptureError, match=message):
            fit(tmp_path, "cpu", "emulate", **options)
        return
    with pytest.warns(ampkit.CaptureWarning, match=message):
        ours = fit(tmp_path / "ours", "cpu", "emulate", **options)
    assert (ours.report.outcome, ours.report.replays) == ("eager", 0)
    assert_same_runs(fit(tmp_path / "plain", "cpu", None, make=LogsNowAndThen), ours)


class EpochByHelper(Reads):
    """Another object reads the number of the epoch."""

    def __init__(self, optimizer: Any = adamw) -> None:
        super().__init__(optimizer)
        self.owners = (self,)

    def factor(self) -> float:
        return 0.5 ** getattr(self.owners[0], "_".join(("current", "epoch")))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_each_epoch_has_a_graph_if_its_number_is_read(engine: Engine, tmp_path: Path) -> None:
    """R7: also where no bytecode shows that. It takes one warm-up call more, in the first epoch."""
    _, ours = runs_of(engine, tmp_path, EpochByHelper, max_epochs=3)
    assert (ours.report.captures, ours.report.replays) == (3, 7 + 8 + 8)


class Watcher(pl.Callback):
    """Another thread, which reads the number of the step all the time."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.read, args=(trainer,))
        self.thread.start()

    def read(self, trainer: pl.Trainer) -> None:
        while not self.ended.wait(0.0001):
            _ = trainer.global_step, trainer.is_last_batch

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.ended.set()
        self.thread.join()


@pytest.mark.slow
def test_other_threads_may_read(tmp_path: Path) -> None:
    """Such as one that shows how far the training is."""
    assert fit(tmp_path, "cpu", "emulate", make=Reads, callbacks=[Watcher()]).report.replays == 19


class Compiled(Behind):
    """Has a part that the user has compiled: what compiled code reads, it reads unseen."""

    def __init__(self, optimizer: Any = adamw) -> None:
        super().__init__(optimizer)
        self.net = torch.compile(self.net, backend="eager")


@pytest.mark.slow
def test_beside_compiled_code_bytecode_counts(tmp_path: Path) -> None:
    """R7: with `torch.compile` in the step, and with `compile=`."""
    said = "Behind.factor reads self.global_step, and a graph would freeze its value"
    with pytest.warns(ampkit.CaptureWarning, match=said):
        _, ours = runs_of(("cpu", "emulate"), tmp_path, Compiled)
    assert (ours.report.outcome, ours.report.replays) == ("eager", 0)
    with pytest.raises(ampkit.CaptureError, match=said):
        fit(tmp_path / "compiled", "cpu", "emulate", make=Behind, options={"compile": "default"})


@pytest.mark.slow
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """The classes are as they were, also after an error."""

    class Fails(Reads):
        def factor(self) -> float:
            raise KeyError("a mistake of the user")

    kinds = (pl.Trainer, pl.LightningModule, Reads, Fails)
    before = [dict(vars(kind)) for kind in kinds]
    with pytest.raises(KeyError):
        fit(tmp_path / "fails", "cpu", "emulate", make=Fails)
    fit(tmp_path, "cpu", "emulate", make=Reads)
    assert [dict(vars(kind)) for kind in kinds] == before
