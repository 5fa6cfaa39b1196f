"""Metrics of torchmetrics that a captured training step calls: they are called behind it, with the same results."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from families import every
from harness import ENGINES
from lightning_harness import BATCHES, QUIET, Net, _silent, assert_same_runs, fit, fused  # noqa: F401 - a fixture
from tape import taped
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassPrecision, MulticlassRecall
from torchmetrics.wrappers import BootStrapper, MinMaxMetric

import ampkit

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]

EPOCHS = 2


class Measured(Net):
    """Calls and logs `self.metric` in one of many ways."""

    def __init__(self, make: Callable[[], Any], use: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__(fused)
        self.metric, self._use = make(), use

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self._use(self, logits, y)
        return loss

    def on_train_epoch_end(self) -> None:
        computed = self.metric.compute()
        for name, value in (computed if isinstance(computed, dict) else {"epoch": computed}).items():
            self.log(f"{name}_end", value)
        self.metric.reset()


class WeightedSum(Metric):
    """Multiplies matrices, as autocast has it done in other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, logits: Tensor, y: Tensor) -> None:
        self.total = self.total + (logits @ logits.T).float().sum()

    def compute(self) -> Tensor:
        return self.total


def accuracy() -> Any:
    return MulticlassAccuracy(4)


def collection() -> Any:
    """Return metrics that share their state from the first update on."""
    return MetricCollection([MulticlassPrecision(4), MulticlassRecall(4)], prefix="train_")


def updated(module: Any, logits: Tensor, y: Tensor) -> None:
    module.metric.update(logits.float(), y)
    logits.detach().zero_()  # behind it: the metric has got a copy


def value_logged(module: Any, logits: Tensor, y: Tensor) -> None:
    module.log("now", module.metric(logits, y), on_step=True, on_epoch=True)


def metric_logged(module: Any, logits: Tensor, y: Tensor) -> None:
    module.metric(logits, y)
    module.log("metric", module.metric, on_step=True, on_epoch=False)


def values_logged(module: Any, logits: Tensor, y: Tensor) -> None:
    module.log_dict(module.metric(logits, y), on_step=True)


def collection_logged(module: Any, logits: Tensor, y: Tensor) -> None:
    module.metric.update(logits, y)
    module.log_dict(module.metric, on_step=True, on_epoch=False)


def without_autocast(module: Any, logits: Tensor, y: Tensor) -> None:
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        module.metric.update(logits.float(), y)


def computed(module: Any, logits: Tensor, y: Tensor) -> None:
    module.metric.update(logits, y)
    module.log("so_far", module.metric.compute())


CAPTURED = [
    (accuracy, updated),
    (accuracy, value_logged),
    (accuracy, metric_logged),
    (accuracy, computed),
    (lambda: MulticlassAUROC(4), updated),
    (lambda: MinMaxMetric(MulticlassAccuracy(4)), updated),
    (collection, updated),
    (collection, values_logged),
    (collection, collection_logged),
    (WeightedSum, value_logged),
    (WeightedSum, without_autocast),
]


@pytest.mark.parametrize(
    ("make", "use"), every(4, CAPTURED), ids=[f"{i} {use.__name__}" for i, (_, use) in enumerate(CAPTURED)]
)
@pytest.mark.parametrize("options", [{}, {"kind": "bf16-mixed"}, {"accumulate_grad_batches": 3}], ids=str)
def test_metrics_that_are_called_behind_the_step(tmp_path: Path, make: Any, use: Any, options: dict[str, Any]) -> None:
    """L7: what is logged, and what a metric has at the end of an epoch, are those of the plain Trainer, bit by bit."""
    module = lambda: Measured(make, use)  # noqa: E731
    plain = fit(tmp_path / "plain", "cpu", None, make=module, **options)
    for name, context in (("emulated", nullcontext()), ("taped", taped())):
        with context:
            ours = fit(tmp_path / name, "cpu", "emulate", make=module, **options)
        assert_same_runs(plain, ours)
        assert ours.report.replays >= EPOCHS * BATCHES - 9


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("make", "use"), [(accuracy, value_logged), (collection, collection_logged)])
def test_metrics_on_the_device(tmp_path: Path, engine: tuple[str, str], make: Any, use: Any) -> None:
    """L7: the same, with CUDA graphs where there is a GPU."""
    device, graph = engine
    ways = (None, graph)
    runs = [fit(tmp_path / str(i), device, way, make=lambda: Measured(make, use)) for i, way in enumerate(ways)]
    assert_same_runs(*runs)
    assert runs[1].report.replays == EPOCHS * BATCHES - 3


def as_a_weight(module: Any, logits: Tensor, y: Tensor) -> None:
    module.log("double", module.metric(logits, y) * 2)


def as_a_number(module: Any, logits: Tensor, y: Tensor) -> None:
    module.log("number", round(module.metric(logits, y).item(), 3))


def by_name(module: Any, logits: Tensor, y: Tensor) -> None:
    module.log("one", module.metric(logits, y)["train_MulticlassRecall"])


def converted(module: Any, logits: Tensor, y: Tensor) -> None:
    module.log("converted", torch.as_tensor(module.metric(logits, y)))


def boots() -> Any:
    return BootStrapper(MulticlassAccuracy(4), num_bootstraps=2)


def logged_before(module: Any, logits: Tensor, y: Tensor) -> None:
    module.log("before", module.metric, on_step=True, on_epoch=False)  # of the step before: it keeps what lies there
    module.log("after", module.metric(logits, y).sqrt())


NOT_CAPTURED = [
    (accuracy, logged_before),
    (accuracy, as_a_weight),
    (accuracy, as_a_number),
    (accuracy, converted),
    (collection, by_name),
    (boots, updated),
]


@pytest.mark.parametrize(("make", "use"), every(2, NOT_CAPTURED), ids=[use.__name__ for _, use in NOT_CAPTURED])
def test_values_that_are_used_in_the_step(tmp_path: Path, make: Any, use: Any) -> None:
    """L7: a value that the step uses is there, and the step is eager. So it is with metrics that draw numbers."""
    module = lambda: Measured(make, use)  # noqa: E731
    plain = fit(tmp_path / "plain", "cpu", None, make=module)
    with pytest.warns(ampkit.CaptureWarning, match=r"training_step updates self.metric.*while it runs"):
        ours = fit(tmp_path / "ours", "cpu", "emulate", make=module, options={"on_failure": "eager"})
    assert_same_runs(plain, ours)
    assert ours.report.replays == 0


class TrainsByMetric(Net):
    """Its loss is what a metric returns, with gradients."""

    def __init__(self) -> None:
        super().__init__(fused)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.mean(F.cross_entropy(self.net(batch[0]), batch[1]))


def test_a_loss_that_a_metric_returns(tmp_path: Path) -> None:
    """L7: the gradients go through the metric, as with Lightning alone."""
    plain = fit(tmp_path / "plain", "cpu", None, make=TrainsByMetric)
    with pytest.warns(ampkit.CaptureWarning, match=r"training_step updates self.mean"):
        ours = fit(tmp_path / "ours", "cpu", "emulate", make=TrainsByMetric, options={"on_failure": "eager"})
    assert_same_runs(plain, ours)
