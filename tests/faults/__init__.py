"""Fault injection: real processes are killed, paused and disconnected, and a checker reads their history.

``processes`` starts roles in processes and does to them what a test wants; each writes its ``history``. ``mutants`` are
the library without a safeguard each, which the tests have to detect. On these stand:

* for jobs: ``roles``, ``harness``, ``scenarios`` and ``checker``;
* for the keys of flow control: ``key_queues``, ``key_history``, ``key_rounds`` and ``key_checker``;
* for unique keys: ``duplicates``;
* for the ticks of schedules: ``ticks`` and ``tick_checker``.

A checker has rules, functions of a history that yield what breaks them. For each rule a test breaks a valid history.
"""

import pytest

# Rewritten assertions show the values they compare.
pytest.register_assert_rewrite("tests.faults.scenarios", "tests.faults.processes", "tests.faults.harness")
