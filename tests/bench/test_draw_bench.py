"""tests/benchmarks/draw_bench.py: what it draws of the figures that the bench wrote, and when it says why it cannot."""

import sys
from pathlib import Path

import pytest
from draw_bench import Figures, Row, main
from test_bench import saved


def drawn(tmp_path: Path, name: str, *parts: Figures, options: tuple[str, ...] = ()) -> int:
    """Draw the figures of several files, and return how large the image is."""
    files = [tmp_path / f"{i}.json" for i in range(len(parts))]
    for file, part in zip(files, parts, strict=True):
        file.write_text(part.to_json())
    main([*map(str, files), "--plot", str(tmp_path / name), *options])
    image = (tmp_path / name).read_bytes()
    assert image.startswith(b"\x89PNG")
    return len(image)


@pytest.mark.slow
def test_bars_and_lines(tmp_path: Path) -> None:
    """Bars for one or two batch sizes, lines over several; only some of the variants if they are named."""
    parts = saved("mlp"), saved("resnet50"), saved("mlp", 128), saved("mlp", 256)
    bars, lines = drawn(tmp_path, "bars.png", *parts[:3]), drawn(tmp_path, "lines.png", *parts)
    assert min(bars, lines) > 20_000
    assert bars != lines
    assert drawn(tmp_path, "few.png", *parts[:3], options=("--variants", "amp", "--model", "mlp")) < bars


def test_it_needs_matplotlib_and_something_to_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the command that installs it; figures without a time are no picture."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(SystemExit, match=r"needs matplotlib: pip install 'ampkit\[plots\]'"):
            drawn(tmp_path, "bench.png", saved())
    with pytest.raises(SystemExit, match=r"bench\.xyz: the name must end in one of \.eps, "):
        drawn(tmp_path, "bench.xyz", saved())
    with pytest.raises(SystemExit, match="no such model, batch size or variant"):
        drawn(tmp_path, "bench.png", saved(), options=("--batch", "3"))
    empty = saved()
    empty.results[0].rows = [Row("amp", "torch AMP, eager", error="out of memory")]
    with pytest.raises(SystemExit, match="nothing to plot"):
        drawn(tmp_path, "bench.png", empty)
