"""Questions to the device: about the input, asked ahead of each call to find its graph; others, at which it is cut."""

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor

from ..._torch.tensors.tensors import storage_address
from ..keys.key import Key
from ..preflight.draw_paths import NEW, Outcomes, Tree
from ..preflight.questions import AskedPath
from ..state.overlaps import memory_of
from .cuts import RehearsedCuts
from .session import Session


class InputQuestions:
    """Knows by key what calls ask the device. What is about their input it asks ahead, to find the graph of a call.

    What a first call asks may be about a tensor that it has made of its input and kept. So two calls under the
    preflight have to ask the same after the same answers.

    With several ranks, each learns what its own calls ask. No graph is cut: the ranks would have to agree there.

    Sync: each question waits for the device, and so for the step before.

    Attributes:
        enabled: whether steps may decide by questions.
        may_cut: whether graphs may be cut where calls ask.
    """

    def __init__(self, session: Session) -> None:
        self._device, self._layouts, self._cache = session.device, session.layouts, session.cache
        self._fallback, self._ranks = session.fallback, session.ranks
        self.enabled, self.may_cut = True, session.options.cuts and not session.ranks.several
        self._state, self._cuts = session.state, dict[Key, RehearsedCuts]()
        # Per key and answers about the input: those at the cuts that a call gets the graph of, () if there are none.
        self._guesses: dict[tuple[Key, Outcomes], tuple[bool, ...]] = {}
        self._changing: set[str] = set()  # paths of the state
        self._misses = 0  # calls with another answer at a cut than that
        self._replays = -1  # how many there were at the last miss
        self._trees: dict[Key, Tree] = {}
        self._asked: dict[tuple[Key, Outcomes], AskedPath] = {}

    def decided(self, key: Key, leaves: Sequence[Any]) -> Key:
        """Ask for a call of this key. Return its key with the answers, `NEW` if nobody knows yet what they lead to."""
        tree = self._trees.get(key)
        if tree is None:
            return key
        answers = self._answers(tree, leaves)
        guess = None if answers is None else self._guesses.get((key, answers))
        return key._replace(answers=NEW if answers is None or guess is None else answers + guess)

    def kept(self) -> dict[str, Tensor]:
        """Return the tensors of the state by path which calls may be asked about ahead of them."""
        return {path: tensor for path, tensor in self._state.tensors().items() if path not in self._changing}

    def leave_out(self, changed: Set[str]) -> bool:
        """Have nothing be asked ahead about what is here, because calls change it. Return whether there is any."""
        self._changing |= changed
        return bool(changed)

    def is_confirmed(self, key: Key, asked: AskedPath | None, leaves: Sequence[Any], written: Set[str]) -> bool:
        """Return whether a call under the preflight has asked what an earlier one of its key has asked.

        If it has not, though it has a key with answers, nothing is asked ahead any more, and all begins anew. So it is
        where the recorded questions have other answers, and where a later call than the first writes on the host: what
        it writes may depend on its answers, and a replay with other answers would not do it. `written` is what the call
        has left another number in.
        """
        known = self.asked(key)
        if asked is not None and self._trees and written:
            self._give_up(_WRITES.format(", ".join(sorted(written))))
            return True
        if known is not None and asked is not None and (asked.answers, asked.numbers) != (known.answers, known.numbers):
            self.miss(key, 0)
            return not self.may_cut
        alone = Tree()
        if asked is not None and not (alone.add(asked.path) and self._answers(alone, leaves) == asked.path.outcomes):
            self._give_up(_CHANGED)
            return True
        if key.answers in (None, NEW):
            return asked is None
        if known is None or asked is None or not asked.is_like(known):
            self._give_up(_CHANGED)
        return True

    def miss(self, key: Key, replays: int) -> None:
        """Take note of a call with another answer at a cut than that of its key; there were `replays` so far.

        Behind two in a row, the next call shows the answers that are to be expected from then on.
        """
        self._misses += 1
        if replays == self._replays and (asked := self.asked(key)) is not None:
            self._guesses.pop((_plain(key), asked.path.outcomes), None)
        self._replays = replays
        if self._misses > _FEW and self._misses > _MOST_MISSES * replays:
            self.stop_cutting(_MISSES)

    def stop_cutting(self, why: str) -> None:
        """Cut no graph any more, for this reason."""
        self.may_cut = False
        self._forget()
        self._fallback.warn_once("cuts", why)

    def _answers(self, tree: Tree, leaves: Sequence[Any]) -> Outcomes | None:
        """Return the answers for these arguments; None as soon as it is not known what is asked next."""
        try:
            with torch.autocast(self._device.type, enabled=False):  # what was recorded is below autocast
                return tree.draw(leaves, self._state.tensors)
        except (RuntimeError, IndexError, KeyError):  # which the call raises itself
            return None

    def learn(self, key: Key, asked: AskedPath) -> None:
        """Take note of what an eager call has asked, and have its layout be that of the answers."""
        if not self.enabled or (asked.answers and not self.may_cut):  # which this call has put an end to
            return
        plain = _plain(key)
        tree = self._trees.setdefault(plain, Tree())
        if not tree.add(asked.path) or tree.paths > _MOST_PATHS:
            self._give_up(_TOO_MANY.format(_MOST_PATHS) if tree.paths > _MOST_PATHS else _CHANGED)
            return
        self._ranks.decides |= bool(asked.path.outcomes)
        found = key._replace(answers=asked.path.outcomes + asked.answers)
        # Memory of the state may be replaced later, and is not to be kept alive here.
        of_state = set(map(storage_address, memory_of(self._state).values()))
        beside = {address: storage for address, storage in asked.early.items() if address not in of_state}
        self._asked[plain, found.answers] = asked._replace(early=beside)
        self._guesses[plain, asked.path.outcomes] = asked.answers
        if key != found and found not in self._layouts:
            self._layouts.move(key, found)

    def asked(self, key: Key) -> AskedPath | None:
        """Return what calls of this key ask, None for nothing."""
        return None if key.answers is None else self._asked.get((_plain(key), key.answers))

    def waits(self) -> list[str]:
        """Return the lines for whose questions calls wait, with what to write instead; each remedy once."""
        by_remedy: dict[str, dict[str, None]] = {}
        for wait in (wait for asked in self._asked.values() for wait in asked.waits if wait.line):
            by_remedy.setdefault(wait.remedy or _INSTEAD, {})[wait.line] = None
        return [f"{', '.join(lines)} - asks the device, and calls wait. {text}" for text, lines in by_remedy.items()]

    def begin_cuts(self, key: Key) -> RehearsedCuts:
        """Return what is to learn in the rehearsal of a key where its graph is cut."""
        cuts = self._cuts[key._replace(ranks_outcome=0)] = RehearsedCuts(self._state)
        return cuts

    def cuts(self, key: Key) -> RehearsedCuts:
        """Return what the last rehearsal of a key has shown."""
        return self._cuts.get(key._replace(ranks_outcome=0)) or self.begin_cuts(key)

    def clear(self) -> None:
        """Forget all."""
        self._trees.clear()
        self._asked.clear()
        self._guesses.clear()
        self._cuts.clear()

    def _forget(self) -> None:
        self._cache.clear()
        self._layouts.clear()
        self.clear()

    def _give_up(self, why: str) -> None:
        self.enabled = False
        self._forget()
        self._fallback.warn_once("questions", why)


def _plain(key: Key) -> Key:
    return key._replace(answers=None, ranks_outcome=0)


_INSTEAD = "Use torch.where instead of a branch."
_MOST_PATHS = 64
_FEW, _MOST_MISSES = 4, 0.25  # misses that are never too many, and their share of the replays that is
_MISSES = (
    "what the step asks the device (`if t:`, `.item()` of a boolean) often has another answer than in the call before. "
    "Such a call is done eagerly. Lines that ask about more than the input are named from now on. Use torch.where "
    "instead of a branch."
)
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
    "now on. Ask less, pad to few sizes, or use torch.where instead of a branch."
)
