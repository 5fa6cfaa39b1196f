"""Random training set-ups that ask the device questions. A replay that gets other answers is undone; bits are eager's.

AMPKIT_CUT_SETUPS=400 python -m pytest -q -n 14 tests/step/test_cut_setups.py -m seeds
"""

import os
from typing import Any

import cut_setups
import pytest
import torch
from cut_setups import DOES, OPTIMIZERS, SILENT, TOLERATED, WHEN, draw, judge

from ampkit._capture.state.backup import Backup

COUNT = int(os.environ.get("AMPKIT_CUT_SETUPS", "200"))  # on each device
QUICK = 10
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def cases() -> list[Any]:
    """Return a parameter per set-up. On a GPU, one in five is a test of `-m cuda`, and all are of `-m seeds`."""
    more = [pytest.mark.slow, pytest.mark.seeds]
    on_cpu = [
        pytest.param(seed, "cpu", ("tape", "emulate")[seed % 2], marks=[] if seed < QUICK else more)
        for seed in range(COUNT)
    ]
    on_cuda = [
        pytest.param(seed, "cuda", "auto", marks=[NO_GPU, *more, *([] if seed % 5 else [pytest.mark.cuda])])
        for seed in range(COUNT)
    ]
    return [*on_cpu, *on_cuda]


@pytest.mark.filterwarnings("ignore")  # the warnings of both runs are judged
@pytest.mark.parametrize(("seed", "device", "graph"), cases())
def test_random_setups(seed: int, device: str, graph: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D3: outcome and state behind each call have the bits of eager calls, whatever is asked and wherever the answer
    changes; each call is counted once."""
    if device == "cuda" and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    setup = draw(seed, device)
    verdict = judge(setup, graph)
    cut_setups.count(verdict, f"{device}, {graph}")
    assert verdict.kind in TOLERATED, f"{verdict}\n\nin {setup}"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_question_is_drawn(device: str) -> None:
    """The set-ups leave out no question, no change of answers, no optimizer and no interface."""
    setups = [draw(seed, device) for seed in range(200)]
    asked = [(each, setup.api) for setup in setups for each in setup.questions]
    assert {question.about for question, _ in asked} == {*cut_setups.FORWARD, *cut_setups.BEHIND, cut_setups.SECOND}
    assert {question.when for question, _ in asked} == set(WHEN)
    for where, names in DOES.items():
        found = {each.does for each, api in asked if cut_setups.where_asked(each.about, api) == where}
        assert found == set(names) - ({"generator"} if device == "cpu" else set())
    assert {setup.optimizer for setup in setups} == set(OPTIMIZERS)
    assert {setup.api for setup in setups} == {"step", "graphed", "gan"}


def test_a_replay_that_is_not_undone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what a replay has written in front of its cut stays, the eager call behind it writes it twice."""
    monkeypatch.setattr(Backup, "restore", lambda backup: None)
    asks = cut_setups.Question("activations", "scale", "once", "if")
    setup = draw(0, "cpu")._replace(
        api="step", questions=(asks,), accumulate=1, optimizer="fused sgd", verify=0, sizes=1
    )
    verdict = judge(setup, "tape")
    assert verdict.kind == SILENT
    assert verdict.what.startswith("state[")


@pytest.mark.parametrize("name", ["cpu, tape", "cpu, emulate", pytest.param("cuda, auto", marks=pytest.mark.cuda)])
@pytest.mark.seeds
@pytest.mark.slow
def test_many_are_cut(name: str) -> None:
    """Of the set-ups that were run here, many are captured with cuts, and some of their replays are undone."""
    totals = cut_setups.totals[name]
    if totals["set-ups"] < 20:
        pytest.skip("the set-ups were run elsewhere")
    assert totals[cut_setups.CAPTURED] >= totals["set-ups"] // 4
    assert totals["replays with cuts"] >= totals["calls"] // 5
    assert totals["calls undone"] >= totals["set-ups"] // 2
