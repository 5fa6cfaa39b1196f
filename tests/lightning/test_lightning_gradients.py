"""ampkit.lightning: a hook that uses gradients has the right ones, however deep it reads them, or a clear message."""

import copy
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import grad_norm as norms_by_name
from lightning_harness import QUIET, HooksAmidAStep, Net, _silent, adamw, assert_same_runs, fit, fused  # noqa: F401
from torch import nn

import ampkit

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]

Engine = tuple[str, str]


def total_norm(module: Any) -> torch.Tensor:
    """Return the norm as many people write it, who skip what has no gradient."""
    return torch.stack([torch.zeros(()), *(p.grad.norm() for p in module.parameters() if p.grad is not None)]).norm()


class Meter:
    """Measures on behalf of others."""

    def measure(self, module: Any) -> torch.Tensor:
        return getattr(self, "_" + "measure")(module)

    def _measure(self, module: Any) -> torch.Tensor:
        return total_norm(module)


class ByFunction(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", total_norm(self))


class ByLightning(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(norms_by_name(self, norm_type=2))


class ByObject(Net):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.meter = Meter()

    def on_after_backward(self) -> None:
        self.log("norm", self.meter.measure(self))


class Freezes(Net):
    """Keeps the last layer as it is for an epoch, as DINO does."""

    def on_after_backward(self) -> None:
        if self.current_epoch == 0:
            self.net[4].zero_grad()


USERS = [
    (ByFunction, [], "ByFunction.on_before_optimizer_step"),
    (ByLightning, [], "ByLightning.on_before_optimizer_step"),
    (ByObject, [], "ByObject.on_after_backward"),
    (Freezes, [], "Freezes.on_after_backward"),
]
SETTINGS = [("32-true", 1), ("bf16-mixed", 3), ("16-mixed", 1)]


@pytest.mark.parametrize(("kind", "accumulate"), SETTINGS)
@pytest.mark.parametrize(("make", "name"), [(case[0], case[2]) for case in USERS], ids=[case[2] for case in USERS])
@pytest.mark.sampled(4)
@pytest.mark.quick(2)
def test_a_hook_that_uses_gradients_gets_them(tmp_path: Path, make: Any, name: str, kind: str, accumulate: int) -> None:
    """Item 6: from the first step on, bit by bit those of Lightning without ampkit. One warning names hook and line."""
    options: dict[str, Any] = {"make": make, "kind": kind, "accumulate_grad_batches": accumulate}
    plain = fit(tmp_path / "plain", "cpu", None, **options)
    message = re.escape(name) + r" uses gradients, .*test_lightning_gradients\.py:\d+: `.*ampkit/grad_norm"
    with pytest.warns(ampkit.CaptureWarning, match=message) as caught:
        ours = fit(tmp_path / "ours", "cpu", "emulate", options={"on_failure": "eager"}, **options)
    assert len([warning for warning in caught if issubclass(warning.category, ampkit.CaptureWarning)]) == 1
    assert_same_runs(plain, ours)
    assert name in ours.report.failure
    with pytest.raises(ampkit.CaptureError, match=message):
        fit(tmp_path / "raise", "cpu", "emulate", **options)


class Late(Net):
    """Uses gradients for the first time when steps are captured already."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step >= 6:
            self.log("norm", total_norm(self))


class MeasuresBehind(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.log("norm", Meter().measure(pl_module))


@pytest.mark.parametrize(
    ("make", "callbacks", "steps", "message"),
    [
        (Late, [], 6, r"Late\.on_before_optimizer_step uses gradients"),
        (Net, [MeasuresBehind], 0, r"MeasuresBehind\.on_train_batch_end uses gradients"),
    ],
    ids=["late", "behind the step"],
)
@pytest.mark.parametrize(("kind", "accumulate"), SETTINGS)
@pytest.mark.sampled(3)
@pytest.mark.slow
def test_a_gradient_that_is_not_there(
    tmp_path: Path, make: Any, callbacks: Any, steps: int, message: str, kind: str, accumulate: int
) -> None:
    """Item 6: the hook never gets a wrong value: it ends there, a warning says why, and Lightning does what follows."""
    warnings.filterwarnings("ignore", ".*will be called after the optimizer")
    own: dict[str, Any] = {"make": make, "kind": kind, "accumulate_grad_batches": accumulate, "max_epochs": 3}
    plain = fit(tmp_path / "plain", "cpu", None, callbacks=[made() for made in callbacks], **own)
    options = {"on_failure": "eager"}
    with pytest.warns(ampkit.CaptureWarning, match=message + r".*py:\d+: `.*(measure|total_norm)") as caught:
        ours = fit(tmp_path / "ours", "cpu", "emulate", options=options, callbacks=[m() for m in callbacks], **own)
    (warning,) = (warning for warning in caught if issubclass(warning.category, ampkit.CaptureWarning))
    assert "the hook was ended there" in str(warning.message)
    assert ours.trainer.global_step == plain.trainer.global_step
    assert_same(ours.state()["weights"], plain.state()["weights"])
    expected, found = ([row for row in run.logged() if "norm" in row] for run in (plain, ours))
    assert found == expected[len(expected) - len(found) :]
    assert 1 <= len(expected) - len(found) <= accumulate  # the calls before Lightning's next step
    assert "uses gradients" in ours.report.failure
    with pytest.raises(ampkit.CaptureError, match=message):
        fit(tmp_path / "raise", "cpu", "emulate", callbacks=[made() for made in callbacks], **own)


@pytest.mark.filterwarnings("ignore:.*will be called after the optimizer")
@pytest.mark.parametrize("on_failure", ["eager", "raise"])
@pytest.mark.parametrize("graph", ["emulate", "off"])
@pytest.mark.quick(2)
@pytest.mark.slow
def test_where_lightning_refuses_to_clip(tmp_path: Path, graph: str, on_failure: str) -> None:
    """Item 6: Lightning by itself would not do the first step here. The hook is ended with a message, not with None."""
    options: dict[str, Any] = {"make": lambda: ByObject(fused), "kind": "bf16-mixed", "gradient_clip_val": 0.1}
    with pytest.raises(ampkit.CaptureError, match=r"ByObject\.on_after_backward uses gradients"):
        fit(tmp_path, "cpu", graph, options={"on_failure": on_failure}, **options)


class TrainsAProbe(Callback):
    """Trains a model of its own behind each step, and clears all gradients, which uses none of the module's."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.probe = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.probe.parameters(), lr=0.1)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        nn.functional.cross_entropy(self.probe(batch[0]), batch[1]).backward()
        assert total_norm(self.probe) > 0
        self.optimizer.step()
        self.optimizer.zero_grad()
        pl_module.zero_grad()
        trainer.optimizers[0].zero_grad()


class Averages(Net):
    """Mentions gradients in the code of its hook, and uses none."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.average = sum(param.mean() for param in self.parameters() if param.requires_grad)


@pytest.mark.slow
def test_what_uses_no_gradients_is_captured(tmp_path: Path) -> None:
    """Hooks whose code has the word, and those that train another model, do not keep a step from being captured."""
    with pytest.warns(ampkit.AmpkitWarning, match=r"Averages\.on_before_zero_grad will be called after") as caught:
        ours = fit(tmp_path / "ours", "cpu", "emulate", make=Averages, callbacks=[TrainsAProbe()])
    assert not [warning for warning in caught if issubclass(warning.category, ampkit.CaptureWarning)]
    assert ours.report.replays == 22 - 1 - 3
    assert_same_runs(fit(tmp_path / "plain", "cpu", None, make=Averages, callbacks=[TrainsAProbe()]), ours)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "accumulate"), [(kind, n) for kind in ("32-true", "16-mixed") for n in (1, 3)])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_every_hook_is_called_as_ever(engine: Engine, tmp_path: Path, kind: str, accumulate: int) -> None:
    """L1: those between backward and the optimizer's step, too; for them Lightning does the first step of a fit."""
    device, graph = engine
    options: dict[str, Any] = {"counts": HooksAmidAStep, "kind": kind, "accumulate_grad_batches": accumulate}
    runs = [
        fit(tmp_path / str(way), device, way, make=lambda: Net(fused if device == "cuda" else adamw), **options)
        for way in (None, graph)
    ]
    assert_same_runs(*runs)
    assert runs[1].report.replays == 22 - accumulate - 3 * (3 if accumulate == 3 else 1)
    assert runs[1].hooks.counts["on_after_backward"] == 22


class Copied(Net):
    copies: list[Any]

    def on_after_backward(self) -> None:
        self.calls = getattr(self, "calls", 0) + 1

    def on_train_epoch_end(self) -> None:
        self.trainer, trainer = None, self.trainer
        self.copies = [copy.deepcopy(self), pickle.loads(pickle.dumps(self))]
        self.trainer = trainer


@pytest.mark.slow
def test_hooks_are_put_back(tmp_path: Path) -> None:
    """After a fit, and after one that failed, a module has its own hooks; copies made meanwhile have theirs."""
    module = Copied(dropout=0.0)
    module._optimizer = adamw  # what a lambda in its place could not be: pickled
    with pytest.warns(ampkit.AmpkitWarning, match=r"Copied\.on_after_backward will be called after"):
        fit(tmp_path, "cpu", "emulate", make=lambda: module)
    assert not {name for name in vars(module) if name.startswith("on_")}
    assert module.calls == 22
    for made in module.copies:
        made.on_after_backward()
        assert made.calls == 23
    assert module.calls == 22
    broken = ByFunction()
    with pytest.raises(ampkit.CaptureError):
        fit(tmp_path / "raise", "cpu", "emulate", make=lambda: broken)
    assert not {name for name in vars(broken) if name.startswith("on_")}
