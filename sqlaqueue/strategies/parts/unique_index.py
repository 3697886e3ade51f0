"""The unique index of ``QueueConfig(unique=...)``, and the checks of its configuration when a class is mapped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.elements import conv

from sqlaqueue.exc import ConfigurationError, DatabaseNotReadyError
from sqlaqueue.postgresql.faults import UPDATE_COMMAND
from sqlaqueue.queue.options import FINISHED, UNFINISHED, Unique
from sqlaqueue.queue.retry_policies import seconds
from sqlaqueue.queue.spec import QueueSpec, check_roles
from sqlaqueue.queue.strategy_protocol import Strategy
from sqlaqueue.sql.engine import engine_of_error
from sqlaqueue.sql.errors import sqlstate
from sqlaqueue.sql.types import object_name
from sqlaqueue.strategies.parts.indexes import add_index
from sqlaqueue.strategies.parts.key_columns import key_column
from sqlaqueue.strategies.parts.unique_key import unique_key

PURPOSE = "unique"
_NO_SUCH_INDEX = "42P10"


def attach_unique(spec: QueueSpec, strategy: Strategy) -> None:
    """Add the unique index to the model's table.

    :raises ConfigurationError: with the class, the attribute and the fix, if the index would not do what is configured.
    """
    key = unique_key(spec)
    if key is None:
        return
    for name in key.config.attributes:
        _check_attribute(spec, name)
    for reason in _reasons_against(spec, key.config, strategy):
        raise ConfigurationError(f"{spec.model.__name__}: {reason}")
    if key.config.per is not None:
        check_roles(spec.model.__name__, {"created_at": "Unique(per=...)"}, spec.columns, spec.config)
    where = key.counts(spec.table) if spec.has("status") else None
    index = add_index(spec, PURPOSE, key.values(spec.table), where=where, unique=True)
    if not key.config.nulls_distinct:
        index.dialect_options["postgresql"]["nulls_not_distinct"] = True


def index_name(table: sa.Table) -> str:
    """Return the name of the unique index of a queue's table."""
    return conv(object_name("ix", table.name, "queue", PURPOSE))


def names_unique_index(spec: QueueSpec, constraint: str) -> bool:
    """Return whether a violated constraint is the index that makes jobs unique.

    :param constraint: its name or, from a database that does not name it, its columns.
    """
    name = index_name(spec.table)
    # A migration that replaces the index builds the new one under a longer name.
    if constraint.startswith(name):
        return True
    index = next((each for each in spec.table.indexes if each.name == name), None)
    return index is not None and constraint == ", ".join(f"{spec.table.name}.{column.name}" for column in index.columns)


@contextlib.contextmanager
def explaining_missing_index(spec: QueueSpec) -> Iterator[None]:
    """Explain the error of a statement that names the index, if the database lacks it.

    :raises DatabaseNotReadyError: with the fix.
    """
    try:
        yield
    except DBAPIError as error:
        if sqlstate(error) != _NO_SUCH_INDEX:
            raise
        other = engine_of_error(error)
        by_alembic = f". Run {UPDATE_COMMAND}, where env.py has the plug-in sqlaqueue.alembic"
        msg = (
            f"{spec.model.__name__}: the database lacks the index {index_name(spec.table)}, which makes jobs unique"
            f"{by_alembic if other is None else f'; {other.migrating}'}"
        )
        raise DatabaseNotReadyError(msg) from error


def _check_attribute(spec: QueueSpec, name: str) -> None:
    what = f"{spec.model.__name__}: Unique({name!r})"
    column = key_column(spec, name, what)
    if isinstance(getattr(column.type, "impl_instance", column.type), sa.ARRAY):
        msg = (
            f"{what}: enqueue() cannot look for values of type ARRAY; use a text or JSONB for "
            f"{spec.model.__name__}.{name}"
        )
        raise ConfigurationError(msg)


def _reasons_against(spec: QueueSpec, unique: Unique, strategy: Strategy) -> Iterator[str]:
    """Yield what is wrong with the states for this queue."""
    what, states = f"Unique(states={unique.states!r})", spec.config.states
    if not spec.has("status"):
        if unique.states != UNFINISHED:
            yield (
                f"{what}: with rows_are_messages=True the claim deletes the row of a job, and nothing is left of a "
                "finished one to count; a twin of a running job waits for the end of its transaction. Leave out states"
            )
        if unique.on_return == "wait":
            yield (
                'Unique(on_return="wait"): with rows_are_messages=True a job has no row in which it could wait; use '
                '"cancel", which moves it to the dead letters'
            )
        return
    yield from _reasons_against_running(spec, unique, strategy)
    yield from _reasons_against_finished(spec, unique)
    if unique.on_return == "cancel" and set(FINISHED) - set(unique.states):
        if "cancelled" in unique.states:
            yield f'{what}: a cancelled job counts as well, so a twin cannot be cancelled; use Unique(on_return="wait")'
        if states.cancelled is None:
            yield (
                "Unique(...): a job that meets a twin is cancelled, and there is no status value for that; set "
                'States(cancelled=...), or use Unique(on_return="wait")'
            )


def _reasons_against_running(spec: QueueSpec, unique: Unique, strategy: Strategy) -> Iterator[str]:
    """Yield why pending and running jobs cannot be told apart."""
    if "processing" in unique.states:
        return
    what = f"Unique(states={unique.states!r})"
    if not strategy.tells_running_apart:
        yield (
            f'{what}: under the strategy "{strategy.name}" a running job still reads as pending, so it cannot be '
            'unique only while it waits; add "processing", or use strategy="update_status"'
        )
    elif unique.on_return == "wait" and not spec.has("lease_expires_at"):
        yield (
            'Unique(on_return="wait"): a run that ends beside a twin waits with an expired lease, and '
            f"{spec.model.__name__} leaves out lease_expires_at; {spec.config.fix_for('lease_expires_at')}, or use "
            '"cancel"'
        )


def _reasons_against_finished(spec: QueueSpec, unique: Unique) -> Iterator[str]:
    """Yield why finished jobs would not be there to count."""
    what, per = f"Unique(states={unique.states!r})", unique.per
    for state in unique.finished:
        if getattr(spec.config.states, state) is None:
            yield f"{what}: there is no status value for {state!r}; leave it out, or set States({state}=...)"
        if state == "completed" and spec.config.on_complete == "delete":
            yield (
                f'{what}: on_complete="delete" deletes the row of a completed job, so it cannot count; leave out '
                '"completed" or on_complete="delete"'
            )
        kept = spec.config.retention.get(state)
        if kept is not None and (per is None or seconds(kept) < per.total_seconds()):
            period = "without per= jobs count for ever" if per is None else f"per= is {per}"
            yield (
                f"{what}: QueueConfig(retention={{{state!r}: {kept}}}) deletes jobs that still count, as {period}; "
                f"keep them for at least as long, or leave {state!r} out of one of the two"
            )
