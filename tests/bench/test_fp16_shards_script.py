"""tests/benchmarks/fp16_shards.py: its rows with gloo and emulated graphs."""

import re
import subprocess
import sys
from pathlib import Path

import many_gpus
import pytest

SCRIPT = Path(many_gpus.__file__).with_name("fp16_shards.py")


@pytest.mark.slow
@pytest.mark.ranks
def test_rows_on_the_cpu() -> None:
    """Both loops train in both dtypes; each rate lies between the least and the most."""
    command = [sys.executable, str(SCRIPT), "--small", "--device", "cpu", "--repeats", "2"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=180).stdout
    rows = re.findall(r"^(\w+) +(\w+) +(\d+) +\((\d+) to (\d+)\) tokens/s$", printed, re.MULTILINE)
    names = [(loop, dtype) for loop in ("graphed", "torch") for dtype in ("bfloat16", "float16")]
    assert [tuple(row[:2]) for row in rows] == names
    assert all(0 < int(least) <= int(rate) <= int(most) for _, _, rate, least, most in rows)
    assert len(re.findall(r"float16 / bfloat16: \d", printed)) == 2
