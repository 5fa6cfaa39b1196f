"""Rows of a benchmark in processes of their own, which are set up at once and measured one after the other."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

Answer = dict[str, Any]


def or_error(answers: Iterator[Answer]) -> Iterator[Answer]:
    """Yield the answers of a row, and at last the error that ended them."""
    try:
        yield from answers
    except Exception as error:  # whatever it is, it is what the row says
        yield {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"}


def serve(answers: Iterator[Answer]) -> None:
    """Give an answer for each line that comes in. The next one is made when the next line is there."""
    out, sys.stdout = sys.stdout, sys.stderr  # of whatever prints in this process
    for _, answer in zip(sys.stdin, or_error(answers), strict=False):
        print(json.dumps(answer), file=out, flush=True)


def remote(command: list[str], *, threads: int, seconds: float) -> Iterator[Answer]:
    """Yield the answers of a process that serves. It ends when this generator is closed.

    Args:
        command: starts the process.
        threads: how many compile kernels for it.
        seconds: the process is ended if it has given no answer with "ready" by then.
    """
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": str(threads), **os.environ}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
    )
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        while True:
            with suppress(BrokenPipeError):
                process.stdin.write("go\n")
            line = process.stdout.readline()
            if not line:
                yield {"error": f"its process ended with {process.wait()}"}
                return
            answer = json.loads(line)
            if "ready" in answer:
                timer.cancel()
            yield answer
    finally:
        timer.cancel()
        process.kill()
        process.communicate()  # closes the pipes, too
