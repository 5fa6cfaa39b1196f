"""What arithmetic="torch" costs beside the default.

    PYTHONPATH=. python tests/benchmarks/arithmetic.py                       ResNet-50 and GPT-2 on a GPU
    PYTHONPATH=. python tests/benchmarks/arithmetic.py --models gpt2 llama

Fused AdamW at a constant rate, clipping to norm 1. Milliseconds per step, the median over repeats: torch's own loop,
`graphed_step`, and `graphed_step(arithmetic="torch")`, which has the bits of the first one.
"""

import argparse
from collections.abc import Callable

import torch

import ampkit
from tests.benchmarks.models import CASES, LEARNING_RATE, MAX_NORM, Case, loss_fn, median_ms, one_line, torch_amp


def as_torch(case: Case, policy: str) -> Callable[[], object]:
    """Return the step with the bits of torch's loop."""
    model = case.model("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    step = ampkit.graphed_step(
        loss_fn, model, optimizer, policy=policy, max_norm=MAX_NORM, arithmetic="torch", on_failure="raise"
    )
    batch = case.batch("cuda", 0)
    return lambda: step(*batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=["resnet50", "gpt2"])
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    print(torch.cuda.get_device_name(), torch.__version__)
    print(f"{'model':12s} {'torch, ms':>10s} {'default':>10s} {'as torch':>10s}")
    for name in args.models:
        case = CASES[name]
        found = [median_ms(make(case, case.policy)) for make in (torch_amp, one_line, as_torch)]
        print(f"{name:12s} " + " ".join(f"{ms:10.3f}" for ms in found), flush=True)


if __name__ == "__main__":
    main()
