"""Which weights a captured step reads in the dtype that it computes in, and their way there and back."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.autograd import graph_nodes, has_gradient_hooks, output_dtype
from .._torch.modes import TorchDispatchMode, enter
from .._torch.modules import module_tables
from .._torch.operators import TO_COPY
from .._torch.tensors import foreach_add_, foreach_copy_
from .._torch.tree import tree_flatten
from .._undo import Undo
from .._user_line import wraps_operations

wraps_operations(__file__)

_LOW = (torch.float16, torch.bfloat16)


class WorkingWeights:
    """Low-precision copies of weights that autocast would cast one by one, in forward, and whose gradients in backward.

    In place of two small kernels per weight there are two for all weights. While the step computes, modules hold the
    copies; before and after it they hold the masters, so that optimizers, checkpoints, averages and everybody else see
    those alone. The bits are autocast's: a weight has a copy only if a step that was watched did nothing with it but
    cast it, once, and if its gradient came back through that cast.

    Args:
        model: the module that holds the weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies: dict[nn.Parameter, nn.Parameter] = {}  # by master
        self._all: list[nn.Parameter] = []  # also those given up: a graph that was captured with one writes to it
        self._refused: set[nn.Parameter] = set()

    def __len__(self) -> int:
        return len(self._copies)

    @contextmanager
    def watching(self) -> Iterator["_Uses"]:
        """Context for a forward, whose loss `learn` is to be given then."""
        uses = _Uses()
        with Undo() as undo:
            enter(undo, uses)
            yield uses

    def learn(self, uses: "_Uses", loss: Tensor) -> None:
        """Find the weights that the watched forward only cast, and make their copies; give up those that it did not."""
        consumers = _consumers(loss)
        for param in self._model.parameters():
            nodes = consumers.get(param, [])
            if not nodes and not uses.all[id(param)]:
                continue  # not in this layout
            dtype = output_dtype(nodes[0]) if len(nodes) == 1 and nodes[0].name() == "ToCopyBackward0" else None
            only_cast = uses.all[id(param)] == uses.casts[id(param)] == 1
            if dtype not in _LOW or not only_cast or has_gradient_hooks(param) or param in self._refused:
                self._refused.add(param)
                self._copies.pop(param, None)
            elif param not in self._copies or self._copies[param].dtype is not dtype:
                self._all.append(nn.Parameter(torch.empty_like(param, dtype=dtype)))
                self._copies[param] = self._all[-1]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context for forward and backward in which modules hold the copies. At its end the masters have the gradients,
        added to those they had. Sync: none.
        """
        present = [param for param in self._model.parameters() if param in self._copies]
        masters = {self._copies[param]: param for param in present}
        with torch.no_grad():
            if present:
                foreach_copy_(list(masters), present)
        with Undo() as undo:
            undo.note(self._put_back, masters)
            self._exchange(self._copies)
            yield
            with torch.no_grad():
                _hand_over(masters)

    def _put_back(self, masters: "dict[nn.Parameter, nn.Parameter]") -> None:
        self._exchange(masters)
        for copy in masters:
            copy.grad = None

    def _exchange(self, new: "dict[nn.Parameter, nn.Parameter]") -> None:
        for module in self._model.modules():
            table = module_tables(module)[0]
            for name, param in table.items():
                if param in new:
                    table[name] = new[param]


class _Uses(TorchDispatchMode):
    """Counts what operations do with a tensor, by its id."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated in torch
        self.all: Counter[int] = Counter()
        self.casts: Counter[int] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as it is. What it does to a weight is no cast in the graph of the loss."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_flatten((args, kwargs))[0]:
            if isinstance(leaf, Tensor):
                self.all[id(leaf)] += 1
                self.casts[id(leaf)] += func is TO_COPY
        return func(*args, **(kwargs or {}))


def _consumers(loss: Tensor) -> dict[Tensor, list[Any]]:
    """Return the nodes of the graph that hand a gradient to a leaf, by leaf."""
    found: dict[Tensor, list[Any]] = {}
    for node in graph_nodes([loss]):
        for following, _ in node.next_functions:
            if hasattr(following, "variable"):
                found.setdefault(following.variable, []).append(node)
    return found


def _hand_over(masters: "dict[nn.Parameter, nn.Parameter]") -> None:
    """Cast the gradients of the copies and give them to their masters: one kernel, and one more where they add up."""
    made = [(master, copy.grad, torch.empty_like(master)) for copy, master in masters.items() if copy.grad is not None]
    if not made:
        return
    foreach_copy_([fresh for _, _, fresh in made], [grad for _, grad, _ in made])
    held = [(master.grad, fresh) for master, _, fresh in made if master.grad is not None]
    if held:
        foreach_add_([grad for grad, _ in held], [fresh for _, fresh in held])
    for master, _, fresh in made:
        if master.grad is None:
            master.grad = fresh
