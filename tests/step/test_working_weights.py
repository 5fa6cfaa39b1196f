"""Working weights: which ones a captured step holds in the compute dtype, with eager's bits, and who sees them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import (
    ENGINES,
    OPTIMIZERS,
    assert_same,
    boosted_loss,
    deterministic,
    make_batches,
    make_net,
    training_state,
)
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

Engine = tuple[str, str]


class Scaled(torch.autograd.Function):
    """Casts its weight itself and returns a float32 gradient that float16 could not hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight.to(grad.dtype), (grad.float() * x.float()).sum(0) * (1 + 2**-14)


class Model(nn.Module):
    """A linear layer whose weight may be used in other ways too, and a second one that is not."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        out = self.second(self.first(x).relu())
        if self.use == "penalty":
            return out.float().sum() + weight.square().sum()
        if self.use == "detached":
            return out.float().sum() * weight.detach().abs().max()
        if self.use == "rows":
            return out.float().sum() + F.embedding(torch.arange(3, device=x.device), weight).sum()
        if self.use == "function":
            return out.float().sum() + Scaled.apply(x, weight[0]).float().sum()
        if self.use == "transposed":
            return out.float().sum() + (x @ weight.t()).float().sum()
        if self.use == "twice":
            return out.float().sum() + self.first(x * 2).float().sum()
        if self.use == "cast by hand":
            return out.float().sum() + F.linear(x.half(), weight.half()).float().sum()
        return out.float().square().mean()


# Which weights of `Model` are cast once, and nothing else, when `first.weight` is used like this.
USES = {
    "once": 4,
    "twice": 4,  # autocast keeps the cast, so that it is one
    "penalty": 3,
    "detached": 3,
    "rows": 3,
    "function": 3,
    "transposed": 3,
    "cast by hand": 3,
    "hook": 3,
}


def run(engine: Engine, graph: str, use: str, policy: str, accumulate: int) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    model = Model(use).to(engine[0])
    if use == "hook":
        model.first.weight.register_hook(lambda grad: grad * 1.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-7, fused=True)
    step = ampkit.graphed_step(
        lambda m, x: m(x), model, optimizer, policy=policy, accumulate=accumulate, graph=graph, on_failure="raise"
    )
    history = []
    made = torch.Generator().manual_seed(1)
    for _ in range(12):
        out = step(torch.randn(5, 8, generator=made).to(engine[0]))
        history.append((out._asdict(), training_state(model, optimizer, step.scaler)))
        assert all(param.dtype is torch.float32 for param in model.parameters())
    assert (step.replays > 0) == (graph != "off")
    return history, len(step._window._step._working)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("policy", "accumulate"),
    [
        ("bfloat16", 1),
        ("float16", 2),
        pytest.param("bfloat16", 2, marks=pytest.mark.slow),
        pytest.param("float16", 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("use", USES)
@pytest.mark.sampled(6)
def test_only_where_it_is_exact(engine: Engine, policy: str, use: str, accumulate: int) -> None:
    """A weight that is not only cast stays float32. After every call all bits are eager's."""
    with deterministic():
        eager, none = run(engine, "off", use, policy, accumulate)
        graphed, copies = run(engine, engine[1], use, policy, accumulate)
    assert_same(eager, graphed)
    assert (none, copies) == (0, USES[use])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_use_in_a_later_layout_gives_the_copy_up(engine: Engine) -> None:
    """G12: what one layout only casts, another may add to the loss: then there is no copy for it, and the graph of the
    first layout, which has one, writes over nobody's memory.
    """

    def loss_fn(model: Any, x: Tensor, penalty: bool) -> Tensor:
        return model(x).float().square().mean() + (model.weight.square().sum() if penalty else 0.0)

    def trajectory(graph: str) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(6, 6).to(engine[0])
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        step = ampkit.graphed_step(loss_fn, model, optimizer, policy="bfloat16", graph=graph, on_failure="raise")
        history = []
        for i in range(16):
            out = step(torch.full((2, 6), 0.1 * i, device=engine[0]), i % 8 > 3)
            history.append((out.loss, training_state(model, optimizer, step.scaler)))
        if graph != "off":
            assert (len(step._window._step._working), step.captures) == (1, 2)
        return history

    with deterministic():
        assert_same(trajectory("off"), trajectory(engine[1]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("access", ["load", "write", "copy"])
def test_masters_are_the_weights(engine: Engine, access: str) -> None:
    """Between calls modules hold float32 masters: loaded, written or copied weights are what the next step uses."""
    model = make_net(engine[0], dropout=0.0)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step = ampkit.graphed_step(boosted_loss, model, optimizer, policy="bfloat16", graph=engine[1], on_failure="raise")
    batch = make_batches(engine[0], [16])[0]
    for _ in range(5):
        step(*batch)
    assert len(step._window._step._working) == 4
    change: dict[str, Callable[[], Any]] = {
        "load": lambda: model.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()}),
        "write": lambda: [param.detach().zero_() for param in model.parameters()],
        "copy": lambda: copy.deepcopy(model),
    }
    result = change[access]()
    with ampkit.Policy.parse("bfloat16").autocast(engine[0]):
        expected, _ = boosted_loss(model, *batch)
    out = step(*batch)
    if access == "copy":
        assert {param.dtype for param in result.parameters()} == {torch.float32}
    else:
        assert abs(out.loss - torch.tensor(10.0).log()) < 0.01  # all logits are 0, and bfloat16 has 8 bits
    assert_same(expected.detach().float(), out.loss)
    assert step.replays == 3
