"""Where the host waits for the device: what the preflight of a step finds, around any code, as a table of lines."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._arguments import check_callable
from .._capture.preflight import Finding, Preflight
from .._user_line import enters_for_its_caller

enters_for_its_caller(__file__)

_UNSEEN_ON_CPU = (
    "copies between host and device",
    "torch.cuda.synchronize(), and waits for events and streams",
    "kernels that wait on CUDA alone, as those of torch.linalg that check their input",
)


class Syncs:
    """What `ampkit.debug.find_syncs` found. False if nothing was. Prints as a table.

    As a context manager it looks at its block, and `findings` is there while the block runs.

    Attributes:
        result: what the function returned; None for a block.
        checked_on: "cuda", or "cpu" where there is no CUDA device.
        unseen: what could not be seen there.
    """

    result: Any
    checked_on: str
    unseen: tuple[str, ...]

    def __init__(self) -> None:
        self.result = None
        self.checked_on = "cuda" if torch.cuda.is_available() else "cpu"
        self.unseen = () if self.checked_on == "cuda" else _UNSEEN_ON_CPU
        self._preflight = Preflight(torch.device(self.checked_on), graphed=False)
        self._entered = False

    @property
    def findings(self) -> list[Finding]:
        """Each line that waits for the device or copies pageable memory, and what it does: the longest waits first.

        A `Finding` has `line`, `what`, `advice`, `count` and `ms`: how long the host was held up by it, all times
        together, None where that cannot be measured. These come last.
        """
        return self._sorted(graph_only=False)

    @property
    def graph_only(self) -> list[Finding]:
        """What costs no wait, but cannot be captured as a CUDA graph: copies of pinned memory, draws on the host."""
        return self._sorted(graph_only=True)

    @property
    def ms(self) -> float:
        """How many milliseconds the host was held up, as far as it can be measured."""
        return sum(finding.ms or 0.0 for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return all but `result` as a dict that `json.dumps` takes."""
        return {
            "checked_on": self.checked_on,
            "unseen": list(self.unseen),
            "ms": self.ms,
            "findings": [finding._asdict() for finding in self.findings],
            "graph_only": [finding._asdict() for finding in self.graph_only],
        }

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __str__(self) -> str:
        rows = [*self._head(), *_table(self.findings)]
        if self.graph_only:
            rows += ["Nothing waits for these, but a CUDA graph cannot hold them:", *_table(self.graph_only)]
        if self.unseen:
            rows.append("There is no CUDA device: CPU tensors stood for the device's. What cannot be seen so:")
            rows += [f"  {kind}" for kind in self.unseen]
        return "\n".join(rows)

    def __enter__(self) -> "Syncs":
        if self._entered:
            raise ValueError(
                "find_syncs: this one is used already. Write `with ampkit.debug.find_syncs() as found:` around each "
                "block, or `found = ampkit.debug.find_syncs(fn, *args)` without `with`."
            )
        self._entered = True
        self._preflight.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._preflight.__exit__(*error)

    def _sorted(self, graph_only: bool) -> list[Finding]:
        found = [finding for finding in self._preflight.findings if finding.graph_only == graph_only]
        return sorted(found, key=lambda finding: -1.0 if finding.ms is None else finding.ms, reverse=True)

    def _head(self) -> list[str]:
        lines = len({finding.line or finding.what for finding in self.findings})
        if not lines:
            return ["No line waits for the device or copies pageable memory."]
        verb = "lines wait" if lines > 1 else "line waits"
        return [f"{lines} {verb} for the device or copies pageable memory, {self.ms:.3f} ms in all:"]


def find_syncs(fn: Callable[..., Any] | None = None, /, *args: Any, **kwargs: Any) -> Syncs:
    """Find every line that makes the host wait for the device or copies pageable memory, and what to write instead.

    ::

        found = ampkit.debug.find_syncs(train_step, images, labels)    # runs it once
        print(found)

        with ampkit.debug.find_syncs() as found:
            loss = model(images).sum()
            loss.backward()
            optimizer.step()

    Forward, backward and optimizer are looked at alike. It is what a graphed step does before it captures
    (`graphed_step`): the code computes what it would anyway, with its effects, dozens of microseconds slower per
    operation. The times are those of this slower run, in which the device is further ahead: without, the host waits
    longer. Call it behind a first step, for what a first step makes (optimizer state, handles of libraries) may wait.

    Only this thread is looked at, and the backwards that it starts. Where there is no CUDA device, CPU tensors stand
    for the device's, so that `.item()`, `if tensor:`, `nonzero` and boolean masks are found; `Syncs.unseen` says what
    is not.

    Args:
        fn: what to call, once. Without it, the result is a context manager for a block.
        args: what to call it with.
        kwargs: what to call it with.

    Returns:
        `Syncs`, with what `fn` returned as `result`. What `fn` raises is raised as it is.

    Sync: none of its own, but one wait at its end where other threads run.
    """
    found = Syncs()
    if fn is not None:
        check_callable("find_syncs", "fn", fn, "a function to call, or None for a context manager")
        with found:
            found.result = fn(*args, **kwargs)
    elif args or kwargs:
        raise ValueError("find_syncs(None, ...): expected the function first, then its arguments.")
    return found


def _table(findings: Sequence[Finding]) -> list[str]:
    """Return three rows per finding: time, count and line; what it does; what to write instead."""
    rows = [f"{'ms':>12} {'times':>7}"] if findings else []
    for finding in findings:
        ms = "-" if finding.ms is None else f"{finding.ms:.3f}"
        rows.append(f"{ms:>12} {finding.count:>7}  {finding.line or '(no line of yours)'}")
        rows += [f"{'':20}  {text}" for text in (finding.what, finding.advice)]
    return rows
