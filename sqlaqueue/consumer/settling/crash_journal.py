"""The ledger: which jobs a batch was about to run when its worker died.

A strategy with a held transaction leaves no trace of a claim whose worker dies: the database rolls it back, the
count of attempts with it, and a job that kills its worker would run for ever. So before a batch runs, a second
connection commits one row with the keys of its jobs; the batch's own transaction deletes it. A job that is
claimed and found in the row of another batch is a suspect, for its locks are gone while the row is not. A suspect is
claimed by itself. The first time it may run beside other suspects; one that is found in the rows of two batches died
again, and runs alone. A start of a job that ran alone, which left such a row behind, counts as an attempt.
"""

from __future__ import annotations

import functools
import json
import threading
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.keys import Key, key_text
from sqlaqueue.payloads import Claimed
from sqlaqueue.queue.backend import CRASH_JOURNAL, backend
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.statements.claim import worker_name

_FORGET = timedelta(days=1)


@dataclass(eq=False)
class Entry:
    """The row of one batch, and what the ledger knows of its jobs once the row is written."""

    names: tuple[str, ...]
    blamed: bool
    """Should the worker die, then this job, the only one of the entry, has done it, as far as anybody can know."""
    id: uuid.UUID = field(default_factory=uuid.uuid4)
    suspects: frozenset[str] = frozenset()
    """The names of the jobs that are in rows which other batches left behind."""
    again: frozenset[str] = frozenset()
    """Of those the ones that died more than once, or alone."""
    deaths: int = 0
    """How many starts of its only job, for which it is to blame, ended in the death of the worker."""

    left_behind: tuple[str, ...] = ()
    """The names of those of its jobs that stay in the ledger when the batch is given up."""
    left_starts: int = 0

    def leave_behind(self, keys: Sequence[Key], *, starts: int) -> None:
        """Have the ledger keep some jobs as suspects.

        :param starts: how many starts count as attempts.
        """
        self.left_behind, self.left_starts = tuple(key_text(key) for key in keys), starts

    def suspected(self, keys: Sequence[Key], *, again: bool = False) -> list[Key]:
        """Return those of ``keys`` that are suspects, or that are so ``again``."""
        names = self.again if again else self.suspects
        return [key for key in keys if key_text(key) in names] if names else []


class Entries:
    """The rows that one Consumer has in the ledger."""

    def __init__(self) -> None:
        self._open: dict[uuid.UUID, Entry] = {}
        self._given_up: dict[uuid.UUID, Entry] = {}
        self._lock = threading.Lock()

    def open(self, keys: Sequence[Key], *, blamed: bool) -> Entry:
        """Return the entry of a batch that is about to be written."""
        entry = Entry(tuple(key_text(key) for key in keys), blamed)
        with self._lock:
            self._open[entry.id] = entry
        return entry

    def close(self, entry: Entry) -> None:
        """Forget an entry whose row is gone."""
        with self._lock:
            self._open.pop(entry.id, None)
            self._given_up.pop(entry.id, None)

    def give_up(self, entry: Entry) -> None:
        """Note that the batch is over, but its row may still be there."""
        with self._lock:
            self._open.pop(entry.id, None)
            self._given_up[entry.id] = entry

    def give_up_all(self) -> None:
        """The same for every batch that is running: its worker lives and will not finish it."""
        with self._lock:
            self._given_up |= self._open
            self._open.clear()

    def take_given_up(self) -> Entry | None:
        """Return an entry whose row is to be deleted and forget it; None when there is none."""
        with self._lock:
            return self._given_up.popitem()[1] if self._given_up else None


def enter(session: Session, spec: QueueSpec, entry: Entry, worker: str, tickets: Sequence[str] = ()) -> None:
    """Write the row of a batch that is about to run, and note in the entry what is known of its jobs.

    It must not wait for ever, for this transaction runs while the batch's own is open: somebody who waits to lock the
    tables of both would wait for this Consumer, and it for them, without the server seeing it.

    :param tickets: the calls that the batch answers, as the others are told with it.
    """
    names = list(entry.names)
    values = {
        "its_id": entry.id,
        "its_keys": json.dumps(names),
        "its_starts": int(entry.blamed),
        "its_worker": worker,
        **({"payload": str(Claimed(len(names), tickets))} if tickets else {}),
    }
    rows = _execute(session, spec, _entering(spec, told=bool(tickets)), values).all()
    deaths = Counter[str]()
    for found, starts in rows:
        # A start that counted was one alone.
        deaths.update(dict.fromkeys(set(names).intersection(found), 1 + starts))
    entry.suspects = frozenset(deaths)
    entry.again = frozenset(name for name, times in deaths.items() if times > 1)
    entry.deaths = sum(starts for _, starts in rows) if len(names) == 1 else 0


@functools.lru_cache(maxsize=128)
def _entering(spec: QueueSpec, *, told: bool) -> AnySelect:
    """Return the statement that writes a row, and finds those that other batches left behind for the same jobs."""
    ledger = spec.side_tables[CRASH_JOURNAL]
    columns: dict[str, sa.ColumnElement[Any]] = {
        name: sa.bindparam(f"its_{name}", type_=ledger.c[name].type) for name in ("id", "starts", "worker")
    }
    columns["keys"] = backend().side_tables.as_json(sa.bindparam("its_keys", "[]", sa.Text()))
    # Losing the row in a crash of the server costs nothing: the batch is gone with it.
    setting = sa.func.set_config("synchronous_commit", "off", sa.true())
    told_others = [backend().notification(spec, sa.bindparam("payload", "", sa.Text()))] if told else []
    entered = sa.insert(ledger).values(queue=spec.name, **columns).returning(setting, *told_others).cte("entered")
    # Of the same parameter: to write out the names of a batch takes its time, and the ledger is mostly empty.
    mine = sa.select(sa.func.jsonb_array_elements_text(columns["keys"]))
    its = sa.func.jsonb_array_elements_text(ledger.c["keys"]).table_valued(sa.column("name", sa.Text()), name="its")
    # As a CASE a name is looked up in a hash; has_any() compares each with each, a million times for two batches.
    in_both = sa.exists().where(sa.case((its.c.name.in_(mine), sa.true()))).correlate(ledger)
    known = sa.select(ledger.c["keys"], ledger.c.starts).where(ledger.c.queue == spec.name)
    return known.where(in_both).add_cte(entered)


def strike(session: Session, spec: QueueSpec, entry: Entry) -> None:
    """Delete the row of a batch; what is known of its jobs from others stays."""
    ledger = spec.side_tables[CRASH_JOURNAL]
    _execute(session, spec, sa.delete(ledger).where(ledger.c.id == entry.id))


def strike_soon(session: Session, spec: QueueSpec, entry: Entry) -> None:
    """The same beside the batch's own transaction, or at the end of a shift; it must not wait either."""
    _execute(session, spec, sa.select(sa.func.set_config("lock_timeout", "2s", sa.true())))
    if entry.left_behind:
        _leave_behind(session, spec, entry)
    else:
        strike(session, spec, entry)


def _leave_behind(session: Session, spec: QueueSpec, entry: Entry) -> None:
    """Reduce the row of a batch to its suspects; a crash of the server may have lost it."""
    names = backend().side_tables.as_json(sa.literal(json.dumps(entry.left_behind), sa.Text()))
    left = {"keys": names, "starts": entry.left_starts}
    row = {"id": entry.id, "queue": spec.name, "worker": worker_name(), **left}
    _execute(session, spec, backend().insert_or_replace(spec.side_tables[CRASH_JOURNAL], row, replaced=list(left)))


def leave(session: Session, spec: QueueSpec, entry: Entry) -> None:
    """Delete the row of a batch whose runs are settled, and its only job from rows that were left behind."""
    strike(session, spec, entry)
    if len(entry.names) == 1 and entry.suspects:
        ledger, name = spec.side_tables[CRASH_JOURNAL], entry.names[0]
        named = sa.and_(ledger.c.queue == spec.name, ledger.c["keys"].has_key(name))
        remaining = ledger.c["keys"].op("-")(sa.literal(name, sa.Text()))
        _execute(session, spec, sa.update(ledger).where(named).values(keys=remaining))
        # Afterwards: somebody else may have taken the last but one out meanwhile, for which the update has waited.
        empty = sa.and_(ledger.c.queue == spec.name, sa.func.jsonb_array_length(ledger.c["keys"]) == 0)
        _execute(session, spec, sa.delete(ledger).where(empty))


def forget(session: Session, spec: QueueSpec) -> None:
    """Delete rows so old that their jobs have long been settled by other means."""
    ledger = spec.side_tables[CRASH_JOURNAL]
    _execute(
        session, spec, sa.delete(ledger).where(ledger.c.queue == spec.name, ledger.c.created_at < clock() - _FORGET)
    )


def _execute(session: Session, spec: QueueSpec, statement: sa.Executable, values: dict[str, Any] | None = None) -> Any:
    # A session with several engines knows which one is meant by the model.
    return session.execute(statement, values, bind_arguments={"mapper": spec.mapper})
