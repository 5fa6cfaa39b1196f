"""What the user's function returns for the command `doctor`: a loop for `graphed_step`, or a function for `graphed`."""

import inspect
import itertools
import linecache
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..._errors import UsageError
from ..._precision.policy import Policy
from ..._step.found_state import FoundState
from ..._step.graph_owner import GraphOwner
from ..._step.graphed import graphed
from ..._step.graphed_step import graphed_step
from ..._step.step_calls import GraphedStep
from ..._text import type_text
from ..._torch.tensors.tree import tree_flatten
from ..._user_line import line_text
from .trial import MOST_BATCHES, Origins, Subject, arguments_of

RETURNED = (
    "(loss_fn, model, optimizer, batches) or (loss_fn, model, optimizer, batches, options): loss_fn(model, *batch) "
    "returns the loss; optimizer is an optimizer, or a function that makes one from parameters; batches is a loader or "
    "a list; options is a dict of further arguments of ampkit.graphed_step, such as {'policy': 'float16'}; or "
    "(function, batches) or (function, batches, options): function(*batch) steps its optimizers itself, as for "
    "ampkit.graphed, and options are arguments of that"
)
RETURNED_LIGHTNING = (
    "(LightningModule, batches) or (LightningModule, batches, options): batches is a dataloader or a list; options is "
    "a dict of further arguments of ampkit.graphed_step, such as {'policy': '16-mixed', 'max_norm': 1.0}"
)
_IGNORED_OPTIONS = ("graph", "warmup", "verify", "on_failure", "numerics")  # the doctor sets these


class DoctorError(UsageError):
    """The training loop cannot be examined. The message says why and what to write instead."""


def load_subject(name: str, find: Callable[[], Callable[[], Any]], policy: Policy | None, lightning: bool) -> Subject:
    """Return the training loop that a function of the user's returns, after checking its parts.

    Args:
        name: the name of the function in messages.
        find: imports and returns the function. Lines of the modules that it imports are noted too.
        policy: what the step is to run under, in place of the policy that the function returns.
        lightning: whether the function returns a LightningModule.

    Raises:
        DoctorError: the function returned something else. `find` and the user's code may raise other errors.
    """
    subject = _lightning_subject(name, find) if lightning else _subject(name, find)
    if policy is not None and subject.by == "graphed":
        raise DoctorError(f"{name} returned a function, which enters autocast itself. Leave out --policy.")
    return subject if policy is None else replace(subject, options={**subject.options, "policy": policy})


def _subject(name: str, find: Callable[[], Callable[[], Any]]) -> Subject:
    """Return the training loop that a function of the user's returns in parts."""
    with Origins() as origins:
        function = find()
        made = function()
        if isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0]) and not isinstance(made[0], nn.Module):
            return _function_subject(name, function, made, origins)
        if not isinstance(made, tuple) or len(made) not in (4, 5):
            raise DoctorError(f"{name} returned {type_text(made)}, expected {RETURNED}.")
        loss_fn, model, optimizer, batches = made[:4]
        if not isinstance(optimizer, torch.optim.Optimizer) and callable(optimizer) and isinstance(model, nn.Module):
            optimizer = optimizer(model.parameters())  # `bench` takes a function too
    options = _options(name, graphed_step, made[4] if len(made) == 5 else {})
    if not callable(loss_fn):
        raise DoctorError(f"{name} returned {type_text(loss_fn)} for loss_fn, expected {RETURNED}.")
    return Subject(_line_of(function), loss_fn, model, optimizer, batches, options, origins)


def _function_subject(name: str, function: Callable[..., Any], made: tuple[Any, ...], origins: Origins) -> Subject:
    """Return a function for `graphed`, with what it changes: as declared in its options, or found in a first call."""
    fn, batches = made[:2]
    if isinstance(fn, GraphedStep):
        raise DoctorError(
            f"{name} returned a step that ampkit.graphed_step has made. Return what that was given, and batches: "
            "(loss_fn, model, optimizer, batches, options), where options is a dict of its further arguments."
        )
    if isinstance(fn, GraphOwner):
        raise DoctorError(f"{name} returned a function that ampkit.graphed has made. Return the one that it was given.")
    options = _options(name, graphed, made[2] if len(made) == 3 else {})
    if isinstance(batches, Iterator):  # of which a first look would take a batch away
        batches = [*itertools.islice(batches, MOST_BATCHES)]
    batch = next(iter(batches), None)
    devices = (leaf.device for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor))
    device = next(devices, torch.get_default_device())
    modules, optimizers = options.pop("modules", None), options.pop("optimizers", ())
    if modules is None and batch is not None:
        found = FoundState(device, optimizers)
        args, kwargs = arguments_of(batch)
        with found.finding():
            fn(*args, **kwargs)
        modules, optimizers = found.declared()
    model = nn.ModuleList(modules or ())
    return Subject(
        _line_of(function), fn, model, tuple(optimizers), batches, options, origins, False, "graphed", device
    )


def _options(name: str, taker: Callable[..., Any], options: Any) -> dict[str, Any]:
    known = [key for key, arg in inspect.signature(taker).parameters.items() if arg.kind is arg.KEYWORD_ONLY]
    if not isinstance(options, dict) or (strange := [key for key in options if key not in known]):
        found = f"the options {', '.join(map(repr, strange))}" if isinstance(options, dict) else type_text(options)
        raise DoctorError(
            f"{name} returned {found}, expected a dict of arguments of {taker.__name__}: {', '.join(known)}."
        )
    return {key: value for key, value in options.items() if key not in _IGNORED_OPTIONS}


def _line_of(function: Callable[..., Any]) -> str:
    """Return `file:line: source` of a function, "" if it has no source."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    file, first = code.co_filename, code.co_firstlineno  # the line of a decorator, if there is one
    lines = ((number, linecache.getline(file, number).lstrip()) for number in range(first, first + 9))
    heads = (number for number, line in lines if line.startswith(("def ", "async def ")))
    return line_text(file, next(heads, first))


# ------------------------------------------------------------------------------------------------------------ Lightning


def _lightning_subject(name: str, find: Callable[[], Callable[[], Any]]) -> Subject:
    """Return the training loop that a Trainer would run for the user's LightningModule."""
    try:
        import lightning.pytorch as pl
    except ImportError as error:
        raise DoctorError("--lightning needs Lightning. Run: pip install 'ampkit[lightning]'") from error
    with Origins() as origins:
        function = find()
        made = function()
        if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], pl.LightningModule):
            raise DoctorError(f"{name} returned {type_text(made)}, expected {RETURNED_LIGHTNING}.")
        module = made[0].to("cuda") if torch.cuda.is_available() else made[0]  # as a Trainer does
        if not module.automatic_optimization:
            raise DoctorError(
                f"{name}: automatic_optimization is False, so training_step steps the optimizers itself. --lightning "
                "examines automatic optimization only."
            )
        optimizer, scheduler = _configured(name, module.configure_optimizers())
    options = _options(name, graphed_step, made[2] if len(made) == 3 else {})
    if scheduler is not None:
        options.setdefault("scheduler", scheduler)
    return Subject(_line_of(function), _lightning_loss, module, optimizer, made[1], options, origins, whole=True)


def _lightning_loss(module: Any, batch: Any) -> Any:
    wants_index = len(inspect.signature(module.training_step).parameters) > 1
    with warnings.catch_warnings():
        # Without a Trainer, self.log warns and does nothing.
        warnings.filterwarnings("ignore", "You are trying to `self.log")
        out = module.training_step(batch, 0) if wants_index else module.training_step(batch)
    return out["loss"] if isinstance(out, Mapping) else out


def _configured(name: str, made: Any) -> tuple[Any, Any]:
    """Return the optimizer, and the scheduler or None, from what `configure_optimizers` returned.

    A scheduler that is stepped once per epoch is left out.
    """
    optimizers, schedulers = made, []
    if isinstance(made, dict):
        optimizers, schedulers = [made.get("optimizer")], [made["lr_scheduler"]] if "lr_scheduler" in made else []
    elif isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], (tuple, list)):
        optimizers, schedulers = made
    optimizers = list(optimizers) if isinstance(optimizers, (tuple, list)) else [optimizers]
    if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.Optimizer):
        raise DoctorError(f"{name}: configure_optimizers returned {type_text(made)}, expected a single optimizer.")
    each_step = [part["scheduler"] for part in schedulers if isinstance(part, dict) and part.get("interval") == "step"]
    return optimizers[0], each_step[0] if each_step else None
