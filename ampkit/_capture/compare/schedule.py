"""Which replays are compared with eager calls."""

SPARSE = "sparse"


class ComparisonSchedule:
    """Says which replays are compared: the first ones, or few of all.

    Args:
        verify: how many; or `SPARSE`: the first replay of each graph, and one in the 16th, 256th, 4096th and each
            50,000th call, counted from the first comparison on. Where several ranks replay, they compare in the next
            call in which they vote, since all of them count the same calls.
    """

    def __init__(self, verify: int | str) -> None:
        self._is_sparse = verify == SPARSE
        self._left = 0 if isinstance(verify, str) else verify
        self._calls = self._next = 0

    def count(self) -> None:
        """Take note of a call."""
        self._calls += 1

    def is_due(self, *, is_first: bool = False) -> bool:
        """Return whether a replay of this call is to be compared.

        Args:
            is_first: whether it is the first one of its graph.
        """
        return self._left > 0 or (self._is_sparse and (is_first or 0 < self._next <= self._calls))

    def note(self) -> None:
        """Take note that the replay of this call was compared."""
        self._left = max(0, self._left - 1)
        if not self._next:
            self._calls = 1
        further = _EACH * (self._calls // _EACH + 1)
        self._next = next((number for number in _EARLY if number > self._calls), further)


_EARLY = (16, 256, 4096)  # calls
_EACH = 50_000
