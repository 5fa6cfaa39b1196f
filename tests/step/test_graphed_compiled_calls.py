"""`graphed(compile=...)`: what a function does with its modules, and what follows where they cannot be compiled."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import (
    COMPILER,
    assert_same,
    bits,
    marked_line,
)
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ampkit

Engine = tuple[str, str]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def small(loss_of: Callable[[nn.Module, Tensor], Tensor], graph: str, **options: Any) -> tuple[Any, nn.Module]:
    """Return an update of a small network by this loss, and the network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def update(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss

    options = {"modules": (model,), "optimizers": (optimizer,), "compile": "default", **options}
    return ampkit.graphed(**options, graph=graph)(update), model


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def state_behind(function: Any, model: nn.Module, calls: int = 7) -> list[Any]:
    """Return what calls return, and leave in the network."""
    outs = [function(torch.full((3, 4), 0.25 * i)) for i in range(calls)]
    return [outs, {name: bits(value) for name, value in model.state_dict().items()}]


@pytest.mark.parametrize("graph", ["off", "emulate"])
def test_a_compilation_that_fails(graph: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is called as eager code at its place, with the bits of a plain loop, and the warning says why."""

    def failing(graph: Any, inputs: Any, config_patches: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(COMPILER, lambda: failing)
    plain = state_behind(*small(mean_square, "off", compile=None))
    function, model = small(mean_square, graph)
    with pytest.warns(ampkit.AmpkitWarning, match=r"graphed\(compile='default'\): not compiled: model, since"):
        found = state_behind(function, model)
    assert_same(found, plain)
    assert [line.split(", since")[0] for line in function.report().compiled] == ["not compiled: model"]
    assert function.replays == (0 if graph == "off" else 4)
    function, model = small(mean_square, graph, on_failure="raise")
    function(torch.ones(3, 4))
    function(torch.ones(3, 4))
    with pytest.raises(ampkit.CaptureError, match=r"not compiled: model, since .*no such kernel"):
        function(torch.ones(3, 4))


@pytest.mark.usefixtures("fast")
@pytest.mark.filterwarnings("ignore:graphed.* the variable bad:ampkit.CaptureWarning")
def test_an_error_of_the_users() -> None:
    """An error in a first call, or in one that compiles, comes out as it is; the next call goes on."""
    bad = [False]

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        if bad[0]:
            raise KeyError("mine")
        return y.square().mean()

    for at in (0, 1):
        function, _ = small(loss_of, "emulate", on_failure="raise")
        for i in range(8):
            bad[0] = i == at
            with pytest.raises(KeyError, match="mine") if bad[0] else nullcontext():
                function(torch.ones(3, 4))
        assert function.replays >= 3
        (line,) = function.report().compiled
        assert line == "compiled: forward and backward of model, for 1 layout(s) of the arguments"


def twice(model: nn.Module, x: Tensor) -> Tensor:
    """Return a loss with a penalty on the gradient of the inputs."""
    inputs = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).tanh().sum(), inputs, create_graph=True)
    return mean_square(model, x) + gradient.square().sum()


def retained(model: nn.Module, x: Tensor) -> Tensor:
    """Return one of two losses of an output, of which the other had its backward."""
    y = model(x)
    y.square().mean().backward(retain_graph=True)
    return y.mean()


def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False).square().mean()


def again(model: nn.Module, x: Tensor) -> Tensor:
    """Call it more often than torch compiles a function by default, in several shapes and modes."""
    with torch.no_grad():
        wanted = model(x)
    return sum((model(x[:i]).square().mean() for i in (2, 3)), mean_square(model, x + wanted.mean()))


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("loss_of", [twice, retained, checkpointed, again])
def test_what_a_function_does_with_modules(loss_of: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Calls have the bits of a plain loop. A module that torch.compile cannot differentiate twice is left out."""
    plain = state_behind(*small(loss_of, "off", compile=None))
    for graph in ("off", "emulate"):
        torch.compiler.reset()
        function, model = small(loss_of, graph)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ampkit.AmpkitWarning)
            assert_same(state_behind(function, model), plain, graph)
        left_out = "not compiled: model, since gradients of gradients go through it"
        assert [left_out in str(each.message) for each in warned] == [True] * (loss_of is twice)
        (line,) = function.report().compiled
        assert line == left_out if loss_of is twice else line.startswith("compiled: forward and backward of model")
        assert function.replays == (0 if graph == "off" else 4)


def broken(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()  # HERE broken
    return x + 1


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](broken(self.layers[0](x)))


@pytest.mark.usefixtures("fast")
def test_a_graph_break() -> None:
    """Its line is named, and the parts around it are compiled."""
    model = Broken()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    @ampkit.graphed(modules=(model,), optimizers=(optimizer,), compile="default", graph="emulate", on_failure="raise")
    def update(x: Tensor) -> None:
        optimizer.zero_grad()
        mean_square(model, x).backward()
        optimizer.step()

    update(torch.ones(3, 4))
    with pytest.warns(ampkit.AmpkitWarning, match="a graph break") as warned:
        update(torch.ones(3, 4))
    assert marked_line(__file__, "broken") in str(warned[0].message)
    for _ in range(3):
        update(torch.ones(3, 4))
    assert update.replays == 2
    assert update.report().compiled[1].startswith("graph break: ")


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("graph", ["off", "emulate"])
def test_nothing_to_compile(graph: str) -> None:
    """A function that calls single layers alone is captured as it is, which is said once."""

    def layer_by_layer(model: nn.Module, x: Tensor) -> Tensor:
        for layer in model:  # type: ignore[attr-defined]  # of nn.Sequential
            x = layer(x)
        return x.square().mean()

    plain = state_behind(*small(layer_by_layer, "off", compile=None))
    function, model = small(layer_by_layer, graph)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = state_behind(function, model)
    assert_same(found, plain)
    assert ["calls no module itself" in str(each.message) for each in warned] == [True]


def test_wrong_use() -> None:
    """What cannot be compiled is refused where it is decorated, with what to write."""

    def update(x: Tensor) -> None: ...

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"graphed\(compile='fast'\): expected one of 'default', 'max'"):
        ampkit.graphed(compile="fast")
    with pytest.raises(ValueError, match=r"graphed\(compile='max'\): modules=\(\) declares no module"):
        ampkit.graphed(modules=(), compile="max", graph="off")(update)
    compiled = torch.compile(model[0], backend=aot_eager)
    for module, name in ((compiled, r"modules\[0\]"), (nn.Sequential(compiled), r"modules\[0\].0")):
        with pytest.raises(ValueError, match=rf"graphed\(compile='default'\): {name} is compiled already"):
            ampkit.graphed(modules=(module,), compile="default", graph="off")(update)
    with pytest.raises(ValueError, match="update is compiled already"):
        ampkit.graphed(modules=(model,), compile="default", graph="off")(torch.compile(update, backend=aot_eager))


def test_modules_of_several_processes() -> None:
    """Modules under DDP are for graphed_step."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(nn.Linear(4, 4))
        with pytest.raises(NotImplementedError, match=r"graphed\(compile='default'\): modules under Distributed"):
            ampkit.graphed(modules=(nn.Sequential(wrapped),), compile="default", graph="off")(print)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("graph", ["off", "emulate"])
def test_found_modules_that_are_compiled_already(graph: str) -> None:
    """What the first call finds is refused as what is declared: no call is compiled, and a warning says so."""
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend=aot_eager)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    @ampkit.graphed(compile="default", graph=graph)
    def update(x: Tensor) -> None:
        optimizer.zero_grad()
        mean_square(model, x).backward()
        optimizer.step()

    with pytest.warns(ampkit.AmpkitWarning, match="is compiled already. Pass it as it was"):
        update(torch.ones(3, 4))
    for _ in range(5):
        update(torch.ones(3, 4))
    assert update.replays == 0
