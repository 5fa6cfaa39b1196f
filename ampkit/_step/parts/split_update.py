"""The update of the parameters, where a training step is done in parts: a graph of its own."""

from dataclasses import replace
from typing import Any

from ..._capture.engine.engine import Engine
from ..._capture.engine.fallback import MovableOptimizer
from ..._capture.engine.options import Options
from ..._capture.engine.session import Session
from ..._capture.graph.report import Report
from ..._capture.state.state import TrainingState
from ..optimizer_place import OptimizerPlace
from ..training_step import PartOfStep, Phase, TrainingStep

UPDATE = "the update of the parameters"


class WithinFunction:
    """The updates of a function that calls its optimizers itself. Stands for a `CapturedUpdate`, and does nothing."""

    name, is_settled, report = "", True, None  # no part of its own
    why_eager = "and the optimizers that a function calls are not captured by themselves"

    def done(self, phase: Phase, outputs: Any) -> Any:
        return outputs

    def words(self) -> list[str]:
        return ["eager: all that the function does itself, such as the steps of its optimizers"]

    def close(self) -> None:
        pass


class _FollowerOfUpdate(MovableOptimizer):
    """`after_step`, which leaves the graph of the update, and those of whole steps, where it cannot be captured."""

    def __init__(self, place: OptimizerPlace) -> None:
        self._place = place

    def leave(self, changed: str = "", *, problem: str = "") -> bool:
        if not (problem and self._place.leave_follower(problem)):
            return False
        self.follows_behind = problem
        return True


class CapturedUpdate:
    """Unscaling, norm, clipping, the optimizer, the loss scale and `after_step`, captured by an engine of their own.

    Messages call the step `owner`.
    """

    name = UPDATE

    def __init__(self, step: TrainingStep, state: TrainingState, options: Options, owner: str) -> None:
        def update(phase: Phase) -> Any:
            return step.finish(phase)

        self._step = step
        self._session = Session(
            fn=update,
            captured=update,
            state=state,
            device=step.device,
            options=replace(options, on_failure="eager", verify=0, capturing=False),
            ranks=step.ranks,
            name=f"{owner}, {UPDATE}",
            optimizer=_FollowerOfUpdate(step.place),
        )
        self._engine: Engine | None = None  # made when a step is first done in parts

    def done(self, phase: Phase, outputs: PartOfStep) -> PartOfStep:
        """Step the optimizer, if the call does that. Return the outputs of the call."""
        accumulated = outputs.accumulated
        if accumulated is None or not phase.last or self._step.place.behind:
            return outputs
        engine = self._engine = self._engine or Engine(self._session)
        norm, skipped = engine((), {}, Phase(last=True, accumulated=accumulated, follows=phase.follows))
        return PartOfStep(outputs.output._replace(grad_norm=norm, skipped=skipped), None)

    @property
    def is_settled(self) -> bool:
        """Whether it is captured, or will not be."""
        engine = self._engine
        return self._step.place.behind or (engine is not None and bool(engine.replays or engine.refusal))

    @property
    def why_eager(self) -> str:
        """Why it is not captured, as a clause; "" if it is, or may be."""
        if self._step.place.behind:
            return "and the optimizer steps behind the graphs"
        refusal = "" if self._engine is None else self._engine.refusal
        return refusal and f"nor can {UPDATE}: {refusal}"

    @property
    def report(self) -> Report | None:
        """What happened to it so far, None if it was never called."""
        return None if self._engine is None else self._engine.report()

    def words(self) -> list[str]:
        """Return in words what is captured of it."""
        report = self.report
        if report is None:
            return []
        if report.graphs:
            return [f"{UPDATE} is one graph"]
        return [f"{UPDATE} is eager: {report.failure}" if report.failure else f"{UPDATE} is not captured yet"]

    def close(self) -> None:
        """Release the graphs."""
        if self._engine is not None:
            self._engine.close()


Update = WithinFunction | CapturedUpdate  # what comes behind the modules in a step that is done in parts
