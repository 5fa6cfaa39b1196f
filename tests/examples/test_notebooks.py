"""What the notebooks promise: they are short, hold no outputs, and their code runs and finds what they say."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import ampkit

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
CHOICE = '"cuda" if torch.cuda.is_available() else "cpu"'
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


def cells(notebook: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(notebook.read_text())["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in found]


def run(name: str, device: str, folder: Path) -> Path:
    """Run the code of a notebook in one namespace, on this device, and return the script that it was written to."""
    script = folder / f"{name}.py"
    code = [cell["source"] for cell in cells(EXAMPLES / f"{name}.ipynb") if cell["cell_type"] == "code"]
    assert code[0].count(CHOICE) == 1
    script.write_text("\n\n".join(code).replace(CHOICE, repr(device)))
    runpy.run_path(str(script))
    return script


def test_they_are_there() -> None:
    assert [notebook.stem for notebook in NOTEBOOKS] == ["finding_what_stands_in_the_way", "start"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.name)
def test_it_is_short_and_holds_no_outputs(notebook: Path) -> None:
    """Text and code take turns, and the first cell says where it runs, and that nothing is faster there."""
    found = cells(notebook)
    assert len(found) <= 12
    assert [cell["cell_type"] for cell in found] == ["markdown", "code"] * (len(found) // 2) + ["markdown"]
    assert len({cell["id"] for cell in found}) == len(found)
    assert all((cell["outputs"], cell["execution_count"]) == ([], None) for cell in found[1::2])
    first = " ".join(found[0]["source"].split())
    for said in ("This notebook runs on a CPU", '`graph="emulate"`', "nothing is faster"):
        assert said in first


@DEVICES
def test_start(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It learns, and its loop of torch alone has the same bits."""
    run("start", device, tmp_path)
    said = capsys.readouterr().out
    assert [float(right) > 0.85 for right in re.findall(r"accuracy ([\d.]+)", said)] == [True] * 4
    assert "128 steps: 125 replayed, 3 eager, 0 skipped" in said
    assert said.endswith("12 steps are equal bit by bit (7 tensors: loss, parameters, buffers)\n")


@DEVICES
def test_finding(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The warning, `find_syncs` and the report name the same three lines, and none once these are mended."""
    with pytest.warns(ampkit.CaptureWarning) as warned:
        script = run("finding_what_stands_in_the_way", device, tmp_path)
    said = capsys.readouterr().out
    lines = script.read_text().splitlines()
    for code in ("hidden.abs().max().item()", "losses.append(loss.item())", "return loss * random.uniform(0.9, 1.1)"):
        (place,) = [f"{script}:{index}" for index, line in enumerate(lines, 1) if code in line]
        assert place in str(warned[0].message)
        assert said.count(place) == 2
    assert len(warned) == 1
    assert "\n8 steps: 5 replayed, 3 eager, 0 skipped; 1 graph(s)" in said
