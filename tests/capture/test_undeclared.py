"""What a function uses beside its declared state: taken in, or named where a graph would be wrong."""

import copy
import threading
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, bits, marked_line
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.optim import optimizer as torch_optimizer

import ampkit
from ampkit._torch.tensors.modules import live_modules

Engine = tuple[str, str]


def linear(device: str, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 4).to(device)


def batches(device: str, count: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, generator=made).to(device) for _ in range(count)]


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1, momentum=0.9, fused=True)


class Case:
    """A function whose state is partly not declared.

    Attributes:
        declared: what is passed to `ampkit.graphed`.
        all: the modules whose values count.
    """

    declared: dict[str, Any]
    all: tuple[nn.Module, ...]

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Optimizer(Case):
    def __init__(self, device: str) -> None:
        self.model = linear(device)
        self.optimizer = sgd(self.model)
        self.declared, self.all = {"modules": (self.model,)}, (self.model,)

    def __call__(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


class OneOfTwoOptimizers(Case):
    def __init__(self, device: str) -> None:
        self.model, self.other = linear(device), linear(device, 1)
        self.optimizers = sgd(self.model), sgd(self.other)
        self.all = (self.model, self.other)
        self.declared = {"modules": self.all, "optimizers": self.optimizers[:1]}

    def __call__(self, x: Tensor) -> Tensor:
        loss = self.other(self.model(x)).square().sum()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss


class Gradient(Case):
    def __init__(self, device: str) -> None:
        self.model, self.critic = linear(device), nn.Sequential(linear(device, 1), nn.Tanh())
        self.optimizer = sgd(self.model)
        self.declared = {"modules": (self.model,), "optimizers": (self.optimizer,)}
        self.all = (self.model, self.critic)

    def __call__(self, x: Tensor) -> Tensor:
        loss = self.critic(self.model(x)).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


class Statistics(Case):
    def __init__(self, device: str) -> None:
        self.model, self.norm = linear(device), nn.BatchNorm1d(4, affine=False).to(device)
        self.declared, self.all = {"modules": (self.model,)}, (self.model, self.norm)

    def __call__(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.norm(self.model(x)).sum()


class ByHand(Case):
    def __init__(self, device: str) -> None:
        self.model, self.average = linear(device), linear(device, 1)
        self.declared, self.all = {"modules": (self.model,)}, (self.model, self.average)

    def __call__(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.weight.lerp_(self.model.weight, 0.1)
            return self.average(x).sum()


CASES = [Optimizer, OneOfTwoOptimizers, Gradient, Statistics, ByHand]


def values(case: Case) -> list[Tensor]:
    return [tensor.detach().cpu().clone() for module in case.all for tensor in module.state_dict().values()]


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.quick(3)
def test_it_is_captured(engine: Engine, kind: type[Case]) -> None:
    """What is declared is a hint: the function has the bits of plain calls, also when a rate changes."""
    device, graph = engine

    def run(graph: str) -> list[Any]:
        case = kind(device)
        function = ampkit.graphed(**case.declared, graph=graph, on_failure="raise")(case)
        seen: list[Any] = []
        for i, x in enumerate(batches(device, 9)):
            for optimizer in getattr(case, "optimizers", [getattr(case, "optimizer", None)]):
                if optimizer is not None:
                    optimizer.param_groups[0]["lr"] = 0.1 / (1 + i)
            grads = [None if p.grad is None else bits(p.grad) for module in case.all for p in module.parameters()]
            seen.append((bits(function(x)), values(case), grads))
        assert graph == "off" or (function.captures, function.replays) == (1, 6)
        return seen

    assert_same(run(graph), run("off"))


def test_a_module_that_cannot_be_taken_in() -> None:
    """The message names the line that uses it, and what to declare; no call was done half."""
    model, embedding = linear("cpu"), nn.Embedding(4, 4, sparse=True)

    def function(x: Tensor) -> Tensor:
        loss = (model(x) * embedding(torch.arange(4).repeat(2))).sum()  # HERE sparse
        loss.backward()
        return loss

    graphed = ampkit.graphed(modules=(model,), graph="emulate", on_failure="raise")(function)
    *first, last = batches("cpu", 4)
    for x in first:
        graphed(x)
    before = bits(embedding.weight.detach())
    with pytest.raises(ampkit.CaptureError, match=r"uses Embedding\.weight, which gets a gradient") as error:
        graphed(last)
    assert marked_line(__file__, "sparse").removesuffix("`").partition("  #")[0] in str(error.value)
    assert_same(bits(embedding.weight.detach()), before)


def test_an_optimizer_in_a_loss() -> None:
    """A training step has an optimizer of its own, and takes in no other one."""
    model, other = linear("cpu"), linear("cpu", 1)
    mine = sgd(other)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        mine.step()  # HERE loss
        return model(x).square().mean()

    step = ampkit.graphed_step(loss_fn, model, sgd(model), graph="emulate", on_failure="raise")
    *first, last = batches("cpu", 4)
    for x in first:
        step(x)
    with pytest.raises(ampkit.CaptureError, match=r"steps an optimizer that is not declared \(SGD\).* Pass it in"):
        step(last)


def teach(model: nn.Module, teacher: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = teacher(x)
    return F.mse_loss(model(x), target)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_teacher_need_not_be_declared(engine: Engine, frozen: bool) -> None:
    """It is only read; and it is noticed when its parameters are replaced, which a graph would not see."""
    device, graph = engine
    system = nn.ModuleDict({"student": linear(device), "teacher": nn.Sequential(linear(device, 1), nn.BatchNorm1d(4))})
    system.to(device)["teacher"].eval().requires_grad_(not frozen)
    student, teacher = system["student"], system["teacher"]
    optimizer = sgd(student)

    def step(x: Tensor) -> Tensor:
        loss = teach(student, teacher, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    graphed = ampkit.graphed(modules=(student,), optimizers=(optimizer,), graph=graph, on_failure="raise")(step)
    plain = copy.deepcopy(student)
    for i, x in enumerate(batches(device, 6)):
        assert bool(torch.isfinite(graphed(x)))
        assert graphed.captures == int(i > 2)
    assert graphed.replays == 3
    other = nn.Sequential(linear(device, 2), nn.BatchNorm1d(4)).to(device).eval().requires_grad_(not frozen)
    teacher.load_state_dict(other.state_dict(), assign=True)
    (x,) = batches(device, 1)
    plain.load_state_dict(student.state_dict())
    with pytest.warns(ampkit.CaptureWarning, match=r"teacher\.0\.weight was replaced"):
        torch.testing.assert_close(graphed(x), teach(plain, other, x).detach())
    for x in batches(device, 4):
        plain.load_state_dict(student.state_dict())
        torch.testing.assert_close(graphed(x), teach(plain, other, x).detach())
    assert graphed.captures == 2
    assert all(param.grad is None for param in teacher.parameters())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_teacher_of_a_training_step(engine: Engine) -> None:
    """The same for a loss function, whose step has nothing to declare; `verify` agrees."""
    device, graph = engine
    model, teacher = linear(device), linear(device, 1).requires_grad_(False)
    step = ampkit.graphed_step(
        lambda m, x: teach(m, teacher, x), model, sgd(model), graph=graph, on_failure="raise", verify=2
    )
    for x in batches(device, 6):
        step(x)
    assert (step.captures, step.replays) == (1, 3)
    teacher.load_state_dict(linear(device, 2).state_dict(), assign=True)
    with pytest.warns(ampkit.CaptureWarning, match="was replaced"):
        step(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_average_of_the_users_own(engine: Engine) -> None:
    """What `after_step` changes cannot be declared: it is taken into the state, captured, and passes `verify`."""
    device, graph = engine
    model = linear(device)
    shadow = copy.deepcopy(model).requires_grad_(False)

    def after(model: nn.Module) -> None:
        for slow, fast in zip(shadow.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.1)

    step = ampkit.graphed_step(
        lambda m, x: m(x).square().mean(),
        model,
        sgd(model),
        after_step=after,
        graph=graph,
        on_failure="raise",
        verify=2,
    )
    expected = shadow.weight.clone()
    for x in batches(device, 8):
        step(x)
        expected.lerp_(model.weight.detach(), 0.1)
        torch.testing.assert_close(shadow.weight, expected)
    assert (step.captures, step.replays) == (1, 5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_of_the_loss(engine: Engine) -> None:
    """A parameter that gets a gradient must belong to the model, because the gradient would be lost in a graph."""
    device, graph = engine
    model, loss = linear(device), linear(device, 1)
    step = ampkit.graphed_step(
        lambda m, x: loss(m(x)).square().mean(), model, sgd(model), graph=graph, on_failure="raise"
    )
    *first, last = batches(device, 4)
    for x in first:
        step(x)
    with pytest.raises(ampkit.CaptureError, match=r"uses Linear\.\w+, which gets a gradient.*model of graphed_step"):
        step(last)


@pytest.mark.parametrize("engine", ENGINES)
def test_parts_and_wrappers_of_what_is_declared(engine: Engine) -> None:
    """A part of a declared module, a module around one, and an optimizer around another one are declared with it."""
    device, graph = engine
    model = nn.Sequential(linear(device), nn.BatchNorm1d(4)).to(device)
    wrapper = nn.Sequential(model)

    class Around(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {"fused": True, "capturable": True})
            self.inner, self.param_groups = inner, inner.param_groups

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    optimizer = Around(sgd(model))

    def step(x: Tensor) -> Tensor:
        loss = (wrapper(x) + model[0](x)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    graphed = ampkit.graphed(modules=(model,), optimizers=(optimizer,), graph=graph, on_failure="raise")(step)
    for x in batches(device, 6):
        graphed(x)
    assert (graphed.captures, graphed.replays) == (1, 3)


def test_other_modules_of_the_process() -> None:
    """Fake, lazy and broken modules, whose tensors have no address, do not count as used."""

    class Broken(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise ZeroDivisionError

    with FakeTensorMode():
        fake = nn.Linear(4, 4)
    lazy, broken, bare = nn.LazyLinear(4), nn.Linear(4, 4), nn.Module.__new__(nn.Linear)
    broken.register_buffer("odd", torch.ones(2).as_subclass(Broken))
    model, table = linear("cpu"), torch.randn(4)
    graphed = ampkit.graphed(modules=(model,), graph="emulate", on_failure="raise")(lambda x: model(x) + table)
    for x in batches("cpu", 5):
        torch.testing.assert_close(graphed(x), model(x) + table)
    assert graphed.replays == 2
    del fake, lazy, broken, bare


@pytest.mark.filterwarnings("ignore:graphed.function.. the variable done._flag changed:ampkit.CaptureWarning")
def test_nothing_is_left_behind() -> None:
    """No hook stays in torch, also after an error. An optimizer that another thread steps is not found."""
    model, other = linear("cpu"), linear("cpu", 1)
    mine, done = sgd(other), threading.Event()

    def elsewhere() -> None:
        other(torch.ones(2, 4)).sum().backward()
        mine.step()
        done.set()

    def function(x: Tensor, fail: bool = False) -> Tensor:
        threading.Thread(target=elsewhere).start()
        assert done.wait(60)
        if fail:
            raise ZeroDivisionError
        return model(x)

    before = dict(torch_optimizer._global_optimizer_pre_hooks)
    graphed = ampkit.graphed(modules=(model,), graph="emulate", on_failure="raise", warmup=1, host_writes="ignore")(
        function
    )
    with pytest.raises(ZeroDivisionError):
        graphed(torch.ones(2, 4), fail=True)
    for _ in range(8):
        done.clear()
        graphed(torch.ones(2, 4))
    assert torch_optimizer._global_optimizer_pre_hooks == before
    assert graphed.replays > 0


# ---------------------------------------------------------------------------------------------------------- no modules


@pytest.mark.parametrize("modules", [(), (nn.ReLU(),)])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_function_without_modules(engine: Engine, modules: tuple[nn.Module, ...]) -> None:
    """modules=() is legal, and so is one without a tensor: the first call tells the device."""
    device, graph = engine
    function = ampkit.graphed(modules=modules, graph=graph, on_failure="raise", verify=1)(
        lambda x, *, weights: F.relu(x) @ weights["w"]
    )
    assert (function.captures, function.replays, function.report().graphs) == (0, 0, 0)
    function.close()
    for x in batches(device, 6):
        w = x.t().contiguous()
        torch.testing.assert_close(function(x, weights={"w": w}), F.relu(x) @ w)
    assert (function.captures, function.replays) == (1, 3)
    function.close()


def test_an_optimizer_without_its_modules() -> None:
    """The modules of what it holds are found when the function is decorated: their mode is a part of the key."""
    dropout = nn.Sequential(linear("cpu"), nn.Dropout())
    optimizer = sgd(dropout)

    def step(x: Tensor) -> Tensor:
        loss = dropout(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    function = ampkit.graphed(modules=(), optimizers=(optimizer,), graph="emulate", on_failure="raise")(step)
    for x in batches("cpu", 6):
        function(x)
    assert (function.captures, function.replays) == (1, 3)
    dropout.eval()
    with pytest.warns(ampkit.CaptureWarning, match="train/eval mode"):
        function(x)


def test_other_threads_may_make_tuples() -> None:
    """Modules are found among all objects. CPython cannot end a tuple that somebody else has, and says SystemError."""
    ended, errors = threading.Event(), list[BaseException]()

    def make() -> None:
        try:
            while not ended.is_set():
                assert len(tuple(map(float, range(300)))) == 300
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    model = linear("cpu")
    try:
        for _ in range(60):
            assert any(module is model for module in live_modules())
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not errors
