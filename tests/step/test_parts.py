"""An optimizer that no graph can hold: forward and backward are captured, and it steps eagerly behind them."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from harness import ENGINES, assert_same, deterministic, make_net, training_state
from split_harness import finish_within
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampkit

Engine = tuple[str, str]


class Lion(torch.optim.Optimizer):
    """Evolved sign momentum (arXiv:2302.06675), as users write it: a loop, and numbers on the host."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"], state["momentum"] = 0, torch.zeros_like(param)
                state["step"] += 1
                rate = group["lr"] * (1 + 1 / state["step"])  # another number in each step
                param.mul_(1 - rate * group["weight_decay"])
                param.add_((state["momentum"] * first + param.grad * (1 - first)).sign_(), alpha=-rate)
                state["momentum"] = state["momentum"] * second + param.grad * (1 - second)  # another tensor each time


def muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.02)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "muon": muon,
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, fused=False),
    "lion": Lion,
}


def loss_fn(model: nn.Module, x: Tensor, y: Tensor, boost: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y) * boost


def batch(device: str, i: int, boost: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(i)
    x, y = torch.randn(4, 3, 8, 8, generator=random), torch.randint(0, 10, (4,), generator=random)
    return x.to(device), y.to(device), torch.tensor(boost).to(device)


def made(
    engine: Engine, name: str, options: dict[str, Any]
) -> tuple[nn.Module, torch.optim.Optimizer, ampkit.GraphedStep]:
    model = make_net(engine[0])
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.manual_seed(5)
    step = ampkit.graphed_step(loss_fn, model, optimizer, scheduler=schedule, graph=engine[1], **options)
    return model, optimizer, step


def calls(options: dict[str, Any]) -> int:
    return 10 + 6 * int(options.get("accumulate", 1))


def trajectory(engine: Engine, name: str, options: dict[str, Any], overflows: bool) -> tuple[list[Any], Any]:
    model, optimizer, step = made(engine, name, options)
    history = []
    for i in range(calls(options)):
        out = step(*batch(engine[0], i, math.inf if overflows and i in (1, 7) else 1.0))
        history.append([*training_state(model, optimizer, step.scaler), out.loss, out.grad_norm, out.skipped])
    step.flush()
    return [*history, training_state(model, optimizer, step.scaler)], step


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": "float16", "max_norm": 0.5},
        {"policy": "bfloat16", "max_norm": 0.5, "accumulate": 2},
        {"policy": "float16", "accumulate": 3, "after_step": lambda model: model.head.bias.clamp_(-0.1, 0.1)},
    ],
    ids=["plain", "scaled", "accumulated", "all"],
)
@pytest.mark.sampled(8)
def test_the_bits_of_eager_steps(engine: Engine, name: str, options: dict[str, Any]) -> None:
    """R4: forward and backward are replayed, under a rate that changes in each step and with skipped steps.

    What Muon computes of its rate is in tensors on the device, so that its step is a part of the graph, too.
    """
    overflows = options.get("policy") == "float16"
    with warnings.catch_warnings(record=True) as caught, deterministic():
        warnings.simplefilter("always")
        expected, _ = trajectory((engine[0], "off"), name, options, overflows)
        found, step = trajectory(engine, name, options, overflows)
    assert_same(expected, found)
    report, accumulate = step.report(), options.get("accumulate", 1)
    assert report.failure is None
    if name == "muon":
        assert (report.outcome, report.eager_optimizer) == ("whole", None)
        assert step.replays >= 4
        return
    assert (step.replays, report.outcome) == (calls(options) - 3 * accumulate, "in parts")
    assert "eager behind each graph: " in str(report)
    told = [str(warning.message) for warning in caught if warning.category is ampkit.CaptureWarning]
    assert len(told) == 1
    assert "forward and backward are captured, and the optimizer steps eagerly behind them" in told[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_bits_of_a_loop_of_torch_alone(engine: Engine) -> None:
    """R4: without clipping and loss scale, the loop that a user writes has the same bits."""
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        model, _, step = made(engine, "lion", {})
        for i in range(9):
            step(*batch(engine[0], i))
        plain = make_net(engine[0])
        optimizer = Lion(plain.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        torch.manual_seed(5)
        for i in range(9):
            optimizer.zero_grad()
            loss_fn(plain, *batch(engine[0], i)).backward()
            optimizer.step()
            schedule.step()
    assert step.replays == 6
    assert_same(list(plain.state_dict().values()), list(model.state_dict().values()))


class Remembering(torch.optim.Optimizer):
    """Keeps the gradient tensors of the last step, as MARS does in timm 1.0.29, in its state or elsewhere."""

    def __init__(self, params: Any, in_state: bool) -> None:
        super().__init__(params, {"lr": 0.01})
        self.in_state = in_state
        self.last: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for param in self.param_groups[0]["params"]:
            before = self.state[param].get("last") if self.in_state else self.last.get(param)
            param.sub_(param.grad if before is None else 1.5 * param.grad - 0.5 * before, alpha=0.01)
            if self.in_state:
                self.state[param]["last"] = param.grad
            else:
                self.last[param] = param.grad.view(-1).view_as(param)


@pytest.mark.parametrize("engine", [*ENGINES, ("cpu", "off")])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("in_state", [True, False])
@pytest.mark.quick(4)
@pytest.mark.sampled(2)
def test_an_optimizer_may_keep_gradients(engine: Engine, accumulate: int, in_state: bool) -> None:
    """R5: no later call overwrites a gradient that the optimizer has seen. The bits are those of torch's own loop."""
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        model, plain = make_net(engine[0]), make_net(engine[0])
        optimizer = Remembering(model.parameters(), in_state)
        torch.manual_seed(5)
        step = ampkit.graphed_step(loss_fn, model, optimizer, accumulate=accumulate, graph=engine[1])
        for i in range(8 * accumulate):
            step(*batch(engine[0], i))
        theirs = Remembering(plain.parameters(), in_state)
        torch.manual_seed(5)
        for i in range(8 * accumulate):
            (loss_fn(plain, *batch(engine[0], i)) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                theirs.step()
                theirs.zero_grad()
    assert (step.replays > 0) == (engine[1] != "off")
    assert_same(list(plain.state_dict().values()), list(model.state_dict().values()))


class OpNames(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{"policy": "float16", "max_norm": 0.5}, {"max_norm": 0.5}, {"policy": "float16"}])
def test_unscale_norm_and_clipping_are_in_the_graph(
    engine: Engine, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R4: behind a replay only the optimizer and the loss scale run, and `param.grad` is what it steps on."""
    behind: list[list[str]] = []
    norms: list[Tensor] = []

    @contextmanager
    def noting() -> Iterator[None]:
        with OpNames() as ops:
            yield
        behind.append(ops.names)

    class Looking(Lion):
        def step(self, closure: None = None) -> None:
            grads = [param.grad for group in self.param_groups for param in group["params"]]
            norms.append(torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads])))
            super().step()

    model = make_net(engine[0])
    scaler = ampkit.GradScaler(engine[0], init_scale=8.0) if "policy" in options else None
    optimizer = Looking(model.parameters())
    step = ampkit.graphed_step(loss_fn, model, optimizer, scaler=scaler, graph=engine[1], **options)
    x, y, boost = batch(engine[0], 0, 100.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.AmpkitWarning)  # on CUDA also that a skip waits
        for _ in range(4):
            step(x, y, boost)
    finish_within(noting, monkeypatch)
    norms.clear()
    before = step.replays
    outs = [step(x, y, boost) for _ in range(3)]
    assert step.replays == before + 3
    for names in behind:
        measuring = [name for name in names if "norm" in name and name != "linalg_vector_norm"]
        assert not measuring, "the norm is measured in the graph"
        assert names.count("linalg_vector_norm") == 1, "that of this test's own optimizer"
        assert not [name for name in names if name in ("_foreach_mul_", "_foreach_mul", "reciprocal")]
        assert not any("unscale" in name for name in names)
    for out, norm in zip(outs, norms, strict=True):
        limit = 0.5 if "max_norm" in options else math.inf
        torch.testing.assert_close(norm, torch.clamp(out.grad_norm, max=limit), rtol=1e-4, atol=0.0)
        assert out.grad_norm > 0.5


def two_groups(params: Any) -> torch.optim.Optimizer:
    given = list(params)
    return Lion([{"params": given[:3]}, {"params": given[3:], "betas": (0.8, 0.95)}])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "options",
    [
        {"policy": "float16", "max_norm": 0.5},
        {"policy": "float16", "max_norm": 0.5, "accumulate": 3, "numerics": True},
        {"policy": "bfloat16", "max_norm": 0.5, "numerics": True},
        {"max_norm": 0.5, "verify": 3},
        {"policy": "float16", "max_norm": math.inf, "verify": 3, "accumulate": 2},
    ],
    ids=["groups", "observed", "observed-bf16", "verified", "verified-fp16"],
)
@pytest.mark.sampled(4)
def test_the_bits_of_eager_steps_with_several_groups(engine: Engine, options: dict[str, Any]) -> None:
    """R4: with two param groups, a scaler with hysteresis and limits, an observer, `verify`, and a resumed training."""
    results, reports = [], []
    for graph in ("off", engine[1]):
        history: list[Any] = []
        saved: tuple[Any, ...] = ()
        for part in range(2):  # the second one goes on from the state dicts of the first
            model = make_net(engine[0])
            optimizer = two_groups(model.parameters())
            scaler = ampkit.GradScaler(engine[0], init_scale=2.0**10, hysteresis=2, min_scale=2.0**6)
            if saved:
                for owner, state in zip((model, optimizer, scaler), saved, strict=True):
                    owner.load_state_dict(state)
            given = {**options}
            numerics = ampkit.debug.numerics(model, every=2) if given.pop("numerics", False) else None
            given["verify"] = given.get("verify", 0) if graph != "off" else 0
            if "policy" in given and given["policy"] == "float16":
                given["scaler"] = scaler
            with deterministic(), warnings.catch_warnings():
                warnings.simplefilter("ignore", ampkit.AmpkitWarning)  # on CUDA also that a skip waits
                step = ampkit.graphed_step(loss_fn, model, optimizer, numerics=numerics, graph=graph, **given)
                torch.manual_seed(part)
                for i in range(26 if "accumulate" in given else 14):
                    out = step(*batch(engine[0], i, math.inf if "scaler" in given and i in (1, 8, 9, 13) else 1.0))
                    history += [*training_state(model, optimizer, step.scaler), out.loss, out.grad_norm, out.skipped]
                step.flush()
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scaler.state_dict()))
            reports.append((step.report(), str(numerics and numerics.report())))
        results.append(history)
    assert_same(*results)
    assert [report.outcome for report, _ in reports[2:]] == ["in parts"] * 2
    assert all(report.replays >= 4 and report.failure is None for report, _ in reports[2:])
    assert reports[0][1] == reports[2][1], "what the observer has measured"


@pytest.mark.parametrize("engine", ENGINES)
def test_step_hooks_are_called_in_each_step(engine: Engine) -> None:
    """A fused optimizer with a step hook, which a replay would not call, steps eagerly behind the graph."""
    model = nn.Linear(4, 2).to(engine[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    with pytest.warns(ampkit.CaptureWarning, match="SGD has step hooks"):
        step = ampkit.graphed_step(lambda m, x: m(x).square().mean(), model, optimizer, graph=engine[1])
    for _ in range(8):
        step(torch.ones(2, 4, device=engine[0]))
    assert (step.replays, len(steps)) == (5, 8)


@pytest.mark.parametrize("engine", ENGINES)
def test_verify_finds_a_wrong_graph_and_the_optimizer_steps_all_the_same(engine: Engine) -> None:
    """`verify` compares forward and backward; the step whose graph is wrong is a step like any other."""
    doubled = numpy.zeros(100)  # what large arrays hold is not compared from call to call

    def scaled(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() * (2.0 if doubled[0] else 1.0)

    def run(graph: str, verify: int) -> tuple[list[Tensor], ampkit.GraphedStep]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2).to(engine[0])
        doubled[0] = 0
        step = ampkit.graphed_step(scaled, model, Lion(model.parameters()), graph=graph, verify=verify)
        for i in range(8):
            doubled[0] += i == 5
            step(torch.ones(2, 4, device=engine[0]))
        return list(model.parameters()), step

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        expected, _ = run("off", 0)
        found, step = run(engine[1], 4)
    if engine[1] == "auto":  # the emulated graph calls the function again, which finds the new number
        assert any("verify: " in str(warning.message) for warning in caught)
        assert step.report().outcome == "eager"
    assert step.captures == 1, "the change was not noticed"
    assert_same(expected, found)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_forward_that_cannot_be_captured_is_eager_with_its_optimizer(engine: Engine) -> None:
    """A warning says so. From then on gradients are not copied, and the step is one piece."""
    model = nn.Linear(4, 2).to(engine[0])

    def reads(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        float(loss.detach())
        return loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = ampkit.graphed_step(reads, model, Lion(model.parameters()), graph=engine[1])
        for _ in range(6):
            step(torch.ones(2, 4, device=engine[0]))
    texts = ("steps eagerly behind", "Training goes on eagerly")
    told = [[text in str(warning.message) for text in texts] for warning in caught]
    assert told == [[False, True]], "there is no graph that the optimizer could step behind"
    assert (step.report().outcome, step.report().eager_optimizer) == ("eager", None)
    before = {name: grad.clone() for name, grad in step._window._step.gradients.items()}
    step(torch.full((2, 4), 3.0, device=engine[0]))
    assert_same(list(before.values()), list(step._window._step.gradients.values()), "written to by an eager step")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_whole_step_is_eager_if_asked_for(engine: Engine) -> None:
    """`on_failure="eager"` captures nothing then, and "raise" raises."""
    model = nn.Linear(4, 2).to(engine[0])
    with pytest.raises(ampkit.CaptureError, match="Lion has no form that a graph can hold"):
        ampkit.graphed_step(loss_fn, model, Lion(model.parameters()), graph=engine[1], on_failure="raise")
    with pytest.warns(ampkit.CaptureWarning, match="Training goes on eagerly"):
        step = ampkit.graphed_step(
            lambda m, x: m(x).mean(), model, Lion(model.parameters()), graph=engine[1], on_failure="eager"
        )
    for _ in range(6):
        step(torch.ones(2, 4, device=engine[0]))
    assert (step.replays, step.report().outcome) == (0, "eager")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_exception_in_the_optimizer_ends_the_window(engine: Engine) -> None:
    """The step goes on with the next batch: gradients of the one that failed are gone."""
    model = nn.Linear(4, 2).to(engine[0])
    optimizer = Lion(model.parameters())
    step = ampkit.graphed_step(lambda m, x: m(x).square().mean(), model, optimizer, graph=engine[1])
    x = torch.ones(2, 4, device=engine[0])
    for _ in range(3):
        step(x)
    with pytest.warns(ampkit.CaptureWarning, match=r"Lion changes state\[parameter\]\['step'\] on the host, which"):
        step(x)
    step(x)
    optimizer.param_groups[0]["betas"] = (0.9, "0.99")
    with pytest.raises(TypeError):
        step(x)
    assert all(param.grad is None for param in model.parameters())
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    before = step.replays
    step(x)
    assert step.replays == before + 1


class ConstantLion(torch.optim.Optimizer):
    """Evolved sign momentum with moments that are changed in place and no step count: a graph can hold it."""

    def __init__(self, params: Any, lr: Any = 1e-3, smooth: float = 0.99) -> None:
        super().__init__(params, {"lr": lr})
        self.smooth = smooth

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"], state["scale"] = torch.zeros_like(param), 1.0
                update = (state["momentum"] * 0.9 + param.grad * 0.1).sign_()
                param.sub_(update * group["lr"] * state["scale"])
                state["momentum"].mul_(self.smooth).add_(param.grad, alpha=1 - self.smooth)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)


CONSTANT: dict[str, Callable[[Any], torch.optim.Optimizer]] = {"lion": ConstantLion, "muon": muon, "sgd": sgd}


def constant_trajectory(
    engine: Engine, name: str, options: dict[str, Any], change: Callable[[Any, int], object] = lambda *_: None
) -> tuple[list[Any], ampkit.GraphedStep, list[int]]:
    """Return the state behind each of 13 steps, and the replays so far; `change` is called before each step."""
    model = make_net(engine[0])
    optimizer = CONSTANT[name](model.parameters())
    torch.manual_seed(5)
    step = ampkit.graphed_step(loss_fn, model, optimizer, graph=engine[1], **options)
    overflows = options.get("policy") == "float16"
    history, replays = [], []
    for i in range(13):
        change(optimizer, i)
        out = step(*batch(engine[0], i, math.inf if overflows and i in (0, 9) else 1.0))
        history.append([*training_state(model, optimizer, step.scaler), out.loss, out.grad_norm, out.skipped])
        replays.append(step.replays)
    return history, step, replays


@pytest.mark.sampled(4)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CONSTANT)
@pytest.mark.parametrize(
    "options",
    [{}, {"policy": "float16", "max_norm": 0.5}, {"policy": "bfloat16", "max_norm": 0.5, "accumulate": 2}],
    ids=["plain", "scaled", "accumulated"],
)
def test_an_optimizer_with_constant_numbers_becomes_a_part_of_the_graph(
    engine: Engine, name: str, options: dict[str, Any]
) -> None:
    """R5: once two of its steps were seen to change tensors in place only, the whole step is captured."""
    with warnings.catch_warnings(record=True) as caught, deterministic():
        warnings.simplefilter("always")
        expected, _, _ = constant_trajectory((engine[0], "off"), name, options)
        found, step, _ = constant_trajectory(engine, name, options)
    assert_same(expected, found)
    report = step.report()
    assert (report.outcome, report.eager_optimizer, report.failure) == ("whole", None, None)
    assert step.replays >= 13 - 5 * options.get("accumulate", 1) - 1, "2 watched steps, 3 of warm-up, 1 was skipped"
    assert not [warning for warning in caught if issubclass(warning.category, ampkit.CaptureWarning)]


def half_rate(optimizer: Any, i: int) -> None:
    if i == 8:
        optimizer.param_groups[0]["lr"] *= 0.5


def rougher(optimizer: Any, i: int) -> None:
    if i == 8:
        optimizer.smooth = 0.5


def half_scale(optimizer: Any, i: int) -> None:
    if i == 8:
        for state in optimizer.state.values():
            state["scale"] = 0.5


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("change", [half_rate, rougher, pytest.param(half_scale, marks=pytest.mark.seeds)])
@pytest.mark.slow
def test_a_number_that_changes_is_never_frozen(engine: Engine, change: Callable[[Any, int], object]) -> None:
    """R5: it steps behind the graph from then on, with the new number, and one warning says which it was."""
    with warnings.catch_warnings(record=True) as caught, deterministic():
        warnings.simplefilter("always")
        expected, _, _ = constant_trajectory((engine[0], "off"), "lion", {}, change)
        found, step, replays = constant_trajectory(engine, "lion", {}, change)
    assert_same(expected, found)
    assert replays == [0, 0, 0, 0, 0, 1, 2, 3, 3, 3, 3, 4, 5]
    assert step.report().outcome == "in parts"
    told = [str(warning.message) for warning in caught if issubclass(warning.category, ampkit.CaptureWarning)]
    assert len(told) == 1
    name = "param_groups" if change is half_rate else "attributes and state"
    assert "ConstantLion has numbers that a graph would hold as constants" in told[0]
    assert name in told[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rate_in_a_tensor_may_change(engine: Engine) -> None:
    """R5: an optimizer that takes its rate as a tensor stays a part of the graph, which reads the tensor."""
    results = []
    for graph in ("off", engine[1]):
        model = make_net(engine[0])
        rate = torch.tensor(1e-3, device=engine[0])
        step = ampkit.graphed_step(loss_fn, model, ConstantLion(model.parameters(), lr=rate), graph=graph)
        torch.manual_seed(5)
        with deterministic():
            for i in range(10):
                rate.fill_(1e-3 / (1 + i))
                step(*batch(engine[0], i))
        results.append(list(model.state_dict().values()))
    assert_same(*results)
    assert (step.report().outcome, step.replays) == ("whole", 5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_variable_that_only_the_optimizer_reads(engine: Engine) -> None:
    """R5: the optimizer reads a number that nothing of its own holds. Once that changes, it leaves the graphs."""
    decay = [0.1]

    class Decaying(ConstantLion):
        def step(self, closure: None = None) -> None:
            super().step()
            with torch.no_grad():
                for param in self.param_groups[0]["params"]:
                    param.mul_(1 - decay[0])

    results = []
    with warnings.catch_warnings(record=True) as caught, deterministic():
        warnings.simplefilter("always")
        for graph in ("off", engine[1]):
            model = make_net(engine[0])
            torch.manual_seed(5)
            step = ampkit.graphed_step(loss_fn, model, Decaying(model.parameters()), graph=graph)
            for i in range(16):
                decay[0] = 0.01 * i
                step(*batch(engine[0], i))
            results.append(list(model.state_dict().values()))
    assert_same(*results)
    told = [str(warning.message) for warning in caught if issubclass(warning.category, ampkit.CaptureWarning)]
    assert len(told) == 1
    assert "numbers that a graph would hold as constants, and the variable decay[0] changed. Keep it" in told[0]
    assert step.report().outcome == "in parts"
    assert step.replays == 10  # its changes cost no warm-up any more
