"""What a memory profile is: bytes alive per category over time, and what held most of them at the peak."""

from collections.abc import Mapping
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
    """A piece of memory that was alive at the peak.

    Attributes:
        bytes: how much memory it takes.
        category: one of `CATEGORIES`.
        module: path of the module that made it, "" for the model itself and for what no module made.
        line: the user's line that made it, as `file:line: source`, "" if it was there before or has none.
        shape: of the tensor that it was made for.
        dtype: likewise, as "float16".
    """

    bytes: int
    category: str
    module: str
    line: str
    shape: tuple[int, ...]
    dtype: str


class Mark(NamedTuple):
    """Where something begins.

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
        label: what tables and pictures call it.
        device: "cuda:0", "cpu".
        times_ms: when each event (an allocation or a free) was, from the beginning.
        series: for each of `CATEGORIES`, the bytes alive after each event.
        marks: where steps and their phases begin, in order.
        holders: what was alive at the peak, largest first.
        forecast: made without the device, from fake tensors. Times are of the host then.
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
        """Most bytes that were alive at once; 0 where nothing was recorded."""
        return max(self.totals, default=0)

    @property
    def peak_at(self) -> int:
        """Index of the event after which most bytes were alive, the first of them."""
        totals = self.totals
        return totals.index(max(totals)) if totals else 0

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes of each category at the peak."""
        if not self.times_ms:
            return dict.fromkeys(CATEGORIES, 0)
        at = self.peak_at
        return {category: values[at] for category, values in self.series.items()}

    @property
    def phase_at_peak(self) -> str:
        """Where the peak is, as "step 1, backward"."""
        before = [mark.name for mark in self.marks if mark.at <= self.peak_at]
        step = max((i for i, name in enumerate(before) if name.startswith("step ")), default=-1)
        return ", ".join(dict.fromkeys([*before[max(step, 0) : step + 1], *before[step + 1 :][-1:]])) or "before step 0"

    def __str__(self) -> str:
        return self.table()

    def table(self, holders: int = 8) -> str:
        """Return bytes by category at the peak, and the largest that were alive then.

        Args:
            holders: how many of these.
        """
        lines = [self._title(), "", f"{'at the peak':<16}{'MiB':>10}{'share':>8}"]
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

    def _title(self) -> str:
        forecast = ", forecast" if self.forecast else ""
        return f"{self.label or 'memory'} on {self.device}{forecast}: peak {mib(self.peak)} MiB in {self.phase_at_peak}"

    def beside(self, other: "MemoryProfile") -> str:
        """Return both at their peaks, in columns: what a policy saves, and where.

        Args:
            other: the profile to compare with; the last columns are this one's bytes against it.
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
        """Return all of it, as JSON can hold it."""
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
        """Return the profile that `to_dict` wrote."""
        return cls(
            label=data["label"],
            device=data["device"],
            times_ms=tuple(data["times_ms"]),
            series={category: tuple(values) for category, values in data["series"].items()},
            marks=tuple(Mark(**mark) for mark in data["marks"]),
            holders=tuple(Holder(**{**holder, "shape": tuple(holder["shape"])}) for holder in data["holders"]),
            forecast=data["forecast"],
        )


def mib(size: int) -> str:
    """Return a number of bytes in MiB, for a column where all are."""
    return f"{size / 2**20:.1f}"
