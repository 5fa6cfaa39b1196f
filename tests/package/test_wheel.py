"""The wheel is whole: it runs the README's first loop where nothing is installed but torch and what torch requires."""

import re
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


@pytest.mark.slow
def test_the_wheel_needs_torch_alone(tmp_path: Path) -> None:
    """The wheel is built from the sources, and imported without site-packages."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    ZipFile(wheel).extractall(tmp_path / "ampkit")
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
