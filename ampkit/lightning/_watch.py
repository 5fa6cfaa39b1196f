"""What of a fit is measured on request: the numbers of some steps, the memory of one; and the figures for a logger."""

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


class Watch:
    """Measures in a fit what the user asked for.

    Args:
        every: optimizer steps from one whose numbers are measured to the next; None measures none.
        records: whether to record the memory of a step.
        warmup: eager steps before a capture, None where nothing is captured. The last is under the preflight.

    Attributes:
        numerics: what measured the last step that was made; None if nothing did.
        profile: the memory of a step, None as long as none was recorded.

    Raises:
        ValueError: an argument that cannot work.
    """

    def __init__(self, every: int | None, records: bool, warmup: int | None) -> None:
        if every is not None:
            check_at_least(
                "AmpkitCallback",
                "numerics",
                every,
                1,
                "steps from one measurement to the next, or None for none",
            )
        check_flag("AmpkitCallback", "memory", records)
        if records and warmup == 1:
            raise ValueError(
                "AmpkitCallback(memory=True, warmup=1): recorded is an eager step before the last one of the warm-up. "
                "Use warmup=2 or more."
            )
        self._every = every
        # Windows to go before the one to record: the second finds what the first has made.
        self._to_go = (0 if warmup == 2 else 1) if records else None
        self._written = False
        self.numerics: Numerics | None = None
        self.profile: MemoryProfile | None = None

    def observer(self, module: nn.Module) -> Numerics | None:
        """Return what measures the numbers of a step that is made now."""
        self.numerics = None if self._every is None else numerics(module, every=self._every)
        return self.numerics

    @contextmanager
    def recording(self, module: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, last: bool) -> Iterator[None]:
        """Context for a batch, which may end a window of them. Records the memory of one that does."""
        if self._to_go is None or not last:
            yield
            return
        self._to_go -= 1
        if self._to_go >= 0:
            yield
            return
        self._to_go = None
        label = f"{type(module).__name__}, one batch and its optimizer step"
        with memory(module, optimizer, inputs=batch, label=label) as recorded:
            yield
        self.profile = recorded.profile

    def figures(self, device: torch.device) -> dict[str, float]:
        """Return what is known now, by name. Sync: none."""
        found = {} if self.numerics is None else self.numerics.figures()
        figures = {f"numerics/{name}": value for name, value in found.items()}
        if self.profile is None:
            return figures
        if device.type == "cuda":
            figures["memory/allocated_MiB"] = torch.cuda.memory_allocated(device) / _MIB
            figures["memory/peak_MiB"] = torch.cuda.max_memory_allocated(device) / _MIB
        if not self._written:
            self._written = True
            sizes = {name: size for name, size in self.profile.at_peak.items() if size}
            figures |= {f"memory/{name.replace(' ', '_')}_MiB": size / _MIB for name, size in sizes.items()}
        return figures
