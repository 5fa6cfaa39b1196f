"""The random state of cuDNN's dropout, which `nn.LSTM(dropout=...)` has on CUDA: whether it begins anew.

Torch keeps it in C++, one per device, beside its generators. Where a generator was seeded, or its state set, even to
what it is, the next call of such a module in training draws a seed, reads it on the host, and makes another state
(`get_dropout_state` in aten/src/ATen/native/cudnn/RNN.cpp, `reset_rnn_state` in ATen/cuda/CUDAGeneratorImpl.cpp). A
graph would go on with the old one, which may be freed. Nothing tells that a generator was seeded but such a call.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..guard import private

_CUDNN_RNN = private(torch.ops.aten, "_cudnn_rnn").default


@dataclass(eq=False)
class RnnDropout:
    """Notices when cuDNN's dropout begins anew. It changes nothing."""

    device: torch.device | None = None  # of the modules with such a dropout, if there are any
    times: int = 0  # how often it has begun anew, or another state was put in its place
    _address: int = 0  # of the state, 0 if it is not known
    _probe: nn.Module | None = None

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Take these modules for those of the next calls."""
        found = [module for module in modules if isinstance(module, nn.RNNBase) and module.dropout > 0]
        devices = [param.device for module in found for param in module.parameters() if param.is_cuda]
        self.device = devices[0] if devices else None

    def look(self) -> None:
        """Ask as such a module does, by a small one whose kernels are not run. Sync: waits for the device if it begins
        anew."""
        if self.device is None or not torch.backends.cudnn.enabled:
            return
        if self._probe is None:  # without a draw for its weights
            self._probe = nn.RNN(1, 1, num_layers=2, dropout=0.5, device="meta").to_empty(device=self.device)
        generator = torch.cuda.default_generators[self.device.index or 0]
        before = generator.get_state()
        asked = _Asked()  # type: ignore[no-untyped-call]  # torch's
        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            batch = torch.empty(1, 1, 1, device=self.device)
            with asked:
                self._probe(batch)
        if asked.drew:  # the step itself is to draw, at its own place
            generator.set_state(before)
            self.times, self._address = self.times + 1, 0
            return
        self.times += self._address not in (0, asked.address)
        self._address = asked.address


class _Asked(TorchDispatchMode):
    """Notes what cuDNN's dropout is asked for, and runs no kernel of cuDNN's."""

    drew, address = False, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _CUDNN_RNN:
            state: Tensor | None = args[-1]
            self.address = 0 if state is None else state.data_ptr()
            batch, weights, hidden = args[0], args[3], args[4]
            return torch.empty_like(batch), torch.empty_like(hidden), batch.new_empty(0), batch.new_empty(0), weights
        self.drew = self.drew or func is torch.ops.aten.random_.default
        return func(*args, **(kwargs or {}))


def put_back(generator: torch.Generator, state: Tensor) -> None:
    """Give a generator the state that it had. Where its seed is the same, cuDNN's dropout does not begin anew."""
    if generator.device.type == "cuda":
        seed, offset = state.view(torch.int64).tolist()
        if seed % 2**64 == generator.initial_seed() % 2**64:
            generator.set_offset(offset)
            return
    generator.set_state(state)
