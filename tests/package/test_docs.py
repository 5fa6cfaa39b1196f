"""Every python block of README.md, docs/*.md and docs/diagnosis/*.md runs, in order, one namespace a page.

A block whose first line is `# needs: package` runs alone, as a test of its own, and is skipped without the package.
"""

import ast
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from harness import allow_inductor_warnings

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


# One or two seconds each, and capture.md twenty.
ON_CPU = [pytest.param(page, id=page.name, marks=[pytest.mark.slow] * (page.name != "README.md")) for page in PAGES]


@pytest.mark.parametrize("page", [*ON_CPU, *ON_CUDA])
@allow_inductor_warnings
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
@allow_inductor_warnings
def test_block_that_needs_a_package(page, block, tmp_path, monkeypatch):
    pytest.importorskip(block.needs)
    monkeypatch.chdir(tmp_path)
    assert_runs(page, [block], monkeypatch)


def messages() -> list[str]:
    """Return every string in the sources of ampkit, with a mark for each value that is filled in."""
    found = []
    for file in (ROOT / "ampkit").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_troubleshooting_quotes_the_messages():
    """Under each heading, which is a sentence, the page quotes what ampkit prints, word for word."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    headings, quoted = (re.findall(pattern, page, re.MULTILINE) for pattern in (r"^### (.*)$", r"^> (.*)$"))
    assert len(headings) == len(quoted) > 20
    assert not [heading for heading in headings if "..." in heading or " " not in heading]
    said = messages()
    for message in quoted:
        for fragment in filter(None, (part.strip(" .") for part in message.split("..."))):
            assert any(fragment in one for one in said), f"no message has {fragment!r}"


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
