"""What a memory profile is: the bytes alive in each category over time, and the largest allocations at the peak."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

CATEGORIES = (
    "parameter",
    "gradient",
    "optimizer state",
    "activation",
    "input",
    "temporary",
    "autograd detail",
    "graph pool",
)


class Holder(NamedTuple):
    """An allocation that was alive at the peak.

    Attributes:
        bytes: how much memory it takes.
        category: one of `CATEGORIES`.
        module: path of the module that made it, "" for the model itself and for what no module made.
        line: the user's line that made it, as `file:line: source`; "" if it was there before or has none.
        shape: shape of the tensor that it was made for, () if it belongs to no tensor.
        dtype: dtype of that tensor, such as "float16"; "" if it belongs to no tensor.
    """

    bytes: int
    category: str
    module: str
    line: str
    shape: tuple[int, ...]
    dtype: str


class Mark(NamedTuple):
    """Where a step, or a phase of a step, begins.

    Attributes:
        at: index of the first event that belongs to it.
        name: "step 0", "forward", "backward", "optimizer".
    """

    at: int
    name: str


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes alive on one device, by category, over one or more steps.

    Attributes:
        label: the name of the profile in tables and plots.
        device: such as "cuda:0" or "cpu".
        times_ms: the time of each event, which is an allocation or a free, in ms since the beginning.
        series: for each of `CATEGORIES`, the bytes alive after each event.
        marks: where steps and their phases begin, in order.
        holders: the allocations that were alive at the peak, largest first. The smallest may be left out.
        forecast: whether the profile was made from fake tensors, without the device. Its times are then the host's.
    """

    label: str
    device: str
    times_ms: tuple[float, ...]
    series: dict[str, tuple[int, ...]]
    marks: tuple[Mark, ...]
    holders: tuple[Holder, ...]
    forecast: bool

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes alive after each event."""
        return tuple(map(sum, zip(*self.series.values(), strict=True)))

    @property
    def peak(self) -> int:
        """The most bytes that were alive at once, 0 if nothing was recorded."""
        return max(self.totals, default=0)

    @property
    def peak_at(self) -> int:
        """Index of the event after which the most bytes were alive; of several, the first."""
        totals = self.totals
        return totals.index(max(totals)) if totals else 0

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes of each category at the peak."""
        at = self.peak_at
        return {category: values[at] if values else 0 for category, values in self.series.items()}

    @property
    def phase_at_peak(self) -> str:
        """The step and the phase in which the peak is, such as "step 1, backward"."""
        return ", ".join(phases_at(self.marks, self.peak_at)) or "before step 0"

    def table(self, holders: int = 8) -> str:
        """Return a table of the bytes in each category at the peak, and a list of the largest allocations.

        Args:
            holders: how many allocations to list.
        """
        title = f"{profile_title(self)}: peak {mib(self.peak)} MiB in {self.phase_at_peak}"
        lines = [title, "", f"{'at the peak':<16}{'MiB':>10}{'share':>8}"]
        for category, size in (*self.at_peak.items(), ("in all", self.peak)):
            if size:
                lines.append(f"{category:<16}{mib(size):>10}{size / self.peak:>8.1%}")
        lines += ["", "largest at the peak, MiB"] if holders and self.holders else []
        for holder in self.holders[:holders]:
            tensor = f"{holder.dtype} {list(holder.shape)}" if holder.dtype else "(not a tensor's)"
            what = " ".join(filter(None, (holder.category, holder.module, tensor)))
            lines.append(f"{mib(holder.bytes):>10}  {what}")
            lines += [f"{'':12}{holder.line}"] if holder.line else []
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def beside(self, other: "MemoryProfile") -> str:
        """Return a table of this profile and another at their peaks, which shows what a policy saves in each category.

        Args:
            other: the profile to compare with. The last two columns are this profile's bytes minus the other's,
                and divided by the other's.
        """
        names = [(profile.label or profile.device)[:20] for profile in (self, other)]
        lines = [f"{'MiB at the peak':<16}{names[0]:>22}{names[1]:>22}{'difference':>12}{'ratio':>8}"]
        mine, others = self.at_peak, other.at_peak
        rows = [(category, mine[category], others[category]) for category in CATEGORIES]
        for category, a, b in (*rows, ("in all", self.peak, other.peak)):
            if a or b:
                ratio = f"{a / b:.2f}" if b else "-"
                lines.append(f"{category:<16}{mib(a):>22}{mib(b):>22}{mib(a - b):>12}{ratio:>8}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as a dict that JSON can hold. `from_dict` reads it."""
        return {
            "label": self.label,
            "device": self.device,
            "times_ms": list(self.times_ms),
            "series": {category: list(values) for category, values in self.series.items()},
            "marks": [mark._asdict() for mark in self.marks],
            "holders": [{**holder._asdict(), "shape": list(holder.shape)} for holder in self.holders],
            "forecast": self.forecast,
            "peak": self.peak,
            "at_peak": self.at_peak,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "MemoryProfile":
        """Return the profile that `to_dict` has made this dict of."""
        return cls(
            label=data["label"],
            device=data["device"],
            times_ms=tuple(data["times_ms"]),
            series={category: tuple(values) for category, values in data["series"].items()},
            marks=tuple(Mark(**mark) for mark in data["marks"]),
            holders=tuple(Holder(**{**holder, "shape": tuple(holder["shape"])}) for holder in data["holders"]),
            forecast=data["forecast"],
        )


def profile_title(profile: MemoryProfile) -> str:
    """Return `float16 on cuda:0, forecast`."""
    return f"{profile.label or 'memory'} on {profile.device}" + (", forecast" if profile.forecast else "")


def phases_at(marks: Sequence[Mark], event: int) -> list[str]:
    """Return the step and the phase that an event belongs to, such as `["step 1", "backward"]`."""
    begun = [mark.name for mark in marks if mark.at <= event]
    steps = [name for name in begun if name.startswith("step ")]
    return list(dict.fromkeys([*steps[-1:], *begun[-1:]]))


def mib(size: int) -> str:
    """Return a number of bytes in MiB, without the unit."""
    return f"{size / 2**20:.1f}"
