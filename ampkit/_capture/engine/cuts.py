"""Where the host asks the device something that nobody knows ahead, a graph is cut, and a replay asks there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..._errors import CaptureError
from ..._text import CONSTANTS
from ..._torch.tensors.modes import without_modes
from ..._torch.tensors.tensors import storage_address, storage_of
from ..graph.graph import Graph, GraphAround, is_true
from ..preflight.questions import AskedPath
from ..state.backup import Backup, whole, written_early
from ..state.state import TrainingState


@dataclass(eq=False)
class RehearsedCuts:
    """What the rehearsal of a layout has shown of the questions at which its graph is cut."""

    _state: TrainingState
    answers: list[bool] = field(default_factory=list)  # those of the rehearsal
    differs: bool = False  # whether a number was another one that should always be the same

    def ask(self, asked: Tensor) -> bool:
        """Return the answer in the rehearsal."""
        with without_modes():
            self.answers.append(is_true(asked))
        return self.answers[-1]

    def differ(self) -> None:
        """Take note that a number is another one."""
        self.differs = True

    def cutting(self, cut_graph: Callable[[], Callable[[Tensor, bool], None] | None]) -> Callable[[Tensor], bool]:
        """Return what cuts a graph where its capture asks, and gives the answer of the rehearsal.

        `cut_graph` gives the method `cut` of the graph.
        """
        answers = iter(self.answers)

        def cut(asked: Tensor) -> bool:
            answer = next(answers, None)
            if answer is None:
                raise CaptureError("the step asks the device more than in the calls before")
            graph_cut = cut_graph()
            assert graph_cut is not None  # the graph is being captured
            graph_cut(asked, answer)
            return answer

        return cut

    def undone(
        self, graph: Graph, written: set[str], asked: AskedPath | None, generators: Sequence[torch.Generator]
    ) -> Graph:
        """Return a graph whose replays are undone where they get another answer.

        Args:
            graph: as it is.
            written: the paths of the tensors of the state that such calls change.
            asked: what such calls ask.
            generators: those that they draw from, beside the default ones.
        """
        if not self.answers or asked is None:
            return graph
        tensors = written_early(self._state, written, asked.early_at, asked.written_at, asked.early)
        return CutGraph(graph, Backup(tensors, self._state, generators))


def numbers_in(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the numbers and texts in the attributes of modules, by what messages call them."""
    found: dict[str, Any] = {}
    for root, module in modules.items():
        for path, part in module.named_modules(prefix=root):
            found.update((f"{path}.{name}", each) for name, each in vars(part).items() if isinstance(each, CONSTANTS))
    return found


@dataclass(frozen=True, eq=False)
class CutGraph(GraphAround):
    """A graph with cuts. A replay that ends at one of them has done nothing."""

    _backup: Backup

    def replay(self) -> Any:
        """Do the recorded work, see `Graph`. Sync: at each cut."""
        self._backup.save()
        try:
            return self._graph.replay()
        except BaseException:  # or an interrupt between two pieces
            self._backup.restore()
            raise

    def keep(self, left: Sequence[Tensor]) -> None:
        """Put back the memory of these tensors too, which an earlier replay has left to the user."""
        storages = {storage_address(tensor): storage_of(tensor) for tensor in left}
        self._backup.add([whole(storage) for address, storage in storages.items() if address and storage is not None])
