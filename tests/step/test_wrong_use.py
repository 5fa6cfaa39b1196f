"""Wrong use of graphed_step: each mistake is named with its argument, its value and the remedy."""

import copy
import inspect
import pickle
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import assert_same, training_state
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def make(**options: Any) -> ampkit.GraphedStep:
    model = options.pop("model", None) or nn.Linear(4, 2)
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    return ampkit.graphed_step(options.pop("loss_fn", loss_fn), model, optimizer, **{"graph": "emulate", **options})


BATCH = (torch.ones(3, 4), torch.ones(3, 2))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_norm": -1}, r"graphed_step\(max_norm=-1\): must be a number > 0, or None"),
        ({"policy": "float17"}, r"Policy.parse\('float17'\): .*Legal: float32, float16, bfloat16"),
        ({"policy": "16-true"}, r"parameter weight is torch.float32. Use model.to\(torch.float16\), or a policy with"),
        ({"warmup": 0}, r"graphed_step\(warmup=0\): expected an int of at least 1"),
        ({"warmup": True}, r"graphed_step\(warmup=True\)"),
        ({"accumulate": 0}, r"graphed_step\(accumulate=0\): expected an int of at least 1"),
        ({"verify": -1}, r"graphed_step\(verify=-1\): expected an int of at least 0"),
        ({"max_graphs": 0}, r"graphed_step\(max_graphs=0\): expected an int of at least 1; graph='off' is for none"),
        ({"memory_budget": 0}, r"graphed_step\(memory_budget=0\): must be a number > 0, or None for no limit"),
        ({"buckets": (16, 32)}, r"graphed_step\(buckets=\(16, 32\)\): expected ampkit.Buckets\(batch=\(16, 32, 64\)\)"),
        ({"after_step": 1}, r"graphed_step\(after_step=int\): expected a callable that takes the model"),
        ({"graph": "on"}, r"graphed_step\(graph='on'\): expected one of 'auto', 'emulate', 'off'"),
        ({"on_failure": "ignore"}, r"graphed_step\(on_failure='ignore'\): expected one of 'parts', 'eager', 'raise'"),
        (
            {"scaler": torch.amp.GradScaler("cpu")},
            r"torch.amp.grad_scaler.GradScaler\): it waits for the device. Pass an",
        ),
        ({"scheduler": "cosine"}, r"graphed_step\(scheduler='cosine'\): expected an object with a method step\(\)"),
        ({"scheduler": torch.optim.lr_scheduler.StepLR}, r"graphed_step\(scheduler=<class .*expected an object with a"),
        ({"numerics": 100}, r"graphed_step\(numerics=100\): expected what ampkit.debug.numerics\(model, every=100\)"),
        ({"loss_fn": "mse"}, r"graphed_step\(loss_fn='mse'\): expected loss_fn\(model, \*batch\)"),
        ({"policy": torch.float16}, r"Policy.parse\(torch.float16\): .*Did you mean 'float16'\?"),
        ({"clip": 1.0}, r"graphed_step\(clip=1.0\): there is no argument 'clip'. Write max_norm=1.0\."),
        ({"accumulate_grad_batches": 4}, r"Write accumulate=4\."),
        ({"precision": "bf16-mixed"}, r"Write policy='bf16-mixed'\."),
        ({"dtype": torch.bfloat16}, r"Write policy='bfloat16'\."),
        ({"model": nn.ReLU(), "optimizer": torch.optim.SGD([torch.ones(1)])}, "found no parameters"),
    ],
)
def test_bad_arguments(options: dict[str, Any], says: str) -> None:
    """An argument that cannot work is a ValueError at construction."""
    with pytest.raises(ValueError, match=says):
        make(**options)


def test_unknown_arguments_are_pythons() -> None:
    """A name that no library has for an argument is an error of Python; the signature is that of the function."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        make(colour="red")
    assert "max_norm" in inspect.signature(ampkit.graphed_step).parameters


def of_a_batch(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch.values() if isinstance(batch, dict) else batch
    return loss_fn(model, x, y)


@pytest.mark.parametrize("options", [{}, {"graph": "off"}, {"accumulate": 2}])
@pytest.mark.parametrize(
    ("loss", "args", "kwargs", "says"),
    [
        (
            loss_fn,
            (BATCH,),
            {},
            r"called with \(\(Tensor, Tensor\)\), but loss_fn takes \(model.* Write step\(\*batch\)",
        ),
        (loss_fn, ([*BATCH],), {}, r"called with \(list\), .* Write step\(\*batch\)\.$"),
        (loss_fn, ({"x": BATCH[0], "y": BATCH[1]},), {}, r"called with \(dict\), .* Write step\(\*\*batch\)\.$"),
        (of_a_batch, BATCH, {}, r"called with \(Tensor, Tensor\), .* Write step\(batch\)\.$"),
        (
            of_a_batch,
            (),
            {"x": BATCH[0], "y": BATCH[1]},
            r"called with \(x=Tensor, y=Tensor\), .* Write step\(batch\)\.$",
        ),
        (loss_fn, BATCH[:1], {}, r"called with \(Tensor\), .* goes to loss_fn behind the model\.$"),
        (loss_fn, (BATCH[0],), {"target": BATCH[1]}, r"called with \(Tensor, target=Tensor\), .* behind the model\.$"),
        (loss_fn, ({"a": BATCH[0]},), {}, r"called with \(dict\), .* behind the model\.$"),
    ],
)
def test_a_batch_that_does_not_fit_the_loss(loss: Any, args: Any, kwargs: Any, says: str, options: Any) -> None:
    """The message says how to unpack it; the step goes on with the right call."""
    step = make(loss_fn=loss, **options)
    with pytest.raises(ampkit.InputMismatch, match=r"^graphed_step: the step was " + says) as caught:
        step(*args, **kwargs)
    assert isinstance(caught.value.__cause__, TypeError)
    step(*BATCH) if loss is loss_fn else step(BATCH)


def test_a_type_error_of_the_loss_is_its_own() -> None:
    def fails(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(model, x)  # type: ignore[call-arg]  # the mistake

    with pytest.raises(TypeError, match=r"loss_fn\(\) missing 1 required positional argument: 'y'"):
        make(loss_fn=fails)(*BATCH)


def lazy_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyBatchNorm1d(), nn.LazyLinear(2))


@pytest.mark.parametrize("materialized", [False, True])
def test_lazy_modules(materialized: bool) -> None:
    """Where there are graphs, they must have their parameters by the first call. A call that raised did nothing."""
    expected, model = lazy_model(), lazy_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = make(model=model, optimizer=optimizer)
    if not materialized:
        with pytest.raises(
            ValueError, match=r"^graphed_step: model\.0\.weight has no shape yet.*Call the model once with"
        ):
            step(*BATCH)
        assert all(map(nn.parameter.is_lazy, model.parameters()))
        function = ampkit.graphed(modules=(model,), optimizers=(optimizer,), graph="emulate")(model.forward)
        with pytest.raises(ValueError, match=r"^graphed\(forward\): modules\[0\]\.0\.weight has no shape yet"):
            function(BATCH[0])
    for each in (expected, model):
        torch.manual_seed(1)
        with torch.no_grad():
            each(BATCH[0])
    eager = make(model=expected, graph="off")
    for _ in range(6):
        assert torch.equal(step(*BATCH).loss, eager(*BATCH).loss)
    assert step.replays == 3


def test_lazy_modules_without_graphs() -> None:
    """The first eager call makes the parameters."""
    model = lazy_model()
    step = make(model=model, graph="off")
    assert step(*BATCH).loss > step(*BATCH).loss


def test_optimizer_of_other_parameters() -> None:
    """The usual cause is an optimizer made before model.to(device) or for another model."""
    optimizer = torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"param_groups\[0\] holds 2 parameters that are not the model's.*shape \(2, 4\)"
    ):
        make(optimizer=optimizer)


@pytest.mark.parametrize("policy", ["16-true", "bf16-true"])
def test_torchs_broken_kernel_is_refused(policy: str) -> None:
    """pytorch#191763: fused SGD on the CPU skips low-precision parameters. Training would stand still in silence."""
    probe = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    probe.grad = torch.ones_like(probe)
    torch.optim.SGD([probe], lr=1.0, fused=True).step()
    if not probe.any():
        pytest.skip("this torch has the fix")
    model = nn.Linear(4, 2).to(ampkit.Policy.parse(policy).params)
    with pytest.raises(
        ValueError, match=r"does not update torch.b?float16 parameters with fused SGD on the CPU. Use AdamW"
    ):
        make(model=model, policy=policy)
    make(model=model, policy=policy, optimizer=torch.optim.AdamW(model.parameters(), fused=True))


def test_scheduler_that_needs_a_metric() -> None:
    """ReduceLROnPlateau cannot be stepped without its metric."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match=r"ReduceLROnPlateau\): it needs a metric; call its step\(metric\) yourself"):
        make(model=model, optimizer=optimizer, scheduler=scheduler)


def test_no_loss_function() -> None:
    """None is refused at once, not in the first call."""
    model = nn.Linear(4, 2)
    with pytest.raises(
        ValueError, match=r"graphed_step\(loss_fn=None\): expected loss_fn\(model, \*batch\) that returns"
    ):
        ampkit.graphed_step(None, model, torch.optim.SGD(model.parameters(), fused=True))  # type: ignore[arg-type]


def test_scheduler_that_the_loop_steps_too() -> None:
    """The rate would fall twice as fast. One warning says so, but not of a schedule that is loaded or stepped twice."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = make(model=model, optimizer=optimizer, scheduler=scheduler)
    for change in ("load", "load", "nothing", "step", "step"):
        step(*BATCH)
        if change == "load":
            scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": scheduler.last_epoch + 5})
        elif change == "step":
            scheduler.step()
    step(*BATCH)
    scheduler.step()
    with pytest.warns(ampkit.AmpkitWarning, match=r"scheduler=ExponentialLR\): your loop steps the scheduler too"):
        step(*BATCH)
    scheduler.step()
    step(*BATCH)


def test_scheduler_of_another_optimizer() -> None:
    """Its rates would never reach the optimizer that is stepped."""
    model = nn.Linear(4, 2)
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1, fused=True) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
    with pytest.raises(
        ValueError, match=r"scheduler=StepLR\): it was made for another SGD.*Make it from the optimizer"
    ):
        make(model=model, optimizer=optimizer, scheduler=scheduler)
    chained = torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.StepLR(optimizer, 1)])
    make(model=model, optimizer=optimizer, scheduler=chained)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_a_step_cannot_be_copied(copied: Any) -> None:
    """Its graphs are of this process and these tensors: an error says what to copy instead."""
    model = nn.Linear(4, 2)
    function = ampkit.graphed(modules=(model,), graph="emulate")(model.forward)
    step = make()
    step(*BATCH)
    with pytest.raises(
        TypeError, match=r"GraphedStep cannot be copied or pickled.*make a step of the copies with graphed"
    ):
        copied({"step": step} if copied is not copy.copy else step)
    with pytest.raises(TypeError, match=r"GraphedFunction cannot be copied or pickled.*decorate the function anew"):
        copied(function)


def sparse_model(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 4, **options), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("optimizer", "options", "says"),
    [
        (
            torch.optim.SGD,
            {"fused": True},
            r"optimizer=SGD\): 0 is Embedding\(sparse=True\).*SGD with fused=True takes",
        ),
        (
            torch.optim.AdamW,
            {"fused": True},
            r"AdamW with fused=True takes none. Write Embedding\(\.\.\., sparse=False\)",
        ),
        (torch.optim.SGD, {}, r"max_norm=1.0\): 0 is Embedding\(sparse=True\).*no norm of these. Write Embedding"),
    ],
)
def test_sparse_gradients_that_nothing_takes(optimizer: Any, options: dict[str, Any], says: str) -> None:
    """S5: where torch would raise in the step, the error names the argument at once."""
    model = sparse_model(sparse=True)
    with pytest.raises(ValueError, match=says):
        make(model=model, optimizer=optimizer(model.parameters(), **options), max_norm=None if options else 1.0)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_advice_for_sparse_gradients_works(optimizer: Any) -> None:
    """S5: an optimizer that takes sparse gradients trains eagerly; who follows the advice is captured."""
    x = torch.tensor([1, 2, 3])

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> ampkit.GraphedStep:
        step = make(model=model, optimizer=optimizer, loss_fn=lambda m, x: m(x).square().mean())
        for _ in range(5):
            step(x)
        return step

    model = sparse_model(sparse=True)
    with pytest.warns(
        ampkit.CaptureWarning, match=r"Write Embedding\(\.\.\., sparse=False\) and an optimizer for dense"
    ):
        step = trained(model, optimizer(model.parameters(), lr=0.1))
    assert (step.replays, next(iter(step.report().eager.values()))) == (0, 5)
    model = sparse_model(sparse=False)
    assert trained(model, torch.optim.AdamW(model.parameters(), fused=True)).replays == 2


def test_batch_on_the_wrong_device() -> None:
    """The leaf is named, with both devices and what to write."""
    with pytest.raises(ampkit.InputMismatch, match=r"batch\[1\] is on meta, but the model is on cpu.*ampkit.prefetch"):
        make()(BATCH[0], BATCH[1].to("meta"))


@pytest.mark.cuda
def test_cpu_batch_for_a_cuda_model() -> None:
    """The same, for the mistake that everybody makes."""
    model = nn.Linear(4, 2).cuda()
    with pytest.raises(ampkit.InputMismatch, match=r"batch\[0\] is on cpu, but the model is on cuda:0"):
        make(model=model)(*BATCH)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            lambda m, x, y: (m(x) - y).square(),
            r"a loss of shape \(3, 2\) and dtype torch.float32.*Reduce it with .mean",
        ),
        (lambda m, x, y: (m(x) - y).argmax(), r"a loss of shape \(\) and dtype torch.int64"),
        (
            lambda m, x, y: m(x).sum().item(),
            r"loss_fn returned a float; expected the loss as a tensor, or \(loss, aux\)",
        ),
        (lambda m, x, y: None, r"loss_fn returned None; .*End it with `return loss`"),
        (lambda m, x, y: (x - 1).sum(), r"a loss without grad.*torch.no_grad\(\) or from .detach\(\)"),
        (lambda m, x, y: m(x).sum().detach(), r"a loss without grad"),
        (lambda m, x, y: (m(x).sum(), {"n": 3}), r"returned a int \(3\) in aux.*Return tensors"),
    ],
)
def test_bad_losses(wrong: Any, says: str) -> None:
    """What loss_fn returns is checked in the first call."""
    with pytest.raises(ValueError, match=says):
        make(loss_fn=wrong)(*BATCH)


class Named:
    """An object that no graph can give back, whose repr has a mistake."""

    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.filterwarnings("ignore:.*the variable given.0. changed:ampkit.CaptureWarning")
@pytest.mark.parametrize("graph", ["off", "emulate"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("wrong", [1.5, "a name", Named()], ids=["float", "str", "object"])
def test_aux_without_a_tensor_leaves_the_state(graph: str, accumulate: int, wrong: Any) -> None:
    """It is found before the optimizer steps: the call that raises changes nothing, in a warm-up call and behind."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = ampkit.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    given: list[Any] = []
    step = make(
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        scheduler=scheduler,
        accumulate=accumulate,
        graph=graph,
        loss_fn=lambda model, x, y: (loss_fn(model, x, y), {"n": given[0] if given else None}),
    )
    for _ in range(5):
        before = [training_state(model, optimizer, scaler), copy.deepcopy(scheduler.state_dict())]
        for _ in range(accumulate - 1):
            step(*BATCH)
        given.append(wrong)
        with pytest.raises(
            ValueError, match=r"loss_fn returned a .* in aux.*Return tensors. No optimizer step was done"
        ):
            step(*BATCH)
        given.clear()
        assert_same([training_state(model, optimizer, scaler), scheduler.state_dict()], before)
        for _ in range(accumulate):  # the window that was open has ended
            step(*BATCH)
        assert scheduler.state_dict()["last_epoch"] == before[1]["last_epoch"] + 1


def test_what_a_graphed_function_must_not_return() -> None:
    """It steps its optimizer itself, so the message says that it has run."""
    model = nn.Linear(4, 2)
    function = ampkit.graphed(modules=(model,), graph="emulate")(lambda x: (model(x), 3.5))
    with pytest.raises(
        ValueError, match=r"returned a float \(3.5\), which .* The function has run: what it changes is"
    ):
        function(BATCH[0])


def test_an_error_of_loss_fn_is_the_users_own() -> None:
    """An exception in loss_fn comes through as it is, and leaves learning rates as the user set them."""

    def broken(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        raise KeyError("mask")

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    with pytest.raises(KeyError, match="mask"):
        make(model=model, optimizer=optimizer, loss_fn=broken)(*BATCH)
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (
            lambda p: torch.optim.SGD(p, lr=0.1),
            r"SGD reads its learning rate or its step count on the host. Write SGD\(..., fused=True\). Training",
        ),
        (
            lambda p: torch.optim.Adafactor(p),
            r"Adafactor has no form that a graph can hold.*AdamW, Adam or SGD with fused",
        ),
    ],
)
def test_uncapturable_optimizer_trains_eagerly(optimizer: Any, says: str) -> None:
    """No graph can hold the optimizer, `on_failure="eager"`: one warning with a remedy, the same training, a reason."""
    steps = []
    for graph in ("off", "emulate"):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        made = optimizer(model.parameters())
        with nullcontext() if graph == "off" else pytest.warns(ampkit.CaptureWarning, match=says):
            step = make(model=model, optimizer=made, graph=graph, on_failure="eager")
        steps.append([step(*BATCH).loss for _ in range(6)])
    assert all(torch.equal(a, b) for a, b in zip(*steps, strict=True))
    report = step.report()
    assert (report.replays, sum(report.eager.values())) == (0, 6)
    assert "fused=True" in str(report.failure)
    with pytest.raises(ampkit.CaptureError, match=says.removesuffix(" Training")):
        make(optimizer=optimizer(model.parameters()), model=model, on_failure="raise")


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("graph", ["off", "emulate", "auto"])
@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, NeedsClosure])
def test_an_optimizer_whose_step_needs_a_closure_is_refused(optimizer: Any, graph: str) -> None:
    """It cannot train eagerly either: an error where the step is made, not a TypeError in its first call."""
    model = nn.Linear(4, 2)
    says = (
        rf"graphed_step\(optimizer\): {optimizer.__name__} computes the loss several times in a step. "
        "Use AdamW, Adam or SGD with fused=True"
    )
    with pytest.raises(ValueError, match=says):
        make(model=model, optimizer=optimizer(model.parameters(), lr=0.1), graph=graph)


def test_a_function_may_call_a_closure_and_stays_eager() -> None:
    """ampkit.graphed says of LBFGS that training goes on eagerly, and it does: bit by bit."""

    def train(graph: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def step(x: Tensor, y: Tensor) -> Tensor:
            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loss_fn(model, x, y)
                loss.backward()
                return loss

            return optimizer.step(closure).detach()  # type: ignore[attr-defined,no-any-return]  # what closure returns

        if graph is not None:
            step = ampkit.graphed(modules=(model,), optimizers=(optimizer,), graph=graph)(step)
        return [step(*BATCH) for _ in range(8)]

    with pytest.warns(ampkit.CaptureWarning, match="(?s)LBFGS has no form that a graph can hold.*goes on eagerly"):
        captured = train("emulate")
    assert all(torch.equal(a, b) for a, b in zip(train(None), captured, strict=True))


class OwnRate(torch.optim.Optimizer):
    """One that decides on its rate itself, as the Adafactor of transformers does: "lr" is None, or is not there."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)
        self.seen: list[Any] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.seen.append(group.get("lr", "none"))
            for param in group["params"]:
                param.sub_(param.grad, alpha=0.1)


@pytest.mark.parametrize("defaults", [{"lr": None}, {}])
@pytest.mark.parametrize("capturable", [True, False])
@pytest.mark.parametrize("graph", ["off", "emulate"])
@pytest.mark.filterwarnings("ignore:.*OwnRate has no form that a graph can hold:ampkit.CaptureWarning")
def test_an_optimizer_without_a_learning_rate(defaults: dict[str, Any], capturable: bool, graph: str) -> None:
    """Its groups keep what they have; a group that has a rate gets it as a tensor, whether or not the first has one."""
    flag = {"capturable": False} if capturable else {}
    reference = nn.Linear(4, 2)
    models = [copy.deepcopy(reference) for _ in range(2)]
    optimizers = [OwnRate([model.weight], **defaults, **flag) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.add_param_group({"params": [model.bias], "lr": 0.1})

    def body(x: Tensor, y: Tensor) -> Tensor:
        models[1].zero_grad()
        loss = loss_fn(models[1], x, y)
        loss.backward()
        optimizers[1].step()
        return loss

    options: dict[str, Any] = {"graph": graph, "host_writes": "ignore"}  # the optimizer keeps a list
    step = make(model=models[0], optimizer=optimizers[0], **options)
    function = ampkit.graphed(modules=(models[1],), optimizers=(optimizers[1],), **options)(body)
    plain = OwnRate(reference.parameters())
    for _ in range(5):
        step(*BATCH)
        function(*BATCH)
        plain.zero_grad()
        loss_fn(reference, *BATCH).backward()
        plain.step()
    for model, optimizer in zip(models, optimizers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
        first, second = optimizer.seen[-2:]
        assert first == defaults.get("lr", "none")
        assert [group.get("lr", "none") for group in optimizer.param_groups] == [first, 0.1]
        assert isinstance(second, Tensor) is capturable
    assert function.replays == (2 if capturable and graph == "emulate" else 0)
    assert step.replays == (2 if graph == "emulate" else 0)  # without the optimizer, where that cannot be captured


def test_auto_on_the_cpu_says_so() -> None:
    """G1: asking for a graph without CUDA gives eager training and one warning, or an error if the user wants that."""
    with pytest.warns(ampkit.CaptureWarning, match=r"the model is on cpu, and CUDA graphs need a CUDA device"):
        step = make(graph="auto")
    step(*BATCH)
    assert "CUDA graphs need a CUDA device" in str(step.report())
    with pytest.raises(ampkit.CaptureError, match="CUDA graphs need a CUDA device"):
        make(graph="auto", on_failure="raise")


def test_a_step_for_each_epoch_is_said() -> None:
    """A step made in a function that trains one epoch warms up each time, and its loss scale begins anew."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def make(graph: str = "emulate", power: int = 1) -> Any:
        return ampkit.graphed_step(lambda model, x: (model(x) ** power).sum(), model, optimizer, graph=graph)

    make()
    make("off")
    ampkit.graphed_step(lambda model, x: model(x).mean(), model, optimizer, graph="emulate")  # another loss
    with pytest.warns(ampkit.AmpkitWarning, match="Make it once, in front of the loop over epochs") as caught:
        make(power=2)
    assert caught[0].filename == __file__


def test_a_loaded_state_that_is_not_fused() -> None:
    """torch's load_state_dict takes `fused=None` over, and its own scaler fails then. The step says what to write."""

    def made(fused: bool | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        return model, torch.optim.AdamW(model.parameters(), fused=fused)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    model, old = made(None)
    loss_fn(model, torch.ones(2, 4)).backward()
    old.step()
    model, optimizer = made(True)
    optimizer.load_state_dict(old.state_dict())
    options: dict[str, Any] = {"policy": "float16", "scaler": ampkit.GradScaler("cpu", init_scale=8.0), "graph": "off"}
    with pytest.warns(ampkit.AmpkitWarning, match=r"write: for group .*: group\['fused'\] = True"):
        step = ampkit.graphed_step(loss_fn, model, optimizer, **options)
    before = model.weight.detach().clone()
    step(torch.ones(2, 4))
    assert not torch.equal(model.weight, before)
    for group in optimizer.param_groups:
        group["fused"] = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ampkit.graphed_step(loss_fn, model, optimizer, **options)
