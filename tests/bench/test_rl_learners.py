"""tests/benchmarks/rl_learners.py, but for what a GPU does: its rows, in one process and in several."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import rl_algorithms

SCRIPT = Path(rl_algorithms.__file__).with_name("rl_learners.py")
ROOT = SCRIPT.parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--together"], [], ["--together", "--profile"]])
def test_rows(options: list[str]) -> None:
    """Bits are those of a plain loop, each way has a row, and what needs a GPU says so."""
    ways = ["eager", "hand-made graph", "graphed", "graphed, K a call"]
    command = [sys.executable, str(SCRIPT), "--quick", "--algorithms", "PPO", "--ways", *ways, *options]
    environment = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=180, env=environment).stdout
    assert len(re.findall("[1-9][0-9]* launches, 0 of [0-9]+ tensors", printed)) == (0 if "--profile" in options else 2)
    figure = "wall" if "--profile" in options else "updates_per_s"
    assert len(re.findall(rf"^PPO (?:eager|graphed|graphed, K a call) +{figure} [0-9]", printed, re.MULTILINE)) == 3
    assert "PPO hand-made graph" in printed
    assert "NotHereError: a graph made by hand needs a GPU" in printed
