"""The loss scale's rule: hysteresis, limits, a constant scale, counters; a captured scaler; a model of it in Python."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import DEVICES, ENGINES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ampkit


def scale_after(overflows: list[bool], device: str = "cpu", **rule: Any) -> tuple[list[float], ampkit.GradScaler]:
    """Return the scale after each of a sequence of steps, and the scaler."""
    weight = torch.zeros(3, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    scaler = ampkit.GradScaler(device, **rule)
    scales = []
    for overflow in overflows:
        scaler.scale(torch.zeros((), device=device))
        weight.grad = torch.full_like(weight, math.inf if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, scaler


def modelled(overflows: list[bool], scale: float, interval: int, patience: int, low: float, high: float) -> list[float]:
    """The rule in ten lines of Python."""
    good, left, scales = 0, patience, []
    for overflow in overflows:
        if overflow:
            good, left = 0, left - 1
            scale = scale * 0.5 if left <= 0 else scale
        else:
            good += 1
            if good == interval:
                good, left, scale = 0, patience, scale * 2.0
        scale = min(max(scale, low), high)
        scales.append(scale)
    return scales


@settings(max_examples=200, deadline=None)
@given(
    overflows=st.lists(st.booleans(), max_size=30),
    exponent=st.integers(-2, 10),
    interval=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
    down=st.one_of(st.none(), st.integers(0, 4)),
    up=st.one_of(st.none(), st.integers(0, 4)),
)
def test_trajectory_is_the_models(
    overflows: list[bool], exponent: int, interval: int, hysteresis: int, down: int | None, up: int | None
) -> None:
    """S1: for any hysteresis, limits and sequence of overflows, the scale is that of a model in Python."""
    start = 2.0**exponent
    low, high = (None if down is None else start / 2**down), (None if up is None else start * 2**up)
    got, scaler = scale_after(
        overflows,
        init_scale=start,
        growth_interval=interval,
        hysteresis=hysteresis,
        min_scale=low,
        max_scale=high,
    )
    assert got == modelled(overflows, start, interval, hysteresis, low or 0.0, high or math.inf)
    assert scaler.stats()[:2] == (len(overflows), sum(overflows))


@pytest.mark.parametrize("device", DEVICES)
def test_hysteresis_waits_for_the_second_overflow(device: str) -> None:
    """S1: with hysteresis=2 the scale backs off at the second overflow. When it grows, the count starts again."""
    pattern = [True, True, True, False, False, True, True]
    scales, _ = scale_after(pattern, device, init_scale=64.0, growth_interval=2, hysteresis=2)
    assert scales == [64.0, 32.0, 16.0, 16.0, 32.0, 32.0, 16.0]


@pytest.mark.parametrize("device", DEVICES)
def test_constant_scale_skips_but_stays(device: str) -> None:
    """S1: with dynamic=False the scale never moves, and steps that overflow are still skipped."""
    scales, scaler = scale_after([True, False, False, True], device, init_scale=8.0, growth_interval=1, dynamic=False)
    assert scales == [8.0] * 4
    assert scaler.stats() == (4, 2, 8.0, math.inf)


def test_stats_of_a_new_and_of_a_disabled_scaler() -> None:
    """`stats` works before the first `scale`, and for a disabled scaler."""
    assert ampkit.GradScaler("cpu", init_scale=4.0).stats() == (0, 0, 4.0, None)
    assert ampkit.GradScaler("cpu", enabled=False).stats() == (0, 0, 1.0, None)


def test_the_whole_rule_survives_a_checkpoint() -> None:
    """S6: hysteresis, limits and counters are loaded into a scaler that was made without them."""
    options = {"init_scale": 64.0, "growth_interval": 3, "hysteresis": 3, "min_scale": 16.0, "max_scale": 128.0}
    overflows = [True, False, True, True, True, False, False, False]
    whole, _ = scale_after(overflows, **options)
    _, first = scale_after(overflows[:3], **options)
    second = ampkit.GradScaler("cpu")
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    rest = []
    for overflow in overflows[3:]:
        second.scale(torch.zeros(()))
        weight.grad = torch.full_like(weight, math.inf if overflow else 1.0)
        second.step(optimizer)
        second.update()
        rest.append(second.get_scale())
    assert rest == whole[3:]
    assert second.stats().steps == len(overflows)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hysteresis": 0}, r"hysteresis=0\): expected an int of at least 1"),
        ({"min_scale": 0.0}, r"min_scale=0.0, max_scale=None\): expected 0 < min_scale"),
        (
            {"device": "gpu"},
            r"GradScaler\(device='gpu'\): expected the type of a device that torch has: 'cuda' or 'cpu'",
        ),
        ({"device": 1024.0}, r"GradScaler\(device=float\): expected a string such as 'cuda'"),
        ({"min_scale": 8.0, "max_scale": 4.0}, "expected 0 < min_scale <= max_scale"),
        ({"init_scale": 2.0, "min_scale": 4.0}, r"init_scale=2.0\): it lies outside min_scale=4.0"),
    ],
)
def test_contradictory_rules(options: dict[str, Any], says: str) -> None:
    """Arguments that contradict each other, or torch, raise a ValueError that names them."""
    with pytest.raises(ValueError, match=says):
        ampkit.GradScaler(**{"device": "cpu", **options})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_s2_captured_forward_and_backward(engine: tuple[str, str], kind: dict[str, bool]) -> None:
    """S2: inputs 5, 20000, 5, 40000 with initial scale 4: scales 4, 2, 2, 1, trackers 1, 0, 1, 0; gradients too."""
    device = engine[0]
    weight = torch.ones(100, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, **kind)  # type: ignore[arg-type]
    scaler = ampkit.GradScaler(device, init_scale=4.0, growth_interval=10)
    scaler.materialize(torch.device(device))
    static, gradient = torch.zeros(100, device=device), torch.zeros(100, device=device)

    def forward_backward() -> Tensor:
        weight.grad = None
        loss = (weight.half() * static.half()).sum() / 2
        scaler.scale(loss * 2).backward()
        assert weight.grad is not None
        gradient.copy_(weight.grad)
        return loss.detach()

    replay: Callable[[], object] = forward_backward
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward_backward()
        replay = graph.replay
    expected = ((5, 4.0, 1, 20.0), (20000, 2.0, 0, math.inf), (5, 2.0, 1, 10.0), (40000, 1.0, 0, math.inf))
    for value, scale, tracker, grad in expected:
        static.fill_(value)
        replay()
        weight.grad = gradient
        assert torch.equal(gradient, torch.full_like(gradient, grad))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        assert scaler.state_dict()["_growth_tracker"] == tracker


@pytest.mark.parametrize("device", DEVICES)
def test_s4_several_losses_and_optimizers(device: str) -> None:
    """S4: two losses and two optimizers share a scale. One step is skipped, and the scale backs off once."""
    first, second = (torch.ones(4, device=device, requires_grad=True) for _ in range(2))
    fused = torch.optim.AdamW([first], lr=0.1, fused=True)
    plain = torch.optim.SGD([second], lr=0.1)
    scaler = ampkit.GradScaler(device, init_scale=16.0, hysteresis=1, min_scale=1.0)
    losses = scaler.scale([(first * 3).sum(), second.sum() * math.inf])
    for loss in losses:
        loss.backward()
    scaler.step(fused)
    scaler.step(plain)
    scaler.update()
    assert not torch.equal(first, torch.ones_like(first))
    assert torch.equal(second, torch.ones_like(second))
    assert scaler.stats()[:3] == (2, 1, 8.0)


@pytest.mark.multigpu
def test_s4_parameters_over_two_devices() -> None:
    """S4: after an overflow on the second device, parameters on the first device are not changed either."""
    params = [torch.ones(4, device=f"cuda:{i}", requires_grad=True) for i in range(2)]
    optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
    scaler = ampkit.GradScaler("cuda", init_scale=16.0)
    for bad in (1.0, math.inf):
        before = [param.detach().clone() for param in params]
        scaler.scale(torch.zeros((), device="cuda:0"))
        params[0].grad, params[1].grad = torch.ones_like(params[0]), torch.full_like(params[1], bad)
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        assert [torch.equal(a, b) for a, b in zip(before, params, strict=True)] == [bad == math.inf] * 2
