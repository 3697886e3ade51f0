"""Which values a new job has, whether a job with the same ones exists, and how they move to that."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import sqlalchemy as sa
from sqlalchemy.orm import Mapper
from sqlalchemy.orm.attributes import instance_state, set_committed_value

from sqlaqueue._typing import AnySelect
from sqlaqueue.exc import StatementError
from sqlaqueue.postgresql.claim_scan import planned_anew
from sqlaqueue.queue.roles import constant_default
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import WRITES_LATER, engine_of
from sqlaqueue.sql.portable import MomentOfInsert, ServerDefault, converted
from sqlaqueue.sql.types import as_library_statement, insert_unless, numbered_rows
from sqlaqueue.strategies.columns import by_index, same
from sqlaqueue.strategies.unique_key import UniqueKey, explaining_missing_index
from sqlaqueue.unique.relationships import Relationships, set_foreign_key

_COLUMNS: WeakKeyDictionary[Mapper[Any], dict[str, sa.Column[Any]]] = WeakKeyDictionary()


class NewJob:
    """A job that is to be enqueued: its instance, and the values of its columns."""

    def __init__(self, job: Any) -> None:
        self.job = job
        self.mapper: Mapper[Any] = sa.inspect(job).mapper
        self.name = self.mapper.class_.__name__
        self.relationships = Relationships(job)

    def columns(self) -> dict[str, sa.Column[Any]]:
        """Return the columns of the class that can be written, by attribute."""
        known = _COLUMNS.get(self.mapper)
        if known is None:
            found = {each.key: each.columns[0] for each in self.mapper.column_attrs}
            known = {name: one for name, one in found.items() if isinstance(one, sa.Column) and one.computed is None}
            _COLUMNS[self.mapper] = known
        return known

    def given(self) -> dict[str, Any]:
        """Return the values that the instance has, by attribute; None stands for a default, as in a flush."""
        present, columns = instance_state(self.job).dict, self.columns()
        return {
            name: present[name]
            for name, column in columns.items()
            if name in present and (present[name] is not None or column.type.should_evaluate_none)
        }

    def set_foreign_keys(self) -> None:
        """Set the foreign keys from the objects to which it refers, which are flushed."""
        for each, parent in self.relationships.parents():
            set_foreign_key(self.job, each, parent)

    def forget(self, before: Container[str], kept: Container[sa.Column[Any]]) -> None:
        """Unset what a flush that was rolled back has set, so that the next one leaves it to the server again.

        :param before: the names of the attributes that were set before the flush.
        :param kept: columns whose values remain, as a listener may have changed them.
        """
        state = instance_state(self.job)
        for name, column in self.columns().items():
            if name in state.dict and name not in before and column not in kept:
                del state.dict[name]
                state.committed_state.pop(name, None)

    def set_defaults(self, connection: sa.Connection) -> None:
        """Set the defaults that Python computes, in the order of the columns, each of which may read those before."""
        context = _DefaultContext(self, connection)
        given = self.given()
        for name, column in self.columns().items():
            default: Any = column.default
            if name in given or default is None or not (default.is_scalar or default.is_callable):
                continue
            value = default.arg if default.is_scalar else default.arg(context)
            context.current_parameters[column.key] = value
            set_committed_value(self.job, name, value)

    def unique_values(self, key: UniqueKey, connection: sa.Connection) -> list[Any]:
        """Return the values by which the job is compared with others, with defaults of Python set.

        :raises StatementError: for a value that cannot be compared.
        """
        names = [self.mapper.get_property_by_column(column).key for column in key.stored]
        given = self.given()
        for name, column in zip(names, key.stored, strict=True):
            config, is_given = key.spec.config, given.get(name) is not None
            constant = None if is_given else constant_default(column, config.states, waits=bool(config.waits))
            if constant is not None:
                set_committed_value(self.job, name, constant)
                given[name] = constant
        if any(
            given.get(name) is None and column.default is not None
            for name, column in zip(names, key.stored, strict=True)
        ):
            self.set_defaults(connection)
            given = self.given()
        for name, column in zip(names, key.stored, strict=True):
            self._check_unique_value(name, column, given)
        return [given.get(name) for name in names]

    def _check_unique_value(self, name: str, column: sa.Column[Any], given: dict[str, Any]) -> None:
        value, what = given.get(name), f"enqueue(): {self.name}.{name}"
        if isinstance(value, sa.ClauseElement) or (value is None and column.server_default is not None):
            msg = f"{what} makes jobs unique, and its value would be computed by the database; set it on the instance"
            raise StatementError(msg)
        if value is None and name in given and isinstance(column.type, sa.JSON):
            msg = f"{what} = None makes jobs unique, and is stored as a JSON null, which is no NULL; leave it out"
            raise StatementError(msg)
        length = getattr(column.type, "length", None)
        if isinstance(value, str) and isinstance(column.type, sa.String) and length is not None and len(value) > length:
            msg = f"{what} = {value!r}: the column holds {length} characters"
            raise StatementError(msg)


def set_created_at(connection: sa.Connection, key: UniqueKey, jobs: Iterable[NewJob]) -> None:
    """Set the time by which jobs belong to a period, so that it is the same when they are looked for."""
    if key.config.within is None:
        return
    column, now = key.spec.columns["created_at"], None
    for job in jobs:
        if column.default is None and job.given().get(job.mapper.get_property_by_column(column).key) is None:
            now = now or connection.scalar(sa.select(converted(MomentOfInsert(), column.type)))
            set_committed_value(job.job, job.mapper.get_property_by_column(column).key, now)


class _DefaultContext:
    """What a function that computes a default is given, see "Context-Sensitive Default Functions" in SQLAlchemy."""

    def __init__(self, job: NewJob, connection: sa.Connection) -> None:
        given, columns = job.given(), job.columns()
        self.current_parameters = {
            column.key: given.get(name)
            for name, column in columns.items()
            if name in given or not (column.primary_key or column.default or column.server_default or column.identity)
        }
        self.connection, self.dialect = connection, connection.dialect

    def get_current_parameters(self, isolate_multiinsert_groups: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002 - the signature in SQLAlchemy
        return self.current_parameters


# -- search for existing jobs ------------------------------------------------------------------------------------------

_NUMBER = "sqlaqueue_number"


class Found(NamedTuple):
    """What a search has found for one job."""

    existing: Key | None
    """The key of the job that counts already; None for none."""
    first: int
    """The place of the first job of the call with these values; its own for most."""
    order: int
    """The rank of the values: two calls that insert in this order do not wait for each other in a circle."""


def search(connection: sa.Connection, key: UniqueKey, values: Sequence[Sequence[Any]]) -> list[Found]:
    """Look for jobs that count and have the given values.

    The server compares them: values that differ in Python may be equal there, such as texts with a collation.

    :param values: those of :attr:`UniqueKey.stored`, for each job.
    """
    spec = key.spec
    columns = {column.key: (column.type, [row[place] for row in values]) for place, column in enumerate(key.stored)}
    given = numbered_rows(columns, _NUMBER)
    parts = key.as_one(given)
    found = sa.select(
        given.c[_NUMBER],
        sa.func.min(given.c[_NUMBER]).over(partition_by=[parts]),
        sa.func.row_number().over(order_by=[parts, given.c[_NUMBER]]),
        *spec.keys,
    ).select_from(given.outerjoin(spec.table, sa.and_(key.are_duplicates(spec.table, given), key.counts(spec.table))))
    found = key.searched(found.where(planned_anew()).order_by(given.c[_NUMBER]), spec.table)
    with explaining_missing_index(spec):
        # Jobs are inserted next, in a transaction that may begin here.
        rows: Any = connection.execute(as_library_statement(found), execution_options={WRITES_LATER: True})
    # One for each: without the index there may be several jobs with the same values, which the INSERT finds out.
    answers = {
        number: Found(None if key[0] is None else tuple(key), first - 1, order) for number, first, order, *key in rows
    }
    return list(answers.values())


def with_keys(spec: QueueSpec, jobs: AnySelect, keys: Sequence[Key]) -> AnySelect:
    """Return those of ``jobs``, a SELECT from the table, that have these keys.

    By a join: for the condition that a key is in an array, the server compares each row with each key.
    """
    columns = {column.key: (column.type, [key[place] for key in keys]) for place, column in enumerate(spec.keys)}
    given = numbered_rows(columns, _NUMBER)
    return jobs.join(given, same(spec.keys, [given.c[column.key] for column in spec.keys]))


_CHECKED: WeakKeyDictionary[sa.Engine, WeakSet[sa.Table]] = WeakKeyDictionary()


def check_index(connection: sa.Connection, key: UniqueKey) -> None:
    """Refuse a database without the unique index, in which jobs would not be unique; once for an engine and a table.

    :raises DatabaseNotReadyError: with the fix.
    """
    checked, table = _CHECKED.setdefault(connection.engine, WeakSet()), key.spec.table
    if table in checked:
        return
    # Without defaults, of which some have parameters.
    columns = [sa.Column(column.name, column.type, key=column.key) for column in table.c]
    bare = sa.Table(table.name, sa.MetaData(), *columns, schema=table.schema)
    where = key.counts(bare) if key.spec.has("status") else None
    nothing = ([key.stored[0].key], sa.select(sa.null()))
    insert: Any = insert_unless(bare, nothing, unique=key.values(bare), where=where)
    names = connection.get_execution_options().get("schema_translate_map")
    options = {} if names is None else {"schema_translate_map": names, "render_schema_translate": True}
    text = insert.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True}, **options)
    with explaining_missing_index(key.spec):
        # The planner looks for the index that ON CONFLICT names.
        connection.exec_driver_sql(f"EXPLAIN {text}", execution_options={WRITES_LATER: True}).close()
    checked.add(table)


# -- replace -----------------------------------------------------------------------------------------------------------

_KEPT = object()
"""For a column that is left as it is, or to its ``onupdate``."""

_NULL = sa.null()
"""One object each, so that rows with the same columns share a statement."""

_FRESH: dict[str, Any] = {"attempts": 0, "last_error": _NULL}
"""The values of a job that has not run: what failed before had other arguments."""

_MOVED = {"priority", "run_at", "max_attempts", *_FRESH}
"""The roles whose values are written; those of the others stay as they are."""


def lock_waiting(connection: sa.Connection, key: UniqueKey, existing: Sequence[Key]) -> set[Key]:
    """Lock those of ``existing`` that wait, and return their keys; in the order of keys, as all that lock several."""
    spec, keys = key.spec, list(dict.fromkeys(existing))
    if engine_of(connection.dialect) is None:
        waiting = with_keys(spec, sa.select(*spec.keys), keys)
    else:
        # A join might lock rows that it only looks at.
        waiting = by_index(sa.select(*spec.keys).where(spec.key_in(spec.keys, keys)), spec.table, "PRIMARY")
    waiting = waiting.where(spec.in_state("pending"))
    locked = waiting.order_by(*spec.keys).with_for_update(of=spec.table, key_share=True)
    return {tuple(row) for row in connection.execute(as_library_statement(locked))}


def replace(
    connection: sa.Connection, key: UniqueKey, replaced: Mapping[Key, tuple[NewJob, Any]], *, keep_time: bool
) -> None:
    """Write the values of new jobs into the rows of existing ones, which are locked.

    :param replaced: the new job and the instance of the existing one, by the key of that.
    :param keep_time: whether the existing jobs keep their ``run_at``.
    """
    groups: dict[tuple[sa.Table, tuple[Any, ...]], list[dict[str, Any]]] = {}
    for job, instance in replaced.values():
        if type(instance) is not job.mapper.class_:
            msg = (
                f"enqueue(on_duplicate='replace'): this {job.name} is a duplicate of one of the class "
                f"{type(instance).__name__}, which has other columns; add the class to Unique(...), or use "
                "on_duplicate='skip'"
            )
            raise StatementError(msg)
        if job.relationships.has_others:
            msg = (
                f"enqueue(on_duplicate='replace'): this {job.name} has objects that refer to it, and only its columns "
                "move to the existing job; use on_duplicate='skip', and change the job that it returns"
            )
            raise StatementError(msg)
    for existing, (job, instance) in replaced.items():
        job.set_defaults(connection)
        given = job.given()
        for table in job.mapper.tables:
            if isinstance(table, sa.Table):
                values = _values(key, job, table, given, keep_time=keep_time) | _next_version(job, table, instance)
                bound = {column: value for column, value in values.items() if not isinstance(value, sa.ClauseElement)}
                # Values that are SQL are part of the statement.
                parts = tuple((column, None if column in bound else value) for column, value in values.items())
                parameters = {f"value_{number}": bound.get(column) for number, (column, _) in enumerate(parts)}
                parameters |= {f"key_{number}": part for number, part in enumerate(existing)}
                groups.setdefault((table, parts), []).append(parameters)
    for (table, parts), parameters_of_rows in groups.items():
        here = sa.and_(*(column == sa.bindparam(f"key_{number}") for number, column in enumerate(table.primary_key)))
        changes = {
            column: sa.bindparam(f"value_{number}", type_=column.type) if value is None else value
            for number, (column, value) in enumerate(parts)
        }
        used = {f"key_{number}" for number, _ in enumerate(table.primary_key)}
        used |= {f"value_{number}" for number, (_, value) in enumerate(parts) if value is None}
        if changes:
            rows = [{name: row[name] for name in used} for row in parameters_of_rows]
            connection.execute(sa.update(table).where(here).values(changes), rows)


def _values(
    key: UniqueKey, job: NewJob, table: sa.Table, given: Mapping[str, Any], *, keep_time: bool
) -> dict[sa.Column[Any], Any]:
    """Return what is written into a row of a table."""
    spec = key.spec
    kept = {column for role, column in spec.columns.items() if role not in _MOVED} | {*key.columns, *table.primary_key}
    if keep_time and spec.has("run_at"):
        kept.add(spec.columns["run_at"])
    values = {
        column: value
        for name in job.columns()
        for column in job.mapper.get_property(name).columns
        if isinstance(column, sa.Column)
        and column.table is table
        and column not in kept
        and column is not job.mapper.polymorphic_on
        and column is not job.mapper.version_id_col
        and (value := given[name] if name in given else _known_default(column)) is not _KEPT
    }
    fresh = {spec.columns[role]: value for role, value in _FRESH.items() if spec.has(role)}
    return values | (fresh if table is spec.table else {})


def _next_version(job: NewJob, table: sa.Table, existing: Any) -> dict[sa.Column[Any], Any]:
    """Return the version that follows that of the existing job, for a class with ``version_id_col``."""
    version, generate = job.mapper.version_id_col, job.mapper.version_id_generator
    if not isinstance(version, sa.Column) or version.table is not table or not callable(generate):
        return {}
    return {version: generate(getattr(existing, job.mapper.get_property_by_column(version).key))}


_DEFAULTS: WeakKeyDictionary[sa.Column[Any], Any] = WeakKeyDictionary()


def _known_default(column: sa.Column[Any]) -> Any:
    """Return the same object each time, so that rows with the same columns share a statement."""
    if column not in _DEFAULTS:
        _DEFAULTS[column] = _default(column)
    return _DEFAULTS[column]


def _default(column: sa.Column[Any]) -> Any:
    """Return what is written for an attribute that the new job does not set, and for which Python has no value."""
    default: Any = column.default
    if column.onupdate is not None or (default is not None and default.is_sequence):
        return _KEPT
    if default is not None and default.is_clause_element:
        return default.arg
    server_default: Any = column.server_default
    if server_default is None:
        return _NULL

    return ServerDefault(sa.literal(server_default.arg) if isinstance(server_default.arg, str) else server_default.arg)
