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
ROOT = SCRIPT.parents[2]


@pytest.mark.slow
def test_rows_on_the_cpu() -> None:
    """Bytes per parameter are those of the tensors, and as forecast; graphs have the bits of eager."""
    has_torchao = importlib.util.find_spec("torchao") is not None
    forms = [name for name, form in optimizer_states.FORMS.items() if has_torchao or not form.torchao]
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--json", "--forms", *forms]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=180, env=environment)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    of_torchao = [8, 11, 6, 10, 11] if has_torchao else []  # biases have states of 32 bits
    assert [int(row["measured B/param"]) for row in rows] == [16, 12, 8, 10, *of_torchao]
    assert all(row["forecast B/param"] == row["measured B/param"] for row in rows)
    assert {row["foreach bits"] for row in rows} == {"same"}
