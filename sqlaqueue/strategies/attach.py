"""What a queue gets when its class is mapped: flow control, retention, partitions, and the privileges it needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.elements import conv
from sqlalchemy.sql.visitors import iterate

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.flow_control.functions import attach_admission
from sqlaqueue.flow_control.keys import FlowControl, flow_control
from sqlaqueue.postgresql.side_tables import rate
from sqlaqueue.queue.names import ATTEMPT, CONTROL, DEAD_LETTER, WAITS
from sqlaqueue.queue.options import ConcurrencyLimit, FairShare, FlowRule, InOrder, RateLimit
from sqlaqueue.queue.roles import UNCHANGED_ROLES
from sqlaqueue.queue.spec import QueueSpec, check_roles
from sqlaqueue.queue.strategy_protocol import Privilege, RequiredPrivilege, Strategy
from sqlaqueue.sql.types import object_name
from sqlaqueue.strategies.columns import add_index, column_named, key_column
from sqlaqueue.strategies.unique_key import unique_key
from sqlaqueue.texts import did_you_mean

# -- flow control checks -----------------------------------------------------------------------------------------------
# The checks of the configuration of flow control when a class is mapped.


def check_flow_control(spec: QueueSpec, strategy: Strategy) -> None:
    """Refuse what would not do what is configured.

    :raises ConfigurationError: with the class, the attribute and the fix.
    """
    config = spec.config
    for one in config.flow_control:
        _check_one(spec, strategy, one)
    if config.order is not None:
        _check_order(spec, config.order)


def _check_one(spec: QueueSpec, strategy: Strategy, one: FlowRule) -> None:
    model, kind = spec.model.__name__, type(one).__name__
    what = f"{model}: {kind}"
    if not strategy.supports_flow_control:
        name = type(strategy).__name__
        msg = f'{what}(...): the strategy {name} does not support it; use strategy="update_status"'
        raise ConfigurationError(msg)
    for name in one.per:
        key_column(spec, name, f"{model}: {_with_key(one, name)}")
    number: Any = one.most if isinstance(one, ConcurrencyLimit) else one.weight if isinstance(one, FairShare) else None
    if isinstance(number, str):
        where = f"{what}({'weight=' if isinstance(one, FairShare) else ''}{number!r})"
        if not isinstance(column_named(spec, number, where).type, sa.Integer):
            msg = f"{where}: {model}.{number} is no integer column"
            raise ConfigurationError(msg)
    priority = spec.columns.get("priority")
    if priority is not None and priority.nullable:
        msg = (
            f"{what}(...) needs a priority that is never NULL; declare the column with nullable=False, or leave the "
            'role out with columns={"priority": None}'
        )
        raise ConfigurationError(msg)


def _with_key(one: FlowRule, name: str) -> str:
    """Return how the key was configured, for errors."""
    if not isinstance(one, ConcurrencyLimit | RateLimit):
        return f"{type(one).__name__}({name!r})"
    number = repr(one.most) if isinstance(one.most, int | str) else "..."
    return f"{type(one).__name__}({number}, per={name!r})"


def _check_order(spec: QueueSpec, order: InOrder) -> None:
    model = spec.model.__name__
    what = f"{model}: InOrder(by={order.by!r})"
    if key_column(spec, order.by, what).nullable:
        msg = f"{what}: {model}.{order.by} may be NULL, which has no place in an order; declare it with nullable=False"
        raise ConfigurationError(msg)
    check_roles(
        model, {"started_at": "InOrder(...), to recognise the jobs that have started,"}, spec.columns, spec.config
    )
    if order.on_failure != "continue" and not spec.has("status"):
        msg = (
            f"{model}: InOrder(on_failure={order.on_failure!r}): without a status, a failed job leaves the table; use "
            'on_failure="continue"'
        )
        raise ConfigurationError(msg)
    if order.on_failure == "cancel" and spec.config.states.cancelled is None:
        msg = (
            f'{model}: InOrder(on_failure="cancel") needs a status value for cancelled jobs; set '
            "States(cancelled=...), or use another on_failure"
        )
        raise ConfigurationError(msg)


# -- flow control ------------------------------------------------------------------------------------------------------
# The indexes, functions and triggers of flow control.


def attach_flow_control(spec: QueueSpec, strategy: Strategy) -> None:
    """Add what flow control needs to the model's table.

    :raises ConfigurationError: with the class, the attribute and the fix, if it would not do what is configured.
    """
    check_flow_control(spec, strategy)
    flow = flow_control(spec)
    if flow is None:
        return
    _add_indexes(flow)
    attach_admission(flow, rate(spec) if flow.rates else None)


def _add_indexes(flow: FlowControl) -> None:
    spec = flow.spec
    pending = spec.in_state("pending") if spec.has("status") else None
    first = [spec.columns[role] for role in ("priority",) if spec.has(role)]
    rest = [column for column in spec.claim_order if column not in first]
    turn = [] if flow.turn is None else [flow.turn.hashed(spec.table)]
    if flow.turn is not None:
        add_index(spec, "turns", [*first, *turn, *rest], pending, plain=([*first, *flow.turn.columns, *rest], pending))
    if flow.part is not None:
        inside = rest if flow.order is None else [*flow.order.by]
        parts = [*first, *turn, flow.part.hashed(spec.table), *inside]
        add_index(spec, "parts", parts, pending, plain=None)
    counted = [*flow.limits, *([] if flow.order is None else [flow.order])]
    if spec.strategy.holds_transaction:
        counted = []
    for key in {key.text: key for key in counted}.values():
        running = key.running(spec.table)
        if key.names:
            plain = [*key.columns], spec.in_state("processing")
            add_index(spec, "_".join(("running", *key.names)), [running], running.is_not(None), plain=plain)
        else:
            add_index(spec, "running", spec.keys, where=spec.in_state("processing"))
    if flow.order is not None:
        states = ["pending", *([] if spec.strategy.holds_transaction else ["processing"])]
        states += ["failed"] if flow.order.config.on_failure == "block" else []
        unfinished = [spec.columns["status"] == spec.literal(state) for state in states if spec.has("status")]
        where = sa.or_(*unfinished) if unfinished else None
        hashed = [flow.order.hashed(spec.table), *flow.order.by]
        add_index(spec, "order", hashed, where, plain=([*flow.order.columns, *flow.order.by], where))


# -- partition key -----------------------------------------------------------------------------------------------------
# Checks of a queue's table that is partitioned by ``postgresql_partition_by``, when a class is mapped.
#
# PostgreSQL refuses an index that makes rows unique without the partition key, but only when the table is created. It
# accepts a partition key that the queue changes; each such change then moves the row to another partition, and a
# claim that meets the row at that moment ends with a serialization failure.


_COLUMN = re.compile(r'\s*(?:"((?:[^"]|"")+)"|([A-Za-z_][\w$]*))\s*(?:$|\s[^(]*$)')
"""A column of a partition key, with its collation and operator class, if any."""


def check_partition_key(spec: QueueSpec) -> None:
    """Refuse a partition key by which the queue cannot work, or with which PostgreSQL would not create the table.

    :raises ConfigurationError: with the class, the attribute and the fix.
    """
    text = spec.table.dialect_options["postgresql"]["partition_by"]
    if text:
        for reason in _reasons_against(spec, str(text)):
            msg = f"{spec.model.__name__}: postgresql_partition_by={str(text)!r}: {reason}"
            raise ConfigurationError(msg)


def _reasons_against(spec: QueueSpec, text: str) -> Iterator[str]:
    columns: list[sa.Column[Any]] = []
    has_expression = False
    for part in _parts(text):
        match = _COLUMN.match(part)
        if match is None:
            has_expression = True
            continue
        # The server folds a name without quotes to lower case.
        name = match[1].replace('""', '"') if match[1] else match[2].lower()
        column = next((each for each in spec.table.columns if each.name == name), None)
        if column is None:
            hint = did_you_mean(name, [each.name for each in spec.table.columns])
            yield f"the table {spec.table.name} has no column {name!r}{hint}"
        else:
            columns.append(column)
    yield from _reasons_against_change(spec, columns)
    yield from _reasons_against_keys(spec, columns, has_expression=has_expression)


def _reasons_against_change(spec: QueueSpec, columns: list[sa.Column[Any]]) -> Iterator[str]:
    """Yield which columns of the partition key the queue changes."""
    for role, column in spec.columns.items():
        if role not in UNCHANGED_ROLES and column in columns:
            yield (
                f"{_attribute(spec, column)} is the {role} of the queue, which changes while a job is in it. Each "
                "change would move the row to another partition, and a claim that meets it fails with a serialization "
                "failure; partition by a column that does not change, such as the created_at"
            )


def _reasons_against_keys(spec: QueueSpec, columns: list[sa.Column[Any]], *, has_expression: bool) -> Iterator[str]:
    """Yield why PostgreSQL would refuse the primary key, or the index of unique jobs."""
    unique, key = unique_key(spec), spec.table.primary_key.columns
    if has_expression and (key or unique is not None):
        what = "a primary key" if key else "QueueConfig(unique=...)"
        yield (
            f"the partition key has an expression, and PostgreSQL then allows no {what.removeprefix('a ')}; partition "
            "by columns, for instance by a generated column or one of type date"
        )
    missing = [_attribute(spec, column) for column in columns if key and column not in key.values()]
    if missing:
        yield (
            f"the primary key of a partitioned table has to contain its partition key, and lacks {', '.join(missing)}; "
            "declare primary_key=True there as well"
        )
    if unique is None:
        return
    missing = [_attribute(spec, column) for column in columns if column not in unique.columns]
    if missing:
        given = ", ".join(map(repr, unique.config.attributes))
        yield (
            f"QueueConfig(unique=Unique({given}, ...)): jobs of a partitioned table can be unique only within a "
            f"partition, so the attributes have to contain the partition key; add {', '.join(missing)}, if jobs may be "
            "equal otherwise, or partition by one of the attributes"
        )


def _attribute(spec: QueueSpec, column: sa.Column[Any]) -> str:
    """Return the name of a column's attribute, with the class."""
    return f"{spec.model.__name__}.{spec.mapper.get_property_by_column(column).key}"


def _parts(text: str) -> list[str]:
    """Return the parts of a partition key, which commas outside of parentheses and quotes separate."""
    inner = text.partition("(")[2].rpartition(")")[0]
    parts, depth, quote = [""], 0, ""
    for character in inner:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += {"(": 1, ")": -1}.get(character, 0)
            if character == "," and depth == 0:
                parts.append("")
                continue
        parts[-1] += character
    return parts


# -- required privileges -----------------------------------------------------------------------------------------------
# The privileges that a Consumer's role needs. A Consumer checks them when it starts.
#
# A role that only enqueues needs INSERT on the job table: the triggers run with their owner's privileges.


_EVERYTHING: dict[Privilege, Sequence[str]] = {"SELECT": (), "INSERT": (), "UPDATE": (), "DELETE": ()}
_SIDE_TABLES: dict[str, dict[Privilege, Sequence[str]]] = {
    # Locking a row requires UPDATE on one of its columns.
    CONTROL: {"SELECT": (), "UPDATE": ("created_at",), "DELETE": ()},
    DEAD_LETTER: {"SELECT": (), "INSERT": (), "UPDATE": ()},
    # As for requests: the retention locks the rows that it deletes.
    ATTEMPT: {"SELECT": (), "INSERT": (), "UPDATE": ("ended_at",), "DELETE": ()},
    # To look at jobs again whose count is wrong; the triggers have the rights of their owner.
    WAITS: {"INSERT": ()},
}
"""The privileges on side tables, with the columns to which each may be limited; on other side tables all."""

_WRITTEN = (
    "status",
    "run_at",
    "attempts",
    "last_error",
    "finished_at",
    "lease_token",
    "lease_expires_at",
    "claimed_by",
    "started_at",
)
"""The roles whose columns claims and settlements write."""


def everything(table: sa.Table) -> Iterator[RequiredPrivilege]:
    """Return the privileges to insert and delete rows; locking one requires UPDATE."""
    return (RequiredPrivilege(privilege, table) for privilege in _EVERYTHING)


def consumer_privileges(spec: QueueSpec) -> Iterator[RequiredPrivilege]:
    """Return the privileges to read jobs, to write what a settlement writes, and to use the side tables."""
    yield RequiredPrivilege("SELECT", spec.table, list(spec.table.c))
    yield RequiredPrivilege("UPDATE", spec.table, [spec.columns[role] for role in _WRITTEN if spec.has(role)])
    if spec.config.on_complete == "delete":
        yield RequiredPrivilege("DELETE", spec.table)
    for purpose, table in spec.side_tables.items():
        for privilege, columns in _SIDE_TABLES.get(purpose, _EVERYTHING).items():
            yield RequiredPrivilege(privilege, table, [table.c[name] for name in columns])
    yield from _limits_privileges(spec)
    yield from _waits_privileges(spec)


def _waits_privileges(spec: QueueSpec) -> Iterator[RequiredPrivilege]:
    """Return the privileges to read what jobs wait for, for ``reconcile()``, and what waits for them, for retention."""
    read = [(wait.awaited, [there for _, there in wait.pairs]) for wait in spec.waits]
    if spec.config.retention:
        related = [*spec.waits, *spec.awaited_by]
        read += [(wait.waiting, [here for here, _ in wait.pairs]) for wait in related if wait.waiting is not spec]
    for other, columns in read:
        if other is not spec:
            yield RequiredPrivilege("SELECT", other.table, [*columns, other.columns["status"]])


def _limits_privileges(spec: QueueSpec) -> Iterator[RequiredPrivilege]:
    """Return the privileges to read the numbers of limits, and the weights of turns, from other tables."""
    flow = flow_control(spec)
    if flow is None:
        return
    numbers = [limit.most for limit in flow.limits] + ([] if flow.turn is None else [flow.turn.weight])
    read: dict[sa.Table, dict[str, sa.Column[object]]] = {}
    for element in (each for number in numbers for each in iterate(number)):
        # The column of an alias is derived from that of the table.
        for column in element.base_columns if isinstance(element, sa.ColumnElement) else ():
            if isinstance(column, sa.Column) and column.table is not spec.table:
                read.setdefault(column.table, {})[column.name] = column
    for table, columns in read.items():
        yield RequiredPrivilege("SELECT", table, list(columns.values()))


# -- retention index ---------------------------------------------------------------------------------------------------
# The index by which the deletion of finished jobs finds the oldest ones of a state.
#
# It exists only with ``QueueConfig(retention=...)``. Without it each search would read the whole table, mostly to
# find nothing. It costs one entry for each finished job, and none for pending or processing ones. One index serves
# all states that are deleted, with the state first: ordered by time alone, the search for completed jobs would walk
# over failed ones that are kept for longer.


PURPOSE = "finished"


def attach_retention(spec: QueueSpec) -> None:
    """Add the index of finished jobs to the model's table.

    :raises ConfigurationError: when the status column cannot hold one of the states, or ``finished_at`` is left out.
    """
    model = spec.model.__name__
    for state in spec.config.retention:
        if getattr(spec.config.states, state) is None:
            msg = (
                f"{model}: QueueConfig(retention={{{state!r}: ...}}) is for a state that has no status value; "
                f"leave it out, or give it one with QueueConfig(states=States({state}=...))"
            )
            raise ConfigurationError(msg)
    check_roles(model, {"finished_at": "QueueConfig(retention=...)"}, spec.columns, spec.config)
    columns = [spec.columns["status"], spec.columns["finished_at"]]
    # Not IN: the server prints it in another form, and that form in yet another one when it parses it again.
    add_index(spec, PURPOSE, columns, where=sa.or_(*(spec.in_state(state) for state in spec.config.retention)))


def attach_to_dead_letters(spec: QueueSpec, dead: sa.Table) -> None:
    """Add the index of finished jobs to the dead letters, for a queue without a status.

    :raises ConfigurationError: for completed jobs, whose rows are deleted.
    """
    if "completed" in spec.config.retention:
        msg = (
            f"{spec.model.__name__}: QueueConfig(retention={{'completed': ...}}): the claim of a job without a status "
            "deletes its row, and of completed jobs nothing is left to keep; leave 'completed' out"
        )
        raise ConfigurationError(msg)
    name = index_name(dead)
    # Queues share the table.
    if name not in {index.name for index in dead.indexes}:
        sa.Index(name, dead.c.queue, dead.c.state, dead.c.created_at)


def index_name(table: sa.Table) -> str:
    return conv(object_name("ix", table.name, "queue", PURPOSE))


def oldest_first(spec: QueueSpec, states: Sequence[str], moment: sa.ColumnElement[Any]) -> Iterable[Any]:
    """Return the order in which jobs are deleted: by age where the index provides it.

    With this order the planner uses the index. Without it, it may read the table from its beginning until it has as
    many old jobs as it expects to find there.
    """
    return (moment,) if len(states) == 1 and states[0] in spec.config.retention else ()
