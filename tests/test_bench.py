"""python -m ampkit bench: arguments, the message without a GPU, and a short run on one."""

import json
from pathlib import Path

import pytest
import torch

from ampkit import _bench
from ampkit.__main__ import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_says_so() -> None:
    """There is nothing to measure, and no traceback of torch's to decipher."""
    with pytest.raises(SystemExit, match="there is no CUDA device to measure"):
        main(["bench"])


def test_plot_of_saved_figures(tmp_path: Path) -> None:
    """The figures that --json writes can be drawn, one panel per model."""
    pytest.importorskip("matplotlib")
    timings = [
        {"variant": name, "ms": ms, "fastest": ms * 0.9, "slowest": ms * 1.2, "loss": 1.0}
        for name, ms in (("torch AMP, eager", 9.8), ("bare capture", 2.0), ("graphed_step", 2.1))
    ]
    results = [
        {"model": "mlp", "batch": 64, "timings": timings},
        {"model": "resnet50", "batch": 32, "timings": timings},
    ]
    _bench.draw({"gpu": "a GPU", "torch": "2", "date": "2026-11-21", "results": results}, tmp_path / "bench.png")
    header = (tmp_path / "bench.png").read_bytes()
    assert header.startswith(b"\x89PNG")
    assert len(header) > 10_000


def test_unknown_policy_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """The list of legal policies reaches the user through argparse."""
    with pytest.raises(SystemExit):
        main(["bench", "--policy", "fp16"])
    assert "Legal: float32, float16" in capsys.readouterr().err


@pytest.mark.cuda
def test_bench_measures_three_variants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each variant, and a JSON file with the setting and times whose median lies within the spread."""
    out = tmp_path / "bench.json"
    main(["bench", "--model", "mlp", "--batch-size", "8", "--repeats", "3", "--json", str(out)])
    written = json.loads(out.read_text())
    assert written["gpu"] == torch.cuda.get_device_name()
    (result,) = written["results"]
    assert [timing["variant"] for timing in result["timings"]] == ["torch AMP, eager", "bare capture", "graphed_step"]
    printed = capsys.readouterr().out
    for timing in result["timings"]:
        assert 0 < timing["fastest"] <= timing["ms"] <= timing["slowest"]
        assert timing["variant"] in printed
