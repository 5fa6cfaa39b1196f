"""What verify="sparse" costs: a comparison beside a replay, and the share of comparisons in 50,000 calls.

    PYTHONPATH=. python tests/benchmarks/sparse_verification.py                       ResNet-50 and GPT-2 on a GPU
    PYTHONPATH=. python tests/benchmarks/sparse_verification.py --device cpu --tiny   does it run

Each call is waited for. Columns: the median of the calls that are only replays; the calls that compare, the 1st, 16th
and 256th, each as a multiple of that, without its own replay; what the four early comparisons and the one in each
50,000 calls add to the first 50,000 calls, and what that one adds to each further 50,000.
"""

import argparse
import statistics
import time
import warnings

import torch

import ampkit
from tests.benchmarks.models import CASES, LEARNING_RATE, MAX_NORM, TINY_CASES, Case, loss_fn

FIRST, COMPARED, CALLS = 3, (1, 16, 256), 260  # calls of the warm-up; then those that are compared
EARLY, EACH = 4, 50_000


def measured(case: Case, device: str) -> list[float]:
    """Return the milliseconds of each call from that of the capture on."""
    model = case.model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    step = ampkit.graphed_step(
        loss_fn,
        model,
        optimizer,
        policy=case.policy,
        max_norm=MAX_NORM,
        verify="sparse",
        graph="auto" if device == "cuda" else "emulate",
        on_failure="raise",
    )
    batch = case.batch(device, 0)
    found = []
    for call in range(FIRST + CALLS):
        start = time.perf_counter()
        step(*batch)
        if device == "cuda":
            torch.cuda.synchronize()
        if call >= FIRST:
            found.append(1e3 * (time.perf_counter() - start))
    step.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", default=["resnet50", "gpt2"])
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    args = parser.parse_args()
    warnings.simplefilter("ignore", ampkit.CaptureWarning)  # that kernels are not deterministic
    print(torch.cuda.get_device_name() if args.device == "cuda" else "cpu", torch.__version__)
    torch.backends.cudnn.benchmark = True
    print(f"{'model':12s} {'replay, ms':>10s}  {'comparisons, in replays':26s} {'50,000 calls':>12s} {'further':>12s}")
    for name in args.models:
        case = (TINY_CASES if args.tiny else CASES)[name]
        found = measured(case, args.device)
        replay = statistics.median(found[16:255])
        extra = [found[call - 1] / replay - 1 for call in COMPARED]
        each = statistics.median(extra[1:])  # the first has the capture, too
        times = "  ".join(f"{multiple:7.1f}" for multiple in extra)
        share, further = 100 * each * (EARLY + 1) / EACH, 100 * each / EACH
        print(f"{name:12s} {replay:10.3f}  {times:26s} {share:11.3f}% {further:11.4f}%", flush=True)


if __name__ == "__main__":
    main()
