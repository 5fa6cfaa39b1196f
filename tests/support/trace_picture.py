"""A picture of a replayed training step: module names over its kernels, as `ampkit.debug.name_kernels` writes them.

    python tests/support/trace_picture.py --out FOLDER                      # ResNet-50 at batch 32, bfloat16, on a GPU
    python tests/support/trace_picture.py --out FOLDER --trace named.json   # of a trace that was written before

It writes named.json and trace.png, 1472 pixels wide for a column of 736, and prints the table of modules. On a machine
without a GPU it takes a small model, whose graph is emulated. On an H100 it takes less than a minute.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import ampkit

COLORS = {"forward": "#3b7dd8", "backward": "#d9822b", "optimizer": "#5b8c3a", "": "#999999"}
FONT = 8.5  # points; at 736 pixels for 7.36 inches, as many as a small print of the page
ZOOMED = "layer2.0"  # the block of the lower panel


class Kernel(NamedTuple):
    """A kernel of the merged trace."""

    name: str
    start: float  # us
    stop: float
    module: str
    phase: str
    operation: str


def make_trace(folder: Path) -> Path:
    """Train ResNet-50 until its step is a graph, profile two replays, name their kernels and write the trace."""
    import torchvision

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    big = device == "cuda"
    model = (torchvision.models.resnet50 if big else torchvision.models.resnet18)(num_classes=1000 if big else 10)
    model = model.to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    shape = (32, 3, 224, 224) if big else (2, 3, 32, 32)
    x = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(1000 if big else 10, (shape[0],), device=device)

    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        return F.cross_entropy(model(x), y)

    graph = "auto" if big else "emulate"
    options = {"policy": "bfloat16", "max_norm": 1.0, "graph": graph, "annotate": True, "on_failure": "raise"}
    step = ampkit.graphed_step(loss_fn, model, optimizer, **options)
    while step.replays < 5:
        step(x, y)
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, *[kinds.CUDA] * big], acc_events=True) as profiler:
        for _ in range(2):
            step(x, y)
        if big:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(folder / "replay.json"))
    named = ampkit.debug.name_kernels(folder / "replay.json", step)
    named.save(folder / "named.json")
    print(named)
    if named.unmatched:
        print("unmatched:", *sorted({kernel.kernel[:100] for kernel in named.unmatched}), sep="\n  ")
    return folder / "named.json"


def last_replay(trace: dict[str, Any]) -> list[Kernel]:
    """Return the kernels of the last replay on the first row of modules."""
    spans = [e for e in trace["traceEvents"] if e.get("cat") == "ampkit" and "phase" in e["args"] and e["tid"] == 0]
    kernels = [
        Kernel(e["name"], e["ts"], e["ts"] + e["dur"], *(e["args"][key] for key in ("module", "phase", "operation")))
        for e in sorted(spans, key=lambda e: float(e["ts"]))
    ]
    begins = [
        i for i in range(1, len(kernels)) if kernels[i - 1].phase == "optimizer" and kernels[i].phase == "forward"
    ]
    return kernels[begins[-1] if begins else 0 :]


def runs(kernels: Sequence[Kernel], depth: int) -> Iterator[tuple[str, str, float, float]]:
    """Yield phase, path and time of each run of kernels whose modules have the same first parts."""
    found: list[tuple[str, str, float, float]] = []
    for kernel in kernels:
        key = kernel.phase, ".".join(kernel.module.split(".")[:depth]) if depth else kernel.phase
        if found and found[-1][:2] == key:
            found[-1] = (*key, found[-1][2], kernel.stop)
        else:
            found.append((*key, kernel.start, kernel.stop))
    yield from found


def draw(kernels: Sequence[Kernel], path: Path) -> None:
    """Draw the whole step, and one block of its forward."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    block = [k for k in kernels if k.phase == "forward" and f"{k.module}.".startswith(f"{ZOOMED}.")]
    figure, (whole, part) = pyplot.subplots(2, 1, figsize=(7.36, 4.6), dpi=200, height_ratios=(3, 3.4))
    title = f"One replay: {len(kernels)} kernels in {(kernels[-1].stop - kernels[0].start) / 1e3:.2f} ms"
    rows = [
        ("phase", list(runs(kernels, 0))),
        ("module", list(runs(kernels, 1))),
        ("kernels", each_kernel(kernels, "")),
    ]
    panel(whole, title, rows, kernels[0].start, 1e3, "ms")
    if block:
        inner = [(phase, name.removeprefix(f"{ZOOMED}."), *when) for phase, name, *when in runs(block, 9)]
        rows = [("block", list(runs(block, 2))), ("module", inner), ("kernel", each_kernel(block, "operation"))]
        panel(part, f"{ZOOMED}, forward: {len(block)} kernels", rows, block[0].start, 1, "us")
    figure.tight_layout(pad=0.6, h_pad=1.2)
    figure.savefig(path)


def each_kernel(kernels: Sequence[Kernel], text: str) -> list[tuple[str, str, float, float]]:
    """Return a bar for each kernel, with its operation as a label or without one."""
    return [(k.phase, k.operation.removeprefix("aten::") if text else "", k.start, k.stop) for k in kernels]


def panel(axes: Any, title: str, rows: Sequence[Any], origin: float, unit: float, unit_name: str) -> None:
    """Draw rows of bars, with labels where they fit."""
    axes.set_title(title, fontsize=FONT + 1, loc="left")
    for row, (_, bars) in enumerate(rows):
        for i, (phase, _, start, stop) in enumerate(bars):
            left, width = (start - origin) / unit, (stop - start) / unit
            shade = 0.95 if i % 2 else 0.6
            axes.barh(-row, width, left=left, height=0.82, color=COLORS[phase], alpha=shade, linewidth=0)
    axes.set_yticks([-row for row in range(len(rows))], [name for name, _ in rows], fontsize=FONT)
    axes.tick_params(axis="x", labelsize=FONT)
    axes.set_xlabel(unit_name, fontsize=FONT, labelpad=1)
    axes.margins(x=0.005)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.figure.canvas.draw()
    low, high = axes.get_xlim()
    points = axes.get_window_extent().width / axes.figure.dpi * 72 / (high - low)  # per unit of the axis
    for row, (_, bars) in enumerate(rows):
        for _, text, start, stop in bars:
            room = (stop - start) / unit * points
            if text and (turned := len(text) * FONT * 0.56 > room) and room < FONT * 1.1:
                continue
            if text and turned and len(text) > 9:
                continue
            if text:
                middle, style = ((start + stop) / 2 - origin) / unit, {"rotation": 90} if turned else {}
                axes.text(middle, -row, text, ha="center", va="center", fontsize=FONT - 0.5, **style)


def main() -> int:
    """Make or read the trace, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--trace", type=Path, help="a trace that name_kernels has written")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    trace = json.loads((args.trace or make_trace(args.out)).read_text())
    draw(last_replay(trace), args.out / "trace.png")
    print(args.out / "trace.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
