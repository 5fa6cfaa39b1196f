"""What cannot be captured: operations, autograd nodes and random numbers, each with what to write instead.

Where code of a library is what cannot be captured, and an option of the library's avoids it, that is what to write.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._torch.ranks.reducer import is_bitmap_copy
from ..._torch.tensors.fake_tensors import is_fake
from ..._torch.tensors.host_counts import counted_masks
from ..._torch.tensors.operators import INDEXING, OperationCall, kind_of
from ..._torch.tensors.tensors import is_same_generator
from ..._torch.tensors.tree import tensors_in
from ..._user_line import SourceLocation


class Problem(NamedTuple):
    """Something in a step that cannot be captured."""

    what: str  # what happens
    advice: str  # what to write instead
    elsewhere: str = ""  # what to write instead outside of a graphed step, if that differs
    graph_only: bool = False  # whether only a graph rules it out. Otherwise the host waits for the device
    whole_line: bool = False  # whether it explains all else that is wrong with its line


_KEEP_SHAPE = "Use torch.where or masked_fill, which keep the shape."
DRAW_ON_DEVICE = "Draw with torch on the device, or before the step and pass the numbers in as a tensor."
HOST_DRAW = Problem("draws random numbers on the host, which a graph would freeze", DRAW_ON_DEVICE, graph_only=True)
WAITS = Problem(
    "waits for the device",
    "Do it before or after the step, or with operations that stay on the device.",
    "Do it with operations that stay on the device, or once in many steps.",
)
READ = Problem(
    "waits for the device to read a value (.item(), float(tensor), `if tensor:`)",
    "Keep the value on the device (torch.where), or return it in aux and read it after the step.",
    "Keep the value on the device (torch.where), or read it once in many steps.",
)
# torch's `ctc_loss` copies lengths between host and device in forward, backward and mean (aten/src/ATen/native/cuda/
# LossCTC.cu, LossCTC.cpp). cuDNN's form, for int32 tensors, takes them where they are. But eagerly it looks at them on
# the host, and in a capture it asserts on the device that input lengths are below 256, which fails with valid ones.
CTC = Problem(
    "ctc_loss waits for the device: it handles the lengths on the host, as tensors or as numbers",
    "Have ampkit.make_graphed_callables capture the module that computes log_probs, and call the loss behind it.",
    "Lengths that are tuples or tensors on the CPU are copied to the device only, and not read from it first.",
    whole_line=True,
)
GROUPED = Problem(
    "grouped_mm waits for the device to read the sizes of its groups, except in bfloat16",
    'Autocast leaves it in float32: give it a rule, Policy(compute="bfloat16", ops={"grouped_mm": "bfloat16"}).',
)
# aten/src/ATen/native/LossNLL.cpp: with these it selects the targets that count by a mask. Under a dispatch mode it
# does not, but adds the weights in another order.
SMOOTHED = Problem(
    "cross_entropy with class weights and label smoothing waits for the device to count targets that are not ignored",
    'Write cross_entropy(..., reduction="sum"), and divide by weight[labels].sum(), without ignored labels.',
    whole_line=True,
)
PRINT = Problem(
    "prints a tensor, which reads it", "Return it in aux and print it after the step.", "Print it once in many steps."
)


def host_copy(name: str) -> Problem:
    """Return the problem of a method that copies a tensor's values to the host."""
    advice = "Keep the values on the device, or return the tensor in aux and read it after the step."
    elsewhere = "Keep the values on the device, or read them once in many steps."
    return Problem(f".{name}() waits for the device to read a tensor", advice, elsewhere)


def list_read(name: str) -> Problem:
    """Return the problem of a function that makes a tensor of a list with tensors in it."""
    what = f"{name}() of a list of tensors waits for the device to read each of them"
    return Problem(what, "Use torch.stack, or torch.cat, which stays on the device.")


def host_wait(name: str) -> Problem:
    """Return the problem of a function that does nothing but wait."""
    streams = "Leave it out, or have a stream wait (stream.wait_stream, event.wait), which does not hold up the host."
    return Problem(f"{name} waits for the device", "Wait after the step.", streams)


def sets_generator(how: str) -> Problem:
    """Return the problem of a call that sets a generator of random numbers to a seed or state."""
    what = f"{how} sets a generator of random numbers, which a replay would leave out"
    advice = "Seed before the first step. For numbers that are the same each time, draw them once and pass them in."
    return Problem(what, advice, graph_only=True)


class Watched(NamedTuple):
    """What a step has that its problems depend on: as `Preflight` is given it."""

    device: torch.device
    generators: tuple[torch.Generator, ...]
    bitmaps: tuple[int, ...]

    def has(self, tree: Any) -> bool:
        """Return whether a tensor in a tree is on a device of this type."""
        here = (tensor for tensor in tensors_in(tree) if tensor.device.type == self.device.type)
        return any(not is_fake(type(tensor)) for tensor in here)


def problems_of(call: OperationCall, watched: Watched, waited: bool) -> list[Problem]:
    """Return why a call of an operation below autograd cannot be captured, in which the host has waited or not."""
    check = _check_of(call.op)
    problems = list(check(call, watched)) if check else []
    if waited and not problems:
        return [WAITS._replace(what=f"{call.kind.name} {WAITS.what}")]
    return [problem._replace(graph_only=False) for problem in problems] if waited else problems


def problem_of(node: Any) -> Problem | None:
    """Return why an autograd node cannot be captured, for one of those that wait only if there is no dispatch mode.

    A dispatch mode makes tensors "subclass-like". For these, some formulas of csrc/autograd/FunctionsManual.cpp have
    another form, which rounds otherwise. The nodes were found with all operations in torch's own test samples.
    """
    name = str(node.name())
    # The gradient of the value that fills, if it is a tensor.
    fills = name.startswith("MaskedFillBackward") and len(node.next_functions) > 1 and node.next_functions[1][0]
    if fills or name.startswith(("ProdBackward", "CumprodBackward")):
        advice = "Write it with other operations (exp and log, torch.where), or as a torch.autograd.Function."
        return Problem(f"{name} looks at values on the host", advice)
    return None


# Parts of the path of torch's line, or of the library's, and what to write.
_REMEDIES = (
    (
        ("torch/distributions/distribution.py", "torch/distributions/constraints.py"),
        "It checks arguments: pass validate_args=False to the distribution, or call "
        "torch.distributions.Distribution.set_default_validate_args(False) once.",
    ),
    (
        ("torch/nn/modules/transformer.py",),
        "It looks whether the mask is causal: pass tgt_is_causal (nn.TransformerDecoder, nn.Transformer) or is_causal "
        "(nn.TransformerEncoder) as True or False.",
    ),
    (
        ("torch_geometric/utils/loop.py", "torch_geometric/nn/conv/gcn_conv.py"),
        "Add the self-loops before the first step and pass add_self_loops=False to the layers; GCNConv(cached=True) "
        "does so for a graph that stays the same.",
    ),
    (("/torchmetrics/",), "Update metrics behind the step, with tensors that it returns."),
)


def remedy(place: SourceLocation) -> str:
    """Return what to write instead of what happens there, "" if that is in no library which is known here."""
    where = place.inside, place.line.replace("\\", "/").partition(": `")[0]
    return next((text for parts, text in _REMEDIES if any(part in each for part in parts for each in where)), "")


# ------------------------------------------------------------------------------------------------- checks by operation


def _reads(call: OperationCall, watched: Watched) -> Iterator[Problem]:
    if not watched.has(call.args):
        return
    if call.kind.name in _SINGLE_READS:
        yield READ
    else:
        yield READ._replace(what=f"{call.kind.name} waits for the device", advice=_COMPARE, elsewhere=_COMPARE)


def _groups(call: OperationCall, watched: Watched) -> Iterator[Problem]:
    # aten/src/ATen/native/cuda/GroupedBlas.cpp: products of other dtypes are computed one by one, in slices that the
    # host cuts.
    if watched.has(call.args) and any(matrix.dtype is not torch.bfloat16 for matrix in call.args[:2]):
        yield GROUPED


def _decides(call: OperationCall, watched: Watched) -> Iterator[Problem]:
    # `if condition:` and `while condition:` in torch/_higher_order_ops, below all dispatch modes.
    condition = call.args[0 if call.kind.name == "cond" else 2]  # those of a loop are computed from its state
    if watched.has(condition):
        yield Problem(f"torch.{call.kind.name} waits for the device to read its condition", _DECIDE, whole_line=True)


def _depends_on_data(call: OperationCall, watched: Watched) -> Iterator[Problem]:
    if watched.has((call.args, call.kwargs)):
        what = f"{call.kind.name} waits for the device: the shape of its result depends on data"
        yield Problem(what, next((text for names, text in _INSTEAD.items() if call.kind.name in names), _KEEP_SHAPE))


def _aligns(call: OperationCall, watched: Watched) -> Iterator[Problem]:
    if watched.has(call.args):
        yield CTC


def _repeats(call: OperationCall, watched: Watched) -> Iterator[Problem]:
    counts = call.args[1] if len(call.args) > 1 else call.args[0]  # in inference mode it may be a number
    if watched.has(counts) and call.kwargs.get("output_size") is None:
        yield Problem("repeat_interleave waits for the device to count its result", "Pass output_size=.")


def _scatters(call: OperationCall, watched: Watched) -> Iterator[Problem]:
    if watched.has(call.args):  # aten/src/ATen/native/TensorAdvancedIndexing.cpp: it calls masked_select
        yield Problem("masked_scatter waits for the device in its backward: it selects by its mask", _SCATTER)


def _indexes(call: OperationCall, watched: Watched) -> Iterator[Problem]:
    indices = tensors_in(call.args[1])
    if not watched.has(call.args[0]):
        return
    for index in indices:
        if index.numel():
            yield from _copied(index, call.args[0], watched)
    if counted_masks(call.args):
        yield Problem("a boolean mask as an index waits for the device to count what it selects", _KEEP_SHAPE)


def _copies(call: OperationCall, watched: Watched) -> Iterator[Problem]:
    pairs = [(call.args[0], call.result)]
    if call.kind.name == "lift_fresh":  # `torch.tensor(data, device=...)` hides its copy from dispatch modes, not this
        pairs = [(None, call.result)]
    elif call.kind.name in ("_foreach_copy_", "_foreach_copy"):
        pairs = list(zip(call.args[1], call.args[0], strict=True))
    elif call.kind.name in ("copy_", "copy"):
        pairs = [(call.args[1], call.args[0])]
    for source, target in pairs:
        yield from _copied(source, target, watched)


def _copied(source: Tensor | None, target: Tensor, watched: Watched) -> Iterator[Problem]:
    """Yield a problem if this copy is between host and device. If there is no source, it is from new host memory."""
    kinds = ("cpu" if source is None else source.device.type, target.device.type)
    if watched.device.type == "cpu" or not target.numel():
        return
    if kinds == (watched.device.type, "cpu"):
        pinned, kind = (True, "pinned") if target.is_pinned() else (False, "pageable")
        advice = "Keep it on the device, or return it in aux and copy it after the step."
        elsewhere = "Keep it on the device, or copy it after the step, to pinned memory with non_blocking=True."
        yield Problem(f"copies from the device to {kind} host memory", advice, elsewhere, graph_only=pinned)
    elif kinds == ("cpu", watched.device.type):
        pinned, kind = (True, "pinned") if source is not None and source.is_pinned() else (False, "pageable")
        if pinned and source is not None and is_bitmap_copy(source, watched.bitmaps):
            return
        advice = "Make the tensor on the device (torch.full, torch.arange) or before the step, or pass it in."
        elsewhere = (
            "Make the tensor on the device (torch.full, torch.arange), or copy it from pinned memory with "
            "non_blocking=True, as ampkit.prefetch does with batches."
        )
        yield Problem(f"copies from {kind} host memory to the device", advice, elsewhere, graph_only=pinned)


def _draws(call: OperationCall, watched: Watched) -> Iterator[Problem]:
    results, generator = call.made, call.kwargs.get("generator")
    device, generators, _ = watched
    if device.type != "cpu" and results and all(tensor.device.type == "cpu" for tensor in results):
        yield HOST_DRAW
    elif generator is not None and generator.device.type == "cuda" == device.type:
        known = (*generators, *torch.cuda.default_generators)
        if not any(is_same_generator(generator, other) for other in known):
            what = "draws from a CUDA generator that the graph does not know"
            yield Problem(what, "Pass generators=[generator].", graph_only=True)


_Check = Callable[[OperationCall, Watched], Iterator[Problem]]
_COMPARE = "Use (a == b).all() or torch.isclose(a, b).all(), which stay on the device as tensors."
_SCATTER = "Compute the mask from the batch alone, or write torch.where with the source in the shape of the mask."
_DECIDE = "Compute both, and choose with torch.where, which stays on the device."
_INSTEAD = {
    ("bincount",): "Write torch.zeros(n, device=x.device).index_add_(0, x, weights), with a number n that is known.",
    ("one_hot",): "Pass num_classes=.",
    ("_unique2", "unique_consecutive", "unique_dim", "unique_dim_consecutive"): (
        "Do it before the step and pass the result in; or count in a tensor of known size (index_add_)."
    ),
}
_CTC = ("_ctc_loss", "_ctc_loss_backward", "_cudnn_ctc_loss", "_use_cudnn_ctc_loss")
_SINGLE_READS = ("_local_scalar_dense", "item", "is_nonzero")
# Operations of ATen have checks by name, others by their tags. `linalg_lstsq` has the tag of a shape that depends on
# data, but the shapes of its solutions do not. If a solver waits, the sync debug mode reports it.
_CHECKS: dict[object, _Check | None] = {
    **dict.fromkeys(_SINGLE_READS, _reads),
    **dict.fromkeys(INDEXING, _indexes),
    **dict.fromkeys(("_to_copy", "to", "copy_", "copy", "_foreach_copy_", "_foreach_copy", "lift_fresh"), _copies),
    "repeat_interleave": _repeats,
    "masked_scatter_backward": _scatters,
    **dict.fromkeys(("cond", "while_loop"), _decides),
    **dict.fromkeys(_CTC, _aligns),
    "_grouped_mm": _groups,
    "linalg_lstsq": None,
    torch.Tag.data_dependent_output: _reads,
    torch.Tag.dynamic_output_shape: _depends_on_data,
    torch.Tag.nondeterministic_seeded: _draws,
}


@functools.cache
def _check_of(op: Any) -> _Check | None:
    """Return the function that finds the problems of an operation's call, None if it can have none."""
    if op is torch.ops.aten.where.default:  # in inference mode it is dispatched instead of `nonzero`
        return _depends_on_data
    name = kind_of(op).name if getattr(op, "namespace", "") in ("aten", "higher_order") else None
    return next((_CHECKS[key] for key in (name, *getattr(op, "tags", ())) if key in _CHECKS), None)
