"""The autocast rule of every operation: each one is called on fake tensors, and the casts before it are watched."""

import json
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._arguments import check_choice
from .._text import error_line
from .._torch.tensors.fake_tensors import fake_tensor_mode
from .._torch.tensors.modes import TorchDispatchMode
from .._torch.tensors.operators import METADATA_OPS, TO_COPY, op_overload, op_schema, ops_with_kernel
from .._torch.tensors.tree import tree_flatten

# Each rule and what it does, in the order of printing. "Inputs" are the floating tensors, except float64.
RULES = {
    "lower": "inputs are cast to the autocast dtype",
    "float32": "inputs are cast to float32",
    "float32 dtype argument": "it runs with dtype=torch.float32, unless the caller passes a dtype",
    "promote": "inputs are cast to the widest dtype among them",
    "banned": "it raises an error that says what to use instead",
    "unknown": "it has an autocast kernel, but the rule could not be read",
}
DEVICE_TYPES = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}  # to the dispatch key of its autocast kernels
_LOW = torch.float16  # the autocast dtype of the calls here; a rule is the same for float16 and bfloat16


@dataclass(frozen=True)
class OpTable(Mapping[str, str]):
    """The rule of each operation that has an autocast kernel: `table["aten::mm"] == "lower"`. Prints as a table.

    Args:
        device_type: "cuda" or "cpu".
        torch_version: the torch that it was read from.
        rules: the rule of each operation. An operation is written as `aten::sum.dim_IntList`, the default overload
            without its name. A rule is "lower", "float32", "float32 dtype argument", "promote", "banned" or "unknown".
        notes: for each operation whose own call did not show its rule, why, or which operation the rule comes from.

    Raises:
        ValueError: a rule is none of these.
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

    def __str__(self) -> str:
        return self.table()

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
        """Return the operations whose rule differs: the rule in this table, then the rule in `other`.

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
    """The differences between two tables of one device. It is false if there are none, and prints a line for each.

    Args:
        before: torch version of the first table.
        after: torch version of the second table.
        changes: for each operation that differs, its rule in the first and in the second table. A rule is None if that
            table does not have the operation.
    """

    before: str
    after: str
    changes: Mapping[str, tuple[str | None, str | None]]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def pins(self, compute: str) -> dict[str, str]:
        """Return `ops` for a `Policy` that gives the operations that changed their rules from the first table.

        An operation that had no autocast kernel ran in the dtype of its inputs. The rule that comes nearest to that is
        `compute`. Rules that a policy cannot have are left out: those of banned operations, of other libraries, of
        operations with a private name, unknown ones, and those of overloads that the running torch does not have.

        Args:
            compute: name of the dtype that autocast lowers to.
        """
        rules = {None: compute, "lower": compute, "float32": "float32", "promote": "promote"}
        rules["float32 dtype argument"] = "float32"
        found = {}
        for op, (old, _) in self.changes.items():
            name = op.partition("::")[2].partition(".")[0]
            if old in rules and op.startswith("aten::") and not name.startswith("_"):
                with suppress(AttributeError):  # the running torch does not have this overload
                    op_overload(op)
                    found[name] = rules[old]
        return found

    def __str__(self) -> str:
        if not self.changes:
            return f"torch {self.before} and torch {self.after}: the same rules"
        lines = [f"torch {self.before} -> torch {self.after}: {len(self.changes)} operations differ"]
        for op, (old, new) in self.changes.items():
            lines.append(f"  {op}: {old or 'no autocast kernel'} -> {new or 'no autocast kernel'}")
        return "\n".join(lines)


def op_table(device_type: str = "cuda") -> OpTable:
    """Return the autocast rule of every operation on this device, in the torch that is running.

    The dispatcher lists the operations that have an autocast kernel. Each is called on fake tensors, and the casts that
    autocast puts before it show its rule. So the table holds for the torch that is installed, it has the operations
    that imported libraries registered, and that for CUDA needs no GPU. It takes about a second.

    Args:
        device_type: "cuda" or "cpu".

    Raises:
        ValueError: another device type.

    Sync: none. The autocast state and the modes are the same afterwards.
    """
    check_choice("op_table", "device_type", device_type, DEVICE_TYPES)
    rules: dict[str, str] = {}
    notes: dict[str, str] = {}
    for name in ops_with_kernel(DEVICE_TYPES[device_type]):
        try:
            rules[name], note = _Probe(op_overload(name), device_type).rule()
        except Exception as error:  # an operation of another library may do anything, and belongs into the table
            rules[name], note = "unknown", error_line(error)
        if note:
            notes[name] = note
    for name in notes:
        # Named tensors do not pass through dispatch modes. Other rules can be seen all the same: autocast casts before
        # the operation looks for the name.
        packet = name.partition(".")[0]
        siblings = {rule for op, rule in rules.items() if op.partition(".")[0] == packet} - {"unknown"}
        by_dimension_name = any(map(_is_dimension_name, op_schema(op_overload(name)).arguments))
        if by_dimension_name and siblings == {"float32 dtype argument"}:
            rules[name] = "float32 dtype argument"
            notes[name] = "the rule of its overload by position, as no fake tensor has dimension names"
    return OpTable(device_type, str(torch.__version__), rules, notes)


@dataclass(frozen=True)
class _Observed:
    """What one call did, up to the first operation that is no cast."""

    casts: "Counter[tuple[torch.dtype, torch.dtype]]"  # from and to
    arguments: tuple[Any, ...] | None = None  # of that operation, without tensors; None if it was not reached
    error: str = ""


@dataclass(frozen=True, eq=False)
class _Probe:
    """Finds the rule of one operation by calling it with and without autocast."""

    _op: Any
    _device_type: str

    def rule(self) -> tuple[str, str]:
        """Return the rule, and if it is "unknown" the reason."""
        down, up = (torch.float32, _LOW), (_LOW, torch.float32)
        with torch.inference_mode(False), fake_tensor_mode():  # inference mode hides casts from dispatch modes
            # Low-precision weights come first: with float32 ones _cudnn_rnn would ask the device how to lay them out.
            mixed = self._casts_of_autocast(*down)
            if mixed[down] or self._casts_of_autocast(torch.float32)[down]:
                return "lower", ""
            low, plain = self._call((_LOW,), True), self._call((_LOW,), False)
            if (low.casts - plain.casts)[up]:
                return "float32", ""
            if (mixed + self._casts_of_autocast(*up))[up]:
                return "promote", ""
        if low.arguments is not None and plain.arguments is not None:
            added = Counter(map(repr, low.arguments)) - Counter(map(repr, plain.arguments))
            if "torch.float32" in added or "True" in added:  # or softmax's half_to_float, which follows from it
                return "float32 dtype argument", ""
        if low.error and low.error != plain.error:
            return "banned", ""
        return "unknown", low.error or "autocast changes nothing about the call"

    def _casts_of_autocast(self, *dtypes: torch.dtype) -> "Counter[tuple[torch.dtype, torch.dtype]]":
        return self._call(dtypes, True).casts - self._call(dtypes, False).casts

    def _call(self, dtypes: tuple[torch.dtype, ...], enabled: bool) -> _Observed:
        """Call the operation on tensors of these dtypes, and end the call after the casts.

        If it takes more tensors, they have the last of the dtypes.
        """
        made = iter(dtypes)

        args, kwargs = _arguments(
            self._op, lambda: torch.empty(2, 2, 2, device=self._device_type, dtype=next(made, dtypes[-1]))
        )
        counter = _CastCounter()
        try:
            with warnings.catch_warnings(), _autocast_state(self._device_type, enabled), counter:
                warnings.simplefilter("ignore")
                # The call runs inside torch.add. Elsewhere a warning of C++ code would be printed, not filtered here.
                with _CallInstead(lambda: self._op(*args, **kwargs)):
                    torch.add(0, 0)
        except _StopError as stop:
            return _Observed(counter.casts, stop.args)
        except Exception as error:
            return _Observed(counter.casts, error=error_line(error))
        return _Observed(counter.casts)


class _StopError(Exception):
    """Ends a call at the first operation that is no cast. It has the arguments of that one, without tensors."""


class _CastCounter(TorchDispatchMode):
    """Counts the casts before the first other operation, and ends the call there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
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
        raise _StopError(*(None if isinstance(leaf, Tensor) else leaf for leaf in leaves))


class _CallInstead(TorchFunctionMode):
    """Calls `function` when a torch function is called, from within the C++ binding of the latter."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self._function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._function()


# Arguments that kernels check before they cast. _cudnn_rnn wants four weights for each layer and no projection, einsum
# an equation for any number of operands, a norm the name of one, and a reduction different dimensions.
_BY_NAME: dict[str, Any] = {"weight_stride0": 4, "proj_size": 0, "equation": "...,...->...", "ord": "fro", "dim": 1}


def _arguments(op: Any, tensor: Callable[[], Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments of the types in the schema. Most shapes are wrong, but casts come before torch checks them."""
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
    """Context with autocast on or off. `torch.autocast` would switch itself off where there is no CUDA device."""
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
