"""The README shows the command that CI runs."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.once
def test_the_readme_and_ci_give_the_same_test_command() -> None:
    *_, command = (ROOT / ".ci" / "run").read_text().splitlines()
    assert command.endswith("nox")
    assert command in (ROOT / "README.md").read_text().splitlines()
