"""What plots and pages of memory profiles show alike: which events are drawn, which marks have a label, one axis."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..._arguments import check_instance
from ..._text import unit_of
from .profile import CATEGORIES, MemoryProfile, profile_title

# The colours of Okabe and Ito, which people with any kind of colour vision can tell apart. Neighbours in the stack also
# differ in lightness.
_OKABE_ITO = "#0072B2 #E69F00 #56B4E9 #009E73 #F0E442 #D55E00 #CC79A7 #999999"
COLOURS = dict(zip(CATEGORIES, _OKABE_ITO.split(), strict=True))
_POINTS = 1500  # events drawn of a profile: it is no wider in pixels
# How far a label must be from the next one, as a part of the width: about what "step 10" and "optimizer" take.
_STEP_ROOM, _PHASE_ROOM = 0.07, 0.1
_HEADROOM = 1.16  # end of the axis over the peak: it leaves a line of text for the peak's label


class PlottedMark(NamedTuple):
    """A line where a step or a phase begins."""

    x: float
    label: str  # "" where there is no room for it
    is_step: bool


class PlottedProfile(NamedTuple):
    """A profile, reduced to as many events as can be seen."""

    profile: MemoryProfile
    title: str
    events: list[int]  # indices of those that are drawn
    x: list[float]  # where each of them is drawn
    x_label: str
    series: dict[str, list[int]]  # for each category, the bytes alive after each event that is drawn
    marks: list[PlottedMark]
    peak: int  # bytes
    peak_at: int  # index of its event
    peak_x: float


class ByteAxis(NamedTuple):
    """The y axis that all profiles of a plot share."""

    top: float  # bytes at its end
    unit: int  # bytes
    unit_name: str  # such as "MiB"
    categories: list[str]  # those that have any bytes in any of the profiles

    @classmethod
    def over(cls, plotted: Sequence[PlottedProfile]) -> "ByteAxis":
        """Return an axis that has room for each of the profiles."""
        peak = max(one.peak for one in plotted)
        used = [category for category in CATEGORIES if any(any(one.series[category]) for one in plotted)]
        return cls(_HEADROOM * max(peak, 1), *unit_of(peak), used or [CATEGORIES[0]])


def plotted_profiles(caller: str, profiles: Sequence[MemoryProfile]) -> list[PlottedProfile]:
    """Return what is drawn of some profiles. A `ValueError` of the public function says that one holds no events."""
    found = []
    for profile in profiles:
        check_instance(caller, "profile", profile, MemoryProfile, "what ampkit.debug.memory or forecast returned")
        if not profile.times_ms:
            raise ValueError(f"{caller}: profile {profile.label!r} holds no events. Record at least one step.")
        # The times of a forecast are those of a host that computes shapes: they say nothing about the step.
        places = range(len(profile.times_ms)) if profile.forecast else profile.times_ms
        totals = profile.totals
        events, peak = drawn_events(totals, _POINTS), max(totals)
        peak_at = totals.index(peak)
        marks = []  # without a label where the next mark of the same kind, or the end, is too close
        for is_step, room in ((True, _STEP_ROOM), (False, _PHASE_ROOM)):
            kind = [mark for mark in profile.marks if mark.name.startswith("step ") == is_step]
            xs = [places[min(mark.at, len(places) - 1)] for mark in kind]
            for mark, x, next_x in zip(kind, xs, [*xs, places[-1]][1:], strict=True):
                fits = next_x - x >= room * (places[-1] - places[0])
                marks.append(PlottedMark(x, mark.name if fits else "", is_step))
        found.append(
            PlottedProfile(
                profile=profile,
                title=profile_title(profile),
                events=events,
                x=[places[i] for i in events],
                x_label="allocations and frees, in order" if profile.forecast else "time, ms",
                series={category: [profile.series[category][i] for i in events] for category in CATEGORIES},
                marks=marks,
                peak=peak,
                peak_at=peak_at,
                peak_x=places[peak_at],
            )
        )
    return found


def drawn_events(totals: Sequence[int], limit: int) -> list[int]:
    """Return the indices of at most `limit` events that show the same curve of bytes.

    The events are cut into stretches of equal length. Of each, the first, the lowest and the highest event are drawn;
    of all, the last one too.
    """
    if len(totals) <= limit:
        return list(range(len(totals)))
    length = math.ceil(len(totals) / ((limit - 1) // 3))
    found = {len(totals) - 1}
    for start in range(0, len(totals), length):
        stretch = range(start, min(start + length, len(totals)))
        found |= {start, min(stretch, key=totals.__getitem__), max(stretch, key=totals.__getitem__)}
    return sorted(found)
