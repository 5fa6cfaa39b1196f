"""Verification: a replay and an eager call are made from one saved state, and their results are compared bit by bit."""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._torch.autograd.autograd import current_node, in_backward
from ..._torch.autograd.backward_thread import run_backwards_here
from ..._torch.compiler_code import calls_from_compiled_code
from ..._torch.tensors.fast_paths import autocast_of_parts
from ..._torch.tensors.modes import WatchingMode, enter
from ..._torch.tensors.operators import written_arguments
from ..._torch.tensors.tensors import Remembered, local_shard, storage_address, version
from ..._torch.tensors.tree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten
from ..._undo import Undo
from ..graph.cache import Captured
from ..ranks.ranks import Ranks
from ..state.bits import bits, dense_parts, real
from ..state.snapshot import Snapshot, all_generators
from ..state.state import TrainingState

NOISE = 10.0  # a few replays are a small sample of a kernel's noise, and an eager step may differ by more than they do
_REPLAYS = (2, 6)  # replays after the first, if something differs; the six only before it counts as an error


class Verdict(NamedTuple):
    """The result of a comparison."""

    outputs: Any  # of the eager call; the state is what that has left
    problem: str = ""  # what the replay did wrong
    noise: str = ""  # how much replays differ from each other, in words; "" if they agree or were not compared
    skipped: str = ""  # why nothing was compared; then outputs and state are those of the replay
    tensors: int = 0  # how many were compared


@dataclass
class Comparisons:
    """What was compared so far, for the report."""

    replays: int = 0
    tensors: int = 0  # in each of them; the most
    noisy: int = 0  # how many replays differed by no more than they do from each other
    skipped: int = 0  # how many were not compared, for lack of memory
    problem: str = ""  # of the last one

    def note(self, verdict: Verdict) -> None:
        """Take note of a comparison."""
        self.replays += not verdict.skipped
        self.skipped += bool(verdict.skipped)
        self.noisy += bool(verdict.noise and not verdict.problem)
        self.tensors, self.problem = max(self.tensors, verdict.tensors), verdict.problem

    def __str__(self) -> str:
        if not self.replays:
            return "no replay was compared so far" + f": no memory for {self.skipped} of them" * bool(self.skipped)
        replays = f"{self.replays} replay{'s' * (self.replays > 1)} compared with eager calls from the same state"
        what = f"up to {self.tensors} tensors each: outputs, parameters, buffers, optimizer state, random numbers"
        found = f"the last one differed: {self.problem}" if self.problem else "bit for bit equal"
        if self.noisy and not self.problem:
            found = f"equal, {self.noisy} of them within what replays differ from each other by"
        return f"{replays} ({what}); {found}" + f"; {self.skipped} not compared, for lack of memory" * bool(
            self.skipped
        )


@dataclass(frozen=True)
class Verifier:
    """Makes a replay and an eager call from one saved state, and compares state, outputs and random numbers.

    Under deterministic algorithms the two must be equal. Otherwise, if they differ, both are repeated. A replay runs no
    Python code, so differences between replays are the noise of the kernels. In each tensor, an eager step may differ
    from the replay by `NOISE` times as much as replays differ from each other. A larger difference comes from the host.

    Behind a comparison the state is what an eager call has left.

    All ranks do this in the same call. They repeat the two together, and if one finds a difference, all have a problem.

    Args:
        state: all that the two may change.
        generators: the generators that they draw from, beside the default ones.
        ranks: the processes that exchange gradients in both.
        emulated: whether a replay runs the function again. Then no difference is taken for noise of the kernels.

    Memory: up to four copies of the state. Time: a replay and an eager step. If they differ, two more replays and one
    more eager step. If replays differ too, six more and one more eager step before that counts as an error. Sync: waits
    for the device.
    """

    state: TrainingState
    generators: Sequence[torch.Generator]
    ranks: Ranks
    emulated: bool = False

    def of_graph(
        self, captured: Captured, eager: Callable[..., Any], leaves: Sequence[Any], pool_bytes: int
    ) -> Verdict:
        """Compare a replay of a graph with `eager(*args, **kwargs)` on the same batch.

        The tensors of the batch are changed in place as the eager call would change them. Where there is no memory for
        it, on this rank or another one, nothing is compared. If an eager call of one of several ranks runs out of
        memory all the same, that raises, because the others wait in it.

        Raises:
            InputMismatch: see `StaticInputs.refuse_shared`. Nothing was done.
        """
        captured.inputs.refuse_shared(leaves)  # the graph gets copies, which share no memory
        if not self.ranks.agree(self._has_room(pool_bytes)):
            return Verdict(captured.replay(leaves), skipped=_NO_ROOM)
        given = captured.inputs.copies_of(leaves)
        used: list[Any] = []  # by the last eager call

        def call() -> Any:
            used[:] = captured.inputs.copies_of(given)
            args, kwargs = tree_unflatten([*used], captured.inputs.spec.tree)
            return eager(*args, **kwargs)

        def replay() -> Any:
            return captured.replay(captured.inputs.copies_of(given))

        try:
            verdict = self.compare(replay, call, watches=not captured.compared)
        except torch.OutOfMemoryError:  # the state is as it was before
            if self.ranks.several:
                raise
            return Verdict(captured.replay(leaves), skipped=_NO_ROOM)
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # copies of the state, which no step needs
        captured.compared = True
        for leaf, after in zip(leaves, used, strict=True):
            if isinstance(leaf, Tensor) and version(after):  # changed in place
                leaf.copy_(after)
        return verdict

    def _has_room(self, pool_bytes: int) -> bool:
        """Return whether there is memory for copies of the state, and for an eager call beside the graphs' pool.

        Ranks must know it beforehand: one that fails in a backward keeps the others waiting.
        """
        tensors = [local_shard(tensor) for tensor in self.state.tensors().values()]
        on_device = [tensor for tensor in tensors if tensor.is_cuda]
        needed = _COPIES * sum(tensor.nbytes for tensor in on_device) + pool_bytes
        try:
            if on_device:
                torch.empty(needed, dtype=torch.uint8, device=on_device[0].device)
        except torch.OutOfMemoryError:
            return False
        return True

    def compare(self, replay: Callable[[], Any], eager: Callable[[], Any], *, watches: bool = True) -> Verdict:
        """Compare a replay, whose outputs may be overwritten later, with an eager call of the same step.

        With `watches`, writes are looked for to memory that is not declared, which makes the eager call slow. Calls of
        one key do the same, so the first comparison of a graph has shown it.
        """
        start = Snapshot(self.state, self.generators)
        with Undo() as undo:
            undo.note(start.restore)
            verdict = self._compared(start, replay, eager, watches)
            undo.forget()
        return verdict

    def _compared(self, start: Snapshot, replay: Callable[[], Any], eager: Callable[[], Any], watches: bool) -> Verdict:
        ranks = self.ranks
        replayed = self._results(replay())
        start.restore()
        watch = _WriteWatch(self.state, ranks)
        with watch if watches else nullcontext():
            outputs = eager()
        for tensor in watch.undeclared:
            tensor.put_back()
        expected = self._results(outputs)
        count = len(expected)
        if not ranks.agree(not watch.undeclared):
            problem = watch.describe() if watch.undeclared else ranks.other_differs
            return Verdict(outputs, problem, tensors=count)
        wrong = _differences(expected, replayed)
        if ranks.agree(not wrong):
            return Verdict(outputs, tensors=count)
        # If torch only warns of kernels whose results vary, they run.
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        if self.emulated or (torch.are_deterministic_algorithms_enabled() and not warns):
            return Verdict(outputs, _describe(wrong, "") if wrong else ranks.other_differs, tensors=count)
        noise: dict[str, float] = {}  # by how much replays differ from each other, by path
        for more in _REPLAYS:
            for _ in range(more):
                start.restore()
                _keep_larger(noise, _differences(replayed, self._results(replay())))
            start.restore()
            outputs = eager()
            _keep_larger(wrong, _differences(self._results(outputs), replayed))
            beyond = {path: size for path, size in wrong.items() if path not in noise or size > NOISE * noise[path]}
            if ranks.agree(not noise or not beyond):
                break
        said = ""
        if noise:
            path, most = max(noise.items(), key=lambda pair: pair[1])
            said = (
                f"replays differ from each other by up to {most:.1e} of a tensor's largest value ({path}), because "
                f"their kernels are not deterministic. So a tensor of the eager step may differ by {NOISE:g} times as "
                "much as between replays."
            )
        if ranks.agree(not beyond):
            return Verdict(outputs, noise=said, tensors=count)
        problem = _describe(beyond, said) if beyond else ranks.other_differs
        return Verdict(outputs, problem, said, tensors=count)

    def _results(self, outputs: Any) -> dict[str, Tensor]:
        """Return dense copies of everything that the step computed, by path; of a DTensor, this process's part."""
        leaves, _ = tree_flatten_with_path(outputs)
        named = {f"output{keystr(path)}": leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
        named.update(self.state.tensors())
        # A replay draws nothing from generators on the host.
        for i, generator in enumerate(all_generators(self.generators)[1:]):
            named[f"the state of CUDA generator {i}"] = generator.get_state()
        return {
            f"{path} ({name})" if name else path: part.clone()
            for path, tensor in named.items()
            for name, part in dense_parts(local_shard(tensor).detach()).items()
        }


_COPIES = 3  # before the step, behind the replay and behind the eager call
_NO_ROOM = (
    "there is no memory to compare a replay with an eager step: that takes three copies of parameters and optimizer "
    "state, and what an eager step needs beside the graphs. Such replays are not compared."
)


def _keep_larger(sizes: dict[str, float], found: dict[str, float]) -> None:
    for path, size in found.items():
        sizes[path] = max(size, sizes.get(path, size))


def _describe(wrong: dict[str, float], said: str) -> str:
    path, size = next(iter(wrong.items()))
    much = f"{size:.1e} of the tensor's largest value" if size else "its last bits"
    more = f", and {len(wrong) - 1} more tensors do" if len(wrong) > 1 else ""
    return (
        f"{path} is not what eager computes: it differs by {much}{more}. "
        f"{said}{' ' if said else ''}The step reads or changes something on the host, or state that it does not "
        "declare (a tensor attribute that is rebound, a buffer outside of the modules)."
    )


def _differences(expected: dict[str, Tensor], got: dict[str, Tensor]) -> dict[str, float]:
    """Return the paths of tensors that differ in a bit, with the largest difference relative to the largest value."""
    differences: dict[str, float] = {}
    unequal: dict[torch.device, dict[str, Tensor]] = {}  # whether a bit differs, by device and path
    for path, left in expected.items():
        right = got.get(path)
        if right is None or right.shape != left.shape or right.dtype != left.dtype:
            differences[path] = float("inf")
        else:
            unequal.setdefault(left.device, {})[path] = (bits(left) != bits(right)).any()
    for flags in unequal.values():
        found = torch.stack([*flags.values()]).tolist()  # sync
        for path in (path for path, differs in zip(flags, found, strict=True) if differs):
            a, b = (real(part).double() for part in (expected[path], got[path]))
            size, scale = (a - b).abs().max(), a.abs().max()
            relative = float(size / scale.clamp_min(torch.finfo(torch.float64).tiny))
            differences[path] = relative if relative == relative else float("inf")  # nan: one of them is not finite
    return {path: differences[path] for path in expected if path in differences}


class _WriteWatch(WatchingMode):
    """Notices writes to memory that was there before and is no part of the state, and remembers what was there.

    Compiled code allocates without an operation. So what it writes to as the output of an operation is taken for memory
    of its own, and so is what is freed again. Of torch.cond and flex_attention torch refuses those that write to an
    argument.
    """

    def __init__(self, state: TrainingState, ranks: Ranks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated in torch
        # Parameters whose gradients DDP averages. It does so in buckets of its own, where autograd accumulates
        # gradients, and the gradients may lie in these.
        self._averaged = [param for ddp in ranks.wrappers for param in ddp.parameters()]
        self._gathered = ranks.shards.gathered_addresses  # of memory that `fully_shard` fills, and frees, within a step
        self._state = state
        self._known = {storage_address(tensor) for tensor in state.tensors().values()}
        self._undeclared: dict[int, Remembered] = {}
        self._undo = Undo()

    def __enter__(self) -> "_WriteWatch":
        self._undo = Undo().__enter__()
        run_backwards_here(self._undo)  # the mode sees this thread only
        enter(self._undo, self)
        return self

    def __exit__(self, *args: Any) -> None:
        self._undo.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = {storage_address(leaf) for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)}
        node = current_node()
        # Autograd accumulates a gradient, or runs what was to come at the end of a backward.
        accumulates = self._averaged and in_backward() and (node is None or hasattr(node, "variable"))
        writes = hasattr(func, "overloadpacket") and not accumulates
        for tensor in written_arguments(func, args, kwargs) if writes else ():
            address = storage_address(tensor)
            known = self._undeclared.get(address)
            new = address and address not in self._known and (known is None or known.is_gone)
            if new and address not in self._gathered():
                if any(p.grad is not None and storage_address(p.grad) == address for p in self._averaged):
                    continue
                if "out" in kwargs and calls_from_compiled_code(sys._getframe(1)):
                    continue
                self._undeclared[address] = Remembered(tensor)
        with autocast_of_parts(func):
            result = func(*args, **kwargs)
        made = {storage_address(leaf) for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)}
        self._known |= made - read
        return result

    @property
    def undeclared(self) -> list[Remembered]:
        """The tensors that were written to and are not declared, as they were before."""
        # A tensor that the mode did not see being made may have become a part of the state meanwhile.
        declared = {storage_address(tensor) for tensor in self._state.tensors().values()}
        return [
            tensor for address, tensor in self._undeclared.items() if address not in declared and not tensor.is_gone
        ]

    def describe(self) -> str:
        """Return in words which tensors were written to."""
        value = self.undeclared[0].value
        return (
            f"the step writes to a tensor of shape {tuple(value.shape)} and dtype {value.dtype} that it does not "
            f"declare, one of {len(self.undeclared)}. Make it a buffer of the model, or pass the module that holds it "
            "in modules=(...)."
        )
