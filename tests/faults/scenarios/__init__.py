"""What can happen to a queue: each scenario is played by real processes, and judged by the checker in the end.

A scenario says more than the checker only where it knows more: that after a shutdown in peace no attempt is lost, for
instance.
"""

from tests.faults.scenarios import calm, frozen, killed, outages, storms, told_to_stop
from tests.faults.scenarios.playing import IN_TURN, ONLY, SCENARIOS

__all__ = ["IN_TURN", "ONLY", "SCENARIOS", "calm", "frozen", "killed", "outages", "storms", "told_to_stop"]
