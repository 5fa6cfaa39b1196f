"""Skipping with steps that are not torch.optim's: their changes are undone if they are known, else the host decides."""

import copy
import functools
import math
import pickle
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import (
    DEVICES,
    ENGINES,
    FUSED_ADAGRAD_ON_CUDA,
    assert_same,
    deterministic,
    make_batches,
    no_sync,
    scaled_backward,
    training_state,
)
from test_scaler_optimizers import OPTIMIZERS, initialised, make
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import ampkit
from ampkit._optimizer.device_step import changed_by_step, step_or_undo
from ampkit._optimizer.step_kind import can_be_undone, scales_in_kernel, torch_class, why_not_capturable

on_the_host = pytest.mark.filterwarnings("ignore:GradScaler.step:ampkit.AmpkitWarning")  # which is said on CUDA


def params_of(optimizer: Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]


# ------------------------------------------------------------------------------------------- steps that can be undone


class Averaging(SGD):
    """SGD that keeps an average of gradients and one of weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for param in params_of(self):
            state = self.state[param]
            if "gradients" not in state:
                state["gradients"], state["weights"] = torch.zeros_like(param), param.detach().clone()
            state["gradients"].mul_(0.9).add_(param.grad)
            state["weights"].lerp_(param, 0.1)
        return result


class FusedAveraging(AdamW):
    """The same with a fused kernel, which takes the scale."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01, fused=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for param in params_of(self):
            self.state[param].setdefault("gradients", torch.zeros_like(param)).mul_(0.9).add_(param.grad)
        return result


class Lion(Optimizer):
    """Not torch's: foreach kernels, a step count in an attribute on the device, and changed gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        self.count = torch.zeros((), device=self.param_groups[0]["params"][0].device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = params_of(self)
        for param in params:
            self.state[param].setdefault("moment", torch.zeros_like(param))
        moments, grads = [self.state[param]["moment"] for param in params], [param.grad for param in params]
        torch._foreach_lerp_(moments, grads, 0.1)
        torch._foreach_add_(params, [moment.sign() for moment in moments], alpha=-self.param_groups[0]["lr"])
        torch._foreach_zero_(grads)
        self.count += 1


class Flat(SGD):
    """Its parameters are views of one tensor, which the step changes."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        self.flat = torch.cat([param.detach().reshape(-1) for param in params])
        pieces = self.flat.split([param.numel() for param in params])
        for param, piece in zip(params, pieces, strict=True):
            param.data = piece.view_as(param)
        super().__init__(params, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.flat.sub_(torch.cat([param.grad.reshape(-1) for param in self.param_groups[0]["params"]]), alpha=0.1)


class Elsewhere(SGD):
    """Changes a tensor that only a closure refers to, and an object in an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        first = self.param_groups[0]["params"][0]
        total = torch.zeros_like(first)
        self.add = lambda grad: total.add_(grad)
        self.total = lambda: total
        self.tracker = Tracker(torch.zeros_like(first))

    def step(self, closure: Any = None) -> Any:
        self.add(self.param_groups[0]["params"][0].grad)
        self.tracker.seen[0].add_(self.param_groups[0]["params"][0].grad)
        return super().step(closure)


class Tracker:
    def __init__(self, tensor: Tensor) -> None:
        self.seen = [tensor]


UNDONE: dict[str, Callable[[Any], Optimizer]] = {
    "averaging": lambda params: Averaging(params, lr=0.1, momentum=0.9),
    "fused averaging": FusedAveraging,
    "lion": Lion,
    "flat": Flat,
    "elsewhere": Elsewhere,
}

# ----------------------------------------------------------------------------------------- steps that cannot be undone


class Counting(SGD):
    """Counts steps on the host, and averages the weights in every second one."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for param in params_of(self):
            state = self.state[param]
            state["step"] = state.get("step", 0) + 1
            slow = state.setdefault("slow", param.detach().clone())
            if state["step"] % 2 == 0:
                slow.lerp_(param.detach(), 0.5)
        return result


class Rebinding(SGD):
    """Puts a new tensor in its state in each step."""

    def step(self, closure: Any = None) -> Any:
        for param in params_of(self):
            state = self.state[param]
            state["moment"] = 0.9 * state.get("moment", torch.zeros_like(param)) + param.grad
        return super().step(closure)


class Moving(SGD):
    """Gives the parameters other memory in each step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in params_of(self):
            param.data = param.data - 0.1 * param.grad


class Sparse(SGD):
    """Keeps a sparse tensor, which arithmetic on bits cannot restore."""

    def step(self, closure: Any = None) -> Any:
        for param in params_of(self):
            self.state[param].setdefault("seen", torch.zeros_like(param).to_sparse())
        return super().step(closure)


class Reading(SGD):
    """Reads a number from the device and decides by it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in params_of(self):
            total = self.state[param].setdefault("total", torch.zeros((), device=param.device))
            if param.grad.norm().item() < 1e9:
                total.add_(1)
        return super().step(closure)


kept: list[Tensor] = []


class Keeping(SGD):
    """Keeps the tensors that it creates in a global variable."""

    def step(self, closure: Any = None) -> Any:
        kept[:] = [param.grad * 2 for param in params_of(self)]
        return super().step(closure)


class Attribute(SGD):
    """Changes an option in its step."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] *= 0.5
        return super().step(closure)


class Noisy(SGD):
    """Draws random numbers, which torch's scaler does not let a skipped step do."""

    def step(self, closure: Any = None) -> Any:
        for param in params_of(self):
            param.grad.add_(torch.randn_like(param), alpha=0.01)
        return super().step(closure)


REFUSED: dict[str, tuple[type[SGD], str]] = {
    "counting": (Counting, r"changes state\[parameter\]\['step'\] on the host"),
    "rebinding": (Rebinding, r"puts a new tensor in the place of state\[parameter\]\['moment'\]"),
    "moving": (Moving, r"gives its param_groups\[0\]\['params'\]\[0\] other memory"),
    "sparse": (Sparse, r"keeps a Tensor of layout torch.sparse_coo in state|reads a tensor on the host"),
    "reading": (Reading, "reads a tensor on the host"),
    "keeping": (Keeping, "keeps a tensor that it makes outside of its state"),
    "noisy": (Noisy, "draws random numbers"),
    "attribute": (Attribute, r"changes its param_groups\[0\]\['lr'\] on the host"),
}

# ----------------------------------------------------------------------------------------------------------- the tests


def everything(model: nn.Module, optimizer: Any) -> Any:
    """Return copies of all that a step may change."""
    extra = [optimizer.total(), optimizer.tracker.seen[0]] if isinstance(optimizer, Elsewhere) else []
    extra += [optimizer.count] if isinstance(optimizer, Lion) else []
    state = [
        {key: value.to_dense() if isinstance(value, Tensor) else value for key, value in held.items()}
        for held in ({k: v for k, v in optimizer.state[param].items() if v is not None} for param in model.parameters())
    ]
    rates = [group["lr"] for group in optimizer.param_groups]
    return copy.deepcopy((model.state_dict(), state, extra, rates))


def trained(
    make: Callable[[Any], Optimizer], device: str, bad_at: tuple[int, ...], *, skips: bool
) -> tuple[Any, Optimizer, ampkit.GradScaler]:
    """Return everything after 8 steps: with overflows, or with those steps left out."""
    torch.manual_seed(1)
    model = nn.Linear(6, 3).to(device)
    optimizer, scaler = make(model.parameters()), ampkit.GradScaler(device, init_scale=8.0, dynamic=False)
    for i in range(8):
        if i in bad_at and not skips:
            continue
        scaled_backward(model, scaler, i, (math.inf, math.nan)[i % 2] if i in bad_at else None)
        before = everything(model, optimizer)
        scaler.step(optimizer)
        scaler.update()
        if i in bad_at:
            assert_same(before, everything(model, optimizer), f"step {i}")
    return everything(model, optimizer), optimizer, scaler


@on_the_host
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*UNDONE, *REFUSED])
@pytest.mark.parametrize("bad_at", [(0,), (1, 2), (0, 3, 7), (4, 5, 6)])
@pytest.mark.sampled(2)
def test_a_skipped_step_leaves_every_bit(device: str, name: str, bad_at: tuple[int, ...]) -> None:
    """S1: after an overflow every tensor has the bits from before, and later steps are as without that step."""
    make = UNDONE[name] if name in UNDONE else functools.partial(REFUSED[name][0], lr=0.1, momentum=0.9)
    with_skips, optimizer, scaler = trained(make, device, bad_at, skips=True)
    without, _, _ = trained(make, device, bad_at, skips=False)
    assert_same(with_skips, without)
    changes = scaler._scaled_step.changes_of(optimizer)
    assert (changes.incomplete == "") == (name in UNDONE)


@on_the_host
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", REFUSED)
def test_why_a_step_is_not_undone(device: str, name: str) -> None:
    """S1: the reason names what a watched step does besides changing tensors in place."""
    kind, says = REFUSED[name]
    _, optimizer, scaler = trained(functools.partial(kind, lr=0.1), device, (), skips=True)
    assert re.search(says, scaler._scaled_step.changes_of(optimizer).incomplete)


@pytest.mark.cuda
@pytest.mark.parametrize("name", UNDONE)
@pytest.mark.parametrize("bad", [None, math.inf])
def test_a_watched_step_waits_no_more(name: str, bad: float | None) -> None:
    """S1: two watched steps wait for the device. Later ones do not, with an overflow or without."""
    model = nn.Linear(6, 3).cuda()
    optimizer, scaler = UNDONE[name](model.parameters()), ampkit.GradScaler("cuda", init_scale=8.0)
    infinite = torch.full_like(model.weight, math.inf)
    x = torch.randn(5, 6, device="cuda")

    def one_step() -> None:
        scaler.scale(model(x).square().mean()).backward()
        if bad is not None and settled:
            assert model.weight.grad is not None
            model.weight.grad.copy_(infinite)
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        model.zero_grad()

    settled = False
    for _ in range(3):
        one_step()
    settled = True
    with no_sync():
        for _ in range(10):
            one_step()
    assert scaler.stats()[:2] == (13, 10 if bad else 0)


@pytest.mark.cuda
def test_a_step_that_is_not_undone_says_so_once() -> None:
    """S1: every step waits for the device. One warning says so, with the reason and what to write."""
    model = nn.Linear(6, 3).cuda()
    optimizer, scaler = Counting(model.parameters(), lr=0.1), ampkit.GradScaler("cuda", init_scale=8.0)
    for i in range(2):
        scaled_backward(model, scaler, i)
        scaler.step(optimizer)
        scaler.update()
    scaled_backward(model, scaler, 2)
    with pytest.warns(
        ampkit.AmpkitWarning, match=r"GradScaler.step\(Counting\): Counting changes .* on the host.*in place"
    ):
        scaler.step(optimizer)
    scaler.update()
    scaled_backward(model, scaler, 3)
    scaler.step(optimizer)


def test_whose_step_it_is() -> None:
    """S1: the code that runs decides, for subclasses with their own step, replaced methods and wrapped steps."""

    class Renamed(SGD):
        pass

    class Wrapped(SGD):
        @functools.wraps(SGD.step)
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise NotImplementedError

    class OtherState(AdamW):
        def _init_group(self, *args: Any, **kwargs: Any) -> Any:
            return super()._init_group(*args, **kwargs)

    params = list(nn.Linear(2, 2).parameters())
    for cls in (Renamed, SGD):  # torch wraps `step` of the subclass before it wraps that of the base, and after
        assert torch_class(cls(params, lr=0.1)) is SGD
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer:
            assert torch_class(kind([torch.ones(2, 2, requires_grad=True)])) is kind  # type: ignore[call-arg]
    for made in (Wrapped(params, lr=0.1), OtherState(params), Averaging(params, lr=0.1), Lion(params)):
        assert torch_class(made) is None
        assert not can_be_undone(made)
        assert not scales_in_kernel(made)
    scheduled = SGD(params, lr=0.1, fused=True)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    assert torch_class(scheduled) is SGD
    assert scales_in_kernel(scheduled)
    original = scheduled.step
    scheduled.step = lambda *args: original(*args)  # type: ignore[method-assign]
    assert torch_class(scheduled) is None


def test_a_step_that_was_replaced_on_torchs_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1: then neither torch's class nor its subclasses have torch's step, though it has the same name."""

    @functools.wraps(SGD.step)
    def step(self: Any, closure: Any = None) -> None:
        raise NotImplementedError

    optimizer = SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert torch_class(optimizer) is SGD
    monkeypatch.setattr(SGD, "step", step)
    assert torch_class(optimizer) is None
    assert not can_be_undone(optimizer)


def test_state_that_is_replaced_is_looked_at_anew() -> None:
    """S1, S6: overflows leave no trace after load_state_dict, a new param group, or a parameter's first gradient."""
    used, later = (torch.ones(3, requires_grad=True) for _ in range(2))
    optimizer = Averaging([used], lr=0.1, momentum=0.9)
    scaler = ampkit.GradScaler("cpu", init_scale=8.0, dynamic=False)

    def one_step(*params: Tensor, bad: bool = False) -> None:
        scaler.scale(torch.zeros(()))
        for param in (used, later):
            param.grad = None
        for param in params:
            param.grad = torch.full_like(param, math.inf if bad else 8.0)
        scaler.step(optimizer)
        scaler.update()

    def all_bits() -> Any:
        return copy.deepcopy((used.detach(), later.detach(), optimizer.state_dict()["state"]))

    for _ in range(3):
        one_step(used)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = all_bits()
    one_step(used, bad=True)
    assert_same(before, all_bits())
    optimizer.add_param_group({"params": [later]})
    for params in ((used,), (used, later), (used, later), (used, later), (later,)):
        before = all_bits()
        one_step(*params, bad=True)
        assert_same(before, all_bits())
        one_step(*params)
    assert scaler._scaled_step.changes_of(optimizer).known(optimizer) is not None


def test_a_scaler_with_records_is_copied_and_pickled() -> None:
    """S6: a copy of a scaler does not have what the scaler knows of its optimizers."""
    _, _, scaler = trained(UNDONE["averaging"], "cpu", (), skips=True)
    for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert other.state_dict() == scaler.state_dict()


def boosted(model: nn.Module, images: Tensor, labels: Tensor, boost: Tensor) -> Tensor:
    return F.cross_entropy(model(images.flatten(1)), labels) * boost


def train(step: ampkit.GraphedStep, batches: list[Any]) -> None:
    for batch in batches:
        step(*batch)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_subclass_in_a_graph(engine: tuple[str, str]) -> None:
    """S1, G7: a subclass with its own state is captured, skips steps, and has eager's bits."""
    device, graph = engine
    histories = []
    with deterministic():
        for kind in ("off", graph):
            torch.manual_seed(1)
            model = nn.Linear(3 * 64, 10).to(device)
            optimizer = FusedAveraging(model.parameters())
            scaler = ampkit.GradScaler(device, init_scale=1024.0)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
            step = ampkit.graphed_step(
                boosted, model, optimizer, scaler=scaler, scheduler=schedule, graph=kind, on_failure="raise"
            )
            history = []
            for batch in make_batches(device, [8] * 10, (1, 4, 7)):
                step(*batch)
                history.append(training_state(model, optimizer, scaler))
            assert step.skipped == 3
            assert step.replays == (0 if kind == "off" else 5)  # see is_undecided
            histories.append(history)
    for i, (left, right) in enumerate(zip(*histories, strict=True)):
        assert_same(left, right, f"after call {i}")


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:GradScaler.step:ampkit.AmpkitWarning")
def test_a_step_that_is_not_undone_stays_eager() -> None:
    """S1: a step that must read the host's decision is not captured, and no step is skipped by mistake."""

    class FusedCounting(AdamW):
        count = 0

        def step(self, closure: Any = None) -> Any:
            self.count = self.count + 1
            return super().step(closure)

    model = nn.Linear(3 * 64, 10).cuda()
    optimizer = FusedCounting(model.parameters(), fused=True)
    scaler = ampkit.GradScaler("cuda", init_scale=1024.0)
    step = ampkit.graphed_step(boosted, model, optimizer, scaler=scaler)
    with pytest.warns(ampkit.CaptureWarning):
        train(step, make_batches("cuda", [8] * 6, (4,)))
    assert step.replays == 0
    assert (optimizer.count, step.skipped) == (5, 1)


def test_step_hooks_are_not_captured() -> None:
    """S1: a replay would not call step hooks. A captured step notices when a hook is registered later."""
    model = nn.Linear(3 * 64, 10)
    optimizer = AdamW(model.parameters(), fused=True)
    assert why_not_capturable(optimizer) == ""
    handle = optimizer.register_step_post_hook(lambda *_: None)
    assert "AdamW has step hooks, which a replay would not call" in why_not_capturable(optimizer)
    handle.remove()
    step = ampkit.graphed_step(boosted, model, optimizer, graph="emulate")
    batches = make_batches("cpu", [8] * 8)
    for batch in batches[:5]:
        step(*batch)
    called: list[int] = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    with pytest.warns(ampkit.CaptureWarning, match="the optimizer's step hooks changed"):
        step(*batches[5])
    assert step.report().eager == {"warm-up": 3, "warm-up again: the optimizer's step hooks changed": 1}
    assert called == [1]


@pytest.mark.cuda
def test_step_hooks_that_come_later_are_called() -> None:
    """S1: a hook that is registered after the capture is called in every step from then on."""
    model = nn.Linear(3 * 64, 10).cuda()
    optimizer = AdamW(model.parameters(), fused=True)
    step = ampkit.graphed_step(boosted, model, optimizer, host_writes="ignore")
    batches = make_batches("cuda", [8] * 12)
    for batch in batches[:5]:
        step(*batch)
    assert step.replays == 2
    called: list[int] = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    with pytest.warns(ampkit.CaptureWarning, match="step hooks"):  # changed; would not be called by a replay
        train(step, batches[5:])
    assert step.replays == 2
    assert len(called) >= 7  # an attempt to capture calls no hook


@pytest.mark.parametrize("fake", [True, pytest.param(False, marks=pytest.mark.cuda)], ids=["fake", "real"])
def test_whether_torch_runs_fused_adagrad_on_cuda(fake: bool) -> None:
    """G7: torch 2.11 has the kernel but refuses to run it, and torch 2.15 runs it. A fake tensor is on no GPU."""
    said = ""
    with FakeTensorMode() if fake else nullcontext():
        weight = torch.ones(1, device="cuda", requires_grad=True)
        weight.grad = torch.ones_like(weight)
        try:
            torch.optim.Adagrad([weight], fused=True).step()
        except RuntimeError as error:  # without a GPU torch 2.15 goes on until it misses the driver
            said = str(error)
    assert ("`fused=True` requires all the params" in said) != FUSED_ADAGRAD_ON_CUDA
    assert fake or not FUSED_ADAGRAD_ON_CUDA or not said
    advice = why_not_capturable(torch.optim.Adagrad([weight]))
    assert ("Write Adagrad(..., fused=True)" in advice) == FUSED_ADAGRAD_ON_CUDA


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if not name.startswith("fused")])
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_a_step_is_undone_on_the_host(name: str, found: float) -> None:
    """S1: undoing a step restores every bit, after the first step and after nan too. Other steps are unchanged."""
    model, optimizer = make(name, "cpu")
    twin, twin_optimizer = make(name, "cpu")
    for i in range(3):
        for one in (model, twin):
            scaled_backward(one, torch.amp.GradScaler("cpu", enabled=False), i, math.nan if found else None)
        before = copy.deepcopy(model.state_dict())
        step_or_undo(optimizer.step, torch.tensor(found), changed_by_step(optimizer))
        twin_optimizer.step()
        if found:
            assert_same(before, model.state_dict())
    if not found:
        assert_same(twin.state_dict(), model.state_dict())
        assert_same(initialised(twin_optimizer), initialised(optimizer))
