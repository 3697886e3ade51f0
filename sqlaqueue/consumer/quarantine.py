"""Which jobs are quarantined because their worker died, and which of them may run at the same time. Pure, no I/O.

After a worker died it is unknown which of its jobs caused the death. Most did not, and running them one by one would
take long. So a consumer first runs several quarantined jobs at once. If their worker dies, no attempt counts, and these
jobs are run alone from then on, one at a time in each consumer. A job whose worker dies while the job runs alone is
responsible, and the attempt counts. A job that has run to its end, alone or with others, leaves the quarantine.
"""

from __future__ import annotations

import functools
import json
import threading
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.notify_payloads import Claimed
from sqlaqueue.postgresql.side_tables import HasName, as_json
from sqlaqueue.postgresql.triggers import notification
from sqlaqueue.queue.names import CRASH_JOURNAL
from sqlaqueue.queue.run import Key, key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import engine_of
from sqlaqueue.sql.portable import clock, earlier, set_setting
from sqlaqueue.sql.types import insert_or_replace
from sqlaqueue.statements.claim import worker_name


class QuarantinedJob(NamedTuple):
    """A quarantined job that is to be claimed by its key."""

    key: Key
    alone: bool
    """No other quarantined job runs meanwhile, so this one is responsible should the worker die."""


class Quarantine:
    """The quarantined jobs that one run of a consumer knows of, and those that it is running.

    :param at_once: how many may run at the same time: half of the handlers, so that other jobs go on.
    """

    def __init__(self, at_once: int = 1) -> None:
        self.at_once = max(1, at_once)
        self.may_wait = True
        """Quarantined jobs may wait in the table: at the start, and whenever jobs may have been rescued."""
        self.claimed_last = False
        """The last claim took a quarantined job, so that the next one is for the others."""
        self._waiting: dict[Key, bool] = {}
        """The jobs to be claimed by their keys, and whether each has to run alone."""
        self._running: set[Key] = set()
        self._runs_alone = False
        self._lock = threading.Lock()

    def add(self, keys: Iterable[Key], *, together: bool = False) -> None:
        """Remember jobs to claim one by one; ``together`` with other quarantined jobs unless they have to run alone."""
        with self._lock:
            for key in keys:
                self._waiting[key] = not together or self._waiting.get(key, False)

    def waiting(self) -> list[Key]:
        with self._lock:
            return list(self._waiting)

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    def begin(self, keys: Iterable[Key]) -> None:
        with self._lock:
            self._running.update(keys)

    def take(self) -> QuarantinedJob | None:
        """Return a job to claim now; None when there is none, or when it has to wait for others."""
        with self._lock:
            # A running job may have been added again. A claim would not get it, as it is locked, and end() would then
            # record that it no longer runs.
            waiting = [key for key in self._waiting if key not in self._running]
            if self._runs_alone or not waiting:
                return None
            key = next((key for key in waiting if not self._waiting[key]), waiting[0])
            alone = self.at_once == 1 or self._waiting[key]
            if len(self._running) >= (1 if alone else self.at_once):
                return None
            del self._waiting[key]
            self._running.add(key)
            self._runs_alone = alone
            return QuarantinedJob(key, alone)

    def end(self, keys: Iterable[Key]) -> bool:
        """Record that jobs no longer run; return whether a quarantined one was among them, so that another may run."""
        if not self._running:
            return False
        with self._lock:
            ended = self._running.intersection(keys)
            self._running -= ended
            self._runs_alone &= bool(self._running)
            return bool(ended)


# -- crash journal -----------------------------------------------------------------------------------------------------
# A strategy that holds a transaction leaves no trace of a claim whose worker dies: the database rolls it back, the
# attempts with it, and a job that kills its worker would run for ever. So before a batch runs, a second connection
# commits one row with the keys of its jobs; the batch's own transaction deletes it. A job that is claimed and found
# in the row of another batch is quarantined, since its lock is gone while the row is not. A quarantined job is
# claimed by itself. The first time it may run beside other quarantined jobs; a job that is found in the rows of two
# batches runs alone. A start of a job that ran alone, and left such a row behind, counts as an attempt.


_KEEP = timedelta(days=1)


class JournalEntry:
    """The row of one batch, and what the journal says of its jobs once the row is written.

    :param solely_responsible: the entry has one job, and if the worker dies it can only have been this one.
    """

    quarantined: frozenset[str] = frozenset()
    """The names of the jobs that are in rows which other batches left behind."""
    died_again: frozenset[str] = frozenset()
    """Of those the ones whose worker died more than once, or while they ran alone."""
    deaths = 0
    """How many starts of its only job ended in the death of the worker, with this job alone responsible."""
    kept_names: tuple[str, ...] = ()
    """The names of the jobs that stay in the journal when the entry is discarded."""
    kept_starts = 0

    def __init__(self, names: tuple[str, ...], *, solely_responsible: bool) -> None:
        self.id, self.names, self.solely_responsible = uuid.uuid4(), names, solely_responsible

    def keep(self, keys: Sequence[Key], *, starts: int) -> None:
        """Have the journal keep some jobs as quarantined, with so many starts that count as attempts."""
        self.kept_names, self.kept_starts = tuple(key_text(key) for key in keys), starts

    def quarantined_among(self, keys: Sequence[Key], *, died_again: bool = False) -> list[Key]:
        """Return those of ``keys`` that are quarantined, or whose worker ``died_again``."""
        names = self.died_again if died_again else self.quarantined
        return [key for key in keys if key_text(key) in names] if names else []


class CrashJournal:
    """The rows that one Consumer has in the crash journal."""

    def __init__(self) -> None:
        self._open: dict[uuid.UUID, JournalEntry] = {}
        self._discarded: dict[uuid.UUID, JournalEntry] = {}
        self._lock = threading.Lock()

    def open(self, keys: Sequence[Key], *, solely_responsible: bool) -> JournalEntry:
        entry = JournalEntry(tuple(key_text(key) for key in keys), solely_responsible=solely_responsible)
        with self._lock:
            self._open[entry.id] = entry
        return entry

    def close(self, entry: JournalEntry) -> None:
        """Forget an entry whose row is deleted."""
        with self._lock:
            self._open.pop(entry.id, None)
            self._discarded.pop(entry.id, None)

    def discard(self, entry: JournalEntry) -> None:
        """Record that a batch is over whose row may still be there."""
        with self._lock:
            self._open.pop(entry.id, None)
            self._discarded[entry.id] = entry

    def discard_all(self) -> None:
        """Discard the entries of all running batches: their workers live and will not finish them."""
        with self._lock:
            self._discarded |= self._open
            self._open.clear()

    def take_discarded(self) -> JournalEntry | None:
        """Return an entry whose row is to be deleted, and forget it; None when there is none."""
        with self._lock:
            return self._discarded.popitem()[1] if self._discarded else None


def write_entry(
    session: Session, spec: QueueSpec, entry: JournalEntry, worker: str, announcements: Sequence[str] = ()
) -> None:
    """Write the row of a batch that is about to run, and fill in what the journal says of its jobs.

    It needs a deadline, since this transaction runs while the batch's own is open. A transaction that waits to lock
    both tables would wait for this Consumer, and this Consumer for it, and the server could not detect the deadlock.

    :param announcements: the announcements that the claim answers; the others are notified of it here, since the claim
        commits with its last job.
    """
    names = list(entry.names)
    values = {
        "its_id": entry.id,
        "its_keys": json.dumps(names),
        "its_starts": int(entry.solely_responsible),
        "its_worker": worker,
        **({"payload": str(Claimed(len(names), announcements))} if announcements else {}),
    }
    if engine_of(session.connection(bind_arguments={"mapper": spec.mapper}).dialect) is None:
        rows = _execute(session, spec, _insert_and_look(spec, notifies=bool(announcements)), values).all()
    else:
        rows = _look_and_insert(session, spec, values)
    deaths = Counter[str]()
    for found, starts in rows:
        # ``starts`` is 1 if the job ran alone; such a death counts twice.
        deaths.update(dict.fromkeys(set(names).intersection(found), 1 + starts))
    entry.quarantined = frozenset(deaths)
    entry.died_again = frozenset(name for name, times in deaths.items() if times > 1)
    entry.deaths = sum(starts for _, starts in rows) if len(names) == 1 else 0


@functools.lru_cache(maxsize=128)
def _insert_and_look(spec: QueueSpec, *, notifies: bool) -> AnySelect:
    """Return the statement that inserts a row, and selects those that other batches left behind for the same jobs."""
    journal = spec.side_tables[CRASH_JOURNAL]
    columns: dict[str, sa.ColumnElement[Any]] = {
        name: sa.bindparam(f"its_{name}", type_=journal.c[name].type) for name in ("id", "starts", "worker")
    }
    columns["keys"] = as_json(sa.bindparam("its_keys", "[]", sa.Text()))
    # Losing the row in a crash of the server costs nothing: the batch is gone with it.
    setting = set_setting("synchronous_commit", "off")
    payload = [notification(spec, sa.bindparam("payload", "", sa.Text()))] if notifies else []
    inserted = (
        sa.insert(journal).values(queue=spec.name, **columns).returning(setting, *payload).cte("sqlaqueue_entered")
    )
    # From the same parameter: to write out the names of a batch takes time, and the journal is mostly empty.
    mine = sa.select(sa.func.jsonb_array_elements_text(columns["keys"]))
    its = sa.func.jsonb_array_elements_text(journal.c["keys"]).table_valued(
        sa.column("name", sa.Text()), name="sqlaqueue_its"
    )
    # As a CASE a name is looked up in a hash; has_any() compares each with each, a million times for two batches.
    in_both = sa.exists().where(sa.case((its.c.name.in_(mine), sa.true()))).correlate(journal)
    known = sa.select(journal.c["keys"], journal.c.starts).where(journal.c.queue == spec.name)
    return known.where(in_both).add_cte(inserted)


def _look_and_insert(session: Session, spec: QueueSpec, values: Mapping[str, Any]) -> Sequence[Any]:
    """Do what :func:`_insert_and_look` does, on an engine that has no INSERT within a SELECT."""
    journal = spec.side_tables[CRASH_JOURNAL]
    # A row for each batch that is running; the caller compares their names.
    found = _execute(session, spec, sa.select(journal.c["keys"], journal.c.starts).where(journal.c.queue == spec.name))
    row = {"id": values["its_id"], "starts": values["its_starts"], "worker": values["its_worker"]}
    keys = as_json(sa.literal(values["its_keys"], sa.Text()))
    inserted: Any = sa.insert(journal).values(queue=spec.name, keys=keys, **row)
    if "payload" in values:
        inserted = inserted.returning(notification(spec, sa.literal(values["payload"], sa.Text())))
    rows: Sequence[Any] = found.all()
    _execute(session, spec, inserted)
    return rows


def left_entry(session: Session, spec: QueueSpec, worker: str, key: Key) -> JournalEntry | None:
    """Return the entry that a worker left behind when it died running this job alone; None if the run has ended."""
    journal, name = spec.side_tables[CRASH_JOURNAL], key_text(key)
    has_it = sa.and_(journal.c.queue == spec.name, HasName(journal.c["keys"], sa.literal(name, sa.Text())))
    rows = _execute(session, spec, sa.select(journal.c.id, journal.c.worker, journal.c.starts).where(has_it)).all()
    mine = next((row for row in rows if row.worker == worker), None)
    if mine is None:
        return None
    entry, others = JournalEntry((name,), solely_responsible=True), [row for row in rows if row is not mine]
    entry.id, entry.deaths = mine.id, sum(row.starts for row in others)
    entry.quarantined = frozenset([name] if others else [])
    return entry


def delete_entry(session: Session, spec: QueueSpec, entry: JournalEntry) -> bool:
    """Delete the row of a batch, and return whether it was there; other rows with its jobs stay."""
    journal = spec.side_tables[CRASH_JOURNAL]
    return bool(_execute(session, spec, sa.delete(journal).where(journal.c.id == entry.id)).rowcount)


def discard_entry(session: Session, spec: QueueSpec, entry: JournalEntry) -> None:
    """Delete the row of a batch that has ended, or reduce it to the jobs that ``entry`` keeps.

    It has a lock timeout: as in :func:`write_entry`, the server could not detect a deadlock.
    """
    _execute(session, spec, sa.select(set_setting("lock_timeout", "2s")))
    if entry.kept_names:
        _reduce_entry(session, spec, entry)
    else:
        delete_entry(session, spec, entry)
    session.commit()


def _reduce_entry(session: Session, spec: QueueSpec, entry: JournalEntry) -> None:
    # A crash of the server may have lost the row.
    names = as_json(sa.literal(json.dumps(entry.kept_names), sa.Text()))
    kept = {"keys": names, "starts": entry.kept_starts}
    row = {"id": entry.id, "queue": spec.name, "worker": worker_name(), **kept}
    _execute(session, spec, insert_or_replace(spec.side_tables[CRASH_JOURNAL], row, replaced=list(kept)))


def close_entry(session: Session, spec: QueueSpec, entry: JournalEntry) -> bool:
    """Delete the row of a batch whose runs are settled, and its only job from rows that were left behind.

    :return: whether the row of the batch was there.
    """
    was_open = delete_entry(session, spec, entry)
    if len(entry.names) == 1 and entry.quarantined:
        journal, name = spec.side_tables[CRASH_JOURNAL], entry.names[0]
        has_it = sa.and_(journal.c.queue == spec.name, HasName(journal.c["keys"], sa.literal(name, sa.Text())))
        if engine_of(session.connection(bind_arguments={"mapper": spec.mapper}).dialect) is not None:
            _remove_name(session, spec, has_it, name)
            return was_open
        remaining = journal.c["keys"].op("-")(sa.literal(name, sa.Text()))
        _execute(session, spec, sa.update(journal).where(has_it).values(keys=remaining))
        # In a statement of its own, which sees what another worker removed from the row while the UPDATE waited for it.
        empty = sa.and_(journal.c.queue == spec.name, sa.func.jsonb_array_length(journal.c["keys"]) == 0)
        _execute(session, spec, sa.delete(journal).where(empty))
    return was_open


def _remove_name(session: Session, spec: QueueSpec, has_it: sa.ColumnElement[bool], name: str) -> None:
    """Remove a name from rows of the journal, and delete those without any, for an engine without ``-`` for JSON."""
    journal = spec.side_tables[CRASH_JOURNAL]
    # Each row by its key: a scan would wait for rows that others delete, while these wait for the one of this batch.
    for id_ in _execute(session, spec, sa.select(journal.c.id).where(has_it).order_by(journal.c.id)).scalars().all():
        its = journal.c.id == id_
        names = _execute(session, spec, sa.select(journal.c["keys"]).where(its).with_for_update()).scalar() or []
        left = [each for each in names if each != name]
        text = as_json(sa.literal(json.dumps(left), sa.Text()))
        changed = sa.update(journal).where(its).values(keys=text) if left else sa.delete(journal).where(its)
        _execute(session, spec, changed)


def delete_old_entries(session: Session, spec: QueueSpec) -> None:
    """Delete rows so old that their jobs have been settled by other means."""
    journal = spec.side_tables[CRASH_JOURNAL]
    old = sa.and_(journal.c.queue == spec.name, journal.c.created_at < earlier(clock(), _KEEP))
    _execute(session, spec, sa.delete(journal).where(old))


def _execute(session: Session, spec: QueueSpec, statement: sa.Executable, values: dict[str, Any] | None = None) -> Any:
    # A session with several engines chooses one by the mapper.
    return session.execute(statement, values, bind_arguments={"mapper": spec.mapper})
