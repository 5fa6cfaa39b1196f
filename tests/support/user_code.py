"""Random training steps as people write them: what they read, write and look at, and what changes between calls.

    python tests/support/user_code.py --count 200 --seed 0            on a GPU
    python tests/support/user_code.py --count 200 --graph tape        without one: replays call no Python, see tape.py
    python tests/support/user_code.py --only "attribute replaced" counter --count 20 --show

Each set-up has a few pieces of code. It is run with `graph="off"` and with a graph, from one seed, and compared behind
every call: loss, parameters, moments, and what a user may look at. Equal, or eager with a message: never a silent
difference, and never an error that eager does not have.
"""

import argparse
import contextlib
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from harness import bits, deterministic
from host_reads import CASES, made
from tape import taped
from torch import Tensor, nn

import ampkit

WIDTH, CALLS = 4, 22
VALUES: dict[int, Any] = {}  # what pieces read in a global variable, by their place in the set-up


class Net(nn.Module):
    """Two layers. The pieces run between them, and keep what they like here."""

    def __init__(self, pieces: "list[Piece]", dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.drop, self.pieces = nn.Dropout(dropout), pieces
        self.kept: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.drop(self.first(x)))
        for piece in self.pieces:
            h = piece.ask(self, h, x)
        out: Tensor = self.second(h)
        return out


class Piece:
    """A piece of a step.

    Args:
        pick: draws what is random in it.
        place: its place in the set-up.
    """

    def __init__(self, pick: random.Random, place: int) -> None:
        self.at, self.place, self.device = pick.randint(5, 14), place, "cpu"

    def use(self, net: Any, h: Tensor) -> Tensor:
        """Return what the next layer gets. A part of the step."""
        return h

    def ask(self, net: Any, h: Tensor, x: Tensor) -> Tensor:
        """Do the same with a look at the input."""
        return self.use(net, h)

    def between(self, i: int, net: Any, optimizer: torch.optim.Optimizer) -> None:
        """Do what the script does behind call `i`."""

    def seen(self, net: Any) -> Any:
        """Return what a user may look at behind a call."""
        return None


class ReadsValue(Piece):
    """Reads a value of the host in one of the ways of host_reads.py. It changes once, or never."""

    def __init__(self, pick: random.Random, place: int) -> None:
        super().__init__(pick, place)
        self.make, self.read, self.change = CASES[pick.choice(list(CASES))]
        VALUES[place] = self.make()

    def use(self, net: Any, h: Tensor) -> Tensor:
        return h * self.read(VALUES[self.place])

    def between(self, i: int, net: Any, optimizer: torch.optim.Optimizer) -> None:
        if i == self.at:
            self.change(VALUES[self.place])


class ReadsAttribute(Piece):
    """Reads an attribute of the model, which is set now and then."""

    def use(self, net: Any, h: Tensor) -> Tensor:
        return h * getattr(net, "scale", 1.0)

    def between(self, i: int, net: Any, optimizer: torch.optim.Optimizer) -> None:
        if i in (self.at, self.at + 4):
            net.scale = 0.5 if i == self.at else 1.0


class Counts(Piece):
    """Counts its calls, and does not read the count."""

    def use(self, net: Any, h: Tensor) -> Tensor:
        net.kept["calls"] = net.kept.get("calls", 0) + 1
        return h

    def seen(self, net: Any) -> Any:
        return net.kept["calls"]


class Ramps(Piece):
    """Counts its calls in an attribute of its own, and computes with the count."""

    calls = 0

    def use(self, net: Any, h: Tensor) -> Tensor:
        self.calls += 1
        return h * (1 - 1 / (1 + self.calls))


class EveryKth(Piece):
    """Does something else in each k-th call."""

    def __init__(self, pick: random.Random, place: int) -> None:
        super().__init__(pick, place)
        self.period, self.calls = pick.randint(2, 9), 0

    def use(self, net: Any, h: Tensor) -> Tensor:
        self.calls += 1
        return h * 2 if self.calls % self.period == 0 else h


class Appends(Piece):
    """Appends a loss to a list."""

    def __init__(self, pick: random.Random, place: int) -> None:
        super().__init__(pick, place)
        self.losses: list[Tensor] = []

    def use(self, net: Any, h: Tensor) -> Tensor:
        self.losses.append(h.detach().mean())
        return h

    def seen(self, net: Any) -> Any:
        return len(self.losses)


class Caches(Piece):
    """Makes a mask for each shape once, and keeps it."""

    def __init__(self, pick: random.Random, place: int) -> None:
        super().__init__(pick, place)
        self.masks: dict[int, Tensor] = {}

    def use(self, net: Any, h: Tensor) -> Tensor:
        if len(h) not in self.masks:
            self.masks[len(h)] = torch.full((len(h), 1), 1.0 + len(h) / 8, device=h.device)
        return h * self.masks[len(h)]


class Grows(Piece):
    """Keeps one mask, which is made anew where a longer one is needed."""

    def use(self, net: Any, h: Tensor) -> Tensor:
        mask = net.kept.get("mask")
        if mask is None or len(mask) < len(h):
            mask = net.kept["mask"] = torch.linspace(0.5, 1, len(h), device=h.device)[:, None]
        return h * mask[: len(h)]


class Leaves(Piece):
    """Leaves tensors in an attribute, a dict and a list."""

    def __init__(self, pick: random.Random, place: int) -> None:
        super().__init__(pick, place)
        self.by_name: dict[str, Tensor] = {}
        self.in_order: list[Any] = [None]

    def use(self, net: Any, h: Tensor) -> Tensor:
        net.last, self.by_name["mean"], self.in_order[0] = h.sum(1), h.mean(), (h.amax(1), h.amin())
        return h

    def seen(self, net: Any) -> Any:
        return [net.last, self.by_name["mean"], *self.in_order[0]]


class LeavesByHook(Piece):
    """A hook leaves what a layer has computed."""

    def __init__(self, pick: random.Random, place: int) -> None:
        super().__init__(pick, place)
        self.features: dict[str, Tensor] = {}
        self.hooked = False

    def between(self, i: int, net: Any, optimizer: torch.optim.Optimizer) -> None:
        if not self.hooked:
            features = self.features
            net.second.register_forward_hook(lambda module, args, out: features.update(out=out.sum(1)))
            self.hooked = True

    def seen(self, net: Any) -> Any:
        return self.features.get("out")


class Recurs(Piece):
    """Keeps a hidden state, None at first, or zeros: in a dict or an attribute of the model, or in itself."""

    def __init__(self, pick: random.Random, place: int) -> None:
        super().__init__(pick, place)
        self.where, self.hidden = pick.randrange(3), torch.zeros(WIDTH) if pick.random() < 0.5 else None
        self.name = f"hidden{place}"

    def between(self, i: int, net: Any, optimizer: torch.optim.Optimizer) -> None:
        if not i and self.where == 1:
            setattr(net, self.name, None if self.hidden is None else self.hidden.to(net.second.weight))

    def use(self, net: Any, h: Tensor) -> Tensor:
        before = [net.kept.get("hidden"), getattr(net, self.name, None), self.hidden][self.where]
        now = h.mean(0) if before is None else h.mean(0) + 0.5 * before.detach().to(h)
        if self.where == 0:
            net.kept["hidden"] = now
        elif self.where == 1:
            setattr(net, self.name, now)
        else:
            self.hidden = now
        return h + now


class Sets(Piece):
    """Sets a number, a text or None, which it may have read before, and the script sets another one now and then."""

    def __init__(self, pick: random.Random, place: int) -> None:
        super().__init__(pick, place)
        self.where, self.what, self.reads = pick.choice(_WHERE), pick.randint(0, 4), pick.random() < 0.3
        self.period, self.holder, self.order = pick.choice((1, 2, 3, 5, 99)), SimpleNamespace(found="none"), ["none"]
        self.factor, VALUES[place], self.table = 1.0, "none", dict[str, Any]()

    def part(self, net: Any) -> Any:
        return net.first

    def use(self, net: Any, h: Tensor) -> Tensor:
        if self.reads:
            self.factor = 0.5 if _taken(self, net) == "reset" else 1.0
        _put(self, net, (True, len(h), h.shape, None, f"of {len(h)}")[self.what])
        return h * self.factor

    def between(self, i: int, net: Any, optimizer: torch.optim.Optimizer) -> None:
        if i >= self.at - 5 and i % self.period == 0:
            _put(self, net, "reset")

    def seen(self, net: Any) -> Any:
        return [_taken(self, net), self.factor]


class PassesOn(Piece):
    """Puts a tensor that lies in one place into another one, and may make or read one. The script changes both."""

    def __init__(self, pick: random.Random, place: int) -> None:
        super().__init__(pick, place)
        self.places, self.period = pick.sample(_WHERE, 2), pick.choice((3, 5, 99))
        self.does = [pick.choice(("read", "pass on", "make", "average")) for _ in range(pick.randint(1, 3))]
        self.holder, self.order = SimpleNamespace(found=torch.zeros(WIDTH)), [torch.zeros(WIDTH)]
        VALUES[place], self.table = None, dict[str, Any]()

    def part(self, net: Any) -> Any:
        return net.second

    def use(self, net: Any, h: Tensor) -> Tensor:
        one, other = self.places
        for does in self.does:
            found = _taken(self, net, one)
            held = None if found is None else found.to(h)
            if does == "read" and held is not None:
                h = h + held
            elif does == "pass on":
                _put(self, net, found, other)
            elif does == "make":
                _put(self, net, h.detach().mean(0), one)
            elif does == "average":
                _put(self, net, h.detach().mean(0) + (0 if held is None else 0.5 * held), one)
        return h

    def between(self, i: int, net: Any, optimizer: torch.optim.Optimizer) -> None:
        if i >= self.at - 5 and i % self.period == 0:
            _put(self, net, torch.full((WIDTH,), 0.25).to(net.second.weight.device), self.places[i % 2])

    def seen(self, net: Any) -> Any:
        return [None if found is None else found + 0 for found in (_taken(self, net, each) for each in self.places)]


_WHERE = ("attribute", "dict", "object", "list", "variable")


def _put(piece: Any, net: Any, value: Any, where: str = "") -> None:
    """Put a value in a place, by default that of the piece."""
    where = where or piece.where
    if where == "attribute":
        piece.part(net).found = value
    elif where == "dict":
        piece.table["found"] = value
    elif where == "object":
        piece.holder.found = value
    elif where == "list":
        piece.order[0] = value
    else:
        VALUES[piece.place] = value


def _taken(piece: Any, net: Any, where: str = "") -> Any:
    """Return what is there, None if nothing is."""
    where = where or piece.where
    if where == "attribute":
        return getattr(piece.part(net), "found", None)
    if where == "dict":
        return piece.table.get("found")
    if where == "object":
        return piece.holder.found
    return piece.order[0] if where == "list" else VALUES.get(piece.place)


class LooksAtWeights(Piece):
    """Asks weights for their dtype, attributes and values. Identity is none that modules in parts keep, by the docs."""

    def __init__(self, pick: random.Random, place: int) -> None:
        super().__init__(pick, place)
        self.look = pick.randint(0, 3)

    def between(self, i: int, net: Any, optimizer: torch.optim.Optimizer) -> None:
        for param in net.parameters():
            param.factor = 0.25

    def use(self, net: Any, h: Tensor) -> Tensor:
        weight = net.second.weight
        if self.look == 0:
            return h * (2.0 if weight.dtype is torch.float32 else 1.0)
        if self.look == 1:
            return h * (1.0 + getattr(weight, "factor", 0.0))
        if self.look == 2:
            return h + weight.abs().mean()
        (slope,) = torch.autograd.grad((h @ weight.t()).sum(), weight, retain_graph=True)
        return h + slope.mean()


class Rebinds(Piece):
    """Reads a tensor beside the model, which the script fills, replaces, or gives other memory."""

    def __init__(self, pick: random.Random, place: int) -> None:
        super().__init__(pick, place)
        self.way = pick.randint(0, 2)
        VALUES[place] = None

    def use(self, net: Any, h: Tensor) -> Tensor:
        if VALUES[self.place] is None:
            VALUES[self.place] = torch.ones(WIDTH, device=h.device)
        return h * VALUES[self.place]

    def between(self, i: int, net: Any, optimizer: torch.optim.Optimizer) -> None:
        if i == self.at:
            tensor = VALUES[self.place]
            if self.way == 0:
                tensor.fill_(0.5)
            elif self.way == 1:
                VALUES[self.place] = torch.full_like(tensor, 0.5)
            else:
                made(tensor, data=torch.full_like(tensor, 0.5))


class ChangesModel(Piece):
    """The script changes the model or the optimizer between two calls, as people do."""

    def __init__(self, pick: random.Random, place: int) -> None:
        super().__init__(pick, place)
        self.way = pick.randint(0, 5)

    def between(self, i: int, net: Any, optimizer: torch.optim.Optimizer) -> None:
        if i not in (self.at, self.at + 3):
            return
        is_first = i == self.at
        if self.way == 0:
            optimizer.param_groups[0]["lr"] *= 0.5
        elif self.way == 1:
            net.first.bias.requires_grad_(not is_first)
        elif self.way == 2:
            net.train(not is_first)
        elif self.way == 3:
            net.load_state_dict({name: value * 0.5 for name, value in net.state_dict().items()})
        elif self.way == 4:
            net.second.weight.data = net.second.weight.data * 0.5
        else:
            net.drop.p = 0.25 if is_first else 0.5


class Asks(Piece):
    """Asks the device something, about the input alone or about more than that."""

    def __init__(self, pick: random.Random, place: int) -> None:
        super().__init__(pick, place)
        self.way, self.limit = pick.randint(0, 7), pick.choice((-9.0, 0.0, 0.5))

    def ask(self, net: Any, h: Tensor, x: Tensor) -> Tensor:
        if self.way == 0:
            asked = bool(x.sum() > self.limit)
        elif self.way == 1:
            asked = (x > 1.0 + self.limit).any().item()
        elif self.way == 2:
            asked = x.abs().mean().item() > 0.5 + self.limit
        elif self.way == 3:
            asked = bool((x.sum() + net.first.weight.sum()) > self.limit)
        elif self.way == 4:
            net.kept.setdefault("first", x.sum())
            asked = bool(net.kept["first"] > self.limit)
        elif self.way == 5:
            asked = bool(x.sum() > self.limit and x[0].sum() > 0)
        elif self.way == 6:
            changed = x.clone()
            changed[0] *= 2.0
            asked = bool(changed.sum() > self.limit)
        else:
            asked = bool(torch.rand_like(x).sum() > 4.0)
        return h * 0.5 if asked else h

    def between(self, i: int, net: Any, optimizer: torch.optim.Optimizer) -> None:
        if i == self.at:
            self.limit += 0.25


class Copies(Piece):
    """Copies numbers of the host to the device, which change once, or never."""

    def __init__(self, pick: random.Random, place: int) -> None:
        super().__init__(pick, place)
        self.way, self.numbers = pick.randint(0, 4), [0.5, 1.0, 2.0, 1.0]
        self.table, self.changes = torch.tensor([1.0, 0.5, 1.0, 2.0]), pick.random() < 0.5

    def use(self, net: Any, h: Tensor) -> Tensor:
        if self.way == 0:
            return h * torch.tensor(self.numbers, device=h.device)
        if self.way == 1:
            return h * self.table.to(h.device)
        if self.way == 2:
            return h * (torch.arange(4.0) * self.numbers[0]).to(h.device)
        if self.way == 3:
            return h[:, [3, 1, 0, 2]] * h.new_tensor(self.numbers[1])
        return h * torch.rand(4).to(h.device)

    def between(self, i: int, net: Any, optimizer: torch.optim.Optimizer) -> None:
        if i == self.at and self.changes:
            self.numbers[0] = 0.25
            self.table.mul_(0.5)


PIECES: dict[str, Callable[[random.Random, int], Piece]] = {
    "value": ReadsValue,
    "attribute": ReadsAttribute,
    "counter": Counts,
    "ramp": Ramps,
    "every k-th": EveryKth,
    "list": Appends,
    "cache": Caches,
    "grown cache": Grows,
    "left": Leaves,
    "left by a hook": LeavesByHook,
    "recurrent": Recurs,
    "sets": Sets,
    "passes on": PassesOn,
    "weights": LooksAtWeights,
    "tensor beside": Rebinds,
    "model": ChangesModel,
    "asks": Asks,
    "copies": Copies,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused sgd": lambda params: torch.optim.SGD(params, lr=2.0**-5, momentum=0.5, fused=True),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=2.0**-6, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=2.0**-5, momentum=0.5),
}


class Setup(NamedTuple):
    """A whole run; `draw(seed)` makes it again."""

    seed: int
    pieces: tuple[str, ...]
    optimizer: str
    policy: str
    api: str
    sizes: int
    dropout: float
    accumulate: int


def draw(seed: int, only: Sequence[str] = tuple(PIECES)) -> Setup:
    """Return the set-up of this seed."""
    pick = random.Random(f"user code {seed}")
    pieces = [pick.choice(list(only)) for _ in range(pick.choice((1, 1, 2, 3)))]
    api = pick.choice(("step", "step", "graphed"))
    return Setup(
        seed,
        tuple(dict.fromkeys(pieces)),
        pick.choice(list(OPTIMIZERS)),
        pick.choice(("float32", "bfloat16")),
        api,
        pick.choice((1, 1, 2)),
        pick.choice((0.0, 0.5)),
        pick.choice((1, 1, 2)) if api == "step" else 1,
    )


def play(setup: Setup, graph: str, device: str) -> Iterator[tuple[dict[str, Any], int, bool]]:
    """Train, and yield behind each call all that may differ, how many replays there were, and whether the report says
    at the end what could not be captured."""
    pick = random.Random(setup.seed)
    pieces = [PIECES[name](pick, place) for place, name in enumerate(setup.pieces)]
    torch.manual_seed(setup.seed)
    net = Net(pieces, setup.dropout).to(device)
    optimizer = OPTIMIZERS[setup.optimizer](net.parameters())
    low = setup.policy == "bfloat16"

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=low):
            loss = loss_fn(net, x)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    if setup.api == "step":
        options: dict[str, Any] = {"policy": setup.policy, "accumulate": setup.accumulate, "graph": graph}
        step: Any = ampkit.graphed_step(loss_fn, net, optimizer, **options)
    else:
        step = ampkit.graphed(modules=(net,), optimizers=(optimizer,), graph=graph)(train)
    generator = torch.Generator().manual_seed(setup.seed)
    with contextlib.closing(step):
        for i in range(CALLS):
            out = step(torch.randn(2 + i % setup.sizes, WIDTH, generator=generator).to(device))
            found = {"loss": bits(out.loss if setup.api == "step" else out)}
            for place, piece in enumerate(pieces):
                found[f"what {setup.pieces[place]} shows"] = _copied(piece.seen(net))
            found |= {name: bits(param) for name, param in net.named_parameters()}
            for j, state in enumerate(optimizer.state.values()):
                found |= {f"moment {j}.{k}": bits(v) for k, v in state.items() if isinstance(v, Tensor)}
            # Of a step whose optimizer is tried in the graph first, the report says so before a message does.
            yield found, step.replays, "could not be captured" in str(step.report()) if i == CALLS - 1 else False
            for piece in pieces:
                piece.between(i, net, optimizer)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return bits(value)
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _differs(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return not torch.equal(left, right)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) != len(right) or any(map(_differs, left, right))
    return bool(left != right)


CAPTURED, EAGER, SILENT, WRONG, RAISED = (
    "captured and bitwise",
    "eager with a message",
    "silent difference",
    "different in spite of a message",
    "an error where eager has none",
)
TOLERATED = (CAPTURED, EAGER)


class Verdict(NamedTuple):
    """What came of a set-up: one of the words above, and what differs first, or was said."""

    kind: str
    what: str


def judge(setup: Setup, graph: str, device: str) -> Verdict:
    """Run a set-up eagerly and with a graph, and compare the two behind each call."""
    replays, is_said = 0, False
    with warnings.catch_warnings(record=True) as caught, deterministic():
        warnings.simplefilter("always")
        expected = list(play(setup, "off", device))
        caught.clear()

        def said() -> str:
            kinds = (each for each in caught if issubclass(each.category, ampkit.AmpkitWarning))
            return " | ".join(dict.fromkeys(str(each.message) for each in kinds))

        played = play(setup, "emulate" if graph == "tape" else graph, device)
        try:
            with taped() if graph == "tape" else nullcontext():
                for i, ((old, *_), (new, count, said_at_end)) in enumerate(zip(expected, played, strict=True)):
                    replays, is_said = count, said_at_end
                    name = next((name for name in old if _differs(old[name], new.get(name))), "")
                    if name:
                        return Verdict(WRONG if said() else SILENT, f"{name} behind call {i}; {said()}")
        except Exception as error:
            return Verdict(RAISED, f"{type(error).__name__}: {error}")
    if not replays and not is_said and not said():
        return Verdict(SILENT, "never captured, and nothing is said")
    return Verdict(CAPTURED if replays else EAGER, said())


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first set-up; the others have the next ones")
    parser.add_argument("--graph", choices=["auto", "tape", "emulate"], default="auto")
    parser.add_argument("--only", nargs="+", choices=PIECES, default=list(PIECES), help="pieces to draw from")
    parser.add_argument("--show", action="store_true", help="print every set-up and its verdict")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() and args.graph != "tape" else "cpu"
    if device == "cpu" and args.graph == "auto":
        parser.error("torch finds no CUDA device here. Pass --graph tape.")
    kinds: Counter[str] = Counter()
    with contextlib.suppress(KeyboardInterrupt):  # a run that is cut says what it has done
        for seed in range(args.seed, args.seed + args.count):
            setup = draw(seed, args.only)
            verdict = judge(setup, args.graph, device)
            kinds[verdict.kind] += 1
            if args.show or verdict.kind not in TOLERATED:
                print(f"{seed}: {verdict.kind}: {setup}: {verdict.what[:400]}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    return 0 if all(kind in TOLERATED for kind in kinds) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
