"""Record what host and GPU do in an eager step and in a replay of it, and draw both: the pictures of cuda-graphs.md.

python docs/cuda-graphs/timeline.py --record docs/cuda-graphs/timeline.json    # on a GPU
python docs/cuda-graphs/timeline.py --draw docs/cuda-graphs/timeline.json      # anywhere, needs matplotlib
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import ampkit

BATCH = 64
HOST, GPU = "#4c72b0", "#55a868"
HOST_KINDS, GPU_KINDS = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("Launch", "Memcpy", "Memset")  # parts of the names of CUDA calls that put work on the GPU
CALLS = 4  # under the profiler
WIDTH = 7.6  # inches: at 100 dots per inch the width of the text column


def loss_fn(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def make_step(graph: str) -> ampkit.GraphedStep:
    """Return a step of a ResNet-18, float16 with a loss scale and clipping."""
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(num_classes=10).to("cuda", memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    return ampkit.graphed_step(loss_fn, model, optimizer, policy="float16", max_norm=1.0, graph=graph)


def torch_loop(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Return a function that does a step of the same training, written with torch alone."""
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(num_classes=10).to("cuda", memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model, x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def milliseconds(step: Any, calls: int = 50) -> float:
    """Return the median time of a call over 5 rounds of `calls`, without the profiler."""
    rounds = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(rounds)


def spans(step: Any) -> dict[str, Any]:
    """Profile the last of a few calls, for the first ones are slowed down by the profiler's own start.

    CUDA's own calls are recorded but no operations of torch, which would slow the host down.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(CALLS):
            step()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        recorded.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    events = [event for event in events if event.get("ph") == "X"]
    waits = sorted(float(event["ts"]) for event in events if event["name"] == "cudaDeviceSynchronize")
    # The profiler waits once more when it stops, so the last call ends with the wait of number `CALLS`.
    begin, end = waits[CALLS - 2], waits[CALLS - 1]
    events = [event for event in events if float(event["ts"]) > begin]
    launched = [event for event in events if any(name in event["name"] for name in LAUNCHES)]
    host = [event for event in launched if event.get("cat") in HOST_KINDS and float(event["ts"]) < end]
    gpu = [event for event in events if event.get("cat") in GPU_KINDS]
    start = min(float(event["ts"]) for event in host)
    return {
        "host": sorted([round(float(e["ts"]) - start, 2), round(float(e["dur"]), 2)] for e in host),
        "gpu": sorted([round(float(e["ts"]) - start, 2), round(float(e["dur"]), 2)] for e in gpu),
    }


def record(path: Path) -> None:
    """Record an eager step and a replay, with the times of both without a profiler."""
    torch.backends.cudnn.benchmark = True
    x = torch.randn(BATCH, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    y = torch.randint(10, (BATCH,), device="cuda")
    captured = make_step("auto")
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    for name, step in (("eager", torch_loop(x, y)), ("replay", lambda: captured(x, y))):
        for _ in range(20):
            step()
        spans(step)  # the first profile of a process starts CUPTI
        result[name] = {"ms": milliseconds(step), **spans(step)}
    path.write_text(json.dumps(result) + "\n")
    for name in ("eager", "replay"):
        each = result[name]
        busy = sum(duration for _, duration in each["gpu"]) / 1e3
        print(
            f"{name}: {each['ms']:.2f} ms, {len(each['host'])} launches, {len(each['gpu'])} kernels, {busy:.2f} ms busy"
        )


def draw(path: Path) -> None:
    """Draw the eager step, and the replay on the same scale, into `eager.png` and `replay.png` beside `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    data = json.loads(path.read_text())
    end = max(start + duration for start, duration in data["eager"]["host"] + data["eager"]["gpu"]) / 1e3
    for name in ("eager", "replay"):
        each = data[name]
        figure, axes = pyplot.subplots(figsize=(WIDTH, 2.1), layout="constrained")
        for row, part, colour in ((1, "host", HOST), (0, "gpu", GPU)):
            bars = [(start / 1e3, max(duration / 1e3, end / 3000)) for start, duration in each[part]]
            axes.broken_barh(bars, (row - 0.32, 0.64), facecolors=colour, linewidth=0)
        axes.set_yticks([1, 0], ["host\nlaunches", "GPU\nworks"], fontsize=12)
        axes.set_xlim(-end * 0.01, end * 1.01)
        axes.set_ylim(-0.6, 1.6)
        axes.set_xlabel("milliseconds since the step began", fontsize=12)
        axes.tick_params(labelsize=12)
        busy = sum(duration for _, duration in each["gpu"]) / 1e3
        launches, kernels = len(each["host"]), len(each["gpu"])
        many = f"{launches} launches" if launches != 1 else "1 launch"
        axes.set_title(f"{many} by the host, {kernels} kernels, which take {busy:.1f} ms", fontsize=12, loc="left")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        figure.savefig(path.with_name(f"{name}.png"), dpi=200)
        pyplot.close(figure)


def main() -> None:
    """Record or draw, as the arguments say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", type=Path, metavar="FILE", help="profile on this machine's GPU, write FILE")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw eager.png and replay.png beside FILE")
    arguments = parser.parse_args()
    if arguments.record is None and arguments.draw is None:
        parser.error("give --record FILE, --draw FILE or both")
    if arguments.record is not None:
        record(arguments.record)
    if arguments.draw is not None:
        draw(arguments.draw)


if __name__ == "__main__":
    main()
