"""What a step changes on the host: replays leave modes as it does, and what they cannot repeat is refused by name."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, deterministic, line_of, make_batches, make_net, training_state
from tape import taped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import ampkit

Engine = tuple[str, str]


def loss_fn(model: nn.Module, images: Tensor, labels: Tensor, boost: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels) * boost


class Training:
    """A model that is trained by a function under `graphed`, or by a `graphed_step` that calls `change` at its end."""

    def __init__(self, engine: Engine, api: str, change: Callable[["Training"], object], **options: Any) -> None:
        self.model: Any = make_net(engine[0])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.scheduler = lr_scheduler.StepLR(self.optimizer, 100)
        options = {"graph": engine[1], "on_failure": "eager", **options}

        def after_step(_: nn.Module) -> None:
            change(self)

        def train(*batch: Tensor) -> Tensor:
            loss = loss_fn(self.model, *batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            change(self)
            return loss

        if api == "graphed":
            decorate = ampkit.graphed(modules=(self.model,), optimizers=(self.optimizer,), **options)
            self.step: Any = decorate(train)
        else:
            self.step = ampkit.graphed_step(loss_fn, self.model, self.optimizer, after_step=after_step, **options)

    def run(self, calls: int) -> None:
        for batch in make_batches(str(self.model.head.weight.device), [4] * calls):
            self.step(*batch)

    def state(self) -> list[Any]:
        flags = [param.requires_grad for param in self.model.parameters()]
        flags += [module.training for module in self.model.modules()]
        return [flags, training_state(self.model, self.optimizer, ampkit.GradScaler("cpu", enabled=False))]


def evaluates(training: Training) -> None:
    training.model.eval()


def freezes_and_unfreezes(training: Training) -> None:
    weight = training.model.head.weight
    weight.requires_grad_(not weight.requires_grad)


def changes_a_mode_to_and_fro(training: Training) -> None:
    training.model.norm.train(not training.model.norm.training)


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:.*train/eval mode or requires_grad changed:ampkit.CaptureWarning")
@pytest.mark.parametrize("change", [evaluates, freezes_and_unfreezes, changes_a_mode_to_and_fro])
@pytest.mark.parametrize("verify", [0, 2])
@pytest.mark.parametrize("api", ["graphed", "graphed_step"])
@pytest.mark.parametrize("engine", ENGINES)
def test_modes_that_a_step_leaves(engine: Engine, api: str, verify: int, change: Callable[[Training], object]) -> None:
    """G10: behind a replay, modules have the mode and parameters the `requires_grad` that an eager step leaves."""

    def run(graph: str) -> list[Any]:
        torch.manual_seed(0)
        training = Training((engine[0], graph), api, change, verify=verify)
        found = []
        for batch in make_batches(engine[0], [4] * 14):
            if change is evaluates:
                training.model.train()
            training.step(*batch)
            found.append(training.state())
        assert training.step.replays >= (6 if graph != "off" else 0)
        return found

    with deterministic():
        eager = run("off")
        with taped() if engine[0] == "cpu" else nullcontext():  # an emulated graph would run the Python code
            assert_same(run(engine[1]), eager)


def steps_a_scheduler(training: Training) -> None:
    training.scheduler.step()  # HERE steps_a_scheduler


def changes_the_rate(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = float(training.optimizer.param_groups[0]["lr"]) * 0.5


@pytest.mark.parametrize("api", ["graphed", "graphed_step"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_scheduler_is_not_stepped_by_a_replay(engine: Engine, api: str) -> None:
    """G10: it is refused, with the line, also where this step of the scheduler has not changed the rate."""
    training = Training(engine, api, steps_a_scheduler)
    with pytest.warns(ampkit.CaptureWarning, match="steps a learning-rate scheduler, which a replay would") as warned:
        training.run(6)
    text = str(warned[0].message)
    assert text.count(line_of(steps_a_scheduler)) == 1, text
    assert (training.step.replays, training.scheduler.last_epoch) == (0, 6)
    refused = Training(engine, api, steps_a_scheduler, on_failure="raise")
    with pytest.raises(ampkit.CaptureError, match=r"graphed_step\(scheduler=...\)"):
        refused.run(6)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rate_that_the_step_changes(engine: Engine) -> None:
    """G10: it is refused by the name of the number."""
    training = Training(engine, "graphed_step", changes_the_rate)
    with pytest.warns(ampkit.CaptureWarning, match=r"the step changes param_groups\[0\]\['lr'\] of its optimizer"):
        training.run(6)
    assert training.step.replays == 0
    assert training.optimizer.param_groups[0]["lr"] == 0.01 * 0.5**6


@pytest.mark.parametrize("api", ["graphed", "graphed_step"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_rate_that_the_step_sets(engine: Engine, api: str) -> None:
    """G10: the same number in each call changes nothing behind the first one, and stays as the step has set it."""
    training = Training(engine, api, lambda self: self.optimizer.param_groups[0].update(lr=2.0**-5))
    for calls in (1, 2):
        training.run(calls)
        assert training.optimizer.param_groups[0]["lr"] == 2.0**-5
    training.run(3)
    assert training.step.replays == 3


class Decaying(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["lr"] = group["lr"] * 0.5


@pytest.mark.parametrize("graph", ["off", "emulate"])
def test_an_optimizer_that_changes_its_own_rate(graph: str) -> None:
    """G10: it trains as in a loop of torch, and no graph holds it."""
    batches, models = make_batches("cpu", [4] * 6), [make_net("cpu", dropout=0.0) for _ in range(2)]
    plain, optimizer = (Decaying(model.parameters(), lr=0.25, fused=True) for model in models)
    step = ampkit.graphed_step(loss_fn, models[1], optimizer, graph=graph, on_failure="eager")
    refused = pytest.warns(ampkit.CaptureWarning, match=r"the step changes param_groups\[0\]\['lr'\] of its optimizer")
    with nullcontext() if graph == "off" else refused:
        for batch in batches:
            plain.zero_grad()
            loss_fn(models[0], *batch).backward()
            plain.step()
            step(*batch)
    assert float(optimizer.param_groups[0]["lr"]) == plain.param_groups[0]["lr"] == 0.25 * 0.5**6
    assert_same(dict(models[1].state_dict()), dict(models[0].state_dict()))
    assert step.replays == 0


@pytest.mark.cuda
def test_a_capture_that_fails_puts_modes_back() -> None:
    """G2: the eager step behind it finds the modules as the caller left them. An emulated capture runs nothing."""
    seen = []

    def change(training: Training) -> None:
        seen.append(training.model.training)
        if len(seen) == 4:
            training.model.eval()
            raise RuntimeError("only in the capture")

    training = Training(("cuda", "auto"), "graphed_step", change, host_writes="ignore")
    with pytest.warns(ampkit.CaptureWarning, match="only in the capture"):
        training.run(6)
    assert seen == [True] * 7
    assert training.model.training
