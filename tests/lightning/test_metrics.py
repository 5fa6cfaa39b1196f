"""Figures where people look: `step.metrics()`, and what AmpkitCallback gives to loggers and progress bar."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ENGINES, boosted_loss, make_batches, make_net, no_sync
from lightning.pytorch.callbacks import Callback
from lightning_harness import QUIET, Net, Run, _silent, adamw, fit, fused  # noqa: F401 - a fixture
from torch import Tensor

import ampkit
from ampkit.lightning import AmpkitCallback
from ampkit.lightning import _statistics as under_test
from ampkit.lightning._fit import Fit

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]

Engine = tuple[str, str]


# -------------------------------------------------------------------------------------------------------- step.metrics


def scaled_step(device: str, graph: str, **options: Any) -> Any:
    model = make_net(device, dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    scaler = ampkit.GradScaler(device, init_scale=16.0, growth_interval=100)
    return ampkit.graphed_step(boosted_loss, model, optimizer, scaler=scaler, graph=graph, **options)


@pytest.mark.parametrize("engine", ENGINES)
def test_metrics_of_a_step(engine: Engine) -> None:
    """S1: scale, skipped steps and norm are those of the last step; earlier ones keep their values."""
    device, graph = engine
    step = scaled_step(device, graph, max_norm=1.0)
    read: list[dict[str, Any]] = []
    norms: list[Tensor] = []
    for batch in make_batches(device, [4] * 8, overflow_at=(1, 6)):
        norms.append(step(*batch).grad_norm)
        read.append(step.metrics())
    names = ("loss_scale", "skipped_steps", "grad_norm")
    for metrics, norm in zip(read, norms, strict=True):
        for name in names:
            assert isinstance(metrics[name], Tensor)
            assert metrics[name].device.type == device
            assert metrics[name].shape == ()
        assert torch.equal(metrics["grad_norm"], norm) or not norm.isfinite()
        assert metrics["grad_norm"].data_ptr() != norm.data_ptr()
    assert [metrics["loss_scale"].item() for metrics in read] == [16, 8, 8, 8, 8, 8, 4, 4]
    assert [metrics["skipped_steps"].item() for metrics in read] == [0, 1, 1, 1, 1, 1, 2, 2]
    assert read[0]["skipped_steps"].dtype is torch.int64
    assert [metrics["replay_share"] for metrics in read] == [0, 0, 0, 1 / 4, 2 / 5, 3 / 6, 4 / 7, 5 / 8]
    assert step.replays == 5
    assert "ms_per_step" not in read[0]
    if device == "cuda":
        torch.cuda.synchronize()
        step.metrics()
    last = step.metrics()["ms_per_step"]
    assert isinstance(last, float)
    assert last > 0


def test_metrics_without_a_loss_scale() -> None:
    """What does not exist is left out."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = ampkit.graphed_step(lambda model, x: model(x).square().mean(), model, optimizer, graph="emulate")
    assert step.metrics() == {"replay_share": 0.0}
    for _ in range(4):
        step(torch.ones(3, 4))
    assert step.metrics().keys() == {"replay_share", "ms_per_step"}
    assert step.metrics()["replay_share"] == 0.25


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("accumulate", "how"), [(1, "scan"), (2, "scan"), (20, "window")])
@pytest.mark.slow
def test_calls_of_scan_and_window_count(accumulate: int, how: str) -> None:
    """Each slice is a call: the share counts those that a launch of many calls has done."""
    step = scaled_step("cpu", "emulate", max_norm=1.0, accumulate=accumulate)
    (one,) = make_batches("cpu", [4])
    many = [part.expand(20, *part.shape) for part in one]
    for _ in range(6):
        getattr(step, how)(*many)
    report = step.report()
    assert report.launches > 0
    eager = sum(report.eager.values())
    assert step.metrics()["replay_share"] == (120 - eager) / 120


@pytest.mark.cuda
def test_metrics_wait_for_nothing() -> None:
    """X2: neither the reading of metrics nor the steps around it wait for the device."""
    step = scaled_step("cuda", "auto", max_norm=1.0)
    (batch,) = make_batches("cuda", [4])
    for _ in range(12):
        step(*batch)
        step.metrics()
    torch.cuda.synchronize()
    with no_sync():
        read = []
        for _ in range(5):
            step(*batch)
            read.append(step.metrics())
    assert all("ms_per_step" in metrics for metrics in read)
    scales = torch.stack([metrics["loss_scale"] for metrics in read])
    assert scales.isfinite().all()


# ----------------------------------------------------------------------------------------------------------- Lightning


def rows(run: Run) -> list[dict[str, str]]:
    """Return the rows of metrics.csv that ampkit has written."""
    with (Path(run.trainer.logger.log_dir) / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row.get("ampkit/graph_replays")]


@pytest.mark.parametrize("engine", ENGINES)
def test_figures_of_a_fit(engine: Engine, tmp_path: Path) -> None:
    """L1: with log=True the figures are in the logger, each once, under the step that they are of."""
    device, graph = engine
    make = lambda: Net(fused if device == "cuda" else adamw)  # noqa: E731
    run = fit(tmp_path, device, graph, make=make, kind="16-mixed", gradient_clip_val=0.1, log_every_n_steps=5)
    found = rows(run)
    assert [int(row["step"]) for row in found] == [4, 9, 14, 19]
    assert [float(row["ampkit/replay_share"]) for row in found] == [2 / 5, 7 / 10, 12 / 15, 17 / 20]
    for row in found:
        assert float(row["ampkit/ms_per_step"]) > 0
        both = float(row["ampkit/ms_per_step"]) * float(row["ampkit/samples_per_second"])
        assert both == pytest.approx(8 * 1000)  # batches of 8


@pytest.mark.slow
def test_no_figures_in_the_logger(tmp_path: Path) -> None:
    """log=False leaves the logger to the module; the progress bar shows the figures all the same."""
    shown: list[dict[str, Any]] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            shown.append(trainer.progress_bar_callback.get_metrics(trainer, trainer.lightning_module))

    options: dict[str, Any] = {"log_every_n_steps": 4, "callbacks": [Look()], "enable_progress_bar": True}
    run = fit(tmp_path, "cpu", "emulate", gradient_clip_val=1.0, options={"log": False}, **options)
    assert rows(run) == []
    assert shown[-1]["samples/s"] > 0
    with pytest.raises(ValueError, match=r"AmpkitCallback\(log="):
        AmpkitCallback(log="yes")  # type: ignore[arg-type]


class Late:
    """An event that the device reaches when it is told to."""

    def __init__(self) -> None:
        self.reached = self.waited = False

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.waited = True


def test_statistics_that_have_not_arrived_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is behind makes the loggers get the figures later, in order; only the end of a fit waits."""
    events: list[Late] = []

    def pending(*args: Any) -> Any:
        made = real(*args)
        events.append(Late())
        made._copied = events[-1]
        return made

    real = under_test._PendingStatistics
    monkeypatch.setattr(under_test, "_PendingStatistics", pending)
    reader = under_test.StatisticsReader(torch.device("cpu"), 1)
    scaler = ampkit.GradScaler("cpu", enabled=False)
    assert reader.start(0, scaler, torch.tensor(1.0), {}) == []
    assert reader.start(1, scaler, torch.tensor(2.0), {}) == []
    events[0].reached = events[1].reached = True
    arrived = reader.start(2, scaler, None, {"n": 3.0})
    assert [(statistics.step, statistics.values["grad_norm"]) for statistics in arrived] == [(0, 1.0), (1, 2.0)]
    assert reader.start(3, scaler, None, {}) == []
    assert [statistics.step for statistics in reader.finish()] == [2, 3]
    assert [event.waited for event in events] == [True] * 4  # an event that was reached ends at once
    for step in range(under_test._MOST_PENDING + 1):
        assert reader.start(step, scaler, None, {}) == []
    assert [statistics.step for statistics in reader.start(99, scaler, None, {})] == [0]


@pytest.mark.cuda
@pytest.mark.slow
def test_figures_wait_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X2: what ampkit does for the logger and the bar between two batches does not wait for the device."""
    original = Fit.read_statistics

    def watched(self: Fit) -> None:
        with no_sync():
            original(self)

    monkeypatch.setattr(Fit, "read_statistics", watched)
    run = fit(tmp_path, "cuda", "auto", make=lambda: Net(fused), kind="16-mixed", log_every_n_steps=2)
    assert len(rows(run)) == 11
