"""The library's own tables, in the model's MetaData: controls, Consumers, dead letters, attempts, rates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.elements import conv
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.selectable import NamedFromClause

from sqlaqueue.notify_payloads import Signal
from sqlaqueue.postgresql.triggers import notification, wakes
from sqlaqueue.queue.names import ATTEMPT, CONSUMERS, CONTROL, CRASH_JOURNAL, DEAD_LETTER, MINUTE, RATE
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.versions import table_comment
from sqlaqueue.sql.portable import Called, MomentOfInsert, clock, converted, json_array
from sqlaqueue.sql.types import insert_or_ignore, insert_or_replace

PAUSE: sa.ColumnElement[Any] = converted(sa.literal_column("'[]'"), JSONB())
"""The key of the row that pauses a queue; no job has it."""

_LONGEST, _SHOWN = 2000, 100
"""The bytes of the longest key that a side table has as a whole, and the characters that it has of a longer one.

An entry of an index has 2,704 bytes at most, and that of a side table contains the name of the queue as well.
"""

_SHORT = (sa.Boolean, sa.Date, sa.DateTime, sa.Double, sa.Integer, sa.Interval, sa.Time, sa.Uuid)
"""Types whose values are never long. The statements of queues with such keys stay as simple as they are."""


def as_json(text: sa.ColumnElement[str]) -> sa.ColumnElement[Any]:
    """Return JSON in a text as a value of a side table.

    SQLAlchemy cannot write a parameter of type JSONB as a literal, which some applications do to log statements.
    """
    return converted(text, JSONB())


class HasName(FunctionElement[bool]):
    """The condition that a text is among those of a JSON array.

    :param names: the column with the array.
    :param name: the text.
    """

    inherit_cache = True
    type = sa.Boolean()

    def __init__(self, names: sa.ColumnElement[Any], name: sa.ColumnElement[str]) -> None:
        super().__init__(names, name)

    def self_group(self, against: Any = None) -> Any:
        """Return the condition as it is: the base class adds ``= 1`` for databases without booleans."""
        return self


@compiles(HasName)
def _render_has_name(element: HasName, compiler: Any, **options: Any) -> str:
    names, name = element.clauses
    return str(compiler.process(names.has_key(name), **options))


def key_json(columns: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[Any]:
    """Return the key in ``columns`` as the JSON array that identifies a job in side tables.

    A key that is too long for their indexes, though the index of the primary key has it, is replaced by its beginning
    and a digest.
    """
    whole = _whole_key(columns)
    if all(isinstance(column.type, _SHORT) for column in columns):
        return whole
    text = sa.cast(whole, sa.Text())
    encoded = sa.func.convert_to(text, sa.func.getdatabaseencoding())
    digest = sa.func.encode(sa.func.sha256(encoded), _text("hex"), type_=sa.Text())
    short = sa.func.left(text, _integer(_SHOWN), type_=sa.Text()) + _text("... sha256:") + digest
    too_long = sa.func.octet_length(text, type_=sa.Integer()) > _integer(_LONGEST)
    return KeyInIndex((too_long, _whole_key([short])), else_=whole)


class KeyInIndex(sa.Case[Any]):
    """A key, or what replaces one that is too long for an index; other engines write the key."""

    inherit_cache = True


def _whole_key(columns: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[Any]:
    return json_array(*columns)


def _text(text: str) -> sa.ColumnElement[str]:
    return sa.literal_column(f"'{text}'", sa.Text())


def _integer(number: int) -> sa.ColumnElement[int]:
    return sa.literal_column(str(number), sa.Integer())


def key_text(columns: Iterable[sa.ColumnElement[Any]]) -> sa.ColumnElement[str]:
    """Return the whole key as a text, in which two keys are never equal."""
    return converted(_whole_key([*columns]), sa.Text())


def pause_row(spec: QueueSpec) -> sa.Insert:
    return insert_or_ignore(spec.side_tables[CONTROL], {"queue": spec.name, "key": PAUSE, "created_at": clock()})


MOST_OF_REASON, MOST_OF_AUTHOR = 200, 50
"""The characters of the reason of a pause, and of its author: both are in a key, which some engines limit."""


def pause_note(spec: QueueSpec) -> str:
    """Return what the row with the reason of a pause has instead of the name of the queue.

    So no statement of a claim or a Consumer reads it. Its key is an array of the reason and the author, and its moment
    is that of the pause, so that one that is left from an earlier pause says nothing.
    """
    return f"sqlaqueue_pause {spec.name}"


def request_cancellation(spec: QueueSpec, running: sa.FromClause) -> sa.Insert:
    """Return the statement that requests the cancellation of the jobs whose keys are in ``running``."""
    keys = [running.corresponding_column(column) for column in spec.keys]
    rows = sa.select(sa.literal(spec.name), key_json([key for key in keys if key is not None]), clock())
    requested = insert_or_replace(
        spec.side_tables[CONTROL], (["queue", "key", "created_at"], rows.select_from(running)), replaced=["created_at"]
    )
    return requested.returning(notification(spec, Signal.CANCEL_REQUESTED)) if wakes(spec) else requested


ConsumerRequest = Literal["quiet", "stop"]
"""What a Consumer can be asked: to claim no more jobs, or to stop as after SIGTERM."""

REQUESTS: tuple[ConsumerRequest, ...] = get_args(ConsumerRequest)


def request_key(request: ConsumerRequest, consumer: sa.ColumnElement[str]) -> sa.ColumnElement[Any]:
    """Return the key of the row with a request to a Consumer, given by its id; no job has it.

    An id is random, and each run of a Consumer has another one: no later run finds the request.
    """
    return json_array(_text(f"sqlaqueue_{request}"), consumer)


def request_of_consumer(spec: QueueSpec, request: ConsumerRequest, consumer: str) -> sa.Insert:
    """Return the statement that asks a Consumer, given by its id, for something."""
    key = request_key(request, sa.literal(consumer, sa.Text()))
    asked = insert_or_ignore(spec.side_tables[CONTROL], {"queue": spec.name, "key": key, "created_at": clock()})
    return asked.returning(notification(spec, Signal.CONSUMER_REQUESTED)) if wakes(spec) else asked


def withdraw_request(spec: QueueSpec, request: ConsumerRequest, consumer: str) -> Any:
    """Return the statement that withdraws what a Consumer was asked."""
    control, key = spec.side_tables[CONTROL], request_key(request, sa.literal(consumer, sa.Text()))
    gone: Any = sa.delete(control).where(control.c.queue == spec.name, control.c.key == key)
    return gone.returning(notification(spec, Signal.CONSUMER_REQUESTED)) if wakes(spec) else gone


def is_requested(spec: QueueSpec, request: ConsumerRequest, consumer: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
    """Return whether a Consumer, given by its id, was asked for something."""
    control = spec.side_tables[CONTROL]
    asked = sa.exists().where(control.c.queue == spec.name, control.c.key == request_key(request, consumer))
    return asked.correlate_except(control)


def is_of_live_consumer(spec: QueueSpec) -> sa.ColumnElement[bool]:
    """Return whether a row of the control table is a request to a Consumer that is alive."""
    control, alive = spec.side_tables[CONTROL], spec.side_tables[CONSUMERS]
    keys = [control.c.key == request_key(request, alive.c.id) for request in REQUESTS]
    lives = sa.exists().where(alive.c.queue == spec.name, alive.c.expires_at > clock(), sa.or_(*keys))
    return lives.correlate(control)


class RowJson(Called):
    """A row as a JSON object."""

    inherit_cache = True

    @property
    def columns(self) -> Any:
        """The columns of the row."""
        row: Any = next(iter(self.clauses))
        return row.scalar_alias.c


class StoredRows(sa.TableValuedAlias):
    """The row in a JSON object, as a table with one row."""

    inherit_cache = True

    @property
    def row(self) -> Any:
        """The JSON object."""
        function: Any = self.element
        return next(iter(function.clauses))


def bury(spec: QueueSpec, rows: NamedFromClause, state: str, error: Any) -> sa.Insert:
    buried = sa.select(
        sa.literal(spec.name, sa.Text()),
        key_json([rows.c[key.key] for key in spec.keys]),
        # Not jsonb_build_object(): a function takes a hundred arguments, and a table may have more columns.
        RowJson("to_jsonb", rows.table_valued(), type_=JSONB()),
        sa.literal(state, sa.Text()),
        converted(error, sa.Text()),
        clock(),
    )
    columns = ["queue", "key", "row", "state", "error", "created_at"]
    replaced = ["row", "state", "error", "created_at"]
    return insert_or_replace(spec.side_tables[DEAD_LETTER], (columns, buried), replaced=replaced)


def stored_rows(row: sa.ColumnElement[Any], columns: Sequence[sa.Column[Any]]) -> sa.TableValuedAlias:
    """Return the stored row of each dead letter as a table with the given columns, to be joined on true."""
    record = sa.func.jsonb_to_record(row).table_valued(
        *(sa.column(column.key, column.type) for column in columns), name="sqlaqueue_letter", joins_implicitly=True
    )
    rows: Any = record.render_derived("sqlaqueue_letter", with_types=True)
    # table_valued() makes no other class.
    rows.__class__ = StoredRows
    stored: sa.TableValuedAlias = rows
    return stored


# -- tables ------------------------------------------------------------------------------------------------------------
# They are in the model's MetaData and schema, under names that begin with ``sqlaqueue_``. None has a foreign key to the
# user's tables: a second connection would wait for the very rows that a batch has locked.


def _table(spec: QueueSpec, name: str, *columns: sa.Column[Any] | sa.Index) -> sa.Table:
    metadata, schema = spec.table.metadata, spec.table.schema
    known = metadata.tables.get(f"{schema}.{name}" if schema else name)
    if known is None:
        comment = table_comment(name)
        known = sa.Table(name, metadata, *columns, schema=schema or sa.BLANK_SCHEMA, comment=comment)
    spec.side_tables[name] = known
    return known


def _created_at() -> sa.Column[Any]:
    return sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=MomentOfInsert())


def control(spec: QueueSpec) -> sa.Table:
    """Requests to cancel running jobs, whose rows may be locked for as long as they run, and paused queues."""
    return _table(
        spec,
        CONTROL,
        sa.Column("queue", sa.Text(), primary_key=True),
        sa.Column("key", JSONB(), primary_key=True),
        _created_at(),
    )


def consumers(spec: QueueSpec) -> sa.Table:
    """The Consumers that are alive, with their last heartbeat."""
    moment = sa.DateTime(timezone=True)
    return _table(
        spec,
        CONSUMERS,
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("name", sa.Text()),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("listening", sa.Boolean(), nullable=False),
        sa.Column("running", JSONB(), nullable=False),
        # With a server default for Consumers of an older version, which do not write these columns.
        sa.Column("claimed", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("unclaimable", JSONB(), nullable=False, server_default=sa.text("'[]'")),
        sa.Column("heartbeat_at", moment, nullable=False),
        sa.Column("expires_at", moment, nullable=False),
        _created_at(),
    )


def crash_journal(spec: QueueSpec) -> sa.Table:
    """The batches that are about to run in a held transaction, which a dead worker's rollback does not undo."""
    return _table(
        spec,
        CRASH_JOURNAL,
        sa.Column("id", sa.Uuid(), primary_key=True),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("keys", JSONB(), nullable=False),
        sa.Column("starts", sa.Integer(), nullable=False),
        sa.Column("worker", sa.Text()),
        _created_at(),
    )


def dead_letter(spec: QueueSpec) -> sa.Table:
    """The jobs that failed for good in a queue whose claims delete rows."""
    return _table(
        spec,
        DEAD_LETTER,
        sa.Column("queue", sa.Text(), primary_key=True),
        sa.Column("key", JSONB(), primary_key=True),
        sa.Column("row", JSONB(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("error", sa.Text()),
        _created_at(),
    )


def rate(spec: QueueSpec) -> sa.Table:
    """When the next job of each key of a rate may begin."""
    moment = sa.DateTime(timezone=True)
    return _table(
        spec,
        RATE,
        sa.Column("queue", sa.Text(), primary_key=True),
        sa.Column("rate", sa.Text(), primary_key=True),
        sa.Column("key", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("next_at", moment, nullable=False),
        sa.Column("throttled_until", moment),
    )


def attempt(spec: QueueSpec) -> sa.Table:
    """The ended attempts of queues with an attempt history.

    Each index costs WAL for every run, so there are two besides the primary key: one for the attempts of a job, which
    are few and sorted when they are read, and one for the retention and for queries of a span of time.
    """
    moment = sa.DateTime(timezone=True)
    return _table(
        spec,
        ATTEMPT,
        sa.Column("id", sa.BigInteger(), sa.Identity(), primary_key=True),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("key", JSONB(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("started_at", moment),
        sa.Column("ended_at", moment, nullable=False),
        sa.Column("worker", sa.Text()),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("error", sa.Text()),
        sa.Column("traceback", sa.Text()),
        # Their names are not subject to a naming convention of the MetaData.
        sa.Index(conv(f"ix_{ATTEMPT}_job"), "queue", "key"),
        sa.Index(conv(f"ix_{ATTEMPT}_ended"), "queue", "ended_at"),
    )


BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 900, 3600, 14400, 86400)
"""The upper bounds in seconds of the classes into which wait and run times are counted; the last class has none."""

ENDINGS = ("completed", "retried", "failed", "cancelled")
WAITS, RUNS = (tuple(f"{kind}_{number}" for number in range(len(BOUNDS) + 1)) for kind in ("wait", "run"))
COUNTED = (*ENDINGS, *WAITS, *RUNS)
"""The columns of the table of minutes that are summed up."""
MEASURED = ("pending", "due", "oldest_due")
"""Its columns of which the highest value counts."""


def minute(spec: QueueSpec) -> sa.Table:
    """What has ended in each minute of queues with statistics, and how deep they were.

    The minute is a number, as periods of it are then the same SQL everywhere. Nothing is NULL rather than 0: most
    classes of a minute are empty, and take no space.
    """
    return _table(
        spec,
        MINUTE,
        sa.Column("queue", sa.Text(), primary_key=True),
        # Minutes since 1970, in UTC.
        sa.Column("minute", sa.Integer(), primary_key=True, autoincrement=False),
        *(sa.Column(name, sa.Integer()) for name in (*MEASURED, *COUNTED)),
    )
