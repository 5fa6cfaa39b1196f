"""What the commands of `python -m ampkit` share: exit codes, arguments that name files, and where results go."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import NoReturn

from .._precision.policy import Policy

DONE = 0
FOUND = 1  # the command did its work, and the answer is the bad one
TROUBLE = 2  # it could not do its work; argparse and diff(1) say 2 as well
USERS_ERROR = 3  # code of the user's raised an exception
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
NO_READER = 141  # 128 + SIGPIPE: the program that was to read the output has ended
STDOUT = "-"


def exit_codes(found: str = "") -> str:
    """Return the sentence about exit codes for the help of a command; `found` says what code 1 means, if it has it."""
    return (
        f"Exit code: {DONE} if all went well; {f'{FOUND} if {found}; ' if found else ''}{TROUBLE} if the command could "
        f"not do its work, and a line on standard error says why; {USERS_ERROR} if your code raised an exception, and "
        f"its lines are shown; {INTERRUPTED} after Ctrl-C."
    )


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the arguments, without the usage in front of it."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and end with the code of a command that could not do its work."""
        complain(self.prog, f"{message} (`{self.prog} --help` lists what is legal)")
        raise SystemExit(TROUBLE)


def complain(command: str, message: str) -> None:
    """Say on standard error why a command could not do its work."""
    say(command, f"error: {message}")


def say(command: str, message: str) -> None:
    """Say something on standard error."""
    print(f"{command}: {message}", file=sys.stderr)


def policy(text: str) -> Policy:
    """Return the policy that an argument spells."""
    try:
        return Policy.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None  # argparse hides the text of a ValueError


def json_file(text: str) -> str:
    """Return what was given to `--json`: "-", or the path of a file that can be written later."""
    return text if text == STDOUT else str(output_file(text))


def output_file(text: str) -> Path:
    """Return the path of a file that can be written later, when hours of work depend on it.

    It is absolute, since the user's code may change the current folder.
    """
    path = Path(text).absolute()
    try:
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is a folder, expected a file")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(Path(text).parent)!r}; make it first")
        if path.exists() and not os.access(path, os.W_OK):
            raise argparse.ArgumentTypeError(f"{text!r} is read-only")
        if not _is_special(path):
            _part(path).touch()
            _part(path).unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from None
    return path


def _is_special(path: Path) -> bool:
    """Return whether a path leads to a device or a pipe, which are written to and not replaced."""
    return path.exists() and not path.is_file()


def _part(path: Path) -> Path:
    target = path.resolve()
    return target.with_name(f"{target.name}.{os.getpid()}.part")


def _write(path: Path, text: str) -> None:
    """Write a file so that it holds either all of its old text or all of the new one, whenever the process ends."""
    if _is_special(path):
        path.write_text(text)
        return
    part = _part(path)
    try:
        part.write_text(text)
        part.replace(path.resolve())
    finally:
        part.unlink(missing_ok=True)


class Output:
    """Where the results of a command go: text to standard output, JSON to the file that `--json` names.

    With `--json -` standard output gets the JSON and nothing else: all that is printed until the context ends, by the
    user's code too, goes to standard error, and the text is left out.

    Args:
        json: what `--json` was given: a path, "-" or None.
    """

    def __init__(self, json: str | None) -> None:
        self._json = json
        self._told = ""
        self._redirected = ExitStack()

    def __enter__(self) -> "Output":
        if self._json == STDOUT:
            self._redirected.enter_context(_stdout_to_stderr())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._redirected.close()
        try:
            print(self._told, end="", flush=True)
        except OSError:
            # Python would try once more at its end, and report that in its own words and with its own exit code.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if error is None:
                raise

    def save(self, json: str) -> None:
        """Write the file, or keep the JSON for standard output, in place of what was saved before."""
        json = json.rstrip() + "\n"
        if self._json == STDOUT:
            self._told = json
        elif self._json is not None:
            _write(Path(self._json), json)

    def show(self, text: str, json: str) -> None:
        """Save the JSON, and print the text unless standard output is to have the JSON."""
        try:
            self.save(json)
        finally:  # where the file cannot be written any more, there is the text at least
            if self._json != STDOUT:
                print(text)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Context in which all that goes to standard output goes to standard error, from child processes and C++ too."""
    print(end="", flush=True)
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
