"""Inputs and outputs of several calls, stacked along dimension 0: checked, sliced, put together."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._capture.keys.inputs import Constant, Spec, TensorSpec, check_plain, flatten, path, read_batch
from ..._errors import InputMismatch
from ..._text import dtype_name
from ..._torch.tensors.tree import TreeSpec, tree_flatten, tree_unflatten
from ..training_step import StepOutput


class Words(NamedTuple):
    """What messages call a method, one of its calls, and several of them; the caller's function, and its outputs."""

    method: str
    one: str
    many: str
    function: str = "step"
    outputs: str = "what loss_fn returned in aux"


SCAN = Words("scan", "step", "steps")


class Stack:
    """Inputs of several calls: trees of tensors with equal dimension 0, and of constants that all calls get.

    Args:
        args, kwargs: the inputs.
        device: where the tensors must be.
        words: what messages say.
        pad: `pad(args, kwargs, count)` returns the inputs of so many calls as these get them; None: as they are.

    Attributes:
        shown: the first tensor and its shape, in words.
        count: how many calls there are.
        leaves: tensors and constants.
        tree: the structure of the inputs.
        spec: the layout of the inputs of one call.

    Raises:
        InputMismatch: a tensor has no dimension 0, or another size there than the first one; there is no tensor, or no
            call; or a leaf cannot be an argument, see `read_batch`.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
        words: Words,
        pad: Callable[..., Any] | None = None,
    ) -> None:
        self.leaves, self.tree = flatten(args, kwargs)
        place = -1  # of the first tensor
        for i, leaf in enumerate(self.leaves):
            if not isinstance(leaf, Tensor):
                continue
            check_plain(leaf, self.tree, i)
            if leaf.dim() and (place < 0 or len(leaf) == len(self.leaves[place])):
                place = i if place < 0 else place
                continue
            where, shape = path(self.tree, i), tuple(leaf.shape)
            if not shape:
                raise InputMismatch(
                    f"{words.method}: {where} has shape (), and needs a leading dimension, with one entry per "
                    f"{words.one}. Pass {where}.expand(K) for K {words.many} with the same value, or torch.stack of K "
                    "values."
                )
            count, known = len(self.leaves[place]), tuple(self.leaves[place].shape)
            raise InputMismatch(
                f"{words.method}: {where} has shape {shape}, which is for {shape[0]} {words.many}, but "
                f"{path(self.tree, place)} has shape {known}, which is for {count}. Stack one entry per {words.one} in "
                f"each tensor. What all {words.many} share, pass as {where}.expand({count}, *{where}.shape)."
            )
        if place < 0:
            raise InputMismatch(
                f"{words.method}: the inputs have no tensor, and the number of {words.many} is the leading dimension "
                f"of the tensors. Pass tensors made by torch.stack, or call the {words.function} itself."
            )
        self.count: int = len(self.leaves[place])
        self.shown: str = f"{path(self.tree, place)} has shape {tuple(self.leaves[place].shape)}"
        if not self.count:
            raise InputMismatch(f"{words.method}: {self.shown}, which is for 0 {words.many}. Pass at least one.")
        if pad is not None:
            self.leaves, self.tree = flatten(*pad(args, kwargs, self.count))
        first, named = sliced(self.leaves, self.tree, 0)
        self.spec, _ = read_batch(first, named, device)

    def inputs(self, i: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs of call i. Aliasing: views."""
        return sliced(self.leaves, self.tree, i)

    def spec_of(self, calls: int) -> Spec:
        """Return the layout of a stack of this many calls."""
        specs: list[TensorSpec | Constant] = [
            spec._replace(shape=(calls, *spec.shape), stride=(leaf.stride(0), *spec.stride))
            if isinstance(spec, TensorSpec)
            else spec
            for leaf, spec in zip(self.leaves, self.spec.leaves, strict=True)
        ]
        return Spec(self.spec.structure, tuple(specs))


def sliced(leaves: Sequence[Any], tree: TreeSpec, i: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of call i of a stack. Aliasing: views."""
    args, kwargs = tree_unflatten([leaf[i] if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree)
    return args, kwargs


class StackedOutputs(NamedTuple):
    """Outputs of several calls in a row, see `StepOutput`, each tensor with the calls along dimension 0."""

    loss: Tensor
    aux: Any
    grad_norms: Tensor | None  # one per optimizer step
    skipped: Tensor
    stepped: tuple[bool, ...]


def stacked(outs: Sequence[StepOutput], *, views: bool = False) -> StackedOutputs:
    """Return the outputs of calls as one, see `losses_and_aux`: as views of these tensors if it is copied later."""
    norms = [out.grad_norm for out in outs if out.grad_norm is not None]
    flags = [out.skipped for out in outs]
    # Without a loss scale a step returns the same constant each time.
    is_constant = views and all(flag is flags[0] for flag in flags)
    skipped = flags[0].expand(len(flags)) if is_constant else torch.stack(flags)
    stepped = tuple(bool(out.stepped) for out in outs)
    return StackedOutputs(*losses_and_aux(outs, SCAN), torch.stack(norms) if norms else None, skipped, stepped)


def losses_and_aux(outs: Sequence[StepOutput], words: Words) -> tuple[Tensor, Any]:
    """Return the losses of calls as one tensor, and their aux as one tree, in tensors of their own.

    Raise a `ValueError` if their aux do not fit together.
    """
    aux = joined([out.aux for out in outs], torch.stack, 0, words)
    return torch.stack([out.loss for out in outs]), aux


def concatenated(pieces: Sequence[StackedOutputs]) -> StepOutput:
    """Return the outputs of several calls each as one. Raise a `ValueError` if their aux do not fit together."""
    if len(pieces) == 1:
        return StepOutput(*pieces[0])
    norms = [piece.grad_norms for piece in pieces if piece.grad_norms is not None]
    return StepOutput(
        torch.cat([piece.loss for piece in pieces]),
        joined([piece.aux for piece in pieces], torch.cat, 1, SCAN),
        torch.cat(norms) if norms else None,
        torch.cat([piece.skipped for piece in pieces]),
        tuple(each for piece in pieces for each in piece.stepped),
    )


def joined(trees: Sequence[Any], join: Callable[[list[Any]], Tensor], begin: int, words: Words) -> Any:
    """Return one tree of tensors and None. `join` makes one tensor of those at each place of the trees.

    Their shapes must be equal from dimension `begin` on.
    """
    flat = [tree_flatten(tree) for tree in trees]
    leaves, tree = flat[0]
    layouts = [[None if leaf is None else (leaf.dtype, leaf.shape[begin:]) for leaf in others] for others, _ in flat]
    for (others, other), layout in zip(flat, layouts, strict=True):
        if layout != layouts[0] or other != tree:
            one, two = f"a tree of {len(leaves)} leaves", f"another one of {len(others)}"
            differ = [pair for pair in zip(layouts[0], layout, strict=False) if pair[0] != pair[1]]
            if differ:
                shown = (
                    "None" if each is None else f"{dtype_name(each[0])} of shape {tuple(each[1])}" for each in differ[0]
                )
                one, two = shown
            raise ValueError(
                f"{words.method}: the {words.many} were done, but {words.outputs} cannot be stacked: "
                f"{one} in one {words.one}, {two} in another. Return tensors of one shape and dtype, or call the "
                f"{words.function} itself."
            )
    columns = zip(*(others for others, _ in flat), strict=True)
    return tree_unflatten([None if column[0] is None else join([*column]) for column in columns], tree)
