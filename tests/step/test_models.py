"""Models that nobody here wrote train under graphed_step with eager's bits: torchvision's and those of transformers."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

POLICIES = ["float16", "bfloat16"]


def row_of(name: str, policy: str) -> dict[str, Any]:
    """Run tests/benchmarks/models.py in another process, without timing; return the row of this model and policy."""
    command = [sys.executable, str(Path(models.__file__)), "--json", "-", "--no-speed"]
    command += ["--only", name, "--policies", policy]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert [(row["model"], row["policy"]) for row in found] == [(name, policy)], run.stderr[-3000:]
    return found[0]


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", models.CASES)
def test_eager_bits(name: str, policy: str) -> None:
    """One line captures the model, and its state after 8 steps is eager's: bitwise, or within eager's own noise."""
    row = row_of(name, policy)
    if "missing" in row:
        pytest.skip(f"{row['missing']} is not installed")
    assert row["failure"] is None
    assert row["replays"] == models.CHECKED_STEPS - 3
    assert row["skipped"] < models.CHECKED_STEPS // 2
    assert math.isfinite(row["last_loss"])
    assert row["passed"], f"{row['differing']}: {row['difference']} from eager, eager runs {row['noise']}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.seeds] * (name == "resnet")) for name in models.TINY_CASES]
)
def test_small_models_with_an_emulated_graph(name: str) -> None:
    """The same check on the CPU: models of a few thousand parameters, built by the same classes."""
    case = models.TINY_CASES[name]
    pytest.importorskip(case.package)
    row = models.check(case, case.policy, "cpu", "emulate")
    assert row["failure"] is None
    assert row["bitwise"]
    assert row["deterministic"]
    assert math.isfinite(row["last_loss"])
    assert row["replays"] == models.CHECKED_STEPS - 3


class Puts(nn.Linear):
    """Uses an operation that torch has no deterministic form of, though this use of it is."""

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        self.bias.detach().clone().put_(torch.arange(10, device=flat.device), flat[0, :10])
        return super().forward(flat)


def test_an_operation_without_a_deterministic_form() -> None:
    """A kernel that is an error in strict mode is run all the same, and the row says that it was."""
    row = models.check(
        models.Case("torch", lambda: Puts(12, 10), (4, 3, 2, 2), 10, "float32"), "float32", "cpu", "emulate"
    )
    assert not row["deterministic"]
    assert row["bitwise"]


@pytest.mark.slow
def test_training_changes_the_model() -> None:
    """What is compared is not what the model started with, and the optimizer's state and the losses are part of it."""
    pytest.importorskip("torchvision")
    case = models.TINY_CASES["resnet"]
    start = case.model("cpu")
    state, _ = models.train(case, start, "float32", "cpu", "off")
    before = {name: tensor for name, tensor in state.items() if name in start.state_dict()}
    assert set(models.differing(before, dict(start.state_dict()))) == before.keys()
    assert {"losses", "exp_avg of parameter 0", "bn1.running_mean"} < state.keys()
    assert len(set(state["losses"].tolist())) == models.CHECKED_STEPS


def states(*values: float) -> list[models.State]:
    return [{"weight": torch.tensor([2.0, value])} for value in values]


@pytest.mark.parametrize(
    ("graphed", "eager", "passed"),
    [
        (1.0, [1.0], True),
        (1.5, [1.0, 1.0, 1.0], False),
        (1.5, [1.0, 1.0, 1.25], True),
        (1.5, [1.0, 1.0, 1.125], False),
        (math.nan, [1.0, 1.5, 1.25], False),
        (math.nan, [1.0, math.nan, 1.25], False),
        (0.0, [-0.0, -0.0], False),
    ],
    ids=["bitwise", "eager has no noise", "within noise", "beyond noise", "nan", "nan in eager too", "sign of zero"],
)
def test_judge(graphed: float, eager: list[float], passed: bool) -> None:
    """A difference passes only where eager runs differ from each other, and up to NOISE_FACTOR times as much."""
    verdict = models.judge(states(graphed)[0], states(*eager))
    assert verdict.passed is passed
    assert verdict.bitwise is (graphed == 1.0)


def test_a_tensor_that_is_missing_differs() -> None:
    """State that only one of the runs has is a difference, and never noise."""
    left, right = states(1.0, 1.0)
    right["momentum"] = torch.zeros(1)
    assert models.differing(left, right) == ["momentum"]
    assert not models.judge(left, [right, right]).passed
