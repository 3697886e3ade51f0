"""``sqlaqueue worker --isolate``: a handler that hangs is killed, and the next process settles its run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.isolated import drain_isolated

STRATEGIES = ["'update_status'", "'batch_select'", "'delete_returning', rows_are_messages=True"]


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_run_of_a_process_that_was_killed_is_settled(
    url: Callable[[str], str], tmp_path: Path, strategy: str
) -> None:
    rows = drain_isolated(tmp_path, url("mariadb+pymysql"), f"strategy={strategy}")
    assert rows["sqlaqueue_crash_journal"] == "[]"
