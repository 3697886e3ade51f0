"""A queue that changes hands: what its jobs need when it gets, changes or loses its strategy."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence

import sqlalchemy as sa
from alembic.operations import ops as alembic_ops

from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.catalog import PREFIX
from sqlaqueue.alembic.seen import Review, Seen
from sqlaqueue.alembic.tables import text_of
from sqlaqueue.postgresql.identifiers import object_name
from sqlaqueue.queue.spec import QueueSpec

log = logging.getLogger(__name__)

_NOT_NULL = re.compile(r'(?:"(?:[^"]|"")+"|\w+) IS NOT NULL')
"""How PostgreSQL writes the second half of the predicate of suspects."""


def move_jobs(review: Review) -> None:
    """Let the jobs of kept tables go on waiting under another strategy, in either direction."""
    locked: list[Seen] = []
    emptied: list[ops.OneWay] = []
    for seen, *_ in review.kept:
        up: list[ops.QueueOp] = []
        down: list[ops.QueueOp] = []
        spec = seen.spec
        released = _release(seen, spec, *_leases(review, seen, spec)) if spec is not None else None
        others = spec is not None and _has_other_messages(review, seen)
        # New triggers have not told the messages so far.
        if spec is not None and (others or any(map(seen.messages_in, review.behind))):
            up += _fill(seen, spec)
        if others:
            empty = ops.EmptyMessages(review.messages_of(seen)[1], schema=seen.schema)
            review.front.insert(0, ops.OneWay([empty]))
            emptied.append(ops.OneWay(down=[empty]))
        if others or any(map(seen.messages_in, review.front)):
            down += _fill_again(review, seen)
        if review.was_queue(seen) and (up or down or released or _has_to_wait(review, seen)):
            locked.append(seen)
        if released is not None:
            # By columns that are about to be dropped, in either direction.
            review.front.insert(0, ops.OneWay(released.ops))
            review.last.append(ops.OneWay(down=released.down))
        if down:
            review.front.insert(0, ops.OneWay(down=down))
        review.behind += up
    review.behind += emptied
    for schema in dict.fromkeys(seen.schema for seen in locked):
        _lock(review, schema, [seen for seen in locked if seen.schema == schema])


def _has_other_messages(review: Review, seen: Seen) -> bool:
    """Tell whether the table of messages gets or loses columns: what it has says nothing about them."""
    columns = (alembic_ops.AddColumnOp, alembic_ops.DropColumnOp)
    messages = review.messages_of(seen)
    return any(
        isinstance(op, columns) for other, *_ in review.kept if other.place == messages for op in other.modify.ops
    )


def _has_to_wait(review: Review, seen: Seen) -> bool:
    """Tell whether triggers come or go: that waits for open batches, and would make everybody else wait as well."""
    return any(seen.triggers_in(op) for op in [*review.front, *review.behind])


def _leases(review: Review, seen: Seen, spec: QueueSpec) -> tuple[str | None, str | None]:
    """Return the conditions that a running job has a lease, before the migration and after it.

    None where jobs have none, or may keep them. A row that is processing without one belongs to somebody else.
    """
    before = _leases_there(review, seen)
    role = next((role for role in ("lease_expires_at", "lease_token") if spec.has(role)), None)
    after = None if spec.strategy.holds_transaction or role is None else text_of(spec.columns[role].is_not(None))
    if not review.was_queue(seen) or (before is None) == (after is None):
        return None, None
    return before, after


def _leases_there(review: Review, seen: Seen) -> str | None:
    """Return the condition that a job has a lease in the database, by the indexes that leases have."""
    end, suspect = (object_name("ix", seen.name, "queue", purpose) for purpose in ("lease", "suspect"))
    if seen.found is not None:
        for index in seen.found.indexes:
            if index.name == end and len(index.columns) == 1:
                return text_of(index.columns[0].is_not(None))
    _, predicate = review.catalog.index(seen.place, suspect) or (True, None)
    found = _NOT_NULL.search(predicate or "")
    return None if found is None else found[0]


def _release(seen: Seen, spec: QueueSpec, before: str | None, after: str | None) -> ops.OneWay | None:
    """Return what puts back the jobs under leases where the next strategy has none, on the way up or down."""
    if not spec.has("status") or spec.config.states.processing is None or (before is None and after is None):
        return None
    values = {spec.columns["status"].name: text_of(spec.literal("pending"))}
    if spec.has("attempts"):
        attempts = spec.columns["attempts"]
        values[attempts.name] = text_of(sa.func.greatest(sa.func.coalesce(attempts, 0) - 1, 0))
    running = text_of(spec.in_state("processing"))

    def release(lease: str | None) -> list[ops.ReleaseRuns]:
        if lease is None:
            return []
        return [ops.ReleaseRuns(seen.name, values, where=f"{running} AND {lease}", schema=seen.schema)]

    return ops.OneWay(release(before), release(after))


def _fill(seen: Seen, spec: QueueSpec) -> Iterator[ops.QueueOp]:
    messages = spec.side_tables.get("messages")
    if messages is None or not messages.name.startswith(PREFIX):
        return
    yield ops.FillMessages(
        seen.name,
        messages.name,
        keys=[key.name for key in spec.keys],
        order=[spec.columns[role].name for role in spec.order_roles],
        where=text_of(spec.in_state("pending")),
        schema=seen.schema,
    )


def _fill_again(review: Review, seen: Seen) -> Iterator[ops.QueueOp]:
    """Yield what writes the messages of the strategy from before, from what the database knows of it."""
    place = review.messages_of(seen)
    messages, where = review.found_table(place), review.waiting_of_triggers(seen)
    if messages is None or where is None:
        return
    keys = [column.name for column in messages.columns if column.primary_key]
    order = [column.name for column in messages.columns if not column.primary_key]
    yield ops.FillMessages(seen.name, place[1], keys=keys, order=order, where=where, schema=seen.schema)


def _lock(review: Review, schema: str | None, tables: Sequence[Seen]) -> None:
    # All at once: whoever waited for one of them while holding another would be in everybody's way.
    before, after = [], []
    for seen in tables:
        messages = review.messages_of(seen)
        remains = any(other.place == messages and other.wanted is not None for other in review.tables)
        before += [seen.name, *([messages[1]] if review.found_table(messages) is not None else [])]
        after += [seen.name, *([messages[1]] if remains else [])]
    up, down = (ops.LockTables(names, schema=schema) for names in (before, after))
    review.front.insert(0, ops.OneWay([up]))
    review.last.append(ops.OneWay(down=[down]))


def keep_order_of_columns(review: Review) -> None:
    """Drop the columns of a queue last first, so that the way down adds them in the order that they have now.

    Alembic drops them in no order.
    """
    for seen, found, _ in review.kept:
        places = {column.name: place for place, column in enumerate(found.columns)}
        drops = [op for op in seen.modify.ops if isinstance(op, alembic_ops.DropColumnOp)]
        if review.was_queue(seen) and len(drops) > 1:
            rest = [op for op in seen.modify.ops if op not in drops]
            drops.sort(key=lambda op: places[op.column_name], reverse=True)
            seen.modify.ops = [*rest, *drops]


def ask_about_rows(review: Review) -> None:
    """Let the migration ask for the state of rows that were no jobs, wherever they would become some."""
    for seen, *_ in review.kept:
        spec = seen.spec
        if spec is None or not spec.has("status"):
            _ask_on_the_way_back(review, seen)
        if spec is None:
            continue
        additions = [op for op in seen.modify.ops if isinstance(op, alembic_ops.AddColumnOp) and _is_made(op.column)]
        if spec.has("status"):
            name = spec.columns["status"].name
            status = name if any(op.column.name == name for op in additions) else None
            if status is not None:
                _replace(seen, additions, status, ask=True)
        elif _becomes_own_message(review, seen):
            _replace(seen, additions, None, ask=True)
            if not additions:
                review.front.append(ops.AddColumns(seen.name, [], existing_rows=..., schema=seen.schema))


def _is_made(column: sa.Column[object]) -> bool:
    return "sqlaqueue" in column.info


def _replace(seen: Seen, additions: list[alembic_ops.AddColumnOp], status: str | None, *, ask: bool) -> None:
    if not additions:
        return
    columns = [op.column for op in additions]
    add = ops.AddColumns(seen.name, columns, status=status, existing_rows=... if ask else None, schema=seen.schema)
    first = seen.modify.ops.index(additions[0])
    seen.modify.ops = [op for op in seen.modify.ops if op not in additions]
    seen.modify.ops.insert(first, add)


def _becomes_own_message(review: Review, seen: Seen) -> bool:
    if review.condition(seen):
        return True
    adds = (alembic_ops.AddColumnOp, alembic_ops.CreateIndexOp)
    return not review.was_queue(seen) and any(isinstance(op, adds) for op in seen.modify.ops)


def _ask_on_the_way_back(review: Review, seen: Seen) -> None:
    """Let the downgrade ask as well, where a queue without its state is to be one with a state again."""
    condition = review.condition(seen)
    for number, op in enumerate(seen.modify.ops):
        if isinstance(op, alembic_ops.DropColumnOp) and _names(condition, op.column_name):
            back = ops.AddColumns(
                seen.name, [op.to_column()], status=op.column_name, existing_rows=..., schema=seen.schema
            )
            seen.modify.ops[number] = ops.DropColumns(seen.name, [op.column_name], schema=seen.schema, previous=back)


def _names(condition: str, column: str) -> bool:
    quoted = '"' + column.replace('"', '""') + '"'
    words = condition.replace("(", " ").replace(")", " ").split()
    return column in words or quoted in condition
