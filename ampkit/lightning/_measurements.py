"""What the user asked to measure in a fit: the numbers of some steps and the memory of one, as figures for a logger."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .._arguments import check_at_least, check_flag
from ..debug._memory.profile import MemoryProfile
from ..debug._memory.recorder import memory
from ..debug._numerics.numerics import Numerics, numerics

_MIB = 2**20


class FitMeasurements:
    """Measures in a fit what the user asked for: the numbers of one optimizer step in so many, the memory of one step.

    The warm-up is the eager steps before a capture, None where nothing is captured. The last one runs under the
    preflight, which looks for operations that a graph cannot contain. Raises ValueError if an argument cannot work.
    """

    def __init__(self, numerics_every: int | None, record_memory: bool, warmup: int | None) -> None:
        if numerics_every is not None:
            expected = "steps from one measurement to the next, or None for none"
            check_at_least("AmpkitCallback", "numerics", numerics_every, 1, expected)
        check_flag("AmpkitCallback", "memory", record_memory)
        if record_memory and warmup == 1:
            raise ValueError(
                "AmpkitCallback(memory=True, warmup=1): memory is recorded in an eager step before the last one of the "
                "warm-up, and there is none. Use warmup=2 or more."
            )
        self._numerics_every = numerics_every
        # How many optimizer steps come before the recorded one; None if there is none. The first step allocates the
        # optimizer's state, so the second is recorded, unless it is the last one of the warm-up, under the preflight.
        self.steps_before_recording = (0 if warmup == 2 else 1) if record_memory else None
        self._profile_logged = False
        self.numerics: Numerics | None = None
        self.memory_profile: MemoryProfile | None = None

    def observer(self, module: nn.Module) -> Numerics | None:
        """Return what measures the numbers of a training step that is made now, None if nothing does."""
        self.numerics = None if self._numerics_every is None else numerics(module, every=self._numerics_every)
        return self.numerics

    @contextmanager
    def recording(self, module: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Iterator[None]:
        """Context around a batch whose optimizer step may be the one to record, while `steps_before_recording` is not
        None."""
        if self.steps_before_recording:
            self.steps_before_recording -= 1
            yield
            return
        self.steps_before_recording = None
        label = f"{type(module).__name__}, one batch and its optimizer step"
        with memory(module, optimizer, inputs=batch, label=label) as recorded:
            yield
        self.memory_profile = recorded.profile

    def figures(self, device: torch.device) -> dict[str, float]:
        """Return the figures that are known now, by name; those of the memory profile once only. Sync: none."""
        found = {} if self.numerics is None else self.numerics.figures()
        figures = {f"numerics/{name}": value for name, value in found.items()}
        if self.memory_profile is None:
            return figures
        if device.type == "cuda":
            figures["memory/allocated_MiB"] = torch.cuda.memory_allocated(device) / _MIB
            figures["memory/peak_MiB"] = torch.cuda.max_memory_allocated(device) / _MIB
        if not self._profile_logged:
            self._profile_logged = True
            sizes = {name: size for name, size in self.memory_profile.at_peak.items() if size}
            figures |= {f"memory/{name.replace(' ', '_')}_MiB": size / _MIB for name, size in sizes.items()}
        return figures
