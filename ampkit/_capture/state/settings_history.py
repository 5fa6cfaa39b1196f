"""The settings of a call and the memory of the state: what has changed, and what to write instead."""

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

from ..._torch.tensors.tensors import local_shard
from .state import ATTRIBUTES, HOST_TENSORS, VARIABLES, Generation, Settings, TrainingState


class CallSettings(NamedTuple):
    """What a call depends on beside its input."""

    settings: Settings
    replacements: int  # how often memory of the state was replaced so far, which outdates all graphs
    replaced: str  # what was replaced last, in words


class Change(NamedTuple):
    """A call is the first one with its settings, or the first one after memory of the state was replaced.

    Attributes:
        advice: what to write if it changes in each call, by the name of what changed. It has no entry where a user who
            changes it only once need not be told anything.
    """

    outdates: bool  # all graphs
    reason: str  # what changed, in words
    text: str  # the same with values
    advice: dict[str, str]
    of_optimizer: bool = False  # whether a number of an optimizer changed


@dataclass(eq=False)
class SettingsHistory:
    """Compares the settings, and the memory of the state, with those of the call before.

    Attributes:
        number: stands for the settings of the call in its key. Other settings never get the same number.
        generation: that of the last call; None before the first one.
    """

    _state: TrainingState
    generation: Generation | None = None
    _settings: dict[int, Settings] = field(default_factory=dict)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _replacements: int = 0
    _calls: int = 0
    _replaced: str = ""
    number: int = 0

    @property
    def call_settings(self) -> CallSettings:
        """What the call depends on beside its input."""
        return CallSettings(self._settings[self.number], self._replacements, self._replaced)

    def observe(self) -> Change | None:
        """Read settings and memory. Return what changed; None if there may be a graph for this call nevertheless."""
        self._calls += 1
        now, before = self._state.generation(), self.generation
        if now is before:
            return None
        change = None if now == before else self._compare(before, now)
        self.generation = now  # last, so that the call after an interrupted one compares again
        return change

    def _compare(self, before: Generation | None, now: Generation) -> Change | None:
        replaced = "" if before is None else before.replaced_in(now)
        outdates = bool(replaced) or len(self._settings) > _MAX_SETTINGS
        if outdates:
            self._settings.clear()
        number = next((number for number, known in self._settings.items() if known == now.settings), None)
        if number is not None:
            self.number = number
            self._settings[number] = now.settings  # more attributes may be compared than were then
            return None
        old, new = None if before is None else before.settings, now.settings
        if old is not None:
            # Calls of the step leave tensors of ampkit's own as gradients, and take them away.
            ours = {0, *(local_shard(tensor).data_ptr() for tensor in self._state.own.values())}
            pairs = itertools.zip_longest(old.gradients, new.gradients, fillvalue=0)  # there may be none at all
            if all(one == other or ours.issuperset((one, other)) for one, other in pairs):
                old = old._replace(gradients=new.gradients)
        own = old == new and not replaced
        if not own or self._calls != _SECOND:  # what the second call finds is what most calls do
            self.number = next(self._numbers)
        self._settings[self.number] = now.settings
        if old is None or own:
            return None
        if replaced:
            self._replacements, self._replaced = self._replacements + 1, replaced
            return Change(outdates, replaced, replaced, {replaced: memory_advice(replaced)})
        changed = old.changed(new)
        advice = {name: text for name in changed if (text := setting_advice(name))}
        of_optimizer = any(
            "param_groups[" in name or name.startswith(("the optimizer", "optimizers[")) for name in changed
        )
        if VARIABLES in changed:
            of_optimizer |= self._state.reads.are_of_optimizers(old.reads, new.reads)
        return Change(outdates, old.changes(new), old.changes(new, values=True), advice, of_optimizer)

    def accept(self) -> None:
        """Take the present settings and memory for those of the last call."""
        self.generation = self._state.generation()
        self._settings[self.number] = self.generation.settings

    def take_values(self) -> None:
        """Take the present attributes of the modules, and variables, for those of the call that was made last."""
        self._state.look_again()  # others may be compared now
        if self.generation is not None:
            now, known = self._state.generation().settings, self._settings[self.number]
            if not self._state.compares_gradients:
                known = self._settings[self.number] = known._replace(gradients=())
            settings = known._replace(reads=known.reads.renewed(now.reads), host_values=now.host_values)
            if known != settings:
                return  # the call has changed what graphs hold; the next one finds that
            if known.reads != now.reads:  # so has this one
                self._settings[self.number] = settings
                return
            self._settings[self.number], self.generation = settings, self.generation._replace(settings=settings)

    def forget(self) -> None:
        """Forget the last call, so that the next one counts as the first."""
        self.generation, self._calls = None, 0
        self._settings.clear()
        self._state.reads.forget()
        self._state.carried.forget()  # whose tensors may lie where it is known no longer that variables lead to
        self._state.host_tensors.forget()
        self._state.look_again()


def setting_advice(name: str) -> str:
    """Return what to write instead of changing this setting in each call; "" if `Change.advice` has no entry for it."""
    if name == ATTRIBUTES:
        return "Graphs read a number that changes if it is in a buffer and is changed there in place (fill_)."
    if name == VARIABLES:
        return (
            "Graphs read a number that changes if it is in a tensor, which is passed to the step or filled in place. "
            "Pass tensors that are replaced to the step, too, and read what is only logged behind the call."
        )
    if name == HOST_TENSORS:
        return "Graphs read a tensor that is on the device of the step: move it there (register_buffer, to)."
    if name.endswith(("['momentum']", "['betas']")):
        return "OneCycleLR and CyclicLR change it in every step, unless they get cycle_momentum=False."
    return "Of a param group, only lr may change without a new graph." if "param_groups[" in name else ""


def memory_advice(replaced: str) -> str:
    """Return what to write instead of replacing this memory of the state, named as `Generation.replaced_in` does."""
    if "param group" in replaced:
        return "Give the optimizer all of its parameters before the first call."
    if "load_state_dict" in replaced:
        return "Load a checkpoint before the first call."
    return "Graphs stay valid if memory is written to in place instead (copy_, add_)."


_MAX_SETTINGS = 32  # OneCycleLR's momentum makes one per call
_SECOND = 2
