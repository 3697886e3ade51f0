"""The ledger: which jobs a batch was about to run when its worker died.

A strategy with a held transaction leaves no trace of a claim whose worker dies: the database rolls it back, the
count of attempts with it, and a job that kills its worker would run for ever. So before a batch runs, a second
connection commits one row with the keys of its jobs; the batch's own transaction deletes it. A job that is
claimed and found in the row of another batch is a suspect, for its locks are gone while the row is not: suspects are
claimed alone, and a start alone that left its row behind counts as an attempt.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Session

from sqlaqueue.spec import Key, QueueSpec, clock
from sqlaqueue.strategies.side_tables import LEDGER

_FORGET = timedelta(days=1)


@dataclass(frozen=True)
class Entry:
    """The row of one batch, and what the ledger knew of its jobs."""

    id: uuid.UUID
    names: tuple[str, ...]
    suspects: frozenset[str]
    """The names of the jobs that are in rows which other batches left behind."""
    deaths: int
    """How many starts alone of its only job ended in the death of the worker."""

    def suspected(self, keys: Sequence[Key]) -> list[Key]:
        """Return those of ``keys`` that are suspects."""
        return [key for key in keys if name_of(key) in self.suspects]


def name_of(key: Key) -> str:
    """Return the text by which the ledger knows a job."""
    return str(key[0]) if len(key) == 1 else json.dumps([str(part) for part in key])


def enter(session: Session, spec: QueueSpec, keys: Sequence[Key], worker: str) -> Entry:
    """Write the row of a batch that is about to run, and return it with what is known of its jobs."""
    ledger = spec.side_tables[LEDGER]
    names = [name_of(key) for key in keys]
    entry_id = uuid.uuid4()
    alone = len(names) == 1
    # Losing the row in a crash of the server costs nothing: the batch is gone with it.
    session.execute(sa.text("SET LOCAL synchronous_commit = off"))
    entered = (
        sa.insert(ledger)
        .values(id=entry_id, queue=spec.name, keys=names, starts=int(alone), worker=worker)
        .cte("entered")
    )
    mine = sa.bindparam(None, names, ARRAY(sa.Text()))
    left_behind = (
        sa.select(ledger.c["keys"], ledger.c.starts)
        .where(ledger.c.queue == spec.name, ledger.c["keys"].has_any(mine))
        .add_cte(entered)
    )
    rows = session.execute(left_behind).all()
    known = {name for found, _ in rows for name in found}
    return Entry(entry_id, tuple(names), known & set(names), sum(starts for _, starts in rows) if alone else 0)


def leave(session: Session, spec: QueueSpec, entry: Entry) -> None:
    """Delete the row of a batch whose runs have ended, and its only job from rows that were left behind."""
    ledger = spec.side_tables[LEDGER]
    session.execute(sa.delete(ledger).where(ledger.c.id == entry.id))
    if len(entry.names) == 1 and entry.suspects:
        name = entry.names[0]
        named = sa.and_(ledger.c.queue == spec.name, ledger.c["keys"].has_key(name))
        remaining: Any = ledger.c["keys"] - name
        session.execute(sa.delete(ledger).where(named, sa.func.jsonb_array_length(ledger.c["keys"]) == 1))
        session.execute(sa.update(ledger).where(named).values(keys=remaining))


def forget(session: Session, spec: QueueSpec) -> None:
    """Delete rows so old that their jobs have long been settled by other means."""
    ledger = spec.side_tables[LEDGER]
    session.execute(sa.delete(ledger).where(ledger.c.queue == spec.name, ledger.c.created_at < clock() - _FORGET))
