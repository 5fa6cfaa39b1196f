"""tests/benchmarks/float8_layers.py: its rows with emulated graphs and torchao's emulation."""

import re

import float8_layers
import pytest

pytest.importorskip("torchao.float8", reason="needs torchao: pip install 'ampkit[float8]'")


@pytest.mark.slow
def test_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """Each way to train is measured, and torchao has as many layers in float8 as ampkit considers."""
    argv = ["--small", "--device", "cpu", "--repeats", "1", "--steps", "2"]
    assert float8_layers.main(argv) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    found = [re.search(r"(\w+) +[\d.]+ ms .* (\d+) layers in float8, .* ([1-9]\d*) replays", row) for row in rows]
    assert [match.groups()[:2] for match in found if match] == [
        ("bfloat16", "0"),
        ("torchao", "1"),
        ("ampkit", "1"),
        ("bfloat16", "0"),
        ("torchao", "9"),
        ("ampkit", "9"),
    ]
    assert float8_layers.main([*argv, "--rows", "llama-4096"]) == 0
    assert not capsys.readouterr().out
