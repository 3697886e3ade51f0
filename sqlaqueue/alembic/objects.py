"""Differences in trigger functions, triggers and the types of states."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from alembic.operations import MigrateOperation
from alembic.operations import ops as alembic_ops

from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.catalog import PREFIX, Found, FoundTrigger
from sqlaqueue.alembic.probe import Probe, probing
from sqlaqueue.alembic.seen import Review, Seen
from sqlaqueue.alembic.sql import stand_in
from sqlaqueue.postgresql.ddl import NEUTRAL, Trigger, TriggerFunction, objects_of

log = logging.getLogger(__name__)


def compare_functions(review: Review) -> None:
    """Create the functions that are missing, and replace those that are not as they are wanted."""
    quote = review.context.dialect.identifier_preparer.quote
    for seen in review.tables:
        for function in seen.functions.values():
            there = review.catalog.function(seen.place, function.name)
            if there is not None and any(there.same(function, source) for source in _sources(function, there.home)):
                continue
            if there is not None:
                log.info("Detected changed trigger function %r", function.name)
            elif seen.found is not None:
                log.info("Detected added trigger function %r", function.name)
            create = ops.CreateFunction(
                function.name,
                function.body,
                tables={key: table.name for key, table in function.tables.items()},
                comment=function.comment,
                definer=function.definer,
                schema=seen.schema,
                previous=None if there is None else there.put_back(quote),
            )
            review.behind.append(create)


def _sources(function: TriggerFunction, home: str) -> Iterator[str]:
    """Yield the texts that a function may have: it was made by way of a search path, or of a map of schemas."""
    tables = {key: stand_in(table.name, table.schema or home) for key, table in function.tables.items()}
    for each in (function, replace(function, tables=tables)):
        yield str(each.compile(dialect=NEUTRAL)).split("$sqlaqueue$")[1]


def compare_triggers(review: Review) -> None:
    """Create, replace and drop triggers, and drop the functions that nobody calls any more."""
    dropped: list[MigrateOperation] = []
    for seen in review.tables:
        there = {
            name: trigger
            for name, trigger in review.catalog.triggers_of(seen.place).items()
            if name.startswith(PREFIX) or name in seen.triggers
        }
        gone = [trigger for name, trigger in there.items() if name not in seen.triggers]
        if gone:
            log.info("Detected removed triggers of %r: %s", seen.name, ", ".join(each.name for each in gone))
            dropped += _drop(review, seen, gone)
        changed = _changed(review, seen, there)
        if changed:
            log.info("Detected changed triggers of %r: %s", seen.name, ", ".join(each.name for each in changed))
            dropped += _drop(review, seen, changed)
        _create_triggers(review, seen, there.keys() - {each.name for each in changed})
    review.front += [*dropped, *_unused_functions(review)]


def _drop(review: Review, seen: Seen, triggers: list[FoundTrigger]) -> Iterator[ops.DropTriggers]:
    quote = review.context.dialect.identifier_preparer.quote
    for function in dict.fromkeys(each.function for each in triggers):
        these = [each for each in triggers if each.function == function]
        plain = {each.name: each.plan for each in these}
        if all(each.event and each.enabled == "O" for each in these):
            back: MigrateOperation = ops.CreateTriggers(seen.name, function, plain, schema=seen.schema)
        else:
            back = ops.Steps([each.restored(quote) for each in these])
        yield ops.DropTriggers(seen.name, [*plain], schema=seen.schema, previous=back)


def _changed(review: Review, seen: Seen, there: dict[str, FoundTrigger]) -> list[FoundTrigger]:
    """Return the triggers that are made again: since they differ, or since a column that they name gets another type.

    PostgreSQL gives no column another type as long as the condition of a trigger names it.
    """
    both = [(there[name], trigger) for name, trigger in seen.triggers.items() if name in there]
    retyped = {
        op.column_name
        for op in seen.modify.ops
        if isinstance(op, alembic_ops.AlterColumnOp) and op.modify_type is not None
    }
    changed = [found for found, trigger in both if not found.same(trigger) or retyped & {*found.columns}]
    alike = [(found, trigger) for found, trigger in both if found not in changed and found.when is not None]
    if alike and review.context.connection is not None:
        with probing(review.context.connection, seen.place) as probe:
            changed += [found for found, trigger in alike if not _same_condition(probe, found, trigger)]
    return changed


def _same_condition(probe: Probe, found: FoundTrigger, wanted: Trigger) -> bool:
    return probe.same(functools.partial(probe.condition, wanted.event), found.when, wanted.when)


def _create_triggers(review: Review, seen: Seen, there: Collection[str]) -> None:
    by_function: dict[str, dict[str, ops.TriggerPlan]] = {}
    for name, trigger in seen.triggers.items():
        if name not in there:
            plan = ops.plan_of(trigger.event, trigger.rows, trigger.when)
            by_function.setdefault(trigger.function.name, {})[name] = plan
    for function, triggers in by_function.items():
        if seen.found is not None:
            log.info("Detected missing triggers of %r: %s", seen.name, ", ".join(triggers))
        review.behind.append(ops.CreateTriggers(seen.name, function, triggers, schema=seen.schema))


def _unused_functions(review: Review) -> Iterator[ops.DropFunction]:
    catalog = review.catalog
    wanted = {(catalog.at(seen.place)[0], function) for seen in review.tables for function in seen.functions}
    ours = {catalog.at(seen.place) for seen in review.tables}
    callers = {
        (schema, trigger.function)
        for (schema, table), triggers in catalog.triggers.items()
        if (schema, table) not in ours
        for trigger in triggers.values()
    }
    needed = wanted | callers | _wanted_elsewhere(review)
    for place, function in review.catalog.functions.items():
        if not function.name.startswith(PREFIX) or place in needed:
            continue
        log.info("Detected removed trigger function %r", function.name)
        yield ops.DropFunction(function.name, schema=function.schema, previous=function.restored())


def _wanted_elsewhere(review: Review) -> set[Found]:
    """Return the functions of tables that a filter of ``env.py`` keeps from being compared."""
    return {
        (review.catalog.at((table.schema, table.name))[0], each.name)
        for table in review.context.sorted_tables
        for each in objects_of(table)
        if isinstance(each, TriggerFunction)
    }


# -- the types of states -----------------------------------------------------------------------------------------


def compare_enums(review: Review) -> None:
    """Create types before columns that are added to queues, and drop those that go with the last column of theirs.

    Alembic creates the types of new tables, and none of the rest.
    """
    created, dropped = set(), set()
    for seen in review.tables:
        if seen.found is None and seen.spec is not None and seen.wanted is not None:
            for enum in (enum_of(column.type) for column in seen.wanted.columns):
                if enum is not None and enum not in created and not _is_there(review, enum):
                    created.add(enum)
                    drop = ops.DropEnum(enum.name, schema=enum.schema, values=[*enum.values])
                    review.front.insert(0, ops.OneWay(down=[drop]))
        for op in seen.modify.ops:
            needed = enum_of(op.column.type) if isinstance(op, alembic_ops.AddColumnOp) and seen.of_queue else None
            if needed is not None and needed not in created and not _is_there(review, needed):
                created.add(needed)
                review.front.append(ops.CreateEnum(needed.name, [*needed.values], schema=needed.schema))
        for unused in _let_go(review, seen):
            if unused not in dropped:
                dropped.add(unused)
                drop = ops.DropEnum(unused.name, schema=unused.schema, values=[*unused.values])
                # The type of a dropped table comes back with its table.
                review.last.append(drop if seen.wanted is not None else ops.OneWay([drop]))


class Enum(tuple[str | None, str, tuple[str, ...]]):
    """A named type: its schema, its name and its values."""

    __slots__ = ()

    @property
    def schema(self) -> str | None:
        """The schema it is in."""
        return self[0]

    @property
    def name(self) -> str:
        """Its name."""
        return self[1]

    @property
    def values(self) -> tuple[str, ...]:
        """Its labels in order."""
        return self[2]


def enum_of(type_: Any) -> Enum | None:
    """Return the named type that a column of ``type_`` needs, if it needs one."""
    plain = getattr(type_, "impl_instance", type_)
    plain = getattr(plain, "item_type", plain)
    if isinstance(plain, sa.Enum) and plain.native_enum and plain.name:
        return Enum((plain.schema, str(plain.name), tuple(plain.enums)))
    return None


def _is_there(review: Review, enum: Enum) -> bool:
    return review.catalog.users_of_enum((enum.schema, enum.name)) is not None


def _let_go(review: Review, seen: Seen) -> Iterator[Enum]:
    """Yield the types that no column has any more when this migration is through."""
    if seen.found is None or not (review.was_queue(seen) or seen.name.startswith(PREFIX)):
        return
    dropped = {op.column_name for op in seen.modify.ops if isinstance(op, alembic_ops.DropColumnOp)}
    goes = [each for each in seen.found.columns if seen.wanted is None or each.name in dropped]
    stay = {enum_of(each.type) for each in seen.found.columns if each not in goes}
    for column in goes:
        enum = enum_of(column.type)
        if enum is None or enum in stay:
            continue
        users = review.catalog.users_of_enum((enum.schema, enum.name))
        gone = {other.name for other in review.tables if other.wanted is None and other.place[0] == seen.place[0]}
        if users is not None and not set(users) - gone - {seen.name}:
            yield enum
