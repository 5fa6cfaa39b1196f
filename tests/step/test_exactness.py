"""Exactness as a property: random training set-ups, graphed and eager, agree bit by bit after every call."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import setups
import torch
from harness import OPTIMIZERS, UNFUSED, assert_same, deterministic
from setups import HandTraining, Setup, StepTraining, draw

import ampkit

SEEDS = {"cpu": range(240), "cuda": range(70)}
# A few seeds that draw every value, of which one is quick. The others are more of the same.
DRAWN = [6, 43, 56, 61, 62, 69, 85, 140, 145, 177, 180, 183, 194, 207, 232]
MARKS = {
    "cpu": {seed: [pytest.mark.slow] * (seed != 43) for seed in DRAWN},
    "cuda": {seed: [pytest.mark.cuda] for seed in SEEDS["cuda"]},
}
GRAPHS = {"cpu": "emulate", "cuda": "auto"}


def cases(by_hand: bool) -> list[Any]:
    """Return a parameter per set-up, all of them or those that are compared with a loop written by hand."""
    more = [pytest.mark.slow, pytest.mark.seeds]
    return [
        pytest.param(setup, id=f"{device}-seed{setup.seed}", marks=MARKS[device].get(setup.seed, more))
        for device, seeds in SEEDS.items()
        for setup in (draw(seed, device) for seed in seeds)
        if setup.by_hand or not by_hand
    ]


@contextmanager
def reported(setup: Setup) -> Iterator[None]:
    """Count a failure, and have its message end with the whole set-up."""
    try:
        with deterministic():
            yield
    except Exception as error:
        setups.totals[setup.device]["differences"] += 1
        raise AssertionError(f"{error}\n\nin {setup}") from error


def trajectory(training: StepTraining) -> list[Any]:
    """Return outputs and state after every word of the script. Only a warning that the set-up explains is none."""
    setup = training.setup
    torch.manual_seed(setup.seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=ampkit.CaptureWarning)  # others are errors, see pyproject.toml
        history = [(training.do(action), training.state()) for action in setup.script]
    assert setup.may_warn or not caught, [str(warning.message) for warning in caught]
    assert all(warning.category is ampkit.CaptureWarning for warning in caught)
    return history


@pytest.mark.parametrize("setup", cases(by_hand=False))
def test_graphed_equals_eager(setup: Setup) -> None:
    """S1, G5: parameters, buffers, moments, scale, counts, rates, random state, outputs: eager's after each call."""
    with reported(setup):
        eager, graphed = StepTraining(setup, "off"), StepTraining(setup, GRAPHS[setup.device])
        start = graphed.state()
        left, right = trajectory(eager), trajectory(graphed)
        for i, action in enumerate(setup.script):
            assert_same(left[i], right[i], f"after {action!r}, number {i} of the script: (outputs, state)")
        report = graphed.step.report()
        assert report.failure is None
        assert report.replays > 0
        assert eager.step.captures == eager.step.replays == 0
        assert eager.step.skipped == graphed.step.skipped == setup.skipped()
        # Neither is a comparison of nan with nan, or of a model that stands still with itself.
        assert all(param.isfinite().all() for param in graphed.model.parameters())
        assert any(not torch.equal(start[name], right[-1][1][name]) for name, _ in graphed.model.named_parameters())
        setups.count(setup, graphed.step.report())
        graphed.step.close()


@pytest.mark.parametrize("setup", cases(by_hand=True))
def test_eager_equals_a_loop_written_with_torch(setup: Setup) -> None:
    """S1: what graphed steps are compared with is what autocast, backward, clip, step, schedule of torch compute.

    Bitwise, but where clipping is folded into the kernel of a fused optimizer: it divides gradients by the reciprocal
    of what torch multiplies them with. These three roundings and those of the norm are a few 2**-24 of a gradient, and
    no gradient is above 1 once clipped: the tolerance is 1e-6 for one step, from the same state each time.
    """
    with reported(setup):
        step, hand = StepTraining(setup, "off"), HandTraining(setup)
        for i, action in enumerate(setup.script):
            random_state = random_states(setup.device)
            out = step.do(action)
            after = random_states(setup.device)
            set_random_states(random_state, setup.device)
            expected = hand.do(action)
            where = f"after {action!r}, number {i} of the script"
            assert_same(random_states(setup.device), after, f"{where}: random state")
            if setup.folds:
                assert_close(step, hand, where)
                assert_close_outputs(out, expected, where)
                hand.load(step)
            else:
                assert_same((expected, hand.state()), (out, step.state()), f"{where}: (outputs, state)")
        setups.totals[setup.device]["set-ups against torch"] += 1


def assert_close(step: StepTraining, hand: HandTraining, where: str) -> None:
    for left, right in ((hand.model, step.model), (hand.averaged, step.averaged)):
        if left is not None and right is not None:
            # Torch keeps the count of an average on the CPU.
            torch.testing.assert_close(
                left.state_dict(), right.state_dict(), rtol=1e-6, atol=1e-6, check_device=False, msg=prefix(where)
            )
    left, right = hand.optimizer.state_dict()["state"], step.optimizer.state_dict()["state"]
    torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6, msg=prefix(where))


def assert_close_outputs(out: dict[str, Any] | None, expected: dict[str, Any] | None, where: str) -> None:
    if out is None or expected is None:
        assert out is expected
        return
    assert_same((out["loss"], out["aux"]), (expected["loss"], expected["aux"]), f"{where}: loss and aux")
    torch.testing.assert_close(out["grad_norm"], expected["grad_norm"], rtol=1e-6, atol=0.0, msg=prefix(where))


def prefix(where: str) -> Any:
    return lambda message: f"{where}: {message}"


def random_states(device: str) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]


def set_random_states(states: list[torch.Tensor], device: str) -> None:
    torch.set_rng_state(states[0])
    if device == "cuda":
        torch.cuda.set_rng_state(states[1])


@pytest.mark.parametrize("seeds", [SEEDS, MARKS], ids=["all", "few"])
@pytest.mark.parametrize("device", SEEDS)
def test_every_value_is_drawn(device: str, seeds: dict[str, Iterable[int]]) -> None:
    """The set-ups leave out no model, optimizer, policy, option or event, alone or against the loop of torch."""
    found = {pair for seed in seeds[device] for pair in setups.axis_values(draw(seed, device))}
    expected = {
        "model": setups.DRAWN,
        "optimizer": (OPTIMIZERS | UNFUSED).keys() - ({"adagrad"} if device == "cuda" else set()),
        "policy": ("float32", "bfloat16", "float16"),
        "max_norm": ("None", "0.05", "1.0", "inf"),
        "accumulate": "1234",
        "scheduler": setups.SCHEDULERS,
        "rate": setups.RATES,
        "groups": "12",
        "tree": setups.TREES,
        "warmup": "123",
        "max_graphs": ("1", "2", "3", "16"),
        "verify": "02",
        "average": ("False", "True"),
        "generator": ("False", "True") if device == "cuda" else ("False",),
        "layouts": "123",
        "events": ("flush", *setups.EVENTS),
    }
    assert found == {(axis, str(value)) for axis, legal in expected.items() for value in legal}
    scripts = [draw(seed, device).script for seed in seeds[device]]
    assert sum(any(action.endswith("!") for action in script) for script in scripts) > len(scripts) / 5
