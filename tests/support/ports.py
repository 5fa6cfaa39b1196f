"""A port for the store of a job, for scripts that start ranks."""

import random
import socket


def free_port() -> int:
    """Return a port of this machine that nobody listens on.

    It is below those that the kernel gives to sockets without a number (32768 to 60999 on Linux). NCCL opens many of
    these, and one of them may be taken between this call and the start of the store.
    """
    while True:
        port = random.SystemRandom().randrange(12000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
