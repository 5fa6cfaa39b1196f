"""GradScaler: torch's contract, one pass over the gradients, no host read, and defects of torch that it avoids."""

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from harness import (
    DEVICES,
    OPTIMIZERS,
    assert_same,
    no_sync,
    scaled_backward,
    skip_without_kernel,
)
from torch import Tensor, nn

import ampkit


def make(
    device: str, optimizer: str = "sgd", **scaler: Any
) -> tuple[nn.Linear, torch.optim.Optimizer, ampkit.GradScaler]:
    skip_without_kernel(device, optimizer)
    torch.manual_seed(1)
    model = nn.Linear(6, 3).to(device)
    return model, OPTIMIZERS[optimizer](model.parameters()), ampkit.GradScaler(device, **scaler)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_s1_growth_backoff_skip(device: str, name: str) -> None:
    """S1: the scale grows after the interval and backs off on overflow. A skipped step changes nothing else."""
    model, optimizer, scaler = make(device, name, init_scale=8.0, growth_interval=2)
    scales, trackers = [], []
    for i, bad in enumerate([None, None, math.inf, None, math.nan, None, None]):
        scaled_backward(model, scaler, i, bad)
        before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        scales.append(scaler.get_scale())
        trackers.append(scaler.state_dict()["_growth_tracker"])
        if bad is not None:
            assert_same(before, (model.state_dict(), optimizer.state_dict()))
            assert scaler.found_inf == 1.0
        else:
            assert not torch.equal(before[0]["weight"], model.weight)
            assert scaler.found_inf == 0.0
    assert scales == [8.0, 16.0, 8.0, 8.0, 4.0, 4.0, 8.0]
    assert trackers == [1, 0, 0, 1, 0, 1, 0]
    assert scaler.skipped == 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_s1_skip_in_the_very_first_step(device: str, name: str) -> None:
    """S1: an overflow in the first step leaves no trace in the moments."""
    histories = []
    for overflow_first in (True, False):
        model, optimizer, scaler = make(device, name, init_scale=16.0 if overflow_first else 8.0)
        if overflow_first:
            scaled_backward(model, scaler, 99, math.inf)
            scaler.step(optimizer)
            scaler.update()
        for i in range(3):
            scaled_backward(model, scaler, i)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 8.0
        histories.append(model.state_dict())
    assert_same(*histories)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [None, 0.01, 1e6])
def test_one_pass_agrees_with_torch(device: str, name: str, max_norm: float | None) -> None:
    """S1: parameters are torch's after unscale, clip and step, within float32 rounding. The scale equals torch's."""
    results = []
    for ours in (True, False):
        model, optimizer, scaler = make(device, name, init_scale=1024.0, growth_interval=3)
        reference = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=3)
        for i in range(20):
            used = scaler if ours else reference
            scaled_backward(model, used, i, math.inf if i in (3, 7) else None)
            if ours:
                scaler.step(optimizer, max_norm=max_norm)
            else:
                reference.unscale_(optimizer)
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                reference.step(optimizer)
            used.update()
        results.append((model.weight.detach().clone(), used.state_dict()))
    (mine, my_state), (theirs, their_state) = results
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    assert {key: my_state[key] for key in their_state} == their_state


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("unscale_first", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_s3_preset_grad_scale(device: str, name: str, unscale_first: bool) -> None:
    """S3: optimizer.grad_scale of the user divides the gradient too, with and without unscale_: 15 / 5 / 3 = 1."""
    skip_without_kernel(device, name)
    weight = torch.ones(1, device=device, requires_grad=True)
    weight.grad = torch.full_like(weight, 15.0)
    optimizer = OPTIMIZERS[name]([weight])
    scaler = ampkit.GradScaler(device, init_scale=5.0)
    scaler.scale(torch.ones(5, device=device))
    if unscale_first:
        scaler.unscale_(optimizer)
    optimizer.grad_scale = torch.tensor([3.0], device=device)  # type: ignore[attr-defined]
    scaler.step(optimizer)
    assert weight.grad == 1.0
    assert getattr(optimizer, "grad_scale", None) is None  # used up, as in torch
    assert getattr(optimizer, "found_inf", None) is None


@pytest.mark.parametrize("device", DEVICES)
def test_grad_norm_is_unscaled_and_unclipped(device: str) -> None:
    """`grad_norm` is the norm that clip_grad_norm_ would return."""
    model, optimizer, scaler = make(device, init_scale=512.0)
    scaled_backward(model, scaler, 0)
    expected = torch.stack([param.grad.norm() for param in model.parameters() if param.grad is not None]).norm() / 512
    scaler.step(optimizer, max_norm=0.1)
    torch.testing.assert_close(scaler.grad_norm, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_user_may_unscale_and_clip_before_step(device: str) -> None:
    """After unscale_ the user may clip the gradients. The device still decides whether the step is skipped."""
    model, optimizer, scaler = make(device, init_scale=4.0)
    for bad in (None, math.inf):
        scaled_backward(model, scaler, 0, bad)
        scaler.unscale_(optimizer)
        before = model.weight.detach().clone()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model.weight) == (bad is not None)
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("device", DEVICES)
def test_float16_gradients(device: str) -> None:
    """S8: float16 gradients are unscaled, clipped and checked, also if their squares overflow in float16."""
    weight = torch.ones(4, dtype=torch.float16, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    scaler = ampkit.GradScaler(device, init_scale=8.0)
    scaler.scale(weight.sum() * 1000.0).backward()
    scaler.step(optimizer, max_norm=1.0)
    assert scaler.grad_norm is not None
    torch.testing.assert_close(scaler.grad_norm.cpu(), torch.tensor(2000.0))
    torch.testing.assert_close(weight.detach().cpu(), torch.full((4,), 0.5, dtype=torch.float16))


@pytest.mark.parametrize("device", DEVICES)
def test_found_inf_is_one_after_several_infinities(device: str) -> None:
    """torch sums found_inf, but its kernels test for 1. Two infinite gradient tensors must still skip the step."""
    model, optimizer, scaler = make(device, "adamw", init_scale=2.0)
    scaled_backward(model, scaler, 0)
    scaler.step(optimizer)
    scaler.update()
    steps = [state["step"].item() for state in optimizer.state.values()]
    scaled_backward(model, scaler, 1, math.inf)
    assert model.bias.grad is not None
    model.bias.grad[0] = math.nan
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    first = next(iter(state["found_inf_per_device"].values()))
    first.fill_(2.0)  # what two devices add up to
    before = model.weight.detach().clone()
    scaler.step(optimizer)
    assert torch.equal(before, model.weight)
    assert [state["step"].item() for state in optimizer.state.values()] == steps


@pytest.mark.parametrize("device", DEVICES)
def test_skipped_first_step_leaves_no_garbage_momentum(device: str) -> None:
    """After an overflow in its first step, fused SGD must not move a parameter with zero gradient (torch: by 6.3)."""
    junk = [torch.full((1000,), 7.0, device=device) for _ in range(50)]
    del junk  # what an uninitialised buffer would find
    weight = torch.zeros(1000, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, fused=True)
    scaler = ampkit.GradScaler(device, init_scale=2.0)
    scaler.scale(torch.zeros((), device=device))
    weight.grad = torch.full_like(weight, math.inf)
    scaler.step(optimizer)
    scaler.update()
    weight.grad = torch.zeros_like(weight)
    scaler.step(optimizer)
    assert weight.detach().abs().max() == 0.0


@pytest.mark.parametrize("device", DEVICES)
def test_dampening_keeps_torchs_first_step(device: str) -> None:
    """With dampening the first step has another formula than later ones. A skipped step before it changes nothing."""
    weights = []
    for overflow_first in (True, False):
        weight = torch.ones(4, device=device, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, dampening=0.5, fused=True)
        scaler = ampkit.GradScaler(device, init_scale=2.0)
        scaler.scale(torch.zeros((), device=device))
        for value in [math.inf] * overflow_first + [2.0, 2.0]:
            weight.grad = torch.full_like(weight, value)
            scaler.step(optimizer)
            scaler.update(2.0)
        weights.append(weight.detach())
    assert_same(*weights)


@pytest.mark.parametrize("device", DEVICES)
def test_dampening_honours_a_preset_grad_scale(device: str) -> None:
    """S3: the first step of SGD with dampening divides by the user's grad_scale once, and removes it."""
    weight = torch.ones(1, device=device, requires_grad=True)
    weight.grad = torch.full_like(weight, 15.0)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, dampening=0.5, fused=True)
    scaler = ampkit.GradScaler(device, init_scale=5.0)
    scaler.scale(torch.ones(5, device=device))
    optimizer.grad_scale = torch.tensor([3.0], device=device)  # type: ignore[attr-defined]
    scaler.step(optimizer)
    assert weight == 0.0
    assert not hasattr(optimizer, "grad_scale")


def test_dampening_counts_the_skip() -> None:
    """A first step that is skipped on the host is counted like other skipped steps."""
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, dampening=0.5, fused=True)
    scaler = ampkit.GradScaler("cpu", init_scale=2.0)
    scaler.scale(weight.sum() * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.skipped, scaler.get_scale()) == (1, 1.0)


@pytest.mark.filterwarnings(r"ignore:GradScaler.step\(RMSprop\)")  # on CUDA, see test_scaler_optimizers.py
@pytest.mark.parametrize("device", DEVICES)
def test_other_optimizers_step_as_torch_does(device: str) -> None:
    """An optimizer without a fused kernel has the bits that it has under torch's scaler, with a skipped step."""
    results = []
    for cls in (ampkit.GradScaler, torch.amp.GradScaler):
        torch.manual_seed(1)
        model = nn.Linear(6, 3).to(device)
        optimizer = torch.optim.RMSprop(model.parameters())
        scaler = cls(device, init_scale=64.0)
        for i in range(4):
            scaled_backward(model, scaler, i, math.inf if i == 2 else None)
            scaler.step(optimizer)
            scaler.update()
        results.append((model.state_dict(), scaler.get_scale()))
        if isinstance(scaler, ampkit.GradScaler):
            assert scaler.skipped == 1
    assert_same(*results)


def test_other_optimizers_clip() -> None:
    """max_norm also works if the kernel cannot clip."""
    weight = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = ampkit.GradScaler("cpu", init_scale=64.0)
    scaler.scale(weight.sum() * 10).backward()
    scaler.step(optimizer, max_norm=1.0)
    assert scaler.grad_norm == 20.0
    torch.testing.assert_close(weight.detach(), torch.full((4,), -0.5))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_s7_disabled_is_an_identity(device: str, max_norm: float | None) -> None:
    """S7: a disabled scaler does not scale, steps like the optimizer (and clips if asked), and has no state."""
    model, optimizer, scaler = make(device, enabled=False)
    twin, twin_optimizer, _ = make(device)
    loss = torch.ones((), device=device)
    assert scaler.scale(loss) is loss
    for i in range(3):
        scaled_backward(model, scaler, i)
        scaled_backward(twin, scaler, i)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
        scaler.unscale_(optimizer)
        scaler.step(optimizer, max_norm=max_norm)
        scaler.update()
        twin_optimizer.step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-6, atol=1e-7)
    assert scaler.state_dict() == {}
    assert scaler.get_scale() == 1.0
    assert (scaler.found_inf, scaler.skipped) == (None, None)


@pytest.mark.parametrize("device", DEVICES)
def test_s6_state_goes_both_ways(device: str) -> None:
    """S6: either scaler loads the other's state during training, and the scale tensor stays where it is."""
    model, optimizer, scaler = make(device, init_scale=32.0, growth_interval=5)
    for i in range(3):
        scaled_backward(model, scaler, i, math.inf if i == 0 else None)
        scaler.step(optimizer)
        scaler.update()
    theirs = torch.amp.GradScaler(device)
    theirs.load_state_dict(scaler.state_dict())
    assert theirs.state_dict().items() <= scaler.state_dict().items()
    back = ampkit.GradScaler(device)
    scaled_backward(model, back, 0)
    address = back._scale.data_ptr()  # type: ignore[union-attr]
    back.load_state_dict(theirs.state_dict())
    assert back._scale.data_ptr() == address  # type: ignore[union-attr]  # a captured graph would still see it
    assert back.state_dict() == {**scaler.state_dict(), "steps": 0, "skipped": 0}
    back.load_state_dict(scaler.state_dict())
    assert back.state_dict() == scaler.state_dict()


def test_s6_pickles() -> None:
    """S6: a pickled scaler keeps scale, tracker and counts, even if it was never used."""
    model, optimizer, scaler = make("cpu", init_scale=32.0)
    fresh = pickle.loads(pickle.dumps(scaler))
    assert fresh.state_dict() == scaler.state_dict()
    scaled_backward(model, scaler, 0, math.inf)
    scaler.step(optimizer)
    scaler.update()
    file = io.BytesIO()
    torch.save(scaler, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.state_dict() == scaler.state_dict()
    loaded.scale(torch.ones(()))
    assert loaded.skipped == 1


def test_takes_torchs_arguments_by_position() -> None:
    """The constructor takes torch's arguments, so it is enough to replace the name."""
    ours, theirs = (cls("cpu", 8.0, 3.0, 0.25, 7, True) for cls in (ampkit.GradScaler, torch.amp.GradScaler))
    assert theirs.state_dict().items() <= ours.state_dict().items()
    assert isinstance(ours, torch.amp.GradScaler)


def test_s5_clear_errors() -> None:
    """S5: the error for no gradient, a second unscale_, a second step and a closure says what is wrong."""
    model, optimizer, scaler = make("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)  # fused: another optimizer may have gradients
    with pytest.raises(ValueError, match=r"no parameter of the optimizer has a gradient. Call scaler.scale"):
        scaler.update()
    with pytest.raises(ValueError, match=r"no parameter of the optimizer has a gradient. Call scaler.scale"):
        scaler.step(torch.optim.RMSprop(model.parameters()))
    scaled_backward(model, scaler, 0)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.step(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, closure=lambda: 0.0)


@pytest.mark.parametrize("max_norm", [0, -1.0, math.nan, "1"])
def test_max_norm_must_be_positive(max_norm: Any) -> None:
    """With a norm of zero or less, training would stop without a word."""
    _, optimizer, scaler = make("cpu")
    with pytest.raises(ValueError, match=r"GradScaler.step\(max_norm=.*must be a number > 0, or None"):
        scaler.step(optimizer, max_norm=max_norm)


@pytest.mark.cuda
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [None, math.inf])
def test_no_host_sync(name: str, bad: float | None) -> None:
    """scale, step with clipping, and update do not wait for the device, with an overflow or without."""
    model, optimizer, scaler = make("cuda", name)
    infinite = torch.full_like(model.weight, math.inf)

    def one_step() -> Tensor:
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        if bad is not None:
            assert model.weight.grad is not None
            model.weight.grad.copy_(infinite)
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        model.zero_grad()
        return loss

    x = torch.randn(5, 6, device="cuda")
    one_step()
    with no_sync():
        for _ in range(50):
            one_step()
    assert scaler.skipped == (51 if bad is not None else 0)
