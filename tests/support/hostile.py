"""Random set-ups that try to make a graph compute something else than eager: settings that change between calls, two
streams, host state that varies, undeclared state, the user's own optimizers that overflow.

    python tests/support/hostile.py --count 200 --seed 0          on a GPU
    python tests/support/hostile.py --only host --count 40 --show  set-ups of one hazard, each printed with its verdict
    python tests/support/hostile.py --graph tape --count 160      without a GPU: a replay repeats operations: tape.py

Each set-up is compared with a loop that has nothing of ampkit in it, bit by bit, after every call. What must hold is
"equal to eager, or refused or eager with a message": the one thing that must never happen is a silent difference.
"""

import argparse
import json
import os
import random
import secrets
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import bits
from tape import taped
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

CLASSES = 5
RATE = 2.0**-5  # the same in float32 and float64
BATCH = 4
SLEEP = 3_000_000  # cycles of the GPU, over a millisecond: time enough for another stream to get in between

# ------------------------------------------------------------------------------------------------------------- settings


def _flag(owner: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(owner, name, value)


def _sdpa(kind: str) -> tuple[Callable[[], Any], Callable[[Any], None], Any]:
    read = {"mem_efficient": "mem_efficient_sdp_enabled"}.get(kind, f"{kind}_sdp_enabled")
    return getattr(torch.backends.cuda, read), getattr(torch.backends.cuda, f"enable_{kind}_sdp"), False


_cudnn, _matmul = torch.backends.cudnn, torch.backends.cuda.matmul
# What reads a setting, what sets it, and what it is changed to.
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], None], Any]] = {
    "cuda.matmul.fp32_precision": (lambda: _matmul.fp32_precision, _flag(_matmul, "fp32_precision"), "tf32"),
    "cudnn.conv.fp32_precision": (lambda: _cudnn.conv.fp32_precision, _flag(_cudnn.conv, "fp32_precision"), "ieee"),
    "cudnn.rnn.fp32_precision": (lambda: _cudnn.rnn.fp32_precision, _flag(_cudnn.rnn, "fp32_precision"), "ieee"),
    "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "matmul.allow_tf32": (lambda: _matmul.allow_tf32, _flag(_matmul, "allow_tf32"), True),
    "reduced bfloat16 sums": (
        lambda: _matmul.allow_bf16_reduced_precision_reduction,
        _flag(_matmul, "allow_bf16_reduced_precision_reduction"),
        False,
    ),
    "reduced float16 sums": (
        lambda: _matmul.allow_fp16_reduced_precision_reduction,
        _flag(_matmul, "allow_fp16_reduced_precision_reduction"),
        False,
    ),
    "BLAS library": (
        torch.backends.cuda.preferred_blas_library,
        lambda value: torch.backends.cuda.preferred_blas_library(value),
        "cublaslt",
    ),
    "linalg library": (
        torch.backends.cuda.preferred_linalg_library,
        lambda value: torch.backends.cuda.preferred_linalg_library(value),
        "cusolver",
    ),
    "cudnn.enabled": (lambda: _cudnn.enabled, _flag(_cudnn, "enabled"), False),
    "cudnn.benchmark": (lambda: _cudnn.benchmark, _flag(_cudnn, "benchmark"), True),
    "cudnn.deterministic": (lambda: _cudnn.deterministic, _flag(_cudnn, "deterministic"), False),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        lambda value: torch.use_deterministic_algorithms(value),
        True,
    ),
    "flash attention": _sdpa("flash"),
    "efficient attention": _sdpa("mem_efficient"),
    "cudnn attention": _sdpa("cudnn"),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
}
# Torch refuses to mix its old and its new names of these.
EXCLUSIVE = ("cuda.matmul.fp32_precision", "float32_matmul_precision", "matmul.allow_tf32")


class Settings:
    """Settings that a script toggles. A context manager: leaving it puts all of them back."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}
        self._changed: set[str] = set()

    def toggle(self, name: str) -> None:
        """Change a setting, or change it back."""
        read, write, other = SETTINGS[name]
        if name not in self._before:
            self._before[name] = read()
        write(self._before[name] if name in self._changed else other)
        self._changed ^= {name}

    def __enter__(self) -> "Settings":
        self._precision, self._deterministic = _matmul.fp32_precision, _cudnn.deterministic
        self._precision_on_the_cpu = torch.backends.mkldnn.matmul.fp32_precision
        _cudnn.deterministic = True  # or eager runs would not be equal among themselves
        return self

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            SETTINGS[name][1](value)
        _matmul.fp32_precision = self._precision  # the old names set it too
        torch.backends.mkldnn.matmul.fp32_precision = self._precision_on_the_cpu
        _cudnn.deterministic = self._deterministic


# ----------------------------------------------------------------------------------------------------------- host state


class Host:
    """Something on the host that is different in every call, as a function of its own past alone."""

    def __init__(self, seed: int) -> None:
        self.count = 0
        self.numpy = np.random.default_rng(seed)
        self.random = random.Random(seed)

    def counter(self) -> float:
        self.count += 1
        return float(self.count)

    def numpy_generator(self) -> float:
        return float(self.numpy.random())

    def python_generator(self) -> float:
        return self.random.random()

    def clock(self) -> float:
        return time.time() % 1000.0

    def secret(self) -> float:
        return secrets.randbits(20) / 2**20  # exact in float32, and hardly ever the same twice


HOSTS: dict[str, Callable[[Host], float]] = {
    "counter": Host.counter,
    "numpy generator": Host.numpy_generator,
    "python generator": Host.python_generator,
    "clock": Host.clock,
    "secret": Host.secret,
}
UNREPEATABLE = ("clock", "secret")  # two runs differ by right: such a set-up is judged by what it says alone


def _scalar(logits: Tensor, value: float) -> Tensor:
    return logits * (1.0 + 0.01 * value)


def _filled(logits: Tensor, value: float) -> Tensor:
    return logits + torch.full((), value, device=logits.device, dtype=logits.dtype)


def _operations(logits: Tensor, value: float) -> Tensor:
    for _ in range(int(value) % 7):  # another number of operations in every call
        logits = logits + 0.125
    return logits


def _dropped(logits: Tensor, value: float) -> Tensor:
    torch.manual_seed(17)  # in eager the same mask in every call
    return F.dropout(logits, 0.5)


USES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "scalar": _scalar,
    "filled": _filled,
    "operations": _operations,
    "manual_seed": _dropped,
}

# ----------------------------------------------------------------------------------------------------------- optimizers


class AveragingSGD(torch.optim.SGD):
    """Keeps a running mean of each parameter in its state, and pulls the parameter towards it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        with torch.no_grad():
            for param in _with_gradient(self):
                state = self.state[param]
                if "mean" not in state:
                    state["mean"] = param.clone()
                param.lerp_(state["mean"].lerp_(param, 0.5), 0.125)


class SmoothingSGD(torch.optim.SGD):
    """Steps on a running mean of gradients that it keeps in a table of its own."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.smooth: dict[Any, Tensor] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in _with_gradient(self):
            smooth = self.smooth.setdefault(param, torch.zeros_like(param))
            param.grad.copy_(smooth.lerp_(param.grad, 0.5))
        super().step(closure)


class TallyingAdamW(torch.optim.AdamW):
    """Counts its steps in a tensor of its own, outside of its state, and shrinks weights by it."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.steps = torch.zeros((), device=self.param_groups[0]["params"][0].device)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.steps += 1
            for param in _with_gradient(self):
                param.mul_(1 - 2.0**-6 / (1 + self.steps))
        super().step(closure)


def _with_gradient(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    params = (param for group in optimizer.param_groups for param in group["params"])
    return (param for param in params if param.grad is not None)


class LookaheadSGD(torch.optim.SGD):
    """Goes back half of the way every third step, by a counter on the host."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.count = 0
        self.slow = [param.detach().clone() for group in self.param_groups for param in group["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.count += 1
        if self.count % 3 == 0:
            with torch.no_grad():
                params = (param for group in self.param_groups for param in group["params"])
                for param, slow in zip(params, self.slow, strict=True):
                    slow.lerp_(param, 0.5)
                    param.copy_(slow)


class AnnealingAdamW(torch.optim.AdamW):
    """Shrinks weights by a number of the host that falls from step to step."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        with torch.no_grad():
            for param in _with_gradient(self):
                param.mul_(1 - 2.0**-6 / self.count)
        super().step(closure)


def _sgd(kind: type, fused: bool = True) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: kind(params, lr=RATE, momentum=0.9, fused=fused)


def _adamw(kind: type, **kwargs: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: kind(params, lr=RATE, **{"fused": True, **kwargs})


PLAIN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": _sgd(torch.optim.SGD),
    "adamw": _adamw(torch.optim.AdamW),
    "adam": _adamw(torch.optim.Adam, amsgrad=True),
}
SUBCLASSES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "averaging sgd": _sgd(AveragingSGD),
    "tallying adamw": _adamw(TallyingAdamW),
    "smoothing sgd, not fused": _sgd(SmoothingSGD, fused=False),
    "averaging sgd, not fused": _sgd(AveragingSGD, fused=False),
    "tallying adamw, not fused": _adamw(TallyingAdamW, fused=False),
    "lookahead sgd": _sgd(LookaheadSGD),
    "annealing adamw": _adamw(AnnealingAdamW),
}
COUNTING = ("lookahead sgd", "annealing adamw")  # by state of the host, which a graph freezes
ON_CUDA = ("tallying adamw, not fused",)  # on the CPU its step count is read on the host, by torch
OPTIMIZERS = PLAIN | SUBCLASSES

# --------------------------------------------------------------------------------------------------------------- set-up

HAZARDS = ("settings", "modes", "streams", "host", "undeclared", "optimizer")
MODES = ("grad", "no_grad", "inference")
UNDECLARED = ("buffer", "rebound buffer", "optimizer", "closure")


@dataclass(frozen=True)
class Setup:
    """A whole run. Printed, it shows all of itself; `draw(seed, device)` makes it again.

    Attributes:
        hazard: what tries to make the graph differ, one of HAZARDS.
        api: "step" is `graphed_step`, "train" is `graphed` around a training step, "read" around an evaluation.
        settings: those that the script changes.
        host: of HOSTS, or "".
        use: of USES: what is done with the number of the host.
        undeclared: what "train" changes and does not declare: one of UNDECLARED, or "".
        script: "call", "call overflow", "call no_grad", "call inference", "call 1" (on the second stream),
            "toggle NAME" and "halve rate".
    """

    seed: int
    device: str
    hazard: str
    api: str
    optimizer: str
    policy: str
    warmup: int
    settings: tuple[str, ...]
    host: str
    use: str
    undeclared: str
    script: tuple[str, ...]

    @property
    def overflows(self) -> bool:
        return "call overflow" in self.script

    @property
    def may_differ_if_said(self) -> bool:
        """Whether a message excuses a difference: a capture that is refused has called the user's code once more."""
        return bool(self.host) or self.optimizer in COUNTING


def draw(seed: int, device: str, hazards: Sequence[str] = HAZARDS) -> Setup:
    """Return the set-up of this seed, with one of these hazards."""
    pick = random.Random(f"hostile {seed}")
    hazard = pick.choice([name for name in hazards if device == "cuda" or name != "streams"])
    warmup = pick.randint(1, 3)
    api = {"modes": "read", "streams": "read", "undeclared": "train", "optimizer": pick.choice(("step", "train"))}.get(
        hazard, pick.choice(("step", "train", "read"))
    )
    policy = pick.choice(("float32", "bfloat16", "float16"))
    settings = draw_settings(pick) if hazard == "settings" else ()
    host, use = draw_host(pick, device) if hazard == "host" else ("", "")
    undeclared = pick.choice(UNDECLARED) if hazard == "undeclared" else ""
    kinds = SUBCLASSES if hazard == "optimizer" else PLAIN
    return Setup(
        seed=seed,
        device=device,
        hazard=hazard,
        api=api,
        optimizer=pick.choice([name for name in kinds if device == "cuda" or name not in ON_CUDA]),
        policy="float16" if hazard == "optimizer" and pick.random() < 0.75 else policy,
        warmup=warmup,
        settings=settings,
        host=host,
        use=use,
        undeclared=undeclared,
        script=draw_script(pick, hazard, warmup, settings),
    )


def draw_settings(pick: random.Random) -> tuple[str, ...]:
    """Return one or two settings that torch lets one change together."""
    while True:
        names = tuple(pick.sample(list(SETTINGS), pick.randint(1, 2)))
        if sum(name in EXCLUSIVE for name in names) < 2:
            return names


def draw_host(pick: random.Random, device: str) -> tuple[str, str]:
    """Return a source of numbers and a use for them, such that every call differs from the one before."""
    if pick.random() < 0.15:
        return "counter", "manual_seed"
    hosts = [name for name in HOSTS if device == "cuda" or name not in UNREPEATABLE]
    host = pick.choice(hosts)
    return host, pick.choice(("scalar", "filled", "operations") if host == "counter" else ("scalar", "filled"))


def draw_script(pick: random.Random, hazard: str, warmup: int, settings: tuple[str, ...]) -> tuple[str, ...]:
    """Return calls, enough of them to be replayed before and after whatever changes."""
    stretch = ["call"] * (warmup + 2)
    if hazard == "settings":
        script = list(stretch)
        for name in settings:
            script += [f"toggle {name}", *stretch, f"toggle {name}", "call", "call"]
        return tuple(script)
    if hazard == "modes":
        modes = [pick.choice(("call", "call no_grad", "call inference")) for _ in range(8)]
        return (*stretch, "call no_grad", "call inference", *["call inference"] * (warmup + 2), *modes, *stretch)
    if hazard == "streams":
        return (*stretch, *(pick.choice(("call", "call 1")) for _ in range(4)), *["call", "call 1"] * 5)
    script = [*stretch, *["call"] * 5]
    if hazard == "optimizer":
        for _ in range(2):
            script[pick.randrange(len(script))] = "call overflow"
    if hazard in ("undeclared", "optimizer"):
        script[warmup + 4 : warmup + 4] = ["halve rate"]
    return tuple(script)


# ------------------------------------------------------------------------------------------------------------ the model


class Probe(nn.Module):
    """Convolution, recurrence, attention, matrices and a tensor of the default dtype: every setting changes a bit.

    Attention and recurrence see no gradient: their backward passes are not repeatable with every setting.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.lift = nn.Linear(8, 64)
        self.recurrent = nn.GRU(64, 64, batch_first=True).requires_grad_(False)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(64, CLASSES)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        hidden = self.lift(F.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2))
        with torch.no_grad():
            heads = hidden.unflatten(2, (2, 32)).transpose(1, 2)
            attended = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
            remembered, _ = self.recurrent(hidden)
        logits = self.head(self.dropout((hidden + attended + remembered).mean(1)))
        return logits * torch.linspace(0.5, 1.5, CLASSES, device=x.device)


class Stranger(nn.Module):
    """A module that nobody declares: it changes its buffer in every call, or makes it anew."""

    def __init__(self, rebinds: bool) -> None:
        super().__init__()
        self.rebinds = rebinds
        self.register_buffer("factor", torch.ones(()))

    def forward(self, loss: Tensor) -> Tensor:
        with torch.no_grad():
            if self.rebinds:
                self.factor = self.factor * 1.0625
            else:
                self.factor.mul_(1.0625)
        return loss * self.factor.clone()


class Batch(NamedTuple):
    """Images, labels and a factor of the loss, which makes it overflow."""

    x: Tensor
    y: Tensor
    boost: Tensor


# ------------------------------------------------------------------------------------------------------------- the runs


class Run:
    """A set-up as one runs it with torch alone: the reference, and what `Graphed` puts graphs under."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        torch.manual_seed(setup.seed)
        self.model = Probe().to(setup.device)
        self.stranger = Stranger(rebinds=setup.undeclared == "rebound buffer").to(setup.device)
        if setup.api == "read":
            self.model.dropout.p = 0.0 if setup.hazard == "streams" else 0.2
        params = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = OPTIMIZERS[setup.optimizer](params)
        self.scaler = self.make_scaler()
        self.host = Host(setup.seed)
        self.streams = [None, torch.cuda.Stream()] if setup.device == "cuda" else [None, None]
        self.made = torch.Generator().manual_seed(setup.seed)
        self.closure = torch.ones((), device=setup.device)
        self.after: list[Callable[[], None]] = []

    def make_scaler(self) -> Any:
        enabled = self.setup.policy == "float16" and self.setup.api != "read"
        return torch.amp.GradScaler(self.setup.device, init_scale=16.0, growth_interval=3, enabled=enabled)

    def batch(self, overflow: bool) -> Batch:
        x = torch.randn(BATCH, 2, 8, 8, generator=self.made, dtype=torch.float32)
        y = torch.randint(CLASSES, (BATCH,), generator=self.made)
        boost = torch.tensor(float("inf") if overflow else 1.0, dtype=torch.float32)
        return Batch(*(tensor.to(self.setup.device) for tensor in (x, y, boost)))

    def autocast(self) -> AbstractContextManager[Any]:
        dtype = getattr(torch, self.setup.policy)
        return torch.autocast(self.setup.device, dtype) if dtype is not torch.float32 else nullcontext()

    def loss(self, model: nn.Module, x: Tensor, y: Tensor, boost: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss and logits, with whatever the set-up does on the host."""
        logits = self.on_host(model(x))
        return F.cross_entropy(logits, y) * boost, logits

    def on_host(self, logits: Tensor) -> Tensor:
        return USES[self.setup.use](logits, HOSTS[self.setup.host](self.host)) if self.setup.host else logits

    def read(self, x: Tensor, y: Tensor, boost: Tensor) -> list[Tensor]:
        """Evaluate; where gradients are on, return some too."""
        if self.setup.hazard == "streams":
            return self.read_slowly(x)
        with self.autocast():
            logits = self.on_host(self.model(x))
            loss = F.cross_entropy(logits, y)
        if not loss.requires_grad:
            return [logits, loss]
        (gradient,) = torch.autograd.grad(loss, self.model.head.weight)
        return [logits.detach(), loss.detach(), gradient]

    def read_slowly(self, x: Tensor) -> list[Tensor]:
        """Read parameters alone, and leave time for another stream before the input is read and after."""
        torch.cuda._sleep(SLEEP)
        hidden = self.model.lift(x.flatten(2).transpose(1, 2).repeat(1, 1, 4))
        torch.cuda._sleep(SLEEP)
        return [self.model.head(F.relu(hidden)).detach()]

    def train(self, x: Tensor, y: Tensor, boost: Tensor) -> list[Tensor]:
        """Do one step, all of it."""
        self.optimizer.zero_grad()
        with self.autocast():
            loss, logits = self.loss(self.model, x, y, boost)
            if "buffer" in self.setup.undeclared:
                loss = self.stranger(loss)
            elif self.setup.undeclared == "closure":
                self.closure = self.closure * 1.0625
                loss = loss * self.closure
        self.scaler.scale(loss).backward()
        self.update()
        return [loss.detach(), logits.detach()]

    def step(self, x: Tensor, y: Tensor, boost: Tensor) -> list[Tensor]:
        """Do what graphed_step does: its outputs are in float32, and gradients are gone in the end."""
        with self.autocast():
            loss, logits = self.loss(self.model, x, y, boost)
        self.scaler.scale(loss).backward()
        self.update()
        self.optimizer.zero_grad()
        return [loss.detach().float(), logits.detach().float()]

    def update(self) -> None:
        """Step where all gradients are finite. Torch's scaler calls a fused optimizer all the same, and its kernel
        skips; what a subclass does around the kernel would not be skipped."""
        finite = all(bool(param.grad.isfinite().all()) for param in _with_gradient(self.optimizer))
        if finite or not self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
        else:
            self.scaler.unscale_(self.optimizer)  # finds the inf, for `update`
        self.scaler.update()

    def function(self) -> Callable[..., list[Tensor]]:
        """Return what a call calls."""
        plain = {"read": self.read, "train": self.train, "step": self.step}[self.setup.api]

        def with_rates(*args: Tensor) -> list[Tensor]:
            with self.rates_on_device():
                return plain(*args)

        return with_rates if self.setup.device == "cuda" else plain

    @contextmanager
    def rates_on_device(self) -> Iterator[None]:
        """Let the learning rate be the float32 tensor that a graph needs, as long as the call takes."""
        groups = self.optimizer.param_groups
        given = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device="cuda")
            if "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, rate in zip(groups, given, strict=True):
                group["lr"] = rate

    def play(self) -> Iterator[dict[str, Any]]:
        """Do the script; yield the state after each word, but for calls on streams, which are not waited for."""
        call = self.function()
        batches = [self.batch(word == "call overflow") for word in self.setup.script if word.startswith("call")]
        if self.setup.device == "cuda":
            torch.cuda.synchronize()  # on whichever stream a batch is used
        torch.manual_seed(self.setup.seed)
        waiting: list[list[Tensor]] = []
        with Settings() as settings:
            for word in self.setup.script:
                outputs: list[Tensor] | None = None
                if word.startswith("toggle "):
                    settings.toggle(word.removeprefix("toggle "))
                elif word == "halve rate":
                    for group in self.optimizer.param_groups:
                        group["lr"] *= 0.5
                else:
                    outputs = self.called(call, word, batches[len(waiting)])
                    waiting.append(outputs)
                if self.setup.hazard != "streams":
                    yield self.state(outputs)
            if self.setup.hazard == "streams":
                torch.cuda.synchronize()
                yield {f"outputs of call {i}": bits(outputs[0]) for i, outputs in enumerate(waiting)}

    def called(self, call: Callable[..., list[Tensor]], word: str, batch: Batch) -> list[Tensor]:
        modes = {"call no_grad": torch.no_grad, "call inference": torch.inference_mode}
        with torch.cuda.stream(self.streams[word == "call 1"]), modes.get(word, nullcontext)():
            return call(*batch)

    def state(self, outputs: list[Tensor] | None) -> dict[str, Any]:
        """Return everything that a word may change, by name, on the host."""
        named = {f"output {i}": tensor for i, tensor in enumerate(outputs or [])}
        named |= dict(self.model.state_dict())
        named |= dict(state_of(self.optimizer))
        named["undeclared buffer"] = self.stranger.factor
        named["cpu random state"] = torch.get_rng_state()
        if self.setup.device == "cuda":
            named["cuda random state"] = torch.cuda.get_rng_state()
        state: dict[str, Any] = {name: bits(tensor).clone() for name, tensor in named.items()}
        state["rates"] = [float(group["lr"]) for group in self.optimizer.param_groups]
        state["scale"] = self.scaler.get_scale()
        return state


def state_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield moments and whatever a subclass keeps, by name. Zeros count as nothing: a step may make them early."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for i, param in enumerate(params):
        for key, value in optimizer.state.get(param, {}).items():
            if torch.as_tensor(value).any():
                yield f"{key} of parameter {i}", torch.as_tensor(value)
    for name in ("steps", "slow", "smooth"):
        held = getattr(optimizer, name, ())
        values = [held] if isinstance(held, Tensor) else held.values() if isinstance(held, dict) else held
        yield from ((f"{name} {i}", value) for i, value in enumerate(values) if value.any())


class Graphed(Run):
    """The same set-up under ampkit."""

    host_writes = "name"

    def __init__(self, setup: Setup, graph: str) -> None:
        self.graph = graph
        super().__init__(setup)
        self.captured: Any = None

    def make_scaler(self) -> Any:
        enabled = self.setup.policy == "float16" and self.setup.api != "read"
        return ampkit.GradScaler(self.setup.device, init_scale=16.0, growth_interval=3, enabled=enabled)

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def function(self) -> Callable[..., list[Tensor]]:
        options: dict[str, Any] = {"warmup": self.setup.warmup, "graph": self.graph, "host_writes": self.host_writes}
        if self.setup.api == "step":
            policy, scaler = self.setup.policy, self.scaler
            self.captured = ampkit.graphed_step(
                self.loss, self.model, self.optimizer, policy=policy, scaler=scaler, **options
            )
            return self.one_step
        declared = () if self.setup.api == "read" or self.setup.undeclared == "optimizer" else (self.optimizer,)
        plain = self.read if self.setup.api == "read" else self.train
        scaler = self.scaler if self.scaler.is_enabled() else None
        self.captured = ampkit.graphed(modules=(self.model,), optimizers=declared, scaler=scaler, **options)(plain)
        captured: Callable[..., list[Tensor]] = self.captured
        return captured

    def one_step(self, x: Tensor, y: Tensor, boost: Tensor) -> list[Tensor]:
        out = self.captured(x, y, boost)
        return [out.loss, out.aux]


# -------------------------------------------------------------------------------------------------------------- verdict

BITWISE, EAGER, SILENT = "captured and bitwise", "eager with a message", "silent"
WRONG = "different in spite of a message"  # where calls are eager, or refused, nothing excuses a difference
RAISED = "an error where torch has none"
COLD, UNSTABLE = "eager, still warming up", "not repeatable in eager"
BARRED = "refused by torch alone"
TOLERATED = (BITWISE, EAGER, COLD, UNSTABLE, BARRED)


class Verdict(NamedTuple):
    """What came of a set-up.

    Attributes:
        kind: one of the words above.
        word: after which word of the script it first differs, as "7: call"; "" if nowhere.
        what: what differs there first, or what was said.
        replays: how many calls were a replay.
    """

    kind: str
    word: str
    what: str
    replays: int


def first_difference(left: dict[str, Any], right: dict[str, Any]) -> str:
    """Return the name of the first entry that differs, or ""."""
    for name in [*left, *(right.keys() - left.keys())]:
        a, b = left.get(name), right.get(name)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if not torch.equal(a, b):
                return name
        elif a != b:
            return name
    return ""


def judge(setup: Setup, graph: str) -> Verdict:
    """Run a set-up by hand and under ampkit, and compare them after each word."""
    try:
        expected = list(Run(setup).play())
    except RuntimeError as error:
        return Verdict(BARRED if "deterministic" in str(error) else RAISED, "", f"by hand: {_first_line(error)}", 0)
    graphed = Graphed(setup, "emulate" if graph == "tape" else graph)
    try:
        with taped() if graph == "tape" else nullcontext():
            where, what, said, refused = compare(graphed, expected, setup)
    except Exception as error:
        return Verdict(RAISED, "", _first_line(error), 0)
    finally:
        if graphed.captured is not None:
            graphed.captured.close()
    replays = 0 if graphed.captured is None else graphed.captured.replays
    if setup.host in UNREPEATABLE:
        kind = EAGER if said else (SILENT if replays else COLD)
        return Verdict(kind, "", said or f"{replays} replays", replays)
    if not where:
        if refused or (said and not replays):
            return Verdict(EAGER, "", said, replays)
        return Verdict(BITWISE if replays else COLD, "", said, replays)
    if differs(expected, list(Run(setup).play())):
        return Verdict(UNSTABLE, where, what, replays)
    if not said:
        return Verdict(SILENT, where, what, replays)
    return Verdict(EAGER if setup.may_differ_if_said else WRONG, where, f"{what}; said: {said}", replays)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def differs(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> bool:
    return len(left) != len(right) or any(first_difference(a, b) for a, b in zip(left, right, strict=True))


def compare(graphed: Run, expected: list[dict[str, Any]], setup: Setup) -> tuple[str, str, str, bool]:
    """Return where and in what the run first differs, what was said until then, and whether a call was refused."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=ampkit.AmpkitWarning)

        def said() -> str:
            texts = [str(w.message) for w in caught if issubclass(w.category, ampkit.AmpkitWarning)]
            return " | ".join(dict.fromkeys(texts))

        words = setup.script if setup.hazard != "streams" else ("all calls",)
        played = graphed.play()
        try:
            for i, (word, state) in enumerate(zip(words, expected, strict=True)):
                what = first_difference(state, next(played))
                if what and setup.host not in UNREPEATABLE:
                    return f"{i}: {word}", what, said(), False
        except (ampkit.AmpkitError, ValueError, NotImplementedError) as error:
            if not isinstance(error, ampkit.AmpkitError) and "graphed" not in str(error):
                raise
            return "", "", f"{type(error).__name__}: {error}", True
        finally:
            played.close()  # type: ignore[attr-defined]  # a generator: its settings are put back
        return "", "", said(), False


# -------------------------------------------------------------------------------------------------------------- summary

verdicts: dict[Setup, Verdict] = {}  # of this process


def summary() -> Iterator[str]:
    """Yield the counts in one line, then every set-up that is not as it must be."""
    if not verdicts:
        return
    kinds = Counter(verdict.kind for verdict in verdicts.values())
    rest = "".join(f", {kinds[kind]} {kind}" for kind in (COLD, UNSTABLE, BARRED, WRONG, RAISED) if kinds[kind])
    yield (
        f"{len(verdicts)} set-ups: {kinds[BITWISE]} {BITWISE}, {kinds[EAGER]} {EAGER}{rest}, "
        f"{kinds[SILENT]} silent differences"
    )
    for hazard in HAZARDS:
        of_it = Counter(verdict.kind for setup, verdict in verdicts.items() if setup.hazard == hazard)
        if of_it:
            yield f"  {hazard}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(of_it.items()))
    for setup, verdict in verdicts.items():
        if verdict.kind not in (BITWISE, EAGER):
            where = f" after {verdict.word}" if verdict.word else ""
            yield f"  seed {setup.seed}: {verdict.kind}: {describe(setup)}: {verdict.what}{where}"


def describe(setup: Setup) -> str:
    """Return in a few words what a set-up tries."""
    of_hazard = {
        "settings": ", ".join(setup.settings),
        "host": f"{setup.host} as {setup.use}",
        "undeclared": setup.undeclared,
        "optimizer": setup.optimizer,
    }
    parts = [setup.hazard, of_hazard.get(setup.hazard, ""), setup.api, setup.policy]
    return " / ".join(filter(None, parts))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first set-up; the others have the next ones")
    parser.add_argument("--graph", choices=["auto", "tape", "emulate"], default="auto")
    parser.add_argument("--only", nargs="+", choices=HAZARDS, default=list(HAZARDS), help="hazards to draw from")
    parser.add_argument("--show", action="store_true", help="print every set-up and its verdict")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write set-ups and verdicts there")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and args.graph == "auto":
        parser.error("torch finds no CUDA device here. Pass --graph tape.")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first use of cuBLAS
    warnings.filterwarnings("ignore", category=UserWarning)  # torch warns of its own settings; `compare` hears ampkit
    for seed in range(args.seed, args.seed + args.count):
        setup = draw(seed, device, args.only)
        verdicts[setup] = judge(setup, args.graph)
        if args.show:
            print(f"{seed}: {describe(setup)}: {verdicts[setup]}", flush=True)
    print("\n".join(summary()))
    if args.json:
        rows = [{**asdict(setup), **verdict._asdict()} for setup, verdict in verdicts.items()]
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(verdict.kind in TOLERATED for verdict in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
