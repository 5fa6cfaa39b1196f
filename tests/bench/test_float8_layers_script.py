"""tests/benchmarks/float8_layers.py: its rows with emulated graphs and torchao's emulation."""

import os
import re
import sys

import float8_layers
import pytest

pytest.importorskip("torchao.float8", reason="needs torchao: pip install 'ampkit[float8]'")


@pytest.mark.slow
def test_rows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to train is measured, and torchao has as many layers in float8 as ampkit considers."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    argv = ["--small", "--device", "cpu", "--repeats", "2", "--turn", "0"]
    assert float8_layers.main(argv) == 0
    out = capsys.readouterr().out
    found = re.findall(r"(\w+) +[\d.]+ ms .* (\d+) layers in float8 .* [1-9]\d* replays", out)
    assert found == [
        ("bfloat16", "0"),
        ("torchao", "1"),
        ("ampkit", "1"),
        ("bfloat16", "0"),
        ("torchao", "9"),
        ("ampkit", "9"),
    ]
    assert len(re.findall(r"at least 0.99x bfloat16: (?:yes|NO), at least 0.99x torchao: (?:yes|NO)", out)) == 2
    assert float8_layers.main([*argv, "--rows", "layer", "--seconds", "0"]) == 0
    out = capsys.readouterr().out
    assert out.count("its process ended with -9") == 3
    assert "at least 0.99x bfloat16: not measured" in out


def test_waves() -> None:
    """What is set up at once fits the memory and the number of processes."""
    cases = float8_layers.CASES
    found = float8_layers.waves(cases, 139.0, 99)
    assert sorted(case.name for wave in found for case in wave) == sorted(case.name for case in cases)
    assert all(sum(3 * (case.gib + float8_layers.CONTEXT) for case in wave) <= 139 for wave in found)
    assert len(found) == 3
    assert {len(wave) for wave in float8_layers.waves(cases, 139.0, 6)} <= {1, 2}
