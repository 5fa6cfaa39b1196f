"""Which name of one sequence stands for which of another, where that is certain. Nothing is guessed."""

from collections import defaultdict
from collections.abc import Sequence

_INFINITE = 1 << 30
_MOST_CELLS = 4_000_000  # of a table: seconds


def certain_places(found: Sequence[str], known: Sequence[str]) -> list[list[int]]:
    """Return, for each name that was found, the places in `known` that it may stand for.

    The two sequences are aligned, in order, so that as many equal names as possible stand for each other. Often there
    are several such alignments: of two equal names in a row, either one may be missing. A name gets no place if it has
    none in one of these alignments, and more than one if they disagree. If the sequences have little in common, none
    gets a place.
    """
    if list(found) == list(known):
        return [[i] for i in range(len(found))]
    places: list[list[int]] = [[] for _ in found]
    shift = len(known) - len(found)
    band = max(1, abs(shift))
    while (len(found) + 1) * (2 * band + 1) <= _MOST_CELLS:
        before = _costs(found, known, band)
        cost = before[len(found)][shift + band]
        if cost <= band:  # otherwise a cheaper alignment may lie outside of the band
            break
        band *= 2
    else:
        return places
    behind = _costs(found[::-1], known[::-1], band)
    pairs: dict[int, set[tuple[int, int]]] = defaultdict(set)  # by how many pairs come before, in an alignment
    for i, name in enumerate(found):
        for place in range(max(0, band - i), min(2 * band + 1, len(known) - i + band)):
            j = place + i - band
            mirrored = shift - (j - i) + band  # what is behind both names, in the table of the reversed sequences
            if name != known[j] or not 0 <= mirrored <= 2 * band:
                continue
            if before[i][place] + behind[len(found) - i - 1][mirrored] == cost:
                pairs[(i + j - before[i][place]) // 2].add((i, j))
    for candidates in pairs.values():
        if len({i for i, _ in candidates}) == 1:
            places[next(iter(candidates))[0]] = sorted(j for _, j in candidates)
    return places


def _costs(found: Sequence[str], known: Sequence[str], band: int) -> list[list[int]]:
    """Return how many names stay alone, at least, in the first i of `found` and j of `known`, at [i][j - i + band]."""
    width = 2 * band + 1
    rows = []
    above = [_INFINITE] * (width + 1)  # the last one lies beside the band, on either side
    for i in range(len(found) + 1):
        row = [_INFINITE] * (width + 1)
        for place in range(max(0, band - i), min(width, len(known) - i + band + 1)):
            j = place + i - band
            if i == j == 0:
                row[place] = 0
            elif i and j and found[i - 1] == known[j - 1]:
                row[place] = above[place]
            else:
                row[place] = 1 + min(above[place + 1], row[place - 1])
        rows.append(row)
        above = row
    return rows
