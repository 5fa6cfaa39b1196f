"""Which Linear layers compute in float8, and why the others do not."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from .._errors import AmpkitWarning
from .._torch.tensors.modules import module_tables
from .._user_line import users_level
from .dtypes import CASTABLE
from .float8 import IF_FASTER, MULTIPLE, RECIPES, Float8Forward, chooses, float8_forward, rows_of

PLAIN = "not float8"
NOT_TIMED = "not chosen yet: graphed_step times it behind its first call"
_SHOWN = 4  # layers in a message
_SEEN: list[dict[nn.Module, int]] = []  # what each `noting_rows` has noted
_EXPECTED: "WeakSet[nn.Module]" = WeakSet()  # the layers that a step is to choose


class Float8Choice(NamedTuple):
    """What a Linear layer under a float8 rule computes in."""

    form: str  # a recipe; `PLAIN`; or the rule that leaves it to timing, as long as nothing is chosen
    reason: str
    sizes: tuple[int, int, int] | None = None  # rows, inputs and outputs of the product that was timed
    ms: tuple[float, float] | None = None  # of forward and backward, without float8 and with it


def first_choices(
    paths: Mapping[nn.Module, list[str]],
    chosen: Mapping[nn.Module, torch.dtype | str],
    original: Callable[[nn.Module], type[nn.Module]],
) -> dict[str, Float8Choice]:
    """Return by path the layers under a float8 rule, with what is known of them before any call.

    Args:
        paths: the modules of the model, each with its paths.
        chosen: the modules that have a rule themselves, and the rule. That of the innermost module holds.
        original: returns the class of a module without any rule.

    Raises:
        ImportError: a rule names a recipe, and there is no torchao.
        ValueError: no layer can follow a rule that names a recipe; or a module has two paths, and the modules around it
            different rules.
    """
    if not any(isinstance(rule, str) for rule in chosen.values()):
        return {}
    at = {path: module for module, names in paths.items() for path in names}
    linears = [module for module in paths if isinstance(module, nn.Linear)]
    owners = Counter(id(param) for module in paths for param in module_tables(module)[0].values() if param is not None)
    choices: dict[str, Float8Choice] = {}
    left_out: dict[str, str] = {}  # by path, of the layers that were to compute in float8: why they do not
    for module in linears:
        names = paths[module]
        rules, around = zip(*(_innermost(path, at, chosen) for path in names), strict=True)
        if not any(isinstance(rule, str) for rule in rules):
            continue
        if len(set(rules)) > 1:
            raise ValueError(f"{' and '.join(names)} are one module, under different rules. Give both the same.")
        recipe, is_open = rules[0].removesuffix(IF_FASTER), chooses(rules[0])
        reason = why_not_float8(module, original(module))
        if is_open and not set(around) & set(names):  # else the rule names the layer itself
            reason = reason or "it is the first Linear layer" * (module is linears[0])
            reason = reason or "it is the last Linear layer, the head" * (module is linears[-1])
            reason = reason or "another module has the same weight" * (owners[id(module.weight)] > 1)
        missing = "" if reason else _why_no_torchao(recipe, must=not is_open)
        if missing or (reason and not is_open):
            left_out[names[0]] = missing or reason
        choice = Float8Choice(rules[0], NOT_TIMED) if is_open else Float8Choice(recipe, "the policy names it")
        choices[names[0]] = Float8Choice(PLAIN, reason or missing) if reason or missing else choice
    texts = [f"{path}: {reason}" for path, reason in left_out.items()]
    shown = "; ".join(texts[:_SHOWN]) + f"; and {len(texts) - _SHOWN} more" * (len(texts) > _SHOWN)
    forced = any(isinstance(rule, str) and not chooses(rule) for rule in chosen.values())
    if forced and not any(choice.form in RECIPES for choice in choices.values()):
        raise ValueError(f"a float8 rule matches no nn.Linear that can have it. {shown or 'There is none inside.'}.")
    if texts:
        warnings.warn(f"Policy.apply: no float8 for {shown}.", AmpkitWarning, stacklevel=users_level())
    return choices


def _innermost(path: str, at: Mapping[str, nn.Module], chosen: Mapping[nn.Module, Any]) -> tuple[Any, str]:
    """Return the rule of the innermost module around a path that has one, and its path."""
    while path and at[path] not in chosen:
        path = path.rpartition(".")[0]
    return chosen.get(at[path]), path


def why_not_float8(module: nn.Linear, kind: type[nn.Module]) -> str:
    """Return why a layer, of this class without rules, cannot compute in float8; "" if it can."""
    weight = module_tables(module)[0].get("weight")
    if kind is not nn.Linear:
        return f"it is a {kind.__name__}, whose forward may be another one than that of nn.Linear"
    if "forward" in vars(module):
        return "something put a forward on it"
    if not isinstance(weight, nn.Parameter) or hasattr(weight, "__tensor_flatten__") or weight.dtype not in CASTABLE:
        return "its weight is not an ordinary parameter"
    if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
        return f"its sizes, {module.in_features} and {module.out_features}, are not multiples of {MULTIPLE}"
    return ""


def _why_no_torchao(recipe: str, *, must: bool) -> str:
    try:
        float8_forward(recipe)
    except ImportError as error:
        if must:
            raise
        return str(error)
    return ""


@contextmanager
def noting_rows() -> Iterator[dict[nn.Module, int]]:
    """Context that yields a dict, in which each layer that is not chosen notes how many rows it gets first."""
    seen: dict[nn.Module, int] = {}
    _SEEN.append(seen)
    try:
        yield seen
    finally:
        _SEEN[:] = [each for each in _SEEN if each is not seen]


def expect_choice(layers: Iterable[nn.Module]) -> None:
    """Take note that a step is going to choose these layers."""
    _EXPECTED.update(layers)


def undecided_forward(module: nn.Linear, input: Tensor) -> Tensor:
    """Do the forward of a layer that is not chosen, and note its rows."""
    if module.training and not torch.compiler.is_compiling():
        if not _SEEN and module not in _EXPECTED:
            warnings.warn(
                "a Linear layer has a float8 rule that chooses by timing, which graphed_step does behind its first "
                "call. Here it computes without float8. Name the layers: Policy(modules={'blocks.*.mlp': 'float8'}).",
                AmpkitWarning,
                stacklevel=users_level(),
            )
        for seen in _SEEN:
            seen.setdefault(module, rows_of(input))
    return nn.Linear.forward(module, input)


def forward_of(form: str) -> Float8Forward:
    """Return the forward of a layer with this form."""
    return float8_forward(form) if form in RECIPES else undecided_forward
