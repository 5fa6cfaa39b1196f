"""tests/benchmarks/optimizer_states.py: its rows on the CPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import many_gpus
import optimizer_states
import pytest

SCRIPT = Path(many_gpus.__file__).with_name("optimizer_states.py")


@pytest.mark.slow
def test_rows_on_the_cpu() -> None:
    """Bytes per parameter are those of the tensors, and as forecast; graphs have the bits of eager."""
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--json"]
    if importlib.util.find_spec("torchao"):
        command += ["--forms", *optimizer_states.FORMS]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=180, env=environment)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    of_torchao = [8, 11, 6, 10, 11] if importlib.util.find_spec("torchao") else []  # biases have states of 32 bits
    assert [int(row["measured B/param"]) for row in rows] == [16, 12, 8, 10, *of_torchao]
    assert all(row["forecast B/param"] == row["measured B/param"] for row in rows)
    assert {row["foreach bits"] for row in rows} == {"same"}
