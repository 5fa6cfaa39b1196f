"""python -m ampkit trace: a file for Perfetto and a table, from the function that `doctor` and `bench` take."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ampkit.__main__ import main

MODULE = """
import torch
from torch import nn


def loss_fn(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def training(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    batches = [(torch.ones(4, 8), torch.zeros(4, dtype=torch.long))] * 4
    return loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), batches, options


def accumulated():
    return training(accumulate=2, policy="bfloat16", max_norm=1.0)


def reads():
    def loss(model, x, y):
        out = loss_fn(model, x, y)
        out.item()
        return out

    return loss, *training()[1:]


def raises():
    raise KeyError("of the user")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module `mine_traced`, the current one."""
    (tmp_path / "mine_traced.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


def test_it_writes_a_trace_and_prints_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two optimizer steps of two micro-batches are four replays."""
    code = main(["trace", "mine_traced:accumulated", "-o", "step.json", "--json", "table.json"])
    text = capsys.readouterr().out
    assert code == 0, text
    assert text.startswith("4 replays: ")
    assert "100.0% of the time has a name" in text
    assert text.splitlines()[1].split() == ["phase", "module", "kernels", "us", "share"]
    *_, emulated, written = text.splitlines()
    assert emulated.startswith("emulated: operations of the CPU stand in for kernels, and their times say nothing of a")
    assert "step.json" in written
    events = json.loads((folder / "step.json").read_text())["traceEvents"]
    assert {"forward", "backward", "optimizer", "0", "2"} <= {e["name"] for e in events if e.get("cat") == "ampkit"}
    table = json.loads((folder / "table.json").read_text())
    assert (table["replays"], table["named_share"], table["unmatched"]) == (4, 1.0, 0)
    assert {row["module"] for row in table["modules"]} >= {"0", "1", "2", ""}


def test_depth_shows_paths_in_full(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One replay is profiled if one is asked for, of the file that is named, under the policy that is asked for."""
    more = ["--policy", "bfloat16", "--replays", "1", "--depth", "3"]
    assert main(["trace", "mine_traced.py:training", "-o", "step.json.gz", *more]) == 0
    assert capsys.readouterr().out.startswith("1 replay: ")
    with gzip.open(folder / "step.json.gz", "rt") as file:
        assert "aten::_to_copy" in file.read()  # the casts of autocast
    assert (folder / "step.json.gz").read_bytes()[:2] == b"\x1f\x8b"


@pytest.mark.parametrize(
    ("call", "args", "code", "text"),
    [
        ("mine_traced:training", [], 2, "-o/--output"),
        ("mine_traced:training", ["-o", "missing/step.json"], 2, "there is no folder 'missing'"),
        ("mine_traced:training", ["-o", "step.json", "--replays", "0"], 2, "expected a number above 0"),
        ("mine_traced:reads", ["-o", "step.json"], 2, "out.item()"),
        ("mine_traced:raises", ["-o", "step.json"], 3, "KeyError"),
        ("mine_traced:loss_fn", ["-o", "step.json"], 2, "It must return"),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], call: str, args: list[str], code: int, text: str
) -> None:
    """Exit codes are those of the other commands, and nothing is written."""
    found: Any = main(["trace", call, *args])
    message = capsys.readouterr().err
    assert (found, text in message) == (code, True), message
    assert not (folder / "step.json").exists()
