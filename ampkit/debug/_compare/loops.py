"""How two training loops are run one after the other from the same seeds, and what is compared of them."""

import copy
import gc
import itertools
import pickle
import random
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..._arguments import check_at_least, check_callable, listed, wrong
from ..._text import dtype_name, type_text
from ..._torch.tensors.tree import tree_flatten, tree_flatten_with_path, tree_unflatten
from .loop_causes import LoopDifference, LoopState, likely_reason
from .loop_comparison import DifferingTensor, LoopComparison, differing
from .recording import without_wrappers, wrapped_paths
from .saved_state import SavedState

_LOOP = "a function without arguments that returns (model, step)"
_LOSSES = 4  # of compared steps, from the first that differs: whether a factor between losses is constant

Factory: TypeAlias = Callable[[], tuple[nn.Module | Sequence[nn.Module], Callable[..., Any]]]


def compare_loops(
    old: Factory, new: Factory, batches: Iterable[Any], *, every: int = 1, seed: int = 0
) -> LoopComparison:
    """Run two training loops from the same seeds over the same batches, and find the first step that differs.

    Use it to hold a loop of your own beside its new form::

        def old():
            model = Net().cuda()
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)

            def step(x, y):
                optimizer.zero_grad()
                loss = loss_fn(model, x, y)
                loss.backward()
                optimizer.step()
                return loss

            return model, step

        def new():
            model = Net().cuda()
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            return model, ampkit.graphed_step(loss_fn, model, optimizer)

        print(compare_loops(old, new, batches))

    These tensors are compared bit by bit: the models before the first step; behind each step the loss that it returned,
    then parameters, then buffers. Of a step that differs, the result says which tensors, by how much, and the likely
    reason as far as it can be measured: rounding, learning rates, losses scaled by a factor, random numbers drawn in
    another order, dtypes, a batch of another layout. Gradients and optimizer state are seen by what they do to
    parameters.

    Args:
        old: builds a loop: a function without arguments that returns the model and the step. The model is a module, or
            a tuple or list of modules. The step is a function of a batch that returns the loss as a tensor, or an
            object with it in `.loss`, as a `graphed_step` does. All that a step changes must be built within this
            function, because the loop is built twice if something differs.
        new: builds the other loop.
        batches: what the steps are called with: `step(*batch)` for a tuple or list, `step(**batch)` for a dict,
            `step(batch)` for anything else. Each step gets a copy of its tensors.
        every: compare every so many steps, and behind the last one, instead of behind each.
        seed: with which the generators of torch, Python and, if it is loaded, numpy are seeded before each factory is
            called and again before the first step.

    Returns:
        A `LoopComparison`.

    Raises:
        ValueError: an argument, or what a factory or a step returns, is something else.
        Exception: what a factory or a step raises.

    If something differs, the new loop ends a few steps later, and the old one is built and run again up to the same
    step, to see whether it repeats itself. At the end the states of the global random number generators are put back.

    Sync: waits for the device in each compared step. Memory: one loop at a time on the device, and on the host a copy
    of parameters and buffers for each compared step; `every` makes these fewer.
    """
    check_callable("compare_loops", "old", old, _LOOP)
    check_callable("compare_loops", "new", new, _LOOP)
    check_at_least("compare_loops", "every", every, 1, "1 compares every step")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise wrong("compare_loops", "seed", seed, "an int from 0 to 2**32 - 1, as numpy's generator needs it")
    before = SavedState([], ())
    try:
        read = listed(batches)
        if not read:
            raise wrong("compare_loops", "batches", batches, "a list of batches, at least one")
        numbers = [n for n in range(len(read) + 1) if n % every == 0 or n == len(read)]
        history = list(_states("old", old, read, numbers, seed))
        gc.collect()  # of what the old loop held on the device
        return _compared(old, new, read, numbers, seed, history, every)
    finally:
        before.restore()


def _compared(
    old: Factory, new: Factory, batches: list[Any], numbers: list[int], seed: int, history: list[LoopState], every: int
) -> LoopComparison:
    """Run the new loop beside the recorded old one, and what follows from a difference."""
    part: tuple[int, tuple[str, ...]] | None = None
    rows: tuple[DifferingTensor, ...] = ()
    step, equal_until, cause, reason = None, len(batches), "", ""
    states = _states("new", new, batches, numbers, seed)
    for i, state in enumerate(states):
        names = _parting_generators(history[i], state)
        part = part or ((numbers[i], names) if names else None)
        if rows := _rows(history[i], state):
            following = [] if i == 0 else [each.loss for each in itertools.islice(states, _LOSSES - 1)]
            states.close()
            gc.collect()  # of what the new loop held on the device
            *_, again = _states("old", old, batches, numbers[: i + 1], seed)
            repeated = _rows(history[i], again)
            step, equal_until = numbers[i], numbers[i - 1] if i else -1
            if i == 0:
                cause, reason = "factory", _factory_reason(repeated)
                break
            losses = zip((each.loss for each in history[i:]), [state.loss, *following], strict=False)
            difference = LoopDifference(
                step=step,
                old=history[i],
                new=state,
                before=history[i - 1],
                consecutive=step - equal_until == 1,
                rows=rows,
                losses=[(_mean(a), _mean(b)) for a, b in losses],
                generators_part=part,
                other_layout=_other_layout(batches, step),
                repeated=repeated,
            )
            cause, reason = likely_reason(difference)
            break
    compared = max(len(_named(each)) for each in history)
    return LoopComparison(len(batches), every, step, equal_until, rows, compared, cause, reason, part)


def _mean(loss: Tensor | None) -> float:
    assert loss is not None  # but before the first step
    return loss.double().mean().item()


def _factory_reason(repeated: tuple[DifferingTensor, ...]) -> str:
    if repeated:
        return (
            f"old() builds another model when it is called again ({repeated[0]}). Build the model within the factory, "
            "and draw its weights from the default generators, which are seeded before."
        )
    return (
        "the factories build different models. Both are called with the same seeds: draw the same weights in the same "
        "order, or load them, and share no module that a loop trains."
    )


# ------------------------------------------------------------------------------------------------------------ one loop


def _states(
    name: str, factory: Factory, batches: list[Any], numbers: list[int], seed: int
) -> Generator[LoopState, None, None]:
    """Build a loop, and yield its state before the first step and behind each of these numbers of steps.

    The loop lives as long as this iterator.
    """
    _seed(seed)
    built = factory()
    if not isinstance(built, (tuple, list)) or len(built) != 2 or not callable(built[1]):
        raise ValueError(f"compare_loops: {name}() returned {type_text(built)}, expected (model, step).")
    model, step = built
    models = list(model) if isinstance(model, (tuple, list)) else [model]
    modules = [each for each in models if isinstance(each, nn.Module)]
    if not modules or len(modules) < len(models):
        raise ValueError(
            f"compare_loops: {name}() returned {type_text(model)} as its model, expected a torch.nn.Module, or a tuple "
            "or list of them."
        )
    try:
        yield _state(modules, None)
        _seed(seed)
        for number, batch in enumerate(batches[: numbers[-1]], 1):
            result = _call(step, _copied(batch))
            loss = result if isinstance(result, Tensor) else getattr(result, "loss", None)
            if not isinstance(loss, Tensor):
                raise ValueError(
                    f"compare_loops: the step of {name}() returned {type_text(result)}, expected the loss as a tensor, "
                    "or an object with the loss in .loss. Return the tensor itself, without .item()."
                )
            if number in numbers:
                yield _state(modules, loss)
    finally:  # Python 3.12.3 keeps what a closed generator has
        del built, model, step, models, modules


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


def _copied(batch: Any) -> Any:
    leaves, tree = tree_flatten(batch)
    copies = [
        leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else copy.deepcopy(leaf)
        for leaf in leaves
    ]
    return tree_unflatten(copies, tree)


def _call(step: Callable[..., Any], batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return step(**batch)
    return step(*batch) if isinstance(batch, (tuple, list)) else step(batch)


def _state(models: list[nn.Module], loss: Tensor | None) -> LoopState:
    """Return copies of what is compared, in host memory. Sync: waits for the device."""
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for i, model in enumerate(models):
        prefix = f"model[{i}]." if len(models) > 1 else ""
        wrapped = wrapped_paths(model)
        named: tuple[tuple[dict[str, Tensor], Iterator[tuple[str, Tensor]]], ...] = (
            (parameters, model.named_parameters()),
            (buffers, model.named_buffers()),
        )
        for found, tensors in named:
            found |= {prefix + without_wrappers(path, wrapped): _on_host(tensor) for path, tensor in tensors}
    return LoopState(None if loss is None else _on_host(loss), parameters, buffers, _generators())


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _generators() -> dict[str, bytes]:
    """Return the state of each global random number generator, by a name for messages."""
    states = {"random": pickle.dumps(random.getstate()), "torch on cpu": bytes(torch.get_rng_state().tolist())}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy.random"] = pickle.dumps(numpy.random.get_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for i in range(torch.cuda.device_count()):
            states[f"torch on cuda:{i}"] = bytes(torch.cuda.get_rng_state(i).tolist())
    return states


# ------------------------------------------------------------------------------------------------------------ two loops


def _named(state: LoopState) -> dict[tuple[str, str], Tensor]:
    """Return what is compared by kind and path, in the order in which it is shown."""
    loss = {} if state.loss is None else {("loss", "loss"): state.loss}
    kinds = {"parameter": state.parameters, "buffer": state.buffers}
    return loss | {(kind, path): tensor for kind, found in kinds.items() for path, tensor in found.items()}


def _rows(old: LoopState, new: LoopState) -> tuple[DifferingTensor, ...]:
    """Return the tensors that differ: the loss, parameters, buffers."""
    a, b = _named(old), _named(new)
    which = sorted(a.keys() | b.keys(), key=lambda each: (("loss", "parameter", "buffer").index(each[0]), each[1]))
    found = (differing(path, kind, a.get((kind, path)), b.get((kind, path))) for kind, path in which)
    return tuple(row for row in found if row is not None)


def _parting_generators(old: LoopState, new: LoopState) -> tuple[str, ...]:
    """Return the names of generators whose states differ, of those on CUDA with how far each was advanced."""
    names = []
    for name in old.generators.keys() & new.generators.keys():
        a, b = old.generators[name], new.generators[name]
        if a != b and "cuda" in name:  # the state is the seed and the offset, each of 8 bytes
            offsets = [int.from_bytes(each[8:16], "little") for each in (a, b)]
            names.append(f"{name} at offset {offsets[0]} in the old loop, {offsets[1]} in the new one")
        elif a != b:
            names.append(name)
    return tuple(sorted(names))


def _other_layout(batches: list[Any], number: int) -> str:
    """Return how the layout of a batch differs from those of all batches before it, "" if one of them has it, too."""

    def layout(batch: Any) -> list[tuple[str, tuple[int, ...], str]]:
        leaves, _ = tree_flatten_with_path(batch)
        return [(str(p), tuple(t.shape), dtype_name(t.dtype)) for p, t in leaves if isinstance(t, Tensor)]

    now, earlier = layout(batches[number - 1]), [layout(batch) for batch in batches[: number - 1]]
    if not earlier or now in earlier:
        return ""
    shapes = ", ".join(f"{shape} {dtype}" for _, shape, dtype in now)
    return f"has {shapes}"
