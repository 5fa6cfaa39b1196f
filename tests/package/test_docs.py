"""Every python block of README.md, docs/*.md and docs/diagnosis/*.md runs, in order, one namespace a page.

A block whose first line is `# needs: package` runs alone, as a test of its own, and is skipped without the package.
"""

import ast
import functools
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"# needs: (\w+)\n")  # the first line of a block, with the package that it imports
NOT_EXECUTED = re.compile(r"<!-- not executed: \S.*-->\s*\Z")  # what stands right above a block that is skipped


class Block(NamedTuple):
    line: int  # of the first line of code, counted from 1
    code: str

    @property
    def needs(self) -> str:
        """The package that is not among ampkit's own dependencies, "" if there is none."""
        found = NEEDS.match(self.code)
        return found[1] if found else ""


def blocks(text: str) -> list[Block]:
    return [
        Block(text.count("\n", 0, match.start(1)) + 1, match[1])
        for match in FENCED.finditer(text)
        if not NOT_EXECUTED.search(text[: match.start()])
    ]


def plain_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page.read_text()) if not block.needs]


def assert_runs(page: Path, blocks: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(f"page_{page.stem}")
    # torch.compile imports the module of a function by its name (import_source in torch/_dynamo/symbolic_convert.py).
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks:
        # The newlines put the code on the page's own line numbers, in tracebacks and in ampkit's messages.
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        try:
            exec(code, vars(module))
        except Exception as err:
            frames = traceback.extract_tb(err.__traceback__)
            line = [frame.lineno for frame in frames if frame.filename == str(page)][-1]
            pytest.fail(f"{page.name}:{line}: {type(err).__name__}: {err}")


FOUND = [page for place in ("README.md", "docs/*.md", "docs/diagnosis/*.md") for page in sorted(ROOT.glob(place))]
PAGES = [page for page in FOUND if plain_blocks(page)]
RECIPES = [(page, block) for page in FOUND for block in blocks(page.read_text()) if block.needs]


# The same code computes on a GPU where there is one, so `-m cuda` is to find it too.
ON_CUDA = [pytest.param(page, id=f"{page.name}-cuda", marks=pytest.mark.cuda) for page in PAGES]


# One or two seconds each, shapes.md and in-parts.md more.
ON_CPU = [pytest.param(page, id=page.name, marks=[pytest.mark.slow] * (page.name != "README.md")) for page in PAGES]


@pytest.mark.parametrize("page", [*ON_CPU, *ON_CUDA])
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_runs(page, plain_blocks(page), monkeypatch)


@pytest.mark.parametrize(
    ("page", "block"),
    [
        pytest.param(page, block, id=f"{page.name}:{block.line} {block.needs}{device}", marks=marks)
        for device, marks in {"": (), "-cuda": pytest.mark.cuda}.items()
        for page, block in RECIPES
    ],
)
def test_block_that_needs_a_package(page, block, tmp_path, monkeypatch):
    pytest.importorskip(block.needs)
    monkeypatch.chdir(tmp_path)
    assert_runs(page, [block], monkeypatch)


def test_pages_about_capture_are_short():
    """Each page under "Capture" in the table of contents has one job, and at most 1,800 words besides its code."""
    index = (ROOT / "docs" / "index.md").read_text()
    (listed,) = re.findall(r":caption: Capture\n:hidden:\n\n(.*?)\n```", index, re.DOTALL)
    counts = {}
    for page in listed.split():
        text = re.sub(r"^```.*?^```$", "", (ROOT / "docs" / f"{page}.md").read_text(), flags=re.MULTILINE | re.DOTALL)
        counts[page] = len(re.findall(r"\S*\w\S*", text))
    assert len(counts) == 8
    assert not {page: count for page, count in counts.items() if not 300 < count <= 1800}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


OWN_ERRORS = {"AmpkitError", "CaptureError", "InputMismatch"}


def text_of(node: ast.expr, constants: dict[str, str]) -> str:
    """Return a string of the source, with a mark for each value that is filled in."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in parts)
        case ast.Name(id=name):
            return constants.get(name, "")
        case ast.BinOp(left=one, right=other) | ast.IfExp(body=one, orelse=other):
            return f"{text_of(one, constants)}\0{text_of(other, constants)}"
        case ast.Call(func=ast.Attribute(value=text, attr="format")):
            return re.sub(r"\{[^}]*\}", "\0", text_of(text, constants))
    return ""


@functools.cache
def sources() -> list[ast.Module]:
    return [ast.parse(file.read_text()) for file in sorted((ROOT / "ampkit").rglob("*.py"))]


def messages() -> list[str]:
    """Return every string in the sources of ampkit."""
    nodes = (node for tree in sources() for node in ast.walk(tree))
    return [text_of(node, {}) for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant)]


def raised_and_warned(tree: ast.Module) -> list[str]:
    """Return what a module gives to ampkit's own errors and to warnings, and its constants of more than a sentence."""
    assigned = (node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name))
    constants = {ast.unparse(node.targets[0]): text_of(node.value, {}) for node in assigned}
    found = [text for text in constants.values() if len(text.split()) >= 10 and ". " in text and "\\" not in text]
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.Call(func=called, args=[first, *_])) if ast.unparse(called) in OWN_ERRORS:
                found.append(text_of(first, constants))
            case ast.Call(func=called, args=[first, *_]) if ast.unparse(called) == "warnings.warn":
                found.append(text_of(first, constants))
    return found


def quoted_in_troubleshooting() -> tuple[list[str], list[str]]:
    """Return what the page quotes under headings, and in the tables of ampkit's own messages."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text().split("## Messages of Python")[0]
    tables = page[page.index("## Further messages") :]
    return re.findall(r"^> (.*)$", page, re.MULTILINE), re.findall(r"^\| `([^`]*)` \|", tables, re.MULTILINE)


def fragments(quotes: list[str]) -> list[str]:
    return [part for quote in quotes for part in (part.strip(" .") for part in quote.split("...")) if part]


def test_troubleshooting_quotes_the_messages():
    """Under each heading, which is a sentence, the page quotes what ampkit prints, word for word."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    headings = re.findall(r"^### (.*)$", page, re.MULTILINE)
    quoted, in_tables = quoted_in_troubleshooting()
    assert len(headings) == len(quoted) > 20
    assert len(in_tables) > 50
    assert not [heading for heading in headings if "..." in heading or " " not in heading]
    said = messages()
    assert not [part for part in fragments(quoted + in_tables) if not any(part in one for one in said)]


def test_troubleshooting_has_every_message():
    """What ampkit raises as its own errors, and warns of, is on the page by a part of at least 15 characters."""
    quoted, in_tables = quoted_in_troubleshooting()
    parts = [part for part in fragments(quoted + in_tables) if len(part) >= 15]
    written = [text for tree in sources() for text in raised_and_warned(tree)]
    of_some_length = {text for text in written if max(map(len, text.split("\0"))) >= 20}
    assert len(of_some_length) > 100
    assert not [text.replace("\0", "...") for text in of_some_length if not any(part in text for part in parts)]


def test_messages_of_a_module():
    filled = "One thing is not so, and it was {0}. Write another one there."
    raising = f"A = '{filled}'\ndef f(x):\n    raise CaptureError(A.format(x))\n"
    others = "warnings.warn(f'{x} is no ' + y)\nraise ValueError('not one of these')\nB = 'short.'"
    shown = [text.replace("\0", "|") for text in raised_and_warned(ast.parse(raising + others))]
    assert sorted(shown) == sorted([filled, filled.replace("{0}", "|"), "| is no |"])


def test_blocks_of_a_page():
    text = "# T\n\n```python\na = 1\n```\n\n```console\n$ ls\n```\n\n{}\n```python\nb = 2\n```\n"
    assert blocks(text.format("Then:")) == [Block(4, "a = 1\n"), Block(13, "b = 2\n")]
    assert blocks(text.format("<!-- not executed: needs a GPU -->")) == [Block(4, "a = 1\n")]
    assert len(blocks(text.format("<!-- not executed: -->"))) == 2, "without a reason the block runs"
    assert Block(1, "# needs: timm\nimport timm\n").needs == "timm"
    assert not Block(1, "import timm\n# needs: timm\n").needs, "only the first line of a block"


def test_failure_names_page_and_line(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("# T\n\n```python\na = 1\n```\n\n```python\nb = a\n\nb / 0\n```\n")
    with pytest.raises(pytest.fail.Exception, match=r"page\.md:10: ZeroDivisionError"):
        assert_runs(page, blocks(page.read_text()), monkeypatch)
