"""Scripts of tests/benchmarks that take --tiny: that they run, have the right bits, and print a row for each way."""

import os
import re
import subprocess
import sys
from pathlib import Path

import cifar_speedrun
import pytest
import several_optimizers

ROOT = Path(cifar_speedrun.__file__).parents[2]


def printed_by(script: str) -> str:
    """Return what a script prints on the CPU, where torch.compile leaves everything as it is, as C++ takes minutes."""
    command = [sys.executable, str(ROOT / "tests" / "benchmarks" / script), "--device", "cpu", "--tiny"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TORCHDYNAMO_DISABLE": "1"}
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=240, env=environment).stdout


@pytest.mark.slow
def test_cifar_speedrun() -> None:
    """R10: captured whole, with the bits of eager steps."""
    printed = printed_by("cifar_speedrun.py")
    assert re.search(r"^whole, [1-9]\d* replays, differing: \[\]$", printed, re.MULTILINE)
    for way in cifar_speedrun.WAYS:
        assert re.search(rf"^{re.escape(way.name)} +\d+\.\d{{3}} \(", printed, re.MULTILINE)


@pytest.mark.slow
def test_several_optimizers() -> None:
    """R5: captured whole, with the bits of eager steps."""
    pytest.importorskip("transformers")
    printed = printed_by("several_optimizers.py")
    assert re.search(r"^whole, [1-9]\d* replays, differing: \[\]$", printed, re.MULTILINE)
    for way in ("torch", *several_optimizers.WAYS):
        assert re.search(rf"^{re.escape(way)} +\d+\.\d\d \(", printed, re.MULTILINE)
