"""ampkit.graphed: functions of tensors that change declared state: a GAN, an evaluation, an update written by hand."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import ENGINES, OPTIMIZERS, assert_same, bits, deterministic, make_batches, make_net
from tape import taped
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

Engine = tuple[str, str]


def run_gan(engine: Engine, graph: str, verify: int = 0) -> list[Any]:
    """Train two networks, two optimizers, one scaler, for 14 calls; return everything after each."""
    device = engine[0]
    torch.manual_seed(0)
    gen = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6)).to(device)
    disc = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1)).to(device)
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-2, fused=True)
    opt_d = torch.optim.SGD(disc.parameters(), lr=1e-2, momentum=0.9, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(opt_g, 4, 0.5)
    scaler = ampkit.GradScaler(device, init_scale=256.0, growth_interval=3)

    @ampkit.graphed(
        modules=(gen, disc),
        optimizers=(opt_g, opt_d),
        scaler=scaler,
        graph=graph,
        on_failure="raise",
        verify=verify,
    )
    def train_step(real: Tensor, noise: Tensor, boost: Tensor) -> dict[str, Tensor | None]:
        with torch.autocast(device, dtype=torch.float16):
            fake = gen(noise)
            on_real, on_fake = disc(real), disc(fake.detach())
            loss_d = F.softplus(-on_real).mean() + F.softplus(on_fake).mean() * boost
        opt_d.zero_grad()
        scaler.scale(loss_d).backward()
        scaler.step(opt_d, max_norm=1.0)
        with torch.autocast(device, dtype=torch.float16):
            loss_g = F.softplus(-disc(fake)).mean()
        opt_g.zero_grad()
        scaler.scale(loss_g).backward()
        scaler.step(opt_g)
        scaler.update()
        return {"disc": loss_d, "gen": loss_g, "norm": scaler.grad_norm, "nothing": None}

    made = torch.Generator().manual_seed(1)
    history = []
    for i in range(14):
        real, noise = (torch.randn(8, n, generator=made).to(device) for n in (6, 4))
        boost = torch.tensor(float("inf") if i in (1, 8) else 1.0, device=device)
        out = train_step(real, noise, boost)
        scheduler.step()
        state: dict[str, Any] = {f"gen.{key}": bits(value) for key, value in gen.state_dict().items()}
        state |= {f"disc.{key}": bits(value) for key, value in disc.state_dict().items()}
        for optimizer in (opt_g, opt_d):
            for number, moments in optimizer.state_dict()["state"].items():
                state |= {f"{type(optimizer).__name__}.{number}.{key}": bits(value) for key, value in moments.items()}
        state |= {f"gradient {i}": p.grad.clone() for i, p in enumerate([*gen.parameters(), *disc.parameters()])}
        history.append((out, state, scaler.state_dict(), bits(torch.rand(2, device=device))))
    assert train_step.replays == (11 if graph != "off" else 0)
    assert train_step.report().skipped == 2
    return history


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_gan(engine: Engine) -> None:
    """S4: two optimizers and one scaler in one graph, one skipped and the other not: after every call eager's bits."""
    with deterministic():
        eager = run_gan(engine, "off")
        assert_same(eager, run_gan(engine, engine[1]))
        assert_same(eager, run_gan(engine, engine[1], verify=2))


@pytest.mark.parametrize("engine", ENGINES)
def test_evaluation_without_gradients(engine: Engine) -> None:
    """An evaluation without optimizer and gradient sees the weights that training steps change in between."""
    device, graph = engine
    model = make_net(device)
    step = ampkit.graphed_step(
        lambda m, x, y, b: F.cross_entropy(m(x), y), model, OPTIMIZERS["sgd"](model.parameters()), graph=graph
    )

    @ampkit.graphed(modules=(model,), graph=graph, on_failure="raise")
    def evaluate(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of correct answers, and the logits."""
        with torch.no_grad():
            logits = model(images)
        return (logits.argmax(1) == labels).sum(), logits

    assert evaluate.__name__ == "evaluate"
    assert evaluate.__doc__ == "Return the number of correct answers, and the logits."
    for _ in range(6):
        for images, labels, boost in make_batches(device, [12, 12, 12, 5]):
            step(images, labels, boost)
        model.eval()
        for images, labels, _ in make_batches(device, [16, 16, 4]):
            correct, logits = evaluate(images, labels)
            with torch.no_grad():
                expected = model(images)
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
            assert correct == (logits.argmax(1) == labels).sum()
        model.train()
    assert (evaluate.captures, evaluate.replays) == (2, 18 - 6)
    assert step.captures == 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["encoder layer", "attention"])
def test_fast_paths_of_inference(engine: Engine, kind: str, dtype: torch.dtype) -> None:
    """A1, S4: on a CPU torch's fast paths are taken under autocast. A watched call has their bits too."""
    device, graph = engine
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).to(device).eval()

    def evaluate(x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            return layer(x) if kind == "encoder layer" else layer.self_attn(x, x, x, need_weights=False)[0]

    graphed = ampkit.graphed(modules=(layer,), graph=graph, on_failure="raise", verify=2)(evaluate)
    with deterministic():
        for i in range(7):
            x = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(i)).to(device, dtype)
            assert_same(graphed(x), evaluate(x), f"call {i}")
    assert graphed.replays == 4


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_of_inference_mode(engine: Engine) -> None:
    """R7, A1: every call has the bits of the plain function, the one under the preflight too: autocast reaches the
    parts of einsum. A change of the batch in place is written back."""
    device, graph = engine

    def outer(x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            product = torch.einsum("bi,bj->ij", x, x)
        x.add_(1)
        return product

    captured = ampkit.graphed(modules=(), graph=graph, on_failure="raise")(outer)
    with torch.inference_mode():
        for seed in range(6):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).to(device) * 1
            assert x.is_inference()
            own = x.clone()
            assert_same(captured(x), outer(own))
            assert_same(x, own)
    assert captured.replays == 3


# What a function does beside its backward, and what happens between two calls.
LEFT = ("zeroed outside", "never zeroed", "zeroed before", "filled with zeros before", "stepped inside", "in turns")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("verify", [0, 3])
@pytest.mark.parametrize("kind", LEFT)
@pytest.mark.sampled(2)
def test_gradients_are_those_of_a_plain_loop(engine: Engine, verify: int, kind: str) -> None:
    """W4: gradients that a function leaves in param.grad are there, add up over calls, and feed an optimizer outside;
    one that it does not leave is not there.
    """
    device, graph = engine

    def run(graph: str | None) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(2**-6, device=device), fused=True)
        inside = kind in ("stepped inside", "in turns")

        def backward(x: Tensor, last: bool) -> Tensor:
            if kind in ("zeroed before", "filled with zeros before"):
                model.zero_grad(set_to_none=kind == "zeroed before")
            loss = model(x).square().mean()
            loss.backward()
            if inside and last:
                optimizer.step()
                if kind == "in turns":
                    optimizer.zero_grad()
            return loss.detach()

        options: dict[str, Any] = {"modules": (model,), "on_failure": "raise", "verify": verify}
        options |= {"optimizers": (optimizer,)} if inside else {}
        called: Any = backward if graph is None else ampkit.graphed(graph=graph, **options)(backward)
        made, history = torch.Generator().manual_seed(1), list[Any]()
        for i in range(32):
            loss = called(torch.randn(4, 6, generator=made).to(device), i % 4 == 3)
            if not inside and i % 4 == 3:
                optimizer.step()
                if kind == "zeroed outside":
                    optimizer.zero_grad()
            gradients = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
            history.append((loss, gradients, [param.detach().clone() for param in model.parameters()]))
        assert graph in (None, "off") or called.replays > 15
        return history

    with deterministic():
        plain = run(None)
        assert_same(plain, run("off"))
        assert_same(plain, run(graph))


@pytest.mark.parametrize("kind", ["error", "closed"])
def test_gradients_behind_an_error(kind: str) -> None:
    """W4: a call that raises leaves what its backward has added; gradients stay when the graphs are gone."""
    model = nn.Linear(3, 1)

    @ampkit.graphed(modules=(model,), graph="emulate", on_failure="raise")
    def backward(x: Tensor, fails: bool) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        if fails:
            raise ArithmeticError("a mistake")
        return loss

    for _ in range(6):
        backward(torch.ones(2, 3), False)
    if kind == "error":
        with pytest.raises(ArithmeticError, match="a mistake"):
            backward(torch.ones(2, 3), True)
    else:
        backward.close()
    assert backward.replays == 3
    assert_same(model.weight.grad, torch.full((1, 3), 14.0 if kind == "error" else 12.0))


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_from_before_are_kept(engine: Engine) -> None:
    """W4: a param.grad that exists before a call is accumulated into in place and stays the same tensor."""
    device, graph = engine

    def run(graph: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).to(device)

        @ampkit.graphed(modules=(model,), graph=graph, on_failure="raise")
        def backward(x: Tensor) -> Tensor:
            loss = model[1](model[0](x)).square().mean()
            loss.backward()
            return loss

        held = torch.zeros_like(model[0].weight)
        history = []
        for i in range(8):
            if i % 3 == 0:
                held.zero_()
            model[0].weight.grad = held
            history.append(backward(torch.full((2, 4), 1.0 + i, device=device)))
            assert model[0].weight.grad is held
            history += [param.grad.clone() for param in model.parameters()]
        assert backward.replays == (5 if graph != "off" else 0)
        return history

    with deterministic():
        assert_same(run("off"), run(graph))


class AddsGradients(Tensor):
    """Adds the gradients of `HELD`, in code that is called while torch has taken modes off."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            if func is torch.tanh:
                out = sum((p.grad.sum() for p in HELD if p.grad is not None), out)
        return out


HELD: list[Tensor] = []


def use_of_gradients(kind: str, model: nn.Module, x: Tensor) -> Tensor:
    """Call a model, in a function that uses gradients in one of several ways, or in none."""
    if kind == "none":
        with torch.no_grad():
            return model(x)
    output = model(x)
    if kind == "reads in a subclass":
        return torch.tanh(output.detach().as_subclass(AddsGradients)).as_subclass(Tensor)
    if kind == "reads":
        return sum((p.grad.sum() for p in model.parameters() if p.grad is not None), output.detach())
    if kind == "clears":
        model.zero_grad(set_to_none=False)
    if kind == "makes":
        output.sum().backward()
    return output.detach()


@pytest.mark.parametrize("kind", ["none", "forward", "reads", "reads in a subclass", "clears", "makes"])
def test_gradients_that_come_and_go_elsewhere(kind: str) -> None:
    """They are nothing to a function that does not use them: it keeps its graph. To another one they make a layout."""
    model = make_linear()
    HELD[:] = model.parameters()

    @ampkit.graphed(modules=(model,), graph="emulate")
    def act(x: Tensor) -> Tensor:
        return use_of_gradients(kind, model, x)

    def state() -> list[Any]:
        return [None if p.grad is None else bits(p.grad) for p in model.parameters()]

    uses = kind not in ("none", "forward")
    with taped(), pytest.warns(ampkit.CaptureWarning, match="gradients were made") if uses else nullcontext():
        for i in range(16):
            if i > 5 and i % 4 == 0:
                model.zero_grad()
            elif i > 5:
                model(torch.ones(3, 4)).sum().backward()
            before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            expected = use_of_gradients(kind, model, x := torch.full((3, 4), i / 8.0)).clone(), state()
            for param, gradient in zip(model.parameters(), before, strict=True):
                param.grad = gradient
            assert_same([act(x), state()], [*expected])
    assert (act.captures, act.replays) == (1, 13) if not uses else act.replays < 13


def make_linear() -> nn.Module:
    """Return the same network each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_function_without_reference_cycles(engine: Engine) -> None:
    """The last reference to the function releases its graphs and modules."""
    gc.collect()
    gc.disable()
    try:
        model = nn.Linear(4, 4).to(engine[0])
        ref = weakref.ref(model)  # for a closure is a reference too
        double = ampkit.graphed(modules=(model,), graph=engine[1])(lambda x: x * 2 + ref().bias)
        with double:
            for _ in range(5):
                double(torch.ones(4, device=engine[0]))
            assert double.report().graphs == 1
        assert double.report().graphs == 0
        gone = [weakref.ref(double), weakref.ref(model)]
        del double, model
        assert [thing() for thing in gone] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"modules": nn.Linear(2, 2)}, r"graphed\(modules=Linear\): expected a tuple of torch.nn.Module"),
        (
            {"modules": (nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))},
            r"expected parameters and buffers on one device, found (cpu, meta|meta, cpu)",
        ),
        ({"warmup": 0}, r"graphed\(warmup=0\): expected an int of at least 1"),
        ({"graph": "on"}, r"graphed\(graph='on'\): expected one of 'auto', 'emulate', 'off'"),
        ({"scaler": torch.amp.GradScaler("cpu")}, r"torch.amp.grad_scaler.GradScaler\): expected an ampkit.GradScaler"),
        ({"optimizers": torch.optim.SGD([torch.zeros(1)])}, r"optimizers=\(optimizer,\)"),
        (
            {"modules": (nn.Linear(2, 2),), "optimizers": (torch.optim.SGD([torch.zeros(3, device="meta")]),)},
            r"modules, optimizers\): expected parameters and buffers on one device, found (cpu, meta|meta, cpu)",
        ),
    ],
)
def test_wrong_use(options: dict[str, Any], says: str) -> None:
    """What cannot work is a ValueError that says what to pass."""
    with pytest.raises(ValueError, match=says):
        ampkit.graphed(**{"modules": (nn.Linear(2, 2),), **options})


def test_outputs_must_be_tensors() -> None:
    """A number would be frozen: the message has the function's name and the value."""
    double = ampkit.graphed(modules=(nn.Linear(2, 2),), graph="emulate")(lambda x: (x, 3))
    with pytest.raises(ValueError, match=r"graphed\(<lambda>\) returned a int \(3\), which a replay cannot compute"):
        double(torch.ones(2))
