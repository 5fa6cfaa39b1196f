"""The nodes of autograd that add gradients to parameters, and new ones in place of those that a kept graph holds."""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from .autograd import CAN_RUN_ON_ONE_STREAM

_MARK = "ampkit: kept"  # a key of the notes at a node


def node_notes(param: Tensor) -> dict[str, Any]:
    """Return what is noted at the node that accumulates this parameter's gradient. A new node has no notes."""
    node: Any = get_gradient_edge(param).node  # `metadata` is a method in torch's annotations
    notes: dict[str, Any] = node.metadata
    return notes


def renew_gradient_nodes(params: Iterable[Tensor]) -> None:
    """Give parameters new nodes where the old ones are kept alive, as by the loss of an earlier step.

    A node runs on the stream that was current when it was made (torch/csrc/autograd/input_metadata.cpp). If that is the
    default stream, no capture can wait for it, and a capture fails. A backward through the old graph still uses the old
    nodes, which add to the same gradients.

    Some nodes stay. Python code holds a node where it waits for it, as `register_multi_grad_hook` does. A parameter
    that is no plain tensor keeps its node. While a process group exists, all nodes stay: the Reducer of a
    DistributedDataParallel model has hooks on them, and a node does not show that. A hook that Python code has
    registered with a node without keeping the node is lost, as it is when the old graph ends.

    Nothing is changed where torch runs all nodes of a capture on its stream: see `one_stream`. Parameters keep their
    memory. Sync: none.
    """
    if CAN_RUN_ON_ONE_STREAM or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    with torch.inference_mode(False), torch.enable_grad():
        for param in params:
            if type(param) not in (Tensor, nn.Parameter) or type(param.data) is not Tensor:
                continue  # such as a parameter of a lazy module, which has nothing to ask for yet
            leaf = param.requires_grad and param.is_leaf and not param.is_inference()
            if not leaf or param.layout is not torch.strided:
                continue
            node_notes(param)[_MARK] = True
            lives_on = _MARK in node_notes(param)  # by itself: a new node has no notes
            # A node that Python code holds is one object there.
            if lives_on and _references(param) <= _references(torch.zeros((), requires_grad=True)):
                _renew(param)


def _references(leaf: Tensor) -> int:
    node = get_gradient_edge(leaf).node
    return sys.getrefcount(node)


def _renew(param: Tensor) -> None:
    """Have torch make another node when it next needs one: it drops the node where data of another dtype are set.

    See `VariableHooks::set_data` in torch/csrc/autograd/variable.cpp.
    """
    data = param.data
    other = torch.float32 if param.dtype == torch.float64 else torch.float64
    try:
        param.data = torch.empty(0, dtype=other, device=param.device)
    finally:
        param.data = data
