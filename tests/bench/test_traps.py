"""tests/benchmarks/traps.py without a GPU: ampkit, and a graph by hand, over tapes that freeze what CUDA does."""

import json
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import traps
from tape import TapedGraph, taped

PAGE = Path(__file__).parents[2] / "docs" / "traps.md"
FROZEN = {"accumulation", "rate", "rewritten", "counter", "seed"}  # by a graph that follows torch's notes


@pytest.fixture(autouse=True)
def nondeterministic_afterwards() -> Any:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", traps.SITUATIONS)
def test_ampkit_is_right(name: str) -> None:
    """Whole but for two: a counter, which no graph can hold, and a seed that the model sets."""
    window = traps.SITUATIONS[name][1].window  # a tape would compute with stacks that nobody has filled
    with nullcontext() if window else taped():
        cell = traps.measure(name, "ampkit", "cpu")
    assert cell["exact"], cell
    assert (cell["said"] == "whole") is (name not in {"counter", "seed"}), cell


def tape(work: Callable[[], Any]) -> Callable[[], Any]:
    graph = TapedGraph()
    graph.capture(work, None, lambda outputs: outputs)
    return graph.replay


@pytest.mark.parametrize("name", traps.SITUATIONS)
def test_a_graph_by_hand(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is right where nothing is frozen; so the situations find what they are about, and nothing else."""
    monkeypatch.setattr(traps, "on_a_side_stream", lambda work: work())
    monkeypatch.setattr(traps, "record", tape)
    cell = traps.measure(name, "by_hand", "cpu")
    if name == "shapes":
        assert cell["error"] == "RuntimeError"
    elif name in FROZEN:
        assert cell["distance"] > traps.CLOSE, cell
        assert traps.cell_text(cell).startswith("**wrong** by ")
    else:
        assert cell["exact"], cell


def test_what_a_cell_says() -> None:
    base = {"situation": "rate", "way": "ampkit", "said": ""}
    assert traps.cell_text(base | {"exact": True, "distance": 0.0}) == "right"
    assert traps.cell_text(base | {"exact": True, "distance": 0.0, "said": "eager"}) == "right, eager"
    assert traps.cell_text(base | {"exact": False, "distance": 2.2e-7}) == "right within 2e-07"
    assert traps.cell_text(base | {"exact": False, "distance": 0.25}) == "**wrong** by 2.5e-01"
    assert traps.cell_text(base | {"exact": False, "distance": float("nan")}) == "**wrong** by nan"
    assert traps.cell_text(base | {"error": "RuntimeError"}) == "raises `RuntimeError`"
    assert traps.cell_text(base | {"missing": "tensordict"}) == "not installed"


def test_a_process_that_ends_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any, **kwargs: Any) -> Any:
        return subprocess.CompletedProcess(args, -6, stdout="half a li", stderr="aborted")

    monkeypatch.setattr(subprocess, "run", run)
    assert traps.cell_text(traps.in_a_process("rate", "ampkit")) == "ends the process (-6)"


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        traps.main([])
    assert "torch finds no CUDA device here" in capsys.readouterr().err


def test_the_table_and_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells are in the table, which is written where the page has its two comments."""
    page = tmp_path / "traps.md"
    page.write_text(PAGE.read_text())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    right = {"exact": True, "distance": 0.0, "said": ""}
    monkeypatch.setattr(traps, "in_a_process", lambda name, way: {"situation": name, "way": way, **right})
    assert traps.main(["--write", str(page)]) == 0
    block = traps.marked.read(page, traps.MARK)
    assert block.count("| right ") == len(traps.SITUATIONS) * len(traps.WAYS) == 60
    assert block.splitlines()[-1].startswith(f"H200, torch {torch.__version__}")
    wrong = {"exact": False, "distance": 1.0, "said": ""}
    monkeypatch.setattr(traps, "in_a_process", lambda name, way: {"situation": name, "way": way, **wrong})
    assert traps.main([]) == 1


def test_the_page_explains_every_row() -> None:
    text = PAGE.read_text()
    for title, _ in traps.SITUATIONS.values():
        assert f"**{title[0].upper()}{title[1:]}.**" in text, title


def test_cells_are_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(traps, "measure", lambda *args: {"situation": args[0], "way": args[1], "device": args[2]})
    assert traps.main(["--cell", "rate", "ampkit"]) == 0
    assert json.loads(capsys.readouterr().out) == {"situation": "rate", "way": "ampkit", "device": "cuda"}
