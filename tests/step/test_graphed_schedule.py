"""`graphed(scheduler=...)`: the bits of a plain loop that steps the schedulers behind its calls."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, bits, deterministic
from tape import taped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import ampkit

Engine = tuple[str, str]
CALLS = 12


class Gan:
    """Two networks with an optimizer and a schedule each, and one loss scale."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.gen = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6)).to(device)
        self.disc = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(8, 1)).to(device)
        self.modules = (self.gen, self.disc)
        opt_g = torch.optim.Adam(self.gen.parameters(), lr=1e-2, fused=True)
        opt_d = torch.optim.SGD(self.disc.parameters(), lr=1e-2, momentum=0.9, fused=True)
        self.optimizers = (opt_g, opt_d)
        self.scaler = ampkit.GradScaler(device, init_scale=256.0, growth_interval=3)
        one = lr_scheduler.SequentialLR(
            opt_g, [lr_scheduler.LinearLR(opt_g, 0.1, total_iters=4), lr_scheduler.ExponentialLR(opt_g, 0.7)], [4]
        )
        self.schedulers = [one, lr_scheduler.CosineAnnealingLR(opt_d, 9)]

    def call(self, real: Tensor, noise: Tensor, boost: Tensor, both: bool = True) -> tuple[Tensor, ...]:
        """Step the discriminator, and if wanted the generator."""
        scaler, (opt_g, opt_d) = self.scaler, self.optimizers
        with torch.autocast(self.device, dtype=torch.bfloat16):
            fake = self.gen(noise)
            loss_d = F.softplus(-self.disc(real)).mean() + F.softplus(self.disc(fake.detach())).mean() * boost
        opt_d.zero_grad()
        scaler.scale(loss_d).backward()
        scaler.step(opt_d, max_norm=1.0)
        loss_g = loss_d.detach()
        if both:
            with torch.autocast(self.device, dtype=torch.bfloat16):
                loss_g = F.softplus(-self.disc(fake)).mean()
            opt_g.zero_grad()
            scaler.scale(loss_g).backward()
            scaler.step(opt_g)
        scaler.update()
        return loss_d, loss_g

    def batches(self, calls: int = CALLS) -> list[tuple[Tensor, ...]]:
        """Return arguments of calls; two of them make the discriminator's gradients overflow."""
        made = torch.Generator().manual_seed(1)
        drawn = [[torch.randn(8, n, generator=made).to(self.device) for n in (6, 4)] for _ in range(calls)]
        boosts = [torch.tensor(float("inf") if i in (1, 8) else 1.0, device=self.device) for i in range(calls)]
        return [(*tensors, boost) for tensors, boost in zip(drawn, boosts, strict=True)]

    def state(self) -> list[Any]:
        """Return all that a call may change."""
        tensors = [bits(value) for module in self.modules for value in module.state_dict().values()]
        states = [
            {f"{number}.{name}": bits(value) for number, state in states.items() for name, value in state.items()}
            for states in (optimizer.state_dict()["state"] for optimizer in self.optimizers)
        ]
        rates = [float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups]
        return [tensors, states, rates, self.scaler.state_dict(), bits(torch.rand(2, device=self.device))]


def history(call: Callable[..., Any], gan: Gan, behind: Callable[[bool], None] = lambda _: None) -> list[Any]:
    """Return what each call returned and left. Every third one steps the discriminator alone."""
    torch.manual_seed(5)
    found = []
    for i, batch in enumerate(gan.batches()):
        both = i % 3 != 2
        outs = call(*batch, both)
        behind(both)
        found.append(([*outs], gan.state()))
    return found


def plain(device: str) -> list[Any]:
    """Return what the plain loop leaves."""
    gan = Gan(device)

    def behind(both: bool) -> None:
        gan.schedulers[1].step()
        if both:
            gan.schedulers[0].step()

    return history(gan.call, gan, behind)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("finds", [False, True])
def test_plain_loop(engine: Engine, finds: bool) -> None:
    """Each scheduler is stepped behind the calls that step its optimizer, or skip it, and behind no other one."""
    device, graph = engine
    with deterministic(), taped() if device == "cpu" else nullcontext():
        expected = plain(device)
        for mode in ("off", graph):
            gan = Gan(device)
            state = {} if finds else {"modules": gan.modules, "optimizers": gan.optimizers}
            function = ampkit.graphed(
                **state, scaler=gan.scaler, scheduler=gan.schedulers, graph=mode, on_failure="raise"
            )(gan.call)
            assert_same(history(function, gan), expected, mode)
            assert function.replays == (0 if mode == "off" else CALLS - 2 * 3 - finds)
    first, last = expected[0][1][2], expected[-1][1][2]
    assert all(before != after for before, after in zip(first, last, strict=True))


LENGTHS = (6, 20, 33, 5, 16)  # of scans


def scans(call: Callable[..., Any] | None, gan: Gan, both: bool) -> list[Any]:
    """Return what scans returned and left. Without a function to call, a plain loop makes their calls."""
    batches = iter(gan.batches(sum(LENGTHS)))
    torch.manual_seed(5)
    found = []
    for length in LENGTHS:
        given = [next(batches) for _ in range(length)]
        if call is not None:
            outs = call(*map(torch.stack, zip(*given, strict=True)), both)
        else:
            singles = []
            for batch in given:
                singles.append(gan.call(*batch, both))
                for scheduler in gan.schedulers[0 if both else 1 :]:
                    scheduler.step()
            outs = [torch.stack(column) for column in zip(*singles, strict=True)]
        found.append(([*outs], gan.state()))
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", ["both", "one", "found", "verified"])
def test_scan(engine: Engine, case: str) -> None:
    """Each call of a launch has the rates of its own, of the schedulers whose optimizers it steps."""
    device, graph = engine
    with deterministic(), taped() if device == "cpu" and case != "verified" else nullcontext():
        expected = scans(None, Gan(device), case != "one")
        gan = Gan(device)
        state: dict[str, Any] = {} if case == "found" else {"modules": gan.modules, "optimizers": gan.optimizers}
        options = {"verify": 4} if case == "verified" else {}
        function = ampkit.graphed(
            **state, scaler=gan.scaler, scheduler=gan.schedulers, graph=graph, on_failure="raise", **options
        )(gan.call)
        found = scans(function.scan, gan, case != "one")
    for i, length in enumerate(LENGTHS):
        assert_same(found[i], expected[i], f"scan {i} of {length}")
    # 6: 3 warm-up calls and a graph. 20 and 33: 16 + 4 and 16 + 16 + 1. 5. 16.
    assert (function.report().launches, function.report().scanned) == (6, 16 + 4 + 32 + 5 + 16)


def with_momentum(optimizer: torch.optim.Optimizer) -> Any:
    """Return a schedule that changes the momentum in one of its steps."""

    class Later(lr_scheduler.ExponentialLR):
        def step(self, epoch: int | None = None) -> None:
            super().step(epoch)
            if self.last_epoch == 24:
                optimizer.param_groups[0]["momentum"] = 0.5

    return Later(optimizer, 0.95)


@pytest.mark.parametrize("kind", ["changes momentum", "of the user's", "tensor rate"])
def test_scan_call_by_call(kind: str) -> None:
    """What cannot be stepped ahead of a launch leaves the bits of single calls, too."""
    histories = []
    for way in ("plain", "calls", "scan"):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        rate: Any = torch.tensor(0.5) if kind == "tensor rate" else 0.5
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=True)
        made = {"changes momentum": with_momentum, "of the user's": Halving}
        scheduler = made.get(kind, lambda each: lr_scheduler.ExponentialLR(each, 0.9))(optimizer)

        def update(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        xs = torch.arange(40 * 12.0).reshape(40, 3, 4) / 1000
        function = ampkit.graphed(
            modules=(model,), optimizers=(optimizer,), scheduler=scheduler, graph="emulate", on_failure="raise"
        )(update)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ampkit.CaptureWarning)  # of the new momentum
            outs = []
            for x in xs if way != "scan" else ():
                outs.append(update(x) if way == "plain" else function(x))
                if way == "plain":
                    scheduler.step()
            stacked = function.scan(xs) if way == "scan" else torch.stack(outs)
        histories.append([stacked, bits(model.weight), float(optimizer.param_groups[0]["lr"])])
        assert function.report().launches == 0
    assert_same(histories[1], histories[0], "calls")
    assert_same(histories[2], histories[0], "scan")


@pytest.mark.parametrize("graph", ["off", "emulate"])
def test_a_step_that_is_skipped_on_the_host(graph: str) -> None:
    """A schedule goes on behind a step that the scaler skips by not calling it, as it does in a plain loop."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    optimizer.register_step_post_hook(lambda *_: None)  # so that no step can be undone
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = ampkit.GradScaler("cpu", init_scale=256.0)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        update = ampkit.graphed(
            modules=(model,), optimizers=(optimizer,), scaler=scaler, scheduler=scheduler, graph=graph
        )(step)
        for i in range(5):
            update(torch.full((3, 4), float("inf") if i == 2 else 1.0))
    assert update.report().skipped == 1
    assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.5**5


class Halving:
    """A schedule that is none of torch's, and does not say whose it is."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups

    def step(self) -> None:
        for group in self._groups:
            group["lr"] *= 0.5


def make(graph: str = "emulate", **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Return a function that steps its optimizer if it is told so, and the optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    scheduler = options.pop("scheduler")(optimizer)

    @ampkit.graphed(modules=(model,), optimizers=(optimizer,), scheduler=scheduler, graph=graph, **options)
    def update(x: Tensor, steps: bool = True) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if steps:
            optimizer.step()
        return loss

    return update, optimizer


def test_a_schedule_of_another_kind() -> None:
    """One that does not tell its optimizer is stepped behind calls that step any."""
    update, optimizer = make(scheduler=Halving, on_failure="raise")
    for i in range(10):
        update(torch.ones(3, 4), i % 2 == 0)
    assert (update.replays, optimizer.param_groups[0]["lr"]) == (10 - 2 * 3, 0.5**6)


def test_an_error_steps_no_schedule() -> None:
    """A call that fails has not stepped."""
    update, optimizer = make(scheduler=lambda made: lr_scheduler.ExponentialLR(made, 0.5))
    with pytest.raises(RuntimeError, match="shapes"):
        update(torch.ones(3, 5))
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_verified() -> None:
    """A replay that is compared with an eager call steps the schedule once."""
    update, optimizer = make(scheduler=lambda made: lr_scheduler.ExponentialLR(made, 0.5), verify=3, on_failure="raise")
    for _ in range(8):
        update(torch.ones(3, 4))
    assert (update.replays, optimizer.param_groups[0]["lr"]) == (5, 0.5**9)


def test_a_wrong_graph_has_stepped() -> None:
    """Where `verify` finds a difference, the call was done all the same, and with it the schedule's step."""
    model, hidden = nn.Linear(4, 2), torch.zeros(())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    known: dict[str, Any] = {"modules": (model,), "optimizers": (optimizer,)}
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)

    @ampkit.graphed(**known, scheduler=scheduler, graph="emulate", verify=9, on_failure="raise")
    def update(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        hidden.add_(1.0)
        model.bias.data.add_(hidden)

    for _ in range(3):
        update(torch.ones(3, 4))
    with pytest.raises(ampkit.CaptureError, match="This step was done"):
        update(torch.ones(3, 4))
    assert optimizer.param_groups[0]["lr"] == 0.5 ** (1 + 4)


def test_a_loop_that_steps_it_too() -> None:
    """The rate would fall twice as fast, which is said once."""
    schedulers = []

    def made(optimizer: torch.optim.Optimizer) -> Any:
        schedulers.append(lr_scheduler.ExponentialLR(optimizer, 0.9))
        return schedulers[0]

    update, _ = make(scheduler=made)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(8):
            update(torch.ones(3, 4))
            schedulers[0].step()
    (found,) = warned
    assert str(found.message).startswith("graphed(scheduler=ExponentialLR): your loop steps the scheduler too")
    assert found.filename == __file__


def test_wrong_use() -> None:
    """What cannot be a schedule of the function is refused where it is decorated."""
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizer, stranger = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))
    known: dict[str, Any] = {"modules": (model,), "optimizers": (optimizer,)}
    with pytest.raises(ValueError, match=r"graphed\(scheduler=StepLR\): it was made for another SGD"):
        ampkit.graphed(**known, scheduler=lr_scheduler.StepLR(stranger, 3))
    with pytest.raises(ValueError, match=r"graphed\(scheduler=ReduceLROnPlateau\): it needs a metric"):
        ampkit.graphed(**known, scheduler=lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(ValueError, match=r"graphed\(scheduler=0.5\): expected an object with a method step"):
        ampkit.graphed(**known, scheduler=0.5)  # type: ignore[arg-type]  # that is the mistake
    with pytest.raises(ValueError, match=r"graphed\(scheduler=StepLR\): there is no optimizer"):
        ampkit.graphed(modules=(model,), scheduler=lr_scheduler.StepLR(optimizer, 3))


@pytest.mark.parametrize("graph", ["off", "emulate"])
def test_a_step_that_the_device_decides(graph: str) -> None:
    """A question about the arguments decides whether the optimizer steps, and with it the schedule."""
    histories = []
    for way in ("plain", graph):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.7)

        def update(x: Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            if x.mean() < 1.0:
                optimizer.step()
            return loss.detach()

        state: dict[str, Any] = {"modules": (model,), "optimizers": (optimizer,)}
        function = ampkit.graphed(**state, scheduler=scheduler, graph=graph, on_failure="raise")(update)
        outs = []
        with taped():
            for i in range(16):
                x = torch.full((3, 4), 2.0 if i in (5, 9, 10, 13) else 0.005 * i)
                outs.append((update if way == "plain" else function)(x))
                if way == "plain" and x.mean() < 1.0:
                    scheduler.step()
        histories.append([outs, bits(model.weight), optimizer.param_groups[0]["lr"]])
        assert (function.replays > 6) == (way == "emulate")
    assert_same(histories[1], histories[0])
