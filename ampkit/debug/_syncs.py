"""Where the host waits for the device: the preflight of a graphed step on any code, with its findings as a table."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._arguments import check_callable
from .._capture.preflight.preflight import Finding, Preflight
from .._user_line import enters_for_its_caller

enters_for_its_caller(__file__)

_UNSEEN_ON_CPU = (
    "copies between host and device",
    "torch.cuda.synchronize(), and waits for events and streams",
    "kernels that wait only on CUDA, such as those of torch.linalg that check their input",
)


class Syncs:
    """The lines that `ampkit.debug.find_syncs` found. It is false if there are none. Prints as a table.

    As a context manager it checks its block, and `findings` can be read while the block still runs.

    Attributes:
        result: what the function returned; None for a block.
        checked_on: "cuda", or "cpu" if there is no CUDA device.
        unseen: the kinds of waits that cannot be found there.
    """

    def __init__(self) -> None:
        self.result: Any = None
        self.checked_on: str = "cuda" if torch.cuda.is_available() else "cpu"
        self.unseen: tuple[str, ...] = () if self.checked_on == "cuda" else _UNSEEN_ON_CPU
        self._preflight = Preflight(torch.device(self.checked_on), graphed=False)
        self._entered = False

    @property
    def findings(self) -> list[Finding]:
        """The lines that wait for the device or copy pageable memory, the longest waits first.

        A `Finding` has `line`, `what`, `advice`, `count` and `ms`. `ms` is how long the host waited there, added up
        over all times. It is None if it cannot be measured, and these findings come last.
        """
        return self._sorted(graph_only=False)

    @property
    def graph_only(self) -> list[Finding]:
        """Lines that do not wait, but that a CUDA graph cannot capture: copies of pinned memory, draws on the host."""
        return self._sorted(graph_only=True)

    @property
    def ms(self) -> float:
        """How many milliseconds the host waited altogether, as far as that can be measured."""
        return sum(finding.ms or 0.0 for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but `result` as a dict that `json.dumps` takes."""
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
        lines = len({finding.line or finding.what for finding in self.findings})
        head = "No line waits for the device or copies pageable memory."
        if lines:
            wait, copy = ("lines wait", "copy") if lines > 1 else ("line waits", "copies")
            head = f"{lines} {wait} for the device or {copy} pageable memory, {self.ms:.3f} ms in all:"
        rows = [head, *_table(self.findings)]
        if self.graph_only:
            rows.append("The host does not wait for these, but a CUDA graph cannot capture them:")
            rows += _table(self.graph_only)
        if self.unseen:
            rows.append("There is no CUDA device, so tensors on the CPU were checked instead. That cannot find:")
            rows += [f"  {kind}" for kind in self.unseen]
        return "\n".join(rows)

    def __enter__(self) -> "Syncs":
        if self._entered:
            raise ValueError(
                "find_syncs: this one was used already. Write `with ampkit.debug.find_syncs() as found:` around each "
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


def find_syncs(fn: Callable[..., Any] | None = None, /, *args: Any, **kwargs: Any) -> Syncs:
    """Find every line that makes the host wait for the device or copies pageable memory, and say what to write instead.

    ::

        found = ampkit.debug.find_syncs(train_step, images, labels)    # runs it once
        print(found)

        with ampkit.debug.find_syncs() as found:
            loss = model(images).sum()
            loss.backward()
            optimizer.step()

    Forward, backward and optimizer are all checked, as a `graphed_step` checks them before it captures. The code
    computes the same as without the check and has the same effects, but each operation takes dozens of microseconds
    longer. Since the host is slower, the device has less work left whenever the host waits. Without the check the host
    waits longer than the times say. Do not check the first step of a training: it may also wait because optimizer
    state and handles of libraries are made.

    Only this thread is checked, and the backwards that it starts. If there is no CUDA device, tensors on the CPU are
    checked instead. Then `.item()`, `if tensor:`, `nonzero` and boolean masks are found; `Syncs.unseen` lists what is
    not.

    Args:
        fn: the function to call, once. Without it, the result is a context manager for a block.
        args: the positional arguments of `fn`.
        kwargs: the keyword arguments of `fn`.

    Returns:
        `Syncs`, with what `fn` returned as `result`. An error of `fn` is raised unchanged.

    Sync: none of its own, except for one wait at its end if other threads are running.
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
    """Return lines of text per finding: time, count and line; who called it; what it does; what to write instead."""
    rows = [f"{'ms':>12} {'times':>7}"] if findings else []
    for finding in findings:
        ms = "-" if finding.ms is None else f"{finding.ms:.3f}"
        rows.append(f"{ms:>12} {finding.count:>7}  {finding.line or '(no line of yours)'}")
        called = [f"called from {finding.caller}"] if finding.caller else []
        rows += [f"{'':20}  {text}" for text in (*called, finding.what, finding.advice)]
    return rows
