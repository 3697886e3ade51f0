"""What the pages read in another way on each database, all in one place.

Expressions are given once for each engine, see :func:`sqlaqueue.sql.portable.by_engine`. What is no expression, such as
the settings of a planner or the indexes of a table, is a method of :class:`Pages`, which :func:`pages_of` chooses.
"""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.postgresql import catalog_indexes
from sqlaqueue.postgresql.catalog import missing_tables
from sqlaqueue.postgresql.catalog_text import table_oid
from sqlaqueue.postgresql.due_times import row_version as xmin
from sqlaqueue.postgresql.facts import Form, OrderedIndex
from sqlaqueue.postgresql.plans import explain
from sqlaqueue.postgresql.server import table_statistics
from sqlaqueue.sql.engine import engine_of, schema_of
from sqlaqueue.sql.portable import after_epoch, by_engine, clock, converted, epoch, joined
from sqlaqueue.sql.types import key_hash, period

Column = sa.ColumnElement[Any]

MOMENT = sa.DateTime(timezone=True)

# -- values as texts ---------------------------------------------------------------------------------------------------


def plain_type(type_: Any) -> Any:
    """Return the type without the conversions of the application."""
    # Interval is one that stores moments, but for databases that have intervals.
    while isinstance(type_, sa.types.TypeDecorator) and not isinstance(type_, sa.Interval):
        type_ = type_.impl_instance
    return type_


def text_of(value: Column) -> Column:
    """Return a value as a text, as PostgreSQL writes it."""
    if isinstance(plain_type(value.type), sa.Boolean):
        number = sa.type_coerce(value, sa.Integer())
        words = sa.case({1: "true", 0: "false"}, value=number)
        return by_engine(sa.cast(value, sa.Text()), sa.type_coerce(words, sa.Text()))
    return converted(value, sa.Text())


def beginning(text: Column, length: int) -> Column:
    """Return the first characters of a text."""
    return by_engine(sa.func.left(text, length, type_=sa.Text()), sa.func.substr(text, 1, length, type_=sa.Text()))


def characters(text: Column) -> Column:
    """Return how many characters a text has."""
    number = sa.func.length(text, type_=sa.Integer())
    return by_engine(number, number, sa.func.char_length(text, type_=sa.Integer()))


def octets(value: Column) -> Column:
    """Return how many bytes a text or a binary value has."""
    number = sa.func.octet_length(value, type_=sa.Integer())
    in_sqlite = sa.func.length(sa.cast(value, sa.LargeBinary()), type_=sa.Integer())
    return by_engine(number, in_sqlite, number)


def stored_size(value: Column) -> Column:
    """Return the bytes that a value takes in the table; on PostgreSQL without reading it."""
    size = octets(value)
    return by_engine(catalog_indexes.stored_size(value), size)


_MOST = 16 * 1024 * 1024
"""The bytes of a large value up to which it is read whole where it is not compressed."""


def can_be_converted(value: Column) -> Column:
    """Return whether a large value can be read whole for the page of one job."""
    return by_engine(catalog_indexes.can_be_converted(value), octets(value) <= _MOST)


def shown_text(value: Column, form: Form, length: int) -> Column:
    """Return the beginning of a value as a text; NULL for a value that is too large to read."""
    in_postgresql = catalog_indexes.shown_text(value, form, length)
    if form in {"text", "short"}:
        # A boolean has words for its values.
        return by_engine(in_postgresql, beginning(text_of(value), length))
    if form == "bytes":
        digits = sa.literal("\\x", sa.Text()).concat(_hexadecimal(sa.func.substr(value, 1, length // 2 + 1)))
        # hex() of NULL is an empty text on SQLite.
        return by_engine(in_postgresql, sa.case((value.is_not(None), beginning(digits, length))))
    if form == "moment":
        return by_engine(in_postgresql, _iso(value))
    return by_engine(in_postgresql, sa.case((octets(value) <= _MOST, beginning(text_of(value), length))))


def _hexadecimal(value: Column) -> Column:
    return sa.func.lower(sa.func.hex(value), type_=sa.Text())


def _is_binary(value: Column) -> bool:
    return isinstance(plain_type(value.type), sa.LargeBinary)


def _iso(value: Column) -> Column:
    """Return a moment or a day in the form of ISO 8601; moments with a zone are stored in UTC."""
    type_, text = plain_type(value.type), text_of(value)
    if not isinstance(type_, sa.DateTime):
        return text
    moment = sa.func.replace(text, " ", "T", type_=sa.Text())
    return moment.concat(sa.literal("+00:00", sa.Text())) if type_.timezone else moment


def typed_text(text: str, type_: Any) -> Column:
    """Return the value of a type that a text stands for; the database converts it, where it can."""
    in_postgresql = sa.cast(sa.literal(text, sa.Text()), type_)
    return by_engine(in_postgresql, _parsed(text, type_, sa.Numeric()), _parsed(text, type_, sa.Numeric(65, 30)))


def _parsed(text: str, type_: Any, number: Any) -> Column:
    if isinstance(type_, sa.Numeric | sa.Float):
        as_number: Any = sa.Double() if isinstance(type_, sa.Float) else number
        return sa.cast(sa.literal(text, sa.Text()), as_number)
    try:
        value = _value(text, type_)
    except ValueError:
        # Such as infinity, which only PostgreSQL has: nothing is equal to it.
        return sa.cast(sa.null(), sa.Text())
    return sa.literal(value, sa.Text() if value is text else type_)


def _value(text: str, type_: Any) -> Any:
    """Return what a text of :func:`text_of` stands for; the text itself, if the database converts it."""
    readers: tuple[tuple[Any, Callable[[str], Any]], ...] = (
        (sa.Uuid, lambda given: uuid.UUID(given) if type_.as_uuid else str(uuid.UUID(given))),
        (sa.DateTime, datetime.fromisoformat),
        (sa.Date, date.fromisoformat),
        (sa.Boolean, lambda given: given in {"true", "1"}),
        (sa.Integer, int),
    )
    read = next((each for kind, each in readers if isinstance(type_, kind)), None)
    return text if read is None else read(text)


# -- conditions --------------------------------------------------------------------------------------------------------


def starts_with(text: Column, part: Column) -> Column:
    start = sa.func.substr(text, 1, characters(part), type_=sa.Text())
    return by_engine(sa.func.starts_with(text, part, type_=sa.Boolean()), start == part)


def contains(text: Column, part: Column) -> Column:
    """Return whether a text has another one in it, in upper or lower case; SQLite knows only those of ASCII."""
    both = (sa.func.lower(text), sa.func.lower(part))
    in_postgresql = sa.func.strpos(*both, type_=sa.Integer()) > 0
    return by_engine(in_postgresql, sa.func.instr(*both, type_=sa.Integer()) > 0)


def text_at(document: Column, path: tuple[str, ...]) -> Column:
    """Return the value at a path of a JSON document as a text."""
    stored: Any = sa.type_coerce(document, sa.JSON())
    in_postgresql: Column = stored[path].as_string()
    # There a number is the name of a member and a place in an array, elsewhere one of the two.
    paths = dict.fromkeys([path, tuple(int(part) if _is_place(part) else part for part in path)])
    texts = [stored[each].as_string() for each in paths]
    in_sqlite = [_text_in_sqlite(stored, each, text) for each, text in zip(paths, texts, strict=True)]
    return by_engine(in_postgresql, _first_of(in_sqlite), _first_of(texts))


def _is_place(part: str) -> bool:
    return part.isascii() and part.isdigit()


def _first_of(texts: Sequence[Column]) -> Column:
    return texts[0] if len(texts) == 1 else sa.func.coalesce(*texts, type_=sa.Text())


def _text_in_sqlite(document: Column, path: tuple[str | int, ...], text: Column) -> Column:
    """Return a value in JSON as PostgreSQL writes it: SQLite has numbers for true and false."""
    names = "".join(f"[{part}]" if isinstance(part, int) else f'."{part}"' for part in path)
    kind = sa.func.json_type(document, f"${names}", type_=sa.Text())
    return sa.case((kind.in_(["true", "false"]), kind), else_=sa.cast(text, sa.Text()))


def without_zone(moment: Column) -> Column:
    """Return a moment as columns without a time zone have it: in UTC."""
    in_postgresql = sa.func.timezone(sa.literal("UTC", sa.Text()), moment, type_=sa.DateTime())
    return by_engine(in_postgresql, sa.type_coerce(moment, sa.DateTime()))


# -- rows and moments --------------------------------------------------------------------------------------------------

_HASHED = 50
"""How many values one hash has: functions of SQLite take about a hundred."""


def row_version(rows: sa.Table, columns: Sequence[Column]) -> Column:
    """Return a text that changes whenever a row is written; where rows have no version, a hash of some columns."""
    # As texts of one collation: MariaDB refuses several in one hash.
    values = [text_of(_hexadecimal(each) if _is_binary(each) else each) for each in columns]
    parts = [values[start : start + _HASHED] for start in range(0, len(values), _HASHED)]
    hashes = [converted(key_hash(part), sa.Text()) for part in parts]
    return by_engine(xmin(rows), joined(*hashes))


def whole_number(number: Column) -> Column:
    """Return a number that is not negative without what follows the point."""
    floored = sa.cast(sa.func.floor(number), sa.Integer())
    return by_engine(floored, sa.cast(number, sa.Integer()), floored)


def begin_of_period(length: Any, moment: Column) -> Column:
    """Return when the period begins to which a moment belongs."""
    seconds = length.total_seconds()
    number = whole_number(epoch(moment) / seconds)
    return by_engine(period(length, moment), after_epoch(number * seconds))


# -- what is no expression ---------------------------------------------------------------------------------------------


class Pages:
    """How the pages read PostgreSQL."""

    title = "PostgreSQL"
    merges_parts = True
    """Whether the server merges the parts of a UNION, each in the order of an index."""
    finds_due = True
    """Whether due jobs are found priority by priority."""
    has_lateral = True
    has_plans = True
    """Whether it tells the plan of a claim with its buffers, the sizes of tables, and who keeps dead rows."""
    has_notifications = True

    def begin(self, session: Session, settings: Mapping[str, str], bind: Mapping[str, Any]) -> datetime:
        """Return the present moment, and change settings until the end of the transaction."""
        calls = [sa.func.set_config(name, value, sa.true()) for name, value in settings.items()]
        row: Any = session.execute(sa.select(clock(), *calls), bind_arguments={**bind}).one()
        now: datetime = row[0]
        return now

    def set_planner(self, session: Session, bind: Mapping[str, Any]) -> None:
        """Keep the server from plans that read a table whole, until the transaction ends."""
        calls = [sa.func.set_config(name, value, sa.true()) for name, value in catalog_indexes.SETTINGS.items()]
        session.execute(sa.select(*calls), bind_arguments={**bind})

    def given_text(self, name: str, type_: Any) -> Column:
        """Return a parameter as a value of a type; a statement is executed with what :meth:`given_value` returns."""
        return sa.cast(sa.bindparam(name, type_=sa.Text()), type_)

    def given_value(self, text: str | None, type_: Any) -> Any:
        """Return what stands for a text of a value in the parameters of a statement."""
        return text

    def is_small(self, connection: sa.Connection, table: sa.Table, most: int) -> bool:
        """Return whether a table has so few bytes that it may be read whole."""
        return sum(each.size for each in table_statistics(connection, table)) <= most

    def is_bounded(self, connection: sa.Connection, statement: Any) -> bool:
        """Return whether a SELECT with a LIMIT reads no more rows than it returns, by its plan."""
        nodes = [*explain(connection, statement).root.nodes()]
        reads = (node for node in nodes if node.relation is not None)
        by_index = all(node.kind in {"Index Scan", "Index Only Scan"} and not node.filtered for node in reads)
        return by_index and not any(node.kind in {"Sort", "Incremental Sort"} for node in nodes)

    def has_table(self, connection: sa.Connection, table: sa.Table) -> bool:
        return not missing_tables(connection, [table])

    def table_id(self, connection: sa.Connection, table: sa.Table) -> Any:
        """Return by what the indexes of a table are remembered; None for a table that does not exist."""
        return table_oid(connection, table)

    def ordered_indexes(self, connection: sa.Connection, table_id: Any) -> Sequence[OrderedIndex]:
        """Return the indexes whose entries are in order."""
        return catalog_indexes.ordered_indexes(connection, table_id)

    def percentiles(self, execute: Callable[[Any], Any], durations: AnySelect) -> tuple[int, float, Sequence[float]]:
        """Return how many times there are, the longest, and those below which half, 95 % and 99 % are."""
        seconds = durations.subquery("sqlaqueue_durations").c.seconds
        # Two clocks, or two transactions, may differ by a moment.
        positive = sa.func.greatest(seconds, 0)
        shares = sa.literal([0.5, 0.95, 0.99], sa.ARRAY(sa.Float()))
        found = sa.func.percentile_cont(shares).within_group(positive)
        query = sa.select(sa.func.count(seconds), sa.func.max(positive), sa.type_coerce(found, sa.ARRAY(sa.Float())))
        number, longest, values = execute(query.where(seconds.is_not(None))).one()
        return number, longest, values


class _OtherPages(Pages):
    """How the pages read a database without a plan that tells what a statement reads.

    They promise no time there: a part that takes longer than its timeout is left out, with a line that says so.
    """

    merges_parts = finds_due = has_lateral = has_plans = has_notifications = False
    indexes: sa.TextClause

    def begin(self, session: Session, settings: Mapping[str, str], bind: Mapping[str, Any]) -> datetime:
        now: datetime = session.execute(sa.select(clock()), bind_arguments={**bind}).scalar_one()
        return now

    def set_planner(self, session: Session, bind: Mapping[str, Any]) -> None:
        pass

    def given_text(self, name: str, type_: Any) -> Column:
        return sa.bindparam(name, type_=type_)

    def given_value(self, text: str | None, type_: Any) -> Any:
        return None if text is None else _value(text, type_)

    def is_small(self, connection: sa.Connection, table: sa.Table, most: int) -> bool:
        return True

    def is_bounded(self, connection: sa.Connection, statement: Any) -> bool:
        return True

    def has_table(self, connection: sa.Connection, table: sa.Table) -> bool:
        return bool(sa.inspect(connection).has_table(table.name, schema_of(connection, table)))

    def table_id(self, connection: sa.Connection, table: sa.Table) -> Any:
        return schema_of(connection, table), table.name

    def ordered_indexes(self, connection: sa.Connection, table_id: Any) -> Sequence[OrderedIndex]:
        schema, table = table_id
        found: dict[str, list[Any]] = {}
        for row in connection.execute(self.indexes, {"schema": schema, "table": table}):
            found.setdefault(row.name, []).append(row)
        return [_index(name, rows) for name, rows in found.items()]

    def percentiles(self, execute: Callable[[Any], Any], durations: AnySelect) -> tuple[int, float, Sequence[float]]:
        times = sorted(max(float(row[0]), 0.0) for row in execute(durations) if row[0] is not None)
        if not times:
            return 0, 0.0, ()
        shares = statistics.quantiles([*times, times[-1]] if len(times) == 1 else times, n=100, method="inclusive")
        return len(times), times[-1], (shares[49], shares[94], shares[98])


def _index(name: str, rows: Sequence[Any]) -> OrderedIndex:
    number = next((place for place, row in enumerate(rows) if row.column_name is None), len(rows))
    first = rows[:number]
    descending = tuple(bool(row.is_descending) for row in first)
    return OrderedIndex(
        name=name,
        columns=tuple(row.column_name for row in first),
        is_whole=number == len(rows),
        descending=descending,
        # NULL is less than all other values.
        nulls_first=tuple(not each for each in descending),
        nullable=tuple(bool(row.is_nullable) for row in first),
        is_unique=bool(rows[0].is_unique),
        is_partial=bool(rows[0].is_partial),
    )


class _SQLitePages(_OtherPages):
    title = "SQLite"
    # An index of another collation has an order of its own.
    indexes = sa.text("""
        SELECT i.name, i."unique" AS is_unique, i.partial AS is_partial, x."desc" AS is_descending,
               CASE WHEN x.coll = 'BINARY' THEN x.name END AS column_name,
               coalesce(t."notnull" = 0 AND t.pk = 0, 1) AS is_nullable
        FROM pragma_index_list(:table, :schema) AS i
        JOIN pragma_index_xinfo(i.name, :schema) AS x ON x.key
        LEFT JOIN pragma_table_info(:table, :schema) AS t ON t.cid = x.cid
        ORDER BY i.name, x.seqno
    """)


class _MariaDBPages(_OtherPages):
    title = "MariaDB"
    # An index of the beginning of a text is not in the order of the texts.
    indexes = sa.text("""
        SELECT index_name AS name, non_unique = 0 AS is_unique, 0 AS is_partial, collation = 'D' AS is_descending,
               CASE WHEN sub_part IS NULL THEN column_name END AS column_name, nullable = 'YES' AS is_nullable
        FROM information_schema.statistics
        WHERE table_schema = coalesce(:schema, database()) AND table_name = :table AND index_type = 'BTREE'
        ORDER BY index_name, seq_in_index
    """)


_OF_POSTGRESQL = Pages()
_OTHERS: Mapping[str, Pages] = {"sqlite": _SQLitePages(), "mariadb": _MariaDBPages(), "mysql": _MariaDBPages()}


def pages_of_engine(dialect: sa.Dialect) -> Pages:
    return _OF_POSTGRESQL if engine_of(dialect) is None else _OTHERS[dialect.name]


def pages_of(session: Session, mapper: Any) -> Pages:
    """Return how the pages read the database in which a queue is."""
    return pages_of_engine(session.get_bind(mapper).dialect)
