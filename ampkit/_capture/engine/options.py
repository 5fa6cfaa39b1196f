"""The options of a capture that all public functions take, and their checks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..._arguments import check_at_least, check_choice, check_flag, read_all, read_positive, wrong
from ..compare.schedule import SPARSE

GRAPHS = ("auto", "emulate", "off")
ON_FAILURE = ("parts", "eager", "raise")
HOST_WRITES = ("name", "ignore")
_STOPPING = "'name', 'ignore', or names of what may stop, as messages name them (['self.calls'])"
WARM_UP = "warm-up"  # what eager calls before a capture are counted under


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a capture, see `graphed_step`."""

    graph: str  # "auto", "emulate" or "off"
    warmup: int  # eager calls per key
    on_failure: str  # "parts", "eager" or "raise"
    verify: int | str  # how many replays are compared with eager calls, or "sparse"
    max_graphs: int
    memory_budget: int | None
    generators: Sequence[torch.Generator] = ()  # CUDA generators beside the default one
    capturing: str | bool = "auto"  # what code is told that asks whether its stream is being captured
    annotate: bool = False  # whether to note which module each kernel belongs to
    # What to do about numbers that a call changes on the host: "name", "ignore", or those that may stop.
    host_writes: str | Sequence[str] = "name"
    cuts: bool = True  # whether a graph may be cut where the host asks the device whether something is true

    def checked(self, where: str) -> "Options":
        """Return the same options as plain numbers and tuples.

        Raises:
            ValueError: an option cannot work. The message names it as an argument of the public function `where`.
        """
        check_choice(where, "graph", self.graph, GRAPHS)
        check_capturing(where, self.capturing)
        check_flag(where, "annotate", self.annotate)
        check_flag(where, "cuts", self.cuts)
        stopping = self.host_writes
        if isinstance(stopping, str):
            check_choice(where, "host_writes", stopping, HOST_WRITES)
        else:
            stopping = read_all(where, "host_writes", stopping, str, _STOPPING)
        check_choice(where, "on_failure", self.on_failure, ON_FAILURE)
        check_at_least(where, "warmup", self.warmup, 1, "the first steps build state")
        if self.verify != SPARSE:
            meaning = "the number of replays to compare with eager steps, or 'sparse'"
            check_at_least(where, "verify", self.verify, 0, meaning)
        check_at_least(where, "max_graphs", self.max_graphs, 1, "graph='off' is for none")
        budget = self.memory_budget
        if budget is not None:
            budget = read_positive(where, "memory_budget", budget, "None for no limit")
        generators = read_all(where, "generators", self.generators, torch.Generator, "a sequence of torch.Generator")
        return replace(self, memory_budget=budget, generators=generators, host_writes=stopping)

    def may_stop(self, name: str) -> bool:
        """Return whether a replay may leave an attribute or a variable as it is, by its name in messages."""
        return self.host_writes == "ignore" or (not isinstance(self.host_writes, str) and name in self.host_writes)

    def why_not_on(self, device: torch.device) -> str:
        """Return why a model on this device cannot be captured, "" if it can."""
        needs_cuda = self.graph == "auto" and device.type != "cuda"
        return f"the model is on {device}, and CUDA graphs need a CUDA device." if needs_cuda else ""


def check_capturing(where: str, capturing: object) -> None:
    """Raise a `ValueError` unless this says what code is told that asks whether its stream is being captured."""
    if not isinstance(capturing, bool) and capturing != "auto":
        raise wrong(where, "capturing", capturing, "'auto', True or False")
