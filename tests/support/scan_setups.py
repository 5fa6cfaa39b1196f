"""Random training set-ups for `scan` and `window`: those of `setups`, with long stretches of calls, cut at random."""

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import setups
import torch
from setups import Batch, Setup, StepTraining, draw, is_call, make_batch
from torch import Tensor
from torch.utils import _pytree as pytree


class Piece(NamedTuple):
    """Words of a script that are done together: a scan, a window, a single call, or something else.

    Attributes:
        actions: the words. A short window ends with its flush.
        how: "scan", "window", or "alone".
    """

    actions: tuple[str, ...]
    how: str

    @property
    def calls(self) -> tuple[str, ...]:
        """The words that are calls."""
        return tuple(filter(is_call, self.actions))


def draw_scans(seed: int, device: str, windows: bool = False) -> tuple[Setup, tuple[Piece, ...]]:
    """Return the set-up of this seed, with two more stretches of like calls, and how its script is cut.

    Args:
        seed: of all that is drawn.
        device: where it trains.
        windows: whether most optimizer steps are to be windows.
    """
    setup, pick = draw(seed, device), random.Random(-seed - 1)
    script = [*setup.script]
    for letter in ("A", pick.choice("ABC"[: len(setup.layouts)])):
        bad = "!" * (setup.policy == "float16")
        calls = setup.accumulate * pick.randint(5, 24 if setup.accumulate == 1 else 12)
        script += [letter + bad * (pick.random() < 0.08) for _ in range(calls)]
    setup = replace(setup, script=tuple(script), by_hand=False)
    return setup, tuple(cut_windows(script, setup.accumulate, pick) if windows else cut(script, setup.accumulate, pick))


def cut(script: list[str], accumulate: int, pick: random.Random) -> Iterator[Piece]:
    """Yield the pieces of a script: runs of calls with one layout, cut at places of which many lie between windows."""
    at = 0
    while at < len(script):
        stop = at + 1
        while stop < len(script) and is_call(script[at]) and script[stop][0] == script[at][0]:
            stop += 1
        while at < stop:
            most = stop - at
            size = min(most, pick.choice((1, pick.randint(1, most), most, accumulate * pick.randint(1, 20))))
            scans = is_call(script[at]) and (size > 1 or pick.random() < 0.3)
            yield Piece(tuple(script[at : at + size]), "scan" if scans else "alone")
            at += size


def cut_windows(script: list[str], accumulate: int, pick: random.Random) -> Iterator[Piece]:
    """Yield the pieces of a script: mostly the micro-batches of an optimizer step, if they have one layout."""
    at = micro = 0
    while at < len(script):
        like = calls_alike(script, at, accumulate)
        ends = script[at + like : at + like + 1] == ["flush"]
        if micro == 0 and like and (like == accumulate or ends) and pick.random() < 0.9:
            size = like + (like < accumulate)  # a short one with its flush
            yield Piece(tuple(script[at : at + size]), "window")
            at += size
        else:
            micro = (micro + 1) % accumulate if like else 0 if script[at] == "flush" else micro
            yield Piece((script[at],), "scan" if like and pick.random() < 0.1 else "alone")
            at += 1


def calls_alike(script: list[str], at: int, most: int) -> int:
    """Return how many calls there are from here on that have one layout, `most` at most."""
    calls = itertools.takewhile(lambda word: is_call(word) and word[0] == script[at][0], script[at : at + most])
    return len(list(calls))


class ScanTraining(StepTraining):
    """Trained by scans and windows."""

    def together(self, piece: Piece) -> dict[str, Any]:
        """Do the calls of a scan or of a window; return the outputs."""
        layout = self.setup.layouts["ABC".index(piece.calls[0][0])]
        boosts = [float("inf") if action.endswith("!") else 1.0 for action in piece.calls]
        device = self.setup.device
        batches = [make_batch(self.setup.model, layout, boost, self._made, device) for boost in boosts]
        first = batches[0]
        stack = Batch(
            stacked([batch.x for batch in batches]),
            stacked([batch.y for batch in batches]),
            stacked([batch.boost for batch in batches]),
            first.branch,
            first.reduction,
        )
        args, kwargs = setups.TREES[self.setup.tree][0](stack)
        together = self.step.scan if piece.how == "scan" else self.step.window
        return together(*args, **kwargs)._asdict()


def stacked(tensors: list[Tensor]) -> Tensor:
    """Return a stack in which each slice has the strides of its tensor."""
    first = tensors[0]
    strides = (max(1, first.numel()), *first.stride())
    stack = torch.empty_strided((len(tensors), *first.shape), strides, dtype=first.dtype, device=first.device)
    for row, tensor in zip(stack, tensors, strict=True):
        row.copy_(tensor)
    return stack


def of_singles(outs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a scan returns where single calls returned these."""
    norms = [out["grad_norm"] for out in outs if out["grad_norm"] is not None]
    flat = [pytree.tree_flatten(out["aux"]) for out in outs]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    aux = [None if column[0] is None else torch.stack(column) for column in columns]
    return {
        "loss": torch.stack([out["loss"] for out in outs]),
        "aux": pytree.tree_unflatten(aux, flat[0][1]),
        "grad_norm": torch.stack(norms) if norms else None,
        "skipped": torch.stack([out["skipped"] for out in outs]),
        "stepped": tuple(out["stepped"] for out in outs),
    }


def of_window(outs: list[dict[str, Any]], short: bool) -> dict[str, Any]:
    """Return what a window returns where single calls returned these. The flush of a short one returns nothing."""
    last = {} if short else {key: outs[-1][key] for key in ("grad_norm", "skipped", "stepped")}
    return {key: value for key, value in of_singles(outs).items() if key in ("loss", "aux")} | last


totals: dict[str, Counter[str]] = defaultdict(Counter)  # by device


def count(setup: Setup, pieces: tuple[Piece, ...], step: Any) -> None:
    """Add a run to the summary."""
    report = step.report()
    totals[setup.device].update(
        {
            "set-ups": 1,
            "calls": sum(map(is_call, setup.script)),
            "scans": sum(piece.how == "scan" for piece in pieces),
            "windows": sum(piece.how == "window" for piece in pieces),
            "launches of both": report.launches,
            "optimizer steps in them": report.scanned,
            "single replays": report.replays,
            "captures": report.captures,
            "skipped steps": report.skipped,
        }
    )


def summary() -> Iterator[str]:
    """Yield what was run and found, a line a device."""
    for device, counter in totals.items():
        counts = [f"{number} {name}" for name, number in counter.items() if name != "differences"]
        yield f"{device}: {', '.join(counts)}; {counter['differences']} differences"
