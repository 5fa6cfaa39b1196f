"""What all commands of `python -m ampkit` share: exit codes, arguments that name files, and the output of results."""

import argparse
import os
import sys
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from .._precision.policy import Policy

DONE = 0
FOUND = 1  # the command did its work and found something bad, which its help describes
TROUBLE = 2  # the command could not do its work; argparse and diff(1) use 2 too
USERS_ERROR = 3  # the user's code raised an exception
INTERRUPTED = 130  # 128 + SIGINT, as in shells
NO_READER = 141  # 128 + SIGPIPE: the program that reads the output has ended
STDOUT = "-"
POLICY = "dtypes of the step, in place of the policy among the options that the function returns; see ampkit.Policy"


def exit_codes(found: str = "") -> str:
    """Return the sentence about exit codes for a command's help. `found` says what code 1 means, "" if it has none."""
    return (
        f"Exit code: {DONE} if all went well; {f'{FOUND} if {found}; ' if found else ''}{TROUBLE} if the command could "
        f"not do its work, and a line on standard error says why; {USERS_ERROR} if your code raised an exception, and "
        f"its lines are shown; {INTERRUPTED} after Ctrl-C."
    )


class Parser(argparse.ArgumentParser):
    """Prints one line about wrong arguments, without the usage that argparse prints before it."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong with the arguments, and exit with code 2."""
        complain(self.prog, f"{message} (`{self.prog} --help` lists what is legal)")
        raise SystemExit(TROUBLE)


def complain(command: str, message: str) -> None:
    """Print to standard error why a command could not do its work."""
    say(command, f"error: {message}")


def say(command: str, message: str) -> None:
    """Print a message of a command to standard error."""
    print(f"{command}: {message}", file=sys.stderr)


def policy(text: str) -> Policy:
    """Return the policy that an argument names."""
    try:
        return Policy.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None  # argparse hides the text of a ValueError


def json_file(text: str) -> str:
    """Return the argument of `--json`: "-", or the path of a file that can be written later."""
    return text if text == STDOUT else str(output_file(text))


def output_file(text: str) -> Path:
    """Return the absolute path of a file after checking that it can be written, before hours of work depend on it.

    It is absolute because the user's code may change the current folder.
    """
    path = Path(text).absolute()
    try:
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is a folder, expected a file")
        if not path.parent.is_dir():
            folder = str(Path(text).parent)
            raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {folder!r}; create it first")
        if path.exists() and not os.access(path, os.W_OK):
            raise argparse.ArgumentTypeError(f"{text!r} is read-only")
        if path.is_file() or not path.exists():  # no device and no pipe, see `Output.save`
            _part(path).touch()
            _part(path).unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from None
    return path


def _part(path: Path) -> Path:
    target = path.resolve()
    return target.with_name(f"{target.name}.{os.getpid()}.part")


@dataclass(eq=False)
class Output:
    """Context that writes the results of a command: text to standard output, JSON to the file that `--json` names.

    With `--json -` standard output gets nothing but the JSON. Until the context ends, all that is printed goes to
    standard error, also by the user's code, and the text is left out.
    """

    _json: str | None  # the argument of `--json`: a path, "-" or None
    _json_text: str = ""
    _redirected: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> "Output":
        if self._json == STDOUT:
            # Redirected is also the output of child processes and C++ code.
            print(end="", flush=True)
            kept = os.dup(1)
            os.dup2(2, 1)
            self._redirected.callback(os.close, kept)
            self._redirected.callback(os.dup2, kept, 1)
            self._redirected.enter_context(redirect_stdout(sys.stderr))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._redirected.close()
        try:
            print(self._json_text, end="", flush=True)
        except OSError:
            # At exit Python would flush stdout again, and end with a message and an exit code of its own.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if error is None:
                raise

    def save(self, json: str) -> None:
        """Write the JSON to the file, or keep it for standard output. It replaces what was saved before.

        If the process ends meanwhile, the file has all of its old text or all of the new one.
        """
        json = json.rstrip() + "\n"
        if self._json == STDOUT:
            self._json_text = json
        elif self._json is not None and (path := Path(self._json)).exists() and not path.is_file():
            path.write_text(json)  # a device or a pipe is not replaced by a file
        elif self._json is not None:
            part = _part(path)
            try:
                part.write_text(json)
                part.replace(path.resolve())
            finally:
                part.unlink(missing_ok=True)

    def show(self, text: str, json: str) -> None:
        """Save the JSON, and print the text unless standard output gets the JSON."""
        try:
            self.save(json)
        finally:  # if the file can no longer be written, the text is still printed
            if self._json != STDOUT:
                print(text)
