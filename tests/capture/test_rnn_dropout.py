"""cuDNN's dropout has a random state of its own, which begins anew where a generator was seeded."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import assert_same, deterministic, training_state
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit
from ampkit._torch.device.rnn_dropout import RnnDropout

CALLS = 24
_saved: list[Tensor] = []


class Net(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], noise: bool = False) -> None:
        super().__init__()
        self.rnn = kind(6, 16, num_layers=2, dropout=0.4, batch_first=True)
        self.out, self.noise = nn.Linear(16, 3), noise

    def forward(self, x: Tensor) -> Tensor:
        if self.noise:  # draws in front of the one for the seed
            x = x + 0.1 * torch.randn_like(x)
        out: Tensor = self.out(self.rnn(x)[0][:, -1])
        return out


def seed_anew(i: int) -> None:
    if i % 8 == 7:
        torch.manual_seed(100 + i)


def seed_again(i: int) -> None:
    if i % 8 == 7:
        torch.manual_seed(9)


def restore(i: int) -> None:
    """Save and restore a state; where nothing was drawn meanwhile, it is the present one."""
    if i == 5:
        _saved[:] = [torch.cuda.get_rng_state()]
    if i in (9, 16):
        torch.cuda.set_rng_state(_saved[0])


def fork(i: int) -> None:
    if i % 8 == 7:
        with torch.random.fork_rng():
            torch.rand(3, device="cuda")


def draw(i: int) -> None:
    torch.rand(3, device="cuda")


def train_another(i: int) -> None:
    """Seed, and have another module take the new state."""
    if i % 8 == 7:
        torch.manual_seed(9)
        nn.LSTM(2, 2, num_layers=2, dropout=0.1, device="cuda")(torch.ones(1, 1, 2, device="cuda"))


BETWEEN: dict[str, tuple[Callable[[int], None], int]] = {  # what happens between calls, and the captures
    "another seed": (seed_anew, 3),
    "the same seed": (seed_again, 3),
    "a state": (restore, 3),
    "fork_rng": (fork, 3),
    "draws": (draw, 1),
    "another module": (train_another, 3),
}


def run(net: Callable[[], nn.Module], between: Callable[[int], None], graph: str) -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-7, fused=True)
    step = ampkit.graphed_step(lambda model, x, y: F.cross_entropy(model(x), y), model, optimizer, graph=graph)
    generator = torch.Generator().manual_seed(4)
    torch.manual_seed(9)
    losses = []
    for i in range(CALLS):
        x, y = torch.randn(8, 5, 6, generator=generator).cuda(), torch.randint(3, (8,), generator=generator).cuda()
        losses.append(step(x, y).loss.clone())
        between(i)
    return (losses, training_state(model, optimizer, step.scaler), torch.rand(2, device="cuda")), step


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("between", BETWEEN)
def test_the_numbers_of_eager(kind: type[nn.RNNBase], noise: bool, between: str) -> None:
    """W5: where a generator was seeded, its state set or forked, dropout draws what it draws eagerly."""
    what, captures = BETWEEN[between]
    with deterministic():
        expected, _ = run(lambda: Net(kind, noise), what, "off")
        found, step = run(lambda: Net(kind, noise), what, "auto")
    assert_same(found, expected)
    assert (step.captures, step.replays > 8) == (captures, True), str(step.report())


@pytest.mark.cuda
def test_it_is_said() -> None:
    """W5: the warning names what has changed; where each call is seeded, nothing is captured and all is right."""
    with deterministic():
        with pytest.warns(ampkit.CaptureWarning, match=r"the random state of cuDNN's dropout \(nn.LSTM"):
            run(lambda: Net(nn.LSTM), seed_anew, "auto")
        expected, _ = run(lambda: Net(nn.LSTM), lambda i: torch.manual_seed(5) and None, "off")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ampkit.CaptureWarning)
            found, step = run(lambda: Net(nn.LSTM), lambda i: torch.manual_seed(5) and None, "auto")
    assert_same(found, expected)
    assert step.replays == 0


@pytest.mark.cuda
@pytest.mark.parametrize("drew", [False, True])
def test_a_look_changes_nothing(drew: bool) -> None:
    """W5: neither generators nor the state of the dropout are other ones behind a look."""
    torch.manual_seed(0)
    module = nn.LSTM(4, 4, num_layers=2, dropout=0.5, device="cuda")
    x = torch.ones(3, 2, 4, device="cuda")

    def outputs(looks: bool) -> list[Tensor]:
        dropout = RnnDropout()
        dropout.watch([module])
        torch.manual_seed(1)
        found = []
        for i in range(4):
            with torch.autocast("cuda", enabled=i == 3) if i else nullcontext():
                if looks:
                    dropout.look()
                found.append(module(x)[0].clone())
            if drew:
                torch.cuda.manual_seed(i)
        return [*found, torch.rand(2), torch.rand(2, device="cuda")]

    with torch.no_grad():
        assert_same(outputs(looks=True), outputs(looks=False))


def test_nothing_is_asked_on_a_cpu() -> None:
    dropout = RnnDropout()
    dropout.watch([nn.LSTM(2, 2, num_layers=2, dropout=0.1)])
    dropout.look()
    assert (dropout.device, dropout.times) == (None, 0)
