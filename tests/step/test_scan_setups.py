"""Random training set-ups, by scans of random lengths, or by windows, and by eager single calls.

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
ON_CUDA = range(int(os.environ.get("AMPKIT_SCAN_SETUPS", "40")))
SEEDS = {"cpu": range(60), "cuda": ON_CUDA}
WINDOW_SEEDS = {"cpu": range(1000, 1052), "cuda": [1000 + seed for seed in ON_CUDA]}
# The seeds that are not slow.
QUICK = {"cpu": [*range(5), *range(1000, 1005)], "cuda": [*range(40), *range(1000, 1016)]}


def history_of_singles(setup: setups.Setup, pieces: Sequence[scan_setups.Piece]) -> list[Any]:
    """Return outputs and state behind each piece, of eager single calls."""
    training = scan_setups.ScanTraining(replace(setup, verify=0), "off")
    torch.manual_seed(setup.seed)
    history = []
    for piece in pieces:
        outs: Any = [out for out in map(training.do, piece.actions) if out is not None]
        if piece.how == "scan":
            outs = scan_setups.of_singles(outs)
        elif piece.how == "window":
            outs = scan_setups.of_window(outs, short="flush" in piece.actions)
        history.append((outs, training.state()))
    return history


def outputs_of(training: scan_setups.ScanTraining, piece: scan_setups.Piece) -> Any:
    """Do a piece; return its outputs, without those of a flush."""
    if piece.how == "alone":
        return [out for out in map(training.do, piece.actions) if out is not None]
    out = training.together(piece)
    return {key: out[key] for key in ("loss", "aux")} if "flush" in piece.actions else out


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("seed", "device"), setups.seed_params(SEEDS, QUICK))
@pytest.mark.quick(2)
@pytest.mark.slow
def test_random_setups(seed: int, device: str) -> None:
    """R11: scans of random lengths, between and within windows, leave the bits of eager single calls after each."""
    check(*scan_setups.draw_scans(seed, device))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("seed", "device"), setups.seed_params(WINDOW_SEEDS, QUICK))
@pytest.mark.quick(2)
@pytest.mark.slow
def test_random_windows(seed: int, device: str) -> None:
    """R12: optimizer steps given as windows, short ones too, leave the bits of eager single calls after each."""
    check(*scan_setups.draw_scans(seed, device, windows=True))


def check(setup: setups.Setup, pieces: Sequence[scan_setups.Piece]) -> None:
    device = setup.device
    try:
        with deterministic():
            expected = history_of_singles(setup, pieces)
            training = scan_setups.ScanTraining(setup, {"cpu": "emulate", "cuda": "auto"}[device])
            torch.manual_seed(setup.seed)
            with warnings.catch_warnings(record=True) as caught:
                warnings.filterwarnings("always", category=ampkit.CaptureWarning)  # others are errors
                for i, piece in enumerate(pieces):
                    out = outputs_of(training, piece)
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
    """Most set-ups have scans that are long enough for launches of several steps, or windows enough."""
    long = 0
    for seed in QUICK[device]:
        setup, pieces = scan_setups.draw_scans(seed, device, windows=seed >= 1000)
        if seed >= 1000:
            whole = [piece for piece in pieces if piece.how == "window" and len(piece.calls) == setup.accumulate]
            long += len(whole) >= setup.warmup + 3
        else:
            long += any(piece.how == "scan" and len(piece.calls) >= 2 * setup.accumulate for piece in pieces[-8:])
    assert long >= 0.9 * len(QUICK[device])
