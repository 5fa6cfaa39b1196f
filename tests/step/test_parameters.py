"""The list of a model's parameters: that of `model.parameters()`, and the same object while nothing changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same
from torch import Tensor, nn

import ampkit


def parameters_of(model: nn.Module) -> Callable[[], dict[int, nn.Parameter]]:
    """Return what lists the parameters of a step's model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ampkit.graphed_step(lambda model, x: model(x).sum(), model, optimizer, graph="off")
    return step._window._step._parameters


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4, bias=False)))
    model[2][0].weight = model[0].weight
    return model


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "a parameter is replaced": lambda model: setattr(model[0], "bias", nn.Parameter(torch.zeros(4))),
    "a parameter is added": lambda model: model[2].register_parameter("scale", nn.Parameter(torch.ones(()))),
    "a parameter is removed": lambda model: delattr(model[0], "bias"),
    "a parameter becomes None": lambda model: setattr(model[0], "bias", None),
    "a tie is cut": lambda model: setattr(model[2][0], "weight", nn.Parameter(torch.zeros(4, 4))),
    "a module is added": lambda model: model.append(nn.Linear(4, 2)),
    "a module is removed": lambda model: model.pop(2),
    "a module is replaced, deep below": lambda model: model[2].__setitem__(0, nn.Linear(4, 4)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    """Whatever is registered, replaced or removed, the next list is right; then it stays the same object."""
    model = tied()
    listed = parameters_of(model)
    before = listed()
    assert listed() is before
    CHANGES[change](model)
    after = listed()
    assert [*map(id, after.values())] == [*map(id, model.parameters())]
    assert listed() is after
    assert all(after.get(number, param) is param for number, param in before.items())  # numbers are not used again


def test_what_is_no_change() -> None:
    """Values, gradients, modes and memory may change: the parameters are the same objects."""
    model = tied()
    listed = parameters_of(model)
    before = listed()
    model.eval()
    model.requires_grad_(False)
    model[0].weight.data = torch.zeros(4, 4)
    model[0].weight.grad = torch.ones(4, 4)
    assert listed() is before


def test_a_model_without_modules_below_it() -> None:
    """A module that is one parameter."""
    lone = nn.ParameterList([nn.Parameter(torch.zeros(2))])
    assert [*map(id, parameters_of(lone)().values())] == [*map(id, lone.parameters())]


@pytest.mark.parametrize("graph", ["off", "emulate"])
def test_a_frozen_base_in_another_dtype(graph: str) -> None:
    """Adapters in float32 on a base in float16 train as with torch: a policy says how what is trained is kept."""

    def trained(with_ampkit: bool) -> list[Tensor]:
        torch.manual_seed(0)
        base, adapter = nn.Linear(6, 3).half().requires_grad_(False), nn.Linear(6, 3, bias=False)
        model = nn.ModuleList([base, adapter])
        optimizer = torch.optim.AdamW(adapter.parameters(), lr=0.01, fused=True)

        def loss_fn(model: Any, x: Tensor) -> Tensor:
            return (model[0](x) + model[1](x)).float().square().mean()

        scaler = ampkit.GradScaler("cpu", init_scale=256.0)
        step = ampkit.graphed_step(loss_fn, model, optimizer, policy="float16", scaler=scaler, graph=graph)
        torchs = torch.amp.GradScaler("cpu", init_scale=256.0)
        for _ in range(5):
            if with_ampkit:
                step(torch.ones(2, 6))
                continue
            with torch.autocast("cpu", torch.float16):
                loss = loss_fn(model, torch.ones(2, 6))
            torchs.scale(loss).backward()
            torchs.step(optimizer)
            torchs.update()
            optimizer.zero_grad()
        return [param.detach() for param in model.parameters()]

    assert_same(trained(True), trained(False))
