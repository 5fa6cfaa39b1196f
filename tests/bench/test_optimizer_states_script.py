"""tests/benchmarks/optimizer_states.py: its rows on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import many_gpus
import pytest

SCRIPT = Path(many_gpus.__file__).with_name("optimizer_states.py")


@pytest.mark.slow
def test_rows_on_the_cpu() -> None:
    """Bytes per parameter are those of the tensors, and as forecast; graphs have the bits of eager."""
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--json"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=180).stdout
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [int(row["measured B/param"]) for row in rows] == [16, 12, 8, 10]
    assert all(row["forecast B/param"] == row["measured B/param"] for row in rows)
    assert [row["foreach bits"] for row in rows] == ["same"] * 4
