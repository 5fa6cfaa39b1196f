"""tests/benchmarks/many_gpus.py: its rows with gloo and emulated graphs, and how time of NCCL is counted."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import many_gpus
import pytest

import ampkit


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "ways", [["torch", "graphed", "one-gpu"], ["torch", "graphed-default"]], ids=["captured", "compiled"]
)
def test_rows_on_the_cpu(ways: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each way of each model is timed; captured steps have the bits of eager ones, compiled or not."""
    file = tmp_path / "rows.json"
    options = ["--small", "--device", "cpu", "--models", "llama", "--ways", *ways, "--timeout", "280"]
    assert many_gpus.main([*options, "--json", str(file)]) == 0
    rows = {row["way"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == ways
    if "graphed-default" in ways:
        compiled = rows["graphed-default"]["compiled"][0]
        assert compiled.startswith("compiled: forward and backward of the loss, blocks.0")
    for way, row in rows.items():
        assert 0 < row["fastest"] <= row["ms"] <= row["slowest"]
        assert row["setup_s"] > 0
        assert "error" not in row
        assert way == "torch" or row["replays"] > 0
        assert way in ("torch", "one-gpu") or (row["bitwise"] and row["deterministic"])
    printed = capsys.readouterr().out
    assert ("two ranks less one GPU" in printed) == ("one-gpu" in ways)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_that_is_cut_keeps_its_rows() -> None:
    """SIGTERM behind the first row: it is printed, in the table, too, with what is being measured; the ranks end."""
    options = ["--small", "--device", "cpu", "--models", "gpt2", "--ways", "torch", "graphed", "--timeout", "120"]
    command = [sys.executable, many_gpus.__file__, *options]
    path = os.pathsep.join([str(Path(ampkit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **pipes)
    assert run.stdout is not None
    printed = []
    while not (printed and printed[-1].endswith("measure gpt2 graphed\n")):
        printed.append(run.stdout.readline())
        assert printed[-1], run.communicate()
    run.terminate()
    rest, errors = run.communicate(timeout=60)  # which the ranks do not keep open
    head, torch_begins, torch_row, _ = printed
    assert head.split()[:3] == ["model", "way", "ms"]
    assert torch_begins.endswith("measure gpt2 torch\n")
    assert rest.splitlines()[1:3] == [head.rstrip("\n"), torch_row.rstrip("\n")]
    assert errors.endswith("KeyboardInterrupt: SIGTERM\n")
    assert run.returncode == 1


def test_time_of_nccl() -> None:
    """Kernels of NCCL run for 5 of the unit, of which 1 + 2 are beside no other kernel, on whichever stream."""
    events = [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 2.0, 5.0),
        ("gemm", 0.0, 3.0),
        ("Memcpy DtoD (Device -> Device)", 3.0, 4.0),
        ("ncclKernel_AllGather", 8.0, 10.0),
        ("gemm", 12.0, 13.0),
    ]
    assert many_gpus.nccl_times(events) == (5.0, 3.0)


def test_table_of_rows() -> None:
    """A row with all columns, one that was refused, and what two ranks cost beside one."""
    whole = {"fastest": 9.5, "slowest": 10.5, "setup_s": 3.0, "peak_mib": [100, 120], "bitwise": True}
    rows = [
        {
            "model": "gpt2",
            "way": "graphed",
            "ms": 10.0,
            "nccl_ms": 4.0,
            "exposed_ms": 1.5,
            "bits_of": "the same",
            **whole,
        },
        {"model": "gpt2", "way": "one-gpu", "ms": 8.0, "bits_of": "the same", **whole},
        {"model": "gpt2", "way": "graphed-default", "error": "refused: no"},
    ]
    _, graphed, _, refused, difference = many_gpus.table(rows).splitlines()
    assert graphed.split() == [
        "gpt2",
        "graphed",
        "10.000",
        "(9.500",
        "to",
        "10.500)",
        "120",
        "3.0",
        "4.000",
        "1.500",
        "yes",
    ]
    assert refused.split() == ["gpt2", "graphed-default", "refused:", "no"]
    assert difference.endswith("2.000 ms")
