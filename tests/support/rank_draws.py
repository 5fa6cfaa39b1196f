"""Steps of several ranks in which the host decides by random draws, one process per rank, for test_rank_draws.py.

python tests/support/rank_draws.py --device cuda  two ranks, all cases; a row of each rank
python tests/support/rank_draws.py --device cpu --cases own "own, fsdp"  some of them with gloo, emulated graphs
"""

import sys
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ddp_train import KEPT
from rank_script import main_of_cases, rows_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ampkit

CALLS = {"cpu": 40, "cuda": 100}  # on a GPU, DDP's warm-up is longer
WIDTH = 16


class Case(NamedTuple):
    """What to train.

    Attributes:
        own: whether each rank draws from a seed of its own.
        wrapper: "ddp" or "fsdp".
        accumulate: micro-batches per optimizer step.
        drops: whether a layer is left out, rather than computed on another input.
        rate: how often.
        window: whether `window` is called.
        odd: calls in which rank 1 has a batch of another size.
        changes: the call in which the rate changes, on all ranks.
        verify: see `graphed_step`.
        asks: the layers that are chosen by a question about the batch, rather than by a draw.
        selects: whether that is a number, which also tells how many rows count.
    """

    own: bool = True
    wrapper: str = "ddp"
    accumulate: int = 1
    drops: bool = False
    rate: float = 0.4
    window: bool = False
    odd: tuple[int, ...] = ()
    changes: int = -1
    verify: int = 0
    asks: tuple[int, ...] = ()
    selects: bool = False


CASES = {
    "alike": Case(own=False),
    "own": Case(),
    "rare": Case(rate=0.05),
    "own, fsdp": Case(wrapper="fsdp"),
    "dropped alike, fsdp": Case(own=False, wrapper="fsdp", drops=True),
    "accumulated": Case(accumulate=2),
    "windows": Case(accumulate=2, window=True, own=False),
    "another size": Case(odd=(2, 7, 20, 21, 30)),
    "the rate changes": Case(changes=20),
    "verified": Case(verify=2, own=False),
    "layerdrop": Case(own=False, drops=True),
    "rare layerdrop": Case(own=False, drops=True, rate=0.05),
    "asks": Case(asks=(0, 1)),
    "selects": Case(asks=(0, 1), selects=True),
    "asks, fsdp": Case(asks=(0, 1), wrapper="fsdp"),
    "asks and draws": Case(asks=(1,)),
    "asks, accumulated": Case(asks=(0, 1), accumulate=2),
    "asks in windows": Case(asks=(0,), accumulate=2, window=True),
    "asks, another size": Case(asks=(0, 1), odd=(2, 7, 20, 21, 30)),
}
# gloo shows the rest
ON_GPUS = (
    "own",
    "rare",
    "own, fsdp",
    "windows",
    "another size",
    "verified",
    "layerdrop",
    "asks",
    "asks, fsdp",
    "selects",
)


class Layers(nn.Module):
    """Two decisions of the host, by draws on the CPU or by questions about the input.

    All parameters are in use unless layers are dropped.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last, self.drops, self.rate, self.asks = nn.Linear(WIDTH, 3), case.drops, case.rate, case.asks
        self.selects = case.selects

    def forward(self, x: Tensor) -> Tensor:
        batch = x
        for number, layer in enumerate(self.layers):
            chosen = batch[number].sum() > 2.0 if number in self.asks else torch.rand([]) < self.rate
            if self.selects:
                kept = torch.arange(len(batch), device=x.device) < 3 - 2 * chosen.long()
                chosen, x = int(kept.sum()) == 1, x[kept] if number else x
            if chosen and self.drops:
                continue
            x = torch.tanh(layer(-x)) if chosen else x + torch.tanh(layer(x))
        return self.last(x)


class Job:
    """One rank's model, batches and step."""

    def __init__(self, case: Case, device: torch.device, graph: str) -> None:
        self.case, self.device, self.rank = case, device, dist.get_rank()
        torch.manual_seed(3)
        model: Any = Layers(case).to(device)
        if case.wrapper == "fsdp":
            for layer in model.layers:
                fully_shard(layer)
            self.model: Any = fully_shard(model)
        else:
            self.model = DistributedDataParallel(model)
        self.layers = model
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        loss_fn = lambda model, x: model(x).square().mean()  # noqa: E731 - of a class it would need two lines
        options = {"accumulate": case.accumulate, "verify": case.verify, "max_norm": 1.0}
        self.step = ampkit.graphed_step(loss_fn, self.model, optimizer, graph=graph, **options)
        self.made = torch.Generator().manual_seed(7 + self.rank)
        torch.manual_seed(5 + self.rank * case.own)
        self.history: list[Any] = []
        KEPT.append(self.step)

    def run(self) -> None:
        for call in range(0, CALLS[self.device.type], self.case.accumulate if self.case.window else 1):
            if call == self.case.changes:
                self.layers.rate = 0.7
            size = 5 if call in self.case.odd and self.rank else 6
            shape = (self.case.accumulate, size, WIDTH) if self.case.window else (size, WIDTH)
            x = torch.randn(shape, generator=self.made).to(self.device)
            if self.case.window:
                out = self.step.window(x)
            else:
                out = self.step(x)
            self.history.append([out.loss.tolist(), *self.weights(), torch.get_rng_state().sum().item()])

    def weights(self) -> list[float]:
        shards = (getattr(param, "to_local", lambda param=param: param)() for param in self.model.parameters())
        return [shard.double().sum().item() for shard in shards]


def compare(case: Case, device: torch.device, graph: str) -> dict[str, Any]:
    """Train without graphs and with them; return whether all is the same after each call, and the counts."""
    jobs, raised = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kind in ("off", graph):
            jobs.append(Job(case, device, kind))
            try:
                jobs[-1].run()
            except (RuntimeError, ampkit.AmpkitError) as error:
                if not case.drops:
                    raise
                raised.append([len(jobs[-1].history), f"{type(error).__name__}: {error}"[:200]])
    report = jobs[1].step.report()
    differ = [call for call, (a, b) in enumerate(zip(*(job.history for job in jobs), strict=True)) if a != b]
    row = {
        "differ": differ,
        "raised": raised,
        "messages": [str(w.message) for w in caught if issubclass(w.category, ampkit.AmpkitWarning)],
        "weights": jobs[1].weights(),
        **{name: getattr(report, name) for name in ("captures", "replays", "eager", "failure", "launches", "graphs")},
    }
    for job in jobs:
        job.step.close()
    return row


def compare_all(names: Sequence[str], device: torch.device) -> dict[str, Any]:
    """Return a row for each of these cases by its name."""
    graph = "auto" if device.type == "cuda" else "emulate"
    return rows_of(names, lambda name: compare(CASES[name], device, graph), hidden=["weights"])


if __name__ == "__main__":
    sys.exit(main_of_cases(sys.argv[1:], __file__, str(__doc__), [*CASES], compare_all))
