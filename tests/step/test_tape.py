"""The tape stands for a CUDA graph on the CPU: it freezes the host, and nothing else."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from harness import assert_same, boosted_loss, deterministic, make_batches, make_net, training_state
from tape import taped
from torch import Tensor
from torch.nn import functional as F

import ampkit


def train(graph: str, factor: Callable[[], float]) -> tuple[list[Tensor], dict[str, object], int]:
    """Train a model with all kinds of state for eight steps of float16, two of which overflow."""
    model = make_net("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = ampkit.GradScaler("cpu", init_scale=16.0, growth_interval=3)

    def loss(net: torch.nn.Module, images: Tensor, labels: Tensor, boost: Tensor) -> Tensor:
        return F.cross_entropy(net(images), labels) * boost * factor()

    torch.manual_seed(1)
    with ampkit.graphed_step(
        loss, model, optimizer, policy="float16", scaler=scaler, graph=graph, host_writes="ignore"
    ) as step:
        losses = [step(*batch).loss for batch in make_batches("cpu", [4] * 8, overflow_at=(1, 5))]
        return losses, training_state(model, optimizer, scaler), step.replays


def test_replays_have_the_bits_of_eager_steps() -> None:
    """Buffers, moments, scale and random state included; the capture itself changes nothing."""
    *eager, _ = train("off", lambda: 1.0)
    with taped():
        *replayed, replays = train("emulate", lambda: 1.0)
    assert replays == 5
    assert_same(eager, replayed)


@pytest.mark.parametrize("graph", ["emulate", "tape"])
def test_a_number_of_the_host_is_frozen(graph: str) -> None:
    """An emulated graph asks the host in each replay. A tape, as a CUDA graph, has what it was told in the capture."""
    asked = itertools.count()  # in C, where no call is seen to change it

    def factor() -> float:
        next(asked)
        return 1.0

    if graph == "emulate":
        train(graph, factor)
        assert next(asked) == 8
        return
    with taped():
        train("emulate", factor)
    assert next(asked) < 8  # in warm-up calls and the capture alone


WAYS = ["call", "accumulate", "scan", "window"]  # a tape runs what it records, for which a stack has no values yet


@pytest.mark.parametrize(
    ("graph", "way"),
    [*[("tape", way) for way in WAYS[:2]], *[pytest.param("cuda", way, marks=pytest.mark.cuda) for way in WAYS]],
)
def test_gradients_of_the_caller_are_gone(graph: str, way: str) -> None:
    """A backward of your own between calls leaves gradients. A replay clears them, as an eager call does."""
    device = "cuda" if graph == "cuda" else "cpu"
    batches = make_batches(device, [4] * 24)

    def run(mode: str) -> tuple[list[object], ampkit.Report]:
        model = make_net(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        size = 1 if way in ("call", "scan") else 2
        step = ampkit.graphed_step(
            boosted_loss, model, optimizer, accumulate=size, max_norm=1.0, graph=mode, host_writes="ignore"
        )
        seen: list[object] = []
        count = 1 if way in ("call", "accumulate") else 2
        for i in range(0, len(batches), count):
            model.eval()  # so that the statistics of batch norm stay as they are
            F.cross_entropy(model(batches[i][0]), batches[i][1]).backward()
            seen.append([param.grad.clone() for param in model.parameters()])
            model.train()
            if count == 1:
                step(*batches[i])
            else:
                getattr(step, way)(*map(torch.stack, zip(*batches[i : i + count], strict=True)))
            assert all(param.grad is None for param in model.parameters())
        return [seen, training_state(model, optimizer, step.scaler)], step.report()

    with deterministic():
        expected, _ = run("off")
        with nullcontext() if graph == "cuda" else taped():
            found, report = run("auto" if graph == "cuda" else "emulate")
    assert report.replays + report.scanned >= 4
    assert_same(found, expected)
