"""Random training set-ups: what one is, how it is drawn from a seed, and how it is trained by ampkit and by hand."""

import copy
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import pytest
import torch
from harness import OPTIMIZERS, UNFUSED, bits, training_state
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ampkit

# --------------------------------------------------------------------------------------------------------------- models


class Images(nn.Module):
    """Convolution, BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(4, CLASSES)

    @staticmethod
    def sample(layout: "Layout", made: torch.Generator) -> Tensor:
        return torch.randn(layout.batch, 2, layout.length, layout.length, generator=made)

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        return self.head(self.dropout(F.relu(self.norm(self.conv(x)))).mean((2, 3)))


class Attention(nn.Module):
    """A transformer block, with dropout in attention and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, CLASSES)
        self.register_buffer("mean", torch.zeros(16))

    @staticmethod
    def sample(layout: "Layout", made: torch.Generator) -> Tensor:
        return torch.randn(layout.batch, layout.length, 16, generator=made)

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        hidden = self.block(x)
        if self.training:
            self.mean.lerp_(hidden.detach().float().mean((0, 1)), 0.1)
        return self.head(hidden.mean(1) - self.mean)


class Tokens(nn.Module):
    """Embedding, LayerNorm and dropout; the embedding's weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.hidden = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    @staticmethod
    def sample(layout: "Layout", made: torch.Generator) -> Tensor:
        return torch.randint(11, (layout.batch, layout.length), generator=made)

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        self.seen.add_(x.numel())
        return self.head(self.dropout(F.gelu(self.hidden(self.norm(self.embedding(x))))).mean(1))


class Branches(nn.Module):
    """One of two branches by a constant in the batch: the parameters of the other have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 8)
        self.left = nn.Linear(8, 8)
        self.right = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2))
        self.scale = nn.Parameter(torch.ones(8))  # of the right branch
        self.head = nn.Linear(8, CLASSES)
        self.register_buffer("right_turns", torch.zeros((), dtype=torch.int64))

    sample = Attention.sample

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        hidden = F.relu(self.stem(x).mean(1))
        if branch:
            self.right_turns.add_(1)
            return self.head(self.right(hidden) * self.scale)
        return self.head(self.left(hidden) + 0.1 * torch.rand_like(hidden))


CLASSES = 5
MODELS: dict[str, Any] = {"images": Images, "attention": Attention, "tokens": Tokens, "branches": Branches}
DRAWN = tuple(MODELS)  # other files add models of their own

# -------------------------------------------------------------------------------------------------------------- batches


class Layout(NamedTuple):
    """What a graph cannot change about a batch."""

    batch: int
    length: int  # side of an image, elements of a sequence
    branch: bool
    reduction: str  # of the loss
    strided: bool  # the inputs are not contiguous


class Batch(NamedTuple):
    """Inputs, labels, a factor of the loss, and two constants."""

    x: Tensor
    y: Tensor
    boost: Tensor
    branch: bool
    reduction: str


def make_batch(model: str, layout: Layout, boost: float, made: torch.Generator, device: str) -> Batch:
    x = MODELS[model].sample(layout, made)
    if layout.strided:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    y = torch.randint(CLASSES, (layout.batch,), generator=made)
    return Batch(x.to(device), y.to(device), torch.tensor(boost).to(device), layout.branch, layout.reduction)


# How a batch is passed: arguments, and how they are read.
TREES: dict[str, tuple[Callable[[Batch], tuple[Any, Any]], Callable[..., Batch]]] = {
    "arguments": (lambda batch: (tuple(batch), {}), Batch),
    "tuple": (lambda batch: ((batch,), {}), lambda batch: batch),
    "dict": (lambda batch: ((batch._asdict(),), {}), lambda batch: Batch(**batch)),
    "nested": (
        lambda batch: ((((batch.x, batch.branch), [batch.y, {"boost": batch.boost}]),), {"reduction": batch.reduction}),
        lambda batch, reduction: Batch(batch[0][0], batch[1][0], batch[1][1]["boost"], batch[0][1], reduction),
    ),
}

# --------------------------------------------------------------------------------------------------------------- set-up

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda optimizer: None,
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 15),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 / (1 + epoch)),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, [2 * float(g["lr"]) for g in optimizer.param_groups], total_steps=80, cycle_momentum=False
    ),
}
# What happens between two calls, beside `flush`. The former make a step drop its graphs, or capture others.
STALE = ("load optimizer", "train or eval", "freeze or thaw")
EVENTS = (*STALE, "load model", "new rate")
RATES = ("float", "tensor", "tensor on the host")


@dataclass(frozen=True)
class Setup:
    """A whole training run. Printed, it shows all of itself; `draw(seed, device)` makes it again.

    Attributes:
        groups: param groups, the second with half the rate.
        rate: what `group["lr"]` is.
        average: whether an EMA of the model follows the optimizer.
        tree: how a batch is passed.
        aux: whether the loss comes with more outputs.
        generator: whether the loss draws from a CUDA generator of its own.
        script: letters are calls with a batch of that layout, "!" one whose gradients overflow; the rest is in EVENTS.
        by_hand: whether it is also compared with a loop written with torch.
    """

    seed: int
    device: str
    model: str
    optimizer: str
    groups: int
    rate: str
    scheduler: str
    policy: str
    max_norm: float | None
    accumulate: int
    warmup: int
    max_graphs: int
    verify: int
    average: bool
    tree: str
    aux: bool
    generator: bool
    layouts: tuple[Layout, ...]
    script: tuple[str, ...]
    by_hand: bool

    def __str__(self) -> str:
        lines = (f"    {field.name}={getattr(self, field.name)!r},\n" for field in fields(self))
        return f"Setup(\n{''.join(lines)})"

    @property
    def folds(self) -> bool:
        """Whether clipping happens in the optimizer's kernel, which rounds otherwise than torch's separate pass."""
        return self.max_norm not in (None, float("inf")) and self.optimizer in OPTIMIZERS

    @property
    def may_warn(self) -> bool:
        """Whether something happens that a step warns of: what a graph has frozen changes, or there are too few."""
        return self.max_graphs < 16 or any(event in self.script for event in STALE)

    def skipped(self) -> int:
        """Return how many windows end after an overflow."""
        skipped = micro = 0
        overflow = False
        for action in self.script:
            if is_call(action):
                micro, overflow = micro + 1, overflow or action.endswith("!")
            if micro and (action == "flush" or micro == self.accumulate):
                skipped += overflow
                micro, overflow = 0, False
        return skipped


def is_call(action: str) -> bool:
    return action[0].isupper()


def draw(seed: int, device: str) -> Setup:
    """Return the set-up of this seed. Each one holds a stretch of like calls that is long enough for a replay."""
    pick = random.Random(seed)
    on_cuda = device == "cuda"
    policy = pick.choice(("float32", "bfloat16", "float16"))
    accumulate, warmup = pick.randint(1, 4), pick.randint(1, 3)
    layouts = draw_layouts(pick)
    optimizer = pick.choice([name for name in OPTIMIZERS | UNFUSED if not (on_cuda and name == "adagrad")])
    script = draw_script(pick, len(layouts), accumulate, warmup, policy == "float16")
    # There alone a skipped step is one that is never called (torch has no capturable form on the CPU).
    calls_are_missing = policy == "float16" and not on_cuda and optimizer in UNFUSED
    if calls_are_missing:
        # After a first step that was not called torch warns of the scheduler, ...
        script = (*(action.rstrip("!") for action in script[: accumulate + 4]), *script[accumulate + 4 :])
    return Setup(
        seed=seed,
        device=device,
        model=pick.choice(DRAWN),
        optimizer=optimizer,
        groups=pick.randint(1, 2),
        rate=pick.choice(RATES[:1] if optimizer == "foreach adamw" else RATES),  # torch takes no tensor for it
        scheduler=pick.choice(list(SCHEDULERS)),
        policy=policy,
        max_norm=pick.choice((None, None, 0.05, 1.0, float("inf"))),
        accumulate=accumulate,
        warmup=warmup,
        max_graphs=pick.choice((16, 16, 16, 1, 2, 3)),
        # ... and where parameters have no state yet, an emulated replay may make it, which a graph cannot.
        verify=pick.choice((0, 0, 0, 2)) * (not calls_are_missing),
        average=pick.random() < 0.25,
        tree=pick.choice(list(TREES)),
        aux=pick.random() < 0.5,
        generator=on_cuda and pick.random() < 0.25,
        layouts=layouts,
        script=script,
        by_hand=policy != "float16" and pick.random() < 0.5,
    )


def draw_layouts(pick: random.Random) -> tuple[Layout, ...]:
    layouts: dict[Layout, None] = {}
    count = pick.randint(1, 3)
    while len(layouts) < count:
        sizes = pick.randint(2, 4), pick.randint(2, 4)
        layout = Layout(*sizes, pick.random() < 0.5, pick.choice(("mean", "sum")), pick.random() < 0.25)
        layouts[layout] = None
    return tuple(layouts)


def draw_script(pick: random.Random, layouts: int, accumulate: int, warmup: int, overflows: bool) -> tuple[str, ...]:
    def call() -> str:
        letter = "A" if pick.random() < 0.5 else "ABC"[pick.randrange(layouts)]
        return letter + "!" * (overflows and pick.random() < 0.12)

    # Whatever came before, each place in the window comes often enough here to be warm and replayed.
    steady = ["A" + "!" * (overflows and pick.random() < 0.12) for _ in range((max(warmup, 2) + 2) * accumulate)]
    around = [call() for _ in range(max(6, pick.randint(14, 22) - len(steady)))]
    for event in (pick.choice(EVENTS) for _ in range(pick.choice((0, 0, 1, 2)))):
        around.insert(pick.randint(1, len(around)), event)
    for _ in range(pick.choice((0, 1, 2)) if accumulate > 1 else 0):
        around.insert(pick.randint(1, len(around)), "flush")
    at = pick.randint(0, len(around))
    return (*around[:at], *steady, *around[at:])


# ------------------------------------------------------------------------------------------------------------- training


class Training:
    """What a set-up trains, and what may happen to it between calls. The subclasses say what a call does."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        torch.manual_seed(setup.seed)
        self.model: nn.Module = MODELS[setup.model]().to(setup.device)
        self.optimizer = self._make_optimizer()
        self.scheduler = SCHEDULERS[setup.scheduler](self.optimizer)
        self.averaged = (
            AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=setup.seed % 2 == 0)
            if setup.average
            else None
        )
        self.scaler = ampkit.GradScaler(
            setup.device, init_scale=16.0, growth_interval=3, enabled=setup.policy == "float16"
        )
        self.generator = torch.Generator(setup.device).manual_seed(setup.seed) if setup.generator else None
        self._made = torch.Generator().manual_seed(setup.seed)

    def do(self, action: str) -> dict[str, Any] | None:
        """Do what a word of the script says; return the outputs if it is a call."""
        if is_call(action):
            layout = self.setup.layouts["ABC".index(action[0])]
            boost = float("inf") if action.endswith("!") else 1.0
            return self._call(make_batch(self.setup.model, layout, boost, self._made, self.setup.device))
        if action == "flush":
            self._flush()
        elif action == "load optimizer":
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        elif action == "train or eval":
            self.model.train(not self.model.training)
        elif action == "freeze or thaw":
            param = next(self.model.parameters())
            param.requires_grad_(not param.requires_grad)
        elif action == "load model":
            state = self.model.state_dict().items()
            self.model.load_state_dict(
                {name: 0.9 * value if value.is_floating_point() else value for name, value in state}
            )
        else:
            assert action == "new rate"
            self._halve_rates()
        return None

    def state(self) -> dict[str, Any]:
        """Return everything that the run changes, by name, on the host."""
        state = training_state(self.model, self.optimizer, self.scaler)
        if self.averaged is not None:
            state |= {f"average: {name}": bits(tensor) for name, tensor in self.averaged.state_dict().items()}
        if self.generator is not None:
            state["generator"] = bits(self.generator.get_state())
        if self.scheduler is not None:
            state["epoch"] = self.scheduler.last_epoch
        # On the CPU, bits are a view of the tensor itself.
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}

    def loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss, and the other outputs if the set-up has any."""
        batch = TREES[self.setup.tree][1](*args, **kwargs)
        logits = model(batch.x, batch.branch)
        if self.generator is not None:
            logits = logits + 0.1 * torch.rand(logits.shape, generator=self.generator, device=logits.device)
        loss = F.cross_entropy(logits, batch.y, reduction=batch.reduction) * batch.boost
        if not self.setup.aux:
            return loss
        return loss, {"correct": (logits.argmax(1) == batch.y).sum(), "more": [logits, None]}

    def _call(self, batch: Batch) -> dict[str, Any]:
        raise NotImplementedError

    def _flush(self) -> None:
        raise NotImplementedError

    def _make_optimizer(self) -> torch.optim.Optimizer:
        setup, params = self.setup, list(self.model.parameters())
        parts = [params[0::2], params[1::2]] if setup.groups == 2 else [params]
        optimizer = (OPTIMIZERS | UNFUSED)[setup.optimizer]([{"params": part} for part in parts])
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = self._rate(group["lr"] / (i + 1))
        return optimizer

    def _rate(self, value: float) -> float | Tensor:
        if self.setup.rate == "float":
            return value
        return torch.tensor(value, device=self.setup.device if self.setup.rate == "tensor" else "cpu")

    def _halve_rates(self) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(0.5)
            else:
                group["lr"] *= 0.5


class StepTraining(Training):
    """Trained by `ampkit.graphed_step`."""

    on_failure = "raise"

    def __init__(self, setup: Setup, graph: str, **options: Any) -> None:
        super().__init__(setup)
        self.step = ampkit.graphed_step(
            self.loss,
            self.model,
            self.optimizer,
            policy=setup.policy,
            scaler=self.scaler,
            max_norm=setup.max_norm,
            accumulate=setup.accumulate,
            scheduler=self.scheduler,
            warmup=setup.warmup,
            after_step=None if self.averaged is None else self.averaged.update_parameters,
            verify=setup.verify,
            on_failure=self.on_failure,
            graph=graph,
            generators=() if self.generator is None else (self.generator,),
            max_graphs=setup.max_graphs,
            **options,
        )

    def _call(self, batch: Batch) -> dict[str, Any]:
        args, kwargs = TREES[self.setup.tree][0](batch)
        return self.step(*args, **kwargs)._asdict()

    def _flush(self) -> None:
        self.step.flush()


class HandTraining(Training):
    """Trained by the loop that one writes with torch alone."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._micro = 0
        self._capturable()

    def load(self, other: Training) -> None:
        """Take over parameters, buffers, moments and average, where rounding has led apart."""
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        self._capturable()
        if self.averaged is not None and other.averaged is not None:
            self.averaged.load_state_dict(other.averaged.state_dict())

    def _capturable(self) -> None:
        # The form of an optimizer's formulas that a graph can hold, which is also the one that a step runs eagerly.
        for group in self.optimizer.param_groups:
            if "capturable" in group and self.setup.device == "cuda":
                group["capturable"] = True

    def _call(self, batch: Batch) -> dict[str, Any]:
        args, kwargs = TREES[self.setup.tree][0](batch)
        with torch.autocast(self.setup.device, torch.bfloat16, enabled=self.setup.policy == "bfloat16"):
            returned = self.loss(self.model, *args, **kwargs)
        loss, aux = returned if self.setup.aux else (returned, None)
        (loss / self.setup.accumulate).backward()
        self._micro += 1
        norm = self._finish() if self._micro == self.setup.accumulate else None
        if aux is not None:
            aux["more"][0] = aux["more"][0].detach().float()
        skipped = torch.tensor(False, device=self.setup.device)
        stepped = self._micro == 0
        return {"loss": loss.detach().float(), "aux": aux, "grad_norm": norm, "skipped": skipped, "stepped": stepped}

    def _flush(self) -> None:
        if self._micro:
            self._finish()

    def _finish(self) -> Tensor | None:
        stepped = {param for group in self.optimizer.param_groups for param in group["params"]}
        params = [param for param in self.model.parameters() if param in stepped]
        norm = None
        if self.setup.max_norm is not None:
            norm = nn.utils.clip_grad_norm_(params, self.setup.max_norm)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            # A graph needs a float32 tensor. On the CPU it is a number; formulas with a float32 tensor round otherwise.
            group["lr"] = torch.tensor(float(rate), device="cuda") if self.setup.device == "cuda" else float(rate)
        if isinstance(self.optimizer, torch.optim.SGD):
            # torch 2.11's kernel raises where some parameters have momentum and one has its first gradient.
            for param in (param for param in params if param.grad is not None):
                self.optimizer.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        if self.averaged is not None:
            self.averaged.update_parameters(self.model)
        self._micro = 0
        return norm


# --------------------------------------------------------------------------------------------------------------- counts

AXES = ("model", "optimizer", "policy", "max_norm", "accumulate", "scheduler", "rate", "groups", "tree", "warmup",
        "max_graphs", "verify", "average", "generator")  # fmt: skip
totals: dict[str, Counter[str]] = defaultdict(Counter)  # by device
values: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))


def count(setup: Setup, report: ampkit.Report) -> None:
    """Add a run to the summary."""
    totals[setup.device].update(
        {
            "set-ups": 1,
            "calls": sum(map(is_call, setup.script)),
            "replays": report.replays,
            "captures": report.captures,
            "evictions": report.evictions,
            "skipped steps": report.skipped,
            "flushes": setup.script.count("flush"),
        }
    )
    for axis, value in axis_values(setup):
        values[setup.device][axis][value] += 1


def marks_of(seed: int, seeds: Sequence[int], quick: Collection[int]) -> list[pytest.MarkDecorator]:
    """Return the marks of a seed: slow if it is not quick, and seeds if it is behind the first sixteenth of those."""
    if seed in quick:
        return []
    slow = [other for other in seeds if other not in quick]
    return [pytest.mark.slow, *([pytest.mark.seeds] if slow.index(seed) >= len(slow) // 16 else [])]


def seed_params(seeds: Mapping[str, Sequence[int]], quick: Mapping[str, Collection[int]]) -> list[Any]:
    """Return a parameter (seed, device) for each seed of each device, with the marks it needs.

    Args:
        seeds: by device.
        quick: those that are not slow, by device.
    """
    return [
        pytest.param(
            seed,
            device,
            id=f"{device}-seed{seed}",
            marks=[
                *([pytest.mark.cuda] if device == "cuda" else []),
                *marks_of(seed, of_device, quick[device]),
            ],
        )
        for device, of_device in seeds.items()
        for seed in of_device
    ]


def axis_values(setup: Setup) -> Iterator[tuple[str, str]]:
    """Yield what a set-up has of each axis."""
    for axis in AXES:
        yield axis, str(getattr(setup, axis))
    yield "layouts", str(len(setup.layouts))
    for event in ("flush", *EVENTS):
        if event in setup.script:
            yield "events", event


def summary() -> Iterator[str]:
    """Yield what was run and found, a paragraph a device."""
    for device, counter in totals.items():
        counts = [f"{number} {name}" for name, number in counter.items() if name != "differences"]
        yield f"{device}: {', '.join(counts)}; {counter['differences']} differences"
        for axis, found in values[device].items():
            yield f"  {axis}: {', '.join(f'{value} x{number}' for value, number in sorted(found.items()))}"
