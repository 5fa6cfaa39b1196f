"""Every optimizer of torch.optim in every form: its step is captured with eager's bits, or a warning says why not."""

import inspect
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import ENGINES, FUSED_ADAGRAD_ON_CUDA, assert_same, deterministic, training_state
from torch import Tensor, nn

import ampkit

FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "for loop": {"foreach": False},
    "fused": {"fused": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "RMSprop": {"momentum": 0.9, "centered": True, "weight_decay": 0.01},
    "SGD": {"momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"amsgrad": True},
    "Adadelta": {"weight_decay": 0.01},
}


def optimizers() -> Iterator[tuple[str, str]]:
    """Yield every optimizer whose step takes a dense gradient and no closure, in each of its forms."""
    for name, cls in sorted(vars(torch.optim).items()):
        if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer):
            known = inspect.signature(cls).parameters
            if cls is not torch.optim.Optimizer and name not in ("LBFGS", "SparseAdam"):
                yield from ((name, form) for form, flags in FORMS.items() if flags.keys() <= known.keys())


def boosted(model: nn.Module, x: Tensor, boost: Tensor) -> Tensor:
    return model(x).square().mean() * boost


def trajectory(engine: tuple[str, str], name: str, form: str, scaled: bool) -> tuple[list[Any], ampkit.GraphedStep]:
    """Return the state after each of 10 steps. The learning rate falls in each step, and is 0 in the last but one."""
    device, graph = engine
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False)).to(device)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **OPTIONS.get(name, {}), **FORMS[form])
    scaler = ampkit.GradScaler(device, init_scale=1024.0, enabled=scaled)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    step = ampkit.graphed_step(boosted, model, optimizer, scaler=scaler, scheduler=schedule, max_norm=1.0, graph=graph)
    history = []
    for i in range(10):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(i)).to(device)
        if i == 8:
            optimizer.param_groups[0]["lr"] = 0.0
            before = [param.detach().clone() for param in model.parameters()]
        step(x, torch.tensor(math.inf if scaled and i in (1, 6) else 1.0).to(device))
        if i == 8 and name not in ("Rprop", "ASGD"):  # Rprop reads the rate once; ASGD's state keeps that of the last
            assert_same(before, [param.detach().clone() for param in model.parameters()], "with a rate of 0")
        history.append(training_state(model, optimizer, scaler))
    return history, step


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("name", "form", "scaled"),
    [
        # Without a scaler a foreach or a for loop does less of the same.
        pytest.param(name, form, scaled, marks=() if scaled or form in ("default", "fused") else pytest.mark.slow)
        for name, form in optimizers()
        for scaled in (False, True)
    ],
)
@pytest.mark.sampled(12)
def test_every_optimizer_in_every_form(engine: tuple[str, str], name: str, form: str, scaled: bool) -> None:
    """S1, G5, G7: captured or not, each step has the bits of the eager step and uses the present learning rate."""
    cls = getattr(torch.optim, name)
    if (engine[0], name, form) == ("cuda", "Adagrad", "fused") and not FUSED_ADAGRAD_ON_CUDA:
        pytest.skip("this torch refuses fused Adagrad on CUDA")
    blocked = form != "fused" and "capturable" not in inspect.signature(cls).parameters
    with warnings.catch_warnings(record=True) as caught, deterministic():
        warnings.simplefilter("always")
        eager, _ = trajectory((engine[0], "off"), name, form, scaled)
        graphed, step = trajectory(engine, name, form, scaled)
    for i, (left, right) in enumerate(zip(eager, graphed, strict=True)):
        assert_same(left, right, f"after step {i}")
    told = [warning for warning in caught if issubclass(warning.category, ampkit.CaptureWarning)]
    if blocked and name in ("Muon", "SGD"):  # what they compute of the rate is in tensors, behind two watched steps
        assert (len(told), step.report().outcome) == (0, "whole")
        assert step.replays >= 4
        return
    assert (step.replays, len(told)) == ((7, 1 if blocked else 0))


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["RMSprop", "Adadelta"])
def test_loops_that_read_the_rate_are_named(name: str) -> None:
    """S1: a warning says that the step runs other kernels than the user asked for. `foreach` is put back afterwards."""
    model = nn.Linear(6, 3).cuda()
    optimizer = getattr(torch.optim, name)(model.parameters(), foreach=False)
    with pytest.warns(ampkit.AmpkitWarning, match=rf"{name}\(foreach=False\) reads its learning rate on the host"):
        step = ampkit.graphed_step(boosted, model, optimizer, on_failure="raise")
    for _ in range(5):
        step(torch.ones(5, 6, device="cuda"), torch.ones((), device="cuda"))
    assert step.replays == 2
    assert optimizer.param_groups[0]["foreach"] is False
