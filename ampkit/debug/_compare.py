"""Where two runs of one model part: what is recorded of a run, how far apart two tensors are, and what is put back."""

import copy
import math
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._arguments import check_callable, check_instance, read_all, real_number, wrong
from .._capture.state import TrainingState
from .._text import dtype_name, grid
from .._torch.compile import is_compiled
from .._torch.tensors import version
from .._torch.tree import keystr, tree_flatten_with_path

_SHOWN = 20  # rows of a table that does not show all
_HOOKLESS = "a graph that is replayed, and compiled code, call no hooks"
_BY_HOOKS = (", forward", ", backward")  # how `_words` ends for what hooks see


@dataclass(frozen=True)
class ComparedTensor:
    """One tensor of both runs.

    Attributes:
        path: of the module whose output it is, of the parameter or buffer, or of a part of what the function returned;
            without the names that torch.compile and DistributedDataParallel put in.
        direction: "forward" (output of a module), "backward" (gradient of that output), "gradient" (of a parameter,
            after the run), "state" (parameter, buffer or optimizer state, after the run), "result".
        call: which call of the module in the run, from 1.
        shapes: in run a and in run b.
        dtypes: in run a and in run b.
        db: signal-to-quantization-noise ratio in decibels, `20 log10(|a| / |a - b|)` with 2-norms over the elements
            that are finite in both; inf if these are equal, -inf if only one of the two is finite somewhere, or the
            shapes differ.
        ulp: the largest distance of two elements in units in the last place; see `compare`.
        equal: whether the bits are the same, dtype and shape included.
    """

    path: str
    direction: str
    call: int
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[torch.dtype, torch.dtype]
    db: float
    ulp: float
    equal: bool

    def __str__(self) -> str:
        return f"{self.where}, {self.direction}: {self.distance}"

    @property
    def where(self) -> str:
        """Path and call in words."""
        return (self.path or "(model)") + (f" (call {self.call})" if self.call > 1 else "")

    @property
    def distance(self) -> str:
        """How far apart in words."""
        if self.equal:
            return "equal bit by bit"
        if self.shapes[0] != self.shapes[1]:
            return f"shape {self.shapes[0]} in run a, {self.shapes[1]} in run b"
        if self.db == -math.inf and self.ulp == math.inf:
            return "finite in one run alone, or unequal infinities"
        return f"SQNR {self.db:.1f} dB, at most {self.ulp:.3g} ulp of {dtype_name(_coarser(*self.dtypes))}"


@dataclass(frozen=True)
class Comparison:
    """Two runs, tensor by tensor. Prints as a table.

    Attributes:
        rows: what both runs have, in the order of run a.
        only_a: what run a alone has, in words.
        only_b: what run b alone has.
        min_db: the threshold; None for bitwise.
    """

    rows: tuple[ComparedTensor, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    min_db: float | None

    @property
    def first(self) -> ComparedTensor | None:
        """The first tensor where the runs part, None if they do not."""
        return next((row for row in self.rows if self._parts(row)), None)

    @property
    def worst(self) -> ComparedTensor | None:
        """The tensor with the lowest SQNR, of several the first; None if none differs."""
        return min((row for row in self.rows if not row.equal), key=_badness, default=None)

    def _parts(self, row: ComparedTensor) -> bool:
        if self.min_db is None:
            return not row.equal
        return row.db < self.min_db

    def __str__(self) -> str:
        return self.table()

    def table(self, all: bool = False) -> str:
        """Return the table.

        Args:
            all: every row. Otherwise the first that differs and the worst, in the order of the run.
        """
        rows = list(self.rows) if all else self._telling()
        lines = [self._head(), *self._missing()]
        if rows:
            lines += ["", *_grid(rows, self.first, shutil.get_terminal_size((120, 50)).columns)]
        if len(rows) < len(self.rows):
            lines.append(f"... {len(self.rows) - len(rows)} more rows; .table(all=True) shows all")
        return "\n".join(lines)

    def _head(self) -> str:
        threshold = "bit by bit" if self.min_db is None else f"to {self.min_db:g} dB"
        parted = sum(map(self._parts, self.rows))
        if self.first is None:
            return f"{len(self.rows)} tensors are equal {threshold}"
        return f"{parted} of {len(self.rows)} tensors are not equal {threshold}. The first is {self.first}"

    def _missing(self) -> Iterator[str]:
        for run, names in (("a", self.only_a), ("b", self.only_b)):
            hooked = [name for name in names if name.endswith(_BY_HOOKS)]
            left = [name for name in names if not name.endswith(_BY_HOOKS)]
            for some, why in ((hooked, f" ({_HOOKLESS})"), (left, "")):
                if some:
                    more = ", ..." if len(some) > 3 else ""
                    yield f"{len(some)} in run {run} alone{why}: {', '.join(some[:3])}{more}"

    def _telling(self) -> list[ComparedTensor]:
        first = self.first
        worst = sorted((row for row in self.rows if not row.equal and row is not first), key=_badness)
        shown = [*([first] if first else []), *worst][:_SHOWN]
        return [row for row in self.rows if any(row is other for other in shown)]


def compare(
    fn_a: Callable[..., Any],
    fn_b: Callable[..., Any],
    *args: Any,
    model: nn.Module | tuple[nn.Module, nn.Module] | None = None,
    state: Sequence[Any] = (),
    min_db: float | None = None,
    generators: Sequence[torch.Generator] = (),
) -> Comparison:
    """Run two functions from the same state, with the same random numbers, and find the first tensor where they part.

    For a policy against another, or a step against a faster form of it::

        print(compare(lambda: loss_in(f32), lambda: loss_in(bf16), model=model, min_db=30))
        print(compare(eager_step, graphed, *batch, state=[model, optimizer, graphed.scaler]))

    Compared are, in this order: outputs of the modules of `model` in the order of their calls, and the gradients of
    these outputs in the order of the backward, both seen by hooks; then what the run left (`param.grad` of `model`,
    parameters, buffers and optimizer state), then what the function returned. A CUDA graph calls no hooks when it is
    replayed, nor does a capture while it records: of an `ampkit.graphed_step` compare what it leaves and returns, by
    `state`. Compiled code calls none either: what `torch.compile(module)` returned is watched from outside. Gradients
    are of what `backward` was called on: under a loss scale, give both runs the same.

    The units in the last place of x in a format of precision p and least exponent e_min are
    `2 ** (max(e, e_min) - p + 1)` for `2 ** e <= |x| < 2 ** (e + 1)` (Muller, "On the definition of ulp(x)", INRIA
    RR-5504, 2005, after Goldberg 1991). x is here the larger of the two elements, and the format the coarser of the two
    dtypes: correct rounding from float32 to bfloat16 is at most 0.5. Integers count by 1.

    Args:
        fn_a: the run to compare with.
        fn_b: the other run.
        *args: what both are called with.
        model: module whose calls are watched; two of equal structure where the runs have one each.
        state: what else the runs change: modules, optimizers, and what has `state_dict` and `load_state_dict` (a
            gradient scaler, a scheduler). With two models it is put back, but not compared.
        min_db: the least SQNR of tensors that count as equal; None for equal bits.
        generators: those that the runs draw from beside the default ones.

    Returns:
        A `Comparison`.

    Raises:
        ValueError: something in `state` that cannot be put back.

    Before the second run, and at the end, all that is in `model` and `state` is as it was before (parameters, buffers,
    gradients, optimizer state and hyperparameters, with what is in their lists and dicts), and so are the random
    numbers of torch, Python and numpy. Train mode and plain attributes of modules are not put back.

    Sync: waits for the device. Memory: a copy of every recorded tensor on its device during a run, on the host after.
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
    parts = {id(part): part for part in (*models, *state) if part is not None}
    start = _Start([*parts.values()], generators)
    runs = []
    try:
        for fn, watched in zip((fn_a, fn_b), models, strict=True):
            own = start.held if models[0] is models[1] else [watched]
            runs.append(_run(partial(fn, *args), watched, own))
            start.restore()
    except BaseException:
        start.restore()
        raise
    a, b = runs
    return Comparison(
        rows=tuple(_compared(key, a[key], b[key]) for key in a if key in b),
        only_a=tuple(_words(key) for key in a if key not in b),
        only_b=tuple(_words(key) for key in b if key not in a),
        min_db=min_db,
    )


# -------------------------------------------------------------------------------------------------------- what is seen


class _Key(NamedTuple):
    direction: str
    path: str
    call: int = 1


class _Seen(NamedTuple):
    """A copy in host memory, and where its tensor was."""

    copy: Tensor
    device: torch.device


def _run(fn: Callable[[], Any], model: nn.Module | None, own: Sequence[Any]) -> dict[_Key, _Seen]:
    """Return what a run computed, returned and left, in this order of time."""
    watch = _Watch()
    with watch.hooked(model):
        result = fn()
    tensors = watch.tensors
    if model is not None:
        held = _held_paths(model)
        grads = ((_plain(name, held), param.grad) for name, param in model.named_parameters())
        tensors.update({_Key("gradient", name): grad for name, grad in grads if grad is not None})
    state = _training_state(own)
    held = {path for name, module in state.modules.items() for path in _held_paths(module, name)}
    held |= {f"optimizer[{i}].{path}" for i in range(len(state.optimizers)) for path in held}
    tensors.update({_Key("state", _plain(path, held)): tensor for path, tensor in state.tensors().items()})
    for path, leaf in tree_flatten_with_path(result)[0]:
        if isinstance(leaf, Tensor):
            tensors[_Key("result", f"result{keystr(path)}")] = leaf
    return {key: _Seen(tensor.detach().to("cpu", copy=True), tensor.device) for key, tensor in tensors.items()}


class _Watch:
    """Copies the outputs of modules and their gradients when they are made, on their device."""

    def __init__(self) -> None:
        self.tensors: dict[_Key, Tensor] = {}
        self._calls: Counter[str] = Counter()
        self._last: tuple[Tensor, int | None, Tensor] | None = None  # a tensor, its version if it has one, a copy
        self._entered = ExitStack()

    @contextmanager
    def hooked(self, model: nn.Module | None) -> Iterator[None]:
        """Context in which the modules below `model` are watched."""
        with ExitStack() as self._entered:
            for path, module in () if model is None else _watched(model):
                self._entered.callback(module.register_forward_hook(partial(self._on_output, path)).remove)
            yield

    def _on_output(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or _is_capturing():  # compiled code must not hold what is watched now
            return
        self._calls[path] += 1
        leaves, _ = tree_flatten_with_path(output)
        for where, leaf in leaves:
            if isinstance(leaf, Tensor):
                name = path + (keystr(where) if len(leaves) > 1 else "")
                self._keep(_Key("forward", name, self._calls[path]), leaf)
                if leaf.requires_grad:
                    hook = leaf.register_hook(partial(self._on_gradient, _Key("backward", name, self._calls[path])))
                    self._entered.callback(hook.remove)

    def _on_gradient(self, key: _Key, grad: Tensor) -> None:
        if not (torch.compiler.is_compiling() or _is_capturing()):
            self._keep(key, grad)

    def _keep(self, key: _Key, tensor: Tensor) -> None:
        # A block returns what its last module returned: one copy will do. Inference tensors do not tell their changes.
        number = None if tensor.is_inference() else version(tensor)
        if number is None or self._last is None or self._last[0] is not tensor or self._last[1] != number:
            self._last = (tensor, number, tensor.detach().clone())
        self.tensors[key] = self._last[2]


def _watched(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Return the modules below a model by their plain names: of a wrapper and what it holds, the wrapper."""
    held, found = _held_paths(model), dict[str, nn.Module]()
    for path, module in model.named_modules():
        if "_orig_mod" not in path.split("."):  # what is in compiled code calls no hooks
            found.setdefault(_plain(path, held), module)
    return found.items()


def _held_paths(model: nn.Module, prefix: str = "") -> set[str]:
    """Return the paths at which torch.compile and DistributedDataParallel hold the modules that they wrap."""
    held: set[str] = set()
    for path, module in model.named_modules(prefix=prefix):
        if is_compiled(module) or isinstance(module, nn.parallel.DistributedDataParallel):
            held.update(f"{path}.{name}".removeprefix(".") for name, _ in module.named_children())
    return held


def _plain(path: str, held: set[str]) -> str:
    """Return a path without the last part of each of its beginnings that is in `held`."""
    parts = path.split(".")
    return ".".join(part for i, part in enumerate(parts, 1) if ".".join(parts[:i]) not in held)


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _words(key: _Key) -> str:
    return f"{key.path or '(model)'}, {key.direction}"


# ----------------------------------------------------------------------------------------------------- what is put back


def _training_state(held: Sequence[Any]) -> TrainingState:
    modules = [part for part in held if isinstance(part, nn.Module)]
    names = ["model"] if len(modules) == 1 else [f"module[{i}]" for i in range(len(modules))]
    optimizers = [part for part in held if isinstance(part, torch.optim.Optimizer)]
    return TrainingState(dict(zip(names, modules, strict=True)), optimizers)


class _Start:
    """Modules, optimizers, anything with a state dict, and random numbers, as they were when this was made."""

    def __init__(self, held: Sequence[Any], generators: Sequence[torch.Generator]) -> None:
        self.held = held
        self._state = _training_state(held)
        self._live = self._state.tensors()
        own = (tensor for path, tensor in self._live.items() if not path.startswith("optimizer["))
        self._values = [(tensor, tensor.detach().clone()) for tensor in own]
        # Not by path: a parameter of no module has none. And not tensors alone: SparseAdam and LBFGS count in Python.
        self._moments = [
            {param: _kept(values) for param, values in optimizer.state.items()} for optimizer in self._state.optimizers
        ]
        params = dict.fromkeys(param for module in self._state.modules.values() for param in module.parameters())
        self._grads = [(param, param.grad, None if param.grad is None else param.grad.clone()) for param in params]
        groups = [group for optimizer in self._state.optimizers for group in optimizer.param_groups]
        self._groups = [(group, {key: _kept(group[key]) for key in group if key != "params"}) for group in groups]
        self._dicts = [(part, copy.deepcopy(part.state_dict())) for part in map(_loadable, held) if part is not None]
        self._random = list(_random_states(generators))

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, in place where it can be."""
        came = self._state.rebound_since(self._live)
        self._state.rebind(self._live)
        if any(path.startswith("optimizer[") for path in came):
            for optimizer in self._state.optimizers:
                # A graph captured meanwhile writes to state that is not the optimizer's any more. A new container tells
                # its owner, as load_state_dict would (`Generation`).
                optimizer.state = copy.copy(optimizer.state)
        for optimizer, moments in zip(self._state.optimizers, self._moments, strict=True):
            for param in [param for param in optimizer.state if param not in moments]:
                del optimizer.state[param]
            optimizer.state.update({param: put_back() for param, put_back in moments.items()})
        for tensor, value in self._values:
            tensor.copy_(value)
        for param, grad, before in self._grads:
            param.grad = grad
            if grad is not None and before is not None:
                grad.copy_(before)
        for group, kept in self._groups:
            group.update({key: put_back() for key, put_back in kept.items()})
        for part, saved in self._dicts:
            part.load_state_dict(copy.deepcopy(saved))
        for set_state, saved in self._random:
            set_state(saved)


def _loadable(part: Any) -> Any:
    """Return what has to be put back by its state dict, None for modules and optimizers."""
    if isinstance(part, (nn.Module, torch.optim.Optimizer)):
        return None
    if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
        raise ValueError(
            f"compare(state=[{type(part).__name__}]): expected modules, optimizers, and objects with state_dict and "
            "load_state_dict, such as a gradient scaler or a scheduler."
        )
    return part


def _kept(value: Any) -> Callable[[], Any]:
    """Return what gives a value as it is now: the same object; a tensor, list or dict with the same in it."""
    if isinstance(value, Tensor):
        before = value.detach().clone()
        return lambda: value.copy_(before)
    if isinstance(value, dict):
        entries = {key: _kept(entry) for key, entry in value.items()}
        return lambda: _refilled(value, {key: put_back() for key, put_back in entries.items()})
    if isinstance(value, (list, tuple)):
        items = [_kept(item) for item in value]
        return lambda: _refilled(value, [put_back() for put_back in items])
    return lambda: value


def _refilled(value: Any, content: Any) -> Any:
    if isinstance(value, dict):
        value.clear()
        value.update(content)
    elif isinstance(value, list):
        value[:] = content
    return value  # a tuple has the same objects in it as ever


def _random_states(generators: Sequence[torch.Generator]) -> Iterator[tuple[Callable[[Any], Any], Any]]:
    """Yield each source of random numbers as the function that sets its state, and its state."""
    yield random.setstate, random.getstate()
    if (numpy := sys.modules.get("numpy")) is not None:  # it loads numpy.random when that is first looked up
        yield numpy.random.set_state, numpy.random.get_state()
    yield torch.set_rng_state, torch.get_rng_state()
    if torch.cuda.is_available():
        yield torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()
    for generator in generators:
        yield generator.set_state, generator.get_state()


# -------------------------------------------------------------------------------------------------------- how far apart


def _compared(key: _Key, a: _Seen, b: _Seen) -> ComparedTensor:
    equal, db, ulp = False, -math.inf, math.inf
    if a.copy.shape == b.copy.shape:
        # Where the tensor was: the host would take long over large ones.
        left, right = (_dense(seen.copy.to(a.device)) for seen in (a, b))
        equal = left.dtype is right.dtype and torch.equal(_bits(left), _bits(right))  # sync
        db, ulp = (math.inf, 0.0) if equal else _distance(left, right)
    shapes, dtypes = (tuple(a.copy.shape), tuple(b.copy.shape)), (a.copy.dtype, b.copy.dtype)
    return ComparedTensor(key.path, key.direction, key.call, shapes, dtypes, db, ulp, equal)


def _dense(tensor: Tensor) -> Tensor:
    strided = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return torch.view_as_real(strided) if strided.is_complex() else strided


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _distance(left: Tensor, right: Tensor) -> tuple[float, float]:
    """Return SQNR and largest distance in ulp. Sync: waits for the device."""
    if not left.numel():
        return math.inf, 0.0
    dtype = _coarser(left.dtype, right.dtype)
    left, right = left.double(), right.double()
    finite = left.isfinite() & right.isfinite()
    alike = (left == right) | (left.isnan() & right.isnan())
    if bool((~finite & ~alike).any()):  # sync
        return -math.inf, math.inf
    left, right = left.where(finite, 0.0), right.where(finite, 0.0)
    ulp = _ulp(torch.maximum(left.abs(), right.abs()), dtype)
    error, unit = left - right, 1.0
    if bool(error.isinf().any()):  # sync
        error, unit = left / 2 - right / 2, 0.5
    ulps = (error.abs() / ulp).max().item() / unit  # sync
    noise = _decibels(error)
    return (math.inf if noise == -math.inf else _decibels(left * unit) - noise), ulps


def _decibels(values: Tensor) -> float:
    """Return `20 log10` of the 2-norm, also where squares leave float64; -inf for zeros. Sync: waits for the device."""
    largest = values.abs().max().item()  # sync
    if largest == 0:
        return -math.inf
    return 20 * (math.log10(largest) + math.log10((values / largest).norm().item()))  # sync


def _ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the unit in the last place of float64 magnitudes in a format; see `compare`."""
    if not dtype.is_floating_point:
        return torch.ones_like(magnitude)
    info = torch.finfo(dtype)  # eps is 2 ** (1 - p), smallest_normal is 2 ** e_min
    exponent = torch.frexp(magnitude).exponent - 1  # frexp has mantissas in [0.5, 1)
    power = torch.ldexp(torch.ones_like(magnitude), exponent)
    return power.clamp_min(info.smallest_normal) * info.eps


def _coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the dtype of lower precision; an integer one only if both are."""
    a, b = (dtype.to_real() if dtype.is_complex else dtype for dtype in (a, b))
    return max((a, b), key=lambda dtype: torch.finfo(dtype).eps if dtype.is_floating_point else -1.0)


def _badness(row: ComparedTensor) -> tuple[float, float]:
    return row.db, -row.ulp


# ------------------------------------------------------------------------------------------------------------- in words

_COLUMNS = ("", "where", "direction", "shape", "a", "b", "SQNR dB", "max ulp")


def _grid(rows: Sequence[ComparedTensor], first: ComparedTensor | None, width: int) -> list[str]:
    """Return a heading and a line a row; `>` marks the first that differs."""
    cells = [_COLUMNS, *(_cells(row, row is first) for row in rows)]
    return grid(cells, texts=6, width=width, shrink=[(1, 12)])


def _cells(row: ComparedTensor, is_first: bool) -> tuple[str, ...]:
    numbers = ("equal", "") if row.equal else (f"{row.db:.1f}", f"{row.ulp:.3g}")
    shape = "x".join(map(str, row.shapes[0])) or "()"
    return (">" if is_first else "", row.where, row.direction, shape, *map(dtype_name, row.dtypes), *numbers)
