"""How memory profiles are drawn into an image file, with matplotlib."""

import os
from typing import Any

from ..._arguments import check_path
from ..._text import size_text
from .plot_data import COLOURS, ByteAxis, PlottedProfile, plotted_profiles
from .profile import MemoryProfile

# In a text column of 740 pixels, that of the documentation, this font is 12 pixels high.
_WIDTH = 9.0  # inches
_DPI = 160
_FONT = 11


def plot_memory(profile: MemoryProfile, *others: MemoryProfile, path: str | os.PathLike[str]) -> None:
    """Draw the bytes alive in each category over time into an image file, several profiles below each other.

    Args:
        profile: what `ampkit.debug.memory` or `ampkit.debug.forecast` returned.
        others: further profiles, such as that of the same step under another policy. All share one y axis.
        path: the file to write. Its ending gives the format: `.png`, `.svg`, `.pdf`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a profile holds no events.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot_memory needs matplotlib: pip install 'ampkit[plots]'") from error
    plotted = plotted_profiles("plot_memory", (profile, *others))
    check_path("plot_memory", "path", path)
    figure = Figure(figsize=(_WIDTH, 0.4 + 3.8 * len(plotted)), dpi=_DPI, layout="constrained")
    axis = ByteAxis.over(plotted)
    for axes, one in zip(figure.subplots(len(plotted), sharey=True, squeeze=False)[:, 0], plotted, strict=True):
        _draw(axes, one, axis)
        axes.set_ylim(0, axis.top / axis.unit)
        axes.set_ylabel(f"memory alive, {axis.unit_name}", fontsize=_FONT)
        axes.tick_params(labelsize=_FONT)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    # As stacked, the topmost first.
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=_FONT)
    figure.savefig(path)


def _draw(axes: Any, plotted: PlottedProfile, axis: ByteAxis) -> None:
    layers = [[value / axis.unit for value in plotted.series[category]] for category in axis.categories]
    colours = [COLOURS[category] for category in axis.categories]
    axes.stackplot(
        plotted.x, layers, labels=axis.categories, colors=colours, step="post", edgecolor="white", linewidth=0.3
    )
    first, last = plotted.x[0], plotted.x[-1]
    axes.set_xlim(first, last if last > first else first + 1)
    axes.set_xlabel(plotted.x_label, fontsize=_FONT)
    axes.set_title(plotted.title, fontsize=_FONT, pad=34)
    for mark in plotted.marks:
        style = {"linewidth": 0.8, "linestyle": "-"} if mark.is_step else {"linewidth": 0.5, "linestyle": ":"}
        axes.axvline(mark.x, color="black", **style)
        axes.annotate(
            mark.label,
            (mark.x, 1),
            (0, 17 if mark.is_step else 3),  # above the drawing, steps in a row of labels above that of phases
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            fontsize=_FONT,
        )
    at = plotted.peak_x, plotted.peak / axis.unit
    label_left = plotted.peak_x > (plotted.x[0] + plotted.x[-1]) / 2  # of the dot, where there is more room
    axes.plot(*at, marker="o", color="black", markersize=5, clip_on=False)
    axes.axhline(at[1], color="black", linewidth=0.5, linestyle="--")
    axes.annotate(
        f"peak {size_text(plotted.peak)}",
        at,
        (-8 if label_left else 8, 6),
        textcoords="offset points",
        ha="right" if label_left else "left",
        weight="bold",
        fontsize=_FONT,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )
    axes.spines[["top", "right"]].set_visible(False)
