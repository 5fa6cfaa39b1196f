"""`ampkit.graphed` around a line that no graph can hold: the declared modules without such a line are captured."""

import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from families import every
from harness import ENGINES, assert_same, bits, deterministic
from split_harness import WIDTH, Block, assert_same_as_eager
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import ampkit

pytestmark = pytest.mark.usefixtures("untimed")

Engine = tuple[str, str]


class Nets:
    """A generator, a discriminator and an optimizer for each, for a function to train."""

    def __init__(self, engine: Engine, *, fused: bool = True, scaled: bool = False) -> None:
        torch.manual_seed(0)
        self.device, self.scaler = engine[0], None
        self.gen = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), Block()).to(self.device)
        self.disc = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1)).to(self.device)
        self.opt_g = torch.optim.Adam(self.gen.parameters(), lr=1e-2, fused=True)
        kind: Any = torch.optim.Adam if fused else torch.optim.Adagrad
        self.opt_d = kind(self.disc.parameters(), lr=1e-2, **{"fused": True} if fused else {})
        if scaled:
            self.scaler = ampkit.GradScaler(self.device, init_scale=256.0, growth_interval=3)

    @property
    def declared(self) -> dict[str, Any]:
        return {"modules": (self.gen, self.disc), "optimizers": (self.opt_g, self.opt_d), "scaler": self.scaler}

    def state(self) -> dict[str, Any]:
        state = {f"gen.{key}": bits(value) for key, value in self.gen.state_dict().items()}
        state |= {f"disc.{key}": bits(value) for key, value in self.disc.state_dict().items()}
        for name in ("opt_g", "opt_d"):
            for number, moments in getattr(self, name).state_dict()["state"].items():
                state |= {f"{name}.{number}.{key}": bits(value) for key, value in moments.items()}
        state |= {} if self.scaler is None else {"scaler": self.scaler.state_dict()}
        return {**state, "random": bits(torch.rand(2, device=self.device))}

    def updated(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        """Do a backward and a step."""
        optimizer.zero_grad()
        if self.scaler is None:
            loss.backward()
            optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(optimizer)


Train = Callable[[Nets, Tensor, Tensor, Tensor], Any]


def graphed(nets: Nets, train: Train, graph: str, **options: Any) -> Any:
    """Return a graphed function that trains these nets."""

    @ampkit.graphed(**nets.declared, graph=graph, **options)
    def called(real: Tensor, noise: Tensor, boost: Tensor) -> Any:
        return train(nets, real, noise, boost)

    return called


def batch(device: str, i: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(i)
    return torch.randn(8, WIDTH, generator=made).to(device), torch.randn(8, WIDTH, generator=made).to(device)


def compared(
    engine: Engine, train: Train, calls: int = 12, overflows: tuple[int, ...] = (), **nets: Any
) -> tuple[ampkit.Report, str]:
    """Assert that a function has the bits of eager calls; return its report, and what was said."""
    history: list[Any] = []
    with deterministic(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for graph in ("off", engine[1]):
            subject = Nets(engine, **nets)
            rates = torch.optim.lr_scheduler.ExponentialLR(subject.opt_d, 0.9)
            called, found = graphed(subject, train, graph), []
            for i in range(calls):
                boost = torch.tensor(float("inf") if i in overflows else 1.0, device=engine[0])
                found.append((called(*batch(engine[0], i), boost), subject.state()))
                rates.step()
            history.append(found)
    for i, (now, expected) in enumerate(zip(*history, strict=True)):
        assert_same(now, expected, f"call {i}")
    report = called.report()
    assert (report.replays, report.in_parts + sum(report.eager.values())) == (0, calls)
    (said,) = [str(warning.message) for warning in caught if warning.category is ampkit.CaptureWarning]
    return report, said


def counts(report: ampkit.Report) -> dict[tuple[str, int], int]:
    """Return how often each call was replayed."""
    return {(part.module, part.number): part.replays for part in report.parts}


def gan(nets: Nets, real: Tensor, noise: Tensor, boost: Tensor, *, cache: bool = False, grad: bool = True) -> Any:
    """Train both nets. The host reads the discriminator's loss, which decides about the generator's."""

    def autocast() -> AbstractContextManager[Any]:
        low = nets.scaler is not None
        return torch.autocast(nets.device, torch.float16, cache_enabled=cache) if low else nullcontext()

    with autocast():
        with nullcontext() if grad else torch.no_grad():
            fake = nets.gen(noise)
        loss_d = F.softplus(-nets.disc(real)).mean() + F.softplus(nets.disc(fake.detach())).mean() * boost
    nets.updated(nets.opt_d, loss_d)
    factor = 1.1 if float(loss_d.detach()) > 1.3 else 1.0
    nets.disc.requires_grad_(False)
    with autocast():
        fake = fake if grad else nets.gen(noise)
        loss_g = F.softplus(-nets.disc(fake)).mean() * factor
    nets.updated(nets.opt_g, loss_g)
    nets.disc.requires_grad_(True)
    if nets.scaler is not None:
        nets.scaler.update()
    return {"disc": loss_d, "gen": loss_g}


ALL = {("modules[0]", 0), ("modules[1]", 0), ("modules[1]", 1), ("modules[1]", 2)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", every(2, ["plain", "float16", "one cast for all", "unfused", "without gradients"]))
@pytest.mark.sampled(4)
@pytest.mark.slow
def test_gan(engine: Engine, kind: str) -> None:
    """R4: two models and two optimizers; after every call the bits of eager, and each call of a model is replayed."""
    scaled = kind in ("float16", "one cast for all")
    expected = ALL | ({("modules[0]", 1)} if kind == "without gradients" else set())

    def train(*args: Any) -> Any:
        return gan(*args, cache=kind == "one cast for all", grad=kind != "without gradients")

    report, said = compared(engine, train, overflows=(1, 9) if scaled else (), scaled=scaled, fused=kind != "unfused")
    assert (report.outcome, report.skipped, report.updates) == ("in parts", 2 * scaled, 0)
    if kind == "one cast for all":  # the discriminator's two calls in one autocast use the same casts of its weights
        expected -= {("modules[1]", 0), ("modules[1]", 1)}
        assert re.search(
            r"eager: modules\[1\](, and \d+ in it)?: a tensor that it makes, and does not return, is", str(report)
        )
    assert counts(report) == dict.fromkeys(expected, report.in_parts), str(report)
    assert ("Adagrad" in said) == (kind == "unfused")  # CUDA has no fused one in torch 2.11
    assert "The step is done in parts: modules[0], and modules[1] each get graphs of their own" in said
    assert "eager: all that the function does itself, such as the steps of its optimizers" in report.split


def several_backwards(nets: Nets, real: Tensor, noise: Tensor, boost: Tensor) -> Any:
    """Two losses with a retained graph, the norm of the gradient of each at a weight, and a number that is read."""
    hidden = nets.gen(real)
    scores = nets.disc(hidden)
    losses = F.softplus(scores).mean(), (hidden - noise).square().mean()
    weight = nets.gen[0].first.weight
    norms = [torch.autograd.grad(loss, weight, retain_graph=True)[0].norm() for loss in losses]
    ratio = (norms[0] / norms[1]).item()
    nets.opt_g.zero_grad()
    nets.opt_d.zero_grad()
    losses[0].backward(retain_graph=True)
    (losses[1] * min(ratio, 2.0)).backward()
    nets.opt_g.step()
    nets.opt_d.step()
    return losses


@pytest.mark.parametrize("engine", ENGINES)
def test_several_backwards(engine: Engine) -> None:
    """R4: four backwards through one forward, two of them for one weight only."""
    report, _ = compared(engine, several_backwards)
    assert counts(report) == dict.fromkeys([("modules[0]", 0), ("modules[1]", 0)], report.in_parts)


def penalty(nets: Nets, real: Tensor, noise: Tensor, boost: Tensor) -> Any:
    """Train the discriminator with a gradient penalty, between points that the generator makes and given ones."""
    with torch.no_grad():
        fake = nets.gen(noise)
    between = (0.5 * real + 0.5 * fake).requires_grad_()
    (slope,) = torch.autograd.grad(nets.disc(between).sum(), between, create_graph=True)
    loss = nets.disc(fake).mean() - nets.disc(real).mean() + (slope.norm(dim=1) - 1).square().mean()
    assert loss.item() == loss.item()
    nets.updated(nets.opt_d, loss)
    return loss


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_call_that_is_differentiated_twice_stays_eager(engine: Engine) -> None:
    """R4: a gradient penalty: the other calls of the same model are captured."""
    report, _ = compared(engine, penalty)
    assert counts(report) == dict.fromkeys([("modules[0]", 0), ("modules[1]", 1), ("modules[1]", 2)], report.in_parts)
    assert re.search(
        r"eager: modules\[1\](, and \d+ in it)?: its backward is checkpointed, or differentiated", str(report)
    )
    assert "captured by itself: modules[0], modules[1] (2 calls in a step)" in report.split


def at_leaves(nets: Nets, real: Tensor, noise: Tensor, boost: Tensor) -> Any:
    """Train the generator on how the discriminator's score depends on points, of which autocast keeps one cast."""
    points = nets.gen(real).detach().requires_grad_()
    with torch.autocast(nets.device, torch.bfloat16):
        score = nets.disc(points).mean()
    (slope,) = torch.autograd.grad(score, points)
    loss = (nets.gen(noise) * slope).mean() * (1.0 if float(score) > 0 else 2.0)
    nets.updated(nets.opt_g, loss)
    return loss


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_call_with_a_leaf_of_which_autocast_keeps_a_cast_stays_eager(engine: Engine) -> None:
    """R4: autocast would use the cast outside of the module too. Layers behind the first one are captured."""
    report, _ = compared(engine, at_leaves)
    captured = [("modules[0]", 0), ("modules[0]", 1), ("modules[1][1:3]", 0)]
    assert counts(report) == dict.fromkeys(captured, report.in_parts)
    why = "a leaf that requires grad is passed to it under autocast, which keeps a cast of it"
    assert re.search(rf"eager: modules\[1\](, and \d+ in it)?: {why}", str(report))


def reads_first(nets: Nets, real: Tensor, noise: Tensor, boost: Tensor, *, change: str) -> Tensor:
    """Change the discriminator for one call, in steps where the host reads infinity."""
    hidden, square = nets.gen(real), nets.disc[0].first.weight
    if float((boost + 0.0 * square.sum()).isinf()):  # no question
        if change == "mode":
            nets.disc.eval()
        elif change == "freeze":
            nets.disc.requires_grad_(False)
        elif change == "strides":
            square.data = square.data.t()
    weights = {name: param.detach() * 0.9 for name, param in nets.disc.named_parameters()}
    out = functional_call(nets.disc, weights, (hidden,)) if change == "weights" else nets.disc(hidden)
    nets.disc.train().requires_grad_(True)
    nets.opt_g.zero_grad()
    nets.opt_d.zero_grad()
    out.mean().backward()
    if not square.is_contiguous():
        square.data = square.data.t()
        square.grad = None if square.grad is None else square.grad.contiguous()  # the fused Adam wants equal strides
    nets.opt_g.step()
    if change != "weights":
        nets.opt_d.step()
    return out


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("change", ["mode", "freeze", "strides", "weights"])
def test_what_a_line_of_the_step_changes_before_a_call(engine: Engine, change: str) -> None:
    """R4: a graph holds its module's modes, `requires_grad`, addresses and strides. With others a call is eager."""
    report, _ = compared(engine, lambda *args: reads_first(*args, change=change), overflows=(8, 10, 11))
    other = {part.module: part.eager for part in report.parts if part.eager}
    # The weights are made anew in each call, so that no call but that of the capture has its own. A frozen module
    # leaves no gradients, and the call behind that finds none, which is another key.
    count = report.in_parts - 1 if change == "weights" else 2 if change == "freeze" else 3
    why = "it has other parameters, strides, modes or requires_grad than when it was captured"
    assert other == {"modules[1]": {why: count}}
    assert f"  eager x{count}: modules[1]: {why}" in str(report).splitlines()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation(engine: Engine, mode: Any) -> None:
    """R4: without gradients a module has a graph of its forward alone; in inference mode it has none."""
    nets = Nets(engine)
    nets.gen.eval()

    def evaluate(x: Tensor) -> tuple[Tensor, Tensor]:
        with mode():
            out = nets.gen(x)
            return out, out * out.mean().item()

    called = ampkit.graphed(modules=(nets.gen,), graph=engine[1])(evaluate)
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        for i in range(9):
            x, _ = batch(engine[0], i)
            assert_same(called(x), evaluate(x), f"call {i}")
            with torch.no_grad():  # as training would, in between
                nets.gen[0].first.weight.mul_(0.9)
    report = called.report()
    if mode is torch.no_grad:
        assert counts(report) == {("modules[0]", 0): 4}
    else:
        assert report.outcome == "eager"
        assert re.search(
            r"modules\[0\](, and \d+ in it)?: it is called in inference mode. Use torch.no_grad", str(report)
        )


def closures(nets: Nets, real: Tensor, noise: Tensor, boost: Tensor) -> Any:
    """Compute the loss as often as an optimizer asks for it."""
    optimizer = torch.optim.LBFGS(nets.disc.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.softplus(nets.disc(real)).mean()
        loss.backward()
        return loss

    return optimizer.step(closure).detach()  # type: ignore[attr-defined]  # what closure returns


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_an_optimizer_that_calls_a_closure(engine: Engine) -> None:
    """R4: the model has graphs for each of its calls in a step. The optimizer is made in the step, and not declared."""
    report, said = compared(engine, closures, calls=10)
    assert "steps an optimizer that is not declared (LBFGS)" in said
    assert max(counts(report).values()) == report.in_parts  # the closure is not called as often in each step
    assert len(report.parts) == 3


@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_in_the_middle(engine: Engine) -> None:
    """R4, R6: a call that raises behind a captured forward leaves later calls right."""

    def generate(nets: Nets, real: Tensor, noise: Tensor, boost: Tensor) -> Any:
        hidden = nets.gen(real)
        if float(hidden.detach().isnan().any()):
            raise ArithmeticError("not a number")
        nets.updated(nets.opt_g, nets.disc(hidden).mean())
        return hidden

    def train(graph: str) -> tuple[Any, list[Any]]:
        nets = Nets(engine)
        called, found = graphed(nets, generate, graph), []
        nets.gen[1].eval()  # so that the statistics stay numbers
        for i in range(14):
            real, noise = batch(engine[0], i)
            if i in (7, 10):
                with pytest.raises(ArithmeticError, match="not a number"):
                    called(real * float("nan"), noise, noise)
            out = called(real, noise, noise)
            found.append((out, nets.state(), [bits(param.grad) for param in nets.gen.parameters()]))
        return called, found

    assert assert_same_as_eager(engine, train).report().in_parts >= 9


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_two_functions_share_the_models(engine: Engine) -> None:
    """R4: one trains the discriminator and one the generator, each with graphs of its own."""

    def train_d(nets: Nets, real: Tensor, noise: Tensor, boost: Tensor) -> Tensor:
        with torch.no_grad():
            fake = nets.gen(noise)
        loss = F.softplus(-nets.disc(real)).mean() + F.softplus(nets.disc(fake)).mean()
        nets.updated(nets.opt_d, loss * (1.0 if float(loss.detach()) > 0 else 2.0))
        return loss

    def train_g(nets: Nets, real: Tensor, noise: Tensor, boost: Tensor) -> Tensor:
        loss = F.softplus(-nets.disc(nets.gen(noise))).mean()
        nets.updated(nets.opt_g, loss * (1.0 if float(loss.detach()) > 0 else 2.0))
        return loss

    def train(graph: str) -> tuple[list[Any], list[Any]]:
        nets, found = Nets(engine), []
        functions = [graphed(nets, function, graph) for function in (train_d, train_g)]
        for i in range(10):
            boost = torch.ones((), device=engine[0])
            found.append(([function(*batch(engine[0], i), boost) for function in functions], nets.state()))
        return functions, found

    functions = assert_same_as_eager(engine, train)
    assert [len(function.report().parts) for function in functions] == [3, 2]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("on_failure", ["parts", "eager", "raise"])
def test_where_no_module_is_declared(engine: Engine, on_failure: str) -> None:
    """R4: the report says what to write; with on_failure="eager" nobody has asked for parts."""

    @ampkit.graphed(modules=(), graph=engine[1], on_failure=on_failure)
    def doubled(x: Tensor) -> Tensor:
        return x * (2.0 if x.sum().item() == x.sum().item() else 1.0)

    x, _ = batch(engine[0], 0)
    assert doubled.report().split == ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        if on_failure == "raise":
            with pytest.raises(ampkit.CaptureError, match="1 line of the step cannot be captured"):
                [doubled(x) for _ in range(6)]
            return
        assert all(torch.equal(doubled(x), 2 * x) for _ in range(6))
    report = doubled.report()
    assert report.outcome == "eager"
    said = "not in parts: modules=() declares no module that could be captured by itself. Pass those that"
    assert (said in str(report)) == (on_failure == "parts")


@pytest.mark.parametrize("engine", ENGINES)
def test_where_no_module_can_be_captured(engine: Engine) -> None:
    """R4: the function is eager from then on, and one warning says why."""

    def small(nets: Nets, real: Tensor, noise: Tensor, boost: Tensor) -> Tensor:
        out = nets.disc[2](real)
        nets.updated(nets.opt_d, out.mean() * (1.0 if float(out.detach().sum()) > 0 else 2.0))
        return out

    report, said = compared(engine, small, calls=9)
    assert (report.outcome, report.in_parts) == ("eager", 0)
    why = "no module can be captured by itself (modules[1].2: it has fewer than 6 kernels), and the optimizers that a"
    assert f"Nor is it done in parts: {why} function calls are not captured by themselves." in said


class Reads(nn.Linear):
    """Looks at what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * (1.0 if float(out.detach().sum()) > 0 else 2.0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_reason_is_said_once(engine: Engine) -> None:
    """R4: the line in the way stands once in the warning and once in the report, and so does why there are no parts."""
    net = Reads(4, 4).to(engine[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)

    @ampkit.graphed(modules=(net,), optimizers=(optimizer,), graph=engine[1])
    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    x = torch.ones(2, 4, device=engine[0])
    with pytest.warns(ampkit.CaptureWarning) as caught:
        [train(x) for _ in range(9)]
    (said,) = [str(warning.message) for warning in caught]
    for text in (said, str(train.report())):
        assert text.count("to read a value") == 1
        assert text.count("no module can be captured by itself") == 1
    train.close()


class Attends(nn.Module):
    """Attention, whose backward casts under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.1, "gelu", batch_first=True)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.attention(x))


def gradients_under_autocast(device: str, graph: str, dtype: torch.dtype) -> tuple[list[Any], Any]:
    torch.manual_seed(1)
    nets = nn.ModuleList([Attends(), Attends()]).to(device)
    weights = [nets[0].block.first.weight, nets[0].attention.self_attn.in_proj_weight]
    optimizer = torch.optim.AdamW(nets.parameters(), lr=1e-2, fused=True)

    @ampkit.graphed(modules=(nets,), optimizers=(optimizer,), graph=graph)
    def step(x: Tensor) -> list[Tensor]:
        with torch.autocast(device, dtype):
            hidden = nets[0](x)
            loss = nets[1](hidden / max(hidden.detach().abs().mean().item(), 1e-3)).float().square().mean()
            grads = torch.autograd.grad(loss, weights, retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach(), *grads]

    torch.manual_seed(2)
    made = (torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(i)).to(device) for i in range(12))
    return [[bits(found) for found in step(x)] for x in made], step.report()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_backward_that_begins_under_autocast(engine: Engine, dtype: torch.dtype) -> None:
    """R4: `torch.autograd.grad` within the autocast has the bits of an eager call, and so has the step's backward."""
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        expected, _ = gradients_under_autocast(engine[0], "off", dtype)
        found, report = gradients_under_autocast(*engine, dtype)
    assert_same(found, expected)
    assert report.in_parts > 0
