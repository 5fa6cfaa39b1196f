"""The autocast rule of every operation, read from the dispatcher by watching what it casts."""

import json
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._arguments import check_choice
from .._torch.fake_tensors import fake_tensor_mode
from .._torch.modes import TorchDispatchMode
from .._torch.operators import METADATA_OPS, TO_COPY, has_overload, op_overload, op_schema, ops_with_kernel
from .._torch.tree import tree_flatten

# Rules in the order in which they are printed, and what each does. Inputs are the floating ones, but not float64.
RULES = {
    "lower": "inputs are cast to the autocast dtype",
    "float32": "inputs are cast to float32",
    "float32 dtype argument": "it runs with dtype=torch.float32, unless the caller passes a dtype",
    "promote": "inputs are cast to the widest dtype among them",
    "banned": "it raises an error that says what to use instead",
    "unknown": "it has an autocast kernel, but the rule could not be read",
}
DEVICE_TYPES = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}  # dispatch key of the autocast kernels
_LOW = torch.float16  # the autocast dtype of the probes; the rules do not depend on which low precision it is


@dataclass(frozen=True)
class OpTable(Mapping[str, str]):
    """The rule of each operation that has an autocast kernel: `table["aten::mm"] == "lower"`. Prints as a table.

    Args:
        device_type: "cuda" or "cpu".
        torch_version: the torch that it was read from.
        rules: operation (`aten::sum.dim_IntList`: name, then overload unless it is the default one) to rule: "lower",
            "float32", "float32 dtype argument", "promote", "banned" or "unknown".
        notes: for each operation whose rule was not read off itself, why, or where it is taken from.

    Raises:
        ValueError: a rule that is none of these.
    """

    device_type: str
    torch_version: str
    rules: Mapping[str, str]
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wrong = {op: rule for op, rule in self.rules.items() if rule not in RULES}
        if wrong:
            raise ValueError(f"OpTable(rules={wrong!r}): a rule is one of {', '.join(RULES)}.")
        object.__setattr__(self, "rules", MappingProxyType(dict(sorted(self.rules.items()))))
        object.__setattr__(self, "notes", MappingProxyType(dict(sorted(self.notes.items()))))

    def __getitem__(self, op: str) -> str:
        return self.rules[op]

    def __iter__(self) -> Iterator[str]:
        return iter(self.rules)

    def __len__(self) -> int:
        return len(self.rules)

    def __hash__(self) -> int:
        return hash((self.device_type, self.torch_version, tuple(self.rules.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        return OpTable, (self.device_type, self.torch_version, dict(self.rules), dict(self.notes))

    def __str__(self) -> str:
        return self.table()

    def by_rule(self) -> dict[str, list[str]]:
        """Return the operations of each rule that occurs, in the order in which rules are printed."""
        groups: dict[str, list[str]] = {rule: [] for rule in RULES}
        for op, rule in self.rules.items():
            groups[rule].append(op)
        return {rule: ops for rule, ops in groups.items() if ops}

    def table(self, width: int = 100) -> str:
        """Return the operations grouped by rule, in lines of at most `width` characters."""
        lines = [f"autocast on {self.device_type}, torch {self.torch_version}: {len(self)} operations"]
        for rule, ops in self.by_rule().items():
            title = f"{rule} ({len(ops)}): {RULES[rule]}"
            lines += ["", *textwrap.wrap(title, width, subsequent_indent="    ", break_on_hyphens=False)]
            names = ", ".join(op.removeprefix("aten::") for op in ops)
            wrapped = textwrap.wrap(names, width - 2, break_long_words=False, break_on_hyphens=False)
            lines += [f"  {line}" for line in wrapped]
        for note in dict.fromkeys(self.notes.values()):
            noted = ", ".join(op.removeprefix("aten::") for op, other in self.notes.items() if other == note)
            lines += ["", *textwrap.wrap(f"{noted}: {note}", width, break_long_words=False, break_on_hyphens=False)]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the table as JSON, which `from_json` reads."""
        whole = {"device_type": self.device_type, "torch": self.torch_version, "rules": dict(self.rules)}
        return json.dumps({**whole, "notes": dict(self.notes)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "OpTable":
        """Return the table that `to_json` wrote.

        Raises:
            ValueError: `text` is no such JSON.
        """
        try:
            read = json.loads(text)
            return cls(read["device_type"], read["torch"], dict(read["rules"]), dict(read.get("notes", {})))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"OpTable.from_json: expected what OpTable.to_json wrote, but {type(error).__name__}: {error}."
            ) from error

    def diff(self, other: "OpTable") -> "OpTableDiff":
        """Return what differs between this table and `other`: changed from this one's rule to the other's.

        Raises:
            ValueError: the tables are of different device types.
        """
        if self.device_type != other.device_type:
            raise ValueError(
                f"OpTable.diff: this table is of {self.device_type!r}, the other of {other.device_type!r}. "
                "The two devices have different rules; compare tables of one device."
            )
        changes = {
            op: (self.get(op), other.get(op))
            for op in sorted(self.rules.keys() | other.rules.keys())
            if self.get(op) != other.get(op)
        }
        return OpTableDiff(self.torch_version, other.torch_version, MappingProxyType(changes))


@dataclass(frozen=True)
class OpTableDiff:
    """What two tables of one device differ in. False if nothing does; prints a line per operation.

    Args:
        before: torch version of the first table.
        after: torch version of the second.
        changes: operation to (rule in the first, rule in the second); None where a table has no such operation.
    """

    before: str
    after: str
    changes: Mapping[str, tuple[str | None, str | None]]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def pins(self, compute: str) -> dict[str, str]:
        """Return `ops` for a `Policy` that keeps the first table's rules of the operations that changed.

        An operation that had no autocast kernel ran in its inputs' dtype; the nearest rule, `compute`, stands for that.
        What a policy cannot say is left out: banned operations, those of other libraries or with a private name, those
        whose rule is unknown, and overloads that the running torch does not have.

        Args:
            compute: name of the dtype that autocast lowers to.
        """
        rules = {None: compute, "lower": compute, "float32": "float32", "promote": "promote"}
        rules["float32 dtype argument"] = "float32"
        names = {op: op.partition("::")[2].partition(".")[0] for op in self.changes}
        return {
            names[op]: rules[old]
            for op, (old, _) in self.changes.items()
            if old in rules and op.startswith("aten::") and not names[op].startswith("_") and has_overload(op)
        }

    def __str__(self) -> str:
        if not self.changes:
            return f"torch {self.before} and torch {self.after}: the same rules"
        lines = [f"torch {self.before} -> torch {self.after}: {len(self.changes)} operations differ"]
        for op, (old, new) in self.changes.items():
            lines.append(f"  {op}: {old or 'no autocast kernel'} -> {new or 'no autocast kernel'}")
        return "\n".join(lines)


def op_table(device_type: str = "cuda") -> OpTable:
    """Return the autocast rule of every operation on this device, as the running torch has it.

    Nothing is listed by hand: which operations have an autocast kernel the dispatcher says, and the rule is seen by
    calling each on fake tensors and watching which casts come before it. So it holds for the torch that is installed,
    for operations that imported libraries registered, and for CUDA also without a GPU. Takes about a second.

    Args:
        device_type: "cuda" or "cpu".

    Raises:
        ValueError: another device type.

    Sync: none. Autocast state and modes are as before afterwards.
    """
    check_choice("op_table", "device_type", device_type, DEVICE_TYPES)
    rules: dict[str, str] = {}
    notes: dict[str, str] = {}
    for name in ops_with_kernel(DEVICE_TYPES[device_type]):
        try:
            rules[name], note = _Probe(name, device_type).rule()
        except Exception as error:  # whatever an operation of some other library does, it stays in the table
            rules[name], note = "unknown", _first_line(error)
        if note:
            notes[name] = note
    for name in notes:
        positional = _rule_of_siblings(name, rules)
        if positional:
            rules[name] = positional
            notes[name] = "the rule of its overload by position, as no fake tensor has dimension names"
    return OpTable(device_type, str(torch.__version__), rules, notes)


def _rule_of_siblings(name: str, rules: Mapping[str, str]) -> str | None:
    """Return the one rule that an operation's other overloads have, if `name` is an overload by dimension name.

    Named tensors do not pass through dispatch modes, so a dtype argument added to such an overload is not seen. Casts
    are: they come before it looks for the name.
    """
    if not any(map(_is_dimension_name, op_schema(op_overload(name)).arguments)):
        return None
    packet = name.partition(".")[0]
    siblings = {rule for op, rule in rules.items() if op.partition(".")[0] == packet} - {"unknown"}
    return siblings.pop() if siblings == {"float32 dtype argument"} else None


@dataclass(frozen=True)
class _Seen:
    """What one call did before its first operation: casts (from, to), that operation's other arguments, the error."""

    casts: "Counter[tuple[torch.dtype, torch.dtype]]"
    arguments: tuple[Any, ...] | None = None  # of the first operation; None where there came none
    error: str = ""


def _asks_for_float32(low: _Seen, plain: _Seen) -> bool:
    """Return whether autocast added `dtype=torch.float32`, or what became of it: softmax passes half_to_float=True."""
    if low.arguments is None or plain.arguments is None:
        return False
    added = Counter(map(repr, low.arguments)) - Counter(map(repr, plain.arguments))
    return "torch.float32" in added or "True" in added


class _Probe:
    """Calls one operation, with and without autocast, and tells its rule."""

    def __init__(self, name: str, device_type: str) -> None:
        self._op = op_overload(name)
        self._device_type = device_type

    def rule(self) -> tuple[str, str]:
        """Return the rule, and if it is "unknown" the reason."""
        with torch.inference_mode(False), fake_tensor_mode():  # inference mode hides casts from dispatch modes
            return self._rule()

    def _rule(self) -> tuple[str, str]:
        down, up = (torch.float32, _LOW), (_LOW, torch.float32)
        # Low-precision weights first: with float32 ones _cudnn_rnn would ask the device for its layout of them.
        mixed = self._casts_of_autocast(*down)
        if mixed[down] or self._casts_of_autocast(torch.float32)[down]:
            return "lower", ""
        low, plain = self._see((_LOW,), True), self._see((_LOW,), False)
        if (low.casts - plain.casts)[up]:
            return "float32", ""
        if (mixed + self._casts_of_autocast(*up))[up]:
            return "promote", ""
        if _asks_for_float32(low, plain):
            return "float32 dtype argument", ""
        if low.error and low.error != plain.error:
            return "banned", ""
        return "unknown", low.error or "with autocast it does what it does without"

    def _casts_of_autocast(self, *dtypes: torch.dtype) -> "Counter[tuple[torch.dtype, torch.dtype]]":
        return self._see(dtypes, True).casts - self._see(dtypes, False).casts

    def _see(self, dtypes: tuple[torch.dtype, ...], enabled: bool) -> _Seen:
        """Call the operation on tensors of these dtypes (the last one for the rest), up to its first real step."""
        made = iter(dtypes)

        def tensor() -> Tensor:
            return torch.empty(2, 2, 2, device=self._device_type, dtype=next(made, dtypes[-1]))

        args, kwargs = _arguments(self._op, tensor)
        watch = _Watch()
        try:
            with warnings.catch_warnings(), _autocast_state(self._device_type, enabled), watch:
                warnings.simplefilter("ignore")
                # Called inside a binding of torch: elsewhere a warning of C++ goes to stderr, past Python's filters.
                with _Instead(lambda: self._op(*args, **kwargs)):
                    torch.add(0, 0)
        except _StopError as stop:
            return _Seen(watch.casts, stop.arguments)
        except Exception as error:
            return _Seen(watch.casts, error=_first_line(error))
        return _Seen(watch.casts)


class _StopError(Exception):
    """The operation that the probed call came down to is reached."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.arguments = arguments


class _Watch(TorchDispatchMode):
    """Counts the casts that come before the first other operation, and stops the call there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts: Counter[tuple[torch.dtype, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA_OPS:
            return func(*args, **kwargs)
        if func is TO_COPY:
            result = func(*args, **kwargs)
            self.casts[args[0].dtype, result.dtype] += 1
            return result
        leaves, _ = tree_flatten((func, args, kwargs))
        raise _StopError(tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves))


class _Instead(TorchFunctionMode):
    """Calls `function` in place of the next torch function, inside that one's binding."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self._function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._function()


# Arguments whose kernels check them before they cast: four weights per layer and no projection in _cudnn_rnn, an
# equation for any number of operands, a norm that exists, different dimensions to reduce.
_BY_NAME: dict[str, Any] = {"weight_stride0": 4, "proj_size": 0, "equation": "...,...->...", "ord": "fro", "dim": 1}


def _arguments(op: Any, tensor: Callable[[], Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments of the types that the schema asks for. Shapes hardly matter: casts come before the checks."""
    args, kwargs = [], {}
    for parameter in op_schema(op).arguments:
        value = _argument(parameter, tensor)
        if parameter.kwarg_only:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    return args, kwargs


def _is_dimension_name(parameter: Any) -> bool:
    return "dim" in parameter.name and str(parameter.type) in ("str", "List[str]")


def _argument(parameter: Any, tensor: Callable[[], Tensor]) -> Any:
    kind = str(parameter.type)
    if kind == "Tensor":
        return tensor()
    if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
        return [tensor(), tensor()]
    if _is_dimension_name(parameter):
        return "dimname::A" if kind == "str" else ["dimname::A"]
    if parameter.name in _BY_NAME and kind in ("int", "Optional[int]", "str"):
        return _BY_NAME[parameter.name]
    if parameter.has_default_value():
        return parameter.default_value
    if kind.startswith("Optional"):
        return None
    if kind.startswith("List["):
        return [1] * (parameter.N or 2)
    return {"int": 1, "number": 1, "float": 1.0, "bool": False, "str": "none"}[kind]


@contextmanager
def _autocast_state(device_type: str, enabled: bool) -> Iterator[None]:
    """Set autocast without `torch.autocast`, which switches itself off where there is no CUDA device."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.set_autocast_enabled(device_type, enabled)
    torch.set_autocast_dtype(device_type, _LOW)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])
        torch.set_autocast_cache_enabled(cached)


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
