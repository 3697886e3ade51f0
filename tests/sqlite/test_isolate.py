"""``sqlaqueue worker --isolate``: a handler that hangs is killed, and what it has written is rolled back."""

from pathlib import Path

import pytest

from tests.cli.isolated import drain_isolated


@pytest.mark.thorough
def test_the_run_of_a_process_that_was_killed_is_settled(tmp_path: Path) -> None:
    """It had the write lock, which its death frees."""
    drain_isolated(tmp_path, "sqlite:///pages.db", "strategy='update_status'")
