"""Fault injection: real processes are killed, paused and disconnected, and a checker reads their history."""

import pytest

# Rewritten assertions show the values they compare.
pytest.register_assert_rewrite("tests.faults.scenarios", "tests.faults.harness")
