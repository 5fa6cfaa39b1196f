"""`DistributedDataParallel` models as people make them: made ready for a capture, or refused with what to write."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..._torch.ranks.exchange import Exchange, broadcast_coalesced
from ..._torch.ranks.reducer import (
    bucket_bytes,
    buckets_of,
    communication_hook,
    gradient_calls,
    is_idle,
    is_rebuilt,
    is_registrable,
    lay_out,
    manages_all,
    note_used,
    peculiarity,
    rebuild,
    reset,
    stop_clocks,
)
from ..._undo import Undo, replace

Give = Callable[[nn.Parameter, Tensor], None]

_REFUSED = {
    "delay_all_reduce_named_params": (
        "it delays all-reduces until a hook of a parameter, and does not wait for them. Leave out "
        "delay_all_reduce_named_params and param_to_hook_all_reduce."
    ),
    "mixed_precision": (
        "it casts the weights on a stream of its own. Leave out mixed_precision, and pass policy='bfloat16' to ampkit."
    ),
    "python_reducer": (
        "its Reducer is written in Python. Set torch._dynamo.config.optimize_ddp = True before it is made."
    ),
    "join": (
        "within Join or model.join() the ranks exchange messages in each forward, which a replay does not. Give all "
        "ranks as many batches."
    ),
    "optimizer_in_backward": (
        "an optimizer steps within the backward (apply_optimizer_in_backward), where ampkit would step it once more. "
        "Make an ordinary optimizer."
    ),
}
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
_COUNTING_HOOKS = ("powerSGD_hook", "post_localSGD_hook", "ddp_zero_hook", "optimizer_overlap_hooks")
_ACCUMULATED = (
    "with find_unused_parameters=True and accumulate, the host looks which parameters any micro-batch has used. If all "
    "are used, leave out find_unused_parameters."
)
_SIDE_STREAM = "Make the model under a side stream: with torch.cuda.stream(torch.cuda.Stream()): ..."
_INSTEAD = "Or pass graph='off'."


class Reducers:
    """What averages the gradients of the `DistributedDataParallel` modules of a model."""

    def __init__(self, wrappers: Sequence[DistributedDataParallel]) -> None:
        self._wrappers = wrappers
        # Those that look in each step which parameters are used (`find_unused_parameters=True`). They look for these in
        # the graph of their outputs, so that no copies may be there in their place.
        self.searching: list[DistributedDataParallel] = [
            ddp for ddp in wrappers if ddp.find_unused_parameters and not ddp.static_graph
        ]
        self.stream: torch.cuda.Stream | None = None  # where steps are captured; None if graphs are emulated
        self.moved: bool = False  # whether gradients are accumulated there
        self._left = ""  # why they are not
        self._accumulates = False
        self._alone = False
        self._incomplete = False

    @functools.cached_property
    def problem(self) -> str:
        """Why no step of the model can be captured, and what to write instead; "" if it can.

        What is so in the first call counts.
        """
        for ddp in self._wrappers:
            problem = _REFUSED.get(peculiarity(ddp), "") or _why_not_hook(ddp)
            if self._accumulates and ddp in self.searching:
                problem = problem or _ACCUMULATED
            if problem:
                return f"DistributedDataParallel: {problem} {_INSTEAD}"
        return ""

    @property
    def bitmaps(self) -> list[int]:
        """For each module that looks for unused parameters, how many parameters it has; see `is_bitmap_copy`."""
        return [sum(param.requires_grad for param in ddp.parameters()) for ddp in self.searching]

    @contextmanager
    def watching(self) -> Iterator[Callable[[], str]]:
        """Context for an eager call. It yields what says behind the call why no graph can hold it; "" if one can.

        A module that looks for unused parameters has all ranks exchange which ones each of them has used. The host
        waits for that only where this rank has not used one. A graph in which this rank uses all of them repeats the
        exchange, and steps of other ranks, in which some are unused, get the same answer as from an eager step.
        """
        with Undo() as undo:
            with torch.inference_mode(False), torch.enable_grad():  # the call may be an evaluation
                unused = [note_used(undo, ddp) for ddp in self.searching]
            yield lambda: _why_not_unused([name for names in unused for name in names()])

    def refuse_accumulation(self, where: str, accumulate: int) -> None:
        """Raise a `ValueError` if torch cannot accumulate gradients of the model over several calls.

        `no_sync` before the first step of a static graph ends in an internal assertion of torch (2.11): the first
        backward looks which parameters are used, and exchanges their gradients in any case.
        """
        self._accumulates = accumulate > 1
        if accumulate > 1 and any(ddp.static_graph for ddp in self._wrappers):
            raise ValueError(
                f"{where}(accumulate={accumulate}): DistributedDataParallel(static_graph=True) cannot accumulate, in "
                "torch alone either, since it exchanges gradients in its first backward. Leave out static_graph, or "
                "pass accumulate=1."
            )

    def prepare(self) -> None:
        """Have the modules accumulate gradients on the stream of the captures. To be called by all ranks at a time.

        Where that is not possible, a capture may fail; then `advice` says why.
        """
        with torch.inference_mode(False), torch.enable_grad():  # an evaluation may be the first call
            for ddp in self._wrappers:
                if not is_rebuilt(ddp):  # or graphs of another step may refer to its buckets
                    left = ""
                    if not is_registrable(ddp):
                        left = (
                            "its communication hook was registered with the Reducer itself, and not by "
                            "register_comm_hook"
                        )
                    elif not manages_all(ddp):
                        left = "other parameters require gradients than when it was made"
                    else:
                        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
                            kept = rebuild(ddp)
                        if kept:
                            left = (
                                "something keeps the autograd graph of an earlier step alive, as its loss does "
                                f"(parameter {kept[0]})"
                            )
                    self._left = self._left or left
                self.moved = not self._left

    @property
    def advice(self) -> str:
        """What may be the cause if a capture fails, as the end of a message; "" if nothing may."""
        if not self._left:
            return ""
        where = "DistributedDataParallel accumulates gradients on the stream that it was made on"
        return f" {where}: {self._left}. {_SIDE_STREAM}"

    def begin_call(self, *, first: bool = True) -> None:
        """Have the next forward broadcast the buffers in the first micro-batch of a window, and in no other.

        By itself DDP does so behind a forward that exchanged gradients, and neither within a window nor behind an
        evaluation. A replay leaves no trace of its kind in DDP, so that an eager call could not tell. To be called
        before each call that is not a replay.
        """
        for ddp in self._wrappers:
            ddp.require_forward_param_sync = first

    def begin_eager_call(self) -> None:
        """Do so before an eager call, and find what lies in which bucket, which the call may need (`exchanging`)."""
        self.begin_call()
        for ddp in self._wrappers:
            lay_out(ddp)

    def begin_capture(self) -> None:
        """Stop the clocks of the modules. To be called before each capture."""
        self.begin_call()
        for ddp in self._wrappers:
            stop_clocks(ddp)

    @property
    def idle(self) -> bool:
        """Whether the last backward has averaged all gradients, and did not raise before that."""
        return not self._incomplete and all(map(is_idle, self._wrappers))

    def reset(self) -> None:
        """Let the next forward run, though a backward has raised. All graphs must be dropped. To be called by all ranks
        at a time."""
        self._incomplete = False
        for ddp in self._wrappers:
            reset(ddp)

    @contextmanager
    def alone(self, share: float) -> Iterator[None]:
        """Context for a forward and backward that compile, on this rank alone: they exchange no gradients or buffers.

        If they raise, no other rank waits for them. torch splits compiled code where a bucket of gradients is complete,
        so that these are exchanged while the rest of the backward runs. `share` is the size of the parameters that the
        compiler sees, as a share of those that the buckets have.
        """
        with Undo() as undo:
            replace(undo, self, "_alone", True)
            for ddp in self._wrappers:
                replace(undo, ddp, "require_backward_grad_sync", False)
                replace(undo, ddp, "require_forward_param_sync", False)
                replace(undo, ddp, "bucket_bytes_cap", bucket_bytes(ddp, share))
            yield

    @contextmanager
    def exchanging(
        self, copies: Mapping[nn.Parameter, nn.Parameter], give: Give
    ) -> Iterator[Callable[[nn.Parameter, Tensor], bool]]:
        """Context for a forward and backward in which gradients are averaged.

        Where nothing but the default is asked for, an `Exchange` averages them in place of the Reducer. Otherwise the
        Reducer does, which is told of the gradients of copies. `copies` get the gradients in place of parameters, and
        `give(param, copy)` moves the gradient from the copy to the parameter.

        Yields what takes the gradient of a parameter, in any dtype, within the backward; it returns False where the
        Reducer averages, which needs the gradient to be accumulated.
        """
        self._incomplete = False
        exchanges: dict[nn.Parameter, Exchange] = {}
        with Undo() as undo:
            for ddp in self._wrappers:
                calls, buckets = gradient_calls(ddp), buckets_of(ddp)
                if buckets and ddp.require_backward_grad_sync and all(param.grad is None for param in calls):
                    exchanges.update(dict.fromkeys(calls, Exchange(ddp, buckets)))
                    undo.note(setattr, ddp, "require_forward_param_sync", True)  # for evaluations of the user's
                    replace(undo, ddp, "require_backward_grad_sync", False)
                    for param in calls:
                        hook = functools.partial(self._take, exchanges[param], param)
                        undo.note(copies.get(param, param).register_post_accumulate_grad_hook(hook).remove)
                else:
                    for param in copies.keys() & calls.keys():
                        hook = functools.partial(_deliver, ddp, functools.partial(give, param), calls[param])
                        undo.note(copies[param].register_post_accumulate_grad_hook(hook).remove)
                replace(undo, ddp, "_distributed_broadcast_coalesced", functools.partial(broadcast_coalesced, ddp))

            def take(param: nn.Parameter, gradient: Tensor) -> bool:
                if param not in exchanges:
                    return False
                exchanges[param].take(param, gradient)
                return True

            yield take
            self._incomplete = not all([exchange.finish() for exchange in dict.fromkeys(exchanges.values())])

    def _take(self, exchange: Exchange, param: nn.Parameter, leaf: Tensor) -> None:
        gradient = leaf.grad  # None if a cast's gradient was taken: the hook is called all the same
        if self._alone or gradient is None:
            return
        leaf.grad = None
        exchange.take(param, gradient)


def why_not_compiled(model: nn.Module) -> str:
    """Return why no step of this model can be compiled because of its DDP modules, and what to write; "" if it can."""
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            return (
                "SyncBatchNorm exchanges messages in forward, and a rank that compiles does a forward that the others "
                "do not. Use BatchNorm."
            )
        kind = peculiarity(module) if isinstance(module, DistributedDataParallel) else ""
        if kind:
            return f"DistributedDataParallel: {_REFUSED[kind]}"
    return ""


def _deliver(
    ddp: DistributedDataParallel, give: Callable[[Tensor], None], call: Callable[[], None], copy: Tensor
) -> None:
    if ddp.require_backward_grad_sync:
        give(copy)
        call()


def _why_not_unused(names: Sequence[str]) -> str:
    if not names:
        return ""
    return (
        "DistributedDataParallel: with find_unused_parameters=True the host waits for the other ranks where a step has "
        f"not used a parameter, such as {names[0]} ({len(names)} in all). If these are always the same, pass "
        f"static_graph=True in place of it (which cannot be together with accumulate). {_INSTEAD}"
    )


def _why_not_hook(ddp: DistributedDataParallel) -> str:
    """Return why a graph cannot hold the communication hook of a module, "" if it can."""
    name, hook, state = communication_hook(ddp)
    if hook is None:
        return ""
    places = {place.removeprefix(_HOOKS) for place in (hook.__module__, type(state).__module__)}
    if places.intersection(_COUNTING_HOOKS):
        return (
            f"the communication hook {name} counts steps on the host, or steps an optimizer there. Use "
            f"{_HOOKS}default_hooks.bf16_compress_hook."
        )
    if state is not None and not isinstance(state, torch.distributed.ProcessGroup):
        return (
            f"the communication hook {name} has a state of type {type(state).__name__}, and a graph would freeze what "
            "the hook reads from that. Register it with state=None, or with a process group."
        )
    return ""
