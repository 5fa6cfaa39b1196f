"""How a policy's rules for operations cast: a function mode around autocast casts the inputs of calls to them."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, get_overridable_functions, resolve_name

from .._arguments import shortened, shown
from .._torch.compile import never_compile_by_itself
from .._torch.tensors.operators import nn_builtin
from .dtypes import CASTABLE

OpRule = torch.dtype | str  # the str is PROMOTE
OpRules = tuple[tuple[str, OpRule], ...]  # by a name that `op_name` returned
PROMOTE = "promote"

# The namespaces in which an operation has a function or a method. linalg.norm is another operation than norm, so linalg
# and fft stay in the name, as they do in ATen. torch.special has aliases only, and names that nothing else has.
_PREFIXES = {
    **dict.fromkeys(("", "torch", "torch.functional", "torch.special", "special"), ""),
    **dict.fromkeys(("torch.nn.functional", "nn.functional", "functional", "F", "torch.Tensor", "Tensor"), ""),
    **dict.fromkeys(("torch.linalg", "linalg"), "linalg_"),
    **dict.fromkeys(("torch.fft", "fft"), "fft_"),
}
# Names that torch's documentation calls aliases, and Python's operators, except those that assign.
_ALIASES = {
    **dict.fromkeys(("__add__", "__radd__"), "add"),
    **dict.fromkeys(("__sub__", "__rsub__", "rsub", "subtract"), "sub"),
    **dict.fromkeys(("__mul__", "__rmul__", "multiply"), "mul"),
    **dict.fromkeys(("__truediv__", "__rtruediv__", "__div__", "__rdiv__", "divide", "true_divide"), "div"),
    **dict.fromkeys(("__floordiv__", "__rfloordiv__"), "floor_divide"),
    **dict.fromkeys(("__mod__", "__rmod__"), "remainder"),
    **dict.fromkeys(("__matmul__", "__rmatmul__", "linalg_matmul"), "matmul"),
    **dict.fromkeys(("__pow__", "__rpow__"), "pow"),
    **dict.fromkeys(("__neg__", "negative"), "neg"),
    **dict.fromkeys(("__abs__", "absolute"), "abs"),
    **dict.fromkeys(("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")),
    **{"clip": "clamp", "concat": "cat", "concatenate": "cat", "expit": "sigmoid", "gammaln": "lgamma"},
}
_ALIASES.update({name: name.strip("_") for name, meant in _ALIASES.items() if meant is None})

# Operations that write running statistics into their arguments. If those were cast, the update would be lost in a copy.
# They take float32 weights and statistics with a low-precision input, so it is enough to cast the input.
_INPUT_ONLY = ("batch_norm", "instance_norm")
# Arguments with which a call writes into its inputs. Such a call is left alone, as autocast leaves it alone.
_MUTATING = ("out", "inplace", "max_norm")


def op_name(key: object) -> str:
    """Return the operation that a function, a method of Tensor, or a name of either stands for.

    Raises:
        ValueError: it stands for none that can have a rule. The message names similar ones.
    """
    if isinstance(key, str):
        found = _canonical(key)
    else:
        found = _names().get(key, "") if callable(key) else ""
    if found in _spellings():
        return found
    name = key if isinstance(key, str) else str(getattr(key, "__name__", "")) or shown(key)
    if isinstance(key, type) and issubclass(key, torch.nn.Module):
        raise ValueError(f"{name} is a module: give it a rule in Policy(modules=...).")
    last = name.rpartition(".")[2]
    plain = _ALIASES.get("__" + last.removeprefix("__i")) or last.rstrip("_")
    if last != plain and plain in _spellings():
        raise ValueError(
            f"{name} works in place, so a cast would make it write into a copy. Give {plain!r} a rule instead."
        )
    close = difflib.get_close_matches(plain, _spellings(), n=3)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise ValueError(f"{shortened(name)} is no function or Tensor method of torch that can have a rule.{hint}")


def _canonical(dotted: str) -> str:
    prefix, _, last = dotted.strip().rpartition(".")
    if prefix not in _PREFIXES:
        return ""
    last = last.removeprefix("special_")
    name = _PREFIXES[prefix] + last
    return _ALIASES.get(name) or name


@lru_cache(maxsize=1)
def _names() -> dict[Callable[..., Any], str]:
    """Return the operation that a function is, for all that function modes see, except those that write in place."""
    names = {}
    # torch leaves these out of its list, but function modes see them like the others, or else the builtin below.
    unlisted: list[Callable[..., Any]] = [F.hardswish, F.hardsigmoid, F.grouped_mm]
    for function in chain(*get_overridable_functions().values(), unlisted):
        dotted = resolve_name(function)
        name = _canonical(dotted) if dotted else ""
        if name and not name.startswith("_") and not name.endswith("_"):
            names[function] = name
    return names


@lru_cache(maxsize=1)
def _spellings() -> dict[str, frozenset[Callable[..., Any]]]:
    """Return all functions and methods by which each operation can be called."""
    found: dict[str, set[Callable[..., Any]]] = {}
    for function, name in _names().items():
        found.setdefault(name, set()).add(function)
    for name, functions in found.items():
        # torch.compile traces some Python functions (F.pad) down to the builtin that they call.
        if builtin := nn_builtin(name):
            functions.add(builtin)
    return {name: frozenset(functions) for name, functions in found.items()}


def define(ops: OpRules) -> None:
    """Prepare these rules for `op_rules_context`. torch.compile may trace that, so it can only look them up."""
    if ops not in _MODES:  # never emptied: compiled code is guarded by the type of the mode, which must stay alive
        table: dict[Callable[..., Any], _FunctionRule] = {}
        for name, rule in ops:
            for function in _spellings()[name]:
                try:
                    parameters = list(inspect.signature(function).parameters)
                    mutating = tuple((each, parameters.index(each)) for each in _MUTATING if each in parameters)
                except ValueError:  # builtins have no signature; they have `out` only, and it is keyword-only
                    mutating = (("out", _KEYWORD_ONLY),)
                table[function] = (rule, any(part in name for part in _INPUT_ONLY), mutating)
        in_python = tuple(item for item in table.items() if isinstance(item[0], FunctionType))
        members = {"table": table, "in_python": in_python, "__module__": __name__}
        _MODES[ops] = type("OpRules", (_OpRulesMode,), members)


@contextmanager
def op_rules_context(ops: OpRules, device_type: str, autocast: torch.autocast) -> Iterator[None]:
    """Context in which rules that `define` knows hold on one type of device, and `autocast` for other operations."""
    with autocast, _MODES[ops](device_type):
        yield


# The rule of a function; whether it holds for the first input only; the arguments with which a call
# writes into its inputs, and their positions.
_FunctionRule = tuple[OpRule, bool, tuple[tuple[str, int], ...]]


class _OpRulesMode(TorchFunctionMode):
    """Casts the inputs of calls that have a rule.

    Each set of rules is a subclass with the rules as class attributes, because torch.compile guards a mode by its type.
    """

    table: ClassVar[dict[Callable[..., Any], _FunctionRule]]
    in_python: ClassVar[tuple[tuple[Callable[..., Any], _FunctionRule], ...]]  # those of `table` written in Python

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, on cast inputs if it has a rule."""
        found = None
        if isinstance(func, FunctionType):
            # From torch 2.13 on, torch.compile does not find the function of an operator in the table, because it
            # computes another hash for it. An example is `1 - x`, which is Tensor.__rsub__.
            for function, its_rule in self.in_python:
                if func is function:
                    found = its_rule
                    break
        else:
            found = self.table.get(func)
        kwargs = kwargs or {}
        if found is None:
            return func(*args, **kwargs)
        rule, input_only, mutating = found
        for name, position in mutating:
            value = args[position] if position < len(args) else kwargs.get(name)
            if value is not None and value is not False:
                return func(*args, **kwargs)
        dtype = _widest((args, tuple(kwargs.values())), self.device_type) if isinstance(rule, str) else rule
        if dtype is not None and input_only and args:
            args = (_cast(args[0], dtype, self.device_type), *args[1:])
        elif dtype is not None and input_only:
            kwargs = {**kwargs, "input": _cast(kwargs.get("input"), dtype, self.device_type)}
        elif dtype is not None:
            args = _cast(args, dtype, self.device_type)
            kwargs = {name: _cast(value, dtype, self.device_type) for name, value in kwargs.items()}
        # Autocast has its own rule for many operations, and would cast the inputs again.
        with torch.autocast(self.device_type, enabled=False):
            return func(*args, **kwargs)


def _cast(value: Any, dtype: torch.dtype, device_type: str) -> Any:
    if isinstance(value, (list, tuple)):
        items = [_cast(item, dtype, device_type) for item in value]
        # A namedtuple is made from its fields by _make; its class takes them as separate arguments.
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    castable = isinstance(value, Tensor) and value.dtype in CASTABLE and value.device.type == device_type
    return value.to(dtype) if castable else value


def _widest(values: Any, device_type: str) -> torch.dtype | None:
    """Return the narrowest dtype that every castable tensor in `values` fits into, None if there is no such tensor."""
    widest = None
    for value in values:
        dtype = _widest(value, device_type) if isinstance(value, (list, tuple)) else None
        if isinstance(value, Tensor) and value.dtype in CASTABLE and value.device.type == device_type:
            dtype = value.dtype
        if dtype is not None:
            # Neither of float16 and bfloat16 holds all values of the other, so both together need float32.
            widest = dtype if widest is None or widest is dtype else torch.float32
    return widest


_KEYWORD_ONLY = 1 << 30  # a position that no call has
_MODES: dict[OpRules, type[_OpRulesMode]] = {}
never_compile_by_itself(_OpRulesMode.__torch_function__)
