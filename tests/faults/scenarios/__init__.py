"""The scenarios: each runs real processes under some faults, and ends with a check of the history.

Beyond that a scenario asserts only what the checker cannot know, such as that a graceful shutdown counts no attempt.
"""

from tests.faults.scenarios import (
    database_outages,
    graceful_shutdown,
    killed_workers,
    no_faults,
    paused_workers,
    random_faults,
)
from tests.faults.scenarios.registry import CRASHES_SERVER, ONE_API, SCENARIOS, STRATEGIES_OF

__all__ = [
    "CRASHES_SERVER",
    "ONE_API",
    "SCENARIOS",
    "STRATEGIES_OF",
    "database_outages",
    "graceful_shutdown",
    "killed_workers",
    "no_faults",
    "paused_workers",
    "random_faults",
]
