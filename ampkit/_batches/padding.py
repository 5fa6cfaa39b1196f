"""The padding of a step's batches: to sizes that the user gave, or to sizes chosen from the first batches."""

import itertools
from collections import Counter, UserDict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from .._capture.keys.inputs import flatten
from .._capture.ranks.ranks import Ranks
from .._capture.state.snapshot import Snapshot
from .._capture.state.state import TrainingState
from .._undo import Undo
from .buckets import Buckets, Sizes, first_slice, is_auto, pad_stack, padded, smallest_bucket, text
from .leaks import PaddingCheck
from .sizes import MOST_GROWTH, MOST_SIZES, choose_sizes, holds, smallest, tokens

WATCHED = 200  # batches, as they come, from which sizes are chosen
FEWEST = 8  # batches from which they may be chosen ahead of the first call

_Batch = tuple[tuple[Any, ...], dict[str, Any]]


class Padding:
    """Pads the batches of a step. With `Buckets("auto")` it chooses the sizes itself.

    The first `WATCHED` batches stay as they are, and their sizes are counted. Then sizes are chosen. A later batch that
    none of them holds stays as long as it is, in eager calls too, because the model may have no positions beyond; its
    size becomes one of them as long as there are fewer than `MOST_SIZES`. With several ranks it does not, because
    ranks have different batches, and it is a layout like any other. The sizes are those of rank 0.

    Nothing but the sizes of the batches decides this, so that steps with and without graphs pad alike.

    Args:
        buckets: the sizes, or how to pad to those that are chosen.
        ranks: the processes that train together.
        check: tells whether the loss sees the padding. It is asked before the first padded batch, with one rank alone.

    Attributes:
        sizes: what is chosen so far; () as long as nothing is.
        why_eager: why no graph is to serve the batch that was padded last; "" if one may.
    """

    def __init__(self, buckets: Buckets, ranks: Ranks, check: PaddingCheck) -> None:
        self._buckets, self._ranks, self._check = buckets, ranks, check
        self._auto = is_auto(buckets.batch)
        self._seen: Counter[Sizes] = Counter()
        self._growth = 0.0  # of the tokens of the batches that were seen
        self.sizes: tuple[Sizes, ...] = ()
        self.why_eager: str = ""

    def batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Batch:
        """Return a batch padded, see `Buckets.pad_batch`.

        Raises:
            InputMismatch: see `Buckets.pad_batch`; or the loss sees the padding.

        Sync: where it asks whether the loss sees the padding, and where ranks agree on sizes.
        """
        if not self._auto:
            return padded(self._buckets, args, kwargs, partial(smallest_bucket, self._buckets))
        return padded(self._buckets, args, kwargs, partial(self._fitting, args, kwargs, 1))

    def stack(self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> _Batch:
        """Return a stack of `count` batches padded, as its first one would be. Errors and sync: see `batch`."""
        if not self._auto:
            return pad_stack(self._buckets, args, kwargs, count, partial(smallest_bucket, self._buckets))
        first = first_slice(*flatten(args, kwargs))
        return pad_stack(self._buckets, args, kwargs, count, partial(self._fitting, *first, count))

    def _fitting(self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int, real: Sizes) -> Sizes:
        """Return the sizes to pad this batch to, and note whether a graph may serve it. Count it as `count` batches."""
        if not self.sizes and self._seen.total() >= WATCHED:
            self._choose()
        if not self.sizes:
            if not self._ranks.several:
                larger = [sizes for sizes in self._seen if holds(sizes, real)]
                self._check(args, kwargs, real, max(larger, key=tokens, default=real))
            self._seen[real] += count
            self.why_eager = WATCHING
            return real
        known = smallest(self.sizes, real)
        # Each of its sizes is one that the model has had before, or the batch's own.
        columns = zip(real, zip(*self.sizes, strict=True), strict=True)
        held = known or tuple(min((size for size in column if size >= own), default=own) for own, column in columns)
        self.why_eager = ""
        if self._ranks.several:
            return held
        self._check(args, kwargs, real, held)
        if known is None and len(self.sizes) < MOST_SIZES:
            self.sizes = tuple(sorted((*self.sizes, held), key=lambda sizes: (tokens(sizes), sizes)))
        elif known is None:
            self.why_eager = LARGER
        return held

    def look_ahead(self, batches: Iterable[Any]) -> None:
        """Choose sizes from the first of these batches, see `GraphedStep.choose_buckets`."""
        if not self._auto:
            raise ValueError(
                f"choose_buckets: the step pads to the sizes of {self._buckets}. Make it with buckets='auto', or with "
                "Buckets('auto', 'auto', pad=...)."
            )
        seen: Counter[Sizes] = Counter()

        def count(real: Sizes) -> Sizes:
            seen[real] += 1
            return real

        random_numbers = Snapshot(TrainingState({}, [], None, own={}), (), on_host=True)
        with Undo() as undo:
            undo.note(random_numbers.restore)
            for batch in itertools.islice(batches, WATCHED):
                named = isinstance(batch, (dict, UserDict))
                args = () if named else tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
                padded(self._buckets, args, dict(batch) if named else {}, count)
        if seen.total() < FEWEST:
            raise ValueError(
                f"choose_buckets: there were {seen.total()} batches, and sizes are chosen from at least {FEWEST}. Pass "
                "a loader of more, or give the sizes: buckets=Buckets(batch=(16, 32), length=(128, 256))."
            )
        self._seen = seen
        self._choose()

    def _choose(self) -> None:
        sizes = choose_sizes(self._seen)
        pairs = [(real, smallest(sizes, real) or real, count) for real, count in self._seen.items()]
        before = sum(tokens(real) * count for real, _, count in pairs)
        after = sum(tokens(held) * count for _, held, count in pairs)
        self.sizes, self._growth = self._ranks.of_first((sizes, after / before - 1 if before else 0.0))

    def report(self) -> tuple[str, ...]:
        """Return what a report says of the sizes, in words."""
        if not self._auto:
            return ()
        if not self.sizes:
            return (f"sizes to pad to are chosen after {WATCHED} calls, of which {self._seen.total()} were made",)
        more = f", more than the {MOST_GROWTH:.0%} that are aimed at" * (self._growth > MOST_GROWTH)
        return (f"padded to {', '.join(map(text, self.sizes))}: {self._growth:.1%} more tokens{more}",)

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes, and those of the batches that were seen, in lists. {} unless sizes are chosen."""
        if not self._auto:
            return {}
        seen = [[[*real], count] for real, count in self._seen.items()]
        return {"sizes": [[*sizes] for sizes in self.sizes], "growth": self._growth, "seen": seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the step that `state` is of. Raise a `ValueError` if its batches were padded in another way."""
        sizes = tuple(map(tuple, state.get("sizes", ())))
        seen = Counter({tuple(real): count for real, count in state.get("seen", ())})
        dims = 1 if self._buckets.length is None else 2
        if self._auto != bool(state) or any(len(each) != dims for each in (*sizes, *seen)):
            of = "other buckets='auto'" if state else "no buckets='auto'"
            raise ValueError(
                f"load_state_dict: the state is of a step with {of}, and this one has buckets={self._buckets}. Make it "
                "with the buckets that the other one had."
            )
        self.sizes, self._seen, self._growth = sizes, seen, float(state.get("growth", 0.0))


WATCHING = "buckets='auto' watches the sizes of batches, which are not padded yet"
LARGER = "buckets='auto': the batch is larger than the sizes that were chosen"
