"""Decisions of the host: random draws on the CPU that a step only compares, made before the step to find its graph."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..._errors import CaptureError
from ..graph.graph import EmulatedGraph, GraphAround, MakeContext, Then, same
from ..keys.key import Key
from ..preflight.draw_paths import NEW, DrawPath, Tree
from .session import Session
from .variation import DRAWS_ADVICE


class HostDraws:
    """Knows by key which draws the calls of a step make on the host, and makes them to find the graph of a call.

    Torch's default CPU generator is where an eager call finds it, or leaves it, in every call: an eager call draws for
    itself; behind a replay the generator is put to where the draws of this object have left it.

    With several ranks, each learns its own paths.

    Attributes:
        enabled: whether steps may decide by draws.
    """

    def __init__(self, session: Session) -> None:
        self._ranks, self._cache = session.ranks, session.cache
        self._layouts, self._fallback = session.layouts, session.fallback
        self.enabled = True
        self._trees: dict[Key, Tree] = {}
        self._changes = self._calls = 0  # changes of what is drawn, and calls since the last one
        self._before = self._after = torch.default_generator.get_state()

    def decided(self, key: Key) -> Key:
        """Draw for a call of this key. Return its key with the outcomes, `NEW` if nobody knows yet what they lead to.

        If the calls of the key draw nothing as far as is known, the key is returned as it is. The generator is put back
        to where it was.
        """
        tree = self._trees.get(key)
        if tree is not None:
            self._calls += 1
            self._before = torch.default_generator.get_state()
            try:
                outcomes = tree.draw()
                self._after = torch.default_generator.get_state()
            finally:
                torch.default_generator.set_state(self._before)
            key = key._replace(outcomes=NEW if outcomes is None else outcomes)
        return key

    def learn(self, key: Key, path: DrawPath) -> Key:
        """Take note of what an eager call has drawn, and have its layout be that of the outcomes. Return its key.

        If the call has drawn something else than an earlier one after the same outcomes, all graphs are dropped.
        """
        if len(self._trees) == _MOST_KEYS:
            self._trees.clear()  # their layouts learn again
        tree = self._trees.setdefault(key._replace(outcomes=None, ranks_outcome=0, answers=None), Tree())
        if not tree.add(path) or key.outcomes not in (None, NEW, path.outcomes):
            # The step does something else now. Give up if it does so again and again.
            self._changes = 1 if self._calls > _RARELY else self._changes + 1
            self._calls = 0
            self.enabled = self.enabled and self._changes < _MOST_CHANGES
            self._cache.clear()
            self._layouts.clear()
            self.clear()
            self._fallback.warn_once("draws", _CHANGED)
            return key
        self._ranks.decides = True
        found = key._replace(outcomes=path.outcomes)
        if key.outcomes in (None, NEW):
            self._layouts.move(key, found)
        if tree.paths >= MOST_PATHS:
            problem = (
                f"draws on the host had more than {MOST_PATHS} different outcomes, and calls with others are eager"
            )
            self._layouts.layout_of(key._replace(outcomes=NEW, answers=None)).refuse(problem)
            self._fallback.warn_once("outcomes", f"{problem}. {DRAWS_ADVICE}")
        return found

    def clear(self) -> None:
        """Forget all."""
        self._trees.clear()

    def put_back(self) -> None:
        """Put the generator back to where it was before the draws of this call."""
        torch.default_generator.set_state(self._before)

    def is_kept(self) -> bool:
        """Return whether the generator is where the draws of this call have left it."""
        return torch.equal(torch.default_generator.get_state(), self._after)

    def keep(self) -> None:
        """Put the generator to where the draws of this call have left it."""
        torch.default_generator.set_state(self._after)


@dataclass(frozen=True, eq=False)
class DrawnGraph(GraphAround):
    """A graph of a call whose draws on the host were made. It leaves the generator as an eager call does."""

    _draws: HostDraws

    def capture(self, fn: Callable[[], Any], context: MakeContext = nullcontext, then: Then = same) -> None:
        """Record `then(fn())`, which draws again, from where this call has drawn.

        Raises:
            CaptureError: see `CudaGraph`; or `fn` has drawn something else than was drawn before.
        """
        draws = self._draws

        def drawn() -> Any:  # an attempt may have failed before
            draws.put_back()
            return fn()

        try:
            self._graph.capture(drawn, context, then)
            if not (isinstance(self._graph, EmulatedGraph) or self._draws.is_kept()):
                raise CaptureError(f"in the capture, {_CHANGED}")
        finally:
            self._draws.put_back()

    def replay(self) -> Any:
        """Do the recorded work. An emulated graph draws again in that."""
        outputs = self._graph.replay()
        self._draws.keep()
        return outputs


_CHANGED = (
    "draws on the host have changed, after the same outcomes. All graphs are dropped. If that happens often, draw on "
    "the device and compare with a tensor."
)
MOST_PATHS = 64  # per key; each takes a slow eager call
_MOST_KEYS = 256
_MOST_CHANGES = 3
_RARELY = 64  # calls between two changes
