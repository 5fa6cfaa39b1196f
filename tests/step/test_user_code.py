"""Random steps as people write them: what they read, write and look at is eager's in replays, or is named."""

from typing import Any

import pytest
import user_code
from user_code import PIECES, TOLERATED, draw, judge

SEEDS = 400


def cases() -> list[Any]:
    return [
        pytest.param(seed, marks=[pytest.mark.slow, pytest.mark.seeds] if seed >= 24 else []) for seed in range(SEEDS)
    ]


@pytest.mark.filterwarnings("ignore")  # the warnings of both runs are judged
@pytest.mark.parametrize("seed", cases())
@pytest.mark.quick(2)
def test_no_silent_difference(seed: int) -> None:
    """W1 to W3: losses, weights, moments and what a user may look at, behind each call; replays call no Python."""
    setup = draw(seed)
    verdict = judge(setup, "tape", "cpu")
    assert verdict.kind in TOLERATED, f"{verdict}\n\nin {setup}"


def test_every_piece_is_drawn() -> None:
    """The set-ups leave out no piece of code, optimizer or interface, and some are done in windows."""
    setups = [draw(seed) for seed in range(SEEDS)]
    assert {piece for setup in setups for piece in setup.pieces} == set(PIECES)
    assert {setup.optimizer for setup in setups} == set(user_code.OPTIMIZERS)
    assert {setup.api for setup in setups} == {"step", "graphed"}
    assert sum(setup.accumulate > 1 for setup in setups) > 20


def test_a_frozen_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With writes that may stop, a counter in a loss is the silent difference that it is."""
    original = user_code.ampkit.graphed_step
    monkeypatch.setattr(
        user_code.ampkit, "graphed_step", lambda *args, **kwargs: original(*args, **kwargs, host_writes="ignore")
    )
    setup = draw(0)._replace(pieces=("ramp",), api="step", accumulate=1, sizes=1)
    verdict = judge(setup, "tape", "cpu")
    assert verdict.kind == user_code.SILENT
    assert verdict.what.startswith("loss behind call")
