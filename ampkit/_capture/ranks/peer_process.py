"""Whether another process of this machine lives. The kernel knows: one that is only stopped or busy does live."""

import os
import select
import uuid


def address() -> str:
    """Return what names this process: its machine, its namespace of process ids, and its id."""
    return f"{_machine()} {os.getpid()}"


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux: then no two processes know that they are on one machine
        return str(uuid.uuid4())


class PeerProcess:
    """A process that may be on this machine, by what `address` has returned there.

    Attributes:
        known: whether the kernel can tell if it lives. If not, it is elsewhere, or this system has no `pidfd_open`.
    """

    def __init__(self, address: str) -> None:
        machine, _, pid = address.rpartition(" ")
        self._handle: int | None = None
        self._gone = False
        if machine == _machine() and hasattr(os, "pidfd_open"):
            try:
                self._handle = os.pidfd_open(int(pid))
            except ProcessLookupError:
                self._gone = True
            except OSError:  # too many open files, or a sandbox without this call
                self._handle = None
        self.known = self._gone or self._handle is not None

    def has_ended(self) -> bool:
        """Return whether the process is over, for certain."""
        if self._handle is not None:
            poll = select.poll()
            poll.register(self._handle, select.POLLIN)
            if poll.poll(0):
                self._gone = True
                self.close()
        return self._gone

    def close(self) -> None:
        """Give the handle back."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
