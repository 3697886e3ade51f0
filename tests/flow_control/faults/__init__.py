"""Flow control under random faults: real processes claim, fail and die, and a checker reads what was committed.

Read the files in this order: ``configuration`` draws the queue of a round, ``audit`` has the triggers that record each
committed change, ``roles`` and ``operators`` have the processes, ``a_round`` runs one round, ``transactions`` and
``checker`` read what was recorded. ``python -m tests.flow_control.faults --minutes 10`` runs rounds.
"""

import pytest

# Rewritten assertions show the values they compare.
pytest.register_assert_rewrite("tests.faults.harness")
