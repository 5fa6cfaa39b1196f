"""The wheel is whole: it runs the README's first loop where nothing is installed but torch and what torch requires.

Its description is the README, with links that lead into the repository from anywhere.
"""

import email
import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
FIRST_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def required_by(name: str, known: set[str]) -> set[str]:
    """Return the names of an installed distribution and of all that it requires, without extras."""
    if name in known:
        return known
    known.add(name)
    for requirement in metadata.requires(name) or []:
        needed = re.match(r"[\w.-]+", requirement)
        assert needed is not None
        installed = any(True for _ in metadata.Distribution.discover(name=needed[0]))
        if installed and "extra ==" not in requirement:
            required_by(needed[0], known)
    return known


def link_torch(folder: Path) -> None:
    """Fill the folder with links to torch and to what it requires, and to nothing else."""
    folder.mkdir()
    for name in required_by("torch", set()):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())


def assert_links_lead_into_the_repository(wheel: Path) -> None:
    """Each link of the description is an address: the only one in pyproject.toml, and a file of the repository."""
    (metadata_file,) = [name for name in ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA")]
    described = email.message_from_string(ZipFile(wheel).read(metadata_file).decode())
    repository = described["Project-URL"].removeprefix("Repository, ")
    links = re.findall(r'(?:\]\(|src=")([^)"]*)', described.get_payload())
    assert len(links) > 30
    for link in links:
        address, path = re.split(rf"/(?:blob|raw)/v{described['Version']}/", link)
        assert address == repository
        assert (ROOT / path.partition("#")[0]).exists()


def test_paths_become_addresses() -> None:
    """Pages are shown, pictures are fetched; links within the page and addresses stay."""
    pytest.importorskip("hatchling")
    with_addresses = runpy.run_path(str(ROOT / "hatch_build.py"))["with_addresses"]
    readme = '[a](docs/b.md#c) ![d](e.png) <img src="f.png" width="9"> [g](#h) [i](https://j.org/k)'
    assert with_addresses(readme, "https://l.org/m", "1.2") == (
        "[a](https://l.org/m/blob/v1.2/docs/b.md#c) ![d](https://l.org/m/raw/v1.2/e.png) "
        '<img src="https://l.org/m/raw/v1.2/f.png" width="9"> [g](#h) [i](https://j.org/k)'
    )


@pytest.mark.slow
def test_the_wheel_needs_torch_alone(tmp_path: Path) -> None:
    """The wheel is built from the sources, and imported without site-packages."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")  # built from the sdist, so that is whole, too
    ZipFile(wheel).extractall(tmp_path / "ampkit")
    assert_links_lead_into_the_repository(wheel)
    link_torch(tmp_path / "torch")
    loop = FIRST_BLOCK.findall((ROOT / "README.md").read_text())[0]
    script = tmp_path / "loop.py"
    paths = [str(tmp_path / "ampkit"), str(tmp_path / "torch")]
    script.write_text(
        f"import sys\nsys.path[:0] = {paths}\n{loop}\nprint(sorted(sys.modules))\nprint(ampkit.__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(script)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "10 steps: 7 replayed, 3 eager" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(str(tmp_path / "ampkit"))
    assert "'lightning'" not in done.stdout
    assert "'numpy'" not in done.stdout
