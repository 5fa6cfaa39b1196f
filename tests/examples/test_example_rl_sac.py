"""What examples/rl_sac.py promises: graphs change no bit, rounds are two launches, and the fill level is no number."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from harness import ENGINES, deterministic

import ampkit

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return the script as a module, with small batches."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("rl_sac")
    with mock.patch.multiple(module, BATCH=8, UPDATES=3):
        yield module


@pytest.mark.parametrize("engine", ENGINES)
def test_bits(example: ModuleType, engine: tuple[str, str]) -> None:
    """Rewards are those of eager calls; from the warm-up on every round is a replay and a launch."""
    device, graph = engine
    options = ["--rounds", "10", "--pendulums", "4", "--device", device]
    reports = []
    with deterministic(), mock.patch.object(ampkit.GraphedFunction, "report", _noting(reports)):
        eager = example.main([*options, "--graph", "off"])
        assert example.main([*options, "--graph", graph]) == eager
    assert len(eager) == 10
    assert all(report.failure is None for report in reports)
    # Of 10 scans of 3 updates two are made call by call: 4 warm-up calls, a capture and a replay.
    assert (reports[1].eager, reports[1].replays, reports[1].launches) == ({"warm-up": 4}, 2, 8)


def _noting(reports: list[ampkit.Report]) -> object:
    report = ampkit.GraphedFunction.report

    def noted(function: ampkit.GraphedFunction) -> ampkit.Report:
        reports.append(report(function))
        return reports[-1]

    return noted


def test_the_buffer_overwrites_the_oldest(example: ModuleType) -> None:
    buffer = example.ReplayBuffer(5, 1)
    for first in (0, 3, 6):
        buffer.add(torch.arange(first, first + 3.0)[:, None])
        assert buffer.filled == min(first + 3, 5)
        assert (buffer.draw(100) < buffer.filled).all()
    assert buffer.rows.flatten().tolist() == [5, 6, 7, 8, 4]
