"""The autocast rule of every operation: each one is called on fake tensors, and the casts before it are watched."""

import json
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .._arguments import check_choice
from .._text import error_line
from .._torch.tensors.fake_tensors import autocast_without_cuda, fake_tensor_mode
from .._torch.tensors.modes import TorchDispatchMode
from .._torch.tensors.operators import METADATA_OPS, TO_COPY, call_from_binding, op_overload, op_schema, ops_with_kernel
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
    with autocast_without_cuda() if device_type == "cuda" else nullcontext():
        for name in ops_with_kernel(DEVICE_TYPES[device_type]):
            try:
                rules[name], note = _rule(op_overload(name), device_type)
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


def _rule(op: Any, device_type: str) -> tuple[str, str]:
    """Call an operation with and without autocast. Return its rule, and if that is "unknown" the reason."""
    call = partial(_watched_call, op, device_type)

    def casts_of_autocast(*dtypes: torch.dtype) -> "Counter[tuple[torch.dtype, torch.dtype]]":
        return call(dtypes, True).casts - call(dtypes, False).casts

    down, up = (torch.float32, _LOW), (_LOW, torch.float32)
    with torch.inference_mode(False), fake_tensor_mode():  # inference mode hides casts from dispatch modes
        # Low-precision weights come first: with float32 ones _cudnn_rnn would ask the device how to lay them out.
        mixed = casts_of_autocast(*down)
        if mixed[down] or casts_of_autocast(torch.float32)[down]:
            return "lower", ""
        low, plain = call((_LOW,), True), call((_LOW,), False)
        if (low.casts - plain.casts)[up]:
            return "float32", ""
        if (mixed + casts_of_autocast(*up))[up]:
            return "promote", ""
    if low.arguments is not None and plain.arguments is not None:
        added = Counter(map(repr, low.arguments)) - Counter(map(repr, plain.arguments))
        if "torch.float32" in added or "True" in added:  # or softmax's half_to_float, which follows from it
            return "float32 dtype argument", ""
    if low.error and low.error != plain.error:
        return "banned", ""
    return "unknown", low.error or "autocast changes nothing about the call"


def _watched_call(op: Any, device_type: str, dtypes: tuple[torch.dtype, ...], enabled: bool) -> "_CastCounter":
    """Call an operation on tensors of these dtypes (of the last one, if it takes more), and end the call after casts.

    The shapes of most arguments are wrong, but casts come before torch checks them.
    """
    made = iter(dtypes)

    def tensor() -> Tensor:
        return torch.empty(2, 2, 2, device=device_type, dtype=next(made, dtypes[-1]))

    parameters = op_schema(op).arguments
    args = [_argument(parameter, tensor) for parameter in parameters if not parameter.kwarg_only]
    kwargs = {parameter.name: _argument(parameter, tensor) for parameter in parameters if parameter.kwarg_only}
    counter = _CastCounter()
    autocast = torch.autocast(device_type, dtype=_LOW, enabled=enabled, cache_enabled=False)
    try:
        with warnings.catch_warnings(), autocast, counter:
            warnings.simplefilter("ignore")
            # Called in another way, a warning of C++ code would be printed, not filtered here.
            call_from_binding(op, (), tuple(args), kwargs)
    except _StopError:
        pass
    except Exception as error:
        counter.error = error_line(error)
    return counter


class _StopError(Exception):
    """Ends a call at the first operation that is no cast."""


class _CastCounter(TorchDispatchMode):
    """Counts the casts before the first other operation, and ends the call there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.casts: Counter[tuple[torch.dtype, torch.dtype]] = Counter()  # from and to
        self.arguments: list[Any] | None = None  # of the other operation, without tensors; None if it was not reached
        self.error = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not TO_COPY and func not in METADATA_OPS:
            leaves, _ = tree_flatten((func, args, kwargs))
            self.arguments = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            raise _StopError
        result = func(*args, **kwargs)
        if func is TO_COPY:
            self.casts[args[0].dtype, result.dtype] += 1
        return result


# Arguments that kernels check before they cast. _cudnn_rnn wants four weights for each layer and no projection, einsum
# an equation for any number of operands, a norm the name of one, and a reduction different dimensions.
_BY_NAME: dict[str, Any] = {"weight_stride0": 4, "proj_size": 0, "equation": "...,...->...", "ord": "fro", "dim": 1}


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
