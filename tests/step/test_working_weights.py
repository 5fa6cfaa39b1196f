"""Working weights: which ones a captured step holds in the compute dtype, with eager's bits, and who sees them."""

import copy
import weakref
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
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

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
@pytest.mark.sampled(12)
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


class Seen(nn.Module):
    """A linear layer and code that asks what its weight is."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(8, 8), nn.Linear(8, 4)
        self.fc.weight.multiplier = 3.0  # type: ignore[assignment]
        self.first_params = list(self.parameters())  # a plain list, made once
        self.by_param = {param: 1.0 + i for i, param in enumerate(self.parameters())}
        self.by_id = {id(self.fc.weight): 3.0}
        self.kept = weakref.ref(self.fc.weight)

    def norm(self) -> Tensor:
        return 1 + 1000 * self.fc.weight.detach().float().norm() % 1


def penalty(model: Seen, x: Tensor, params: list[Tensor]) -> Tensor:
    loss = model.fc(model.body(x)).float().square().mean()
    gradients = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    return loss + sum(each.square().sum() for each in gradients if each is not None)


def with_hook(model: Seen, x: Tensor) -> Tensor:
    hidden = model.body(x)
    hidden.register_hook(lambda gradient: gradient * model.norm())
    out: Tensor = model.fc(hidden)
    return out


def in_two_contexts(model: Seen, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        hidden = model.body(x)
    with torch.autocast(x.device.type, torch.bfloat16):
        out: Tensor = model.fc(hidden)
    return out


LOOKS: dict[str, Callable[[Seen, Tensor], Tensor]] = {
    "dtype": lambda m, x: (m.fc(m.body(x)).to(m.fc.weight.dtype) * 1.1).cumsum(1),
    "table by dtype": lambda m, x: m.fc(m.body(x)) * {torch.float32: 1.0, torch.bfloat16: 2.0}[m.fc.weight.dtype],
    "bytes": lambda m, x: m.fc(m.body(x)) * (1 + m.fc.weight.nbytes / 1000),
    "attribute": lambda m, x: m.fc(m.body(x)) * m.fc.weight.multiplier,  # type: ignore[operator]
    "getattr": lambda m, x: m.fc(m.body(x)) * getattr(m.fc.weight, "multiplier", 1.0),
    "table by parameter": lambda m, x: m.fc(m.body(x)) * m.by_param[m.fc.weight],
    "table by id": lambda m, x: m.fc(m.body(x)) * m.by_id.get(id(m.fc.weight), 1.0),
    "weak reference": lambda m, x: m.fc(m.body(x)) * (2.0 if m.kept() is m.fc.weight else 1.0),
    "gradients with respect to parameters": lambda m, x: penalty(m, x, list(m.parameters())),
    "with respect to those kept outside": lambda m, x: penalty(m, x, m.first_params),  # type: ignore[arg-type]
    "backward hook": with_hook,
    "checkpoint": lambda m, x: m.fc(checkpoint(m.body, x, use_reentrant=False)),
    "reentrant checkpoint": lambda m, x: m.fc(checkpoint(m.body, x.requires_grad_(), use_reentrant=True)),
    "two contexts of the user's": in_two_contexts,
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.quick(2)
@pytest.mark.sampled(2)
def test_code_sees_the_parameters_themselves(engine: Engine, policy: str, look: str) -> None:
    """W3: what user code asks of a weight, in forward and backward, it is told of the parameter: dtype, identity,
    attributes, values, and gradients with respect to it.
    """
    own_context = look == "two contexts of the user's"

    def trajectory(graph: str) -> list[Any]:
        torch.manual_seed(0)
        model = Seen().to(engine[0])
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        step = ampkit.graphed_step(
            lambda model, x: LOOKS[look](model, x.clone()).float().square().mean(),
            model,
            optimizer,
            policy=None if own_context else policy,
            graph=graph,
            on_failure="raise",
        )
        history = []
        for i in range(8):
            out = step(torch.full((2, 8), 0.1 * i + 0.1, device=engine[0]))
            history.append((out.loss, training_state(model, optimizer, step.scaler)))
        if graph != "off":
            assert step.replays > 0
            assert len(step._window._step._working) > 0 or look == "backward hook"
        return history

    with deterministic():
        assert_same(trajectory("off"), trajectory(engine[1]))


@pytest.mark.parametrize("recomputed", [False, True])
def test_no_weight_is_cast_by_itself(recomputed: bool) -> None:
    """G12: autocast takes the copies in place of casts, also where a backward computes a part of the forward again."""

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
        return x.float().square().mean()

    def casts(graph: str) -> int:
        model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        step = ampkit.graphed_step(loss_fn, model, optimizer, policy="bfloat16", graph=graph, on_failure="raise")
        for _ in range(5):
            step(torch.ones(2, 8))
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as found:
            step(torch.ones(2, 8))
        copies = [event for event in found.events() if event.name == "aten::copy_" and event.input_shapes[0] == [8, 8]]
        return sum(event.cpu_parent.name == "aten::_to_copy" for event in copies)

    assert casts("off") == 6 + 3 * recomputed  # each weight, its gradient, and each weight once more
    assert casts("emulate") == 0
