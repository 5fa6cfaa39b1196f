"""Working weights: copies in low precision of the weights that autocast would cast, and how the gradients get back.

In a captured step the copies lie in autocast's own cache of casts, so that user code sees the parameters themselves.
What compiled code reads are its inputs, and there the copies are the parameters of the modules (`in_place`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._capture.ranks.reducers import Reducers
from .._torch.autograd.autograd import current_graph_task, graph_nodes, leaf_hooks, output_dtype, post_accumulate_hooks
from .._torch.tensors.cast_cache import beginning, enter_autocast, fill_cache
from .._torch.tensors.fast_paths import autocast_of_parts
from .._torch.tensors.modes import WatchingMode, enter
from .._torch.tensors.modules import module_tables
from .._torch.tensors.operators import TO_COPY
from .._torch.tensors.tensors import foreach_add_, foreach_copy_
from .._torch.tensors.tree import tensors_in
from .._undo import Undo
from .._user_line import wraps_operations

wraps_operations(__file__)

LOW = (torch.float16, torch.bfloat16)


class WorkingWeights:
    """Copies of weights in the dtype that autocast casts them to.

    Autocast takes two small kernels per weight: it casts the weight in forward, and its gradient in backward. With
    working weights there are two kernels for all weights together. Optimizers, checkpoints and averages see the master
    weights alone.

    The bits are those of autocast. A weight gets a copy only if an eager step has done nothing with it but cast it
    once, and if its gradient came back through that cast.

    Args:
        model: the module whose weights are copied.
        store: all copies that were made. Several `WorkingWeights` of one model that share it have the same copies.
        write: gets the copies and the weights, and writes the ones to the others.
        averaging: averages gradients over processes within a backward.
    """

    def __init__(
        self,
        model: nn.Module,
        store: "dict[tuple[nn.Parameter, torch.dtype], nn.Parameter] | None" = None,
        write: Callable[[list[Any], list[Any]], None] = foreach_copy_,
        *,
        averaging: Reducers | None = None,
    ) -> None:
        self._model = model
        self._write = write
        self._averaging = averaging
        self._copies: dict[nn.Parameter, nn.Parameter] = {}  # by master weight
        self._all = {} if store is None else store  # also those no longer used, because older graphs write to them
        self._is_used = False  # whether `cached` has written to copies, as graphs do
        self._refused: set[nn.Parameter] = set()
        self._gradients: dict[nn.Parameter, Tensor] = {}  # of casts, in a backward
        self._casts, self._task = False, -1  # whether there are copies for them, and the number of that backward
        self._exchanged: Callable[[nn.Parameter, Tensor], bool] | None = None

    def __len__(self) -> int:
        return len(self._copies)

    @contextmanager
    def watching(self) -> Iterator["_Uses"]:
        """Context for a forward. It yields what `learn` takes, together with the loss."""
        uses = _Uses()
        with Undo() as undo:
            enter(undo, uses)
            yield uses

    def learn(self, uses: "_Uses", loss: Tensor) -> None:
        """Make copies of the weights that this forward has only cast. Give up copies of those it used otherwise."""
        if self._averaging is not None and self._averaging.searching:
            return
        consumers: dict[Tensor, list[Any]] = {}  # the autograd nodes that compute the gradient of a leaf
        for node in graph_nodes([loss]):
            for following, _ in node.next_functions:
                if hasattr(following, "variable"):
                    consumers.setdefault(following.variable, []).append(node)
        for param in self._model.parameters():
            nodes = consumers.get(param, [])
            if not nodes and not uses.all[id(param)]:
                continue  # this forward did not use it
            dtype = output_dtype(nodes[0]) if len(nodes) == 1 and nodes[0].name() == "ToCopyBackward0" else None
            only_cast = uses.all[id(param)] == uses.casts[id(param)] == 1
            hooked = leaf_hooks(param) or post_accumulate_hooks(param)
            if dtype not in LOW or not only_cast or hooked or param in self._refused:
                self._refused.add(param)
                self._copies.pop(param, None)
            elif param not in self._copies or self._copies[param].dtype is not dtype:
                if (param, dtype) not in self._all:
                    self._all[param, dtype] = nn.Parameter(torch.empty_like(param, dtype=dtype))
                self._copies[param] = self._all[param, dtype]

    def drop_unused(self) -> None:
        """Free all copies, unless a graph may write to them: where no step is captured as a whole, none is needed."""
        if not self._is_used:
            self._copies.clear()
            self._all.clear()

    @contextmanager
    def cached(self) -> Iterator[None]:
        """Context for forward and backward, in which autocast finds the copies where it keeps its casts.

        A cast of a copy gives its gradient to `_taken`, in the backward that begins at what `begin` returned. At the
        end these gradients are added to those of the master weights. If processes average gradients within the
        backward, they go the way of any other gradient there. Sync: none.
        """
        params = self._model.parameters()
        copies = {param: self._copies[param] for param in params if param in self._copies}
        self._is_used |= bool(copies)
        with torch.no_grad():
            if copies:
                self._write(list(copies.values()), list(copies))
        averaging: Any = nullcontext() if self._averaging is None else self._averaging.exchanging({}, _give)
        with Undo() as undo:
            undo.note(self._gradients.clear)
            undo.note(setattr, self, "_task", -1)
            undo.note(setattr, self, "_casts", False)
            self._casts = bool(copies)
            with averaging as self._exchanged:
                if copies:
                    enter_autocast(undo, partial(fill_cache, copies, self._taken))
                yield
            self._add_taken()

    def begin(self, loss: Tensor) -> Tensor:
        """Return the loss at which the backward is to begin that adds to the gradients of the weights.

        Backward passes within it, and those of the user's, get the gradients of casts as from any other cast.
        """
        return beginning(loss, self._note_task) if self._casts else loss

    def _note_task(self) -> None:
        self._task = current_graph_task()

    def _taken(self, master: nn.Parameter, gradient: Tensor) -> bool:
        """Return whether the gradient of a cast was taken here. Otherwise it is to be cast, and goes on its way."""
        if current_graph_task() != self._task:
            return False
        if self._averaging is not None:
            assert self._exchanged is not None
            return self._exchanged(master, gradient)
        if master in self._gradients:  # in this backward, the second cast of the weight
            self._add_taken()
            return False
        self._gradients[master] = gradient
        return True

    def _add_taken(self) -> None:
        add_cast(list(self._gradients.items()))
        self._gradients.clear()

    @contextmanager
    def in_place(self, kept: "dict[Tensor, Tensor] | None" = None) -> Iterator[None]:
        """Context for forward and backward of compiled code, in which the modules have the copies as their parameters.

        At its end the gradients of the copies are added to those of the master weights. Those of weights that have no
        gradient go to `kept` instead, by master weight and not cast. If processes average gradients within the
        backward, each gradient is cast as soon as it is there, and goes the way of any other. Sync: none.
        """
        present = [param for param in self._model.parameters() if param in self._copies]
        masters = {self._copies[param]: param for param in present}
        with torch.no_grad():
            if present:
                self._write(list(masters), present)
        copies = {master: copy for copy, master in masters.items()}
        with Undo() as undo:
            with nullcontext() if self._averaging is None else self._averaging.exchanging(copies, _give):
                undo.note(self._put_back, masters)
                self._exchange(copies)
                yield
            if kept is not None:
                alone = [(master, copy) for copy, master in masters.items() if master.grad is None]
                kept.update((master, copy.grad) for master, copy in alone if copy.grad is not None)
                masters = {copy: master for copy, master in masters.items() if master not in kept}
            _move_gradients(masters)

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


class _Uses(WatchingMode):
    """Counts what operations do with a tensor, by its id. torch.cond and flex_attention count as one each.

    Casts in compiled code are no nodes of the loss's graph, so its weights get no copies.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated in torch
        self.all: defaultdict[int, int] = defaultdict(int)  # a Counter has its zeros made by Python code
        self.casts: defaultdict[int, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            self.all[id(tensor)] += 1
            self.casts[id(tensor)] += func is TO_COPY
        with autocast_of_parts(func):
            return func(*args, **(kwargs or {}))


def _give(master: nn.Parameter, copy: Any) -> None:
    _move_gradients({copy: master})
    copy.grad = None


def _move_gradients(masters: "dict[nn.Parameter, nn.Parameter]") -> None:
    """Cast the gradients of the copies and add them to those of the master weights."""
    add_cast([(master, copy.grad) for copy, master in masters.items() if copy.grad is not None])


def add_cast(gradients: "list[tuple[Any, Tensor]]") -> None:
    """Cast gradients and add them to those of their parameters: one kernel each for all."""
    if not gradients:
        return
    with torch.no_grad():
        made = [(master, torch.empty_like(master)) for master, _ in gradients]
        foreach_copy_([fresh for _, fresh in made], [gradient for _, gradient in gradients])
        sums = [(master.grad, fresh) for master, fresh in made if master.grad is not None]
        if sums:
            foreach_add_([grad for grad, _ in sums], [fresh for _, fresh in sums])
        for master, fresh in made:
            if master.grad is None:
                master.grad = fresh
