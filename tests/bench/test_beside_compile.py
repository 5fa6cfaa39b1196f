"""tests/benchmarks/beside_compile.py: what is measured of each model, and what its lines say; when a bench ends."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import beside_compile
import beside_jax
import pytest
import torch
from beside_compile import CASES, Figures, Result, Row, compared, lines
from loss_curves import VARIANTS

from ampkit.__main__ import main


def row(variant: str, ms: float | None, **rest: Any) -> Row:
    return Row(variant, VARIANTS[variant].label, ms=ms, **rest)


def result() -> Result:
    """ampkit's fastest row trains wrongly, and torch.compile's fastest one failed: neither is the best."""
    rows = [
        row("amp", 4.0, kernels=1200.4, peak_mib=100.0, host_us=3900.0),
        row("compile", 3.0, kernels=500.0),
        row("reduce-overhead", 2.0, kernels=400.0, host_us=200.0),
        row("max-autotune", None, error="out of memory"),
        row("bare", 0.5),
        row("graphed", 1.9, kernels=600.0, peak_mib=101.0, host_us=50.0),
        row("graphed-default", 1.8, kernels=300.0, peak_mib=99.0, host_us=45.0),
        row("graphed-max", 1.0, off=True),
        row("scan", 1.5, kernels=590.0),
    ]
    return Result("resnet50", 64, rows)


def figures(*results: Result, cuda: str | None = "13.0") -> Figures:
    return Figures({"cuda": cuda}, [], list(results))


def test_the_best_of_both_sides_in_a_line() -> None:
    """One line for a step per call, one for many: kernels before and after, memory and host time, all of one run."""
    _, title, line, together = lines(figures(result()))
    assert title == "best of ampkit / best of torch.compile, in time per step:"
    assert line == (
        'resnet50, batch 64: graphed_step(compile="default") / torch.compile reduce-overhead = 0.90x '
        "(1.800 / 2.000 ms; 300 kernels, 400 in torch.compile reduce-overhead, 1200 in torch AMP, eager; "
        "peak 0.99x that of torch AMP, eager; host 45 us)"
    )
    assert together == (
        "resnet50, batch 64: graphed_step, scan of 96 / torch.compile reduce-overhead = 0.75x "
        "(1.500 / 2.000 ms; 590 kernels, 400 in torch.compile reduce-overhead, 1200 in torch AMP, eager)"
    )


def test_no_line_where_nothing_can_be_compared() -> None:
    """A side that was not measured, and graphs that are emulated, have no line."""
    one_side = Result("mlp", 64, [row("amp", 2.0), row("graphed", 1.0)])
    assert lines(figures(one_side)) == []
    assert lines(figures(result(), cuda=None)) == []


@pytest.mark.parametrize("model", CASES)
def test_both_sides_are_measured_of_every_model(model: str) -> None:
    """And torch AMP, for kernels and memory before; scans where JAX has them too."""
    found = set(compared(model))
    assert found <= set(VARIANTS)
    assert {"amp", "graphed", "graphed-default", "graphed-max", "reduce-overhead", "max-autotune"} <= found
    assert ("scan" in found) == (model in ("mlp-tiny", "mlp-small", "mlp-deep"))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Return what runs the command without training anything. A variant takes 10 s of the clock that it reads."""
    now = [0.0]

    def instead(row: Row, *_: Any) -> str:
        row.ms = row.fastest = row.slowest = 1.0
        now[0] += 10
        return ""

    def run(out: Path, *argv: str) -> tuple[int, dict[str, Any]]:
        code = main(["bench", *argv, "--json", str(out)])
        return code, json.loads(out.read_text())

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("ampkit._commands.bench.measure.measure", instead)
    monkeypatch.setattr("ampkit._commands.bench.measure.Expectations", lambda *_: ())
    monkeypatch.setattr("ampkit._commands.bench.measure.pay_one_time_costs", lambda *_, **__: None)
    clock = SimpleNamespace(monotonic=lambda: now[0], strftime=time.strftime)
    monkeypatch.setattr("ampkit._commands.bench.measure.time", clock)
    return run


Measured = Callable[..., tuple[int, dict[str, Any]]]


def test_each_model_has_variants_of_its_own(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options of the bench are passed on, JAX is asked where it can train the model, and --read shows the lines."""
    asked: list[str] = []
    monkeypatch.setattr(beside_jax, "has_jax", lambda: True)
    monkeypatch.setattr(beside_jax, "add", lambda figures: asked.append(figures.results[0].model))
    file = tmp_path / "out.json"
    beside_compile.main(["--model", "mlp-tiny", "mlp", "-b", "2", "--json", str(file)])
    found = json.loads(file.read_text())["results"]
    assert [(each["model"], each["batch"]) for each in found] == [("mlp-tiny", 2), ("mlp", 2)]
    tiny, deep = ({row["variant"] for row in each["rows"]} for each in found)
    assert deep == {"amp", "graphed", "graphed-default", "compile"}  # all that runs without a GPU
    assert tiny == {*deep, "scan"}
    assert asked == ["mlp-tiny"]
    setting = {"device": "a GPU", "torch": "2", "cuda": "13.0", "date": "2026-11-26", "policy": "bfloat16"}
    setting |= {"repeats": 3, "checked_steps": 20, "tolerance": 0.05}
    file.write_text(Figures(setting, [], [result()]).to_json())
    capsys.readouterr()
    beside_compile.main(["--read", str(file)])
    assert "resnet50, batch 64: graphed_step(" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        beside_compile.main(["--model", "mlp", "--frobnicate"])


def test_a_run_ends_in_time(measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was measured until then is shown; every other row says why it has no time."""
    argv = ["--model", "mlp", "mlp-tiny", "-b", "2", "--variants", "amp", "amp-fused", "graphed", "--time-limit", "15"]
    code, found = measured(tmp_path / "out.json", *argv)
    rows = [row for result in found["results"] for row in result["rows"]]
    assert code == 0
    assert [row["ms"] for row in rows] == [1.0, 1.0, None, None, None, None]
    assert {row["error"] for row in rows[2:]} == {"the 15 s of --time-limit were over"}
    assert "4 of 6 rows failed" in capsys.readouterr().err


def test_compiled_code_is_kept_if_asked_for(measured: Measured, tmp_path: Path) -> None:
    """The table says that set-up times are not those of a first run."""
    _, found = measured(tmp_path / "out.json", "--model", "mlp", "--variants", "amp", "--compiled-code", str(tmp_path))
    assert any("--compiled-code" in note for note in found["notes"])
