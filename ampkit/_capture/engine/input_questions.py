"""Questions about the input, asked ahead of each call to find its graph."""

from collections.abc import Sequence, Set
from typing import Any

import torch

from ..keys.key import Key
from ..preflight.draw_paths import NEW, Outcomes, Tree
from ..preflight.questions import AskedPath
from .session import Session


class InputQuestions:
    """Knows by key what calls ask the device about their input, and asks it to find the graph of a call.

    What a first call asks may be about a tensor that it has made of its input and kept. So two calls under the
    preflight have to ask the same after the same answers.

    Sync: each question waits for the device, and so for the step before.

    Args:
        session: of the engine.

    Attributes:
        enabled: whether steps may decide by questions. Several ranks would have to agree on the answers.
    """

    def __init__(self, session: Session) -> None:
        self._device, self._layouts, self._cache = session.device, session.layouts, session.cache
        self._fallback = session.fallback
        self.enabled = not session.ranks.several
        self._trees: dict[Key, Tree] = {}
        self._asked: dict[tuple[Key, Outcomes], AskedPath] = {}

    def decided(self, key: Key, leaves: Sequence[Any]) -> Key:
        """Ask for a call of this key. Return its key with the answers, `NEW` if nobody knows yet what they lead to."""
        tree = self._trees.get(key)
        if tree is None:
            return key
        answers = self._answers(tree, leaves)
        return key._replace(answers=NEW if answers is None else answers)

    def is_confirmed(self, key: Key, asked: AskedPath | None, leaves: Sequence[Any], written: Set[str]) -> bool:
        """Return whether a call under the preflight has asked what an earlier one of its key has asked.

        If it has not, though it has a key with answers, nothing is asked ahead any more, and all begins anew. So it is
        where the recorded questions have other answers, and where a later call than the first writes on the host: what
        it writes may depend on its answers, and a replay with other answers would not do it.

        Args:
            key: of the call.
            asked: what it has asked.
            leaves: its arguments.
            written: what it has left another number in.
        """
        if asked is not None and self._trees and written:
            self._give_up(_WRITES.format(", ".join(sorted(written))))
            return True
        alone = Tree()
        if asked is not None and not (alone.add(asked.path) and self._answers(alone, leaves) == asked.path.outcomes):
            self._give_up(_CHANGED)
            return True
        if key.answers in (None, NEW):
            return asked is None
        known = self.asked(key)
        if known is None or asked != known:
            self._give_up(_CHANGED)
        return True

    def _answers(self, tree: Tree, leaves: Sequence[Any]) -> Outcomes | None:
        """Return the answers for these arguments; None as soon as it is not known what is asked next."""
        try:
            with torch.autocast(self._device.type, enabled=False):  # what was recorded is below autocast
                return tree.draw(leaves)
        except (RuntimeError, IndexError):  # which the call raises itself
            return None

    def learn(self, key: Key, asked: AskedPath) -> None:
        """Take note of what an eager call has asked, and have its layout be that of the answers."""
        if not self.enabled:
            return
        plain = key._replace(answers=None)
        tree = self._trees.setdefault(plain, Tree())
        if not tree.add(asked.path) or tree.paths > _MOST_PATHS:
            self._give_up(_TOO_MANY.format(_MOST_PATHS) if tree.paths > _MOST_PATHS else _CHANGED)
            return
        self._asked[plain, asked.path.outcomes] = asked
        found = key._replace(answers=asked.path.outcomes)
        if key != found:
            self._layouts.move(key, found)

    def asked(self, key: Key) -> AskedPath | None:
        """Return what calls of this key ask, None for nothing."""
        return None if key.answers is None else self._asked.get((key._replace(answers=None), key.answers))

    def clear(self) -> None:
        """Forget all."""
        self._trees.clear()
        self._asked.clear()

    def _give_up(self, why: str) -> None:
        self.enabled = False
        self._cache.clear()
        self._layouts.clear()
        self.clear()
        self._fallback.warn_once("questions", why)


_MOST_PATHS = 64
_CHANGED = (
    "what the step asks the device about its input has changed, after the same answers. Lines that ask are named from "
    "now on."
)
_WRITES = (
    "the step asks the device about its input, and changes {0}, which a replay would not do. Lines that ask are named "
    "from now on. Keep it in a tensor on the device, or change it behind the call."
)
_TOO_MANY = (
    "what the step asks the device about its input had more than {0} different answers. Lines that ask are named from "
    "now on. Ask less, or use torch.where instead of a branch."
)
