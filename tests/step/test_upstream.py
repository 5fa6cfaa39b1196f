"""The runner of PyTorch's own tests, on a file of three tests."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import upstream

TESTS = """
import os
import unittest

import torch
from torch.testing._internal.common_utils import no_such_decorator


class TestNames(unittest.TestCase):
    def test_same(self):
        self.assertIsInstance(torch.amp.GradScaler("cpu"), torch.GradScaler)

    def test_other(self):
        self.assertNotIn("ampkit", torch.amp.custom_fwd.__module__)

    def test_ends_the_process(self):
        if "ampkit" in torch.amp.GradScaler.__module__:
            os._exit(3)

    @no_such_decorator
    def test_lacks_a_name(self):
        torch.amp.GradScaler()

    def test_of_something_else(self):
        torch.ones(1)
"""


@pytest.mark.slow
def test_differences_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each test runs with and without the swap; what differs is named, a process that ends included."""

    def run(command: list[str], env: dict[str, str], check: bool) -> Any:
        return forks.run(command[1:], 120, env)

    monkeypatch.setattr(upstream, "subprocess", SimpleNamespace(run=run))
    (tmp_path / "test_names.py").write_text(TESTS)
    library = tmp_path / "site" / "expecttest.py"
    library.parent.mkdir()
    library.write_text("import unittest\n\n\nclass TestCase(unittest.TestCase):\n    pass\n")
    code = upstream.main([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert code == 1, lines
    assert "torch:  3 passed, 0 failed, 1 skipped, 0 crashed" in lines
    assert "ampkit: 1 passed, 1 failed, 1 skipped, 1 crashed" in lines
    assert sorted(line.split(": ")[0] for line in lines if line.startswith("DIFFERS")) == [
        "DIFFERS   test_names.TestNames.test_ends_the_process",
        "DIFFERS   test_names.TestNames.test_other",
    ]
    assert lines[-1] == "2 differences that are not explained"
