"""The queue under faults: what the library promises, proved by histories of real processes."""

import pytest

# What these assert says more when it fails.
pytest.register_assert_rewrite("tests.faults.scenarios", "tests.faults.scene")
