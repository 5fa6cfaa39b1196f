"""Which dtype parameters, operations, modules and outputs have: one frozen value, and how it is written as text."""

import difflib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import nn

from .._arguments import check_device_type, check_instance, shortened, shown
from .._precision import module_rules as _module_rules
from .module_rules import ModuleKey, ModuleRules, class_name, class_named, module_key
from .op_rules import PROMOTE, OpRule, OpRules, define, op_name, op_rules_context

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# What other libraries call these dtypes. Capital letters and "torch." count for nothing.
_ALIASES = {
    **dict.fromkeys(("fp32", "f32", "float", "single"), "float32"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    "bf16": "bfloat16",
}

# Whole policies by one name: (params, compute, output). The second row of names is Lightning's
# `Trainer(precision=...)`.
_WHOLE = {
    "float32": ("float32", "float32", "float32"),
    "float16": ("float32", "float16", "float32"),
    "bfloat16": ("float32", "bfloat16", "float32"),
    "32-true": ("float32", "float32", "float32"),
    "16-mixed": ("float32", "float16", "float32"),
    "bf16-mixed": ("float32", "bfloat16", "float32"),
    "16-true": ("float16", "float16", "float16"),
    "bf16-true": ("bfloat16", "bfloat16", "bfloat16"),
}

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, init=False)
class Policy:
    """The dtypes of a mixed-precision step. Hashable; `Policy.parse(str(policy)) == policy`.

    Args:
        params: dtype of the parameters, hence of gradients and optimizer state. `apply` casts to it; a step only checks
            it.
        compute: dtype that autocast runs matrix multiplications and convolutions in. Where it equals `params`
            autocast is off and every operation runs in its inputs' dtype.
        output: dtype of the floating tensors that a step returns (loss and aux), and a model after `apply`.
        ops: rules for single operations, in force inside `autocast`. A key is a function of torch, a method of Tensor,
            or the name of either; it stands for the operation in every spelling (`torch.add`, `x.add(y)`, `x + y`). The
            value is the dtype that floating inputs are cast to, or "promote": the widest among them. Forms that write
            into an input (`add_`, `x += y`, `out=`, `inplace=True`) are left alone, as autocast leaves them.
        modules: rules for modules, in force after `apply`. A key is a class of modules (its subclasses too), the path
            of one module (`"head"`), or a regular expression that matches whole paths (`r"blocks\\.\\d+\\.mlp"`). The
            value is the dtype that the module and all that it calls compute in.

    A dtype is a `torch.dtype` or its name: float32, float16 or bfloat16.

    Attributes:
        ops: the rules as sorted pairs of operation and dtype or "promote"; `dict(policy.ops)` is a dict.
        modules: the rules as sorted pairs of class or string and dtype.

    Raises:
        ValueError: an unknown dtype, operation or key, two rules for one operation, or float32 compute over
            low-precision parameters (autocast only ever lowers).
    """

    params: torch.dtype
    compute: torch.dtype
    output: torch.dtype
    ops: OpRules
    modules: tuple[tuple[ModuleKey, torch.dtype], ...]

    def __init__(
        self,
        params: torch.dtype | str = torch.float32,
        compute: torch.dtype | str = torch.float32,
        output: torch.dtype | str = torch.float32,
        ops: Mapping[Any, torch.dtype | str] | Iterable[tuple[Any, torch.dtype | str]] = (),
        modules: Mapping[Any, torch.dtype | str] | Iterable[tuple[Any, torch.dtype | str]] = (),
    ) -> None:
        for name, value in {"params": params, "compute": compute, "output": output}.items():
            object.__setattr__(self, name, _dtype(name, value))
        object.__setattr__(self, "ops", _op_rules(_pairs("ops", ops)))
        object.__setattr__(self, "modules", _module_rule_pairs(_pairs("modules", modules)))
        if self.compute is torch.float32 and self.params is not torch.float32:
            raise ValueError(
                f"Policy(params={_NAMES[self.params]}, compute=float32): autocast cannot raise a dtype. "
                f"Use params=float32, or compute={_NAMES[self.params]}."
            )
        if self.ops:
            define(self.ops)

    def __reduce__(self) -> tuple[type["Policy"], tuple[Any, ...]]:
        # Through __init__, which defines the op rules in the other process.
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    @classmethod
    def parse(cls, text: str) -> "Policy":
        r"""Return the policy that `text` names.

        Args:
            text: one of

                - a dtype for a float32 model under autocast: `float16`, `bfloat16`, `float32`;
                - Lightning's name: `16-mixed`, `bf16-mixed`, `32-true`, `bf16-true`, `16-true`;
                - another common name of a dtype: `fp16`, `half`, `bf16`, `fp32`, `torch.float16`;
                - fields: `params=float32,compute=float16,output=float32`, where what is left out is float32.

                Names of dtypes, policies and fields may have capital letters. Rules follow in braces, behind a name as
                behind fields. They read as in Python:
                `bfloat16,ops={softmax:float32,add:promote},modules={torch.nn.LayerNorm:float32,"head":float32}`.
                A class of modules stands there with its full name, which is imported. A path or a regular expression
                stands in double quotes; a backslash means itself there, and `""` is one double quote.

        Raises:
            ValueError: `text` is none of these. The message lists what is legal.
        """
        if not isinstance(text, str):
            meant = f" Did you mean {_NAMES[text]!r}?" if isinstance(text, torch.dtype) and text in _NAMES else ""
            raise ValueError(f"Policy.parse({shown(text)}): expected a string, got {type(text).__name__}.{meant}")
        values: dict[str, Any] = {}
        parts = _split(text, text)
        if _plain(parts[0]) in _WHOLE:
            values.update(zip(("params", "compute", "output"), _WHOLE[_plain(parts.pop(0))], strict=True))
        for part in parts:
            key, equals, value = (piece.strip() for piece in part.partition("="))
            key = key.lower()
            if not equals or key not in _KEYS or key in values:
                raise ValueError(f"Policy.parse({shown(text)}): {_problem(part, key, equals, values)} {_LEGAL}")
            values[key] = _rules(text, key, value) if key in _RULED else _dtype(key, value)
        return cls(**values)

    def __str__(self) -> str:
        texts = [f"{key}={_NAMES[getattr(self, key)]}" for key in ("params", "compute", "output")]
        if self.ops:
            texts.append("ops={" + ",".join(f"{name}:{_written(rule)}" for name, rule in self.ops) + "}")
        if self.modules:
            texts.append("modules={" + ",".join(f"{_shown(key)}:{_NAMES[rule]}" for key, rule in self.modules) + "}")
        return ",".join(texts)

    @property
    def needs_scaling(self) -> bool:
        """True if gradients pass through float16, where those below 2**-24 vanish without a loss scale."""
        return torch.float16 in (self.compute, *(rule for _, rule in (*self.ops, *self.modules)))

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """Return a new context, to be entered once, in which operations run in `compute` or by their rule in `ops`.

        Args:
            device_type: "cuda", "cpu", as `torch.autocast` takes it.

        Raises:
            ValueError: autocast knows no such device.

        A policy without autocast (`compute` equal to `params`) returns a context that switches autocast *off*, so that
        the caller's own autocast does not leak into the step. Rules for operations hold either way.

        Like autocast the context belongs to the thread that enters it. Code that `torch.compile` compiled is compiled
        again for another policy.
        """
        if not isinstance(device_type, str) or device_type not in ("cuda", "cpu"):
            check_device_type("Policy.autocast", device_type)
        if self.compute is self.params:
            autocast = torch.autocast(device_type, enabled=False)
        else:
            # The weight cache does not know dtypes: inside of autocast to another one it would serve that one's copies.
            other = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) is not self.compute
            autocast = torch.autocast(device_type, dtype=self.compute, cache_enabled=False if other else None)
        return op_rules_context(self.ops, device_type, autocast) if self.ops else autocast

    def apply(self, model: Model) -> Model:
        """Make `model` follow this policy: cast its parameters, install the rules of `modules`, cast its outputs.

        Args:
            model: changed in place. Applying a policy again changes nothing; applying another one replaces it. Wrappers
                (torch.compile, DistributedDataParallel) come after.

        Returns:
            `model`. Its class and that of the modules with a rule are subclasses of what they were, of the same name.
            It can be copied, pickled, compiled and wrapped as before, and `state_dict` has the same keys.

        Parameters are cast to `params`, in place, so that an optimizer over them stays valid. With low-precision
        `params` a module with a rule has parameters of the rule's dtype instead. Buffers go along with the parameters
        of their module, integers and float64 excepted.

        A module with a rule gets its floating inputs in the rule's dtype and runs without autocast if its parameters
        have that dtype, else under autocast of that dtype. Inside another such module its own rule holds. The floating
        outputs of `model` are cast to `output`. Tensors in tuples, lists, dicts and namedtuples are inputs and outputs,
        too. Autocast for the rest is the caller's: `policy.autocast`, or the step.

        Raises:
            ValueError: a rule matches no module, or two rules that disagree match one. The path of a module wins over
                other rules; between a class and a regular expression, or two of a kind, nothing does.
        """
        check_instance("Policy.apply", "model", model, nn.Module, "a torch.nn.Module")
        _module_rules.apply(model, self._rules_for_modules())
        return model

    def remove(self, model: Model) -> Model:
        """Undo `apply`: the classes of all modules are what they were, and so are the dtypes that it changed.

        Args:
            model: changed in place. Values that were rounded to a narrower dtype stay rounded.

        Returns:
            `model`.

        Raises:
            ValueError: this policy is not applied to `model`.
        """
        check_instance("Policy.remove", "model", model, nn.Module, "a torch.nn.Module")
        _module_rules.remove(model, self._rules_for_modules())
        return model

    def _rules_for_modules(self) -> ModuleRules:
        return ModuleRules(self.modules, self.params, self.output)


def read_policy(where: str, value: Any) -> Policy | None:
    """Return the policy that a public function `where` was given, as a policy, text or None.

    Raises:
        ValueError: it is none of these.
    """
    if value is None or isinstance(value, Policy):
        return value
    try:
        return Policy.parse(value)
    except ValueError as error:
        raise ValueError(f"{where}(policy={shown(value)}): {error}") from None


_KEYS = tuple(field.name for field in fields(Policy))
_RULED = ("ops", "modules")
_LEGAL = (
    f"Legal: {', '.join(_WHOLE)}, or a list like 'params=float32,compute=float16,output=float32' "
    f"with the dtypes {', '.join(_DTYPES)}; rules follow as in "
    "'ops={softmax:float32,add:promote},modules={torch.nn.LayerNorm:float32,\"head\":float32}'."
)


def _problem(part: str, key: str, equals: str, seen: dict[str, Any]) -> str:
    if not equals:
        return f"{shown(part)} is not a policy.{_meant(part, (*_WHOLE, 'half'))}"
    if key in seen:
        return f"{key!r} is given twice."
    return f"{shown(key)} is not a field of Policy.{_meant(key, _KEYS)}"


def _plain(name: str) -> str:
    """Return a name of a dtype, or of a whole policy, as it is listed."""
    name = name.strip().lower().removeprefix("torch.")
    return _ALIASES.get(name, name)


def _meant(name: str, known: Iterable[str]) -> str:
    """Return a question that has the known name that looks most like this one, "" if none does."""
    close = difflib.get_close_matches(_plain(name), list(known), n=1)
    return f" Did you mean {_ALIASES.get(close[0], close[0])!r}?" if close else ""


def _dtype(field: str, value: object) -> torch.dtype:
    dtype = _DTYPES.get(_plain(value)) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in _NAMES:
        meant = _meant(value, (*_DTYPES, "half")) if isinstance(value, str) else ""
        raise ValueError(f"Policy({field}={shown(value)}): expected one of {', '.join(_DTYPES)}.{meant} {_LEGAL}")
    return dtype


def _pairs(field: str, rules: Any) -> list[tuple[Any, Any]]:
    try:
        pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
    except TypeError:  # it cannot be iterated over
        pairs = [rules]
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"Policy({field}={shown(rules)}): expected a dict of rules. {_LEGAL}")
    return pairs


def _op_rules(pairs: list[tuple[Any, Any]]) -> OpRules:
    rules: dict[str, OpRule] = {}
    for key, value in pairs:
        try:
            name = op_name(key)
        except ValueError as error:
            raise ValueError(f"Policy(ops={{{shown(key)}: ...}}): {error}") from None
        known = _DTYPES.get(_plain(value)) if isinstance(value, str) else value
        if value != PROMOTE and not (isinstance(known, torch.dtype) and known in _NAMES):
            legal = ", ".join((*_DTYPES, PROMOTE))
            raise ValueError(f"Policy(ops={{{shown(key)}: {shown(value)}}}): expected one of {legal}.")
        rule = value if value == PROMOTE else _dtype("ops", value)
        if rules.setdefault(name, rule) != rule:
            raise ValueError(
                f"Policy(ops=...): {_written(rules[name])} and {_written(rule)} for {name!r}. "
                "A function and its name stand for the operation in every spelling: give it one rule."
            )
    return tuple(sorted(rules.items()))


def _module_rule_pairs(pairs: list[tuple[Any, Any]]) -> tuple[tuple[ModuleKey, torch.dtype], ...]:
    rules: dict[ModuleKey, torch.dtype] = {}
    for key, value in pairs:
        try:
            rule = rules.setdefault(module_key(key), _dtype("modules", value))
        except ValueError as error:
            raise ValueError(f"Policy(modules={{{shown(key)}: {shown(value)}}}): {error}") from None
        if rule is not _dtype("modules", value):
            raise ValueError(f"Policy(modules=...): {_NAMES[rule]} and {value} for {shown(key)}.")
    return tuple(sorted(rules.items(), key=lambda pair: _shown(pair[0])))


def _written(rule: OpRule) -> str:
    return rule if isinstance(rule, str) else _NAMES[rule]


def _shown(key: ModuleKey) -> str:
    return class_name(key) if isinstance(key, type) else '"' + key.replace('"', '""') + '"'


def _split(text: str, whole: str) -> list[str]:
    """Split at the commas outside of braces and quotes."""
    parts, depth, quoted = [""], 0, False
    for char in text:
        quoted ^= char == '"'
        depth += 0 if quoted else (char == "{") - (char == "}")
        if char == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += char
    if depth or quoted:
        raise ValueError(f"Policy.parse({shown(whole)}): {'a quote' if quoted else 'a brace'} is not closed. {_LEGAL}")
    return [part.strip() for part in parts]


def _rules(text: str, field: str, value: str) -> list[tuple[Any, str]]:
    """Return the rules in braces as pairs that `Policy` takes."""
    if not (value.startswith("{") and value.endswith("}")):
        problem = f"{field}={shortened(value)} is not a list of rules in braces."
        raise ValueError(f"Policy.parse({shown(text)}): {problem} {_LEGAL}")
    rules = []
    for part in _split(value[1:-1], text) if value[1:-1].strip() else []:
        key, colon, rule = (piece.strip() for piece in part.rpartition(":"))
        if not colon:
            raise ValueError(f"Policy.parse({shown(text)}): {shown(part)} is not a rule. {_LEGAL}")
        rules.append((key if field == "ops" else _written_key(text, key), rule))
    return rules


def _written_key(text: str, key: str) -> ModuleKey:
    if len(key) > 1 and key.startswith('"') and key.endswith('"'):
        return key[1:-1].replace('""', '"')
    try:
        return class_named(key)
    except ValueError as error:
        raise ValueError(f"Policy.parse({shown(text)}): {error} A path or a pattern stands in double quotes.") from None
