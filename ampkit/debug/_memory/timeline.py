"""What was alive when: allocations and frees in the order in which they happened, made into a profile at the end."""

import time
from dataclasses import dataclass, field

import torch

from .profile import CATEGORIES, Holder, Mark, MemoryProfile

_HOLDERS = 100  # kept in a profile: more than any table or page shows


@dataclass(eq=False)  # two allocations are never the same one
class Allocation:
    """The memory of a storage, or memory that belongs to no tensor.

    The phase is what made it: "forward", "backward", "optimizer", or "recomputation" for what checkpointing makes again
    in backward; "" if it was there before or if nothing of the step had begun. See `Holder` for the other fields.
    """

    bytes: int  # that it takes now
    phase: str
    module: str = ""
    line: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    category: str = ""  # "" as long as it is not known
    requested: int = 0  # the bytes that were asked for; it may take more

    @property
    def final_category(self) -> str:
        """The category at the end, when nothing more can be learned."""
        return self.category or ("autograd detail" if self.phase == "backward" else "temporary")


@dataclass(eq=False)
class Timeline:
    """Allocations over time."""

    level: int = 0  # bytes that are alive now
    marks: list[Mark] = field(default_factory=list)  # where steps and their phases begin
    start: float = 0.0  # of the times, in seconds of `time.perf_counter()`
    _existing: list[tuple[Allocation, int]] = field(default_factory=list)
    _changes: list[tuple[float, Allocation, int]] = field(default_factory=list)  # when, of what, by how many bytes

    def add_existing(self, allocation: Allocation, size: int) -> None:
        """Add an allocation that was there before the start."""
        self._existing.append((allocation, size))
        allocation.bytes = size
        self.level += size

    def resize(self, allocation: Allocation, by: int) -> None:
        """Record that an allocation now takes this many bytes more, or fewer. Nothing is recorded for 0."""
        if by:
            allocation.bytes += by
            self.level += by
            self._changes.append((time.perf_counter(), allocation, by))

    def mark(self, name: str, at: int | None = None) -> None:
        """Record that a step or a phase begins, at the event with index `at`, by default the next one."""
        # Event 0 of a profile is what was there before, so the first change is event 1.
        self.marks.append(Mark(len(self._changes) + 1 if at is None else at, name))

    def profile(self, label: str, device: torch.device, forecast: bool) -> MemoryProfile:
        """Return what was recorded, with each allocation under its final category."""
        level = dict.fromkeys(CATEGORIES, 0)
        for allocation, size in self._existing:
            level[allocation.final_category] += size
        levels = [tuple(level.values())]  # bytes of each category, at the start and after each change
        for _, allocation, change in self._changes:
            level[allocation.final_category] += change
            levels.append(tuple(level.values()))
        totals = list(map(sum, levels))
        alive = dict(self._existing)
        for _, allocation, change in self._changes[: totals.index(max(totals))]:
            alive[allocation] = alive.get(allocation, 0) + change
        largest = sorted((item for item in alive.items() if item[1]), key=lambda item: -item[1])[:_HOLDERS]
        return MemoryProfile(
            label=label,
            device=str(device),
            times_ms=(0.0, *((when - self.start) * 1e3 for when, _, _ in self._changes)),
            series=dict(zip(CATEGORIES, zip(*levels, strict=True), strict=True)),
            marks=tuple(self.marks),
            holders=tuple(
                Holder(size, made.final_category, made.module, made.line, made.shape, made.dtype)
                for made, size in largest
            ),
            forecast=forecast,
        )
