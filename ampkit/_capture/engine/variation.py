"""Calls that never find a graph, because something is new in each of them: what that is, and what to write instead."""

from collections import Counter
from collections.abc import Iterator, Sequence
from numbers import Number
from typing import NamedTuple

import torch

from ..._text import value_text
from ..._torch.tensors.tree import TreeSpec
from ..host.constants import are_same
from ..keys.inputs import Constant, TensorSpec, paths
from ..keys.key import Key, Part
from ..state.settings_history import CallSettings, memory_advice, setting_advice
from ..state.state import ATTRIBUTES, GRADIENTS, HOST_TENSORS, MODES, READS, VARIABLES
from .options import WARM_UP


class Cause(NamedTuple):
    """Why no graph is replayed."""

    names: tuple[str, ...]  # of the parts that keep changing
    reason: str  # a clause that says that they do
    examples: str  # the same clause with some of the values
    advice: str  # what to write instead
    of_layouts: bool  # whether only the layouts of tensors keep changing


class Variation:
    """Notices that no graph is replayed, because the key is new in call after call.

    It is told of each call that had no graph. Such calls form a run, which ends when a graph from an earlier call is
    replayed. A run has a cause if it has `_CALLS` calls and `_VARIANTS` keys, none of them in half of its calls, and if
    one of two things is true. Either there were more keys than graphs are kept. Or something other than the layout of
    a tensor changed, no key came back after another one, and nothing was captured. In a long warm-up neither is true,
    since its keys come back.

    Args:
        device: where numbers that vary should be.
        warmup: eager calls that each key takes before its capture.
        one_argument: whether every call has one argument, which messages call `batch`. Otherwise it is `batch[0]`.

    Attributes:
        said: the names of the parts that messages of this run have named, with what to write instead.
        rest: how many calls are eager without a look at what is new. Whoever makes them counts them down.
    """

    def __init__(self, device: torch.device, warmup: int, one_argument: bool) -> None:
        self._device = device
        self._warmup = warmup
        self._one_argument = one_argument
        self._replays = 0  # of graphs from earlier calls
        self.restart()

    def restart(self) -> None:
        """Begin a new run."""
        self.cause: Cause | None = None
        self.text = ""  # what a message says about the cause
        self._calls = 0
        self._captures = 0  # when the run began
        self._visits: Counter[Key] = Counter()
        self._call_settings: dict[Key, CallSettings] = {}
        self._last: Key | None = None
        self._returned = False  # whether a key came back after another one
        self.said: set[str] = set()
        self.rest: int = 0
        self._last_rest = 0

    @property
    def reason(self) -> str:
        """What the calls of a run with a cause are counted under."""
        return WARM_UP if self.cause is None else f"{WARM_UP}: {self.cause.reason}"

    def lay_to_rest(self, may_rest: bool) -> None:
        """Have the next calls not be looked at: twice as many as the last time, none if something may come back."""
        self.rest = self._last_rest = min(2 * self._last_rest + 1, _LONGEST_REST) if may_rest else 0

    def follow(self, replays: int, captures: int) -> None:
        """Begin a new run if a graph from an earlier call was replayed since this was called last.

        `replays` is how many calls were a graph launch so far. The call of a capture is one of them.
        """
        if replays - captures > self._replays:
            self.restart()
        self._replays = replays - captures

    def note(self, key: Key, call_settings: CallSettings, captures: int, kept: int) -> Cause | None:
        """Take note of a call that had no graph. Return the cause of the run, None as long as it has none.

        `captures` is how many graphs were captured so far, and `kept` how many keys are remembered at most.
        """
        if not self._calls:
            self._captures = captures
        self._calls += 1
        if self.cause is not None:
            return self.cause
        known = key in self._visits
        self._returned = self._returned or (known and key != self._last)
        self._last = key
        self._visits[key] += 1
        self._call_settings.setdefault(key, call_settings)
        keys = len(self._visits)
        overflows = not known and keys == kept + 1
        if self._calls < _CALLS or not (overflows or self._calls % _CALLS == 0):
            return None
        crowded = keys > kept
        never_back = not self._returned and captures == self._captures
        if keys < _VARIANTS or 2 * max(self._visits.values()) >= self._calls or not (crowded or never_back):
            return None
        cause = self.explain([*self._call_settings.items()])
        if crowded or not cause.of_layouts:
            limit = f", and at most {kept} are kept" if crowded else ""
            self.cause = cause
            self.text = (
                f"no graph was replayed in the last {self._calls} calls, because {cause.examples}. Each of these "
                f"{keys} variants takes {self._warmup} eager calls and a graph of its own{limit}. {cause.advice}"
            )
            self._call_settings.clear()  # the keys keep objects of the batches alive
            self._visits.clear()
        return self.cause

    def explain(self, calls: Sequence[tuple[Key, CallSettings]]) -> Cause:
        """Return as a cause the parts that have the most different values in these calls. At least two calls differ."""
        found: dict[str, list[Part]] = {}  # by name, those with different values
        for key, call_settings in calls:
            for part in self._parts(key, call_settings):
                known = found.setdefault(part.name, [])
                if not any(part.same(part.value, other.value) for other in known):
                    known.append(part)
        most = max(map(len, found.values()))
        parts = [known for known in found.values() if len(known) > 1 and 2 * len(known) >= most]
        parts.sort(key=len, reverse=True)
        more = f", and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
        named = parts[:_NAMED]
        return Cause(
            names=tuple(known[0].name for known in named),
            reason=" and ".join(known[-1].statement or f"{known[-1].name} kept changing" for known in named) + more,
            examples=" and ".join(map(_example, named)) + more,
            advice=" ".join(dict.fromkeys(known[-1].advice or self._leaf_advice(known) for known in named)),
            of_layouts=all(isinstance(known[-1].value, (TensorSpec, TreeSpec)) for known in named),
        )

    def _parts(self, key: Key, call_settings: CallSettings) -> Iterator[Part]:
        yield Part("the structure of the batch", key.spec.tree, _TREE)
        for name, leaf in zip(paths(key.spec.tree), key.spec.leaves, strict=True):
            yield Part(name.replace("batch[0]", "batch", 1) if self._one_argument else name, leaf)
        if key.phase is not None:
            yield from key.phase.parts()
        if key.outcomes is not None:
            outcomes = key.outcomes, key.ranks_outcome
            yield Part("outcomes", outcomes, DRAWS_ADVICE, "the outcomes of random draws on the host kept changing")
        if key.answers is not None:
            answers = key.answers, key.ranks_outcome
            yield Part("answers", answers, _ASK_LESS, "the answers to questions to the device kept changing")
        for name, value in call_settings.settings.named().items():
            if name == READS:
                for each, found in value.named().items():
                    kind = ATTRIBUTES if each.startswith("the attribute") else VARIABLES
                    yield Part(each, found, setting_advice(kind), same=are_same)
                continue
            advice = setting_advice(name) or (_IN_PLACE if name == GRADIENTS else _ONCE)
            # The values of these say nothing to a user.
            unsaid = name in (MODES, GRADIENTS, HOST_TENSORS)
            yield Part(name, value, advice, f"{name} kept changing" if unsaid else "")
        yield Part(
            call_settings.replaced,
            call_settings.replacements,
            memory_advice(call_settings.replaced),
            f"{call_settings.replaced} again and again",
        )

    def _leaf_advice(self, known: Sequence[Part]) -> str:
        name, values = known[0].name, [part.value for part in known]
        layouts = [value for value in values if isinstance(value, TensorSpec)]
        constants = [value.value for value in values if isinstance(value, Constant) and value.value is not None]
        if layouts and len(layouts) < len(values):
            return f"Pass a tensor as {name} in each call."
        if layouts:
            if len({layout.shape for layout in layouts}) > 1:
                return _SHAPES.format("in the collate_fn" if self._one_argument else "with ampkit.Buckets")
            if len({layout.dtype for layout in layouts}) > 1:
                return f"Pass {name} in one dtype."
            return f"Pass {name}.contiguous()."
        if all(isinstance(value, Number) for value in constants):
            where = "" if self._device.type == "cpu" else f", device={str(self._device)!r}"
            return (
                f"Pass a number that varies as a tensor, torch.tensor(x{where}), or take it out of the batch if the "
                "step does not compute with it."
            )
        if all(isinstance(value, (str, bytes)) for value in constants):
            return f"Take {name} out of the batch that you pass to the step: a graph computes with tensors only."
        return f"Pass the tensors that the step reads from {name}, and not the {type(constants[-1]).__name__} itself."


_CALLS = 32
_VARIANTS = 8  # fewer than that may be a long warm-up
_NAMED = 3
_LONGEST_REST = 63  # calls
_SHAPES = (
    "Pad to a few shapes {}, leave out a short last batch (DataLoader(..., drop_last=True)), or keep "
    "more graphs (max_graphs, memory_budget)."
)
_TREE = "Pass the same keys and as many entries in each call: stack or pad a list of tensors to one tensor."
_ONCE = "Set it once, before the first call."
DRAWS_ADVICE = (
    "Draw less often on the host, keep more graphs (max_graphs), or draw on the device and use torch.where instead of "
    "a branch."
)
_ASK_LESS = "Use torch.where instead of a branch, ask before the step, or keep more graphs (max_graphs)."
_IN_PLACE = "Set gradients to zero within the function, or in place: zero_grad(set_to_none=False)."


def _example(known: Sequence[Part]) -> str:
    """Return the same with some of the values in words, unless these say nothing."""
    values = [
        f"one of {value.num_leaves} leaves"
        if isinstance(value, TreeSpec)
        else value_text(value.value) or f"a {value.kind.__name__}"
        if isinstance(value, Constant)
        else str(value)
        if isinstance(value, TensorSpec)
        else value_text(value)
        for value in (part.value for part in known[-3:])
    ]
    if known[-1].statement:
        return known[-1].statement
    return f"{known[-1].name} kept changing" + (f" (it was {', then '.join(values)})" if all(values) else "")
