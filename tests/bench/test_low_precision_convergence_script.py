"""tests/benchmarks/low_precision_convergence.py: its ways with emulated graphs and torchao's emulation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import many_gpus
import pytest

pytest.importorskip("torchao.float8", reason="needs torchao: pip install 'ampkit[float8]'")

ROOT = Path(many_gpus.__file__).parents[2]


@pytest.mark.slow
def test_ways(tmp_path: Path) -> None:
    """A cut training has its losses so far, and what has ended is not trained again."""
    pytest.importorskip("matplotlib")
    ways = ["float32", "float8-tensorwise"]
    folder, found, plot = tmp_path / "losses", tmp_path / "found.json", tmp_path / "found.svg"
    command = [sys.executable, str(ROOT / "tests/benchmarks/low_precision_convergence.py"), "--small", "--steps", "20"]
    command += ["--seeds", "0", "1", "--only", *ways, "--folder", str(folder), "--json", str(found)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}

    def rows(*options: str, ends: bool = True) -> dict[str, dict[str, object]]:
        done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=240)
        assert (done.returncode == 0) is ends, done.stdout + done.stderr
        return {row["way"]: row for row in json.loads(found.read_text())["rows"]}

    first = rows("--plot", str(plot))
    assert [first[way]["float8 layers"] for way in ways] == [0, 10]
    assert all(len(first[way][kind]) == 2 for way in ways for kind in ("training", "held-out"))
    assert first["float32"]["held-out from float32"] == 0 != first["float8-tensorwise"]["held-out from float32"]
    assert "<svg" in plot.read_text()
    files = {file: file.read_text() for file in folder.glob("*.jsonl")}
    assert len(files) == 4
    assert all('"losses": [' in text for text in files.values())
    assert rows() == first
    assert {file: file.read_text() for file in files} == files  # trained once
    cut = folder / "float8-tensorwise-1.jsonl"
    cut.write_text(files[cut].rpartition('{"held_out"')[0] + '{"held_')
    left = rows("--seconds", "0", ends=False)["float8-tensorwise"]["training"]
    assert left == first["float8-tensorwise"]["training"][:1]
