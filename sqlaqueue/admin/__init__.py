"""What an operator asks of a queue and does to it: plain functions on a Session, behind the command line.

::

    with Session(engine) as session:
        print(stats(session, Email).due)
        for group in failures(session, Email):
            print(group.kind, group.count)

Those that only look leave the transaction open; those that change jobs do so in batches, and commit each.
"""

from sqlaqueue.admin.changes import cancel_some, execute, in_batches, preview, purge_some, requeue_some
from sqlaqueue.admin.failures import FailureGroup, failures
from sqlaqueue.admin.stats import Stats, stats
from sqlaqueue.admin.which import Which, count

__all__ = [
    "FailureGroup",
    "Stats",
    "Which",
    "cancel_some",
    "count",
    "execute",
    "failures",
    "in_batches",
    "preview",
    "purge_some",
    "requeue_some",
    "stats",
]
