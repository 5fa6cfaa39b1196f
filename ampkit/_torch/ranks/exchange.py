"""Averaging gradients over processes within one backward, as the C++ `Reducer` does, in fewer kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..guard import private
from ..tensors.tensors import foreach_copy_
from .reducer import Buckets


@dataclass(eq=False)
class Exchange:
    """Averages the gradients of one backward over processes. The bits are those of the Reducer.

    The Reducer copies each gradient into a bucket as soon as it is there, divided by the number of processes, and back
    when the bucket is averaged (`mark_variable_ready_dense` and `finalize_bucket_dense` in
    torch/csrc/distributed/c10d/reducer.cpp). Here all gradients of a bucket are cast and copied at once, and stay
    there. Messages have the same sizes and order, so that other processes may have a Reducer. See `buckets_of`.
    """

    _ddp: DistributedDataParallel
    _buckets: Buckets
    _found: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    _sent: list[tuple[Any, Sequence[nn.Parameter], list[Tensor]]] = field(default_factory=list)

    def take(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Take the gradient of a parameter, in any dtype. Send what is complete. To be called within the backward."""
        self._found[param] = gradient
        for params in self._buckets[len(self._sent) :]:
            if not self._found.keys() >= set(params):
                break
            with torch.no_grad():
                self._send(params)

    def _send(self, params: Sequence[nn.Parameter]) -> None:
        bucket = params[0].new_empty(sum(param.numel() for param in params))
        parts = bucket.split([param.numel() for param in params])
        is_dense = private(torch.ops.aten, "is_non_overlapping_and_dense")
        views = [  # in the layouts that the Reducer has (`initialize_bucket_views`)
            part.as_strided(param.shape, param.stride(), part.storage_offset())
            if is_dense(param)
            else part.view(param.shape)
            for param, part in zip(params, parts, strict=True)
        ]
        pairs = [(view, self._found.pop(param)) for view, param in zip(views, params, strict=True)]
        for dtype in dict.fromkeys(gradient.dtype for _, gradient in pairs):  # a mixed list is copied one by one
            alike = [pair for pair in pairs if pair[1].dtype is dtype]
            foreach_copy_([view for view, _ in alike], [gradient for _, gradient in alike])
        group: Any = private(self._ddp, "process_group")
        share = 1 / group.size()
        operation: Any = torch.distributed.ReduceOp.SUM
        if group.size() == 2 and torch.distributed.get_backend(group) == "nccl":
            # NCCL multiplies what it reads. It may choose another order of additions then: with two there is but one.
            operation = private(torch.distributed, "_make_nccl_premul_sum")(share)
        else:
            bucket.mul_(share)  # `div_` would round differently where the size is no power of two
        self._sent.append((torch.distributed.all_reduce(bucket, operation, group, async_op=True), params, views))

    def finish(self) -> bool:
        """Give the parameters their gradients; return whether none is missing. To be called behind the backward.

        Sync: the current stream waits for the exchange.
        """
        for work, params, views in self._sent:
            work.wait()
            for param, view in zip(params, views, strict=True):
                param.grad = view
        return not self._sent or (not self._found and len(self._sent) == len(self._buckets))


def broadcast_coalesced(
    ddp: DistributedDataParallel, tensors: Sequence[Tensor], bucket_bytes: int, authoritative_rank: int = 0
) -> None:
    """Copy buffers from one process to all, in the messages of the method of `DistributedDataParallel` of this name.

    The method copies each tensor by itself (`BroadcastWork` in torch/csrc/distributed/c10d/comm.cpp). Sync: none.
    """
    group: Any = private(ddp, "process_group")
    buckets, _ = private(torch.distributed, "_compute_bucket_assignment_by_size")(tensors, [bucket_bytes])
    for indices in buckets:
        found = [tensors[i] for i in indices]
        bucket = torch.cat([tensor.reshape(-1) for tensor in found])
        torch.distributed.broadcast(bucket, group=group, group_src=authoritative_rank)
        parts = bucket.split([tensor.numel() for tensor in found])
        foreach_copy_(found, [part.view(tensor.shape) for part, tensor in zip(parts, found, strict=True)])
