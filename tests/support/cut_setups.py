"""Random training set-ups that ask the device questions, whose answers change at random calls.

    python tests/support/cut_setups.py --count 200 --seed 0 --graph auto       on a GPU
    python tests/support/cut_setups.py --count 200 --graph tape                without one, see tape.py; or emulate
    python tests/support/cut_setups.py --seed 17 --count 1 --graph tape --show

A question about the input alone is asked ahead. At another one the graph is cut: a replay that reads another answer
there is undone, and the call is eager. Each set-up is run with `graph="off"` and with graphs, from one seed, and both
are compared behind every call: loss or error, batch, parameters, gradients, buffers, hidden state, average, moments,
loss scale, rates, and the state of each generator. Equal, or eager with a message: never a silent difference, and never
an error that eager does not have. Each call is counted once.

Answers change in the same calls of both runs, because the batch brings them. They are combined with what is asked
about, so that the host cannot know them ahead. Those about a counter come from the counter alone.
"""

import argparse
import contextlib
import os
import random
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from harness import bits, deterministic
from tape import taped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ampkit
from ampkit._capture.engine.cuts import CutGraph

INPUTS, WIDTH, CLASSES, CALLS = 6, 8, 3, 40
INFINITE = float("inf")

# ------------------------------------------------------------------------------------------------------------ questions

FORWARD = ("activations", "logits", "weight", "statistics", "counter", "input")
BEHIND = ("loss", "gradient norm", "new weights")  # the backward of a function, or in `after_step`
SECOND = "second loss"  # of two networks, behind the step of the first optimizer
DOES = {  # by where it is asked: what another answer changes
    "forward": ("scale", "dropout", "norm", "draw", "count", "spare", "raise", "generator"),
    "loss": ("scale", "draw", "count", "raise"),  # in the loss function of `graphed_step`, or of the second network
    "backward": ("skip", "halve", "count", "raise"),
    "step": ("shrink", "noise", "count", "raise"),
}
# In which calls the answer is another one, and how often that is drawn.
WHEN = Counter({"never": 1, "once": 2, "rare": 3, "third": 1, "second": 1})


class Question(NamedTuple):
    """What a step asks the device.

    Attributes:
        about: what, see above.
        does: what it does in a call with the other answer.
        when: in which calls that is so.
        way: how it is asked, "if" or "item".
    """

    about: str
    does: str
    when: str
    way: str


def where_asked(about: str, api: str) -> str:
    """Return the key of `DOES` for a question."""
    if about in FORWARD:
        return "forward"
    if about == "new weights" or (about == "gradient norm" and api == "step"):
        return "step"
    return "loss" if api == "step" or about == SECOND else "backward"


# --------------------------------------------------------------------------------------------------------------- set-up


class ByHand(torch.optim.Optimizer):
    """Momentum, written to the weights in a way that raises no version."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    kept = self.state[param].setdefault("momentum", torch.zeros_like(param))
                    kept.mul_(0.5).add_(param.grad)
                    param.data.add_(kept * -group["lr"])


OPTIMIZERS: dict[str, Callable[[Any, str], torch.optim.Optimizer]] = {
    "fused sgd": lambda params, _: torch.optim.SGD(params, lr=2.0**-5, momentum=0.5, fused=True),
    "fused adamw": lambda params, _: torch.optim.AdamW(params, lr=2.0**-6, fused=True),
    "foreach sgd": lambda params, _: torch.optim.SGD(params, lr=2.0**-5, momentum=0.5, foreach=True),
    "foreach adamw": lambda params, device: torch.optim.AdamW(
        params, lr=2.0**-6, foreach=True, capturable=device == "cuda"
    ),
    "capturable adam": lambda params, device: torch.optim.Adam(params, lr=2.0**-6, capturable=device == "cuda"),
    "fused adam": lambda params, _: torch.optim.Adam(params, lr=2.0**-6, amsgrad=True, fused=True),
    "by hand": lambda params, _: ByHand(params, lr=2.0**-5),
}
FUSED = ("fused sgd", "fused adamw", "fused adam")
# On the CPU these read the number of steps on the host, which a tape freezes. Others take their place.
ON_TAPE = {"foreach adamw": "fused adamw", "capturable adam": "fused adam"}


class Setup(NamedTuple):
    """A whole run; `draw(seed, device)` makes it again.

    Attributes:
        api: "step" for `graphed_step`, "graphed" for a function, "gan" for one with two optimizers.
        recurrent: whether each call keeps a hidden state for the next one, and leaves a tensor to look at.
        writes_input: whether a call changes its batch.
        sizes: how many batch sizes take turns.
        overflows: whether some batches have infinite gradients.
        through_data: whether each forward writes to a parameter in a way that raises no version.
    """

    seed: int
    device: str
    api: str
    questions: tuple[Question, ...]
    optimizer: str
    policy: str
    accumulate: int
    dropout: float
    norm: bool
    average: bool
    recurrent: bool
    writes_input: bool
    scheduled: bool
    generator: bool
    max_norm: float | None
    warmup: int
    verify: int
    sizes: int
    overflows: bool
    on_failure: str
    through_data: bool

    @property
    def has_behind(self) -> bool:
        """Whether something is asked that no longer has the batch at hand."""
        return any(question.about not in FORWARD for question in self.questions)


def draw(seed: int, device: str) -> Setup:
    """Return the set-up of this seed."""
    pick = random.Random(f"cuts {seed}")
    api = pick.choice(("step", "step", "step", "graphed", "graphed", "gan"))
    generator = device == "cuda" and pick.random() < 0.3  # an emulated graph has none of its own
    optimizer, policy = pick.choice(list(OPTIMIZERS)), pick.choice(("float32", "bfloat16", "float16"))
    questions = []
    for _ in range(pick.choice((1, 1, 2, 2, 3))):
        about = pick.choice((*FORWARD, *BEHIND, *([SECOND] * 3 if api == "gan" else [])))
        does = [each for each in DOES[where_asked(about, api)] if each != "generator" or generator]
        done, when = pick.choice(does), pick.choice(list(WHEN.elements()))
        if done == "raise" and when == "once":  # no call behind it would end
            when = "rare"
        questions.append(Question(about, done, when, pick.choice(("if", "item"))))
    # There alone a skipped step is one that is never called: an emulated replay may make state, which a graph cannot,
    # and it leaves out numbers that these optimizers read.
    calls_are_missing = policy == "float16" and device == "cpu" and optimizer not in FUSED
    if calls_are_missing:
        optimizer = ON_TAPE.get(optimizer, optimizer)
    return Setup(
        seed=seed,
        device=device,
        api=api,
        questions=tuple(questions),
        optimizer=optimizer,
        policy=policy,
        accumulate=pick.choice((1, 1, 2)) if api == "step" else 1,
        dropout=pick.choice((0.0, 0.3)),
        norm=pick.random() < 0.6,
        average=pick.random() < 0.3,
        recurrent=pick.random() < 0.25,
        writes_input=pick.random() < 0.2,
        # A function steps its schedule in the script, with a rate that is a tensor.
        scheduled=pick.random() < 0.3 and (api == "step" or optimizer in FUSED),
        generator=generator,
        max_norm=pick.choice((None, None, 0.5)),
        warmup=pick.choice((2, 3)),
        verify=pick.choice((0, 0, 4)) * (not calls_are_missing),
        sizes=pick.choice((1, 1, 1, 2)),
        overflows=policy == "float16" and pick.random() < 0.6,
        on_failure=pick.choice(("parts", "parts", "eager")),
        through_data=pick.random() < 0.25,
    )


def others(question: Question, pick: random.Random) -> list[bool]:
    """Return in which calls a question has its other answer."""
    if question.when == "once":
        start = pick.randint(4, 20)
        return [i >= start for i in range(CALLS)]
    if question.when == "rare":
        return [pick.random() < 0.1 for _ in range(CALLS)]
    period = {"never": CALLS + 1, "third": 3, "second": 2}[question.when]
    return [i % period == period - 1 for i in range(CALLS)]


class Batch(NamedTuple):
    """Inputs, labels, a factor of the loss, and a number per question: 1.0 for its other answer, 0.0 for the usual."""

    x: Tensor
    y: Tensor
    boost: Tensor
    flags: Tensor


def batches(setup: Setup) -> Iterator[Batch]:
    """Yield the batches of a run."""
    pick = random.Random(-setup.seed - 1)
    made = torch.Generator().manual_seed(setup.seed)
    flags = list(zip(*(others(question, pick) for question in setup.questions), strict=True))
    for i in range(CALLS):
        size = 4 + 2 * ((i // 2) % setup.sizes)
        x, y = torch.randn(size, INPUTS, generator=made), torch.randint(CLASSES, (size,), generator=made)
        boost = torch.tensor(INFINITE if setup.overflows and i > 4 and pick.random() < 0.12 else 1.0)
        yield Batch(*(each.to(setup.device) for each in (x, y, boost, torch.tensor(flags[i], dtype=torch.float32))))


# ------------------------------------------------------------------------------------------------------------- training


class Net(nn.Module):
    """Linear layers, BatchNorm and dropout, with questions between them."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.questions, self.forwards = setup.questions, 3.0 if setup.api == "gan" else 1.0
        self.first, self.second = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if setup.norm else nn.Identity()
        self.more, self.spare = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)  # of other answers
        self.dropout, self.head = nn.Dropout(setup.dropout), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("counts", torch.zeros(len(self.questions)))
        self.register_buffer("flags", torch.zeros(len(self.questions)))
        self.hidden, self.left = (torch.zeros(WIDTH, device=setup.device), None) if setup.recurrent else (None, None)
        self.mean = (
            nn.Parameter(torch.zeros_like(self.first.weight), requires_grad=False) if setup.through_data else None
        )
        self.keeps_flags, self.generator = setup.has_behind, None

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        self.calls.add_(1.0)
        if self.keeps_flags:
            self.flags.copy_(flags)
        if self.mean is not None:
            self.mean.data.mul_(0.5).add_(self.first.weight.data)
        h = self.first(x)
        if self.hidden is not None:
            h = h + 0.5 * self.hidden
            self.hidden, self.left = h.detach().float().mean(0), h.detach().sum(1)
        h = self.decide("input", h, x, flags)
        h = self.decide("activations", F.relu(self.norm(h)), None, flags)
        h = self.decide("counter", self.dropout(h), self.calls, flags)
        h = self.decide("weight", self.second(h), self.second.weight, flags)
        h = self.decide("statistics", torch.tanh(h), getattr(self.norm, "running_mean", self.calls), flags)
        return self.decide("logits", self.head(h), None, flags)

    def decide(self, about: str, h: Tensor, value: Tensor | None, flags: Tensor) -> Tensor:
        """Ask all questions about something, which is `h` itself if it is None. Return what comes of it."""
        for i, question in enumerate(self.questions):
            if question.about == about and self.ask(i, h if value is None else value, flags):
                h = self._branch(i, question.does, h)
        return h

    def ask(self, i: int, value: Tensor, flags: Tensor) -> bool:
        """Return whether a question has its other answer. It is about a value, and about the flag that came with it."""
        question = self.questions[i]
        value, flag = value.detach().float(), self._counted(question) if question.about == "counter" else flags[i]
        if question.does == "raise":  # where something is not finite
            fine = (value / (1.0 - flag)).isfinite().all()
            return not (fine if question.way == "if" else fine.item())
        other = flag + (value.sum() > INFINITE) > 0
        return bool(other if question.way == "if" else other.item())

    def _counted(self, question: Question) -> Tensor:
        """Return the flag of a question about the counter."""
        call = torch.div(self.calls - 1.0, self.forwards, rounding_mode="floor") + 1.0
        if question.when == "once":
            return (call > 12).float()
        period = {"never": 1e6, "rare": 10, "third": 3, "second": 2}[question.when]
        return (call % period == 0).float()

    def _branch(self, i: int, does: str, h: Tensor) -> Tensor:
        if does == "scale":
            return h * 0.5
        if does == "dropout":
            return F.dropout(h, 0.3, self.training)
        if does == "norm" and h.shape[-1] == WIDTH:
            return self.more(h)
        if does == "draw":
            return h + 0.1 * torch.rand_like(h)
        if does == "generator":
            return h + 0.1 * torch.rand(h.shape, generator=self.generator, device=h.device)
        if does == "spare" and h.shape[-1] == WIDTH:
            return self.spare(h)
        if does == "raise":
            raise ValueError(f"question {i}: not finite")
        self.counts[i].add_(1.0)
        return h

    @torch.no_grad()
    def decide_behind(self, about: str, value: Tensor) -> bool:
        """Ask what is asked behind the backward or the step. Return whether the step is to be left out."""
        skips = False
        for i, question in enumerate(self.questions):
            if question.about != about or not self.ask(i, value, self.flags):
                continue
            if question.does == "skip":
                skips = True
            elif question.does == "halve":
                for param in self.parameters():
                    if param.grad is not None:
                        param.grad.mul_(0.5)
            elif question.does == "shrink":
                self.second.weight.mul_(0.75)
            elif question.does == "noise":
                self.second.weight.add_(0.1 * torch.rand_like(self.second.weight))
            else:
                self._branch(i, question.does, value)
        return skips

    def gradient_norm(self) -> Tensor:
        return torch.stack([p.grad.float().norm() for p in self.parameters() if p.grad is not None]).norm()


class Training:
    """What a set-up trains, and how."""

    def __init__(self, setup: Setup, graph: str) -> None:
        self.setup = setup
        torch.manual_seed(setup.seed)
        self.net = Net(setup).to(setup.device)
        self.modules: dict[str, nn.Module] = {"net": self.net}
        if setup.api == "gan":
            self.modules["gen"] = self.gen = nn.Sequential(
                nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, INPUTS)
            )
            self.gen.to(setup.device)
        self.optimizers = [
            OPTIMIZERS[setup.optimizer](each.parameters(), setup.device) for each in self.modules.values()
        ]
        if setup.api != "step" and setup.scheduled:
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = torch.tensor(group["lr"], device=setup.device)
        schedule = [lr_scheduler.StepLR(each, 3, gamma=0.5) for each in self.optimizers] if setup.scheduled else []
        self.averaged = None
        if setup.average:
            average = get_ema_multi_avg_fn(0.75)
            self.averaged = AveragedModel(self.net, multi_avg_fn=average, use_buffers=setup.seed % 2 == 0)
            if setup.api != "step":  # all that a function changes is on one device, the count of an average too
                self.averaged.to(setup.device)
        if setup.generator:  # behind the average, which copies the model
            self.net.generator = torch.Generator(setup.device).manual_seed(setup.seed)
        self.scaler = ampkit.GradScaler(
            setup.device, init_scale=16.0, growth_interval=3, enabled=setup.policy == "float16"
        )
        options: dict[str, Any] = {
            "scaler": self.scaler,
            "warmup": setup.warmup,
            "verify": setup.verify,
            "on_failure": setup.on_failure,
            "graph": graph,
            "generators": (self.net.generator,) if setup.generator else (),
        }
        self.scheduled_here = schedule
        if setup.api == "step":
            self.scheduled_here = []
            self.step: Any = ampkit.graphed_step(
                self.loss,
                self.net,
                self.optimizers[0],
                policy=setup.policy,
                accumulate=setup.accumulate,
                max_norm=setup.max_norm,
                scheduler=schedule[0] if schedule else None,
                after_step=self.after_step if self.averaged is not None or setup.has_behind else None,
                **options,
            )
        else:
            modules = [*self.modules.values(), *([] if self.averaged is None else [self.averaged])]
            make = ampkit.graphed(modules=modules, optimizers=self.optimizers, **options)
            self.step = make(self.train if setup.api == "graphed" else self.train_both)

    def call(self, batch: Batch) -> Any:
        """Return the loss of a call, on the host, or its error."""
        try:
            out = self.step(*batch)
        except Exception as error:
            return type(error).__name__, str(error)
        for schedule in self.scheduled_here:
            schedule.step()
        return _copied(out._asdict() if self.setup.api == "step" else out)

    # -------------------------------------------------------------------------------------------------- graphed_step

    def loss(self, net: Any, x: Tensor, y: Tensor, boost: Tensor, flags: Tensor) -> Tensor:
        """Compute the loss."""
        self._write(x)
        loss = F.cross_entropy(net(x, flags).float(), y) * boost
        return net.decide("loss", loss, None, flags)

    def after_step(self, net: Any) -> None:
        """Do what comes behind the optimizer."""
        if self.setup.has_behind:
            net.decide_behind("gradient norm", net.gradient_norm())
            net.decide_behind("new weights", net.head.weight)
        if self.averaged is not None:
            self.averaged.update_parameters(net)

    # ------------------------------------------------------------------------------------------------------- graphed

    def train(self, x: Tensor, y: Tensor, boost: Tensor, flags: Tensor) -> Tensor:
        """Do a step with one optimizer."""
        self._write(x)
        with self._autocast():
            loss = F.cross_entropy(self.net(x, flags).float(), y) * boost
        self._update(0, loss)
        return loss.detach()

    def train_both(self, x: Tensor, y: Tensor, boost: Tensor, flags: Tensor) -> tuple[Tensor, Tensor]:
        """Do a step of two networks."""
        self._write(x)
        with self._autocast():
            fake = self.gen(torch.randn_like(x))
            loss = (
                F.cross_entropy(self.net(x, flags).float(), y) + self.net(fake.detach(), flags).float().square().mean()
            )
            loss = loss * boost
        self._update(0, loss)
        with self._autocast():
            other = F.cross_entropy(self.net(fake, flags).float(), y) * boost
        other = self.net.decide(SECOND, other, None, self.net.flags)
        self._update(1, other)
        return loss.detach(), other.detach()

    def _write(self, x: Tensor) -> None:
        if self.setup.writes_input:
            x.mul_(0.5)

    def _update(self, i: int, loss: Tensor) -> None:
        optimizer, net = self.optimizers[i], self.net
        optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        if i == 0 and self.setup.has_behind:
            skips = net.decide_behind("loss", loss)
            if net.decide_behind("gradient norm", net.gradient_norm()) or skips:
                optimizer.zero_grad()
                return
        if self.setup.max_norm is not None:
            self.scaler.unscale_(optimizer)
            params = [param for group in optimizer.param_groups for param in group["params"]]
            nn.utils.clip_grad_norm_(params, self.setup.max_norm)
        self.scaler.step(optimizer)
        if i == 0 and self.setup.has_behind:
            net.decide_behind("new weights", net.head.weight)
        if i == len(self.optimizers) - 1:
            self.scaler.update()
            if self.averaged is not None:
                self.averaged.update_parameters(net)

    def _autocast(self) -> Any:
        low = torch.float16 if self.setup.policy == "float16" else torch.bfloat16
        return torch.autocast(self.setup.device, low, enabled=self.setup.policy != "float32")

    # --------------------------------------------------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        """Return everything that the run changes, by name, on the host."""
        modules = self.modules | ({} if self.averaged is None else {"average": self.averaged})
        found: dict[str, Any] = {
            f"{name}.{key}": bits(value)
            for name, module in modules.items()
            for key, value in module.state_dict().items()
        }
        for i, optimizer in enumerate(self.optimizers):
            params = [param for group in optimizer.param_groups for param in group["params"]]
            for j, param in enumerate(params):
                for key, value in optimizer.state.get(param, {}).items():
                    found[f"state of optimizer {i}, parameter {j}: {key}"] = _copied(value)
            found[f"rates {i}"] = [float(group["lr"]) for group in optimizer.param_groups]
            if self.setup.api != "step":  # of which the caller has the gradients
                found[f"gradients {i}"] = [_copied(param.grad) for param in params]
        found["hidden"] = _copied([self.net.hidden, self.net.left])
        found["scaler"] = self.scaler.state_dict()
        found["generator of the CPU"] = bits(torch.get_rng_state())
        if self.setup.device == "cuda":
            found["generator of the device"] = bits(torch.cuda.get_rng_state())
        if self.setup.generator:
            found["generator"] = bits(self.net.generator.get_state())
        return found


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(each) for each in value]
    return bits(value) if isinstance(value, Tensor) else value


def play(setup: Setup, graph: str) -> Generator[tuple[Any, dict[str, Any], Any], None, None]:
    """Train, and yield behind each call what it returned or raised, the state, and what was trained."""
    training = Training(setup, graph)
    torch.manual_seed(setup.seed)
    with contextlib.closing(training.step):
        for batch in batches(setup):
            yield training.call(batch), {**training.state(), "batch": _copied(batch)}, training.step


# -------------------------------------------------------------------------------------------------------------- verdict

CAPTURED, EAGER, UNSAID, SILENT, WRONG, RAISED, MISCOUNTED = (
    "captured and bitwise",
    "eager or in parts with a message",
    "never captured, and nothing is said",
    "silent difference",
    "different in spite of a message",
    "an error where eager has none",
    "calls that are not counted",
)
TOLERATED = (CAPTURED, EAGER)
UNDONE = "another answer to a question than the graph was captured with"


class Verdict(NamedTuple):
    """What came of a set-up.

    Attributes:
        kind: one of the words above.
        what: what differs first, or was said.
        counts: of replays, of those of graphs with cuts, and of calls.
    """

    kind: str
    what: str
    counts: Counter[str]


def judge(setup: Setup, graph: str) -> Verdict:
    """Run a set-up eagerly and with graphs, and compare the two behind each call.

    Args:
        setup: the set-up.
        graph: "auto", "emulate" or "tape".
    """
    counts: Counter[str] = Counter()
    if graph == "tape":
        setup = setup._replace(optimizer=ON_TAPE.get(setup.optimizer, setup.optimizer))
    elif graph == "emulate" and any(question.does == "raise" for question in setup.questions):
        # An error leaves another tensor in the place of the hidden state. A rehearsal behind it does not make that
        # one of ampkit's own, so that an emulated replay that is undone leaves its own there. A graph leaves none.
        setup = setup._replace(recurrent=False)
    original = CutGraph.replay

    def replay(cut: CutGraph) -> Any:
        counts["replays with cuts"] += 1
        return original(cut)

    with warnings.catch_warnings(record=True) as caught, deterministic():
        warnings.simplefilter("always")
        expected = [(outcome, state) for outcome, state, _ in play(setup._replace(verify=0), "off")]
        caught.clear()

        def said() -> str:
            kinds = (each for each in caught if issubclass(each.category, ampkit.AmpkitWarning))
            return " | ".join(dict.fromkeys(str(each.message) for each in kinds))

        played = play(setup, "emulate" if graph == "tape" else graph)
        step: Any = None
        try:
            with taped() if graph == "tape" else nullcontext(), mock.patch.object(CutGraph, "replay", replay):
                for i, (old, before) in enumerate(expected):
                    new, after, step = next(played)
                    if is_error(new) and not is_error(old):
                        return Verdict(RAISED, f"{new} in call {i}; {said()}", counts)
                    name = _difference(old, new, "outcome") or _difference(before, after, "state")
                    if name:
                        return Verdict(WRONG if said() else SILENT, f"{name} in call {i}; {said()}", counts)
        except Exception as error:
            return Verdict(RAISED, f"{type(error).__name__}: {error}; {said()}", counts)
        report = step.report()
        played.close()
    called = report.replays + report.in_parts + sum(report.eager.values())
    counts["replays"] += report.replays
    counts["calls in parts"] += report.in_parts
    counts["calls undone"] += report.eager.get(UNDONE, 0)
    counts["calls"] += called
    counts["errors"] += sum(is_error(outcome) for outcome, _ in expected)
    if called != CALLS:
        return Verdict(MISCOUNTED, f"{called} of {CALLS}: {report}", counts)
    if report.failure is None and not said():
        few = counts["errors"] > CALLS // 2  # calls that end: too few for a warm-up
        return Verdict(CAPTURED if report.replays else EAGER if few else UNSAID, str(report), counts)
    return Verdict(CAPTURED if report.replays and report.failure is None else EAGER, said(), counts)


def is_error(outcome: Any) -> bool:
    """Return whether a call has raised an error."""
    return isinstance(outcome, tuple)


def _difference(left: Any, right: Any, where: str) -> str:
    """Return the first place where two trees differ, "" if there is none."""
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            return f"{where}: {sorted(left.keys() ^ right.keys())} in one of the two"
        pairs = [(f"{where}[{key!r}]", left[key], right[key]) for key in left]
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = [(f"{where}[{i}]", *each) for i, each in enumerate(zip(left, right, strict=True))]
    elif isinstance(left, Tensor) and isinstance(right, Tensor):
        return "" if torch.equal(left, right) else where
    else:
        return "" if left == right else f"{where}: {left!r} and {right!r}"
    return next(filter(None, (_difference(a, b, name) for name, a, b in pairs)), "")


# --------------------------------------------------------------------------------------------------------------- counts

totals: dict[str, Counter[str]] = defaultdict(Counter)  # by device and kind of graph


def count(verdict: Verdict, name: str) -> None:
    """Add a run to the summary."""
    totals[name].update({"set-ups": 1, **verdict.counts, verdict.kind: 1})


def summary() -> Iterator[str]:
    """Yield what was run and found, a line a device and kind of graph."""
    for name, counter in totals.items():
        yield f"{name}: {', '.join(f'{number} {what}' for what, number in counter.items())}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first set-up; the others have the next ones")
    parser.add_argument("--graph", choices=["auto", "tape", "emulate"], default="auto")
    parser.add_argument("--show", action="store_true", help="print every set-up and its verdict")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() and args.graph != "tape" else "cpu"
    if device == "cpu" and args.graph == "auto":
        parser.error("torch finds no CUDA device here. Pass --graph tape.")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    kinds: Counter[str] = Counter()
    with contextlib.suppress(KeyboardInterrupt):  # a run that is cut says what it has done
        for seed in range(args.seed, args.seed + args.count):
            setup = draw(seed, device)
            verdict = judge(setup, args.graph)
            kinds[verdict.kind] += 1
            count(verdict, args.graph)
            if args.show or verdict.kind not in TOLERATED:
                print(f"{seed}: {verdict.kind}: {setup}: {verdict.what}", flush=True)
    print(*summary(), sep="\n")
    return 0 if all(kind in TOLERATED for kind in kinds) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
