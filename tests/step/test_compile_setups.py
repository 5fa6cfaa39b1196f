r"""Random training set-ups with `compile`: each graphed, and by the same compiled step without a graph.

TORCHINDUCTOR_COMPILE_THREADS=1 AMPKIT_COMPILE_SETUPS=24,4 \
    python -m pytest -q -n 12 tests/step/test_compile_setups.py -m cuda
"""

import os
import warnings
from dataclasses import replace
from typing import Any

import compile_setups
import pytest
import setups
import torch
from harness import assert_same, deterministic, leave_out_inductor

import ampkit

# On a GPU, how many with "default" and how many with "max". Each takes up to half a minute to compile.
ON_CUDA = [int(number) for number in os.environ.get("AMPKIT_COMPILE_SETUPS", "6,1").split(",")]
CASES = [
    *[("cpu", "default", "aot_eager", seed) for seed in range(6)],
    *[("cpu", "default", "inductor", seed) for seed in (100, 101)],
    *[("cuda", "default", "inductor", seed) for seed in range(ON_CUDA[0])],
    *[("cuda", "max", "inductor", 1000 + seed) for seed in range(ON_CUDA[1])],
]
MARKS = {1: []}  # of seeds on a CPU, where Inductor takes a minute
SETUPS = [
    pytest.param(
        *case,
        id=f"{case[0]}-{case[1]}-{case[2]}-seed{case[3]}",
        marks=pytest.mark.cuda if case[0] == "cuda" else MARKS.get(case[3], [pytest.mark.slow, pytest.mark.seeds]),
    )
    for case in CASES
]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class CompiledTraining(setups.StepTraining):
    """Trained by a compiled step."""

    def history(self) -> list[Any]:
        """Return outputs and state behind each word of the script."""
        torch.manual_seed(self.setup.seed)
        return [(self.do(action), self.state()) for action in self.setup.script]


@pytest.mark.parametrize(("device", "compile", "backend", "seed"), SETUPS)
@pytest.mark.slow
def test_random_setups(device: str, compile: str, backend: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """R11: outputs, parameters, moments, average, loss scale and schedule, behind each call, bit by bit."""
    if backend == "aot_eager":
        leave_out_inductor(monkeypatch)
    setup = compile_setups.draw_compiled(seed, device)
    try:
        with deterministic(), warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", category=ampkit.AmpkitWarning)  # others are errors
            expected = CompiledTraining(replace(setup, verify=0), "off", compile=compile).history()
            training = CompiledTraining(setup, {"cpu": "emulate", "cuda": "auto"}[device], compile=compile)
            torch.manual_seed(setup.seed)
            for i, action in enumerate(setup.script):
                found = training.do(action), training.state()
                assert_same(found, expected[i], f"after {action}, number {i}: (outputs, state)")
        unexpected = [str(w.message) for w in caught if not issubclass(w.category, ampkit.CaptureWarning)]
        assert setup.may_warn or not caught, [str(warning.message) for warning in caught]
        assert not unexpected
        report = training.step.report()
        assert report.failure is None
        assert report.replays > 0
        assert not any("not compiled: forward" in line for line in report.compiled)
        assert any("compiled: forward and backward" in line for line in report.compiled)
        compile_setups.count(setup, compile, training.step)
        training.step.close()
    except Exception as error:
        compile_setups.totals[f"{device}, {compile}"]["differences"] += 1
        raise AssertionError(f"{error}\n\nin {setup}") from error
