"""Memory of a training step without its device: the step runs on fake tensors, and is recorded as a real one."""

import copy
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..._arguments import check_at_least, check_callable, check_choice, check_instance, wrong
from ..._capture.ranks.shards import is_sharded
from ..._optimizer.device_step import changed_by_step, seed_momentum, step_or_undo
from ..._optimizer.nonfinite import SKIP, STOP
from ..._optimizer.param_groups import CapturableGroups
from ..._optimizer.rollback import Reachable
from ..._optimizer.sharded import on_shards
from ..._optimizer.step_kind import can_be_undone, parameters, runs_beside_step, takes_scale, torch_class
from ..._optimizer.update.state_form import set_state_form, state_form, step_of
from ..._precision.fake_tensors import can_save_for_backward, fake_copy, fake_device
from ..._precision.policy import Policy, changes_model, read_policy
from ..._step.arguments import read_state_form
from ..._text import type_text
from ..._torch.ranks.fake_ranks import fake_rank, real_values
from ..._torch.ranks.sharding import ShardedModules
from ..._torch.tensors.fake_tensors import is_limit_of_fake_tensors
from ..._torch.tensors.modes import TorchDispatchMode
from ..._torch.tensors.operators import IN_PLACE_WITHOUT_META, READ
from ..._torch.tensors.tree import tree_flatten
from ..._user_line import user_line
from .allocator import Allocator, CachingAllocator
from .backward import without_engine
from .categories import MemoryTracker
from .profile import MemoryProfile

# In the errors of fake tensors on several devices, torch 2.11 and 2.15.
_MIXED_DEVICES = ("FakeTensor Device Propagation", "found at least two devices")


def forecast(
    loss_fn: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    policy: Policy | str | None = None,
    moments: torch.dtype | str | None = None,
    nonfinite: str | None = None,
    shard: Callable[[nn.Module], object] | None = None,
    ranks: int | None = None,
    device: str = "cuda",
    steps: int = 2,
    label: str = "",
) -> MemoryProfile:
    """Return what will hold the memory of a training step, category by category, without a GPU and without memory.

    ::

        at32 = ampkit.debug.forecast(loss_fn, model, optimizer, batch)
        at16 = ampkit.debug.forecast(loss_fn, model, optimizer, batch, policy="16-mixed")
        print(at16.beside(at32))

        def shard(model):
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)

        print(ampkit.debug.forecast(loss_fn, model, optimizer, batch, shard=shard, ranks=8))

    Model, optimizer and batch are copied to the device without their data. Then `zero_grad`, forward, backward and
    `optimizer.step` run on these copies. Parts that torch.compile made run as eager code.

    With `shard`, the forecast is that of the first rank, without the others. It has a process group of its own while
    it runs, in which collectives do nothing. Parameters, gradients and optimizer state are this rank's shards. Whole
    parameters, whole gradients, and what they are gathered and reduced in are temporary.

    For CUDA, torch's caching allocator is simulated, so a tensor counts as the block that it lies in. cuBLAS's
    workspaces are counted too: those of an H100 where there is no GPU. There are two, because backward has a thread of
    its own. `graphed_step` runs it in the thread that calls, and takes one. Only the device knows the rest, which is
    not counted: the workspaces that kernels take while they run, above all cuDNN's while it chooses algorithms; CUDA's
    own context and the buffers of NCCL, which are not in `torch.cuda.memory_allocated` either.

    Args:
        loss_fn: `loss_fn(model, *batch)`, or `loss_fn(model, **batch)` where the batch is a dict. It returns the loss,
            or `(loss, aux)`, as for `graphed_step`. It cannot read the value of a tensor.
        model: on any device, also on meta. It is not changed. It cannot be one under `fully_shard`.
        optimizer: an optimizer over the model's parameters. It is not changed, and the forecast takes its state as
            empty before the first step. Its `step` must work without a closure.
        batch: what `loss_fn` is called with after the model, on any device: a tuple or list of arguments, a dict of
            keyword arguments, or a single tensor. `(batch,)` is one argument, whatever it is. It is that of one rank.
        policy: a `Policy`, or text that `Policy.parse` reads. None leaves autocast as the caller has set it. With
            `rounding`, the optimizer steps as in `graphed_step`.
        moments: as for `graphed_step`.
        nonfinite: as for `graphed_step`. Without a fused kernel, a step then copies the parameters and the state that
            it changes, for as long as it runs. Those of an optimizer of your own are counted as if a graph could undo
            its steps. What `after_step` writes is copied too, and not counted.
        shard: a function that calls `fully_shard` on modules of the model that it gets, which is the copy. It can leave
            out the mesh, or make one of `ranks` ranks and the device type `device`. What it returns is not used.
        ranks: over how many ranks `shard` splits the model.
        device: "cuda", which needs no GPU but a torch that was built with CUDA, or "cpu".
        steps: how many steps. The first one makes the optimizer's state, so the second is like all that follow.
        label: the name of the profile in tables and plots, by default the policy.

    Raises:
        ValueError: an argument that cannot work, `shard` where a process group is initialized, or a step that reads the
            value of a tensor or mixes devices. The message names the line.

    Sync: none. Hooks on modules' gradients (`register_full_backward_hook`) are not called.
    """
    check_callable("debug.forecast", "loss_fn", loss_fn, "loss_fn(model, *batch) that returns the loss")
    check_instance("debug.forecast", "model", model, nn.Module, "a torch.nn.Module")
    _check_shard(model, shard, ranks)
    check_instance("debug.forecast", "optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
    check_choice("debug.forecast", "device", device, ("cuda", "cpu"))
    if not can_save_for_backward(device):
        raise ValueError(
            "debug.forecast(device='cuda'): this torch was built without CUDA. Use one that was, or 'cpu'."
        )
    check_at_least("debug.forecast", "steps", steps, 1, "the number of steps that are run")
    check_instance("debug.forecast", "label", label, str, "a string")
    _, *step_args = inspect.signature(type(optimizer).step).parameters.values()
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    required = [arg.name for arg in step_args if arg.default is arg.empty and arg.kind not in variable]
    if required:  # such as the closure of LBFGS
        raise ValueError(
            f"debug.forecast: {type(optimizer).__name__}.step needs {', '.join(required)}, and the forecast calls "
            "optimizer.step(). Forecast with another optimizer, or record a real step: debug.memory(train_step, ...)."
        )
    policy = read_policy("debug.forecast", policy)
    if nonfinite is not None:
        check_choice("debug.forecast", "nonfinite", nonfinite, (SKIP, STOP))
        if policy is not None and policy.needs_scaling:
            raise wrong("debug.forecast", "nonfinite", nonfinite, "None beside a loss scale, which skips already")
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    args = args if isinstance(args, (tuple, list)) else (args,)
    label = label or ("autocast as it was" if policy is None else str(policy))
    rank = nullcontext() if ranks is None else fake_rank(ranks, device)
    try:
        with rank, fake_device(device), torch.set_grad_enabled(True):
            parts = loss_fn, model, optimizer, (tuple(args), kwargs)
            return _profile(*parts, policy, moments, nonfinite, device, shard, steps, label, sys._getframe(1))
    except Exception as error:
        where = f" At {line}" if (line := user_line(error)) else ""
        if any(text in str(error) for text in _MIXED_DEVICES):
            raise ValueError(
                f"debug.forecast: the step mixes devices: {error}. Only the tensors of the model, of the batch and "
                "of a loss_fn that is a module are brought to the device. So let loss_fn be an nn.Module that has "
                f"its tensors as buffers, or pass them in the batch.{where}"
            ) from error
        if not is_limit_of_fake_tensors(error):
            raise
        raise ValueError(
            f"debug.forecast: the step needs a value or a device, and fake tensors have none: {error}{where}"
        ) from error


def _profile(
    loss_fn: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    policy: Policy | None,
    moments: object,
    nonfinite: str | None,
    device: str,
    shard: Callable[[nn.Module], object] | None,
    steps: int,
    label: str,
    entered: FrameType,
) -> MemoryProfile:
    """Run so many steps on fake copies of their parts, within `fake_device`. Return the memory that they took."""
    (fake_model, fake_loss_fn), (args, kwargs) = fake_copy((model, loss_fn), device), fake_copy(batch, device)
    if policy is not None and changes_model(policy):
        policy.apply(fake_model)
    if shard is not None:
        _apply_shard(fake_model, shard, device)
    pairs = zip(model.parameters(), fake_model.parameters(), strict=True)
    fake_optimizer = _optimizer_of(optimizer, {id(param): fake for param, fake in pairs}, device)
    form = read_state_form("debug.forecast", moments, policy, [fake_optimizer]) or state_form(optimizer)
    set_state_form(fake_optimizer, form)
    guarded: Callable[..., None] | None = None  # a step that can be undone
    if nonfinite is not None and not runs_beside_step(optimizer):
        groups = CapturableGroups(fake_optimizer, torch.device(device))
        guarded = partial(_step_or_undo, fake_optimizer, groups, groups.table(1).rows[0])
    on_cuda = device == "cuda"
    tracker = MemoryTracker(
        torch.device("cuda", 0) if on_cuda else torch.device("cpu"),
        fake_model,
        [fake_optimizer],
        (args, kwargs),
        entered,
        CachingAllocator() if on_cuda else Allocator(),
        forecast=True,
    )
    with without_engine(tracker.at_node), tracker:
        for number in range(steps):
            tracker.begin_step()
            fake_optimizer.zero_grad()
            with nullcontext() if policy is None else policy.autocast(device):
                loss = fake_loss_fn(fake_model, *args, **kwargs)
            loss = loss[0] if isinstance(loss, tuple) else loss
            if policy is not None and policy.needs_scaling:
                loss = loss * torch.ones((), device=loss.device)  # the loss scale
            loss.backward()
            whole = form is None and guarded is None
            with _FakeOptimizerStep(tracker), nullcontext() if whole else on_shards(fake_optimizer):
                step_of(fake_optimizer)() if guarded is None else guarded(first=not number)
            del loss
    return tracker.profile(label)


def _step_or_undo(
    optimizer: torch.optim.Optimizer, groups: CapturableGroups, rates: list[Tensor], *, first: bool
) -> None:
    """Step as `nonfinite=` does: with copies of all that changes, unless a kernel can skip, or the host must."""
    changed: list[Tensor] = []
    with groups.reading(rates), groups.applied():
        if torch_class(optimizer) is None:
            with_gradient = frozenset(id(param) for param in parameters(optimizer) if param.grad is not None)
            reached = () if first else Reachable(optimizer).changeable(with_gradient, set())  # the first is watched
            changed = [*{id(tensor): tensor for tensor in reached}.values()]
        elif not takes_scale(optimizer) and seed_momentum(optimizer) and can_be_undone(optimizer):
            changed = changed_by_step(optimizer)
        with torch.no_grad():
            found = torch.zeros((), device=groups.device)
        step_or_undo(step_of(optimizer), found, changed)


class _FakeOptimizerStep(TorchDispatchMode):
    """Context in which an optimizer can step on fake tensors.

    An optimizer may read its count of steps, which has no value. A fused one calls a kernel that fake tensors lack.
    """

    def __init__(self, tracker: MemoryTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation there
        self._tracker = tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READ:
            return 2  # no size depends on it, but an optimizer may divide by it or by its difference from 1
        if func.overloadpacket in IN_PLACE_WITHOUT_META:
            self._tracker.add_inputs((args, kwargs))
            return None
        return func(*args, **(kwargs or {}))


def _optimizer_of(optimizer: torch.optim.Optimizer, copies: dict[int, Any], device: str) -> torch.optim.Optimizer:
    """Return a copy of an optimizer over the fake parameters, with the state that it has before its first step.

    By the id of the original, `copies` has the copies made so far, and those made here are added.
    """
    made = copies[id(optimizer)] = copy.copy(optimizer)
    made.param_groups = []
    for group in optimizer.param_groups:
        options = {name: fake_copy(value, device) for name, value in group.items() if name != "params"}
        for param in group["params"]:
            if id(param) not in copies:
                copies[id(param)] = fake_copy(param, device)
        # On CUDA torch uses foreach by default, but it asks for parameters of class Tensor or Parameter. Fake ones are
        # not.
        if device == "cuda" and "foreach" in options and options["foreach"] is None and not options.get("fused"):
            tensor_rate = isinstance(options.get("lr"), Tensor) and not options.get("capturable")
            # Adam does not use foreach then: see torch/optim/adam.py.
            options["foreach"] = not (tensor_rate and isinstance(optimizer, torch.optim.Adam))
        made.param_groups.append({"params": [copies[id(param)] for param in group["params"]], **options})
    made.state = defaultdict(dict)
    if isinstance(optimizer, torch.optim.Adagrad):  # whose constructor makes the state
        for param, state in optimizer.state.items():
            made.state[copies[id(param)]] = fake_copy(state, device)
    for name, value in vars(optimizer).items():
        # What a subclass has added, which `Optimizer.__getstate__` leaves out. A method among it wraps the original's,
        # as a scheduler wraps `step`. The copy needs none.
        if name in vars(made) or hasattr(type(optimizer), name):
            continue
        for leaf in tree_flatten(value)[0]:
            if isinstance(leaf, torch.optim.Optimizer) and id(leaf) not in copies:  # an optimizer that it wraps
                _optimizer_of(leaf, copies, device)
            elif isinstance(leaf, Tensor) and id(leaf) not in copies:
                copies[id(leaf)] = fake_copy(leaf, device)
        try:
            setattr(made, name, copy.deepcopy(value, copies))
        except Exception as error:  # an attribute can be anything, and raise anything
            raise ValueError(
                f"debug.forecast: cannot copy {type(optimizer).__name__}.{name} ({type_text(value)}): {error}. "
                "Forecast with an optimizer without it."
            ) from error
    return made


def _check_shard(model: nn.Module, shard: object, ranks: object) -> None:
    """Raise a `ValueError` for a model that is split already, or arguments of `forecast` with which none can be."""
    if is_sharded(model) or len(ShardedModules(model)):
        raise ValueError(
            "debug.forecast(model): it is under fully_shard, and such a model cannot be copied. Pass the model as it "
            "was before, and the function that calls fully_shard on its blocks and on the model: "
            "debug.forecast(loss_fn, model, optimizer, batch, shard=wrap, ranks=8). Or record a step: "
            "ampkit.debug.memory(...)."
        )
    if shard is None and ranks is None:
        return
    if shard is None:
        raise wrong("debug.forecast", "ranks", ranks, "shard=... beside it, a function that calls fully_shard")
    check_callable("debug.forecast", "shard", shard, "shard(model) that calls fully_shard on modules of the model")
    check_at_least("debug.forecast", "ranks", ranks, 1, "over how many ranks shard=... splits the model")
    if not torch.distributed.is_available():
        raise ValueError("debug.forecast(shard=...): this torch was built without torch.distributed. Use one with it.")
    if torch.distributed.is_initialized():
        raise ValueError(
            "debug.forecast(shard=...): this process has a process group, and the forecast needs one of its own. Call "
            "it before init_process_group, or in a process by itself, without torchrun."
        )


def _apply_shard(model: nn.Module, shard: Callable[[nn.Module], object], device: str) -> None:
    """Have the user's function put the fake copy of a model under `fully_shard`.

    Raises a `ValueError` if it has wrapped nothing, or if the parameters are not the same ones, or elsewhere.
    """
    shapes = [param.shape for param in model.parameters()]
    with real_values():
        shard(model)
    modules = ShardedModules(model)
    if not len(modules):
        raise ValueError(
            "debug.forecast(shard=...): it has not called fully_shard on the model that it was given, or on one of its "
            "modules. Write shard=lambda model: fully_shard(model), for example."
        )
    if [param.shape for param in model.parameters()] != shapes:
        raise ValueError(
            "debug.forecast(shard=...): the model has other parameters afterwards, or in another order, so the "
            "optimizer cannot be copied. Change the model before you make its optimizer. shard may only wrap modules."
        )
    for name, param in model.named_parameters():
        if param.device.type != device:
            raise ValueError(
                f"debug.forecast(device={device!r}, shard=...): {name} is on {param.device} afterwards. Let shard make "
                f"no mesh, or init_device_mesh({device!r}, ...), and use no CPUOffloadPolicy."
            )
    modules.keep_shards()
