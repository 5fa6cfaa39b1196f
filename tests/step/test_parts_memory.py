"""Graphs of the parts of a step in one pool: none overwrites what another one needs, and it is as small as can be."""

import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, bits, deterministic
from pool_tape import TapePool, in_capture, pooled, pooled_bytes
from split_harness import WIDTH, Block
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit
from ampkit._capture.graph.timing import Durations
from ampkit._capture.state.kept_gradients import KeptGradients
from ampkit._step.parts.parts import CHANGED, Parts

pytestmark = pytest.mark.usefixtures("untimed")

Engine = tuple[str, str]
Case = Callable[["Nets", Tensor, bool], None]
WATCHED = 5  # calls before the first one in which graphs are replayed


@pytest.fixture
def pools() -> Iterator[list[TapePool]]:
    """The pools of steps on the CPU, the shared one first."""
    with pooled() as made:
        yield made


class ReadsTwice(torch.autograd.Function):
    """Looks at what it has saved twice, and makes tensors in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        hidden = torch.exp(-x.square())
        ctx.save_for_backward(x, hidden)
        return hidden * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        hidden = ctx.saved_tensors[1]
        scaled = grad * hidden
        del hidden
        others = [torch.full_like(grad, float(i)) for i in range(1, 3)]
        x, hidden = ctx.saved_tensors
        return -4 * x * scaled * others[0] + 0 * hidden


class Fork(nn.Module):
    """Two outputs of eight kernels each that share nothing but the input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(), Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(ReadsTwice.apply(super().forward(x)))


class Spectrum(Block):
    """Saves and returns tensors that are conjugated, or negated, when they are read."""

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.fft(super().forward(1.5 * x))
        return (found * (found + 1).conj() + found.conj().imag * found.exp()).conj()


class Nets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fork, self.twice = Block(), Block(), Fork(), Twice()
        self.spectrum = Spectrum()


def plain(nets: Nets, x: Tensor, odd: bool) -> None:
    (nets.first(x).square().mean() + nets.second(x).square().mean()).backward()


def retained(nets: Nets, x: Tensor, odd: bool) -> None:
    loss = (nets.second(nets.first(x))).square().mean()
    if odd:
        loss.backward(retain_graph=True)
        loss = loss * 2
    loss.backward()


def always_retained(nets: Nets, x: Tensor, odd: bool) -> None:
    loss = (nets.second(nets.first(x))).square().mean()
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def in_another_order(nets: Nets, x: Tensor, odd: bool) -> None:
    losses = [nets.first(x).square().mean(), nets.second(x).square().mean()]
    for loss in losses[:: -1 if odd else 1]:
        loss.backward()


def one_by_one(nets: Nets, x: Tensor, odd: bool) -> None:
    left, right = nets.fork(nets.first(x).detach())
    other = nets.second(x)
    if odd:
        left.square().mean().backward()
        other.square().mean().backward()
        right.square().mean().backward()
    else:
        (left.square().mean() + right.square().mean()).backward()
        other.square().mean().backward()


def other_layouts(nets: Nets, x: Tensor, odd: bool) -> None:
    hidden = nets.second(nets.first(x))
    (hidden.sum() if odd else hidden.square().mean()).backward()


def partly(nets: Nets, x: Tensor, odd: bool) -> None:
    left, right = nets.fork(x)
    left = left.detach() if odd else left
    (nets.second(left) + nets.first(right)).square().mean().backward()


def left_out(nets: Nets, x: Tensor, odd: bool) -> None:
    hidden = nets.first(x)
    if odd:
        hidden = hidden[:3]  # of another shape: the call of the next one is eager
    nets.second(hidden).square().mean().backward()


def unused(nets: Nets, x: Tensor, odd: bool) -> None:
    first, second = nets.first(x), nets.second(x)
    (first if odd else first + second).square().mean().backward()
    if odd:
        second.square().mean().backward()


def not_yet(nets: Nets, x: Tensor, odd: bool) -> None:
    first, second = nets.first(x), nets.second(x)
    (nets.twice(first) if odd else nets.twice(first) + second).square().mean().backward()


def gradients_of(nets: Nets, x: Tensor, odd: bool) -> None:
    loss = nets.second(nets.first(x)).square().mean()
    if odd:
        grads = torch.autograd.grad(loss, [nets.first.second.weight], retain_graph=True)
        loss = loss + grads[0].square().sum()
    loss.backward()


def read_twice(nets: Nets, x: Tensor, odd: bool) -> None:
    nets.twice(nets.first(x)).square().mean().backward()


def conjugated(nets: Nets, x: Tensor, odd: bool) -> None:
    found = nets.spectrum(nets.first(x))
    loss = (found.imag.square() + found.real).mean()
    loss.backward(retain_graph=odd)
    if odd:
        loss.backward()


CASES: list[Case] = [
    plain,
    retained,
    always_retained,
    in_another_order,
    one_by_one,
    other_layouts,
    partly,
    left_out,
    unused,
    not_yet,
    gradients_of,
    read_twice,
    conjugated,
]


def train(engine: Engine, case: Case, odd: Callable[[int], bool]) -> tuple[list[Any], Any]:
    device, graph = engine
    torch.manual_seed(1)
    nets = Nets().to(device)
    optimizer = torch.optim.AdamW(nets.parameters(), lr=1e-2, fused=True)

    @ampkit.graphed(modules=(nets,), optimizers=(optimizer,), graph=graph)
    def step(x: Tensor, flag: Tensor) -> None:
        case(
            nets, x, len((flag * nets.first.first.weight.detach().abs().max()).nonzero()) > 0
        )  # which no graph can hold
        optimizer.step()
        optimizer.zero_grad()

    history = []
    torch.manual_seed(2)
    for i in range(2 * WATCHED + 4):
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(i))
        step(x.to(device), torch.tensor([float(odd(i))], device=device))
        history.append([bits(value) for value in (*nets.state_dict().values(), torch.rand(2, device=device))])
    return history, step.report()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("phase", [0, 1], ids=["later", "at once"])
def test_what_a_graph_overwrites_is_needed_no_more(
    engine: Engine, case: Case, phase: int, pools: list[TapePool]
) -> None:
    """R4: the bits are those of eager calls, also in calls that need what another order of the graphs has freed."""

    def odd(i: int) -> bool:
        return (i > WATCHED and (i // 2) % 2 == phase) or (phase == 1 and i == WATCHED)

    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        expected, _ = train((engine[0], "off"), case, odd)
        found, report = train(engine, case, odd)
    for i, (now, before) in enumerate(zip(found, expected, strict=True)):
        assert_same(now, before, f"call {i}")
    assert report.in_parts == len(found) - WATCHED
    assert any(part.replays >= WATCHED - 2 for part in report.parts), report
    assert bool(pools) == (engine[0] == "cpu")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("pools")
def test_a_second_backward_raises_as_in_eager_calls(engine: Engine) -> None:
    """R4: what a graph has overwritten is not read again in silence."""
    device = engine[0]
    torch.manual_seed(1)
    nets = Nets().to(device)

    @ampkit.graphed(modules=(nets,), graph=engine[1])
    def step(x: Tensor, flag: Tensor) -> None:
        nets.zero_grad()
        loss = nets.first(x).mean()  # whose own backward needs no activations
        loss.backward()
        if len((flag * nets.first.first.weight.detach().abs().max()).nonzero()):
            loss.backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        for _ in range(WATCHED + 2):
            step(torch.randn(6, WIDTH, device=device), torch.zeros(1, device=device))
        with pytest.raises(RuntimeError, match="backward for a second time through a module"):
            step(torch.randn(6, WIDTH, device=device), torch.ones(1, device=device))


class Reads(nn.Module):
    """Layers one after the other, with a number that is read behind each."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        kind = nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(
            kind(width, 2, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x / (1 + x.detach().float().abs().mean().item())
        return x.mean(1)


def classified(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("layers", [2, 5])
def test_the_pool_is_no_larger_than_what_an_eager_step_needs(
    layers: int, pools: list[TapePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations, gradients and what lies between modules take what forward and backward take without graphs."""
    torch.manual_seed(0)
    model = Reads(layers, 32)
    x, y = torch.randn(4, 32, 32), torch.randint(32, (4,))

    def forward_and_backward() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = classified(model, x, y)
        loss.backward()

    def copied(into: list[Tensor], values: list[Tensor]) -> None:
        copies.extend(into)
        torch._foreach_copy_(into, values)

    def get(*args: Any) -> Tensor | None:
        kept.append(get_kept(*args))
        return kept[-1]

    copies, kept, get_kept = list[Tensor](), list[Tensor | None](), KeptGradients.get
    eager = pooled_bytes(forward_and_backward)
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        step = ampkit.graphed_step(classified, model, optimizer, policy="bfloat16", graph="emulate")
        for _ in range(WATCHED + 2):
            step(x, y)
        monkeypatch.setattr("ampkit._step.training_step.foreach_copy_", copied)
        monkeypatch.setattr(KeptGradients, "get", get)
        step(x, y)
    assert [part.replays for part in step.report().parts] == [3] * layers
    assert not copies, "backward makes the gradients where the step keeps them"
    assert len(kept) == len(list(model.parameters()))
    assert all(grad is not None and pools[0].holds(grad) for grad in kept)
    assert len(pools) == 1
    assert pools[0].nbytes <= 1.05 * eager
    assert not step._window._step._working._all, "each part casts its weights itself"


def beside_eager(engine: Engine, calls: int, change: Callable[[], None], *, as_torch: bool = False) -> Any:
    """Return a step behind some calls, in which it has the bits of eager ones. `change` is called in the middle of it.

    `as_torch`: there the rate changes, too, with torch's arithmetic, so that the optimizer leaves the graphs.
    """
    device, graph = engine

    def train(graph: str) -> tuple[list[Any], Any]:
        torch.manual_seed(3)
        model = Reads(2, 16).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        options: dict[str, Any] = {"host_writes": "ignore"}
        if as_torch:
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2 * WATCHED)
            options |= {"arithmetic": "torch", "scheduler": schedule}
        step = ampkit.graphed_step(classified, model, optimizer, graph=graph, **options)
        history = []
        for i in range(calls):
            if i == 2 * WATCHED and graph != "off":
                change()
            x, y = torch.randn(4, 4, 16, device=device), torch.randint(16, (4,), device=device)
            history.append([step(x, y).loss, *map(bits, model.state_dict().values())])
        return history, step

    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.AmpkitWarning)
        (expected, _), (found, step) = train("off"), train(graph)
    assert_same(found, expected)
    return step


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("pools")
def test_parts_that_are_given_up_leave_nothing_behind(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is eager from now on has the bits and the memory of eager steps: no gradient keeps the memory of graphs."""
    give_up = partial(monkeypatch.setattr, Parts, "why_not_now", lambda _: CHANGED)
    step = beside_eager(engine, 3 * WATCHED, give_up)
    assert 0 < step.report().in_parts < 2 * WATCHED, step.report()
    assert not step._window._step.gradients


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("pools")
def test_parts_that_are_given_up_in_a_call_leave_gradients_to_a_later_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the optimizer steps behind the graphs, its gradients are needed when the times have been compared."""
    times = itertools.cycle([1.0, 2.0])  # of an eager step, and of one in parts

    def time_parts() -> None:  # the new rate begins new ones
        monkeypatch.setattr("ampkit._step.parts.split.is_timed", lambda _: True)
        monkeypatch.setattr(Durations, "median_ms", lambda _: next(times))

    step = beside_eager(engine, 6 * WATCHED, time_parts, as_torch=True)
    assert 0 < step.report().in_parts < 6 * WATCHED, step.report()


class InTurn(Reads):
    """Layers in an order that depends on what is read."""

    def forward(self, x: Tensor) -> Tensor:
        number = x.detach().mean().item()
        x = x / (1 + abs(number))
        layers = list(self.layers)[:: 1 if number > 0 else -1]
        return sum(layer(x) for layer in layers).mean(1)  # type: ignore[union-attr]


class Hooked:
    """A model whose gradients somebody keeps, in some calls: a hook, of a parameter or of another, or the caller.

    Or its modules are called in another order in some calls ("order"), or two calls make a step ("accumulate").
    """

    def __init__(self, engine: Engine, how: str) -> None:
        self.device, graph = engine
        torch.manual_seed(1)
        self.how, self.kept, self.clones, self.keeps = how, list[Tensor](), list[Tensor](), False
        self.model = (InTurn if how == "order" else Reads)(2, 16).to(self.device)
        self.weight = self.model.layers[0].linear1.weight
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        if how == "hook":
            self.weight.register_hook(self.keep)
        if how == "param.grad":
            last = self.model.layers[1]
            self.model.layers[0].linear2.weight.register_hook(lambda _: self.keep(last.linear1.weight.grad))
        self.step = ampkit.graphed_step(
            self.loss,
            self.model,
            self.optimizer,
            max_norm=0.1,
            accumulate=1 + (how == "accumulate"),
            graph=graph,
            host_writes="ignore",
        )

    def keep(self, grad: Tensor | None) -> None:
        if self.keeps and grad is not None:
            self.kept.append(grad)
            self.clones.append(grad.clone())

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Any:
        loss = classified(model, x, y)
        if self.how != "aux":
            return loss
        grads = torch.autograd.grad(3 * loss, [self.weight], retain_graph=True)
        return loss, grads[0]

    def run(self) -> list[Any]:
        torch.manual_seed(2)
        history: list[Any] = []
        for i in range(3 * WATCHED):
            self.keeps = i % 4 == 1
            x, y = torch.randn(4, 4, 16, device=self.device), torch.randint(16, (4,), device=self.device)
            out = self.step(x, y)
            self.kept += [] if out.aux is None else [out.aux]
            history.append([out.loss, *map(bits, self.model.state_dict().values())])
        return [history, [bits(grad) for grad in self.kept]]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", ["hook", "param.grad", "aux", "order", "accumulate", "nobody"])
@pytest.mark.usefixtures("pools")
def test_a_gradient_that_somebody_has_is_not_overwritten(engine: Engine, how: str) -> None:
    """R5: gradients of parameters are made in memory that the next step uses again, unless somebody has them."""
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.AmpkitWarning)
        eager = Hooked((engine[0], "off"), how)
        expected = eager.run()
        hooked = Hooked(engine, how)
        found = hooked.run()
    report = hooked.step.report()
    assert report.in_parts >= WATCHED, report
    if how == "param.grad":  # which eager calls clip in place, behind backward
        replayed = hooked.kept[WATCHED // 4 :]
        assert_same([bits(grad) for grad in replayed], [bits(grad) for grad in hooked.clones[WATCHED // 4 :]])
        found[1] = [bits(grad) for grad in hooked.clones]
        expected[1] = [bits(grad) for grad in eager.clones]
    assert_same(found, expected)
    assert len(found[1]) == {"param.grad": 4, "aux": 3 * WATCHED, "hook": 4}.get(how, 0)


class CannotBeCaptured(torch.autograd.Function):
    """A backward that no graph can hold, if it is that of a sum, or in any case."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of_sums_alone: bool) -> Tensor:
        ctx.of_sums_alone = of_sums_alone
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if in_capture() and (not ctx.of_sums_alone or grad.stride() == (0, 0)):
            raise RuntimeError("this cannot be captured")
        return grad * 2, None


class Odd(Block):
    """A block with such a backward."""

    of_sums_alone = False

    def forward(self, x: Tensor) -> Tensor:
        return CannotBeCaptured.apply(super().forward(x), self.of_sums_alone)  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("pools")
def test_a_module_whose_backward_cannot_be_captured_is_eager(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """R4: that is found out before a graph of its forward is replayed; others are captured."""
    monkeypatch.setattr(f"{__name__}.Twice", Odd)
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        expected, _ = train((engine[0], "off"), read_twice, bool)
        found, report = train(engine, read_twice, bool)
    assert_same(found, expected)
    assert [part.module.rpartition(".")[2] for part in report.parts] == ["first"]
    assert report.parts[0].replays >= WATCHED
    assert any("twice: capture failed at" in line and "this cannot be captured" in line for line in report.split)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("pools")
def test_a_backward_that_cannot_be_captured_is_an_error(engine: Engine) -> None:
    """R4: where it could be with other gradients. The module is eager from then on, and random numbers go on."""
    device = engine[0]
    torch.manual_seed(1)
    nets = nn.ModuleList([Block(), Odd()]).to(device)
    nets[1].of_sums_alone = True

    @ampkit.graphed(modules=(nets,), graph=engine[1])
    def step(x: Tensor, flag: Tensor) -> list[Tensor]:
        nets.zero_grad()
        found = nets[1](nets[0](x))
        is_sum = len((flag * nets[0].first.weight.detach().abs().max()).nonzero()) > 0
        (found.sum() if is_sum else found.square().mean()).backward()
        return [param.grad.clone() for param in nets.parameters()]

    x, sums, plain = torch.randn(6, WIDTH, device=device), torch.ones(1, device=device), torch.zeros(1, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        for _ in range(WATCHED + 2):
            step(x, plain)
        with pytest.raises(ampkit.CaptureError, match=r"backward of .*1, which is captured by itself, cannot be"):
            step(x, sums)
        torch.manual_seed(3)
        found = [bits(grad) for grad in step(x, sums)]
        torch.manual_seed(3)
        nets.zero_grad()
        nets[1](nets[0](x)).sum().backward()
    assert_same(found, [bits(param.grad) for param in nets.parameters()])
    assert any("this cannot be captured" in reason for part in step.report().parts for reason in part.eager)
