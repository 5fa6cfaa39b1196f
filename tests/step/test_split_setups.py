"""Random training set-ups with a line that cannot be captured, in parts and eagerly.

AMPKIT_SPLIT_SETUPS=100 python -m pytest -q -n 14 tests/step/test_split_setups.py -m cuda
"""

import os
import random
import warnings

import pytest
import setups
import split_setups
import torch
from harness import assert_same, deterministic

import ampkit

# 24 on a CPU and 40 on a GPU, unless another number is asked for.
COUNT = os.environ.get("AMPKIT_SPLIT_SETUPS")
SEEDS = {device: range(int(COUNT or usual)) for device, usual in (("cpu", 24), ("cuda", 40))}
QUICK = {"cpu": range(2), "cuda": range(40)}  # the seeds that are not slow


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize(("seed", "device"), setups.seed_params(SEEDS, QUICK))
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_random_setups(seed: int, device: str) -> None:
    """R3, R4: outputs and state behind each call have the bits of eager calls; each call is counted once."""
    setup = split_setups.draw_split(seed, device)
    try:
        with deterministic(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ampkit.CaptureWarning)
            history = []
            for graph in ("off", {"cpu": "emulate", "cuda": "auto"}[device]):
                training = split_setups.SplitTraining(setup, graph)
                torch.manual_seed(setup.seed)
                random.seed(setup.seed)
                for i, action in enumerate(setup.script):
                    out = training.do(action), training.state(), random.getstate()
                    if graph == "off":
                        history.append(out)
                    else:
                        assert_same(out, history[i], f"after {action}, number {i}: (outputs, state)")
            report = training.step.report()
            calls = report.replays + report.in_parts + sum(report.eager.values())
            flushed = report.eager.get("flush of a short window", 0)
            assert calls - flushed == sum(map(split_setups.setups.is_call, setup.script))
            split_setups.count(device, report)
            training.step.close()
    except Exception as error:
        split_setups.totals[device]["differences"] += 1
        raise AssertionError(f"{error}\n\nin {setup}\n{training.model}\n{vars(training.model)}") from error


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_most_are_done_in_parts(device: str) -> None:
    """Of the set-ups that were run here, some have calls in parts."""
    totals = split_setups.totals[device]
    if totals["set-ups"] < 8:
        pytest.skip("the set-ups were run elsewhere")
    assert totals["set-ups in parts"] >= totals["set-ups"] // 4
