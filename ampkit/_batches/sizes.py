"""Which few sizes to pad batches to, so that the padding is small: chosen from the sizes of batches that were seen."""

import math
from collections.abc import Mapping, Sequence

from .buckets import Sizes

MOST_SIZES = 6  # each takes a warm-up and a graph of its own
MOST_GROWTH = 0.15  # of the tokens by padding: no more sizes are chosen than that needs
AIM = 0.12  # for the batches that were seen, so that those to come, which differ, keep to 15% as well
_MULTIPLE = 8  # kernels of float16 and bfloat16 want lengths that are multiples of it
_ROUNDED_FROM = 64  # rounding up to these multiples adds at most 11% to a size from here on


def tokens(sizes: Sizes) -> int:
    """Return how many tokens a batch of these sizes has; without a length, how many samples."""
    return math.prod(sizes)


def choose_sizes(seen: Mapping[Sizes, int]) -> tuple[Sizes, ...]:
    """Return the sizes to pad batches to, ascending, see `MOST_SIZES` and `AIM`.

    Batches are ordered by their length, and runs of neighbours share a size that holds all of them. Of all ways to
    divide the order into that many runs, the one is taken in which the batches have the fewest tokens. If all are of
    one batch size, there is no better choice of so many sizes. No size exceeds what was seen, because the model may
    have no positions beyond it.

    Args:
        seen: sizes of batches, and how many batches had them.
    """
    order = sorted(seen, key=lambda sizes: sizes[::-1])
    costs = _costs(order, seen)
    limit = (1 + AIM) * sum(tokens(sizes) * count for sizes, count in seen.items())
    # The fewest tokens of the first n batches in the order, and where the last run begins: with one run, two, ...
    best = [(costs[0][n][0], 0) for n in range(len(order))]
    begins = [[begin for _, begin in best]]
    while best[-1][0] > limit and len(begins) < min(MOST_SIZES, len(order)):
        before = best
        best = [before[0]] + [
            min((before[begin - 1][0] + costs[begin][n][0], begin) for begin in range(1, n + 1))
            for n in range(1, len(order))
        ]
        begins.append([begin for _, begin in best])
    chosen, last = [], len(order) - 1
    for run in reversed(begins):
        chosen.append(costs[run[last]][last][1])
        last = run[last] - 1
        if last < 0:
            break
    return tuple(sorted(set(chosen), key=lambda sizes: (tokens(sizes), sizes)))


def holds(sizes: Sizes, real: Sizes) -> bool:
    """Return whether a batch of these real sizes can be padded to `sizes`."""
    return all(size >= own for size, own in zip(sizes, real, strict=True))


def smallest(chosen: Sequence[Sizes], real: Sizes) -> Sizes | None:
    """Return the sizes with the fewest tokens that hold a batch of these sizes. None if there are none."""
    holding = [sizes for sizes in chosen if holds(sizes, real)]
    return min(holding, key=lambda sizes: (tokens(sizes), sizes)) if holding else None


def _costs(order: Sequence[Sizes], seen: Mapping[Sizes, int]) -> list[dict[int, tuple[int, Sizes]]]:
    """Return for each run of batches in the order, by its ends, the tokens of all its batches, and their size."""
    longest = order[-1][-1]
    costs = []
    for begin in range(len(order)):
        runs, size, count = {}, order[begin], 0
        for end in range(begin, len(order)):
            size, count = tuple(map(max, size, order[end])), count + seen[order[end]]
            held = (*size[:-1], min(_rounded(size[-1]), longest))
            runs[end] = tokens(held) * count, held
        costs.append(runs)
    return costs


def _rounded(size: int) -> int:
    return size if size < _ROUNDED_FROM else -(-size // _MULTIPLE) * _MULTIPLE
