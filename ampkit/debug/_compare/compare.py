"""How two runs are made comparable: same state, same random numbers, and the tensors of both set side by side."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..._arguments import check_callable, check_instance, read_all, real_number, wrong
from .comparison import ComparedTensor, Comparison, distance
from .recording import record_run
from .saved_state import SavedState


def compare(
    fn_a: Callable[..., Any],
    fn_b: Callable[..., Any],
    *args: Any,
    model: nn.Module | tuple[nn.Module, nn.Module] | None = None,
    state: Sequence[Any] = (),
    min_db: float | None = None,
    generators: Sequence[torch.Generator] = (),
) -> Comparison:
    """Run two functions from the same state, with the same random numbers, and find the first tensor that differs.

    Use it to compare two policies, or a step with a faster form of it::

        print(compare(lambda: loss_in(f32), lambda: loss_in(bf16), model=model, min_db=30))
        print(compare(eager_step, graphed, *batch, state=[model, optimizer, graphed.scaler]))

    A policy with rules for modules, such as one for float8, is on the model, so each run gets its own::

        f8 = policy.apply(copy.deepcopy(model))
        print(compare(lambda: loss_in(bf16, model), lambda: loss_in(policy, f8), model=(model, f8), min_db=15))

    These tensors are compared:

    1. the outputs of the modules of `model`, in the order of their calls, and the gradients of these outputs, in the
       order of the backward;
    2. what the run leaves: `param.grad` of `model`, parameters, buffers and optimizer state;
    3. what the function returns.

    Outputs and their gradients are seen by hooks. A CUDA graph calls no hooks when it is replayed, and nothing is
    recorded while it is captured: of an `ampkit.graphed_step`, compare what it leaves and returns, with `state`. Inside
    compiled code no hooks are called either: what `torch.compile(module)` returned is watched from outside. Gradients
    are compared as the backward computes them, so give both runs the same loss scale.

    The unit in the last place of x, in a format of precision p and least exponent e_min, is
    `2 ** (max(e, e_min) - p + 1)` for `2 ** e <= |x| < 2 ** (e + 1)` (Muller, "On the definition of ulp(x)", INRIA
    RR-5504, 2005, after Goldberg 1991). Here x is the larger of the two elements, and the format is the coarser of the
    two dtypes: rounding float32 correctly to bfloat16 is at most 0.5 ulp. Integers count by 1.

    Args:
        fn_a: the run to compare with.
        fn_b: the other run.
        *args: the arguments of both functions.
        model: the module whose outputs are compared; two of equal structure if each run has its own.
        state: everything else that the runs change: modules, optimizers, and objects with `state_dict` and
            `load_state_dict` (a gradient scaler, a scheduler). With two models it is put back, but not compared.
        min_db: the least SQNR of tensors that count as equal. None compares bit by bit.
        generators: the generators from which the runs draw, besides the default ones.

    Returns:
        A `Comparison`.

    Raises:
        ValueError: something in `state` cannot be put back.

    Before the second run, and at the end, everything in `model` and `state` is put back: parameters, buffers,
    gradients, optimizer state and hyperparameters, and what is in their lists and dicts. So are the random numbers of
    torch, Python and numpy. Train mode and plain attributes of modules are not put back.

    Sync: waits for the device. Memory: a copy of each recorded tensor, on its device during a run, on the host after.
    """
    for name, fn in {"fn_a": fn_a, "fn_b": fn_b}.items():
        check_callable("compare", name, fn, "a function to run")
    models = model if isinstance(model, tuple) else (model, model)
    if len(models) != 2 or not all(each is None or isinstance(each, nn.Module) for each in models):
        raise wrong("compare", "model", model, "a torch.nn.Module, a tuple of two, or None")
    if min_db is not None and real_number(min_db) is None:
        raise wrong("compare", "min_db", min_db, "a number of decibels, or None for equal bits")
    check_instance("compare", "state", state, (tuple, list), "a tuple of modules, optimizers and the like")
    generators = read_all("compare", "generators", generators, torch.Generator, "a sequence of torch.Generator")
    found = {id(part): part for part in (*models, *state) if part is not None}
    start = SavedState([*found.values()], generators)
    runs = []
    try:
        for fn, own_model in zip((fn_a, fn_b), models, strict=True):
            parts = start.parts if models[0] is models[1] else [own_model]
            runs.append(record_run(partial(fn, *args), own_model, parts))
            start.restore()
    except BaseException:
        start.restore()
        raise
    a, b = runs
    rows = []
    for which in (which for which in a if which in b):
        (of_a, device), (of_b, _) = a[which], b[which]
        equal, db, ulp = False, -math.inf, math.inf
        if of_a.shape == of_b.shape:
            # On the device of run a: the host would take long over large ones.
            equal, db, ulp = distance(of_a.to(device), of_b.to(device))
        shapes, dtypes = (tuple(of_a.shape), tuple(of_b.shape)), (of_a.dtype, of_b.dtype)
        rows.append(ComparedTensor(which.path, which.direction, which.call, shapes, dtypes, db, ulp, equal))
    return Comparison(
        rows=tuple(rows),
        only_a=tuple(str(which) for which in a if which not in b),
        only_b=tuple(str(which) for which in b if which not in a),
        min_db=min_db,
    )
