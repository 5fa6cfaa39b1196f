"""Ways in which a step reads a value of the host: how the value is made, how it is read, and how it changes."""

import collections
import ctypes
import dataclasses
import datetime
import enum
import functools
import multiprocessing
import sys
import types
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

SETTINGS: Any = types.ModuleType("settings_of_a_test")
SETTINGS.__file__ = __file__
sys.modules["settings_of_a_test"] = SETTINGS


class Kind(enum.Enum):
    CE = 1
    KL = 2


class Key:
    pass


class Numbers(list[float]):
    pass


class Names(set[str]):
    pass


@dataclasses.dataclass
class Config:
    scale: float = 1.0


class Single:
    _one: Any = None

    def __new__(cls) -> "Single":
        if cls._one is None:
            cls._one = super().__new__(cls)
            cls._one.scale = 1.0
        return cls._one


class Lazy:
    raw = 1.0

    @functools.cached_property
    def scale(self) -> float:
        return self.raw


class Base:
    scale = 1.0

    def get(self) -> float:
        return 1.0


class Child(Base):
    def up(self) -> float:
        return super().scale


class Other(Base):
    def get(self) -> float:
        return 3.0


def by_default(x: float = 1.0, *, y: float = 1.0) -> float:
    return x * y


def import_module() -> float:
    import settings_of_a_test  # type: ignore[import-not-found]

    return settings_of_a_test.scale


def import_name() -> float:
    from settings_of_a_test import scale

    return scale


def matched(value: Any) -> float:
    match value:
        case Config(scale=found):
            return found
    raise AssertionError


def made(value: Any, /, **attributes: Any) -> Any:
    """Return an object with these attributes."""
    for name, found in attributes.items():
        setattr(value, name, found)
    return value


def renew(function: Any, value: float) -> None:
    """Give a function other code, as IPython's autoreload does."""
    function.__code__ = (lambda: 1.0).__code__ if value == 1.0 else (lambda: 3.0).__code__


def one() -> float:
    return 1.0


KEY = Key()
# How a value is made, how the step reads it, how it changes, from 1 to 3.
CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], object]]] = {
    "dict by Enum": (lambda: {Kind.CE: 1.0}, lambda w: w[Kind.CE], lambda w: w.update({Kind.CE: 3.0})),
    "dict by class": (lambda: {int: 1.0}, lambda w: w[int], lambda w: w.update({int: 3.0})),
    "dict by object": (lambda: {KEY: 1.0}, lambda w: w[KEY], lambda w: w.update({KEY: 3.0})),
    "dict by pair": (lambda: {(1, "a"): 1.0}, lambda w: w[1, "a"], lambda w: w.update({(1, "a"): 3.0})),
    "class of lists": (lambda: Numbers([1.0]), lambda w: w[0], lambda w: w.__setitem__(0, 3.0)),
    "class of sets": (Names, lambda w: 3.0 if "a" in w else 1.0, lambda w: w.add("a")),
    "objects in a set": (
        lambda: {made(Base(), scale=1.0)},  # the case of `super` leaves its class another one
        lambda w: sum(o.scale for o in w),
        lambda w: made(next(iter(w)), scale=3.0),
    ),
    "tensors in a set": (lambda: {torch.zeros(2)}, len, lambda w: w.update({torch.zeros(2), torch.zeros(2)})),
    "dict by tensor": (
        lambda: {torch.zeros(2): 1.0},
        lambda w: next(iter(w.values())),
        lambda w: (w.clear(), w.update({torch.zeros(2): 3.0})),
    ),
    "import": (lambda: made(SETTINGS, scale=1.0), lambda w: import_module(), lambda w: made(SETTINGS, scale=3.0)),
    "import a name": (lambda: made(SETTINGS, scale=1.0), lambda w: import_name(), lambda w: made(SETTINGS, scale=3.0)),
    "singleton": (lambda: made(Single(), scale=1.0), lambda w: Single().scale, lambda w: made(Single(), scale=3.0)),
    "vars": (Config, lambda w: sum(vars(w).values()), lambda w: w.__init__(3.0)),
    "astuple": (Config, lambda w: dataclasses.astuple(w)[0], lambda w: w.__init__(3.0)),
    "match": (Config, matched, lambda w: w.__init__(3.0)),
    "cached property": (Lazy, lambda w: w.scale, lambda w: made(w, raw=3.0).__dict__.pop("scale", None)),
    "defaultdict": (lambda: collections.defaultdict(lambda: 1.0), lambda w: w["a"], lambda w: w.update(a=3.0)),
    "partial": (lambda: functools.partial(by_default, x=1.0), lambda w: w(), lambda w: w.keywords.update(x=3.0)),
    "class": (Base, lambda w: w.get(), lambda w: made(w, __class__=Other)),
    "super": (lambda: made(Base, scale=1.0) and Child(), lambda w: w.up(), lambda w: made(Base, scale=3.0)),
    "defaults": (
        lambda: made(by_default, __defaults__=(1.0,)),
        lambda w: by_default(),
        lambda w: made(by_default, __defaults__=(3.0,)),
    ),
    "defaults by name": (
        lambda: by_default.__kwdefaults__.update(y=1.0),
        lambda w: by_default(),
        lambda w: by_default.__kwdefaults__.update(y=3.0),
    ),
    "code": (lambda: renew(one, 1.0), lambda w: one(), lambda w: renew(one, 3.0)),
    "date": (
        lambda: types.SimpleNamespace(day=datetime.date(2000, 1, 1)),
        lambda w: float(w.day.day),
        lambda w: made(w, day=datetime.date(2000, 1, 3)),
    ),
    "path": (
        lambda: types.SimpleNamespace(file=PurePath("a")),
        lambda w: len(w.file.name),
        lambda w: made(w, file=PurePath("abc")),
    ),
    "multiprocessing.Value": (
        lambda: multiprocessing.Value("d", 1.0),
        lambda w: w.value,
        lambda w: made(w, value=3.0),
    ),
    "ctypes": (lambda: ctypes.c_double(1.0), lambda w: w.value, lambda w: made(w, value=3.0)),
    "order of a dict": (
        lambda: {"a": 1.0, "b": 3.0},
        lambda w: next(iter(w.values())),
        lambda w: w.update(a=w.pop("a")),
    ),
    "attribute of a tensor": (
        lambda: made(torch.ones(2), scale=1.0),
        lambda w: w.scale,
        lambda w: made(w, scale=3.0),
    ),
    "method of a dict": (lambda: {"a": 1.0}.get, lambda w: w("a"), lambda w: w.__self__.update(a=3.0)),
    "lr of another optimizer": (
        lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0),
        lambda w: w.param_groups[0]["lr"],
        lambda w: w.param_groups[0].update(lr=3.0),
    ),
}
