"""What VACUUM has to do with the tables of a queue, how large they are, and who keeps it from removing dead rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.orm import Session

from sqlaqueue.admin.doctor.vacuum import describe_session
from sqlaqueue.admin.jobs import bind_arguments
from sqlaqueue.postgresql.facts import HorizonHolders, IndexSize, TableStatistics
from sqlaqueue.postgresql.server import horizon_holders, index_sizes, table_statistics
from sqlaqueue.queue.names import ATTEMPT, DEAD_LETTER
from sqlaqueue.queue.spec import QueueSpec

_GROWING = (ATTEMPT, DEAD_LETTER)
"""The side tables that grow with the number of jobs, beside those that a claim locks."""

_MOST = 5


@dataclass(frozen=True, kw_only=True)
class QueueTable:
    """One table of a queue with the indexes that the models declare; of a partitioned one, each partition."""

    statistics: TableStatistics
    indexes: Sequence[IndexSize]


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Something that keeps VACUUM from removing rows that have died since it began."""

    what: str
    """A session with its pid and role, a prepared transaction, a replication slot or a standby."""
    doing: str
    """Such as ``idle in transaction``; empty if that is not known."""
    since: datetime | None
    """None if that is not known."""
    age: int
    """How many transactions have begun since."""


@dataclass(frozen=True, kw_only=True)
class Horizon:
    """What keeps dead rows of the database, the oldest first."""

    holders: Sequence[Holder]
    hidden: int
    """How many sessions the role may not see into."""


def read_tables(session: Session, spec: QueueSpec) -> list[QueueTable]:
    """Return the tables of a queue."""
    connection = session.connection(bind_arguments=bind_arguments(spec.model))
    tables = [spec.table, *spec.strategy.locked_tables(spec)]
    tables += [spec.side_tables[name] for name in _GROWING if name in spec.side_tables]
    found = []
    for table in dict.fromkeys(tables):
        statistics = table_statistics(connection, table)
        declared = [*table.indexes, *(index for index in spec.claim_indexes if index.table is table)]
        indexes = index_sizes(connection, table, dict.fromkeys(declared))
        # The indexes of a partitioned table are listed with its first partition.
        found += [
            QueueTable(statistics=each, indexes=indexes if number == 0 else ())
            for number, each in enumerate(statistics)
        ]
    return found


def read_horizon(session: Session, spec: QueueSpec) -> Horizon:
    """Return what keeps dead rows of the queue's database, without the text of any statement."""
    connection = session.connection(bind_arguments=bind_arguments(spec.model))
    holders = horizon_holders(connection)
    return Horizon(holders=sorted(_holders(holders), key=lambda each: -each.age)[:_MOST], hidden=holders.hidden)


def _holders(holders: HorizonHolders) -> Iterator[Holder]:
    for session in holders.sessions:
        yield Holder(what=describe_session(session), doing=session.state or "", since=session.since, age=session.age)
    for prepared in holders.prepared:
        what = f"Prepared transaction {prepared.gid!r} of the role {prepared.owner}"
        yield Holder(what=what, doing="prepared", since=prepared.since, age=prepared.age)
    for slot in holders.slots:
        if slot.age is not None:
            doing = "not in use" if slot.active_pid is None else "in use"
            what = f"Replication slot {slot.name}"
            yield Holder(what=what, doing=doing, since=slot.inactive_since, age=slot.age)
    for standby in holders.standbys:
        what = f"Standby {standby.application!r} (process {standby.pid})"
        yield Holder(what=what, doing="hot_standby_feedback", since=None, age=standby.age)
