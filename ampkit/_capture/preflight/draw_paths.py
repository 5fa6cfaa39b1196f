"""What a step does on the host around its random draws: paths from read to read, and the tree of all known ones."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._torch.tensors.modes import without_dispatch_modes, without_torch_function
from ..._torch.tensors.tree import tensors_in

Outcomes = tuple[Hashable, ...]  # what the host has read, in order: True and False, whole numbers, or tuples of these
NEW: Outcomes = ("?",)  # outcomes that no eager call under the preflight has had


class Slot(NamedTuple):
    """Stands for the tensor that is the n-th result of the operations of a path."""

    number: int


class Leaf(NamedTuple):
    """Stands for the n-th argument of the call, or for a tensor of the state by its path."""

    number: int | str


@dataclass(frozen=True)
class Held:
    """Stands for a tensor that is the same in each call: two of these are equal if their keys are."""

    key: Any
    tensor: Tensor = field(compare=False)


class Like(NamedTuple):
    """Stands for a tensor that is made anew, because only its layout decides how much is drawn."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class DrawOperation(NamedTuple):
    """An operation on the CPU. In its arguments, lists are tuples, and tensors are `Slot`, `Leaf`, `Held` or `Like`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


class NumberRead(NamedTuple):
    """The host reads a number, or a few of them."""

    slot: Slot | Leaf | Held  # of which tensor: a result, or an argument of the call
    learn: Callable[..., Any]  # returns what the host learns from the number; `tuple` if it reads all in the tensor
    by: Any = None  # its second argument, for a comparison with a number; None if it has one argument

    def outcome(self, number: Any) -> Hashable:
        """Return what the host learns of this number."""
        value = self.learn(number) if self.by is None else self.learn(number, self.by)
        assert isinstance(value, (bool, int, tuple))
        return value

    def outcome_of(self, tensor: Tensor) -> Hashable:
        """Return what the host learns of this tensor."""
        return self.outcome(tensor.reshape(-1).tolist() if self.learn is tuple else tensor.item())


class Segment(NamedTuple):
    """What a step does on the host between two reads."""

    operations: tuple[DrawOperation, ...]  # draws, and what is computed from their numbers
    read: NumberRead | None  # what is read then; None behind the last read of a step
    outcome: Hashable = None  # what the host learned by that


class DrawPath(NamedTuple):
    """What a step does on the host."""

    segments: tuple[Segment, ...]

    @property
    def outcomes(self) -> Outcomes:
        """What the host has learned."""
        return tuple(segment.outcome for segment in self.segments if segment.read is not None)


NOTHING_DRAWN = DrawPath((Segment((), None),))


@dataclass(eq=False)
class _Node:
    """What a step does on the host after some outcomes, and what follows by the outcome of its next read."""

    operations: tuple[DrawOperation, ...]
    read: NumberRead | None
    next: dict[Hashable, "_Node"] = field(default_factory=dict)


@dataclass(eq=False)
class Tree:
    """The paths that the host may take in a step, as far as they are known."""

    _start: dict[Hashable, _Node] = field(default_factory=dict)  # has one node, of what comes first
    paths: int = 0  # how many there are

    def add(self, path: DrawPath) -> bool:
        """Add a path. Return whether it fits: after the same outcomes the host has done the same on all paths."""
        nodes, outcome, new = self._start, None, False
        for segment in path.segments:
            node = nodes.get(outcome)
            if node is None:
                node = nodes[outcome] = _Node(segment.operations, segment.read)
                new = True
            elif (node.operations, node.read) != (segment.operations, segment.read):
                return False
            nodes, outcome = node.next, segment.outcome
        self.paths += new
        return True

    def draw(self, leaves: Sequence[Any] = (), state: Callable[[], Mapping[str, Tensor]] = dict) -> Outcomes | None:
        """Draw as the step does with these arguments and this state.

        Return the outcomes; None as soon as what follows is unknown.
        """
        node, results, outcomes = self._start.get(None), list[Tensor](), list[Hashable]()
        given = _CallTensors(leaves, state)
        # The modes of the user's must not see these operations, nor change them.
        with without_torch_function(), torch.no_grad():
            while node is not None:
                for function, arguments, named in node.operations:
                    args = [_filled(argument, results, given) for argument in arguments]
                    kwargs = {name: _filled(argument, results, given) for name, argument in named}
                    results += tensors_in(function(*args, **kwargs))
                if node.read is None:
                    return tuple(outcomes)
                outcomes.append(node.read.outcome_of(_filled(node.read.slot, results, given)))
                node = node.next.get(outcomes[-1])
        return None


@dataclass(eq=False)
class _CallTensors:
    """What a call is given: its arguments by number, and the state by path."""

    _leaves: Sequence[Any]
    _state: Callable[[], Mapping[str, Tensor]]

    @functools.cached_property
    def _tensors(self) -> Mapping[str, Tensor]:
        return self._state()

    def __getitem__(self, number: int | str) -> Any:
        return self._leaves[number] if isinstance(number, int) else self._tensors[number]


def _filled(argument: Any, results: Sequence[Tensor], given: _CallTensors) -> Any:
    """Return an argument with tensors in it."""
    kind = type(argument)
    if kind is Slot:
        return results[argument.number]
    if kind is Leaf:
        return given[argument.number]
    if kind is Held:
        return argument.tensor
    if kind is Like:
        return torch.empty_strided(argument.shape, argument.stride, dtype=argument.dtype).zero_()
    return [_filled(each, results, given) for each in argument] if kind is tuple else argument


def repeats(path: DrawPath, before: Tensor, after: Tensor) -> bool:
    """Return whether drawing from the generator's state `before` leads along this path to its state `after`.

    It does not if something else has drawn, such as compiled code, or if the step has put the generator back.
    """
    tree = Tree()
    tree.add(path)
    now = torch.default_generator.get_state()
    with without_dispatch_modes():
        try:
            torch.default_generator.set_state(before)
            outcomes = tree.draw()
            return outcomes == path.outcomes and torch.equal(torch.default_generator.get_state(), after)
        except (RuntimeError, IndexError):  # a draw whose numbers depend on tensors that are not there
            return False
        finally:
            torch.default_generator.set_state(now)
