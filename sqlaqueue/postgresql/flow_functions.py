"""The names of the functions that a claim under flow control calls.

Under READ COMMITTED the snapshot of a statement is older than the locks that it takes: a claim that locked a key and
counted its running jobs in one statement would miss those of the claim that had the lock before. Each query inside a
VOLATILE function has a snapshot of its own, so a function counts what is there once the key is locked.
"""

from __future__ import annotations

from sqlaqueue.flow_control.controls import JobKey, KeyOrder
from sqlaqueue.postgresql.identifiers import object_name
from sqlaqueue.queue.spec import QueueSpec

CONTENDED = "sqlaqueue.contended"
"""The setting that is ``on`` for the rest of a transaction in which a claim has passed over a key that another
transaction has locked."""

ROOM = "sqlaqueue.room"
"""The setting with the token of the claim while the last key that it has locked had room for a job."""

RECORD = "sqlaqueue.claim_"
"""The beginning of the names of the settings with what a claim has admitted so far, see
:mod:`sqlaqueue.postgresql.claims.claim_record`."""

RECORD_PARTS = 64
"""How many such settings there are: a power of two. Behind the name is the remainder of the hash of a key."""


def capacity_function(key: JobKey) -> str:
    """Return the name of the function that locks a key of a limit, and returns how many more jobs may run."""
    return object_name("sqlaqueue_capacity", key.spec.table.name, *key.names)


def head_function(key: JobKey) -> str:
    """Return the name of the function that locks a key of an order, and returns the primary key of its head."""
    return object_name("sqlaqueue_head", key.spec.table.name, *key.names)


SLOT_BITS = 20
"""So many bits of the key of a slot's lock are its number. A limit beyond that is none."""


def slot_text(key: JobKey) -> str:
    """Return the text that tells the slots of one limit, or order, of a table from those of another."""
    kind = "order" if isinstance(key, KeyOrder) else "limit"
    return f"{kind} {key.text}"


def hold_function(spec: QueueSpec) -> str:
    """Return the name of the function that locks a job with a slot of each of its keys, under a held strategy."""
    return object_name("sqlaqueue_hold", spec.table.name)


RATE_FUNCTION = "sqlaqueue_rate_capacity"
"""The name of the function that locks a key of a rate, and returns how many jobs may begin."""
