"""PyTorch's own tests with ampkit's names in place of torch's, beside the same tests as they are.

    python tests/support/upstream.py .upstream                      every test_*.py there, once as it is, once swapped
    python tests/support/upstream.py .upstream -k grad_scal custom  only the tests whose names have one of these words

The files are PyTorch's own (test/test_cuda.py, test/test_torch.py, ...) of the installed version. They are not part of
this repository. A folder `site` beside them may hold packages that they import, such as expecttest. Only tests whose
text uses one of the names in USES run, each with torch's names and with ampkit's. Where a test fails or is skipped in
both, ampkit is not the reason. A difference that EXPECTED does not name makes the command fail.
"""

import argparse
import functools
import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

# What the text or the name of a test must have in it for the test to be run.
USES = re.compile(
    r"GradScaler|scaling_case|grad_scal|amp_foreach|amp_update_scale|make_graphed_callables|custom_fwd|custom_bwd"
    r"|CUDAGraph|cuda\.graph|autocast"
)
# Pattern of a test's id -> why the test says something else with ampkit, and should.
EXPECTED: dict[str, str] = {
    "test_cuda.TestCuda.test_graph_make_graphed_callables_*with_amp_cache_enabled_*": (
        "the test asserts that torch refuses autocast's cache of casts; ampkit captures with it"
    ),
}
CRASHES = 20  # of the processes of one file, before the rest of the file is given up
FRESH = 75  # exit code of a process that ends because a test in it failed: torch's failed captures spoil what follows


class Outcome(NamedTuple):
    """What one test said.

    Attributes:
        status: passed, failed, skipped or crashed.
        why: the first line of the exception, or the reason of the skip.
        warned: what ampkit warned of in the test, such as a callable that it ran eagerly.
    """

    status: str
    why: str
    warned: str = ""


# ------------------------------------------------------------------------------------------------ the swapped names


def swap() -> None:
    """Put ampkit's names in the place of torch's, the deprecated ones with the warnings that torch has."""
    import torch

    import ampkit

    scaler = ampkit.GradScaler
    torch.GradScaler = torch.amp.GradScaler = scaler
    torch.cuda.amp.GradScaler = torch.cuda.amp.grad_scaler.GradScaler = _deprecated_scaler(scaler, "cuda")
    torch.cpu.amp.GradScaler = torch.cpu.amp.grad_scaler.GradScaler = _deprecated_scaler(scaler, "cpu")
    torch.cuda.make_graphed_callables = torch.cuda.graphs.make_graphed_callables = ampkit.make_graphed_callables
    for name in ("custom_fwd", "custom_bwd"):
        ours = getattr(ampkit, name)
        for module in (torch.amp, torch.amp.autocast_mode):
            setattr(module, name, ours)
        for module in (torch.cuda.amp, torch.cuda.amp.autocast_mode):
            setattr(module, name, _deprecated(f"torch.cuda.amp.{name}", functools.partial(ours, device_type="cuda")))


def _deprecated_scaler(scaler: type, device: str) -> type:
    """Return what torch.cuda.amp.GradScaler is to torch.amp.GradScaler: for one device, and with a warning."""
    name = f"torch.{device}.amp.GradScaler"

    def init(
        self: Any,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        warnings.warn(_TEXT.format(name=f"{name}(args...)"), FutureWarning, stacklevel=2)
        scaler.__init__(self, device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    made = type("GradScaler", (scaler,), {"__init__": init, "__module__": __name__})
    globals()[f"_{device}_scaler"] = made  # where pickle finds it
    made.__qualname__ = f"_{device}_scaler"
    return made


def _deprecated(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def warned(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(_TEXT.format(name=f"{name}(args...)"), FutureWarning, stacklevel=2)
        return function(*args, **kwargs)

    return warned


_TEXT = "`{name}` is deprecated."


# ----------------------------------------------------------------------------------------- one file, in its own process


class StandIn:
    """What a name is that this torch's test library lacks: False, and as a decorator a skip."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __bool__(self) -> bool:
        return False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return unittest.skip(f"this torch's test library has no {self.name}")(args[0])
        return self


def load(path: Path) -> ModuleType:
    """Import a test file; names that torch.testing lacks here become stand-ins."""
    for _ in range(50):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            if not (error.name or "").startswith("torch.testing") or not (missing := _missing_name(error)):
                raise
            print(f"{path.name}: no {error.name}.{missing} here", file=sys.stderr)
            setattr(sys.modules[error.name], missing, StandIn(missing))
        else:
            return module
    raise ImportError(f"{path}: too many names are missing")


def _missing_name(error: ImportError) -> str:
    found = re.search(r"cannot import name '(\w+)'", str(error))
    return found[1] if found else ""


def tests_in(module: ModuleType, words: Sequence[str]) -> Iterator[unittest.TestCase]:
    """Yield the tests of a module that use a swapped name, those made for each device type among them."""
    loader = unittest.TestLoader()
    for name, case in sorted(vars(module).items()):
        if not (isinstance(case, type) and issubclass(case, unittest.TestCase)) or case.__module__ != module.__name__:
            continue
        for method in loader.getTestCaseNames(case):
            if words and not any(word in f"{name}.{method}" for word in words):
                continue
            if USES.search(method) or USES.search(_source(getattr(case, method))):
                yield case(method)


def _source(test: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(inspect.unwrap(test))
    except (OSError, TypeError):
        return ""


class Writer(unittest.TestResult):
    """Writes each outcome to a file as it comes: what is missing in the end is what crashed the process."""

    def __init__(self, out: Any) -> None:
        super().__init__()
        self._out = out
        self._said = False
        self._last: list[str] = []
        self.failed = False  # whether the last test failed, expectedly or not

    def run(self, test: unittest.TestCase, ours: type[Warning]) -> None:
        """Run one test, and add the warnings of this class to what it says."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", category=ours)
            test.run(self)
        texts = dict.fromkeys(str(warning.message) for warning in caught if issubclass(warning.category, ours))
        if texts:
            self._out.write(json.dumps([*self._last, " | ".join(texts)]) + "\n")
            self._out.flush()

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802  # unittest's name, as those below
        super().startTest(test)
        self._said = self.failed = False
        self._write(test, "crashed", "the process ended in this test")

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._write(test, "passed", "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._write(test, "skipped", reason)

    def addExpectedFailure(self, test: unittest.TestCase, error: Any) -> None:  # noqa: N802
        self._write(test, "passed", "fails, as expected")
        self.failed = True

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._write(test, "failed", "it was expected to fail")

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:  # noqa: N802
        self._write(test, "failed", _first_line(error))

    addError = addFailure  # noqa: N815

    def addSubTest(self, test: unittest.TestCase, subtest: Any, error: Any) -> None:  # noqa: N802
        if error is not None and not self._said:
            self._write(test, "failed", _first_line(error))

    def _write(self, test: unittest.TestCase, status: str, why: str) -> None:
        self._said = status == "failed"
        self.failed = self.failed or self._said
        self._last = [test.id(), status, why]
        self._out.write(json.dumps(self._last) + "\n")
        self._out.flush()


def _first_line(error: Any) -> str:
    """Return the exception's first line and where it came from, below the machinery of unittest."""
    kind, value, trace = error
    lines = []
    while trace is not None:
        lines.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    own = [line for line in lines if not line.startswith(("common_", "case.py", "contextlib", "_comparison"))]
    text = (str(value).strip().splitlines() or [""])[0]
    return f"{kind.__name__}: {text[:300]} ({', '.join(own[-3:])})"


def child(path: Path, swapped: bool, words: Sequence[str], out: Path) -> None:
    """Run the tests of a file that `out` does not name yet, and append their outcomes to it."""
    sys.path[:0] = [str(path.parent), str(path.parent / "site")]
    before = set(read(out))
    if swapped:
        swap()
    module = load(path)
    from ampkit import AmpkitWarning

    with out.open("a") as file:
        result = Writer(file)
        for test in tests_in(module, words):
            if test.id() not in before:
                result.run(test, AmpkitWarning)
                if result.failed:
                    file.flush()
                    os._exit(FRESH)  # without what a spoiled process does at its end


# ------------------------------------------------------------------------------------------------------ both, compared


def read(file: Path) -> dict[str, Outcome]:
    """Return the last outcome of each test in a file of them."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {name: Outcome(*rest) for name, *rest in map(json.loads, lines)}


def run(path: Path, swapped: bool, words: Sequence[str], folder: Path) -> dict[str, Outcome]:
    """Run a file in processes of its own, a new one where one crashed, and return the outcomes by test."""
    out = folder / f"{path.stem}-{'swapped' if swapped else 'plain'}.jsonl"
    crashes = 0
    while crashes < CRASHES:
        count = len(read(out))
        arguments = [str(path), "--child", "swapped" if swapped else "plain", "--out", str(out), "-k", *words]
        ended = subprocess.run([sys.executable, __file__, *arguments], env=_environment(), check=False)
        if ended.returncode == 0 or len(read(out)) == count:
            break
        crashes += ended.returncode != FRESH
    outcomes = read(out)
    if not outcomes and ended.returncode:
        outcomes[f"{path.stem}: import"] = Outcome("crashed", "see the output above")
    return outcomes


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    names = {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    return {**os.environ, **names}


def reason(test: str) -> str:
    """Return why a difference is expected, or ""."""
    return next((why for pattern, why in EXPECTED.items() if fnmatch(test, pattern)), "")


def compare(plain: dict[str, Outcome], swapped: dict[str, Outcome]) -> Iterator[tuple[str, Outcome, Outcome]]:
    """Yield the tests that say something else with the swap, with both outcomes."""
    for test in sorted(plain.keys() | swapped.keys()):
        pair = (plain.get(test, Outcome("absent", "")), swapped.get(test, Outcome("absent", "")))
        if pair[0].status != pair[1].status:
            yield test, *pair


def counts(outcomes: dict[str, Outcome]) -> str:
    found = Counter(outcome.status for outcome in outcomes.values())
    return ", ".join(f"{found[status]} {status}" for status in ("passed", "failed", "skipped", "crashed"))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where PyTorch's test files are")
    parser.add_argument("-k", dest="words", nargs="*", default=[], help="only tests whose name has one of these words")
    parser.add_argument("--json", type=Path, help="write every outcome there")
    parser.add_argument("--child", choices=["swapped", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        child(args.folder.resolve(), args.child == "swapped", args.words, args.out)
        return 0
    files = sorted(args.folder.resolve().glob("test_*.py"))
    if not files:
        parser.error(f"there is no file test_*.py in {args.folder}")
    plain: dict[str, Outcome] = {}
    swapped: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        for path in files:
            for outcomes, with_swap in ((plain, False), (swapped, True)):
                start = time.perf_counter()
                new = run(path, with_swap, args.words, Path(folder))
                outcomes |= new
                name = "ampkit" if with_swap else "torch"
                print(f"{path.name:<24} {name:<7} {counts(new)}  ({time.perf_counter() - start:.0f} s)", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"torch": plain, "ampkit": swapped}, indent=1) + "\n")
    return tell(plain, swapped)


def tell(plain: dict[str, Outcome], swapped: dict[str, Outcome]) -> int:
    """Print counts, every failure and every difference; return 1 if one is not expected."""
    print(f"torch:  {counts(plain)}\nampkit: {counts(swapped)}")
    for test, outcome in sorted(plain.items()):
        if outcome.status in ("failed", "crashed") and swapped.get(test, outcome).status == outcome.status:
            print(f"in both   {test}: {outcome.why}")
    unexpected = 0
    for test, before, after in compare(plain, swapped):
        why = reason(test)
        unexpected += not why
        word = "expected" if why else "DIFFERS"
        print(f"{word:<9} {test}: {before.status} -> {after.status}: {after.why or before.why}")
        if why:
            print(f"          because {why}")
    for test, outcome in sorted(swapped.items()):
        if outcome.warned:
            print(f"warned    {test}: {outcome.warned}")
    print(f"{unexpected} differences that are not explained")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
