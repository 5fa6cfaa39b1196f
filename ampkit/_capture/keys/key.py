"""The key of a call: what decides which graph is replayed in it."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from .inputs import Spec


class Key(NamedTuple):
    """What decides which graph is replayed in a call.

    Attributes:
        phase: says which of several things the function does, see `TrainingStep`. It is None, or a hashable object
            whose `parts()` are `Part`s, and whose `words` say in a report what it does ("" if there is one thing only).
    """

    spec: Spec  # of the input
    phase: Any
    settings: int  # stands for the settings of the call; no other settings ever get this number
    outcomes: Any = None  # what the host has read of its draws; None if it does not draw, see `HostDraws`
    answers: Any = None  # what calls ask the device about their input, see `InputQuestions`; None if nothing
    ranks_outcome: int = 0  # stands for the outcomes on all ranks, see `Ranks.outcome_of_all`; 0 with one rank

    @property
    def text(self) -> str:
        """The layout of the input, what the function does with it, and the outcomes, in words."""
        phase = "" if self.phase is None else self.phase.words
        outcomes = "" if self.outcomes is None else "draws on the host"
        if self.outcomes and not all(isinstance(outcome, bool) for outcome in self.outcomes):
            outcomes += f": {', '.join(map(str, self.outcomes))}"
        elif self.outcomes:
            true = [str(number) for number, outcome in enumerate(self.outcomes, 1) if outcome]
            which = f" ({', '.join(true)})" if 0 < len(true) < len(self.outcomes) else ""
            outcomes += f": {len(true)} of {len(self.outcomes)} comparisons true{which}"
        shown, more = (self.answers or ())[:_SHOWN], len((self.answers or ())[_SHOWN:])
        answers = f"questions to the device: {', '.join(map(str, shown))}" if shown else ""
        answers += f" and {more} more" if more else ""
        return "; ".join(filter(None, (str(self.spec), phase, outcomes, answers)))


class Part(NamedTuple):
    """A part of a key."""

    name: str  # what messages call it
    value: Any  # in a call
    advice: str = ""  # what to write if it changes all the time; "" for a leaf of the batch, where that depends on it
    statement: str = ""  # what messages say if it keeps changing; if it is "", they have the name and some values
    same: Callable[[Any, Any], bool] = operator.eq


_SHOWN = 16  # answers
