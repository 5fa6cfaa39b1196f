"""tests/benchmarks/loss_curves.py: a captured step beside eager ones, and whether it lies within the noise of seeds."""

import json
import sys
import types
from pathlib import Path

import pytest
import torch
from loss_curves import main, smooth
from test_bench import diverges, never_steps, plant, tiny


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a function of the user's, `mine:tiny`."""
    module = types.ModuleType("mine")
    module.tiny = tiny  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.slow
def test_loss_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eager, eager again, another seed, captured; the captured one lies within the noise of seeds."""
    out, plot = tmp_path / "curves.json", tmp_path / "curves.png"
    main(["40", "--model", "mine:tiny", "-b", "8", "--json", str(out), "--plot", str(plot)])
    curves = json.loads(out.read_text())
    assert {len(losses) for losses in curves["losses"].values()} == {40}
    assert curves["distances"]["the same again"] == 0.0
    assert curves["distances"]["graphed_step"] < curves["distances"]["torch AMP, eager, other seed"]
    assert curves["command"].endswith(f"loss_curves.py 40 --model mine:tiny -b 8 --json {out} --plot {plot}")
    assert "graphed_step lies within the noise of two eager seeds." in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_captured_run_that_goes_elsewhere_is_not_within_the_noise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that never steps, planted."""
    plant(monkeypatch, "graphed", never_steps)
    main(["40", "--model", "mine:tiny", "-b", "8"])
    assert "graphed_step does NOT lie within the noise of two eager seeds." in capsys.readouterr().out


def test_a_curve_that_ends_in_nan_is_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON has no nan: losses and distances that are nan stand as null, and do not lie within the noise."""
    plant(monkeypatch, "graphed", diverges)
    out, plot = tmp_path / "curves.json", tmp_path / "curves.png"
    main(["4", "--model", "mine:tiny", "-b", "8", "--json", str(out), "--plot", str(plot)])
    curves = json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert curves["losses"]["graphed_step"] == [None] * 4
    assert curves["distances"]["graphed_step"] is None
    assert "graphed_step does NOT lie within the noise" in capsys.readouterr().out


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(SystemExit, match="'resnet19': expected module:function"):
        main(["4", "--model", "resnet19"])


def test_curves_are_smoothed_over_a_window() -> None:
    """The mean over each 25 steps, and over all where there are fewer."""
    assert smooth(list(map(float, range(27)))).tolist() == [12.0, 13.0, 14.0]
    assert smooth([1.0, 3.0]).tolist() == [2.0]
