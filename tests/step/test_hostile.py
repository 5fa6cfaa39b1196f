"""Exactness under hostile use: set-ups are equal to a loop without ampkit, or refused or eager with a message."""

import os
import warnings
from typing import Any

import hostile
import pytest
from hostile import BITWISE, EAGER, HAZARDS, SETTINGS, SILENT, TOLERATED, Graphed, Setup, Verdict, draw, judge
from torch import Tensor

import ampkit

GRAPHS = {"cpu": "tape", "cuda": "auto"}
SEEDS = {"cpu": range(64), "cuda": range(200)}
# Hazards, and settings, that are not drawn on a device. A tape is not compared with an eager call, which is what finds
# state of the host; and float16 in inference mode has other bits on it than in an eager call on the CPU.
LEFT_OUT: dict[str, tuple[str, ...]] = {"cpu": ("modes", "host", "optimizer"), "cuda": ()}


def cases() -> list[Any]:
    """Return a parameter per set-up, without what is left out."""
    further = {"cpu": [pytest.mark.seeds], "cuda": []}  # on the second half
    marks = {"cpu": [], "cuda": [pytest.mark.cuda, pytest.mark.slow]}
    return [
        pytest.param(
            setup,
            id=f"{device}-seed{setup.seed}",
            marks=[*marks[device], *(further[device] if setup.seed >= len(seeds) // 2 else [])],
        )
        for device, seeds in SEEDS.items()
        for setup in (draw(seed, device) for seed in seeds)
        if not {setup.hazard, *setup.settings}.intersection(LEFT_OUT[device])
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of its own settings
@pytest.mark.parametrize("setup", cases())
@pytest.mark.sampled(4)
def test_no_silent_difference(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """R6, R7, S1: outputs, parameters, moments, scale and random state after every call are those of torch alone."""
    if setup.device == "cuda" and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    verdict = hostile.verdicts[setup] = judge(setup, GRAPHS[setup.device])
    assert verdict.kind in TOLERATED, f"{verdict}\n\nin {setup}"


@pytest.mark.parametrize("device", SEEDS)
def test_every_hazard_is_drawn(device: str) -> None:
    """The set-ups leave out no hazard, setting, source or use of a number of the host, optimizer or interface."""
    setups = [draw(seed, device) for seed in range(200)]
    assert {setup.hazard for setup in setups} == set(HAZARDS) - ({"streams"} if device == "cpu" else set())
    assert {name for setup in setups for name in setup.settings} == set(SETTINGS)
    hosts = set(hostile.HOSTS) - (set() if device == "cuda" else set(hostile.UNREPEATABLE))
    assert {setup.host for setup in setups} == {"", *hosts}
    assert {setup.use for setup in setups} == {"", *hostile.USES}
    only_on_cuda = set(hostile.ON_CUDA) if device == "cpu" else set()
    assert {setup.optimizer for setup in setups} == set(hostile.OPTIMIZERS) - only_on_cuda
    assert {setup.undeclared for setup in setups} == {"", *hostile.UNDECLARED}
    assert {setup.api for setup in setups} == {"step", "train", "read"}
    assert sum(setup.overflows for setup in setups) > 10


# ------------------------------------------------------------------------------------------------ what the harness sees


class Frozen(Graphed):
    """A graph that has frozen the number that the host returned in the last warm-up call."""

    warns = ""

    def on_host(self, logits: Tensor) -> Tensor:
        if self.captured.replays < 1 or not self.setup.host:
            self.number = hostile.HOSTS[self.setup.host or "counter"](self.host)
        elif self.warns:
            warnings.warn(self.warns, ampkit.CaptureWarning, stacklevel=2)
        return hostile.USES[self.setup.use or "scalar"](logits, self.number)


def of_host(api: str = "step") -> Setup:
    """Return a set-up in which a counter is used as a number."""
    setups = (draw(seed, "cpu", ["host"]) for seed in range(1000))
    return next(setup for setup in setups if (setup.api, setup.host, setup.use) == (api, "counter", "scalar"))


@pytest.mark.slow
@pytest.mark.parametrize("api", ["step", *(pytest.param(api, marks=pytest.mark.seeds) for api in ("train", "read"))])
@pytest.mark.seeds
def test_a_frozen_number_is_a_silent_difference(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness tells a graph that computes with an old number from one that does not, and names the first output."""
    setup = of_host(api)
    monkeypatch.setattr(hostile.Graphed, "host_writes", "ignore")  # a counter would be named
    assert judge(setup, "emulate").kind == BITWISE
    monkeypatch.setattr(hostile, "Graphed", Frozen)
    verdict = judge(setup, "emulate")
    assert verdict.kind == SILENT
    assert verdict.word == f"{setup.warmup}: call"
    assert verdict.what == "output 0"
    monkeypatch.setattr(Frozen, "warns", "a number of the host is frozen")
    verdict = judge(setup, "emulate")
    assert verdict.kind == EAGER
    assert "a number of the host is frozen" in verdict.what


def test_the_summary_is_one_line_and_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts, and names seed, hazard and tensor of each silent difference."""
    setup = of_host()
    found = {setup: Verdict(SILENT, "4: call", "output 0", 3), draw(1, "cpu", ["modes"]): Verdict(BITWISE, "", "", 9)}
    monkeypatch.setattr(hostile, "verdicts", found)
    lines = list(hostile.summary())
    assert lines[0] == "2 set-ups: 1 captured and bitwise, 0 eager with a message, 1 silent differences"
    said = f"  seed {setup.seed}: silent: host / counter as scalar / step / {setup.policy}: output 0 after 4: call"
    assert lines[-1] == said
