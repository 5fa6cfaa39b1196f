"""The list of a model's parameters: that of `model.parameters()`, and the same object while nothing changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ampkit


def parameters_of(model: nn.Module) -> Callable[[], list[nn.Parameter]]:
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
    assert [*map(id, after)] == [*map(id, model.parameters())]
    assert listed() is after


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
    assert [*map(id, parameters_of(lone)())] == [*map(id, lone.parameters())]
