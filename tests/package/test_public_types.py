"""Every public name has a type that a type checker knows without looking into the code: `pyright --verifytypes`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_pyright_knows_all_public_types(tmp_path: Path) -> None:
    """Names of other packages are not counted: torch leaves some of its own without a type."""
    pytest.importorskip("pyright")
    pytest.importorskip("lightning")
    # pyright asks the first python of PATH where packages are. In the tree itself it would not look for a package.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--verifytypes", "ampkit", "--ignoreexternal"],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Type completeness score: 100%" in done.stdout, done.stdout + done.stderr
