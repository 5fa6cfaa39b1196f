"""A policy: the dtypes of parameters, operations, modules and outputs as one frozen value, and its form as text."""

import difflib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import nn

from .._arguments import check_device_type, check_instance, listed, shortened, shown
from .._text import dtype_name
from . import module_rules
from .dtypes import DTYPES, as_dtype, canonical_name
from .float8 import IF_FASTER, RECIPES, as_float8
from .module_rules import ModuleKey, ModuleRule, ModuleRules, class_named, key_text, module_key, rule_text
from .op_rules import PROMOTE, OpRule, OpRules, define, op_name, op_rules_context

ROUNDINGS = ("stochastic", "kahan")
# Names of whole policies: (params, compute, output). Those with a hyphen are Lightning's `Trainer(precision=...)`.
_POLICIES = {
    "float32": ("float32", "float32", "float32"),
    "float16": ("float32", "float16", "float32"),
    "bfloat16": ("float32", "bfloat16", "float32"),
    "32-true": ("float32", "float32", "float32"),
    "16-mixed": ("float32", "float16", "float32"),
    "bf16-mixed": ("float32", "bfloat16", "float32"),
    "16-true": ("float16", "float16", "float16"),
    "bf16-true": ("bfloat16", "bfloat16", "bfloat16"),
    **{name: ("float32", name, "float32") for name in ("float8", *RECIPES)},
}

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, init=False)
class Policy:
    """The dtypes of a mixed-precision step. Hashable; `Policy.parse(str(policy)) == policy`.

    Args:
        params: dtype of the parameters, and so of gradients and optimizer state. `apply` casts to it. A step casts
            nothing to it, but raises if the parameters have another dtype.
        compute: dtype that autocast runs matrix multiplications and convolutions in. If it equals `params`, autocast is
            off, and every operation runs in the dtype of its inputs. Left out it is float32; with `rounding`, that of
            `params`. "float8" (or a recipe, as in `modules`) stands for bfloat16, with Linear layers in float8 where a
            `graphed_step` finds that faster: it is the rule "float8_if_faster" for the model itself, whose key is `""`.
        output: dtype of the floating tensors that a step returns (loss and aux), and of a model's outputs after
            `apply`.
        ops: rules for single operations. They hold inside `autocast`. A key is a function of torch, a method of Tensor,
            or the name of either, and stands for the operation in every spelling (`torch.add`, `x.add(y)`, `x + y`).
            The value is the dtype that floating inputs are cast to, or "promote": the widest dtype among them. Calls
            that write into an input (`add_`, `x += y`, `out=`, `inplace=True`) are left alone, as autocast leaves them.
        modules: rules for modules. They hold after `apply`. A key is a class of modules (its subclasses too), the path
            of one module (`"head"`), or a regular expression that matches whole paths (`r"blocks\\.\\d+\\.mlp"`). The
            value is the dtype that the module, and everything that it calls, computes in. Or it is a recipe of torchao
            for the Linear layers in it: "float8_tensorwise" ("float8"), "float8_rowwise" or
            "float8_rowwise_with_gw_hp"; with "_if_faster" at its end, a `graphed_step` chooses the layers by timing
            (docs/low-precision.md).
        rounding: how `graphed_step` rounds new values of bfloat16 parameters, which it computes in float32.
            "stochastic": up or down at random, so that the expected value is the value. "kahan": to nearest, and the
            optimizer keeps what that has taken off. None: as torch's optimizer does. Needs `params="bfloat16"`.

    A dtype is a `torch.dtype` or its name: float32, float16 or bfloat16.

    Attributes:
        ops: the rules as sorted pairs of operation and dtype or "promote"; `dict(policy.ops)` is a dict.
        modules: the rules as sorted pairs of class or string and dtype, or name of a recipe.

    Raises:
        ValueError: an unknown dtype, operation or key, two rules for one operation, float32 compute over low-precision
            parameters (autocast only ever lowers), a rule for `linear` beside a float8 rule, or a rounding of other
            parameters than bfloat16.
    """

    params: torch.dtype
    compute: torch.dtype
    output: torch.dtype
    ops: OpRules
    modules: tuple[tuple[ModuleKey, ModuleRule], ...]
    rounding: str | None

    def __init__(
        self,
        params: torch.dtype | str = torch.float32,
        compute: torch.dtype | str | None = None,
        output: torch.dtype | str = torch.float32,
        ops: Mapping[Any, torch.dtype | str] | Iterable[tuple[Any, torch.dtype | str]] = (),
        modules: Mapping[Any, torch.dtype | str] | Iterable[tuple[Any, torch.dtype | str]] = (),
        rounding: str | None = None,
    ) -> None:
        if compute is None:
            compute = torch.float32 if rounding is None else params
        float8 = as_float8(compute)
        for name, value in {"params": params, "compute": "bfloat16" if float8 else compute, "output": output}.items():
            object.__setattr__(self, name, _dtype(name, value))
        for name, rules, checked in (("ops", ops, _op_rules), ("modules", modules, _module_rule_pairs)):
            pairs = listed(rules.items() if isinstance(rules, Mapping) else rules)
            if pairs is None or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
                raise ValueError(f"Policy({name}={shown(rules)}): expected a dict of rules. {_LEGAL}")
            if name == "modules" and float8:
                pairs = [*pairs, ("", float8.removesuffix(IF_FASTER) + IF_FASTER)]
            object.__setattr__(self, name, checked(pairs))
        if self.compute is torch.float32 and self.params is not torch.float32:
            low, whole = dtype_name(self.params), "16-true" if self.params is torch.float16 else "bf16-true"
            raise ValueError(
                f"Policy(params={low}, compute=float32): autocast cannot raise a dtype. Write Policy.parse({low!r}) "
                f"for float32 parameters that compute in {low}, or Policy.parse({whole!r}) for {low} parameters."
            )
        if "linear" in dict(self.ops) and any(isinstance(rule, str) for _, rule in self.modules):
            raise ValueError(
                f"Policy(ops={{'linear': {rule_text(dict(self.ops)['linear'])}}}): a layer in float8 calls no "
                "operation of this name. Leave out this rule, or the float8 rule."
            )
        if rounding is not None and (rounding not in ROUNDINGS or self.params is not torch.bfloat16):
            raise ValueError(
                f"Policy(params={dtype_name(self.params)}, rounding={shown(rounding)}): expected "
                f"{' or '.join(map(repr, ROUNDINGS))}, with params='bfloat16'; or None."
            )
        object.__setattr__(self, "rounding", rounding)
        if self.ops:
            define(self.ops)

    def __reduce__(self) -> tuple[type["Policy"], tuple[Any, ...]]:
        # Another process calls __init__, which defines the rules for operations there.
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    @classmethod
    def parse(cls, text: str) -> "Policy":
        r"""Return the policy that `text` names.

        Args:
            text: one of

                - a dtype for a float32 model under autocast: `float16`, `bfloat16`, `float32`;
                - Lightning's name: `16-mixed`, `bf16-mixed`, `32-true`, `bf16-true`, `16-true`;
                - another common name of a dtype: `fp16`, `half`, `bf16`, `fp32`, `torch.float16`;
                - fields: `params=float32,compute=float16,output=float32`. A dtype that is left out is float32, but with
                  `rounding` `compute` is that of `params`;

                `rounding=stochastic` or `rounding=kahan` may follow, too. Names of dtypes, policies and fields may have
                capital letters. Rules follow in braces, after a name or after fields, and are written as in Python:
                `bfloat16,ops={softmax:float32,add:promote},modules={torch.nn.LayerNorm:float32,"head":float32}`.
                A class of modules is written with its full name, and its module is imported. A path or a regular
                expression is written in double quotes. A backslash means itself there, and `""` is one double quote.

        Raises:
            ValueError: `text` is none of these. The message lists what is legal.
        """
        if not isinstance(text, str):
            dtype = as_dtype(text)
            meant = f" Did you mean {dtype_name(dtype)!r}?" if dtype is not None else ""
            raise ValueError(f"Policy.parse({shown(text)}): expected a string, got {type(text).__name__}.{meant}")
        values: dict[str, Any] = {}
        parts = _split(text, text)
        if (name := canonical_name(parts[0])) in _POLICIES:
            values.update(zip(("params", "compute", "output"), _POLICIES[name], strict=True))
            del parts[0]
        for part in parts:
            key, equals, value = (piece.strip() for piece in part.partition("="))
            key = key.lower()
            problem = ""
            if not equals:
                problem = f"{shown(part)} is not a policy.{_meant(part, (*_POLICIES, 'half'))}"
            elif key in values:
                problem = f"{shown(key)} is given twice."
            elif key not in _FIELDS:
                problem = f"{shown(key)} is not a field of Policy.{_meant(key, _FIELDS)}"
            if problem:
                raise ValueError(f"Policy.parse({shown(text)}): {problem} {_LEGAL}")
            if key == "rounding":
                values[key] = value.lower()
            elif key in _RULE_FIELDS:
                values[key] = _rules(text, key, value)
            else:
                values[key] = as_float8(value) or _dtype(key, value)
        return cls(**values)

    def __str__(self) -> str:
        texts = [f"{key}={dtype_name(getattr(self, key))}" for key in ("params", "compute", "output")]
        if self.ops:
            rules = (f"{name}:{rule_text(rule)}" for name, rule in self.ops)
            texts.append("ops={" + ",".join(rules) + "}")
        if self.modules:
            rules = (f"{key_text(key)}:{rule_text(rule)}" for key, rule in self.modules)
            texts.append("modules={" + ",".join(rules) + "}")
        texts += [f"rounding={self.rounding}"] if self.rounding else []
        return ",".join(texts)

    @property
    def needs_scaling(self) -> bool:
        """True if gradients pass through float16, where those below 2**-24 vanish without a loss scale."""
        return torch.float16 in (self.compute, *(rule for _, rule in (*self.ops, *self.modules)))

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """Return a context in which operations run in `compute`, or as their rule in `ops` says. Enter it once.

        Args:
            device_type: "cuda", "cpu", as `torch.autocast` takes it.

        Raises:
            ValueError: autocast knows no such device.

        If `compute` equals `params`, the context switches autocast *off*, so that an autocast around it has no effect
        inside. Rules for operations hold in both cases.

        The context holds for the thread that enters it, as autocast does. `torch.compile` compiles code once more for
        each other policy that it runs under.
        """
        if not isinstance(device_type, str) or device_type not in ("cuda", "cpu"):
            check_device_type("Policy.autocast", device_type)
        if self.compute is self.params:
            autocast = torch.autocast(device_type, enabled=False)
        else:
            # Autocast's cache of cast weights has no dtypes in its keys. Inside an autocast to another dtype it would
            # return weights in that dtype, so it is off there.
            other = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) is not self.compute
            autocast = torch.autocast(device_type, dtype=self.compute, cache_enabled=False if other else None)
        return op_rules_context(self.ops, device_type, autocast) if self.ops else autocast

    def apply(self, model: Model) -> Model:
        """Make `model` follow this policy: cast its parameters, install the rules of `modules`, cast its outputs.

        Args:
            model: changed in place. Applying the same policy again changes nothing. Applying another one replaces it.
                Wrap the model (torch.compile, DistributedDataParallel) after this.

        Returns:
            `model`. It and the modules with a rule become instances of subclasses of their classes, with the same
            names. It can be copied, pickled, compiled and wrapped as before, and `state_dict` has the same keys.

        Parameters are cast to `params`, in place, so that an optimizer over them stays valid. With low-precision
        `params`, a module with a rule has parameters of the rule's dtype instead. Buffers get the dtype of their
        module's parameters, except integers and float64.

        A module with a rule gets its floating inputs in the rule's dtype. If its parameters have that dtype, it runs
        without autocast, otherwise under autocast to that dtype. Inside it, another module with a rule follows its own
        one. The floating outputs of `model` are cast to `output`. Inputs and outputs may be in tuples, lists, dicts
        and namedtuples. Outside of modules with a rule, autocast is as the caller sets it: `policy.autocast`, or the
        step, which enters it.

        Raises:
            ValueError: a rule matches no module, or two rules with different dtypes match one module. The path of a
                module wins over other rules. A class does not win over a regular expression, nor the reverse. Or no
                layer can follow a float8 rule; a warning lists single layers that cannot.
            ImportError: a rule names a float8 recipe, and torchao is not installed.
        """
        check_instance("Policy.apply", "model", model, nn.Module, "a torch.nn.Module")
        module_rules.apply(model, ModuleRules(self.modules, self.params, self.output))
        return model

    def remove(self, model: Model) -> Model:
        """Undo `apply`: modules get their own classes back, and parameters and buffers their earlier dtypes.

        Args:
            model: changed in place. Values that were rounded to a narrower dtype stay rounded.

        Returns:
            `model`.

        Raises:
            ValueError: this policy is not applied to `model`.
        """
        check_instance("Policy.remove", "model", model, nn.Module, "a torch.nn.Module")
        module_rules.remove(model, ModuleRules(self.modules, self.params, self.output))
        return model


def read_policy(where: str, value: Any) -> Policy | None:
    """Return the policy that a public function `where` was given, as a policy, text or None."""
    if value is None or isinstance(value, Policy):
        return value
    try:
        return Policy.parse(value)
    except ValueError as error:
        raise ValueError(f"{where}(policy={shown(value)}): {error}") from None


def changes_model(policy: Policy) -> bool:
    """Return whether `Policy.apply` has more to do than to cast outputs: rules for modules, or another dtype."""
    return bool(policy.modules or policy.params is not torch.float32)


_FIELDS = tuple(field.name for field in fields(Policy))
_RULE_FIELDS = ("ops", "modules")
_LEGAL = (
    f"Legal: {', '.join(_POLICIES)}, or a list like 'params=float32,compute=float16,output=float32' "
    f"with the dtypes {', '.join(DTYPES)}; rules follow as in "
    "'ops={softmax:float32,add:promote},modules={torch.nn.LayerNorm:float32,\"head\":float32}'."
)


def _meant(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the known name that is closest to this one, "" if none is close."""
    close = difflib.get_close_matches(canonical_name(name), list(known), n=1)
    return f" Did you mean {canonical_name(close[0])!r}?" if close else ""


def _dtype(field: str, value: object) -> torch.dtype:
    dtype = as_dtype(value)
    if dtype is None:
        legal = (*DTYPES, *(("float8", *RECIPES) if field in ("compute", "modules") else ()))
        meant = _meant(value, (*legal, "half")) if isinstance(value, str) else ""
        if isinstance(value, str) and (canonical_name(value) in _POLICIES or "=" in value):
            meant = f" Write Policy.parse({shown(value)})."
        raise ValueError(f"Policy({field}={shown(value)}): expected one of {', '.join(legal)}.{meant} {_LEGAL}")
    return dtype


def _op_rules(pairs: list[tuple[Any, Any]]) -> OpRules:
    rules: dict[str, OpRule] = {}
    for key, value in pairs:
        try:
            name = op_name(key)
        except ValueError as error:
            raise ValueError(f"Policy(ops={{{shown(key)}: ...}}): {error}") from None
        rule = value if value == PROMOTE else as_dtype(value)
        if rule is None:
            legal = ", ".join((*DTYPES, PROMOTE))
            raise ValueError(f"Policy(ops={{{shown(key)}: {shown(value)}}}): expected one of {legal}.")
        if rules.setdefault(name, rule) != rule:
            raise ValueError(
                f"Policy(ops=...): {rule_text(rules[name])} and {rule_text(rule)} for {name!r}. "
                "A function and its name stand for the operation in every spelling: give it one rule."
            )
    return tuple(sorted(rules.items()))


def _module_rule_pairs(pairs: list[tuple[Any, Any]]) -> tuple[tuple[ModuleKey, ModuleRule], ...]:
    rules: dict[ModuleKey, ModuleRule] = {}
    for key, value in pairs:
        try:
            module, rule = module_key(key), as_float8(value) or _dtype("modules", value)
        except ValueError as error:
            raise ValueError(f"Policy(modules={{{shown(key)}: {shown(value)}}}): {error}") from None
        if (other := rules.setdefault(module, rule)) != rule:
            raise ValueError(f"Policy(modules=...): {rule_text(other)} and {value} for {shown(key)}. Give it one rule.")
    return tuple(sorted(rules.items(), key=lambda pair: key_text(pair[0])))


def _split(text: str, whole: str) -> list[str]:
    """Split at the commas that are not in braces or quotes."""
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
    """Return the rules that are written in braces as pairs for `Policy(ops=...)` or `Policy(modules=...)`."""
    if not (value.startswith("{") and value.endswith("}")):
        problem = f"{field}={shortened(value)} is not a list of rules in braces."
        raise ValueError(f"Policy.parse({shown(text)}): {problem} {_LEGAL}")
    rules: list[tuple[Any, str]] = []
    for part in _split(value[1:-1], text) if value[1:-1].strip() else []:
        key, colon, rule = (piece.strip() for piece in part.rpartition(":"))
        if not colon:
            raise ValueError(f"Policy.parse({shown(text)}): {shown(part)} is not a rule. {_LEGAL}")
        written: ModuleKey = key
        if field == "modules" and len(key) > 1 and key.startswith('"') and key.endswith('"'):
            written = key[1:-1].replace('""', '"')
        elif field == "modules":
            try:
                written = class_named(key)
            except ValueError as error:
                quoted = "A path or a pattern stands in double quotes."
                raise ValueError(f"Policy.parse({shown(text)}): {error} {quoted}") from None
        rules.append((written, rule))
    return rules
