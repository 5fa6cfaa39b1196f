"""Random set-ups for `graphed_step(compile=...)`: those of `setups`, with fewer layouts, since each compiles."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from setups import STALE, Setup, draw, is_call

MOST_CALLS = 40


def draw_compiled(seed: int, device: str) -> Setup:
    """Return the set-up of this seed with at most two layouts, one change of modes, and replays at its end.

    It has no random-number generator of its own, which torch.compile cannot trace.
    """
    setup, pick = draw(10_000 + seed, device), random.Random(-seed - 7)
    layouts = setup.layouts[:2]
    script, stale = [], 0
    for action in setup.script[:MOST_CALLS]:
        stale += action in STALE
        if action in STALE and stale > 1:
            continue
        script.append("A" + action[1:] if is_call(action) and action[0] not in "AB"[: len(layouts)] else action)
    bad = "!" * (setup.policy == "float16")
    tail = ["A" + bad * (pick.random() < 0.1) for _ in range(setup.accumulate * 5)]
    return replace(setup, layouts=layouts, script=(*script, *tail), by_hand=False, generator=False)


totals: dict[str, Counter[str]] = defaultdict(Counter)  # by device and kind of compilation


def count(setup: Setup, compile: str, step: Any) -> None:
    """Add a run to the summary."""
    report = step.report()
    lines = report.compiled
    totals[f"{setup.device}, {compile}"].update(
        {
            "set-ups": 1,
            "with a compiled update": any(line.startswith("compiled: update") for line in lines),
            "calls": sum(map(is_call, setup.script)),
            "captures": report.captures,
            "replays": report.replays,
            "skipped steps": report.skipped,
        }
    )


def summary() -> Iterator[str]:
    """Yield what was run and found, a line a device and kind of compilation."""
    for name, counter in totals.items():
        counts = [f"{number} {what}" for what, number in counter.items() if what != "differences"]
        yield f"{name}: {', '.join(counts)}; {counter['differences']} differences"
