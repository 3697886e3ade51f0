"""What was done by the dashboard: the last actions in memory, or all of them in a table of the application.

The table is a class of the application, as a job is::

    class Action(AuditMixin, Base):
        __tablename__ = "queue_action"


    Dashboard([Email], sessions, access=access, audit=Action)
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Mapped, Session, mapped_column

from sqlaqueue.admin.state import in_utc
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.sql.portable import clock

_MOST_KEYS = 100


def short_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about an action without those that say nothing, and with some of many keys."""
    found = {name: value for name, value in facts.items() if value not in (None, "", [], {})}
    keys = found.get("keys", ())
    if len(keys) > _MOST_KEYS:
        found["keys"] = [*keys[:_MOST_KEYS], f"and {len(keys) - _MOST_KEYS} more"]
    return found


@dataclass(frozen=True, kw_only=True)
class Record:
    """An action of a user."""

    id: int = 0
    """0 until it is stored."""
    at: datetime
    user: str
    action: str
    queue: str
    count: int | None = None
    """The number of jobs that were changed; None for an action on something else."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Keys, a filter, or what else there is to say."""
    changes: Mapping[str, Any] | None = None
    """What it has changed, if it can be undone. Lists of actions are without it."""
    undone_at: datetime | None = None


class AuditMixin:
    """The columns of a table in which a dashboard keeps who did what, and when, to which jobs.

    ::

        class Action(AuditMixin, Base):
            __tablename__ = "queue_action"


        Dashboard([Email], sessionmaker(engine), access=lambda request: Access(read=True), audit=Action)

    The dashboard inserts a row for each action, and shows them on the page *Audit*. It deletes none: delete old ones
    as you like.
    """

    id: Mapped[int] = mapped_column(sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True)
    at: Mapped[datetime] = mapped_column(sa.DateTime(timezone=True), index=True)
    """When it was done, by the clock of the database."""
    user_name: Mapped[str] = mapped_column(sa.String(200))
    """``Access(user=...)``."""
    action: Mapped[str] = mapped_column(sa.String(50))
    queue: Mapped[str] = mapped_column(sa.String(200))
    count: Mapped[int | None] = mapped_column(sa.Integer)
    """The number of jobs that were changed; None for an action on something else."""
    facts: Mapped[dict[str, Any]] = mapped_column(sa.JSON)
    """Keys, a filter, or what else there is to say."""
    changes: Mapped[dict[str, Any] | None] = mapped_column(sa.JSON(none_as_null=True), deferred=True)
    """What it has changed, if it can be undone."""
    undone_at: Mapped[datetime | None] = mapped_column(sa.DateTime(timezone=True))


def check_audit(given: Any) -> type[Any] | None:
    """Return the class that ``Dashboard(audit=...)`` names; None without one."""
    if given is None:
        return None
    mapper = sa.inspect(given, raiseerr=False) if isinstance(given, type) and issubclass(given, AuditMixin) else None
    if mapper is None:
        raise ConfigurationError(
            f"Dashboard(audit={given!r}): give a mapped class that inherits AuditMixin, as in "
            "class Action(AuditMixin, Base): __tablename__ = 'queue_action'"
        )
    model: type[Any] = given
    return model


# -- in a table --------------------------------------------------------------------------------------------------------


def insert_record(session: Session, model: type[Any], record: Record) -> int:
    """Store an action, commit, and return its id."""
    row = model(
        at=clock(),
        user_name=record.user[:200],
        action=record.action,
        queue=record.queue,
        count=record.count,
        facts=dict(record.facts),
        changes=record.changes,
    )
    session.add(row)
    session.flush()
    found: int = row.id
    session.commit()
    return found


def read_record(session: Session, model: type[Any], number: int, queue: str) -> Record | None:
    """Return an action on a queue with what it has changed."""
    found = sa.select(model, model.changes).where(model.id == number, model.queue == queue)
    row = session.execute(found, bind_arguments={"mapper": sa.inspect(model)}).one_or_none()
    return None if row is None else replace(_record(row[0]), changes=row[1])


def read_records(
    session: Session, model: type[Any], queues: Collection[str], before: int | None, limit: int
) -> Sequence[Record]:
    """Return the newest actions on some queues, before one that is given by its id."""
    earlier = [] if before is None else [model.id < before]
    rows = sa.select(model).where(model.queue.in_(sorted(queues)), *earlier).order_by(model.id.desc()).limit(limit)
    return [_record(row) for row in session.scalars(rows, bind_arguments={"mapper": sa.inspect(model)})]


def note_undone(session: Session, model: type[Any], number: int) -> int:
    """Store that an action was undone, commit, and return its id."""
    mark = sa.update(model).where(model.id == number).values(undone_at=clock())
    options = {"synchronize_session": False}
    session.execute(mark, execution_options=options, bind_arguments={"mapper": sa.inspect(model)})
    session.commit()
    return number


def _record(row: Any) -> Record:
    return Record(
        id=row.id,
        at=in_utc(row.at),
        user=row.user_name,
        action=row.action,
        queue=row.queue,
        count=row.count,
        facts=row.facts or {},
        undone_at=None if row.undone_at is None else in_utc(row.undone_at),
    )


# -- in memory ---------------------------------------------------------------------------------------------------------

MOST_RECORDS = 100
MOST_CHANGES = 20_000
"""How many actions, and how many changed jobs of them, a process remembers without a table."""


class Memory:
    """The last actions of this process, so that they can be undone without a table."""

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}

    def add(self, record: Record) -> int:
        # A random number: that of another process is none of this one.
        number = random.getrandbits(53) | 1
        self._records[number] = replace(record, id=number)
        while len(self._records) > 1 and (len(self._records) > MOST_RECORDS or self._size() > MOST_CHANGES):
            del self._records[next(iter(self._records))]
        return number

    def _size(self) -> int:
        return sum(len((each.changes or {}).get("jobs", ())) for each in self._records.values())

    def get(self, number: int, queue: str) -> Record | None:
        found = self._records.get(number)
        return found if found is not None and found.queue == queue else None

    def note_undone(self, number: int) -> None:
        if number in self._records:
            self._records[number] = replace(self._records[number], undone_at=datetime.now(UTC))
