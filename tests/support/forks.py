"""Starts scripts as forks of one process that has imported torch, in a tenth of a second: a new process needs four.

A script that runs in a fork finds itself as `__main__`, with its own arguments and environment, and it ends as it would
in a process of its own: by falling off the end, through atexit and the interpreter's finalization. What differs is that
modules are there before its first line, and that all forks have the same hashes of strings.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

# torch._dynamo is imported by the first optimizer of a process, and the others by models of several ranks.
MODULES = ("torch", "torch._dynamo", "torch.distributed.nn", "torch.distributed.fsdp", "torch.distributed.checkpoint")


class Script(NamedTuple):
    """What a fork runs.

    Attributes:
        command: the script, and its arguments.
        environment: of the process.
        out: file for what it prints.
        err: file for its errors, which may be the same.
        modules: to be imported before the fork, for this one and all later ones.
    """

    command: Sequence[str]
    environment: dict[str, str]
    out: str
    err: str
    modules: Sequence[str] = ()


# ------------------------------------------------------------------------------------------ in the process of the tests


class Fork:
    """A process that was started here, with what the tests use of `subprocess.Popen`."""

    def __init__(self, script: Script) -> None:
        self._server = server()
        self.pid: int = self._server.ask("start", script._asdict())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        if self.returncode is None:
            self.returncode = self._server.ask("poll", self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, which has not ended."""
        self._server.ask("send_signal", (self.pid, number))

    def kill(self) -> None:
        """End the process, if it has not ended."""
        if self.returncode is None:
            self.returncode = self._server.ask("kill", self.pid)

    def wait(self) -> int:
        """Wait for the end of the process and return its exit code."""
        if self.returncode is None:
            self.returncode = self._server.ask("wait", self.pid)
        assert self.returncode is not None
        return self.returncode


def run(
    command: Sequence[str], timeout: float, environment: dict[str, str] | None = None, modules: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a script in a fork until it ends, as `subprocess.run` does in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        files = f"{folder}/out", f"{folder}/err"
        fork = Fork(Script(command, dict(os.environ) if environment is None else environment, *files, modules))
        deadline = time.monotonic() + timeout
        while fork.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        ended = fork.returncode is not None
        fork.kill()
        out, err = (Path(file).read_text() for file in files)
        if not ended:
            raise subprocess.TimeoutExpired(command, timeout, out, err)
        return subprocess.CompletedProcess(command, fork.wait(), out, err)


# What `python -c` runs is in a file that is called so, and belongs to a module without one.
_AS_C = (
    "import sys; main = sys.modules['__main__']; del main.__file__; exec(compile({!r}, '<string>', 'exec'), vars(main))"
)


def run_code(code: str, *argv: str, timeout: float = 120, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run code as `python -c` does, in a fork and with the warnings of a new process, until it ends."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "code.py")
        script.write_text(_AS_C.format(f"import os; os.chdir({str(cwd or Path.cwd())!r})\n{code}"))
        return run([str(script), *argv], timeout)


def run_ampkit(*argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `python -W error -m ampkit` with these arguments in a fork."""
    code = "import runpy, sys, warnings; warnings.simplefilter('error'); sys.path.insert(0, '')\n"
    return run_code(f"{code}runpy.run_module('ampkit', run_name='__main__', alter_sys=True)", *argv, cwd=cwd)


class Server:
    """The process that forks. It ends, with all its forks, when this one does."""

    def __init__(self) -> None:
        path = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"}  # in the forks, too
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen([sys.executable, __file__], env=environment, text=True, **pipes)
        atexit.register(self.close)

    def ask(self, what: str, about: object) -> Any:
        """Have the server do something, and return what it answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([what, about]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the process that forks ended with {self._process.wait()}"
        return json.loads(answer)

    def close(self) -> None:
        """End the server, and wait for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@functools.cache
def server() -> Server:
    """Return the server of this process, started when it is first needed."""
    return Server()


# ------------------------------------------------------------------------------------------ in the process that forks


class Forks:
    """The forks that have been started, and what is asked about them."""

    def __init__(self) -> None:
        self.running: set[int] = set()

    def start(self, script: Script) -> int:
        """Fork, and return the process id; 0 in the fork."""
        for name in script.modules:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # or each fork would look through torch's objects, half a million, when it collects and at its end
        pid = os.fork()
        self.running |= {pid} if pid else set()
        return pid

    def poll(self, pid: int, options: int = os.WNOHANG) -> int | None:
        """Return an exit code, None while the fork runs."""
        done, status = os.waitpid(pid, options)
        if not done:
            return None
        self.running.remove(pid)
        return os.waitstatus_to_exitcode(status)

    def wait(self, pid: int) -> int | None:
        """Wait for a fork and return its exit code."""
        return self.poll(pid, 0)

    def send_signal(self, to: Sequence[int]) -> None:
        """Send a signal to a fork, given its process id and the signal."""
        os.kill(*to)

    def kill(self, pid: int) -> int | None:
        """End a fork and return its exit code."""
        os.kill(pid, signal.SIGKILL)
        return self.wait(pid)


def serve(requests: TextIO, answers: TextIO) -> Script | None:
    """Do what is asked for until there is nobody who asks. Return None then, and in a fork what it is to run."""
    forks = Forks()
    for line in requests:
        what, about = json.loads(line)
        if what == "start":
            script = Script(**about)
            answer: int | None = forks.start(script)
            if not answer:
                return script
        else:
            answer = getattr(forks, what)(about)
        print(json.dumps(answer), file=answers, flush=True)
    for pid in tuple(forks.running):
        forks.kill(pid)
    return None


def become(script: Script) -> dict[str, Any]:
    """Make this process look as if it had been started with this script. Return the names of its main module."""
    null = os.open(os.devnull, os.O_RDONLY)
    files = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for path in (script.out, script.err)]
    for number, file in enumerate((null, *files)):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(script.environment)
    path = script.command[0]
    sys.argv[:] = script.command
    sys.path[:] = [str(Path(path).parent), *script.environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path[1:]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = path
    return main.__dict__


def main() -> Script | None:
    # What this process prints goes to the errors of the tests, so that it is no answer.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in MODULES:
        importlib.import_module(name)
    with contextlib.closing(requests), contextlib.closing(answers):
        return serve(requests, answers)


if __name__ == "__main__":
    _script = main()
    if _script is not None:  # in a fork, on the outermost level: its errors and its end are those of a script
        exec(compile(Path(_script.command[0]).read_text(), _script.command[0], "exec"), become(_script))
