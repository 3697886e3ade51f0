"""Names in the database, and of parameters, that more than one folder uses."""

from __future__ import annotations

CONTROL = "sqlaqueue_control"
"""The side table of cancellation requests, and of paused queues."""
CONSUMERS = "sqlaqueue_consumer"
"""The side table of Consumers that are alive."""
MESSAGES = "messages"
"""The side table of messages of pending jobs, one for each queue with the strategy ``delete_returning``."""
WAITS = "waits"
"""The side table of what a transaction changes for jobs that wait, one for each queue."""
CRASH_JOURNAL = "sqlaqueue_crash_journal"
"""The side table of batches that are about to run in a held transaction."""
DEAD_LETTER = "sqlaqueue_dead_letter"
"""The side table of jobs that failed for good in a queue whose claims delete rows."""
ATTEMPT = "sqlaqueue_attempt"
"""The side table of ended attempts, of queues with ``QueueConfig(attempt_history=...)``."""
MINUTE = "sqlaqueue_minute"
"""The side table of what has ended in each minute, of queues with ``QueueConfig(statistics=True)``."""
SCHEDULE = "sqlaqueue_schedule"
"""The table of schedules; it belongs to no queue, but to all of a MetaData and schema."""
TICK = "sqlaqueue_tick"
"""The table of the ticks that schedules have fired."""

RATE = "sqlaqueue_rate"
"""The side table of when the next job of each key of a rate may begin."""

BEGUN = "sqlaqueue_begun"
"""The parameter with the hash of the key of each job that begins, see ``reservation()``."""

TURN = "sqlaqueue_turn"
"""The column of the rows that a claim takes with their number, where keys alternate."""
