"""`arithmetic="torch"`: the bits of a loop that is written with torch alone, at random set-ups."""

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from harness import ENGINES, assert_same, deterministic
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

Engine = tuple[str, str]
MORE = [pytest.mark.slow, pytest.mark.seeds]


class SetUp(NamedTuple):
    """What is trained, and how."""

    optimizer: str
    rate: float
    dtype: torch.dtype | None  # of autocast
    scales: bool
    max_norm: float | None
    accumulate: int
    groups: str  # "one", "decay" (norms and biases without) or "reversed"
    scheduled: bool
    overflow: int | None  # the step in which a gradient is not finite


OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr=lr, weight_decay=0.07, fused=True),
    "AdamW amsgrad": lambda params, lr: torch.optim.AdamW(params, lr=lr, amsgrad=True, fused=True),
    "Adam": lambda params, lr: torch.optim.Adam(params, lr=lr, betas=(0.87, 0.97), fused=True),
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True, fused=True),
    "SGD plain": lambda params, lr: torch.optim.SGD(params, lr=lr, fused=True),
    "NAdam": lambda params, lr: torch.optim.NAdam(params, lr=lr, foreach=True, **CAPTURABLE),
    "RMSprop": lambda params, lr: torch.optim.RMSprop(params, lr=lr, foreach=True, **CAPTURABLE),
}
CAPTURABLE = {"capturable": torch.cuda.is_available()}


def drawn(seed: int) -> SetUp:
    rng = random.Random(seed)
    scales = rng.random() < 0.5
    low = torch.float16 if scales else torch.bfloat16
    return SetUp(
        optimizer=rng.choice([*OPTIMIZERS]),
        rate=rng.choice([1e-3, 3e-4, 0.1, 7.7e-3]),
        dtype=rng.choice([None, low, low]),
        scales=scales,
        max_norm=rng.choice([None, 0.1, 0.5, 10.0]),
        accumulate=rng.choice([1, 1, 2]),
        groups=rng.choice(["one", "decay", "reversed"]),
        scheduled=rng.random() < 0.25,
        overflow=rng.choice([None, 2, 7]) if scales else None,
    )


class Trained(NamedTuple):
    """A model, its optimizer, and what goes with them."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any
    scheduler: Any


def made(setup: SetUp, device: str, scaler: type) -> Trained:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 5))
    net.to(device)
    params = list(net.parameters())
    groups: Any = params if setup.groups == "one" else params[::-1]
    if setup.groups == "decay":
        groups = [
            {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
            {"params": [param for param in params if param.ndim > 1]},
        ]
    optimizer = OPTIMIZERS[setup.optimizer](groups, setup.rate)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if setup.scheduled else None
    return Trained(net, optimizer, scaler(device, enabled=setup.scales, init_scale=2.0**10), scheduler)


def loss_fn(net: nn.Module, x: Tensor, y: Tensor, boost: Tensor) -> Tensor:
    return F.cross_entropy(net(x).float(), y) * boost


def batches(setup: SetUp, device: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for call in range(12 * setup.accumulate):
        boost = float("inf") if setup.overflow == call // setup.accumulate else 1.0
        x, y = torch.randn(6, 8, generator=generator), torch.randint(5, (6,), generator=generator)
        yield x.to(device), y.to(device), torch.tensor(boost, device=device)


def results(trained: Trained, losses: list[Tensor], norms: list[Tensor | None]) -> dict[str, Any]:
    moments = {str(i): state for i, state in enumerate(trained.optimizer.state_dict()["state"].values())}
    found = {"net": trained.net.state_dict(), "moments": moments, "losses": torch.stack(losses)}
    if norms and norms[0] is not None:
        found["norms"] = torch.stack([norm for norm in norms if norm is not None])
    return found


def with_torch(setup: SetUp, device: str) -> dict[str, Any]:
    """The loop of torch's AMP examples."""
    trained = made(setup, device, torch.amp.GradScaler)
    net, optimizer, scaler, scheduler = trained
    losses, norms = [], []
    for call, (x, y, boost) in enumerate(batches(setup, device)):
        with torch.autocast(device, setup.dtype, enabled=setup.dtype is not None):
            loss = loss_fn(net, x, y, boost)
        scaler.scale(loss / setup.accumulate if setup.accumulate > 1 else loss).backward()
        losses.append(loss.detach())
        if (call + 1) % setup.accumulate:
            continue
        if setup.max_norm is not None:
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), setup.max_norm))
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return results(trained, losses, norms)


def step_of(setup: SetUp, engine: Engine, arithmetic: str = "torch") -> tuple[Trained, ampkit.GraphedStep]:
    """Return the same as a step, and what it trains."""
    device, graph = engine
    trained = made(setup, device, ampkit.GradScaler)
    policy = None if setup.dtype is None else f"compute={str(setup.dtype).removeprefix('torch.')}"
    return trained, ampkit.graphed_step(
        loss_fn,
        trained.net,
        trained.optimizer,
        policy=policy,
        scaler=trained.scaler,
        max_norm=setup.max_norm,
        accumulate=setup.accumulate,
        scheduler=trained.scheduler,
        arithmetic=arithmetic,
        graph=graph,
    )


def with_ampkit(setup: SetUp, engine: Engine, arithmetic: str = "torch") -> tuple[dict[str, Any], ampkit.Report]:
    losses, norms = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.AmpkitWarning)  # of an optimizer that steps behind the graph
        trained, step = step_of(setup, engine, arithmetic)
        for call, batch in enumerate(batches(setup, engine[0])):
            out = step(*batch)
            losses.append(out.loss)
            if (call + 1) % setup.accumulate == 0 and setup.max_norm is not None:
                norms.append(out.grad_norm)
    return results(trained, losses, norms), step.report()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=MORE) for seed in range(20, 60))])
@pytest.mark.quick(6)
def test_the_bits_of_a_loop_of_torch(engine: Engine, seed: int) -> None:
    """W7: parameters, moments, losses and norms are those of the loop, bit by bit, clipped, scaled or not."""
    setup = drawn(seed)
    with deterministic():
        expected = with_torch(setup, engine[0])
        found, report = with_ampkit(setup, engine)
    assert_same(found, expected)
    assert report.replays > 0
    assert report.failure is None, report.failure
    if not setup.scheduled:
        assert report.eager_optimizer is None


PLAIN = SetUp("AdamW", 1e-3, torch.float16, True, 0.1, 1, "one", False, 5)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_default_has_other_last_bits_where_it_clips(engine: Engine) -> None:
    """W7: what the option is for: one division in the kernel rounds once, and two operations twice."""
    with deterministic():
        expected = with_torch(PLAIN, engine[0])
        default, _ = with_ampkit(PLAIN, engine, arithmetic="ampkit")
        found, _ = with_ampkit(PLAIN, engine)
    assert_same(found, expected)
    with pytest.raises(AssertionError, match="differs"):
        assert_same(default, expected)
    for path, tensor in default["net"].items():
        torch.testing.assert_close(tensor, expected["net"][path], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rate_that_changes_moves_the_optimizer_behind_the_graph(engine: Engine) -> None:
    """W7: a graph would hold a number: the optimizer steps behind it, which is said once; a tensor stays in it."""
    device, _ = engine
    setup = PLAIN._replace(scheduled=True)
    with deterministic():
        expected = with_torch(setup, device)
        trained, step = step_of(setup, engine)
        with pytest.warns(ampkit.CaptureWarning, match=r"AdamW has numbers .* Pass lr=torch\.tensor") as said:
            outs = [step(*batch) for batch in batches(setup, device)]
        assert_same(results(trained, [out.loss for out in outs], [out.grad_norm for out in outs]), expected)
        report = step.report()
        assert (len(said), report.replays > 0, report.failure) == (1, True, None)
        assert "param_groups[0]['lr']" in (report.eager_optimizer or "")

        tensor = setup._replace(rate=torch.tensor(1e-3, device=device))
        expected = with_torch(tensor, device)
        found, report = with_ampkit(tensor._replace(rate=torch.tensor(1e-3, device=device)), engine)
    assert_same(found, expected)
    assert (report.replays, report.eager_optimizer) == (9, None)


def test_a_state_with_a_float_in_place_of_the_rate() -> None:
    """W7: the user has passed a tensor; it is said what has put the float there, and the line that helps."""
    net = torch.nn.Linear(2, 1)
    saved = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True).state_dict()
    for mends in (False, True):
        optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-3), fused=True)
        optimizer.load_state_dict(saved)
        if mends:
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(group["lr"], device="cpu")
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        options: dict[str, Any] = {"arithmetic": "torch", "graph": "emulate", "scheduler": schedule}
        step = ampkit.graphed_step(lambda net, x: net(x).square().mean(), net, optimizer, **options)
        expected = r"A state that was loaded .* group\['lr'\] = torch\.tensor\(group\['lr'\], device='cpu'\)\. Until"
        with nullcontext() if mends else pytest.warns(ampkit.CaptureWarning, match=expected):
            for _ in range(6):
                step(torch.ones(3, 2))
        assert step.report().outcome == ("whole" if mends else "in parts")


@pytest.mark.parametrize("engine", ENGINES)
def test_scan_and_window(engine: Engine) -> None:
    """W7: several steps, or micro-batches, in one call have the same bits."""
    device, _ = engine
    for setup, many in ((PLAIN, "scan"), (PLAIN._replace(accumulate=2), "window")):
        with deterministic():
            expected = with_torch(setup, device)
            trained, step = step_of(setup, engine)
            given = [*batches(setup, device)]
            size = 4 if many == "scan" else 2
            stacks = [
                tuple(map(torch.stack, zip(*given[i : i + size], strict=True))) for i in range(0, len(given), size)
            ]
            outs = [getattr(step, many)(*stack) for stack in stacks]
        losses = [loss for out in outs for loss in out.loss]
        norms = [norm for out in outs for norm in out.grad_norm.reshape(-1)]
        assert_same(results(trained, losses, norms), expected)
        assert step.report().launches > 0


@pytest.mark.cuda
def test_an_optimizer_that_computes_on_the_host_is_named() -> None:
    """W7: bias corrections in float64 on the host are what the loop has: the optimizer steps behind the graph."""
    setup = PLAIN._replace(optimizer="NAdam", rate=0.1)
    with deterministic(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(CAPTURABLE, "capturable", False)
        expected = with_torch(setup, "cuda")
        found, report = with_ampkit(setup, ("cuda", "auto"))
    assert_same(found, expected)
    assert report.replays > 0
    assert "NAdam computes bias corrections on the host" in (report.eager_optimizer or "")


def test_what_has_another_arithmetic_is_refused() -> None:
    """An error names the argument and what to write instead."""
    net, optimizer, _, _ = made(PLAIN, "cpu", ampkit.GradScaler)
    with pytest.raises(ValueError, match=r"graphed_step\(arithmetic='eager'\): expected one of 'ampkit', 'torch'"):
        ampkit.graphed_step(loss_fn, net, optimizer, arithmetic="eager")
    with pytest.raises(NotImplementedError, match=r"with compile= a step has other last bits"):
        ampkit.graphed_step(loss_fn, net, optimizer, arithmetic="torch", compile="default", graph="emulate")
