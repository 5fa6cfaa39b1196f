"""Steps of several ranks with `buckets="auto"`, each rank with lengths of its own, for test_auto_buckets.py.

python tests/support/rank_lengths.py --device cuda  two ranks, all cases; a row of each rank
python tests/support/rank_lengths.py --device cpu --cases ddp  one of them with gloo, emulated graphs
"""

import random
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ddp_train import KEPT
from rank_script import main_of_cases, rows_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ampkit
from ampkit._batches import padding

CALLS = {"cpu": 90, "cuda": 200}  # on a GPU, DDP's warm-up is longer
WATCHED = 20
WORDS = 50


class Case(NamedTuple):
    """What to train: "ddp" or "fsdp", micro-batches per step, and whether these are given to `window` at once."""

    wrapper: str = "ddp"
    accumulate: int = 1
    window: bool = False
    ahead: bool = False  # whether sizes are chosen ahead


CASES = {
    "ddp": Case(),
    "fsdp": Case("fsdp"),
    "ahead": Case(ahead=True),
    "windows": Case(accumulate=2, window=True),
}


def loss_fn(model: nn.Module, x: Tensor, *, mask: Tensor) -> Tensor:
    losses = F.cross_entropy(model(x).transpose(1, 2), x.roll(1, 1), reduction="none")
    return (losses * mask).sum() / mask.sum()


def train(case: Case, device: torch.device, graph: str) -> tuple[list[Any], Any]:
    """Return losses and weights of a training, and its step. Rank 1 has longer batches than rank 0."""
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)).to(device)
    model = DistributedDataParallel(model) if case.wrapper == "ddp" else fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = ampkit.graphed_step(loss_fn, model, optimizer, buckets="auto", graph=graph, accumulate=case.accumulate)
    KEPT.append(step)
    rank = dist.get_rank()
    lengths = random.Random(rank)
    batches = [
        torch.full((2, 2, lengths.randint(3, 20 + 2 * rank)), i % WORDS, device=device)
        for i in range(CALLS[device.type] // case.accumulate)
    ]
    if case.ahead:
        step.choose_buckets([x[0] for x in batches])
    losses = []
    for x in batches:
        losses.append((step.window(x) if case.window else step(x[0])).loss.tolist())
    weights = [getattr(param, "to_local", lambda param=param: param)().tolist() for param in model.parameters()]
    return [losses, weights], step


def compare(case: Case, device: torch.device, graph: str) -> dict[str, Any]:
    """Train without graphs and with them; return whether all is the same, and the counts."""
    (eager, _), (graphed, step) = (train(case, device, kind) for kind in ("off", graph))
    report = step.report()
    row = {
        "same": eager == graphed,
        "sizes": step.state_dict()["buckets"]["sizes"],
        **{name: getattr(report, name) for name in ("captures", "replays", "eager", "failure", "launches", "graphs")},
    }
    for each in KEPT:
        each.close()
    return row


def compare_all(names: Sequence[str], device: torch.device) -> dict[str, Any]:
    """Return a row for each of these cases by its name."""
    padding.WATCHED = WATCHED
    graph = "auto" if device.type == "cuda" else "emulate"
    return rows_of(names, lambda name: compare(CASES[name], device, graph))


if __name__ == "__main__":
    sys.exit(main_of_cases(sys.argv[1:], __file__, str(__doc__), [*CASES], compare_all))
