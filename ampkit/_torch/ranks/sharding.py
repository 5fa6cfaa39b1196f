"""What torch keeps private of parameters that `fully_shard` has split over processes, and of the wrapped modules.

Nothing here imports `torch.distributed.tensor` or `torch.distributed.fsdp`, which takes long. Whoever has made a
DTensor, or has called `fully_shard`, has imported them.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..device.streams import is_capturing
from ..guard import private
from ..tensors.tensors import local_shard, sharded_class
from ..tensors.tree import tensors_in

_OF_A_CALL = (  # of an FSDPParamGroup: what a backward without an error leaves at None
    *("_all_gather_result", "_post_reduce_event", "_reshard_after_forward_event"),
    *("_all_reduce_state", "_partial_reduce_output"),
)
_STREAMS = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream")


def as_shard(local: Tensor, like: Any) -> Tensor:
    """Return a DTensor placed as another one is, with this as its part in this process. Aliasing: the part's memory."""
    made: Tensor = sharded_class().from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


def mesh_group(tensor: Any) -> Any:
    """Return the process group that a DTensor is split over, once. None if it is not split over the last dimension of a
    mesh alone."""
    *before, last = tensor.placements
    if not last.is_shard() or not all(placement.is_replicate() for placement in before):
        return None
    return tensor.device_mesh.get_group(len(before))


def copy_groups(tensor: Any) -> list[Any]:
    """Return the process groups whose ranks have copies of the same part of a DTensor (HSDP), [] if there are none."""
    return [
        tensor.device_mesh.get_group(dim) for dim, placement in enumerate(tensor.placements) if placement.is_replicate()
    ]


def is_copied(tensor: Tensor) -> bool:
    """Return whether other ranks have copies of the same part of a DTensor. A tensor of one rank alone has none."""
    return isinstance(tensor, sharded_class()) and bool(copy_groups(tensor))


def wrapped_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that `fully_shard` has wrapped."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return [module for module in model.modules() if isinstance(module, kind)]


def buffers_of_collective(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], in_backward: bool) -> list[Tensor]:
    """Return the arguments of an operation in which `fully_shard` gathers parameters or reduces gradients.

    In forward, not in a backward, only operations of `fully_shard` itself are looked at.
    """
    name = func.overloadpacket.__name__ if func.namespace in ("fsdp", "c10d") else ""
    if name == "all_gather_copy_in" or (name == "_reduce_scatter_base_" and in_backward):
        return tensors_in(args)
    return tensors_in(kwargs) if name == "chunk_cat" else []


class ShardedModules:
    """What modules that `fully_shard` has wrapped keep between calls. All of the model's must be wrapped already."""

    def __init__(self, model: nn.Module) -> None:
        # Modules that were wrapped together share a state.
        found = (private(module, "_get_fsdp_state")() for module in wrapped_modules(model))
        states = {id(state): state for state in found}
        self._states: list[Any] = list(states.values())
        groups = (private(state, "_fsdp_param_group") for state in self._states)
        self._groups: list[Any] = [group for group in groups if group is not None]
        self._seen: list[Any] = [None] * len(self._groups)  # whether parameters were whole, in `newly_gathered`
        self._whole: set[int] = set()  # ids of whole parameters, which are kept once they are made

    def __len__(self) -> int:
        return len(self._states)

    def managed(self) -> Iterable[nn.Parameter]:
        """Return the parameters whose gradients these modules average."""
        return [param.sharded_param for group in self._groups for param in group.fsdp_params]

    def gathered_addresses(self) -> set[int]:
        """Return the addresses of the memory that whole parameters lie in, where they do now. Sync: none."""
        return {tensor.untyped_storage().data_ptr() for group in self._groups for tensor in _gathered(group)}

    def newly_gathered(self) -> list[Tensor]:
        """Return what whole parameters lie in, or have lain in, of those modules that have gathered or freed them since
        this was called last. Sync: none."""
        states = [private(group, "_sharded_state") for group in self._groups]
        changed = [group for group, now, old in zip(self._groups, states, self._seen, strict=True) if now is not old]
        self._seen = states
        self._whole.update(id(whole) for group in changed for whole in _whole_parameters(group))
        return [tensor for group in changed for tensor in _gathered(group)]

    def is_whole(self, parameter: Tensor) -> bool:
        """Return whether this is a whole parameter of those that `newly_gathered` has met."""
        return id(parameter) in self._whole

    def keep_shards(self) -> None:
        """Have the first forward take the shards as they are, unless somebody has replaced them since `fully_shard`.

        It would find out by their addresses, which fake tensors do not have, and copy those that are padded.
        """
        for group in self._groups:
            private(group, "_reset_sharded_params")
            own = True  # whether the module has the shards that FSDPParams have made, in the memory that they have made
            for param in group.fsdp_params:
                registered = getattr(param._module_info.module, param._module_info.param_name)
                kept = private(param, "_sharded_param_data").untyped_storage()
                used = local_shard(registered).untyped_storage()
                same = private(kept, "_cdata") == private(used, "_cdata")
                own = own and registered is param.sharded_param and same
            group._reset_sharded_params = own

    def gather(self) -> None:
        """Give the modules their sharded parameters, if a forward outside of a step has left them whole. Sync: none."""
        for group in self._groups:
            if not group.is_sharded:
                group.reshard()

    def settle(self) -> None:
        """Bring the modules to where they are between two steps, also behind a forward or backward that has raised.

        A capture leaves CUDA events behind that later calls must not wait for, and a step that has raised leaves
        gathered parameters and gradients. All that is dropped. Sync: none.
        """
        has_raised = False
        for state in self._states:
            state._training_state = type(private(state, "_training_state")).IDLE
            state._modules_to_run_forward.clear()
            context = private(state, "_state_ctx")
            in_call = context.iter_forward_root is not None or context.post_backward_final_callback_queued
            has_raised = has_raised or in_call
            context.iter_forward_root, context.post_backward_final_callback_queued = None, False
            # What modules share is an FSDPCommContext. Before the first forward it lacks most attributes.
            streams: Any = private(state, "_comm_ctx")
            if getattr(streams, "reduce_scatter_state", None) is not None and not is_capturing():
                # A backward has raised, and the memory that is dropped here may still be in use.
                for name in _STREAMS:
                    if isinstance(stream := getattr(streams, name, None), torch.cuda.Stream):
                        torch.cuda.current_stream(stream.device).wait_stream(stream)
            for name in ("all_gather_state", "reduce_scatter_state"):
                if hasattr(streams, name):
                    setattr(streams, name, None)
            if hasattr(streams, "post_forward_order"):
                streams.post_forward_order.clear()
        for group in self._groups:
            group._training_state = type(private(group, "_training_state")).IDLE
            for name in _OF_A_CALL:
                private(group, name)
                setattr(group, name, None)
            group._post_forward_indices.clear()
            group.reshard()
            for param in group.fsdp_params if has_raised else ():
                param.unsharded_accumulated_grad = None
                whole = getattr(param, "_unsharded_param", None)  # made by the first forward
                if whole is not None:
                    whole.grad = None

    def why_not_captured(self) -> str:
        """Return which setting a graph cannot follow and what to write instead, "" if there is none."""
        for group in self._groups:
            if not group.reduce_grads:
                return "set_requires_gradient_sync(False) was called on it. Leave it True, and pass accumulate=N."
            if not group.all_reduce_grads:
                return "set_requires_all_reduce(False) was called on it. Leave it True, and pass accumulate=N."
            if not group.reshard_after_backward:
                return "set_reshard_after_backward(False) was called on it. Leave it True."
            if group._all_reduce_hook is not None:
                return "it has an all-reduce hook, which may do anything on a stream of its own. Remove the hook."
            if any(param.offload_to_cpu for param in group.fsdp_params):
                return "it has a CPUOffloadPolicy, so that the optimizer steps on the CPU. Leave out offload_policy."
        if any(state._state_ctx.post_optim_event is not None for state in self._states):
            return "set_post_optim_event was called on it, and a capture may not wait for that event. Leave it out."
        return ""


def _gathered(group: Any) -> list[Tensor]:
    """Return the tensors that whole parameters lie in. They are kept, and have no memory while they are not needed."""
    params = group.fsdp_params
    kept = [tensor for param in params for tensor in private(param, "all_gather_outputs")]
    return kept + list(map(local_shard, _whole_parameters(group)))


def _whole_parameters(group: Any) -> list[Tensor]:
    found = (getattr(param, "_unsharded_param", None) for param in group.fsdp_params)
    return [whole for whole in found if whole is not None]  # the first forward makes them
