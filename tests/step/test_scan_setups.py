"""Random training set-ups, by scans of random lengths and by eager single calls.

AMPKIT_SCAN_SETUPS=200 python -m pytest -q -n 14 tests/step/test_scan_setups.py -m cuda
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import scan_setups
import setups
import torch
from harness import assert_same, deterministic

import ampkit

# Two or three seconds each on a GPU: 40 there, unless more are asked for.
SEEDS = {"cpu": range(60), "cuda": range(int(os.environ.get("AMPKIT_SCAN_SETUPS", "40")))}
QUICK = {"cpu": range(24), "cuda": range(40)}  # the seeds that are not slow
SETUPS = [
    pytest.param(
        seed,
        device,
        id=f"{device}-seed{seed}",
        marks=[
            *([pytest.mark.cuda] if device == "cuda" else []),
            *([] if seed in QUICK[device] else [pytest.mark.slow]),
        ],
    )
    for device, seeds in SEEDS.items()
    for seed in seeds
]


def history_of_singles(setup: setups.Setup, pieces: Sequence[scan_setups.Piece]) -> list[Any]:
    """Return outputs and state behind each piece, of eager single calls."""
    training = scan_setups.ScanTraining(replace(setup, verify=0), "off")
    torch.manual_seed(setup.seed)
    history = []
    for piece in pieces:
        outs = [training.do(action) for action in piece.actions]
        history.append((scan_setups.of_singles(outs) if piece.scans else outs, training.state()))
    return history


@pytest.mark.parametrize(("seed", "device"), SETUPS)
def test_random_setups(seed: int, device: str) -> None:
    """R11: scans of random lengths, between and within windows, leave the bits of eager single calls after each."""
    setup, pieces = scan_setups.draw_scans(seed, device)
    try:
        with deterministic():
            expected = history_of_singles(setup, pieces)
            training = scan_setups.ScanTraining(setup, {"cpu": "emulate", "cuda": "auto"}[device])
            torch.manual_seed(setup.seed)
            with warnings.catch_warnings(record=True) as caught:
                warnings.filterwarnings("always", category=ampkit.CaptureWarning)  # others are errors
                for i, piece in enumerate(pieces):
                    out: Any = training.scan(piece.actions) if piece.scans else [*map(training.do, piece.actions)]
                    assert_same((out, training.state()), expected[i], f"after {piece}, number {i}: (outputs, state)")
            assert setup.may_warn or not caught, [str(warning.message) for warning in caught]
            report = training.step.report()
            assert report.failure is None
            assert report.skipped >= setup.skipped()  # in long scripts the scale grows until a gradient overflows
            assert all(param.isfinite().all() for param in training.model.parameters())
            scan_setups.count(setup, pieces, training.step)
            training.step.close()
    except Exception as error:
        scan_setups.totals[device]["differences"] += 1
        raise AssertionError(f"{error}\n\nin {setup}\n{pieces}") from error


@pytest.mark.parametrize("device", SEEDS)
def test_random_setups_launch(device: str) -> None:
    """Most set-ups have scans that are long enough for launches of several steps."""
    long = 0
    for seed in QUICK[device]:
        setup, pieces = scan_setups.draw_scans(seed, device)
        long += any(piece.scans and len(piece.actions) >= 2 * setup.accumulate for piece in pieces[-8:])
    assert long >= 0.9 * len(QUICK[device])
