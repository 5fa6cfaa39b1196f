"""How rules for modules get onto a model and off again: each module with a rule becomes one of a subclass."""

import difflib
import importlib
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._text import dtype_name
from .._torch.tensors.modules import module_tables
from .._torch.tensors.tree import tree_flatten, tree_unflatten
from .dtypes import CASTABLE
from .float8 import RECIPES, chooses
from .float8_layers import PLAIN, Float8Choice, first_choices, forward_of

ModuleKey = type[nn.Module] | str
ModuleRule = torch.dtype | str  # a string is a float8 rule

APPLIED = "_ampkit_applied"  # an attribute of the module that `apply` was called with


class ModuleRules(NamedTuple):
    """The part of a policy that `Policy.apply` puts on a model."""

    rules: tuple[tuple[ModuleKey, ModuleRule], ...]
    params: torch.dtype
    output: torch.dtype


class _ForwardRule(NamedTuple):
    """What one module's forward does in addition."""

    compute: torch.dtype | None  # the dtype of inputs and computation, None for that of the code around the module
    autocast: bool  # whether it runs under autocast to `compute`, because its parameters have another dtype
    outside: torch.dtype  # the dtype that the code around the module computes in if there is no autocast
    output: torch.dtype | None  # the dtype of outputs, for the module that `apply` was called with
    float8: str | None = None  # the `Float8Choice.form` of a layer under a float8 rule, None for other modules


class _Applied(NamedTuple):
    rules: ModuleRules
    dtypes: dict[str, torch.dtype]  # by path: what the parameters and buffers that were cast had before
    layers: dict[str, Float8Choice]  # by path: the layers under a float8 rule


def module_key(key: object) -> ModuleKey:
    """Return `key` if a rule can have it: a class of modules, a path, or a regular expression. Raise otherwise."""
    if isinstance(key, type) and issubclass(key, nn.Module):
        return key
    if not isinstance(key, str):
        raise ValueError("expected a class of modules, a path, or a regular expression.")
    try:
        re.compile(key)
    except (re.error, OverflowError) as error:
        raise ValueError(f"not a regular expression: {error}.") from None
    return key


def key_text(key: ModuleKey) -> str:
    """Return a key as the text of a policy has it: the name of a class, or a string in double quotes."""
    if not isinstance(key, type):
        return '"' + key.replace('"', '""') + '"'
    in_nn = getattr(nn, key.__name__, None) is key
    return f"torch.nn.{key.__name__}" if in_nn else f"{key.__module__}.{key.__qualname__}"


def rule_text(rule: ModuleRule) -> str:
    """Return a rule as the text of a policy has it."""
    return rule if isinstance(rule, str) else dtype_name(rule)


def class_named(name: str) -> type[nn.Module]:
    """Return the class of modules with this full name, whose module is imported. Raise if there is none."""
    parts = name.split(".")
    if all(part.isidentifier() for part in parts):
        for cut in range(len(parts) - 1, 0, -1):
            try:
                found: Any = importlib.import_module(".".join(parts[:cut]))
            except ImportError:
                continue
            for part in parts[cut:]:
                found = getattr(found, part, None)
            if isinstance(found, type) and issubclass(found, nn.Module):
                return found
    raise ValueError(f"{name!r} is not the full name of a class of modules, such as torch.nn.LayerNorm.")


def apply(model: nn.Module, wanted: ModuleRules) -> None:
    """Put rules on `model`, replacing earlier ones, and cast its tensors. If it raises, the model is unchanged."""
    known = {path: layer for path, layer in float8_layers(model, wanted).items() if not chooses(layer.form)}
    rules, tensors, layers = _assign(model, wanted)
    if known := {path: layer for path, layer in known.items() if path in layers and chooses(layers[path].form)}:
        rules, tensors, layers = _assign(model, wanted, {**layers, **known})
    before = _take_off("apply", model)
    for module, rule in rules.items():
        module.__class__ = _subclass(type(module), rule)
    for path, (tensor, dtype) in tensors.items():
        if tensor.dtype is not dtype:
            before.setdefault(path, tensor.dtype)
            _cast_in_place(tensor, dtype)
    vars(model)[APPLIED] = _Applied(wanted, before, layers)


def float8_layers(model: nn.Module, wanted: ModuleRules | None = None) -> dict[str, Float8Choice]:
    """Return by path the layers of `model` under a float8 rule, {} if it does not follow any, or these, rules."""
    applied: _Applied | None = vars(model).get(APPLIED)
    return applied.layers if applied is not None and wanted in (None, applied.rules) else {}


def choose_float8(model: nn.Module, layers: Mapping[str, Float8Choice]) -> None:
    """Have layers of `model` that are under a float8 rule compute in these forms."""
    applied: _Applied = vars(model)[APPLIED]
    every = {**applied.layers, **layers}
    rules = _assign(model, applied.rules, every)[0]
    vars(model)[APPLIED] = applied._replace(layers=every)
    for path in layers:
        module = model.get_submodule(path)
        base = _ORIGINALS.get(type(module), type(module))
        if base is not nn.Linear:
            raise ValueError(
                f"load_state_dict: {path} was an nn.Linear when layers were chosen to compute in float8, and is a "
                f"{base.__name__} now. Apply the policy again: policy.remove(model), policy.apply(model)."
            )
        module.__class__ = _subclass(base, rules[module]) if module in rules else base


def remove(model: nn.Module, rules: ModuleRules) -> None:
    """Take rules off `model`, and cast its parameters and buffers back. Raise if the model has other rules, or none."""
    applied: _Applied | None = vars(model).get(APPLIED)
    if applied is None or applied.rules != rules:
        other = "another policy is" if applied else "no policy is"
        raise ValueError(f"Policy.remove({type(model).__name__}): {other} applied to this module.")
    before = _take_off("remove", model)
    for path, tensor in chain(model.named_parameters(), model.named_buffers()):
        if path in before:
            _cast_in_place(tensor, before[path])


def why_not_applied(model: nn.Module, wanted: ModuleRules) -> str:
    """Return why neither `model` nor a module inside it follows these rules, "" if one does."""
    found = [(module, vars(module)[APPLIED]) for module in model.modules() if APPLIED in vars(module)]
    if not found:
        return "its module rules are not on the model. Call policy.apply(model) first."
    for module, applied in found:
        if applied.rules == wanted:
            for path, (tensor, dtype) in _assign(module, wanted, applied.layers)[1].items():
                if tensor.dtype is not dtype:
                    return f"{path} is {tensor.dtype}, and its rules want {dtype}. Call policy.apply(model) again."
            return ""
    return "the model follows the rules of another policy. Call policy.apply(model) with this one."


def _assign(
    model: nn.Module, wanted: ModuleRules, layers: dict[str, Float8Choice] | None = None
) -> tuple[dict[nn.Module, _ForwardRule], dict[str, tuple[Tensor, torch.dtype]], dict[str, Float8Choice]]:
    """Return what these rules mean for each module of `model`, by path each tensor with the dtype to cast it to, and
    the layers under float8 rules, which are these unless they are to be found.
    """
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    chosen = _choose(model, paths, wanted.rules)
    if layers is None:
        try:
            layers = first_choices(paths, chosen, lambda module: _ORIGINALS.get(type(module), type(module)))
        except ValueError as error:
            raise ValueError(f"Policy.apply({type(model).__name__}): {error}") from None
    rules: dict[nn.Module, _ForwardRule] = {}
    param_dtypes: dict[nn.Module, torch.dtype] = {}
    # Each path, the module there, and the dtype of the innermost rule for a module around it.
    left: list[tuple[str, nn.Module, torch.dtype | None]] = [("", model, None)]
    while left:
        path, module, around = left.pop()
        compute = rule if isinstance(rule := chosen.get(module), torch.dtype) else None
        inside = compute or around
        for name, child in module_tables(module)[2].items():
            if child is not None:
                left.append((f"{path}.{name}".lstrip("."), child, inside))
        param_dtype = wanted.params if wanted.params is torch.float32 or inside is None else inside
        output = wanted.output if module is model else None
        form = layers[paths[module][0]].form if paths[module][0] in layers else PLAIN
        if form in RECIPES:
            compute = torch.bfloat16  # of input and output
        autocast = compute not in (None, param_dtype)
        does = _ForwardRule(compute, autocast, around or wanted.params, output, None if form == PLAIN else form)
        has_tensors = any(map(len, module_tables(module)[:2]))
        differs = param_dtypes.setdefault(module, param_dtype) is not param_dtype and has_tensors
        acts = (does.compute, does.output, does.float8) != (None, None, None)
        if differs or (acts and rules.setdefault(module, does) != does):
            raise ValueError(
                f"Policy.apply({type(model).__name__}): {path!r} is the same module as {paths[module][0]!r}, and "
                "the modules around them have different rules. Give both the same."
            )
    for module in rules:
        why = ""
        if isinstance(module, torch.jit.ScriptModule):
            why = "it is scripted. Apply the policy before torch.jit.script"
        elif "forward" in vars(module):
            why = "something put a forward on the instance, so the rule would not run. Apply the policy before that"
        if why:
            place = f"module {paths[module][0]!r} ({type(module).__name__})"
            raise ValueError(f"Policy.apply: {place} cannot have a rule: {why}.")
    return rules, _tensor_dtypes(model, param_dtypes), layers


def _choose(
    model: nn.Module, paths: dict[nn.Module, list[str]], rules: tuple[tuple[ModuleKey, ModuleRule], ...]
) -> dict[nn.Module, ModuleRule]:
    """Return for each module that has a rule the rule."""
    every = {path for names in paths.values() for path in names}
    unused = dict(rules)
    chosen = {}
    for module, names in paths.items():
        matching = []
        for key, rule in rules:
            if isinstance(key, type):
                fits = isinstance(module, key)
            else:  # the path of one module, or a regular expression
                fits = key in names if key in every else any(re.fullmatch(key, name) for name in names)
            if fits:
                matching.append((key, rule))
                unused.pop(key, None)
        exact = [(key, rule) for key, rule in matching if key in names]
        deciding = exact or matching
        if len({rule for _, rule in deciding}) > 1:
            shown = " and ".join(f"{key_text(key)}: {rule_text(rule)}" for key, rule in deciding)
            raise ValueError(
                f"Policy.apply({type(model).__name__}): the rules {shown} both match module {names[0]!r}, a "
                f"{type(module).__name__}. Narrow one of them, or add a rule for the path of the module, which wins "
                "over the others."
            )
        if deciding:
            chosen[module] = deciding[0][1]
    for key in unused:
        where = f"Policy.apply({type(model).__name__})"
        raise ValueError(f"{where}: the rule {key_text(key)} matches no module. {_suggestion(key, paths)}")
    return chosen


def _suggestion(key: ModuleKey, paths: dict[nn.Module, list[str]]) -> str:
    if isinstance(key, type):
        classes = sorted({type(module).__name__ for module in paths})
        close = difflib.get_close_matches(key.__name__, classes, n=3, cutoff=0.4) or classes[:6]
        return f"The model has modules of {', '.join(close)}."
    every = [path for names in paths.values() for path in names if path]
    close = difflib.get_close_matches(key, every, n=3, cutoff=0.4) or every[:3]
    return f"Close paths: {', '.join(map(repr, close))}." if close else "The model has no modules inside."


def _tensor_dtypes(
    model: nn.Module, param_dtypes: dict[nn.Module, torch.dtype]
) -> dict[str, tuple[Tensor, torch.dtype]]:
    """Return the parameters and buffers by path, each once, with the dtype that their module's parameters get."""
    wanted: dict[str, tuple[Tensor, torch.dtype]] = {}
    first: dict[Tensor, str] = {}
    for prefix, module in model.named_modules():
        parameters, buffers, _ = module_tables(module)
        for name, tensor in (*parameters.items(), *buffers.items()):
            if tensor is None or not tensor.is_floating_point() or (name in buffers and tensor.dtype not in CASTABLE):
                continue
            path = f"{prefix}.{name}".lstrip(".")
            other = first.setdefault(tensor, path)
            if other != path and wanted[other][1] is not param_dtypes[module]:
                raise ValueError(
                    f"Policy.apply({type(model).__name__}): {path} is the same tensor as {other}, and their rules want "
                    f"{dtype_name(param_dtypes[module])} and {dtype_name(wanted[other][1])} parameters. "
                    "Give both the same rule."
                )
            wanted.setdefault(other, (tensor, param_dtypes[module]))
    return wanted


def _cast_in_place(tensor: Tensor, dtype: torch.dtype) -> None:
    """Cast as nn.Module.to does: the parameter stays the same object, because optimizers refer to it."""
    with torch.no_grad():
        tensor.data = tensor.data.to(dtype)
        if tensor.grad is not None:
            tensor.grad.data = tensor.grad.data.to(dtype)


def _take_off(call: str, model: nn.Module) -> dict[str, torch.dtype]:
    """Give every module its own class back. Return by path the dtypes that tensors had before any policy."""
    for path, module in model.named_modules():
        if type(module) not in _ORIGINALS and any(cls in _ORIGINALS for cls in type(module).__mro__):
            raise ValueError(
                f"Policy.{call}: the class of module {path!r} ({type(module).__name__}) was changed after a policy was "
                "applied, for example by torch.nn.utils.parametrize. Undo that first."
            )
    before: dict[str, torch.dtype] = {}
    for prefix, module in model.named_modules():
        applied = vars(module).pop(APPLIED, None)
        if applied is not None:
            for path, dtype in applied.dtypes.items():
                before.setdefault(f"{prefix}.{path}".lstrip("."), dtype)
        module.__class__ = _ORIGINALS.get(type(module), type(module))
    return before


def _subclass(base: type[nn.Module], rule: _ForwardRule) -> type[nn.Module]:
    """Return the subclass of `base` that follows `rule`. It is the same one each time: torch.compile guards by it."""
    if (base, rule) in _SUBCLASSES:
        return _SUBCLASSES[base, rule]

    run: Any = base.forward if rule.float8 is None else forward_of(rule.float8)

    @wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if rule.compute is None:
            out = run(self, *args, **kwargs)
        else:
            device_type = _device_type(args, kwargs, self)
            has_autocast = device_type != "meta" and torch.is_autocast_enabled(device_type)
            around = torch.get_autocast_dtype(device_type) if has_autocast else None
            args = tuple([_cast_tree(arg, rule.compute) for arg in args])
            kwargs = {name: _cast_tree(arg, rule.compute) for name, arg in kwargs.items()}
            with _autocast(device_type, rule.compute, rule.autocast):
                out = run(self, *args, **kwargs)
            # To a dtype that the code around the module can take. Autocast refuses the other low precision in its
            # widest-type operations. float32 holds every value of both.
            if around is None:
                out = _cast_tree(out, rule.outside)
            elif other := {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}.get(around):
                out = _cast_tree(out, torch.float32, (other,))
        return out if rule.output is None else _cast_tree(out, rule.output)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:  # noqa: N807
        # The subclass exists in this process only, so an instance of `base` is pickled.
        reduced: Any = base.__reduce_ex__(self, protocol)
        make, args, *rest = reduced
        return (_rebuild, (rule, make, tuple(base if arg is type(self) else arg for arg in args)), *rest)

    members = {"forward": forward, "__reduce_ex__": __reduce_ex__, "__module__": base.__module__}
    subclass = type(base.__name__, (base,), {**members, "__qualname__": base.__qualname__, "__doc__": base.__doc__})
    _SUBCLASSES[base, rule] = subclass
    _ORIGINALS[subclass] = base
    return subclass


def _rebuild(rule: _ForwardRule, make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    module = make(*args)
    module.__class__ = _subclass(type(module), rule)
    return module


def _device_type(args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module) -> str:
    if args and isinstance(args[0], Tensor):
        return args[0].device.type
    for leaf in (*tree_flatten((args, kwargs))[0], *module.parameters()):
        if isinstance(leaf, Tensor):
            return leaf.device.type
    return "cpu"


def _autocast(device_type: str, dtype: torch.dtype, enabled: bool) -> AbstractContextManager[Any]:
    if device_type == "meta":  # meta tensors have no autocast
        return nullcontext()
    if not enabled:
        return torch.autocast(device_type, enabled=False)
    # Autocast's cache of cast weights has no dtypes in its keys. A weight that is also used outside of the module would
    # come from the cache in the dtype from there.
    return torch.autocast(device_type, dtype=dtype, cache_enabled=False)


def _cast_tree(tree: Any, dtype: torch.dtype, of: tuple[torch.dtype, ...] = CASTABLE) -> Any:
    """Return `tree` with those of its tensors cast that have one of the dtypes `of`."""
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.dtype in of else tree
    leaves, spec = tree_flatten(tree)
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        return tree
    return tree_unflatten([_cast_tree(leaf, dtype, of) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


_SUBCLASSES: dict[tuple[type[nn.Module], _ForwardRule], type[nn.Module]] = {}
_ORIGINALS: dict[type[nn.Module], type[nn.Module]] = {}  # by subclass
