"""make_graphed_callables: bits of the callables without graphs, in any order of calls; nothing is left behind."""

import copy
import gc
import io
import itertools
import pickle
import random
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ENGINES, OPTIMIZERS, assert_same, deterministic, make_net, no_sync
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit import make_graphed_callables

Engine = tuple[str, str]


@pytest.fixture(autouse=True)
def repeatable_kernels() -> Iterator[None]:
    with deterministic():
        yield


def images(device: str, seed: int, size: int = 4) -> Tensor:
    return torch.randn(size, 3, 8, 8, generator=torch.Generator().manual_seed(seed)).to(device)


def rows(device: str, seed: int, size: int = 5, requires_grad: bool = False) -> Tensor:
    drawn = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed)).to(device)
    return drawn.requires_grad_(requires_grad)


def make_mlp(device: str, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).to(device)


def graphed(engine: Engine, callables: Any, *sample: Any, **options: Any) -> Any:
    """Graph one callable for these arguments. A warning fails the test (see pyproject.toml)."""
    return make_graphed_callables(callables, sample, graph=engine[1], **options)


def counts(module: Any) -> tuple[int, int, dict[str, int]]:
    forward = module.forward if isinstance(module, nn.Module) else module
    return forward.captures, forward.replays, dict(forward.eager)


def gradients(module: nn.Module, *more: Tensor) -> list[Tensor | None]:
    return [tensor.grad for tensor in (*module.parameters(), *more)]


PENDING = "an earlier call has yet to be backpropagated"
AUTOCASTS = [
    None,
    (torch.bfloat16, True),
    (torch.bfloat16, False),
    pytest.param((torch.float16, True), marks=pytest.mark.cuda),
    pytest.param((torch.float16, False), marks=pytest.mark.cuda),
]


def autocast(device: str, kind: tuple[torch.dtype, bool] | None) -> torch.autocast:
    if kind is None:
        return torch.autocast(device, enabled=False)
    return torch.autocast(device, dtype=kind[0], cache_enabled=kind[1])


# ------------------------------------------------------------------------------------------------------- training


def train(engine: Engine, kind: tuple[torch.dtype, bool] | None, optimizer: str, sample_in_autocast: bool) -> list[Any]:
    """Return outputs and state after each of ten steps. Modes, shapes and accumulation vary."""
    device, graph = engine
    if kind and kind[0] is torch.float16 and device == "cpu":
        pytest.skip("float16 on CUDA only")
    model = make_net(device)
    with autocast(device, kind if sample_in_autocast else None):
        make_graphed_callables(model, (images(device, 0),), graph=graph)
    opt = OPTIMIZERS[optimizer](model.parameters())
    scaler = torch.amp.GradScaler(device, init_scale=256.0, enabled=kind is not None and kind[0] is torch.float16)
    torch.manual_seed(5)
    history: list[Any] = []
    for i in range(10):
        if i in (4, 5):  # an epoch ends
            model.eval()
            with torch.no_grad(), autocast(device, kind):
                history.append(model(images(device, i)))
            model.train()
        opt.zero_grad()
        for part in range(1 + (i in (2, 7))):  # accumulation over two calls
            x = images(device, 10 * i + part, 3 if i == 8 else 4)
            with autocast(device, kind):
                out = model(x)
                loss = F.cross_entropy(out, torch.arange(len(x), device=device))
            scaler.scale(loss).backward()
            history.append(out.detach())
        history.append([param.grad.clone() for param in model.parameters()])
        scaler.step(opt)
        scaler.update()
        history.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    history.append(torch.get_rng_state())
    if device == "cuda":
        history.append(torch.cuda.get_rng_state())
    if graph != "off":
        captures, replays, eager = counts(model)
        assert captures == 2 + (kind is not None and not sample_in_autocast)
        assert (replays, eager) == (12, {"no_grad": 2})
    return history


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", AUTOCASTS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("sample_in_autocast", [False, True])
@pytest.mark.quick(4)
def test_g6_training_is_bitwise_ungraphed(
    engine: Engine, kind: tuple[torch.dtype, bool] | None, optimizer: str, sample_in_autocast: bool
) -> None:
    """G6: outputs, gradients, parameters, buffers and random state of ten steps, with and without autocast's cache."""
    expected = train((engine[0], "off"), kind, optimizer, sample_in_autocast)
    got = train(engine, kind, optimizer, sample_in_autocast)
    assert_same(expected, got)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shared", ["a tuple", "a handle", "nothing"])
@pytest.mark.parametrize("kind", [None, (torch.bfloat16, True)])
@pytest.mark.quick(3)
def test_g6_sections_of_a_network(engine: Engine, shared: str, kind: tuple[torch.dtype, bool] | None) -> None:
    """G6: modules and a loss function, made in one call, in several with one pool, or alone, with eager code between.

    The first module takes a dict with an unused input, as a function the loss has no parameters.
    """

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_mlp(engine[0], 2)

        def forward(self, parts: dict[str, Tensor]) -> Tensor:
            return self.inner(parts["x"])

    def run(graph: str) -> list[Any]:
        device = engine[0]
        torch.manual_seed(0)
        first, second, loss_fn = First(), make_mlp(device, 3), F.mse_loss
        parts: Any = (first, second, loss_fn)
        unused = torch.ones(2, device=device, requires_grad=True)
        samples = (
            ({"x": rows(device, 0), "unused": unused},),
            (rows(device, 0, requires_grad=True),),
            (rows(device, 0, requires_grad=True), rows(device, 1)),
        )
        options: dict[str, Any] = {"allow_unused_input": True, "graph": graph}
        with autocast(device, kind):
            if shared == "a tuple":
                parts = make_graphed_callables(parts, samples, **options)
                assert isinstance(parts, tuple)
            else:
                options["pool"] = (7, len(graph)) if shared == "a handle" else None
                pairs = zip(parts, samples, strict=True)
                parts = tuple(make_graphed_callables(part, sample, **options) for part, sample in pairs)
        assert parts[:2] == (first, second)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        history: list[Any] = []
        for i in range(4):
            optimizer.zero_grad()
            with autocast(device, kind):
                hidden = parts[0]({"x": rows(device, i), "unused": unused})
                loss = parts[2](parts[1](F.dropout(hidden.float(), 0.5)), rows(device, 90 + i))
            loss.backward()
            history += [loss.detach(), [grad.clone() for grad in gradients(nn.ModuleList(parts[:2]))]]
            optimizer.step()
        assert unused.grad is None
        if graph != "off":
            assert [counts(part)[1:] for part in parts] == [(4, {})] * 3
        return history

    assert_same(run("off"), run(engine[1]))


@pytest.mark.parametrize("engine", ENGINES)
def test_g6_no_parameters_and_no_gradients(engine: Engine) -> None:
    """G6: a module without parameters; nothing that requires grad; a frozen module; an output that is an input."""

    class Scale(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x * 3, x, (x > 0)

    module = graphed(engine, Scale(), rows(engine[0], 0))
    x = rows(engine[0], 1)
    kept = module(x)
    assert not any(out.requires_grad for out in module(rows(engine[0], 7)))
    assert_same(kept, (x * 3, x, x > 0))
    leaf = rows(engine[0], 2, requires_grad=True)
    tripled, same, positive = module(leaf)
    (tripled.sum() + 2 * same.sum()).backward()
    assert_same(leaf.grad, torch.full_like(leaf, 5))
    assert not positive.requires_grad
    assert same.data_ptr() != leaf.data_ptr()
    same = graphed(engine, lambda x: x, leaf)  # the gradient that comes in is the one that goes out
    grads = [torch.autograd.grad(same(leaf), leaf, torch.full_like(leaf, value))[0] for value in (2, 3)]
    assert_same(grads, [torch.full_like(leaf, value) for value in (2, 3)])
    frozen = make_mlp(engine[0]).requires_grad_(False)
    expected = frozen(x)
    graphed(engine, frozen, x)
    assert_same(frozen(x), expected)
    assert counts(frozen) == (1, 1, {})
    assert counts(module) == (2, 3, {})


@pytest.mark.parametrize("engine", ENGINES)
def test_g6_nothing_is_aliased(engine: Engine) -> None:
    """G6: later calls change neither outputs nor gradients. Two backward passes add their gradients once each."""
    device = engine[0]
    model, twin = make_mlp(device), make_mlp(device)
    graphed(engine, model, rows(device, 0, requires_grad=True))
    inputs = [rows(device, seed, requires_grad=True) for seed in range(4)]
    kept = []
    for x in inputs:
        out, expected = model(x), twin(x.detach())
        kept.append((out, expected))
        out.square().sum().backward()
        expected.square().sum().backward()
        assert_same(gradients(model), gradients(twin))  # the sum so far
    tensors = [out for out, _ in kept] + gradients(model) + [x.grad for x in inputs]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    for out, expected in kept:
        assert_same(out.detach(), expected.detach())
    before = [tensor.clone() for tensor in gradients(model, *inputs)]
    torch.autograd.grad(model(rows(device, 9)).sum(), list(model.parameters()))
    assert_same(gradients(model, *inputs), before)
    kept[0][0].data.zero_()  # the outputs are the caller's
    assert counts(model) == (2, 5, {})


# ------------------------------------------------------------------------------------------------- order of passes


@pytest.mark.parametrize("engine", ENGINES)
def test_g4_a_second_call_before_backward_is_eager(engine: Engine) -> None:
    """G4, G12: a replay would overwrite activations of the first call. Calls are replayed again when it is done."""
    device = engine[0]
    model, twin = make_mlp(device), make_mlp(device)
    graphed(engine, model, rows(device, 0))
    for order in ((0, 1), (1, 0)):
        outs = [[net(rows(device, seed)).square().sum() for seed in (1, 2)] for net in (model, twin)]
        for i in order:
            outs[0][i].backward()
            outs[1][i].backward()
        assert_same(gradients(model), gradients(twin))
    assert counts(model) == (1, 2, {PENDING: 2})
    dropped = model(rows(device, 1))
    del dropped
    model(rows(device, 2)).sum().backward()
    assert counts(model) == (1, 4, {PENDING: 2})
    # The variable of an old loss is still in scope.
    assert_same(model(rows(device, 3)).detach(), twin(rows(device, 3)).detach())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shared", ["a tuple", "a handle"])
def test_g4_any_order_of_calls_and_backward_passes(engine: Engine, shared: str) -> None:
    """G4: graphs that share memory are called and backpropagated in every order, also in two layouts."""
    device = engine[0]
    models, twins = ([make_mlp(device, seed) for seed in (1, 2, 3)] for _ in range(2))
    samples = tuple((rows(device, 0, requires_grad=True),) for _ in models)
    if shared == "a tuple":
        make_graphed_callables(tuple(models), samples, graph=engine[1])
    else:
        for model, sample in zip(models, samples, strict=True):
            make_graphed_callables(model, sample, graph=engine[1], pool=(3, 4))
    for calls, passes in itertools.product(itertools.permutations(range(3)), repeat=2):
        results = []
        for nets in (models, twins):
            leaves = [rows(device, i, size=5 + (i == 1), requires_grad=True) for i in range(3)]
            losses = {i: nets[i](leaves[i]).square().sum() for i in calls}
            for i in passes:
                losses[i].backward()
            results.append([gradients(nets[i], leaves[i]) for i in range(3)])
        assert_same(*results)
    assert [counts(model) for model in models] == [(1, 36, {}), (2, 36, {}), (1, 36, {})]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.quick(4)
def test_g4_random_orders(engine: Engine, seed: int) -> None:
    """G4, G6: random calls, backward passes (some of them twice), dropped calls and steps of three modules."""
    device, draw = engine[0], random.Random(seed)
    models, twins = ([make_net(device) if i == 1 else make_mlp(device, i) for i in range(3)] for _ in range(2))
    samples = tuple((images(device, 0) if i == 1 else rows(device, 0),) for i in range(3))
    make_graphed_callables(tuple(models), samples, graph=engine[1])
    optimizers = [torch.optim.SGD(nn.ModuleList(nets).parameters(), lr=0.01, fused=True) for nets in (models, twins)]
    pending: list[tuple[Tensor, Tensor, bool]] = []
    for number in range(60):
        action = draw.choice(["call", "call", "backward", "backward", "backward", "drop", "step"])
        if action == "call":
            i, size = draw.randrange(3), draw.choice([4, 4, 4, 5])
            x = images(device, number, size) if i == 1 else rows(device, number, size)
            losses = []
            for nets in (models, twins):
                torch.manual_seed(number)
                losses.append(nets[i](x).square().sum())
            assert_same(losses[0].detach(), losses[1].detach())
            pending.append((*losses, draw.random() < 0.3))
            del losses
        elif action == "step":
            pending.clear()  # their weights change
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        elif pending:
            left, right, twice = pending.pop(draw.randrange(len(pending)))
            if action == "backward":
                left.backward(retain_graph=twice)
                right.backward(retain_graph=twice)
                if twice:
                    pending.append((left, right, False))
            del left, right
        assert_same(gradients(nn.ModuleList(models)), gradients(nn.ModuleList(twins)))
    assert_same(dict(nn.ModuleList(models).state_dict()), dict(nn.ModuleList(twins).state_dict()))
    assert sum(model.forward.replays for model in models) > 5
    assert all(set(model.forward.eager) <= {PENDING} for model in models)


@pytest.mark.parametrize("engine", ENGINES)
def test_g4_backward_twice(engine: Engine) -> None:
    """G4: with retain_graph backward may run twice, and calls meanwhile are eager. Without it, an error is raised."""
    device = engine[0]
    model, twin = make_mlp(device), make_mlp(device)
    graphed(engine, model, rows(device, 0))
    for net in (model, twin):
        loss = net(rows(device, 1)).square().sum()
        loss.backward(retain_graph=True)
        net(rows(device, 2)).sum().backward()
        loss.backward()
    assert_same(gradients(model), gradients(twin))
    assert counts(model) == (1, 1, {PENDING: 1})
    out = model(rows(device, 1))
    out.sum().backward()
    model(rows(device, 2))
    with pytest.raises(RuntimeError, match=r"a later call was replayed .* Pass retain_graph=True"):
        out.sum().backward()


@pytest.mark.parametrize("engine", ENGINES)
def test_g4_calls_within_a_backward_pass(engine: Engine) -> None:
    """G4: reentrant checkpointing calls the module in backward. That call may be a replay, but is never captured."""
    device = engine[0]
    model, twin = make_mlp(device), make_mlp(device)
    graphed(engine, model, rows(device, 0, requires_grad=True))
    for size in (5, 7):
        for net in (model, twin):
            x = rows(device, 1, size, requires_grad=True)
            checkpoint(net, x, use_reentrant=True).square().sum().backward()
        assert_same(gradients(model), gradients(twin))
    assert counts(model) == (1, 1, {"no_grad": 2, "not captured": 1})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("constant_grad", [False, True])
def test_g6_double_backward_is_an_error(engine: Engine, constant_grad: bool) -> None:
    """G6: under create_graph gradients are right, but a gradient penalty on them raises, for any loss."""
    device = engine[0]
    model, twin = make_mlp(device), make_mlp(device)
    graphed(engine, model, rows(device, 0, requires_grad=True))
    firsts = []
    for net in (model, twin):
        x = rows(device, 1, requires_grad=True)
        out = net(x)
        loss = out.sum() if constant_grad else out.square().sum()
        firsts.append(torch.autograd.grad(loss, x, create_graph=True)[0])
    assert_same(firsts[0].detach(), firsts[1].detach())
    with pytest.raises(RuntimeError, match=r"differentiated once, not twice. Call close\(\)"):
        firsts[0].square().sum().backward()


@pytest.mark.parametrize("engine", ENGINES)
def test_g12_parameters_changed_between_forward_and_backward(engine: Engine) -> None:
    """G12: as without graphs, parameters that backward reads must not change, and others may."""
    device = engine[0]
    for net in (make_mlp(device), graphed(engine, make_mlp(device), rows(device, 0))):
        for name in ("2.weight", "0.weight", "0.bias"):
            out = net(rows(device, 1)).sum()
            with torch.no_grad():
                net.get_parameter(name).add_(1)
            if name == "2.weight":
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    out.backward()
            else:
                out.backward()
        assert net is not None


@pytest.mark.parametrize("engine", ENGINES)
def test_g12_buffers_replaced_between_forward_and_backward(engine: Engine) -> None:
    """G12: backward reads the buffers of its forward pass, whose memory is not reused before."""
    device = engine[0]
    model, twin = make_net(device).eval(), make_net(device).eval()
    graphed(engine, model, images(device, 0))
    losses = []
    for net in (model, twin):
        losses.append(net(images(device, 1)).square().sum())
        net.norm.running_mean, net.norm.running_var = torch.full((2, 8), 5.0, device=device)
    taken = [torch.full((8,), float("nan"), device=device) for _ in range(1000)]
    for loss in losses:
        loss.backward()
    assert_same(gradients(model), gradients(twin))
    assert len(taken) == 1000


@pytest.mark.parametrize("engine", ENGINES)
def test_g6_backward_is_outside_of_autocast(engine: Engine) -> None:
    """G6: backward is captured without autocast, though the capture is made within an autocast region."""
    device = engine[0]

    class Precise(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(device, enabled=False):
                return super().forward(x.float())

    torch.manual_seed(0)
    model = Precise(6, 6).to(device)
    twin = copy.deepcopy(model)
    with torch.autocast(device, dtype=torch.bfloat16):
        graphed(engine, model, rows(device, 0))
        loss = model(rows(device, 1)).square().sum()
        with pytest.warns(ampkit.CaptureWarning, match="backward begins under autocast"):
            loss.backward()
        torch.autograd.grad(model(rows(device, 1)).sum(), [model.weight])  # without another warning
        expected = twin(rows(device, 1)).square().sum()
    expected.backward()
    assert_same(gradients(model), gradients(twin))
    assert counts(model) == (1, 2, {})


@pytest.mark.parametrize("engine", ENGINES)
def test_g6_autocast_cache_is_part_of_the_layout(engine: Engine) -> None:
    """G6: with the cache, two uses of a weight share a cast and add gradients in bfloat16; without it they do not."""
    device = engine[0]

    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    torch.manual_seed(0)
    model = Twice(6, 6).to(device)
    twin = copy.deepcopy(model)
    graphed(engine, model, rows(device, 0))
    found = []
    for cached in (True, False, True):
        for net in (model, twin):
            net.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=cached):
                out = net(rows(device, 1))
            out.float().square().sum().backward()
        assert_same(gradients(model), gradients(twin))
        found.append(model.weight.grad.clone())
    assert not torch.equal(found[0], found[1])
    assert counts(model) == (3, 3, {})


@pytest.mark.parametrize("engine", ENGINES)
def test_g6_casts_of_an_input(engine: Engine) -> None:
    """G6: autocast keeps a cast of an input that is a leaf. Of one that a module returned, each use has its own."""
    device = engine[0]

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(x) * self.up(x)

    torch.manual_seed(0)
    model = Gate().to(device)
    twin = copy.deepcopy(model)
    sample = torch.randn(8, 32, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        graphed(engine, model, sample)
    found = []
    for is_leaf in (False, True, False):
        for net in (model, twin):
            x = torch.linspace(-1, 1, 256, device=device).reshape(8, 32).clone().requires_grad_()  # no view
            with torch.autocast(device, dtype=torch.bfloat16):
                out = net(x if is_leaf else x * 1.0)
            out.float().square().sum().backward()
            found.append(x.grad)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    assert torch.equal(found[4], found[5])
    assert not torch.equal(found[1], found[3])
    assert counts(model) == (2, 3, {})


# --------------------------------------------------------------------------------------------------- what is left


@pytest.mark.parametrize("engine", ENGINES)
def test_g6_warm_up_and_capture_leave_no_trace(engine: Engine) -> None:
    """G6: buffers, random numbers, gradients and autocast's cache stay the same, for the sample and a late capture.

    A backward pass that is still due works, too, because restored buffers do not count as changed.
    """
    device = engine[0]
    model, twin = make_net(device), make_net(device)
    for net in (model, twin):
        torch.manual_seed(2)
        F.cross_entropy(net(images(device, 1)), torch.arange(4, device=device)).backward()
    state, grads = copy.deepcopy(model.state_dict()), gradients(model)
    random = torch.get_rng_state(), torch.cuda.get_rng_state() if device == "cuda" else None
    values = [grad.clone() for grad in grads]
    graphed(engine, model, images(device, 0), num_warmup_iters=4)
    assert_same(dict(model.state_dict()), dict(state))
    assert all(left is right for left, right in zip(gradients(model), grads, strict=True))
    assert_same(gradients(model), values)
    assert_same((torch.get_rng_state(), torch.cuda.get_rng_state() if device == "cuda" else None), random)
    for net in (model, twin):
        torch.manual_seed(3)
        with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False):  # one cast would sum in bfloat16
            early = F.conv2d(images(device, 2), net.conv.weight)
            net.eval()
            evaluated = net(images(device, 2))  # saves running_mean
            net.train()
            out = net(images(device, 2, size=6))  # captures
            late = F.conv2d(images(device, 2), net.conv.weight)
        sum(part.float().square().sum() for part in (early, late, out, evaluated)).backward()
    assert_same(gradients(model), gradients(twin))
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))
    assert counts(model) == (2, 1, {"module.training is False": 1})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("refused", [False, True])
def test_g3_no_autograd_graph_is_left(engine: Engine, refused: bool) -> None:
    """G3: autograd graphs of warm-up and capture are freed at once, with memory and gradient accumulators."""
    layer = nn.Linear(6, 6).to(engine[0])
    alive: list[weakref.ref[Any]] = []

    class Mark:
        def __call__(self, grad: Tensor) -> None:
            pass

    def function(x: Tensor) -> Tensor:
        hidden = layer(x) if refused else x * 2
        mark = Mark()
        alive.append(weakref.ref(mark))
        hidden.register_hook(mark)
        return hidden.tanh()  # saves what it returns

    gc.disable()
    try:
        with pytest.warns(ampkit.CaptureWarning, match="gradient would be lost") if refused else nullcontext():
            graphed(engine, function, rows(engine[0], 0, requires_grad=True))
        assert alive
        assert not [mark for mark in alive if mark() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("engine", ENGINES)
def test_g6_casts_of_a_graph_are_not_seen_outside(engine: Engine) -> None:
    """G6: an autocast region uses the weight of a graphed module outside of it, before and after it changes."""
    device = engine[0]

    def run(graph: str) -> list[Any]:
        torch.manual_seed(0)
        layer = nn.Linear(6, 6).to(device)
        make_graphed_callables(layer, (rows(device, 0),), graph=graph)
        history: list[Any] = []
        for i in range(3):
            with torch.autocast(device, dtype=torch.bfloat16):
                out = layer(rows(device, i))
                outside = F.linear(rows(device, i), layer.weight)
            (out.sum() + outside.sum()).backward()
            history += [out.detach(), outside.detach()]
            with torch.no_grad():
                layer.weight.add_(1)
        return history

    assert_same(run("off"), run(engine[1]))


@pytest.mark.parametrize("engine", ENGINES)
def test_g12_close_and_collection(engine: Engine) -> None:
    """G12: graphs live as long as the module or a backward pass needs them; close restores `forward`."""
    device = engine[0]
    model, twin = make_mlp(device), make_mlp(device)
    graphed(engine, model, rows(device, 0))
    passes = next(iter(model.forward._graphs.values()))
    alive = weakref.ref(passes)
    del passes
    loss = model(rows(device, 1)).square().sum()
    forward = model.forward
    forward.close()
    assert "forward" not in vars(model)
    assert model.forward.__func__ is nn.Sequential.forward
    loss.backward()  # the graphs were kept for it
    twin(rows(device, 1)).square().sum().backward()
    assert_same(gradients(model), gradients(twin))
    assert_same(forward(rows(device, 2)).detach(), twin(rows(device, 2)).detach())
    assert forward.eager == {"closed": 1}
    del loss
    gc.collect()
    assert alive() is None
    graphed(engine, model, rows(device, 0))
    alive, module = weakref.ref(next(iter(model.forward._graphs.values()))), weakref.ref(model)
    model(rows(device, 1)).sum().backward()
    del model, forward
    gc.collect()
    assert (alive(), module()) == (None, None)


@pytest.mark.parametrize("engine", ENGINES)
def test_close_then_backward_again_is_an_error(engine: Engine) -> None:
    """G4: after close, a second backward pass through an earlier call raises an error that says why."""
    function = graphed(engine, torch.tanh, rows(engine[0], 0, requires_grad=True))
    out = function(rows(engine[0], 1, requires_grad=True))
    out.sum().backward()
    function.close()
    with pytest.raises(RuntimeError, match="the callable was closed"):
        out.sum().backward()


@pytest.mark.parametrize("engine", ENGINES)
def test_close_restores_an_attribute(engine: Engine) -> None:
    """A `forward` that was an attribute before is put back, an earlier graphed one too."""
    model = make_mlp(engine[0])
    graphed(engine, model, rows(engine[0], 0))
    first = model.forward
    graphed(engine, model, rows(engine[0], 0))
    assert model.forward is not first
    model(rows(engine[0], 1)).sum().backward()
    model.forward.close()
    assert model.forward is first
    first.close()
    assert "forward" not in vars(model)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), "torch.save"])
def test_copies_are_ungraphed(engine: Engine, how: Any) -> None:
    """A copy has no graphs, and computes with its own parameters."""
    model = graphed(engine, make_mlp(engine[0]), rows(engine[0], 0))
    if how == "torch.save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = how(model)
    with torch.no_grad():
        other[0].weight.zero_()
    x = rows(engine[0], 1)
    assert_same(other(x).detach(), nn.Sequential.forward(other, x).detach())
    assert not torch.equal(other(x), model(x))
    other(x).sum().backward()
    assert all(param.grad is None for param in model.parameters())


# --------------------------------------------------------------------------------------------------- what is captured


class Containers(nn.Module):
    """Nested containers in and out, keyword arguments, constants of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6))

    def forward(
        self, parts: dict[str, Any], *, factor: float = 1.0, mode: str | None = None, mask: Tensor | None = None
    ) -> dict[str, Any]:
        x, (y, power) = parts.pop("x"), parts["rest"]  # though warm-up and capture call this several times
        out = (x * self.weight + y) ** power * factor
        if mask is not None:
            out = out * mask
        return {"out": [out, (y.detach(), None)], "mode": mode, "sum": out.sum()}


@pytest.mark.parametrize("engine", ENGINES)
def test_g6_containers_keywords_and_constants(engine: Engine) -> None:
    """G6: each layout and each value of a constant is captured at its first call; outputs keep their tree."""
    device = engine[0]
    model, twin = Containers().to(device), Containers().to(device)

    def arguments(seed: int, **named: Any) -> tuple[Any, dict[str, Any]]:
        return {"x": rows(device, seed), "rest": (rows(device, seed + 50), named.pop("power", 2))}, named

    parts, named = arguments(0, factor=0.5)
    make_graphed_callables(model, (parts,), sample_kwargs=named, graph=engine[1])
    assert model.forward.captures == 1
    mask = torch.ones(6, device=device)
    cases = ({"factor": 0.5}, {"factor": 0.25}, {"power": 3}, {"mode": "a"}, {"mask": mask}, {"factor": 1}, {})
    for seed, case in enumerate(cases * 2):
        results = []
        for net in (model, twin):
            parts, named = arguments(seed, **case)
            result = net(parts, **named)
            (result["sum"] + result["out"][0].square().sum()).backward()
            assert not result["out"][1][0].requires_grad
            results.append({**result, "out": [result["out"][0].detach(), result["out"][1]]})
        results[0]["sum"], results[1]["sum"] = results[0]["sum"].detach(), results[1]["sum"].detach()
        assert_same(*results)
        assert_same(gradients(model), gradients(twin))
    assert counts(model) == (7, 14, {})


@pytest.mark.parametrize("engine", ENGINES)
def test_g6_several_shapes(engine: Engine) -> None:
    """G6: each combination of shape, strides and requires_grad has a graph. Too many are eager, with one warning."""
    device = engine[0]
    model, twin = make_mlp(device), make_mlp(device)
    graphed(engine, model, rows(device, 0), num_warmup_iters=1)

    def step(size: int, transposed: bool, requires_grad: bool) -> None:
        leaves = [rows(device, size, size, requires_grad) for _ in range(2)]
        for net, x in zip((model, twin), leaves, strict=True):
            net(x.t().contiguous().t() if transposed else x).square().mean().backward()
        assert_same(gradients(model, leaves[0]), gradients(twin, leaves[1]))

    kinds = list(itertools.product((5, 7), (False, True), (False, True)))
    for kind in kinds * 3:
        step(*kind)
    assert counts(model) == (8, 24, {})
    for size in range(10, 34):
        step(size, False, False)
    with pytest.warns(ampkit.CaptureWarning, match="32 captures so far.*pad shapes"):
        step(50, False, False)
    for size in (51, 52, 50, 5):
        step(size, False, False)
    assert counts(model) == (32, 49, {"not captured": 4})


@pytest.mark.parametrize("engine", ENGINES)
def test_g6_modes_and_frozen_parameters(engine: Engine) -> None:
    """G6: calls in the captured mode are replayed, others are eager. Modes of submodules and requires_grad are keys."""
    device = engine[0]
    model, twin = make_net(device).eval(), make_net(device).eval()
    graphed(engine, model, images(device, 0))

    def step() -> None:
        for net in (model, twin):
            torch.manual_seed(0)
            net.zero_grad()
            net(images(device, 1)).square().sum().backward()
        assert_same(gradients(model), gradients(twin))
        assert_same(dict(model.state_dict()), dict(twin.state_dict()))

    step()
    assert counts(model) == (1, 1, {})
    for net in (model, twin):
        net.train()
    step()
    assert counts(model) == (1, 1, {"module.training is True": 1})
    for net in (model, twin):
        net.eval()
        net.norm.train()
    step()
    assert model.forward.captures == 2
    for frozen in (True, False, True):
        for net in (model, twin):
            net.conv.requires_grad_(not frozen)
        step()
    assert counts(model) == (3, 5, {"module.training is True": 1})
    with torch.no_grad():
        model(images(device, 1))
    assert model.forward.eager["no_grad"] == 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["lstm", "tied", "checkpoint", "embedding", "nested", "parametrized", "marked"])
@pytest.mark.quick(4)
def test_kinds_of_modules(engine: Engine, kind: str) -> None:
    """G6: parameters in a list, shared, checkpointed, parametrized, with attributes, or with sparse gradients."""
    device = engine[0]

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh())

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_mlp("cpu")

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=False)

    class Marked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.weight.factor

    def marked() -> nn.Module:
        module = Marked(6, 6)
        module.weight.factor = 3.0
        return module

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.words(x.abs().long() % 9)

    def make(graph: str) -> nn.Module:
        torch.manual_seed(0)
        makers: dict[str, Callable[[], nn.Module]] = {
            "lstm": lambda: nn.LSTM(6, 5, num_layers=2),
            "tied": Tied,
            "checkpoint": Recomputed,
            "embedding": Words,
            "nested": lambda: nn.Sequential(make_mlp("cpu"), nn.Linear(6, 2)),
            "marked": marked,
            "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)),
        }
        module = makers[kind]().to(device)
        if kind == "nested":
            make_graphed_callables(module[0], (rows(device, 0),), graph=graph)
        return make_graphed_callables(module, (rows(device, 0),), graph=graph)

    model, twin = make(engine[1]), make("off")
    for i in range(3):
        for net in (model, twin):
            out = net(rows(device, i))
            (out[0] if kind == "lstm" else out).square().sum().backward()
        left, right = ([grad.cpu().to_dense() for grad in gradients(net)] for net in (model, twin))
        assert_same(left, right)
    assert counts(model) == (1, 3, {})
    if kind == "nested":
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.1)
        assert counts(model[0])[:2] == (1, 0)
        model[0](rows(device, 1)).sum().backward()  # on its own it is graphed still
        assert counts(model[0])[:2] == (1, 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_lazy_modules(engine: Engine) -> None:
    """A module that creates its parameters in the first call is graphed from the second call on."""
    model = graphed(engine, nn.Sequential(nn.LazyLinear(4), nn.ReLU()).to(engine[0]), rows(engine[0], 0))
    for i in range(3):
        model(rows(engine[0], i)).sum().backward()
    assert counts(model) == (1, 2, {"not captured": 1})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("late", [False, True])
def test_unused_inputs(engine: Engine, late: bool) -> None:
    """G6: unused inputs in the sample raise, as in torch; in later layouts calls are eager. If allowed, no gradient."""
    device = engine[0]

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, use: bool) -> Tensor:
            return self.unused(self.used(x)) if use else self.used(x)

    model = Half().to(device)
    if late:
        graphed(engine, model, rows(device, 0), True)
        with pytest.warns(ampkit.CaptureWarning, match=r"a parameter of shape \(6, 6\).*allow_unused_input=True"):
            model(rows(device, 0), False).sum().backward()
        assert counts(model) == (1, 0, {"not captured": 1})
    else:
        with pytest.raises(RuntimeError, match=r"a parameter of shape \(6, 6\).*allow_unused_input=True"):
            graphed(engine, model, rows(device, 0), False)
        assert "forward" not in vars(model)
        graphed(engine, model, rows(device, 0), False, allow_unused_input=True)
        model(rows(device, 0), False).sum().backward()
        assert counts(model) == (1, 1, {})
    assert [param.grad is None for param in model.parameters()] == [False, False, True, True]


@pytest.mark.parametrize("engine", ENGINES)
def test_outputs_that_the_loss_leaves_out(engine: Engine) -> None:
    """G6: a parameter that only they use gets no gradient. With zeros, an optimizer would move it."""
    device = engine[0]

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.heads = nn.Linear(6, 6), nn.ModuleList([nn.Linear(6, 2) for _ in range(2)])

        def forward(self, x: Tensor) -> list[Tensor]:
            hidden = self.trunk(x).tanh()
            return [head(hidden) for head in self.heads]

    torch.manual_seed(0)
    model = Heads().to(device)
    twin = copy.deepcopy(model)
    graphed(engine, model, rows(device, 0))
    for heads in ((0, 1), (0,), (1,)):
        for net in (model, twin):
            net.zero_grad()
            outs = net(rows(device, 1))
            sum(outs[i].square().sum() for i in heads).backward()
        assert_same(gradients(model), gradients(twin))
    assert counts(model) == (1, 3, {})


# ------------------------------------------------------------------------------------------------------------ hooks


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("before", [True, False])
def test_g6_hooks_of_the_module_run_around_the_graph(engine: Engine, before: bool) -> None:
    """G6: forward, backward and parameter hooks run, whether they are registered before or after graphing."""
    device = engine[0]

    def run(graph: str) -> list[Any]:
        model, log = make_mlp(device), []

        def register() -> None:
            model.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
            model.register_forward_hook(lambda _, args, out: log.append(args[0].detach()) or out + 1)
            model.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 3,))
            model.register_full_backward_hook(lambda _, ins, outs: log.append((ins, outs)) or (ins[0] * 5,))
            model[0].weight.register_hook(lambda grad: grad * 7)
            model[2].bias.register_post_accumulate_grad_hook(lambda param: log.append(param.grad.clone()))

        if before:
            register()
        make_graphed_callables(model, (rows(device, 0, requires_grad=True),), graph=graph)
        if not before:
            register()
        assert not log
        for i in range(3):
            x = rows(device, i, requires_grad=True)
            model(x).square().sum().backward()
            log += [x.grad, *(grad.clone() for grad in gradients(model))]
        if graph != "off":
            assert counts(model) == (1, 3, {})
        return log

    assert_same(run("off"), run(engine[1]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("of_all", [False, True])
def test_g6_hooks_of_submodules(engine: Engine, of_all: bool) -> None:
    """G6: hooks of submodules are captured. One that is registered later, on one or on all modules, makes calls eager
    until it is removed."""
    device = engine[0]

    def register(net: nn.Module) -> Any:
        net[2].register_full_backward_hook(lambda _, ins, outs: (ins[0] * 5,))
        return net[0].register_forward_hook(lambda _, args, out: out * 2)

    model, twin = make_mlp(device), make_mlp(device)
    register(model), register(twin)
    graphed(engine, model, rows(device, 0))

    def step() -> None:
        for net in (model, twin):
            net(rows(device, 1)).square().sum().backward()
        assert_same(gradients(model), gradients(twin))

    step()
    if of_all:
        handles = [register_module_forward_hook(lambda _, args, out: out + 1)]
    else:
        handles = [net[1].register_forward_hook(lambda _, args, out: out + 1) for net in (model, twin)]
    with pytest.warns(ampkit.CaptureWarning, match="a hook was registered on a submodule since the capture"):
        step()
    step()
    for handle in handles:
        handle.remove()
    step()
    assert counts(model) == (1, 2, {"not captured": 2})


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("engine", ENGINES)
def test_g6_legacy_backward_hooks(engine: Engine) -> None:
    """G6: a module with a non-full backward hook is refused; if it comes later, calls are eager with a warning."""
    model = make_mlp(engine[0])
    handle = model.register_backward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="Use register_full_backward_hook"):
        graphed(engine, model, rows(engine[0], 0))
    handle.remove()
    graphed(engine, model, rows(engine[0], 0))
    model.register_backward_hook(lambda *_: None)
    with pytest.warns(ampkit.CaptureWarning, match="Use register_full_backward_hook"):
        model(rows(engine[0], 0)).sum().backward()
    model(rows(engine[0], 0))
    assert counts(model) == (1, 0, {"register_backward_hook": 2})


# ----------------------------------------------------------------------------------------- what cannot be captured


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("change", ["replaced", "wrapped", "moved", "assigned"])
@pytest.mark.quick(2)
def test_g12_parameters_replaced_or_moved(engine: Engine, change: str) -> None:
    """G12: graphs of the old memory are freed with one warning, unless a backward pass needs them."""
    device = engine[0]
    model, twin = make_mlp(device), make_mlp(device)
    graphed(engine, model, rows(device, 0))
    old = [net(rows(device, 1)).square().sum() for net in (model, twin)]

    def alter(net: nn.Module) -> None:
        fresh = make_mlp(device, seed=4).state_dict()
        if change == "replaced":
            net[0].weight = nn.Parameter(fresh["0.weight"])
        elif change == "wrapped":
            net[0].weight = nn.Parameter(net[0].weight.data)
        elif change == "moved":
            for name, param in net.named_parameters():
                param.data = fresh[name].clone()
        else:
            net.load_state_dict(fresh, assign=True)

    for round_ in range(2):
        alter(model), alter(twin)
        if round_ == 0:
            with pytest.warns(ampkit.CaptureWarning, match="Each such change takes a new capture"):
                model(rows(device, 2)).square().sum().backward()
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ampkit.CaptureWarning)  # another parameter may be the first to differ
                model(rows(device, 2)).square().sum().backward()
        twin(rows(device, 2)).square().sum().backward()
        assert_same(gradients(model), gradients(twin))
    for loss in old:
        loss.backward()
    assert_same(gradients(model), gradients(twin))
    assert counts(model) == (3, 3, {})


class Attribute(nn.Linear):
    """Changes itself or its input in forward, in a way that a replay would not."""

    runs = 0

    def __init__(self, kind: str) -> None:
        super().__init__(6, 6)
        self.kind = kind
        self.calls = 0
        self.hidden: Tensor | None = None
        self.held = [nn.Parameter(torch.ones(6))] if kind == "parameter outside" else []
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x.clone())
        self.calls += 1
        Attribute.runs += 1
        if self.kind == "buffer rebound":
            self.mean = 0.9 * self.mean + out.detach().mean(0)
        elif self.kind == "loss on the side":
            self.hidden = out.square().mean()
        elif self.kind == "input changed":
            x.add_(1)
        elif self.kind == "gradient asked":
            x.requires_grad_()
        elif self.kind == "count returned":
            return out, self.calls
        elif self.kind == "object returned":
            return out, {1, 2}
        elif self.kind == "parameter outside":
            return out * self.held[0]
        elif self.kind == "fails in backward":
            out.register_hook(self.fail)
        return out

    def fail(self, grad: Tensor) -> None:
        if self.calls > 3:
            raise ValueError("a mistake of the user")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("buffer rebound", r"Attribute.mean: made or rebound in forward"),
        ("loss on the side", r"Attribute.hidden: made or rebound in forward.*Return it"),
        ("input changed", r"writes into its input"),
        ("gradient asked", r"calls requires_grad_\(\) on an argument"),
        ("count returned", r"returned something else each time"),
        ("object returned", r"returned a set, which a replay cannot compute anew"),
        ("parameter outside", r"a tensor of shape \(6,\) that requires grad and is neither"),
    ],
)
@pytest.mark.quick(4)
def test_what_a_replay_would_not_do_is_eager(engine: Engine, kind: str, says: str) -> None:
    """G6: one warning names the change and it is undone. Every call is eager, with its effects on module and input."""
    device = engine[0]

    def run(graph: str) -> list[Any]:
        torch.manual_seed(0)
        with torch.device(device):  # for tensors in a list, too
            model = Attribute(kind)
        if graph == "off":
            make_graphed_callables(model, (rows(device, 0),), graph=graph)
        else:
            with pytest.warns(ampkit.CaptureWarning, match=says) as caught:
                graphed(engine, model, rows(device, 0))
            assert [warning.filename for warning in caught] == [__file__]
        log: list[Any] = [model.mean.clone(), model.hidden]
        runs = Attribute.runs
        for i in range(2):
            x = rows(device, i)
            out = model(x)
            (out[0] if isinstance(out, tuple) else out).sum().backward()
            log += [x, model.calls, model.mean.clone(), model.weight.grad.clone(), model.hidden is None]
        log += [held.grad for held in model.held]
        if graph != "off":
            assert counts(model) == (0, 0, {"not captured": 2})
        assert Attribute.runs - runs == 2  # it is not tried again
        return log

    assert_same(run("off"), run(engine[1]))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_callable_that_fails(engine: Engine) -> None:
    """An error in the sample is raised as it is. In a later layout the call is eager, and raises the same error."""
    device = engine[0]
    broken = Attribute("fails in backward").to(device)
    broken.calls = 10
    with pytest.raises(ValueError, match="a mistake of the user"):
        graphed(engine, broken, rows(device, 0))
    model = Attribute("fails in backward").to(device)
    graphed(engine, model, rows(device, 0), num_warmup_iters=1)
    model.calls = 3
    with pytest.warns(
        ampkit.CaptureWarning, match=rf"{re.escape(__file__)}:\d+: `raise ValueError.*a mistake of the user"
    ):
        out = model(rows(device, 0, size=2))
    with pytest.raises(ValueError, match="a mistake of the user"):
        out.sum().backward()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_function_that_holds_parameters(engine: Engine) -> None:
    """G6: with torch's function their gradients are lost. Here the function stays eager, and a warning says why."""
    layer = nn.Linear(6, 6).to(engine[0])
    with pytest.warns(ampkit.CaptureWarning, match="its gradient would be lost"):
        function = graphed(engine, lambda x: layer(x).tanh(), rows(engine[0], 0))
    function(rows(engine[0], 1)).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("engine", ENGINES)
def test_inputs_that_no_graph_takes(engine: Engine) -> None:
    """G6: calls with a sparse tensor or an unhashable leaf are eager, with one warning that has the leaf's path."""
    device = engine[0]
    function = graphed(engine, lambda x, more=None: x.to_dense() * 2, rows(device, 0))
    dense = torch.eye(3, device=device)
    with pytest.warns(ampkit.CaptureWarning, match=r"batch\[0\] has layout torch.sparse_coo.*Such calls"):
        assert_same(function(dense.to_sparse()), dense * 2)
    with pytest.warns(ampkit.CaptureWarning, match=r"batch\['more'\] is a set, which is neither"):
        function(dense, more={1})
    function(dense, more={1})
    function(dense.to_sparse())
    assert counts(function) == (1, 0, {"not captured": 4})


def test_on_a_cpu_callables_are_eager() -> None:
    """G1: graph="auto" without CUDA warns once and returns eager callables; graph="off" does not warn."""
    model, function = make_mlp("cpu"), torch.tanh
    with pytest.warns(
        ampkit.CaptureWarning, match="the tensors are on cpu, and CUDA graphs need a CUDA device"
    ) as said:
        model, function = make_graphed_callables((model, function), ((rows("cpu", 0),), (rows("cpu", 0),)))
    assert len(said) == 1
    function(model(rows("cpu", 1))).sum().backward()
    assert_same(gradients(model)[0] is None, False)
    assert (model.forward.replays, function.replays) == (0, 0)
    model.forward.close()
    make_graphed_callables(model, (rows("cpu", 0),), graph="off")


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((nn.Tanh(), torch.ones(2)), {}, r"sample_args=Tensor\): expected a tuple.*write sample_args=\(x,\)"),
        ((3, (torch.ones(2),)), {}, r"callables=3\): expected a module, a function or a tuple of them"),
        (((nn.Tanh(), nn.Tanh()), ((torch.ones(2),),)), {}, "2 callables, but 1 sample_args"),
        (
            ((nn.Tanh(),), ((torch.ones(2),),)),
            {"sample_kwargs": ()},
            "1 callables, but 1 sample_args and 0 sample_kwargs",
        ),
        ((nn.Tanh(), (torch.ones(2),)), {"sample_kwargs": 3}, r"sample_kwargs=int\): expected a dict"),
        (
            (nn.Tanh(), (torch.ones(2),)),
            {"num_warmup_iters": -1},
            r"num_warmup_iters=-1\): expected an int of at least 0",
        ),
        ((nn.Tanh(), (torch.ones(2),)), {"graph": "on"}, "expected one of 'auto', 'emulate', 'off'"),
        ((nn.Tanh(), (torch.ones(2),)), {"pool": 3}, r"pool=int\): expected a handle"),
    ],
)
def test_wrong_arguments(arguments: Any, options: dict[str, Any], says: str) -> None:
    """The error says what came and what to pass instead."""
    with pytest.raises(ValueError, match=says):
        make_graphed_callables(*arguments, **{"graph": "emulate", **options})


@pytest.mark.parametrize("engine", ENGINES)
def test_every_call_of_torch_is_taken(engine: Engine) -> None:
    """G6: torch's positional arguments, a list as sample, no warm-up, and a tuple with one callable work."""
    x = rows(engine[0], 0, requires_grad=True)
    (function,) = make_graphed_callables((torch.tanh,), ((x,),), 0, False, None, graph=engine[1])
    assert_same(function(x).detach(), x.detach().tanh())
    function = make_graphed_callables(torch.tanh, [x], 11, True, (1, 2), graph=engine[1])
    assert counts(function) == (1, 0, {})
    assert function.__name__ == "tanh"
    assert_same(pickle.loads(pickle.dumps(function))(x).detach(), x.detach().tanh())


# -------------------------------------------------------------------------------------------------------- CUDA only


@pytest.mark.cuda
def test_no_call_waits_for_the_device() -> None:
    """G6: forward, backward, accumulation and eager calls of a graphed module do not wait for the device."""
    model = graphed(("cuda", "auto"), make_net("cuda"), images("cuda", 0))
    x, labels = images("cuda", 1), torch.arange(4, device="cuda")
    F.cross_entropy(model(x), labels).backward()
    with no_sync():
        for _ in range(3):
            pending = model(x)
            F.cross_entropy(model(x), labels).backward()
            F.cross_entropy(pending, labels).backward()
    assert counts(model) == (1, 4, {PENDING: 3})


@pytest.mark.cuda
def test_g4_streams_take_turns() -> None:
    """G4: replays on one stream wait for those on another, because both use the same static and temporary memory."""
    models, twins = ([make_mlp("cuda", seed) for seed in (1, 2)] for _ in range(2))
    big = tuple((rows("cuda", 0, size=20000),) for _ in models)
    make_graphed_callables(tuple(models), big)
    streams = [torch.cuda.Stream() for _ in range(3)]
    inputs = [rows("cuda", seed, size=20000) for seed in range(12)]
    torch.cuda.synchronize()

    def run(nets: list[nn.Module]) -> list[Any]:
        got: list[Any] = []
        for i, x in enumerate(inputs):
            net = nets[i % 2]
            with torch.cuda.stream(streams[i % 3]):
                out = net(x)
                got.append((out.detach(), *torch.autograd.grad(out.square().sum(), list(net.parameters()))))
                del out
        torch.cuda.synchronize()
        return got

    assert_same(run(twins), run(models))
    assert [counts(model) for model in models] == [(1, 6, {})] * 2


@pytest.mark.cuda
def test_g3_close_returns_the_memory() -> None:
    """G3: close frees the memory of graphs, static inputs and pools, each time."""
    model = make_mlp("cuda")
    x = rows("cuda", 0, size=200000)

    def reserved() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    graphed(("cuda", "auto"), model, x).forward.close()  # what cuBLAS and autograd keep
    before = reserved()
    for _ in range(5):
        graphed(("cuda", "auto"), model, x)
        torch.autograd.grad(model(x).sum(), list(model.parameters()))
        assert reserved() > before
        model.forward.close()
        after = reserved()
        assert after <= before  # less, if something of an earlier test was released in between
        before = after


@pytest.mark.cuda
@pytest.mark.parametrize("handle", ["torch's", "graph.pool()"])
def test_g6_a_pool_is_shared(handle: str) -> None:
    """G6: backward graphs with one handle of torch's share temporary memory, also with a graph that is freed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")
    pool = graph.pool() if handle == "graph.pool()" else torch.cuda.graph_pool_handle()
    x = torch.zeros(4 << 20, device="cuda", requires_grad=True)
    sizes, functions = [], []
    for _ in range(2):
        functions.append(make_graphed_callables(lambda x: x.tanh().exp().sin().tanh().exp(), (x,), pool=pool))
        sizes.append(functions[-1]._shared._pool.nbytes)
    assert functions[0]._shared is functions[1]._shared
    assert 0 < sizes[1] - sizes[0] < sizes[0]
    for function in functions:
        (grad,) = torch.autograd.grad(function(x).sum(), x)
        (expected,) = torch.autograd.grad(x.tanh().exp().sin().tanh().exp().sum(), x)
        assert_same(grad, expected)
    shared = functions[0]._shared
    functions.clear()
    del function
    gc.collect()
    again = make_graphed_callables(torch.tanh, (x,), pool=pool)
    assert again._shared is shared
    assert_same(again(x).detach(), x.detach().tanh())
    graph.replay()


@pytest.mark.cuda
@pytest.mark.parametrize("fault", ["item", "exception", "generator", "host tensor", "host buffer", "host output"])
def test_g2_what_cuda_cannot_capture_is_eager(fault: str) -> None:
    """G2: a warning names the line. The module is as before, other graphs work, and other modules are captured."""

    class Faulty(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 6)
            self.generator = torch.Generator("cuda")
            self.register_buffer("seen", torch.zeros((), device="cpu" if fault == "host buffer" else "cuda"))

        def forward(self, x: Tensor, factor: Tensor) -> Any:
            if fault != "host buffer":
                self.seen.add_(1)
            out = super().forward(F.dropout(x, 0.5)) * factor
            if fault == "item":
                out = out * float(out.detach().sum() > 0)  # HERE
            if fault == "exception" and torch._C._cuda_isCurrentStreamCapturing():  # which user code can ask, too
                raise ValueError("a mistake of the user")  # HERE
            if fault == "generator":
                out = out + torch.rand(6, device="cuda", generator=self.generator)  # HERE
            return (out, torch.ones(2)) if fault == "host output" else out

    def make() -> nn.Module:
        torch.manual_seed(0)
        made = Faulty()
        made.weight.data, made.bias.data = made.weight.detach().cuda(), made.bias.detach().cuda()
        return made

    model, twin = make(), make()
    other, other_twin = graphed(("cuda", "auto"), make_net("cuda"), images("cuda", 0)), make_net("cuda")
    factor = torch.tensor(2.0, device="cpu" if fault == "host tensor" else "cuda")
    state, drawn = copy.deepcopy(model.state_dict()), torch.cuda.get_rng_state()
    with pytest.warns(ampkit.CaptureWarning) as said:
        graphed(("cuda", "auto"), model, rows("cuda", 0), factor)
    assert len(said) == 1
    lines = Path(__file__).read_text().splitlines()
    if fault in ("item", "exception", "generator"):
        number = int(re.search(rf"{re.escape(__file__)}:(\d+): ", str(said[0].message)).group(1))
        assert lines[number - 1].endswith("# HERE")
    assert_same(dict(model.state_dict()), dict(state))
    assert_same(torch.cuda.get_rng_state(), drawn)
    model.generator.manual_seed(1), twin.generator.manual_seed(1)
    for nets in ((model, other), (twin, other_twin)):
        torch.manual_seed(3)
        for i in range(2):
            out = nets[0](rows("cuda", i), factor)
            (out[0] if isinstance(out, tuple) else out).square().sum().backward()
            F.cross_entropy(nets[1](images("cuda", i)), torch.arange(4, device="cuda")).backward()
    assert_same(gradients(model), gradients(twin))
    assert_same(gradients(other), gradients(other_twin))
    assert counts(model) == (0, 0, {"not captured": 2})
    assert counts(other) == (1, 2, {})
    late = graphed(("cuda", "auto"), make_net("cuda"), images("cuda", 0))
    late(images("cuda", 1)).sum().backward()
    assert counts(late) == (1, 1, {})


@pytest.mark.cuda
def test_within_another_capture_it_is_eager() -> None:
    """A graphed step captures the operations of a graphed part, not a launch of its graph."""

    def run(graph: str) -> dict[str, Tensor]:
        model = make_mlp("cuda")
        part = make_graphed_callables(model[0], (rows("cuda", 0),), graph=graph)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        step = ampkit.graphed_step(
            lambda net, x: net(x).square().mean(), model, optimizer, graph=graph, on_failure="raise"
        )
        for i in range(6):
            step(rows("cuda", i))
        if graph == "auto":
            assert step.replays == 3
            assert part.forward.eager == {"in the capture of another graph": 2}  # once in the rehearsal
        return dict(model.state_dict())

    assert_same(run("off"), run("auto"))


class Slope(nn.Linear):
    """A layer that asks autograd for the slope of its output for a while, and scales the output by it."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            with torch.enable_grad():
                x.requires_grad_().register_hook(lambda grad: grad * 2)
                (slope,) = torch.autograd.grad(super().forward(x).square().sum(), x)
            x.requires_grad_(False)
            x = x * slope
        return super().forward(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_inputs_are_new_for_autograd_in_each_pass(engine: Engine) -> None:
    """What a pass asks of autograd for an input is over with it: hooks do not add up, and the input is copied to."""
    results = []
    for graph in ("off", engine[1]):
        torch.manual_seed(0)
        model = graphed((engine[0], graph), Slope(6, 6).to(engine[0]), rows(engine[0], 0))
        batches = [rows(engine[0], i) for i in range(4)]
        for x in batches:
            model(x).square().sum().backward()
        assert not any(x.requires_grad for x in batches)
        results.append([*gradients(model), *batches])
    assert_same(*results)
    assert counts(model) == (1, 4, {})
