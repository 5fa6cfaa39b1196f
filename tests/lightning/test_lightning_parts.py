"""A Trainer's step with a line that no graph can hold: modules around it, and the update, are captured one by one."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ENGINES
from lightning_harness import QUIET, Net, _silent, adamw, assert_same_runs, fit, fused, halving  # noqa: F401
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

pytestmark = [pytest.mark.usefixtures("untimed"), *(pytest.mark.filterwarnings(text) for text in QUIET)]

Engine = tuple[str, str]


class Reads(Net):
    """Reads a number between two parts of its net, and logs in every way."""

    def __init__(self, optimizer: Any = adamw, scheduler: Any = halving, interval: str = "epoch") -> None:
        super().__init__(optimizer, scheduler, interval)
        norms = nn.LayerNorm(16), nn.LayerNorm(16)
        self.first = nn.Sequential(nn.Linear(8, 16), norms[0], nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2))
        self.net = nn.Sequential(
            nn.Linear(16, 16), norms[1], nn.GELU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()
        )
        self.head = nn.Linear(16, 4)

    def logits(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        scale = 1 + hidden.detach().float().abs().mean()
        self.log("scale", scale)
        return self.head(self.net(hidden / scale.item()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.logits(x)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", (logits.argmax(1) == y).float().mean(), on_step=False, on_epoch=True)
        return {"loss": loss, "correct": (logits.argmax(1) == y).sum(), "name": "batch"}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.head(self.net(self.first(batch[0]))), batch[1]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("kind", "accumulate", "clip", "interval"),
    [("32-true", 1, None, "step"), ("bf16-mixed", 3, 0.1, "epoch"), ("16-mixed", 1, 0.1, "epoch")],
)
@pytest.mark.sampled(3)
@pytest.mark.slow
def test_equals_lightning(
    engine: Engine, tmp_path: Path, kind: str, accumulate: int, clip: float | None, interval: str
) -> None:
    """L1, R4: weights, moments, loss scale, logged values, hook counts and outputs are those of eager steps."""
    device, graph = engine
    folded = clip is not None and (kind == "16-mixed" or device == "cuda")
    make = fused if device == "cuda" else adamw
    options: dict[str, Any] = {"kind": kind, "accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    runs = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ampkit.CaptureWarning)
        for way in ("off" if folded else None, graph):
            runs.append(
                fit(
                    tmp_path / str(way),
                    device,
                    way,
                    make=lambda: Reads(make, halving, interval),
                    options={"on_failure": "parts"},
                    max_epochs=3,
                    validate=True,
                    **options,
                )
            )
    assert_same_runs(*runs)
    report = runs[1].report
    assert (report.outcome, report.updates) == ("in parts", 1), str(report)
    assert [part.module for part in report.parts] == ["first", "net"]
    assert all(part.replays == report.in_parts and not part.eager for part in report.parts)
    assert report.in_parts + sum(report.eager.values()) == 33
    said = [str(warning.message) for warning in caught if warning.category is ampkit.CaptureWarning]
    assert any("The step is done in parts: first, net, and the update of the parameters" in text for text in said)


class Logs(Reads):
    """Calls itself, and logs a number there."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.log("width", x.shape[1] * 1.0)
        return self.head(self.net(self.first(x)))

    def logits(self, x: Tensor) -> Tensor:
        logits = self(x)
        return logits / (1 + logits.detach().float().abs().mean().item())


def report_of(engine: Engine, tmp_path: Path, kind: type[Net]) -> ampkit.Report:
    """Train a module by Lightning alone and in parts, assert that the two runs are the same, and return the report."""
    device, graph = engine
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        runs = [
            fit(tmp_path / str(way), device, way, make=lambda: kind(fused), options={"on_failure": "parts"})
            for way in (None, graph)
        ]
    assert_same_runs(*runs)
    report: ampkit.Report = runs[1].report
    return report


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_the_module_itself_is_not_captured(engine: Engine, tmp_path: Path) -> None:
    """L1, R4: its forward may call self.log, which a replay would leave out."""
    report = report_of(engine, tmp_path, Logs)
    assert [part.module for part in report.parts] == ["first", "net"]
    assert "eager: the model: a LightningModule may call self.log, which a replay would leave out" in str(report)


class Weighted(Reads):
    """A hook changes a number in each epoch, which `training_step` reads."""

    factor = 1.0

    def on_train_epoch_start(self) -> None:
        self.factor *= 0.5

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x) * self.factor


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_number_that_changes_in_each_epoch(engine: Engine, tmp_path: Path) -> None:
    """L1, R4: each value has a warm-up and captured modules of its own, as it has a graph of its own otherwise."""
    report = report_of(engine, tmp_path, Weighted)
    assert [part.module for part in report.parts] == ["first", "net"] * 2
    assert report.in_parts == 2 * (11 - 3 - 2)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_all_or_nothing(engine: Engine, tmp_path: Path) -> None:
    """L1, R4: with on_failure="eager" nothing is captured, and the report names the line."""
    device, graph = engine
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        run = fit(tmp_path, device, graph, make=lambda: Reads(fused), options={"on_failure": "eager"})
    assert (run.report.outcome, run.report.in_parts) == ("eager", 0)
    assert "hidden / scale.item()" in str(run.report)
    assert torch.isfinite(next(run.module.parameters())).all()
