"""Differences within a table: predicates of indexes, check constraints, defaults, storage parameters."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sa
from alembic.operations import ops as alembic_ops
from sqlalchemy.sql.elements import ClauseElement, conv

from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.catalog import PREFIX, FoundCheck
from sqlaqueue.alembic.probe import Probe, probing
from sqlaqueue.alembic.seen import Review, Seen
from sqlaqueue.alembic.sql import default_of
from sqlaqueue.postgresql.ddl import NEUTRAL, StorageParameters

log = logging.getLogger(__name__)


def text_of(expression: Any) -> str:
    """Return an expression over the columns of one table as SQL."""
    element = expression if isinstance(expression, ClauseElement) else sa.text(str(expression))
    options = {"literal_binds": True, "include_table": False}
    return str(element.compile(dialect=NEUTRAL, compile_kwargs=options))


def compare_within(review: Review) -> None:
    """Compare what the tables of queues have beside their columns."""
    for seen, found, wanted in review.kept:
        if not seen.of_queue or review.context.connection is None:
            continue
        with probing(review.context.connection, seen.place) as probe:
            changes = [
                *_indexes(review, seen, found, wanted, probe),
                *_checks(review, seen, found, wanted, probe),
                *_defaults(seen, found, wanted, probe),
            ]
        if changes:
            review.change(seen, *changes)


# -- indexes ---------------------------------------------------------------------------------------------------


def _indexes(
    review: Review, seen: Seen, found: sa.Table, wanted: sa.Table, probe: Probe
) -> Iterator[alembic_ops.MigrateOperation]:
    reflected = {str(index.name): index for index in found.indexes}
    treated = {
        str(op.index_name)
        for op in seen.modify.ops
        if isinstance(op, alembic_ops.CreateIndexOp | alembic_ops.DropIndexOp)
    }
    for index in sorted(wanted.indexes, key=lambda index: str(index.name)):
        name = str(index.name)
        if name not in reflected or name in treated or not _index_is_compared(review, seen, index, reflected[name]):
            continue
        valid, predicate = review.catalog.index(seen.place, name) or (True, None)
        where = index.dialect_options["postgresql"]["where"]
        wished = None if where is None else text_of(where)
        if not valid:
            log.info("Detected invalid index %r on %r: its creation was interrupted", name, seen.name)
        elif not probe.same(probe.predicate, predicate, wished):
            log.info("Detected changed predicate of index %r on %r", name, seen.name)
        else:
            continue
        yield alembic_ops.DropIndexOp.from_index(reflected[name])
        yield alembic_ops.CreateIndexOp.from_index(index)


def _index_is_compared(review: Review, seen: Seen, index: sa.Index, reflected: sa.Index) -> bool:
    name, context = str(index.name), review.context
    return context.run_name_filters(
        name, "index", {"table_name": seen.name, "schema_name": seen.place[0]}
    ) and context.run_object_filters(index, name, "index", reflected=False, compare_to=reflected)


# -- check constraints -----------------------------------------------------------------------------------------


def _checks(
    review: Review, seen: Seen, found: sa.Table, wanted: sa.Table, probe: Probe
) -> Iterator[alembic_ops.MigrateOperation]:
    if seen.spec is None:
        return
    # Alembic compares them as well, if it is told to, by their names alone.
    treated = _treated(seen)
    there = {name: check for name, check in review.catalog.checks_of(seen.place).items() if name not in treated}
    wished = [each for each in wanted.constraints if isinstance(each, sa.CheckConstraint)]
    for check in sorted(wished, key=lambda check: str(check.name or "")):
        if str(check.name) not in treated:
            yield from _check(seen, found, check, there, probe)
    ours = {column.name for column in seen.spec.columns.values()}
    for name, (text, columns) in there.items():
        # What somebody wants of the other columns is not the queue's business.
        if ours & set(columns):
            log.info("Detected removed check constraint %r on %r", name, seen.name)
            yield alembic_ops.DropConstraintOp.from_constraint(_as_found(found, name, text))


def _check(
    seen: Seen, found: sa.Table, check: sa.CheckConstraint, there: dict[str, FoundCheck], probe: Probe
) -> Iterator[alembic_ops.MigrateOperation]:
    """Yield what makes ``check`` be there, and take it out of ``there``."""
    text = text_of(check.sqltext)
    name = None if check.name is None else str(check.name)
    if name is None or getattr(check, "_type_bound", False):
        # PostgreSQL or SQLAlchemy named it; a type brings its own when its column is added.
        alike = [
            each for each, (found_text, _) in there.items() if each == name or probe.same(probe.check, found_text, text)
        ]
        for each in alike[:1]:
            there.pop(each)
        if not alike and name is None:
            log.warning("a check constraint of %r is missing and has no name to create it by: give it one", seen.name)
        return
    before, _ = there.pop(name, ("", []))
    if before and probe.same(probe.check, before, text):
        return
    log.info("Detected %s check constraint %r on %r", "changed" if before else "added", name, seen.name)
    if before:
        yield alembic_ops.DropConstraintOp.from_constraint(_as_found(found, name, before))
    yield alembic_ops.AddConstraintOp.from_constraint(check)


def _treated(seen: Seen) -> set[str]:
    both = alembic_ops.AddConstraintOp | alembic_ops.DropConstraintOp
    return {str(getattr(op, "constraint_name", "")) for op in seen.modify.ops if isinstance(op, both)}


def _as_found(found: sa.Table, name: str, text: str) -> sa.CheckConstraint:
    copy = sa.Table(found.name, sa.MetaData(), schema=found.schema)
    check = sa.CheckConstraint(sa.literal_column(text), name=conv(name))
    copy.append_constraint(check)
    return check


# -- defaults of the library's own columns -----------------------------------------------------------------------


def _defaults(seen: Seen, found: sa.Table, wanted: sa.Table, probe: Probe) -> Iterator[alembic_ops.MigrateOperation]:
    altered = {op.column_name: op for op in seen.modify.ops if isinstance(op, alembic_ops.AlterColumnOp)}
    there = {column.name: column for column in found.columns}
    for column in wanted.columns:
        op = altered.get(column.name)
        if "sqlaqueue" not in column.info or column.name not in there:
            continue
        # A column that gets another type has its default judged by Alembic's users.
        if op is not None and (op.modify_server_default is not False or op.modify_type is not None):
            continue
        wished, reflected = default_of(column), there[column.name]
        before = getattr(reflected.server_default, "arg", None)
        text = None if wished is None else probe.default(column.name, wished)
        if text == (None if before is None else str(before)):
            continue
        log.info("Detected changed default of column '%s.%s'", seen.name, column.name)
        if op is None:
            op = alembic_ops.AlterColumnOp(seen.name, column.name, schema=seen.schema)
            op.existing_type, op.existing_nullable = reflected.type, reflected.nullable
            yield op
        op.existing_server_default = reflected.server_default
        op.modify_server_default = column.server_default


# -- storage parameters ------------------------------------------------------------------------------------------


def compare_storage(review: Review) -> None:
    """Compare the storage parameters of queues.

    The tables of this library have those of the models and no others. On a table of the user's, one that the model does
    not name is left alone unless the model names some: it may have been set by an administrator.
    """
    for seen in review.tables:
        there = review.catalog.options_of(seen.place)
        if seen.wanted is None:
            if there and (seen.name.startswith(PREFIX) or review.was_queue(seen)):
                back = ops.SetStorageParameters(seen.name, dict(there), schema=seen.schema)
                review.front.append(ops.OneWay(down=[back]))
            continue
        if not seen.of_queue:
            continue
        wished = _wished(seen, seen.wanted)
        if wished or seen.name.startswith(PREFIX):
            _set_parameters(review, seen, there, wished)


def _wished(seen: Seen, wanted: sa.Table) -> dict[str, str]:
    wished = {
        name: value
        for each in seen.objects
        if isinstance(each, StorageParameters)
        for name, value in each.parameters.items()
    }
    if seen.found is not None:
        # Of a new table Alembic writes these into CREATE TABLE.
        given = wanted.dialect_options["postgresql"].get("with") or {}
        wished |= {str(name): str(value) for name, value in given.items()}
    return {name.lower(): value for name, value in wished.items()}


def _set_parameters(review: Review, seen: Seen, there: Mapping[str, str], wished: dict[str, str]) -> None:
    names = [name for name in {**wished, **there} if not _same(there.get(name), wished.get(name))]
    if names:
        if seen.found is not None:
            log.info("Detected changed storage parameters of %r: %s", seen.name, ", ".join(names))
        review.behind.append(
            ops.SetStorageParameters(
                seen.name,
                {name: wished.get(name) for name in names},
                schema=seen.schema,
                existing={name: there.get(name) for name in names},
            )
        )


def _same(a: str | None, b: str | None) -> bool:
    if a is None or b is None:
        return a is b
    try:
        return float(a) == float(b)
    except ValueError:
        return _word(a) == _word(b)


def _word(value: str) -> str:
    words = {"on": "true", "yes": "true", "1": "true", "off": "false", "no": "false", "0": "false"}
    return words.get(value.lower(), value.lower())
