"""Steps with a line that no graph can hold: the largest modules without such a line, and the update, are captured."""

import copy
import gc
import math
import random
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from families import few
from harness import ENGINES, assert_same, deterministic, training_state
from split_harness import WIDTH, Block, assert_same_as_eager
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import ampkit

pytestmark = pytest.mark.usefixtures("untimed")

Engine = tuple[str, str]


class Reads(nn.Module):
    """An `.item()` between two blocks, which is the factor of an eager dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.head = Block(), Block(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        factor = hidden.detach().float().abs().mean().item()
        return self.head(self.decoder(F.dropout(hidden, 0.1) * factor))


def classified(model: nn.Module, x: Tensor, y: Tensor, boost: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(x)
    return F.cross_entropy(logits.float(), y) * boost, {"correct": (logits.argmax(1) == y).sum()}


class Shared(Reads):
    """The decoder is the encoder, and its weight is used by an eager line, too."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = self.encoder

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.encoder.first.weight)[:, :3]


class Gate(nn.Module):
    """As in Llama and its kin: two layers take the same float32 input, which autocast casts for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x).tanh() + self.up(x * 0.5))


class Gated(nn.Module):
    """A line between a norm, whose result is float32, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.mlp = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), Gate()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).float() * 2.0
        if float(hidden.detach().sum()) > 1e9:
            hidden = hidden * 2
        return self.head(self.mlp(hidden))


class Masked(Reads):
    """A boolean mask over nodes, as in a graph network."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        kept = hidden.detach().float().mean(1) > -0.5
        hidden = hidden.index_put((kept.nonzero().squeeze(1),), self.decoder.second(hidden[kept]).to(hidden.dtype))
        return self.head(self.decoder(hidden))


class Detects(Reads):
    """A head that takes the rows that score best, and runs a module on as many as there are."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        scores = self.head(hidden).float().sigmoid().amax(1)
        best = (scores.detach() >= scores.detach().median()).nonzero().squeeze(1)
        extra = self.decoder(hidden[best]).mean(0)
        return self.head(hidden + extra) * scores[:, None]


class Solver(nn.Module):
    """Runge-Kutta with four calls of one module per step, and an assert that reads a number."""

    def __init__(self) -> None:
        super().__init__()
        self.field, self.head = Block(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        times = torch.linspace(0, 1, 3, device=x.device)
        increasing = (times[1:] > times[:-1]).all() & self.head.bias.isfinite().all()
        assert float(increasing), "t must be increasing"
        for _ in range(1):
            k1 = self.field(x)
            k2 = self.field(x + 0.5 * k1)
            k3 = self.field(x + 0.5 * k2)
            k4 = self.field(x + k3)
            x = x + (k1 + 2 * k2 + 2 * k3 + k4) / 6
        return self.head(x)


class Checkpointed(Reads):
    """One block is computed again in the backward, and another one has a checkpoint inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.encoder, x, use_reentrant=False)
        factor = hidden.detach().float().abs().mean().item()
        return self.head(self.decoder(self.inner(hidden) * factor))


class Later(Reads):
    """The input of a block is used behind it, in a step whose loss is above a threshold only."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.head.weight.T @ self.head.weight) + x
        hidden = self.encoder(x)
        if float(hidden.detach().float()[0, 0]) > 0:
            hidden = hidden + 0.3 * x + 0.1 * x.sin()
        return self.head(self.decoder(hidden))


class Pair(nn.Module):
    """Two outputs, of which one is in the loss in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.other = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.block(x)
        return {"hidden": hidden, "other": [torch.sigmoid(self.other(hidden)), None]}


class Sometimes(Reads):
    """An output of a module is used only where the host says so."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Pair()

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.encoder(x)
        hidden = outputs["hidden"]
        if float(hidden.detach().float()[0, 0]) > 0:
            hidden = hidden * outputs["other"][0]
        return self.head(self.decoder(hidden))


class Convolution(nn.Module):
    """A layer of a graph network, as torch_geometric has it: it takes self-loops out, by a mask, and adds them anew."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(inputs, outputs, bias=False), nn.Parameter(torch.zeros(outputs))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        loops = torch.arange(len(nodes), device=nodes.device).expand(2, -1)
        edges = torch.cat([edges[:, edges[0] != edges[1]], loops], 1)
        degree = torch.zeros(len(nodes), device=nodes.device).index_put(
            (edges[1],), torch.ones_like(edges[1], dtype=torch.float32), accumulate=True
        )
        norm = degree.rsqrt()[edges].prod(0)[:, None]
        hidden = self.linear(nodes)
        sums = torch.zeros_like(hidden).index_put(
            (edges[1],), (hidden[edges[0]] * norm).to(hidden.dtype), accumulate=True
        )
        return sums + self.bias


class GraphNetwork(nn.Module):
    """No module is captured by itself: the mask is in the layers, and the linear ones are small."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Convolution(WIDTH, 8), Convolution(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            nearest = (x * self.first.linear.weight[0]).argmax(1)
        edges = torch.stack([torch.arange(len(x), device=x.device), nearest % len(x)])
        return self.second(F.dropout(F.relu(self.first(x, edges)), 0.1), edges)


class Buffers(Reads):
    """BatchNorm in a captured part, whose buffer an eager line reads."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), Block())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        factor = 1 + self.encoder[1].running_var.mean().item()
        return self.head(self.decoder(hidden / factor))


class Number(nn.Module):
    """Reads its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + x.detach().float().abs().mean().item())


def small_layers() -> list[nn.Module]:
    """Layers of less than six kernels each. Some of them change what they get in place, or return a view of it."""
    first = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Unflatten(1, (4, 4)), nn.Flatten(), nn.Dropout(0.1)
    return [*first, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)]


class Flat(nn.Module):
    """An `nn.Sequential` of small layers, one of which reads a number."""

    def __init__(self) -> None:
        super().__init__()
        layers = [*small_layers(), nn.Linear(WIDTH, WIDTH), Number(), *small_layers(), nn.LayerNorm(WIDTH)]
        self.net, self.head = nn.Sequential(*layers), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))


class Twice(Flat):
    """The `nn.Sequential` is called twice; a slice of it, and a layer of it, are called by themselves too."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[14:](self.net(x)) + self.net[0](x)
        return super().forward(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "item": Reads,
    "shared": Shared,
    "gated": Gated,
    "mask": Masked,
    "nonzero": Detects,
    "solver": Solver,
    "checkpoint": Checkpointed,
    "later": Later,
    "sometimes": Sometimes,
    "buffers": Buffers,
    "graph network": GraphNetwork,
    "flat": Flat,
    "flat, twice": Twice,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"policy": "float16", "max_norm": 0.5},
    "accumulated": {"policy": "bfloat16", "accumulate": 3, "max_norm": 0.1},
}


def batch(device: str, i: int, boost: float = 1.0, size: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(i)
    x, y = torch.randn(size, WIDTH, generator=random), torch.randint(3, (size,), generator=random)
    return x.to(device), y.to(device), torch.tensor(boost).to(device)


class Run:
    """A model that is trained, with an average of it."""

    def __init__(
        self, engine: Engine, make: Callable[[], nn.Module], loss_fn: Any = classified, **options: Any
    ) -> None:
        torch.manual_seed(3)
        self.device = engine[0]
        self.model = make().to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.averaged = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.step = ampkit.graphed_step(
            loss_fn,
            self.model,
            self.optimizer,
            scheduler=torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9),
            after_step=self.averaged.update_parameters,
            graph=engine[1],
            **options,
        )
        torch.manual_seed(5)

    def steps(self, numbers: range, overflows: tuple[int, ...] = (), **options: Any) -> Iterator[Any]:
        for i in numbers:
            out = self.step(*batch(self.device, i, math.inf if i in overflows else 1.0, **options))
            state = training_state(self.model, self.optimizer, self.step.scaler)
            yield out, {**state, **{name: value.clone() for name, value in self.averaged.state_dict().items()}}


def compared(engine: Engine, make: Callable[[], nn.Module], calls: int = 13, **options: Any) -> ampkit.GraphedStep:
    """Assert that a run has the bits of an eager one; return its step."""
    overflows = (1, 8, 9) if options.get("policy") == "float16" else ()
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        expected = list(Run((engine[0], "off"), make, **options).steps(range(calls), overflows))
        run = Run(engine, make, **options)
        for i, found in enumerate(run.steps(range(calls), overflows)):
            assert_same(found, expected[i], f"call {i}")
    return run.step


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        # Slow but for each model with one of the options, in turn.
        pytest.param(model, options, id=f"{model}-{name}", marks=[pytest.mark.slow] * ((i + j) % len(OPTIONS) > 0))
        for i, model in enumerate(MODELS)
        for j, (name, options) in enumerate(OPTIONS.items())
    ],
)
@pytest.mark.sampled(8)
@pytest.mark.quick(2)
def test_the_bits_of_eager_steps(engine: Engine, model: str, options: dict[str, Any]) -> None:
    """R4: losses, parameters, state, scale, average and random numbers are those of eager steps after each call."""
    calls = 36 if "accumulate" in options else 13
    report = compared(engine, MODELS[model], calls, **options).report()
    assert (report.outcome, report.failure, report.replays) == ("in parts", None, 0)
    assert report.in_parts + sum(report.eager.values()) == calls
    assert report.in_parts >= 6
    if model == "graph network" or (model in ("shared", "solver", "flat, twice") and "policy" in options):
        # Autocast casts the weight once for all of its uses, and their gradients are added in low precision.
        assert (report.parts, report.updates) == ((), 1)
        assert "captured by itself: no module" in report.split
        cast = "a tensor that it makes, and does not return, is used outside of it"
        assert ("a boolean mask as an index" if model == "graph network" else cast) in str(report)
        return
    assert any(part.replays == report.in_parts for part in report.parts)
    if (model, options) != ("sometimes", OPTIONS["accumulated"]):  # where the parameters with gradients vary
        assert "the update of the parameters is one graph" in report.split


class Ordered(nn.Module):
    """Blocks that calls leave out, repeat, or take in another order, from some call on."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block() for _ in range(5)]), nn.Linear(WIDTH, 3)
        self.calls, self.start = 0, start

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        picked = random.Random(self.calls)
        numbers = [*range(5)]
        if self.calls > self.start:
            numbers = picked.choice(
                ([*range(5)], [4, 3, 2, 1, 0], picked.sample(range(5), 3), sorted(picked.sample(range(5), 3)))
            )
        loss = x
        for number in numbers:
            loss = self.blocks[number](loss)
            loss = loss * min(2.0, loss.detach().float().abs().mean().item())
        return self.head(loss)


@pytest.mark.parametrize("start", [4, 5, 6, 12])
@pytest.mark.parametrize("engine", ENGINES)
def test_modules_that_are_left_out_or_called_in_another_order(engine: Engine, start: int) -> None:
    """R4: their forward graphs share memory, in the order in which one call has captured them."""
    report = compared(engine, lambda: Ordered(start), 40, host_writes="ignore").report()
    assert report.in_parts >= 30
    assert sum(part.replays for part in report.parts) > 30


class InFunction(torch.autograd.Function):
    """Calls a module in its forward, as the reversible layers of Reformer do, on a view that was made there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        return module(x[:, :WIDTH]).exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Reversible(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(InFunction.apply(self.decoder(x), self.encoder) / (1 + x.detach().abs().max().item()))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_module_that_is_called_in_the_forward_of_a_function(engine: Engine) -> None:
    """R4: its input is a view without a node of autograd's."""
    report = compared(engine, Reversible).report()
    assert "decoder" in [part.module for part in report.parts]


class AsksForIdentity(Block):
    """Asks which one of its parameters this is."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.kept = how, [self.first.weight]
        self.ids, self.weights = {id(self.first.weight)}, {self.first.weight}

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        is_known = {"id": id(weight) in self.ids, "set": weight in self.weights, "is": weight is self.kept[0]}
        return super().forward(x) * (2.0 if is_known[self.how] else 1.0)


@pytest.mark.parametrize("policy", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["id", "set", "is"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_module_that_asks_for_the_identity_of_its_parameters(engine: Engine, how: str, policy: str) -> None:
    """W3: a graph would have other parameters in it. So that module stays eager, and what is in it is captured."""

    def make() -> nn.Module:
        model = Reads()
        model.decoder = AsksForIdentity(how)
        return model

    report = compared(engine, make, policy=policy).report()
    assert [part.module for part in report.parts] == ["encoder"]
    assert "does it ask for their identity" in " ".join(report.split)


# ------------------------------------------------------------------------------------- neighbours in an nn.Sequential


class Own(nn.Sequential):
    """Does what an `nn.Sequential` does, in its own words."""

    def forward(self, input: Tensor) -> Tensor:
        for layer in self:
            input = layer(input)
        return input


class Named(nn.Sequential):
    """Has a name of its own."""


def flat(kind: str) -> nn.Module:
    model: Any = Flat()
    if kind in ("own", "named"):
        model.net = {"own": Own, "named": Named}[kind](*model.net)
    elif kind == "hooked":
        model.net.register_forward_hook(lambda module, args, out: out * 0.5)
        model.net[4].register_forward_hook(lambda module, args, out: out * 0.25)
        model.net[18].register_full_backward_hook(lambda module, grads, _: (grads[0] * 0.5,))
    elif kind == "nested":
        model.net = nn.Sequential(*small_layers(), nn.Linear(WIDTH, WIDTH), model.net, nn.Tanh())
    elif kind == "replaced":
        forward = model.net.forward
        model.net.forward = lambda x: forward(x) * 0.5
    elif kind == "eval":
        model.net.eval()
    elif kind == "keeps":
        kept: list[Tensor] = []
        model.net = nn.Sequential(*small_layers(), Kept(kept), *model.net)
        model.head = Using(kept)
    return model


class Kept(nn.Module):
    """Keeps a tensor for others."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.__dict__["kept"] = [kept]

    def forward(self, x: Tensor) -> Tensor:
        self.kept[0][:] = [x.exp()]
        return x.sin()


class Using(nn.Linear):
    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__(WIDTH, 3)
        self.__dict__["kept"] = [kept]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.kept[0][0])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("plain", ["net[0:9]", "net[10:19]"]),
        ("named", ["net[0:9]", "net[10:19]"]),
        ("nested", ["net[0:9]", "net.9[0:9]", "net.9[10:19]"]),
        ("hooked", ["net[10:18]"]),
        ("own", []),
        ("replaced", []),
        ("eval", ["net[0:9]", "net[10:19]"]),
        ("keeps", ["net[0:8]", "net[9:18]", "net[19:28]"]),
    ],
)
@pytest.mark.sampled(4)
def test_neighbours_are_captured_together(engine: Engine, kind: str, parts: list[str]) -> None:
    """R4: small layers without an uncapturable line, next to each other in an `nn.Sequential`, are one pair of graphs.

    A hook on one of them, or a `forward` of its own, is in the way. What keeps a tensor for others is not among them.
    """
    report = compared(engine, lambda: flat(kind)).report()
    assert [part.module for part in report.parts] == parts, str(report)
    assert all(part.replays == report.in_parts and not part.eager for part in report.parts)
    assert report.outcome == "in parts"


def change_neighbours(name: str, run: Run) -> None:
    net: Any = run.model.net
    if name == "hook":
        net[3].register_forward_hook(lambda module, args, out: out * 0.5)
    elif name == "hook on the whole":
        net.register_forward_hook(lambda module, args, out: out * 0.5)
    elif name == "forward":
        forward = net.forward
        net.forward = lambda x: forward(x) * 0.5
    elif name == "another layer":
        net[1] = nn.Tanh()
    elif name == "one more":
        net.append(nn.Tanh())
    elif name == "mode":
        net[4].eval()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "name", few(["hook", "hook on the whole", "forward", "another layer", "one more", "mode"], ("hook", "one more"))
)
@pytest.mark.sampled(3)
@pytest.mark.slow
def test_neighbours_that_change(engine: Engine, name: str) -> None:
    """R4: the bits are those of eager steps after each change of the layers, and of the `nn.Sequential`."""

    def train(graph: str) -> tuple[Run, list[Any]]:
        run = Run((engine[0], graph), Flat, policy="float16", max_norm=1.0)
        found = list(run.steps(range(9)))
        change_neighbours(name, run)
        return run, [*found, *run.steps(range(9, 20), overflows=(10, 18))]

    report = assert_same_as_eager(engine, train).step.report()
    assert report.outcome == "in parts", str(report)


# --------------------------------------------------------------------------------------------------- lines of loss_fn


def recognized(model: nn.Module, sounds: Tensor, labels: Tensor) -> Tensor:
    words = model(sounds).float().log_softmax(2).transpose(0, 1)
    return F.ctc_loss(words, labels, (words.shape[0],) * len(labels), (labels.shape[1],) * len(labels))


@pytest.mark.parametrize("engine", ENGINES)
def test_ctc_loss(engine: Engine) -> None:
    """R4: lengths on the host are in loss_fn; the whole model is captured by itself."""
    history = []
    for graph in ("off", engine[1]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(4, WIDTH, 3), nn.GELU(), nn.Flatten(2), Transposed(), Block()).to(engine[0])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        step = ampkit.graphed_step(read_and_recognized, model, optimizer, policy="bfloat16", max_norm=1.0, graph=graph)
        losses = []
        # The kernel of the CTC loss adds in any order on CUDA, so torch has no deterministic backward of it there.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ampkit.CaptureWarning)
            for i in range(12):
                made = torch.Generator().manual_seed(i)
                sounds, labels = torch.randn(3, 4, 20, generator=made), torch.randint(1, WIDTH, (3, 4), generator=made)
                losses.append(step(sounds.to(engine[0]), labels.to(engine[0])).loss)
        history.append([losses, training_state(model, optimizer, step.scaler)])
    if engine[0] == "cpu":
        assert_same(*history)
    assert [part.module for part in step.report().parts] == [""]
    assert step.report().in_parts == 7


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous()


def read_and_recognized(model: nn.Module, sounds: Tensor, labels: Tensor) -> Tensor:
    loss = recognized(model, sounds, labels)
    assert loss.item() == loss.item()
    return loss


# ------------------------------------------------------------------------------------------------ what is left eager


class Counts(Block):
    """Counts its calls on the host."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Keeps(Block):
    """Keeps a tensor that an eager line reads."""

    kept: Tensor

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.__dict__["box"] = [kept]

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.box[0].append(out.exp())
        return out


class Writes(Block):
    """Writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


class Views(Block):
    """Gives a view of its input."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + 0 * x, x[:2]


class Scheduled(Block):
    """Computes with a number that `loss_fn` sets."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class Around(Reads):
    """Something that cannot be captured rightly, in the place of the encoder."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.kept = kind, deque[Tensor]()
        made = {"counts": Counts, "writes": Writes, "views": Views, "scheduled": Scheduled, "hooked": Block}
        self.encoder = Keeps(self.kept) if kind == "keeps" else made[kind]()
        if kind == "hooked":
            self.encoder.second.register_forward_hook(lambda module, args, out: out * 0.5)
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        self.kept.clear()
        if self.kind == "scheduled":
            self.encoder.factor = 1 + 1 / self.number
        hidden = self.encoder(x * 1.0)
        hidden = hidden[0] + hidden[1].mean() if isinstance(hidden, tuple) else hidden
        hidden = hidden * hidden.detach().abs().mean().item()
        if self.kept:
            hidden = hidden + self.kept[0]
        return self.head(self.decoder(hidden))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("counts", "its forward changes attributes"),
        ("keeps", "its forward changes attributes"),
        ("writes", "it writes to a tensor that is no buffer of it"),
        ("views", "an output shares memory with another one"),
        ("scheduled", "it does something else in each step"),
        ("hooked", "there are hooks on a module in it"),
    ],
)
@pytest.mark.sampled(2)
def test_what_cannot_be_captured_rightly_stays_eager(engine: Engine, kind: str, why: str) -> None:
    """R4: the encoder stays eager, and the report says why; the decoder is captured."""
    report = compared(engine, lambda: Around(kind)).report()
    assert [part.module for part in report.parts] == ["decoder"]
    assert f"eager: encoder: {why}" in str(report)


class DynamicCache:
    """Stands in for the one of transformers: empty before the first layer, with its keys and values behind it."""

    __module__ = "transformers.cache_utils"

    def __init__(self) -> None:
        self.layers: list[Tensor] = []


class Caching(Block):
    def forward(self, x: Tensor, past_key_values: DynamicCache | None = None) -> Tensor:
        if past_key_values is not None:
            past_key_values.layers.append(x)
        return super().forward(x)


class Decoder(Reads):
    """A new cache in each step, as the decoders of transformers have it, unless they are told not to."""

    def __init__(self, use_cache: bool) -> None:
        super().__init__()
        self.use_cache = use_cache
        self.encoder, self.decoder = Caching(), Caching()

    def forward(self, x: Tensor) -> Tensor:
        cache = DynamicCache() if self.use_cache else None
        hidden = self.encoder(x, past_key_values=cache)
        factor = hidden.detach().float().abs().mean().item()
        return self.head(self.decoder(hidden * factor, past_key_values=cache))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_cache_that_is_made_in_each_step(engine: Engine) -> None:
    """R4: the report says what to pass to a model of transformers, and with that its layers are captured."""
    text = str(compared(engine, lambda: Decoder(use_cache=True)).report())
    advice = "Pass use_cache=False to the model: training needs no cache"
    assert f"eager: encoder: it gets another DynamicCache in each step. {advice}" in text
    assert f"eager: decoder: it gets a DynamicCache, in which a graph does not see the tensors. {advice}" in text
    report = compared(engine, lambda: Decoder(use_cache=False)).report()
    assert [part.module for part in report.parts] == ["encoder", "decoder"]


class Sums(nn.Module):
    """Gives its input a gradient that is expanded, of which a copy has other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x.sum(0, keepdim=True) / 8)


class Within(Reads):
    """The module in the middle cannot be captured; the one inside of it can."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = Sums()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        hidden = hidden + self.sums(hidden) * hidden.detach().abs().mean().item()
        return self.head(self.decoder(hidden))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_where_a_capture_fails_the_modules_inside_are_tried(engine: Engine) -> None:
    """R4: what only the capture shows is followed by another choice."""
    report = compared(engine, Within).report()
    assert [part.module for part in report.parts] == ["encoder", "sums.block", "decoder"]
    assert "eager: sums: the gradient of an input has a layout that a copy would not have." in str(report)


# ------------------------------------------------------------------------------------------------------ what changes


def change_of(name: str, run: Run) -> None:
    """Change something between two calls."""
    model: Any = run.model
    if name == "mode":
        model.train(not model.training)
    elif name == "freeze":
        model.encoder.first.weight.requires_grad_(False)
    elif name == "replace":
        model.encoder.second = copy.deepcopy(model.encoder.second)
        run.optimizer.param_groups[0]["params"][:] = list(model.parameters())
        run.optimizer.state.clear()
    elif name == "hook":
        model.encoder.second.register_forward_hook(lambda module, args, out: out * 0.5)
    elif name == "forward":
        original = model.decoder.second.forward
        model.decoder.second.forward = lambda x: original(x) * 0.5
    elif name == "moved":
        model.encoder.first.weight.data = model.encoder.first.weight.data.clone()
    elif name == "resume":
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        run.step.scaler.load_state_dict(run.step.scaler.state_dict())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "name", few(["mode", "freeze", "replace", "hook", "forward", "moved", "resume"], ("freeze", "hook", "resume"))
)
@pytest.mark.sampled(2)
def test_what_changes_between_calls_is_followed(engine: Engine, name: str) -> None:
    """R4: the parts are made anew, and the bits are those of eager steps."""

    def train(graph: str) -> tuple[Run, list[Any]]:
        run = Run((engine[0], graph), Reads, policy="float16", max_norm=1.0)
        found = list(run.steps(range(8)))
        change_of(name, run)
        return run, [*found, *run.steps(range(8, 17), overflows=(9, 15))]

    report = assert_same_as_eager(engine, train).step.report()
    assert report.in_parts >= 6, str(report)
    assert report.outcome == "in parts", str(report)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_hooks_on_all_modules(engine: Engine) -> None:
    """R4: while there are some, the graphs from before are not used, because they would not call them."""

    def train(graph: str) -> tuple[Run, list[Any]]:
        run = Run((engine[0], graph), Flat)
        found = list(run.steps(range(9)))
        hook = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 0.5)
        try:
            found += run.steps(range(9, 12))
        finally:
            hook.remove()
        return run, [*found, *run.steps(range(12, 15))]

    report = assert_same_as_eager(engine, train).step.report()
    assert report.eager["warm-up again: hooks of modules and parameters changed"] == 3
    assert report.in_parts == 6


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_each_shape_has_its_own_split(engine: Engine) -> None:
    """R4: within max_graphs."""

    def train(graph: str) -> tuple[Run, list[Any]]:
        run = Run((engine[0], graph), Reads, max_graphs=2)
        return run, [out for i in range(24) for out in run.steps(range(i, i + 1), size=4 + i % 3)]

    report = assert_same_as_eager(engine, train).step.report()
    assert len(report.parts) == 4
    assert "max_graphs=2 layouts are done in parts already" in str(report)


# -------------------------------------------------------------------------------------------------- when it is undone


class Slowing:
    """A clock by which each call takes longer, or less long, than the one before."""

    def __init__(self, factor: float) -> None:
        self._now, self._step, self._factor = 0.0, 1.0, factor

    def now(self) -> float:
        self._step *= self._factor
        self._now += self._step
        return self._now


def parts_of(model: str) -> set[str]:
    modules = {"item": {"encoder", "decoder"}, "graph network": set()}[model]
    return {*modules, "the update of the parameters", "eager"}


class Ticking:
    """A clock by which one second passes each time that it is read."""

    seconds = 0.0

    def now(self) -> float:
        self.seconds += 1
        return self.seconds


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_how_the_time_is_shared(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """R4: of each captured module, forward and backward and all calls; of the update; of the eager rest."""
    monkeypatch.setattr("ampkit._step.parts.split.Clock", lambda device: Ticking())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        run = Run(engine, Solver)
        list(run.steps(range(16)))
    report = run.step.report()
    # Eight replays of the module and one update, of one second each, and one second behind each of these marks.
    assert report.shares == {"field": 8 / 19, "the update of the parameters": 1 / 19, "eager": 10 / 19}
    assert "time of a step in parts: field 42%, the update of the parameters 5%, eager 53%" in str(report)
    assert report.to_dict()["shares"] == report.shares
    calls = run.step._engine._session.splitter._splits
    clock = next(iter(calls.values())).clock
    before = clock.seconds
    list(run.steps(range(16, 19)))
    assert clock.seconds == before


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", ["item", "graph network"])
@pytest.mark.parametrize(("factor", "outcome"), [(1.1, "eager"), (0.9, "in parts")])
def test_what_is_slower_is_undone(
    engine: Engine, factor: float, outcome: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R4: a split that takes longer than eager steps is given up, with a warning and a line in the report."""
    monkeypatch.setattr("ampkit._step.parts.split.is_timed", lambda options: True)
    monkeypatch.setattr("ampkit._step.parts.split.Clock", lambda device: Slowing(factor))
    with warnings.catch_warnings(record=True) as caught, deterministic():
        warnings.simplefilter("always")
        expected = list(Run((engine[0], "off"), MODELS[model]).steps(range(26)))
        run = Run(engine, MODELS[model])
        assert_same(list(run.steps(range(26))), expected)
    report = run.step.report()
    assert report.outcome == outcome, str(report)
    assert set(report.shares) == (parts_of(model) if outcome == "in parts" else set())
    said = [str(warning.message) for warning in caught if warning.category is ampkit.CaptureWarning]
    assert any("Nor is it done in parts: in parts a step takes" in text for text in said) == (outcome == "eager")
    assert report.in_parts + sum(report.eager.values()) == 26


# ----------------------------------------------------------------------------------------- what is never done in parts


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_the_other_options(engine: Engine) -> None:
    """R4: on_failure="eager" captures nothing, and "raise" raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        run = Run(engine, Reads, on_failure="eager")
        list(run.steps(range(8)))
    assert (run.step.report().in_parts, run.step.report().outcome) == (0, "eager")
    run = Run(engine, Reads, on_failure="raise")
    with pytest.raises(ampkit.CaptureError, match="1 line of the step cannot be captured"):
        list(run.steps(range(8)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_why_a_step_is_not_done_in_parts(engine: Engine) -> None:
    """R4: an autocast around the step, and code that is told of a capture, are named."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        run = Run(engine, Reads)
        with torch.autocast(engine[0], dtype=torch.bfloat16):
            list(run.steps(range(6)))
        assert "not in parts: autocast is on around the step" in str(run.step.report())
        run = Run(engine, Reads, capturing=True)
        list(run.steps(range(6)))
        assert "not in parts: the code is told that it is being captured" in str(run.step.report())


def reads_weights(model: nn.Module) -> None:
    for param in model.parameters():
        param.mul_(1 if float(param.abs().max()) < 100 else 0.5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("why", ["before_step", "optimizer"])
def test_where_neither_a_module_nor_the_update_is_captured(engine: Engine, why: str) -> None:
    """R4: the step is eager from then on, with the line that is in the way, and the bits of eager steps."""
    history: list[Any] = []
    with deterministic(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for graph in ("off", engine[1]):
            torch.manual_seed(0)
            model = GraphNetwork().to(engine[0])
            # Its step is a part of no graph.
            kind = torch.optim.AdamW if why == "before_step" else torch.optim.Adagrad
            optimizer = kind(model.parameters(), lr=1e-2, **{"fused": True} if why == "before_step" else {})
            before = reads_weights if why == "before_step" else None
            step = ampkit.graphed_step(classified, model, optimizer, max_norm=1.0, before_step=before, graph=graph)
            torch.manual_seed(1)
            history.append(
                [(step(*batch(engine[0], i)), training_state(model, optimizer, step.scaler)) for i in range(12)]
            )
    assert_same(*history)
    report = step.report()
    assert (report.outcome, report.parts, report.updates) == ("eager", (), 0), str(report)
    words = {"before_step": "float(param.abs().max())", "optimizer": "the optimizer steps behind the graphs"}
    (said,) = [text for text in map(str, (each.message for each in caught)) if "Nor is it done in parts" in text]
    assert "a boolean mask as an index" in said
    assert words[why] in said


@pytest.mark.parametrize("engine", ENGINES)
def test_the_update_alone_is_said_once(engine: Engine) -> None:
    """R4: one warning names the line, why no module is captured, and that the update is."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = Run(engine, GraphNetwork)
        list(run.steps(range(9)))
    (said,) = [str(warning.message) for warning in caught if warning.category is ampkit.CaptureWarning]
    assert "The step is done in parts: the update of the parameters gets graphs of its own" in said
    assert "first.linear: it has fewer than 6 kernels" in said
    report = run.step.report()
    assert (report.in_parts, report.updates, report.eager) == (
        4,
        1,
        {"warm-up": 3, "looking for modules to capture": 2},
    )
    run.step.close()
    assert run.step.report().outcome == "eager"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("make", "captured"), [(Reads, "encoder, decoder"), (Solver, "field (4 calls in a step)")])
@pytest.mark.quick(2)
def test_what_the_report_prints(engine: Engine, make: Callable[[], nn.Module], captured: str) -> None:
    """R4: what is captured comes first, and the source of a line is printed once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        run = Run(engine, make)
        list(run.steps(range(10)))
    head, *rest = str(run.step.report()).splitlines()
    assert head.startswith("10 steps: 0 replayed, 5 in parts, 5 eager, 0 skipped; 0 graph(s) of whole steps, ")
    (line,) = [text for text in rest if text.startswith(f"  cannot be captured: {__file__}:")]
    (constants,) = [text for text in rest if "values of the host are constants" in text]
    first = rest.index("  eager x3: warm-up")
    assert [text for text in rest[first:] if text not in (line, constants)][:6] == [
        "  eager x3: warm-up",
        "  eager x2: looking for modules to capture",
        f"  captured by itself: {captured}",
        "  the update of the parameters is one graph",
        "  eager: the model: it contains such a line",
        "  eager: head: it has fewer than 6 kernels",
    ]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_step_in_parts_is_freed(engine: Engine) -> None:
    """R4: when all names of it are gone, nothing keeps the model alive."""
    run = Run(engine, Reads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        list(run.steps(range(10)))
    assert run.step.report().in_parts > 0
    alive = weakref.ref(run.model)
    del run
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_it_is_said_once(engine: Engine) -> None:
    """R4: one warning names the line, and what is captured all the same."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = Run(engine, Reads)
        list(run.steps(range(9)))
    (said,) = [str(warning.message) for warning in caught if warning.category is ampkit.CaptureWarning]
    assert "hidden.detach().float().abs().mean().item()" in said
    assert "The step is done in parts: encoder, decoder, and the update of the parameters" in said
    report = run.step.report()
    assert [(part.module, part.number, part.replays) for part in report.parts] == [("encoder", 0, 4), ("decoder", 0, 4)]
    assert report.to_dict()["parts"][0]["module"] == "encoder"
    run.step.close()
    assert run.step.report().parts == ()
    list(run.steps(range(9, 18)))
    assert run.step.report().in_parts == 8
