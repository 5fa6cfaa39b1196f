"""The preflight of a call, with recorders of what it finds and a graph can hold all the same."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..._torch.tensors.operators import OperationCall
from ..host.uploads import Provenance, Uploads
from .draw_record import DrawRecorder
from .preflight import Preflight
from .questions import QuestionRecorder


class WatchedCall:
    """Watches one call: what cannot be captured in it, but for draws on the host, constants and questions.

    Args:
        device: where the call computes.
        leaves: its arguments.
        state: the tensors that calls keep, see `QuestionRecorder`.
        uploads: the constants of the step that are on its device. It gets those of the call.
        draws, asks: whether draws and questions are recorded. Otherwise each of them is a finding.
        cuts: whether graphs may be cut, see `QuestionRecorder`.
        generators, observers, bitmaps: see `Preflight`.

    Attributes:
        preflight: to be entered around the call.
        draws: what was drawn, None if that is not recorded.
        questions: what was asked.
        provenance: what the constants are made of.
    """

    def __init__(
        self,
        device: torch.device,
        leaves: Sequence[Any],
        state: Mapping[str, Tensor],
        uploads: Uploads,
        generators: Sequence[torch.Generator] = (),
        *,
        draws: bool = True,
        asks: bool = True,
        cuts: bool = True,
        observers: Sequence[Callable[[OperationCall], object]] = (),
        bitmaps: Sequence[int] = (),
    ) -> None:
        self._uploads, self._asks = uploads, asks
        self.draws: DrawRecorder | None = DrawRecorder(device) if draws else None
        self.provenance: Provenance = Provenance()
        is_drawn = (lambda _: frozenset()) if self.draws is None else self.draws.draws_in
        self.questions: QuestionRecorder = QuestionRecorder(device, leaves, state, uploads.has, is_drawn, cuts=cuts)
        recorders: list[Callable[[OperationCall], object]] = [self.provenance] if uploads.learns else []
        self.preflight: Preflight = Preflight(
            device,
            generators,
            observers=[*observers, *recorders, *([self.questions] if asks else [])],
            draws=self.draws,
            bitmaps=bitmaps,
            uploads=uploads,
            knows_numbers=self.questions.knows_numbers if asks else lambda *_: False,
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context of the call, within the preflight, in which constants are uploaded and questions are answered."""
        with self._uploads.learning(self.provenance), self.questions.asking() if self._asks else nullcontext():
            yield
