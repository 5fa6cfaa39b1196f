"""Ways in which Python code comes to a value: a change of what a step reads in any of these ways is noticed."""

import collections
import contextlib
import contextvars
import dataclasses
import functools
import operator
import warnings
from collections.abc import Callable, Iterator
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from harness import ENGINES, assert_same, deterministic
from torch import Tensor, nn

import ampkit

Engine = tuple[str, str]
Change = Callable[[], object]
W: Any = None  # what the functions below read; each run sets it anew


class Term:
    """An object in a list. Others call it."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight, self.unread, self.used = weight, 0, 0

    def __call__(self, x: float) -> float:
        self.used += 1
        return x * self.weight


class Slotted:
    __slots__ = ("weight",)

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight


@dataclasses.dataclass(slots=True)
class Record:
    weight: float = 1.0


class Named(NamedTuple):
    weight: float
    term: Term


class Owner:
    factor = 1.0

    def __init__(self) -> None:
        self.term, self.weight = Term(), 1.0

    @property
    def inner(self) -> Term:
        return self.term

    def found(self) -> Term:
        return self.term

    @classmethod
    def scaled(cls, x: float) -> float:
        return x * cls.factor

    def times(self, x: float) -> float:
        return x * self.weight

    def looked_up(self, name: str) -> float:
        return float(getattr(self, name))


def terms(count: int = 2) -> list[Term]:
    return [Term() for _ in range(count)]


def weight_of(term: Any) -> Any:
    return term.weight


# ------------------------------------------------------------------------------ each function, and what it reads of `W`


def loops() -> float:
    found = 0.0
    for term in W.list:
        found += term.weight
    for term in W.tuple:
        found += term.weight
    for term in W.deque:
        found += term.weight
    for _, term in W.dict.items():
        found += term.weight
    for i, term in enumerate(W.counted):
        found += i + term.weight
    for _, (_, term) in zip(range(2), W.pairs, strict=True):
        found += term.weight
    for i in range(2):
        found += W.indexed[i].weight
    for each in W.called:
        found = each(found)
    for entry in W.dicts:
        found += entry["weight"]
    found += sum(term.weight for term in W.generated) + sum([term.weight for term in W.comprehended])
    return found + sum(map(weight_of, W.mapped)) + max(W.compared, key=lambda term: term.weight).weight


LOOPS: dict[str, tuple[Any, Change]] = {
    "list": (terms, lambda: setattr(W.list[1], "weight", 3.0)),
    "tuple": (lambda: tuple(terms()), lambda: setattr(W.tuple[1], "weight", 3.0)),
    "deque": (lambda: collections.deque(terms()), lambda: setattr(W.deque[1], "weight", 3.0)),
    "dict": (lambda: dict(enumerate(terms())), lambda: setattr(W.dict[1], "weight", 3.0)),
    "counted": (terms, lambda: W.counted.__setitem__(1, Term(3.0))),
    "pairs": (lambda: [*zip("ab", terms(), strict=True)], lambda: setattr(W.pairs[1][1], "weight", 3.0)),
    "indexed": (terms, lambda: setattr(W.indexed[1], "weight", 3.0)),
    "called": (terms, lambda: setattr(W.called[1], "weight", 3.0)),
    "dicts": (lambda: [{"weight": 1.0}], lambda: W.dicts[0].update(weight=3.0)),
    "generated": (terms, lambda: setattr(W.generated[1], "weight", 3.0)),
    "comprehended": (terms, lambda: W.comprehended.append(Term(3.0))),
    "mapped": (terms, lambda: setattr(W.mapped[1], "weight", 3.0)),
    "compared": (terms, lambda: setattr(W.compared[1], "weight", 3.0)),
}


def assigned() -> float:
    one = W.first if W.flag else W.second
    two = W.absent or W.default
    third, fourth, fifth, sixth = W.third, 1.0, 2.0, W.sixth
    left = right = W.both
    found = (walrus := W.walrus).weight + walrus.weight + left.weight + right.weight + fourth + fifth
    again = W.again
    found += again.weight
    again = W.later
    found += again.weight
    branch = None
    if W.branch is not None:
        branch = W.branch
    try:
        tried = W.tried
    except AttributeError:
        tried = None
    assert branch is not None
    assert tried is not None
    return float(found + one.weight + two.weight + third.weight + sixth.weight + branch.weight + tried.weight)


ASSIGNED: dict[str, tuple[Any, Change]] = {
    **{
        name: (Term, functools.partial(lambda name: setattr(getattr(W, name), "weight", 3.0), name))
        for name in ("first", "default", "third", "sixth", "both", "walrus", "again", "later", "branch", "tried")
    },
    "second": (Term, lambda: None),
    "flag": (lambda: True, lambda: W.__dict__.update(flag=False, second=Term(5.0))),
    "absent": (lambda: None, lambda: setattr(W, "absent", Term(7.0))),
}


def by_name() -> float:
    found = getattr(W.got, "weight") + getattr(W.unset, "height", 1.0) + vars(W.table)["weight"]  # noqa: B009
    found += W.dunder.__dict__["weight"] + (2.0 if hasattr(W.has, "height") else 1.0)
    found += W.entries.get("weight", 1.0) + (2.0 if "height" in W.contains else 1.0)
    found += getattr(W.module, "weight")  # noqa: B009
    found += operator.attrgetter("weight")(W.attrgetter) + W.owner.looked_up("weight")
    key = "weight"
    return float(found + W.keyed[key]["deep"] + W.written[f"w{1}"] + (2.0 if "height" in W.members else 1.0))


def python_module() -> ModuleType:
    made = ModuleType("settings")
    made.__file__, made.weight = __file__, 1.0  # type: ignore[attr-defined]
    return made


BY_NAME: dict[str, tuple[Any, Change]] = {
    "got": (Term, lambda: setattr(W.got, "weight", 3.0)),
    "unset": (Term, lambda: setattr(W.unset, "height", 3.0)),
    "table": (Term, lambda: setattr(W.table, "weight", 3.0)),
    "dunder": (Term, lambda: setattr(W.dunder, "weight", 3.0)),
    "has": (Term, lambda: setattr(W.has, "height", 3.0)),
    "entries": (lambda: {"weight": 1.0}, lambda: W.entries.update(weight=3.0)),
    "contains": (dict, lambda: W.contains.update(height=3.0)),
    "attrgetter": (Term, lambda: setattr(W.attrgetter, "weight", 3.0)),
    "module": (python_module, lambda: setattr(W.module, "weight", 3.0)),
    "owner": (Owner, lambda: setattr(W.owner, "weight", 3.0)),
    "keyed": (lambda: {"weight": {"deep": 1.0}}, lambda: W.keyed["weight"].update(deep=3.0)),
    "written": (lambda: {"w1": 1.0}, lambda: W.written.update(w1=3.0)),
    "members": (set, lambda: W.members.add("height")),
}


def found_term() -> Any:
    return W.returned


@contextlib.contextmanager
def entered() -> Iterator[Any]:
    yield W.entered


def yielded() -> Iterator[Any]:
    yield W.yielded


def times(x: float, term: Any) -> float:
    return float(x * term.weight)


def starred(*terms: Any, **named: Any) -> float:
    return float(terms[0].weight + named["term"].weight)


@functools.lru_cache
def cached() -> Any:
    return Term()


@functools.cache
def cached_by_name(name: str) -> Any:
    return Term()


def called() -> float:
    found = cached().weight + cached_by_name("a").weight
    found += found_term().weight + W.property.inner.weight + W.method.found().weight
    with entered() as term:
        found += term.weight
    for term in yielded():
        found += term.weight
    found += times(1.0, W.given) + times(1.0, term=W.by_keyword) + starred(W.starred, term=W.double_starred)
    found += starred(*W.unpacked, **W.unpacked_dict) + W.partial(2.0) + W.bound(2.0)
    for function in W.functions:
        found += function(2.0)
    return float(found + W.object(2.0))


CALLED: dict[str, tuple[Any, Change]] = {
    **{
        name: (Term, functools.partial(lambda name: setattr(getattr(W, name), "weight", 3.0), name))
        for name in ("returned", "entered", "yielded", "given", "by_keyword", "starred", "double_starred", "object")
    },
    "cached": (lambda: setattr(cached(), "weight", 1.0), lambda: setattr(cached(), "weight", 3.0)),
    "cached by name": (
        lambda: setattr(cached_by_name("a"), "weight", 1.0),
        lambda: setattr(cached_by_name("a"), "weight", 3.0),
    ),
    "property": (Owner, lambda: setattr(W.property.term, "weight", 3.0)),
    "method": (Owner, lambda: setattr(W.method.term, "weight", 3.0)),
    "unpacked": (lambda: (Term(),), lambda: setattr(W.unpacked[0], "weight", 3.0)),
    "unpacked_dict": (lambda: {"term": Term()}, lambda: setattr(W.unpacked_dict["term"], "weight", 3.0)),
    "partial": (
        lambda: functools.partial(times, term=Term()),
        lambda: setattr(W.partial.keywords["term"], "weight", 3.0),
    ),
    "bound": (lambda: Owner().times, lambda: setattr(W.bound.__self__, "weight", 3.0)),
    "functions": (lambda: [Owner().times], lambda: setattr(W.functions[0].__self__, "weight", 3.0)),
}


def kinds() -> float:
    found = W.slots.weight + W.record.weight + W.replaced.weight + W.named.weight + W.named_term.term.weight
    found += type(W.type).factor + W.dunder_class.__class__.factor + W.kind.scaled(1.0) + W.instance.scaled(1.0)
    return float(found + W.entry[1].weight + W.nested[0][1] + W.last[-1] + W.function.weight)


def function_with_weight() -> Any:
    def made() -> None:
        pass

    made.weight = 1.0  # type: ignore[attr-defined]
    return made


def new_class() -> type:
    return type("Made", (Owner,), {"factor": 1.0})


KINDS: dict[str, tuple[Any, Change]] = {
    "slots": (Slotted, lambda: setattr(W.slots, "weight", 3.0)),
    "record": (Record, lambda: setattr(W.record, "weight", 3.0)),
    "replaced": (Slotted, lambda: setattr(W, "replaced", Slotted(3.0))),
    "named": (lambda: Named(1.0, Term()), lambda: setattr(W, "named", W.named._replace(weight=3.0))),
    "named_term": (lambda: Named(1.0, Term()), lambda: setattr(W.named_term.term, "weight", 3.0)),
    "type": (lambda: new_class()(), lambda: setattr(type(W.type), "factor", 3.0)),
    "dunder_class": (lambda: new_class()(), lambda: setattr(type(W.dunder_class), "factor", 3.0)),
    "kind": (new_class, lambda: setattr(W.kind, "factor", 3.0)),
    "instance": (lambda: new_class()(), lambda: setattr(type(W.instance), "factor", 3.0)),
    "entry": (lambda: tuple(terms()), lambda: setattr(W.entry[1], "weight", 3.0)),
    "nested": (lambda: [[1.0, 1.0]], lambda: W.nested[0].__setitem__(1, 3.0)),
    "function": (function_with_weight, lambda: setattr(W.function, "weight", 3.0)),
    "last": (lambda: collections.deque([1.0, 1.0]), lambda: W.last.__setitem__(1, 3.0)),
}


def context_with(value: Any) -> contextvars.ContextVar[Any]:
    found: contextvars.ContextVar[Any] = contextvars.ContextVar("value")
    found.set(value)
    return found


def written_in_c() -> float:
    """Objects of classes that are written in C, by methods, entries and attributes."""
    found = W.summed.sum() + W.indexed[1] + W.given.numpy.sum() + W.shaped.shape[0] + sum(W.bytes) + W.scalar
    found += W.context.get() + W.object_in_context.get().weight
    found += W.frozen["weight"] + W.frozen_term["term"].weight + sum(W.frozen_loop.values())
    return float(found + W.numbers.index(2.0) + len(W.names.split()))


def numbers() -> Any:
    return numpy.array([1.0, 1.0])


WRITTEN_IN_C: dict[str, tuple[Any, Change]] = {
    "summed": (numbers, lambda: W.summed.__setitem__(1, 3.0)),
    "indexed": (numbers, lambda: W.indexed.__setitem__(1, 3.0)),
    "given": (lambda: SimpleNamespace(numpy=numbers()), lambda: W.given.numpy.fill(3.0)),
    "shaped": (numbers, lambda: setattr(W, "shaped", numpy.ones(3))),
    "bytes": (lambda: bytearray(b"ab"), lambda: W.bytes.append(1)),
    "scalar": (lambda: numpy.float32(1.0), lambda: setattr(W, "scalar", numpy.float32(3.0))),
    "context": (lambda: context_with(1.0), lambda: W.context.set(3.0)),
    "object_in_context": (lambda: context_with(Term()), lambda: setattr(W.object_in_context.get(), "weight", 3.0)),
    "frozen": (
        lambda: MappingProxyType({"weight": 1.0}),
        lambda: setattr(W, "frozen", MappingProxyType({"weight": 3.0})),
    ),
    "frozen_term": (
        lambda: MappingProxyType({"term": Term()}),
        lambda: setattr(W.frozen_term["term"], "weight", 3.0),
    ),
    "frozen_loop": (
        lambda: MappingProxyType({"weight": 1.0}),
        lambda: setattr(W, "frozen_loop", MappingProxyType({"weight": 3.0})),
    ),
    "numbers": (lambda: collections.deque([1.0, 2.0]), lambda: W.numbers.appendleft(1.0)),
    "names": (lambda: "a b", lambda: setattr(W, "names", "a b c")),
}
WAYS: dict[str, tuple[Callable[[], float], dict[str, tuple[Any, Change]]]] = {
    "loops": (loops, LOOPS),
    "assigned": (assigned, ASSIGNED),
    "by name": (by_name, BY_NAME),
    "called": (called, CALLED),
    "kinds": (kinds, KINDS),
    "written in C": (written_in_c, WRITTEN_IN_C),
}


class Holds(nn.Module):
    """Has the same in its attributes, and reads it in its `forward`."""

    def __init__(self, read: Callable[[], float]) -> None:
        super().__init__()
        self.inner, self.read = nn.Linear(4, 4), read

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.read()


class Attributes(nn.Module):
    """Reads lists, tuples and slots that are its own attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.terms, self.pair, self.slotted, self.named = terms(), tuple(terms()), Slotted(), Named(1.0, Term())
        self.functions, self.queue, self.members = [Owner().times], collections.deque(terms()), {"height"}

    def forward(self, x: Tensor) -> Tensor:
        factor = sum(term.weight for term in (*self.terms, *self.pair, *self.queue))
        factor += self.slotted.weight + self.named.weight + self.named.term.weight + ("height" in self.members)
        for function in self.functions:
            factor = function(factor)
        return self.inner(x) * factor


OF_ATTRIBUTES: list[Callable[[Attributes], object]] = [
    lambda model: setattr(model.terms[1], "weight", 3.0),
    lambda model: setattr(model.pair[1], "weight", 3.0),
    lambda model: setattr(model.queue[1], "weight", 3.0),
    lambda model: setattr(model.slotted, "weight", 3.0),
    lambda model: setattr(model, "named", model.named._replace(weight=3.0)),
    lambda model: setattr(model.named.term, "weight", 3.0),
    lambda model: setattr(model.functions[0].__self__, "weight", 3.0),
    lambda model: model.members.clear(),
]


def losses(engine: Engine, graph: str, make: Callable[[], nn.Module], changes: list[Change]) -> tuple[Any, Any]:
    """Make four steps, then four more behind each change. Return the losses and weights, and the step."""
    torch.manual_seed(0)
    model = make().to(engine[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10, fused=True)
    step = ampkit.graphed_step(
        lambda model, x: model(x).square().mean(), model, optimizer, graph=graph, max_graphs=99, host_writes="ignore"
    )
    x, found = torch.rand(2, 4, generator=torch.Generator().manual_seed(1)).to(engine[0]), []
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.AmpkitWarning)
        for change in [lambda: None, *changes]:
            change()
            found += [step(x).loss.clone() for _ in range(4)]
    return [*found, *model.parameters()], step


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way != "by name")) for way in WAYS])
def test_a_change_is_noticed(way: str, engine: Engine) -> None:
    """R7: each change behind the first five steps is another graph, and the bits are those of eager steps."""
    read, values = WAYS[way]
    changes = [change for _, change in values.values()]
    results = []
    for graph in ("off", engine[1]):
        globals().update(W=SimpleNamespace(**{name: make() for name, (make, _) in values.items()}))
        found, step = losses(engine, graph, lambda: Holds(read), changes)
        results.append(found)
    assert_same(*results)
    missed = len(changes) - ("second" in values) + 1 - step.captures
    assert not missed, step.report()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_attributes_of_a_module(engine: Engine) -> None:
    """R7: the same where they are attributes of the model."""
    results = []
    for graph in ("off", engine[1]):
        models: list[Any] = []

        def make(models: list[Any] = models) -> nn.Module:
            models.append(Attributes())
            return models[0]

        changes: list[Change] = [
            functools.partial(lambda change, models: change(models[0]), change, models) for change in OF_ATTRIBUTES
        ]
        found, step = losses(engine, graph, make, changes)
        results.append(found)
    assert_same(*results)
    assert step.captures == len(OF_ATTRIBUTES) + 1, step.report()


class Hook:
    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self.weight


@pytest.mark.parametrize("engine", ENGINES)
def test_hooks_that_are_objects(engine: Engine) -> None:
    """R7: torch calls them, and each of one class is looked at."""
    results = []
    for graph in ("off", engine[1]):
        hooks = [Hook(), Hook()]

        def make(hooks: list[Hook] = hooks) -> nn.Module:
            model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            for module, hook in zip(model, hooks, strict=True):
                module.register_forward_hook(hook)
            return model

        changes: list[Change] = [functools.partial(setattr, hook, "weight", 3.0) for hook in hooks]
        found, step = losses(engine, graph, make, changes)
        results.append(found)
    assert_same(*results)
    assert step.captures == 3, step.report()


def reads_some() -> float:
    found = 0.0
    for term in W.terms:
        found = term(found + 1.0)
        W.history.append(term)
    found += times(1.0, W.state) + len(W.names)
    W.state.log.append(found)
    W.state.last = Term(found)
    W.table["calls"] = {"weight": found}
    return found + sum(entry for entry in W.table["fixed"])


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_not_a_change(engine: Engine) -> None:
    """What no code reads in an object that is given to others, and what the step itself changes in it."""
    changes: list[Change] = [
        lambda: setattr(W.terms[0], "unread", 1),
        lambda: setattr(W.state, "unread", 1),
        lambda: setattr(W.state, "more", 1),
        lambda: setattr(W.terms[1], "used", 1000),
        lambda: W.history.clear(),
        lambda: W.state.log.clear(),
        lambda: setattr(W, "terms", [*W.terms]),
        lambda: setattr(W, "names", {*W.names}),
        lambda: setattr(W, "other", Term()),
    ]
    results = []
    for graph in ("off", engine[1]):
        state = SimpleNamespace(weight=1.0, unread=0, log=[], last=None)
        globals().update(W=SimpleNamespace(terms=terms(), history=[], state=state, names={"a"}))
        W.table = {"calls": {"weight": 0.0}, "fixed": [1.0]}
        found, step = losses(engine, graph, lambda: Holds(reads_some), changes)
        results.append(found)
    assert_same(*results)
    assert (step.captures, step.replays) == (1, 4 * len(changes) + 1), step.report()
