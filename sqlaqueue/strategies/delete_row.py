"""Claim by deleting the job's row itself, which is its own message.

It serves ``delete_returning`` with ``rows_are_messages=True``, for a model without a ``status``. A claim returns
detached instances: their rows are deleted, so the Session could neither refresh nor update them. A job that runs again
is inserted again. A job that fails for good moves to ``sqlaqueue_dead_letter``, from where ``requeue()`` brings it
back. If the claim's transaction is rolled back, or the worker dies, the row is back as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.sql.visitors import replacement_traverse

from sqlaqueue._typing import AnySelect
from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.postgresql.due_times import transaction_id
from sqlaqueue.postgresql.due_times import was_committed as transaction_was_committed
from sqlaqueue.postgresql.side_tables import bury, dead_letter, key_json, request_cancellation, stored_rows
from sqlaqueue.queue.names import DEAD_LETTER, TURN
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy_protocol import (
    CancelSteps,
    ClaimedJobs,
    ClaimRequest,
    DeletedSteps,
    LetterSteps,
    RequiredPrivilege,
    Settlement,
    Verb,
)
from sqlaqueue.sql.engine import in_steps
from sqlaqueue.sql.portable import clock, converted, earlier
from sqlaqueue.sql.types import insert_unless
from sqlaqueue.strategies.attach import attach_to_dead_letters, everything, oldest_first
from sqlaqueue.strategies.base import TOKEN, HeldStrategy
from sqlaqueue.strategies.columns import add_index, named
from sqlaqueue.strategies.listing import SHOWN, labelled_keys
from sqlaqueue.strategies.unique_key import DUPLICATE, UniqueKey, key_text_of, reason, unique_key

# -- dead letters ------------------------------------------------------------------------------------------------------
# Dead letters as rows of the model's table, with the conditions of a caller's select applied to them.


def stored_columns(spec: QueueSpec) -> list[sa.Column[Any]]:
    """Return the columns of the model's table that an INSERT may write."""
    return [column for column in spec.table.c if column.computed is None]


def letters(spec: QueueSpec, chosen: AnySelect, verb: str) -> AnySelect:
    """Return the dead letters of a queue that ``chosen`` selects.

    The columns of the table of dead letters have names that begin with ``sqlaqueue_letter_``.

    :raises StatementError: when ``chosen`` joins another table.
    """
    dead = spec.side_tables[DEAD_LETTER]
    rows = stored_rows(dead.c.row, stored_columns(spec))
    found = sa.select(
        *(rows.c[column.key] for column in stored_columns(spec)),
        dead.c.queue.label("sqlaqueue_letter_queue"),
        dead.c.key.label("sqlaqueue_letter_key"),
        dead.c.state.label("sqlaqueue_letter_state"),
        dead.c.error.label("sqlaqueue_letter_error"),
        dead.c.created_at.label("sqlaqueue_letter_time"),
    ).select_from(dead.join(rows, sa.true()))
    return found.where(dead.c.queue == spec.name, *_conditions(spec, rows, chosen, verb))


def locked_letters(spec: QueueSpec, found: AnySelect) -> sa.CTE:
    """Lock dead letters; those that another transaction has locked are skipped."""
    return found.with_for_update(of=spec.side_tables[DEAD_LETTER], skip_locked=True).cte("sqlaqueue_letters")


def delete_letters(spec: QueueSpec, chosen: sa.CTE) -> sa.CTE:
    """Return the DELETE of dead letters, as a CTE that returns their keys."""
    dead = spec.side_tables[DEAD_LETTER]
    here = sa.and_(dead.c.queue == chosen.c.sqlaqueue_letter_queue, dead.c.key == chosen.c.sqlaqueue_letter_key)
    return sa.delete(dead).where(here).returning(dead.c.key).cte("sqlaqueue_deleted_letters")


def _conditions(spec: QueueSpec, rows: sa.FromClause, chosen: AnySelect, verb: str) -> list[sa.ColumnElement[bool]]:
    """Return the conditions of ``chosen`` on the model's table as conditions on ``rows``."""
    if any(isinstance(source, sa.Join) for source in chosen.get_final_froms()):
        name = spec.model.__name__
        msg = (
            f"{verb}(select({name}).join(...)): what failed of {name} is kept in another table, which cannot take the "
            f"place of {name} in a join; say it with exists(), such as where({name}.relation.has(...))"
        )
        raise StatementError(msg)

    def replace(element: Any, **_: Any) -> Any:
        mine = isinstance(element, sa.Column) and spec.table.c.contains_column(element)
        return rows.c[element.key] if mine else None

    conditions = [] if chosen.whereclause is None else [replacement_traverse(chosen.whereclause, {}, replace)]
    mapper = sa.inspect(chosen.column_descriptions[0]["entity"])
    if mapper is not spec.mapper and mapper.polymorphic_on is not None:
        identities = [part.polymorphic_identity for part in mapper.self_and_descendants]
        conditions.append(rows.c[mapper.polymorphic_on.key].in_(identities))
    return conditions


# -- insert unless duplicate -------------------------------------------------------------------------------------------
# Statements that insert rows of jobs again unless a duplicate is there by now, for a queue whose claims delete rows.
#
# Of several duplicates the first of ``rows`` is inserted. A row that is not inserted becomes a cancelled dead letter.


def insert_again(spec: QueueSpec, key: UniqueKey, rows: AnySelect) -> AnySelect:
    """Return the statement that inserts ``rows``, with all columns of the table, or buries them."""
    back, inserted = _inserted(spec, key, rows)
    duplicate = _duplicate_of(spec, key, back, inserted)
    left_out = sa.select(*back.c).where(~_is_among(spec, back, inserted)).cte("sqlaqueue_left_out")
    error = reason(_duplicate_of(spec, key, left_out, inserted))
    buried = bury(spec, left_out, "cancelled", error).cte("sqlaqueue_buried")
    return _judged(spec, back, inserted, duplicate).add_cte(buried)


def requeue_letters(spec: QueueSpec, key: UniqueKey, letters: sa.CTE, rows: AnySelect) -> AnySelect:
    """Return the statement that inserts dead letters as ``rows``, or marks them as cancelled.

    :param letters: the dead letters, locked, see :mod:`sqlaqueue.strategies.delete_row`.
    """
    back, inserted = _inserted(spec, key, rows)
    dead = spec.side_tables[DEAD_LETTER]
    here = sa.and_(dead.c.queue == letters.c.sqlaqueue_letter_queue, dead.c.key == letters.c.sqlaqueue_letter_key)
    is_back = _is_among(spec, letters, inserted)
    opened = sa.delete(dead).where(here, is_back).cte("sqlaqueue_opened")
    duplicate = _duplicate_of(spec, key, letters, inserted)
    marked = (
        sa.update(dead)
        # A duplicate that was committed after the statement had begun is not known yet: the letter stays as it is.
        .where(here, ~is_back, duplicate.is_not(None))
        .values(state="cancelled", error=reason(duplicate, dead.c.error), created_at=clock())
        .cte("sqlaqueue_marked")
    )
    return _judged(spec, back, inserted, _duplicate_of(spec, key, back, inserted)).add_cte(opened, marked)


def _inserted(spec: QueueSpec, key: UniqueKey, rows: AnySelect) -> tuple[sa.CTE, sa.CTE]:
    back = rows.cte("sqlaqueue_back")
    names = [column.key for column in back.c]
    insert = insert_unless(spec.table, (names, sa.select(*back.c)), unique=key.values(spec.table), where=None)
    returned = dict.fromkeys([*spec.keys, *key.stored])
    return back, insert.returning(*named(returned)).cte("sqlaqueue_inserted")


def _judged(spec: QueueSpec, back: sa.CTE, inserted: sa.CTE, duplicate: sa.ColumnElement[str]) -> AnySelect:
    shown = sa.case((~_is_among(spec, back, inserted), sa.func.coalesce(duplicate, "")))
    return sa.select(*(back.c[key.key] for key in spec.keys), shown.label(DUPLICATE))


def _is_among(spec: QueueSpec, rows: sa.FromClause, inserted: sa.CTE) -> sa.ColumnElement[bool]:
    here = sa.select(sa.literal(1)).select_from(inserted)
    return here.where(*(inserted.c[key.key] == rows.c[key.key] for key in spec.keys)).correlate(rows).exists()


def _duplicate_of(spec: QueueSpec, key: UniqueKey, rows: sa.FromClause, inserted: sa.CTE) -> sa.ColumnElement[str]:
    """Return the key of a duplicate that was there, or is among the rows that the statement inserts."""
    table = spec.table.alias("sqlaqueue_duplicate_row")
    found = [
        sa.select(key_text_of(spec, each))
        .where(key.are_duplicates(each, rows))
        .correlate(rows)
        .limit(1)
        .scalar_subquery()
        for each in (table, inserted)
    ]
    return sa.func.coalesce(*found, type_=sa.Text())


class DeleteRow(HeldStrategy):
    """``delete_returning`` for a table without a status, such as a plain list of things to do."""

    name: ClassVar[str] = "delete_returning"
    keeps_rows: ClassVar[bool] = False
    supports_scan_range: ClassVar[bool] = True
    supports_flow_control: ClassVar[bool] = True
    required_roles: ClassVar[Mapping[str, str]] = {}

    def attach(self, spec: QueueSpec) -> None:
        """Add the dead letters, and the claim's index unless the primary key is the claim order."""
        super().attach(spec)
        for column in spec.table.c:
            if column.identity is not None and column.identity.always:
                msg = (
                    f"{spec.model.__name__}.{column.key} is GENERATED ALWAYS, but a job without a status is inserted "
                    "again, with its key, when it is to run again; use Identity() without always=True, or keep status"
                )
                raise ConfigurationError(msg)
        dead_letter(spec)
        if spec.order_roles:
            add_index(spec, "claim", spec.claim_order)

    def attach_retention(self, spec: QueueSpec) -> None:
        """Add an index to the dead letters."""
        attach_to_dead_letters(spec, dead_letter(spec))

    def required_privileges(self, spec: QueueSpec) -> Iterator[RequiredPrivilege]:
        """Return those of all strategies, and all on the job table: claims delete rows, settlements insert them."""
        yield from everything(spec.table)
        yield from (each for each in super().required_privileges(spec) if each.table is not spec.table)

    def claim(self, request: ClaimRequest) -> AnySelect:
        """Lock the first due rows, delete them and return them."""
        spec, picked = request.spec, self.picked(request)
        claimed = (
            sa.delete(spec.table)
            .where(self.among(spec, spec.keys, picked))
            .returning(*named(spec.table.c))
            .cte("sqlaqueue_claimed")
        )
        # The row is deleted, so the identity of the transaction is the only evidence that it still holds the job.
        rows = self.in_claim_order(spec, claimed, picked).add_columns(transaction_id().label(TOKEN))
        return rows.add_columns(picked.c[TURN]) if TURN in picked.c else rows

    def claim_in_steps(self, request: ClaimRequest) -> tuple[AnySelect, sa.Delete]:
        """Return a SELECT of the keys, and the DELETE of the claimed rows."""
        return self.pick(request.spec, request.candidates, *request.spec.keys), sa.delete(request.spec.table)

    def picked(self, request: ClaimRequest) -> sa.CTE:
        """Return the keys of the first due rows, locked."""
        spec = request.spec
        waiting = self.pick(spec, request.candidates, *spec.keys)
        return self.take(request, waiting, spec.table)

    @staticmethod
    def lock(spec: QueueSpec, rows: AnySelect, *others: sa.FromClause, skip_locked: bool = True) -> AnySelect:
        """Return ``rows`` with the full lock, which their DELETE needs.

        A row that a child's foreign key has locked is passed over. With a weaker lock the DELETE would wait for it.
        """
        return rows.with_for_update(of=[spec.table, *others], skip_locked=skip_locked)

    def extend(self, spec: QueueSpec, held: ClaimedJobs, lease: Any) -> Verb:
        """Change nothing: the jobs are held for as long as the transaction is open."""
        keys = _keys(spec, _rows(spec, held, Settlement("pending")).subquery("sqlaqueue_held"))
        return in_steps(keys, DeletedSteps(spec, held))

    def settle(self, spec: QueueSpec, held: ClaimedJobs, settlement: Settlement) -> Verb:
        """Leave the rows deleted, insert them again, or move them to the dead letters."""
        rows = _rows(spec, held, settlement).subquery("sqlaqueue_held")
        if settlement.state == "pending":
            return _insert(spec, rows, held, settlement)
        if settlement.state == "completed":
            return in_steps(_keys(spec, rows), DeletedSteps(spec, held))

        def buried(rows: sa.Subquery) -> sa.Insert:
            return bury(spec, rows, settlement.state, settlement.error)

        verb = _keys(spec, rows).add_cte(buried(rows).cte("sqlaqueue_buried"))
        return in_steps(verb, DeletedSteps(spec, held, lambda jobs: buried(_again(spec, jobs, settlement))))

    def restore(self, spec: QueueSpec, held: ClaimedJobs) -> Verb:
        """Insert the rows again as they were, unless the transaction that deleted them was rolled back."""
        settlement = Settlement("pending", starts=0)
        rows = _rows(spec, held, settlement, was_committed=True).subquery("sqlaqueue_held")
        return _insert(spec, rows, held, settlement, was_committed=True)

    # -- the dead letters are the finished jobs of this queue ----------------------------------------------------------

    def cancel(self, spec: QueueSpec, chosen: AnySelect) -> Verb:
        """Move pending rows to the dead letters as cancelled, and request the cancellation of claimed ones."""
        wanted = self.pick(spec, chosen, *spec.keys).cte("sqlaqueue_wanted")
        free = self.lock(spec, self.pick(spec, chosen, *spec.keys)).cte("sqlaqueue_free")
        deleted = (
            sa.delete(spec.table)
            .where(self.same_key(spec, spec.keys, free))
            .returning(*named(spec.table.c))
            .cte("sqlaqueue_deleted")
        )
        running = sa.select(*wanted.c).except_(sa.select(*free.c)).subquery("sqlaqueue_running")
        requested = request_cancellation(spec, running).cte("sqlaqueue_requested")
        buried = bury(spec, deleted, "cancelled", None).cte("sqlaqueue_buried")
        keys = self.pick(spec, chosen, *spec.keys)
        steps = CancelSteps(spec, keys.order_by(*spec.keys), keys, sa.delete(spec.table))
        return in_steps(_keys(spec, deleted).add_cte(requested, buried), steps)

    def requeue(self, spec: QueueSpec, chosen: AnySelect) -> Verb:
        """Insert dead letters again, with no attempt counted."""
        all_of_them = letters(spec, chosen, "requeue")
        found = locked_letters(spec, all_of_them)
        resets: dict[str, Any] = {"attempts": sa.literal(0), "run_at": clock()}
        reset = {spec.columns[role].key: value for role, value in resets.items() if spec.has(role)}

        def fresh(found: sa.FromClause) -> dict[str, Any]:
            return {column.key: found.c[column.key] for column in stored_columns(spec)} | reset

        unique = unique_key(spec)
        if unique is not None:
            columns = [value.label(name) for name, value in fresh(found).items()]
            newest = (found.c.sqlaqueue_letter_time.desc(), *(found.c[key.key].desc() for key in spec.keys))
            return requeue_letters(spec, unique, found, sa.select(*columns).order_by(*newest))

        def back(found: sa.FromClause, *conditions: sa.ColumnElement[bool]) -> sa.Insert:
            values = fresh(found)
            return sa.insert(spec.table).from_select([*values], sa.select(*values.values()).where(*conditions))

        opened = delete_letters(spec, found)
        verb = back(found, found.c.sqlaqueue_letter_key == opened.c.key)
        return in_steps(verb, LetterSteps(spec, all_of_them, back))

    def job_states(self, spec: QueueSpec, keys: Sequence[Key]) -> AnySelect:
        """Select rows last and dead letters first: a job may be enqueued again under the key of a dead letter."""
        dead = spec.side_tables[DEAD_LETTER]
        error = sa.cast(spec.columns.get("last_error", sa.null()), sa.Text()).label("error")
        waits = sa.select(*spec.keys, sa.literal("pending", sa.Text()).label("state"), error)
        each = [[_cast(part, column) for part, column in zip(key, spec.keys, strict=True)] for key in keys]
        rows = stored_rows(dead.c.row, list(spec.keys))
        buried = (
            sa.select(*(rows.c[key.key] for key in spec.keys), dead.c.state, dead.c.error)
            .select_from(dead.join(rows, sa.true()))
            .where(dead.c.queue == spec.name, dead.c.key.in_([key_json(parts) for parts in each]))
        )
        both = sa.union_all(waits.where(spec.key_in(spec.keys, keys)), buried).subquery("sqlaqueue_both")
        return sa.select(both).order_by(both.c.state == "pending")

    def purge(self, spec: QueueSpec, chosen: AnySelect, states: Sequence[str], age: Any, limit: Any) -> Verb:
        """Delete dead letters."""
        dead = spec.side_tables[DEAD_LETTER]
        old = letters(spec, chosen, "purge").where(dead.c.state.in_(states)).limit(limit)
        if age is not None:
            moment = dead.c.created_at
            old = old.where(moment <= earlier(clock(), age)).order_by(*oldest_first(spec, states, moment))
        found = locked_letters(spec, old)
        return in_steps(_keys(spec, found).add_cte(delete_letters(spec, found)), LetterSteps(spec, old, limited=True))

    def list_jobs(self, spec: QueueSpec, chosen: AnySelect, states: Sequence[str] | None = None) -> AnySelect:
        """List the rows as pending jobs, and the dead letters as finished ones."""
        buried = letters(spec, chosen, "jobs").subquery("sqlaqueue_buried")
        roles = [role for role in SHOWN if spec.has(role) and role not in {"finished_at", "last_error"}]
        none: dict[str, sa.ColumnElement[Any]] = {
            "finished_at": sa.cast(sa.null(), sa.DateTime(timezone=True)),
            "last_error": sa.cast(sa.null(), sa.Text()),
        }
        rows = chosen.with_only_columns(
            *labelled_keys(spec, chosen),
            sa.literal("pending", sa.Text()).label("state"),
            *(spec.columns[role].label(role) for role in roles),
            *((spec.columns[role] if spec.has(role) else null).label(role) for role, null in none.items()),
            maintain_column_froms=True,
        )
        dead = sa.select(
            *(buried.c[key.key] for key in spec.keys),
            buried.c.sqlaqueue_letter_state,
            *(buried.c[spec.columns[role].key] for role in roles),
            buried.c.sqlaqueue_letter_time,
            buried.c.sqlaqueue_letter_error,
        )
        if states is not None:
            rows = rows.where(sa.true() if "pending" in states else sa.false())
            dead = dead.where(buried.c.sqlaqueue_letter_state.in_(states))
        both = sa.union_all(rows, dead).subquery("sqlaqueue_both")
        return sa.select(*both.c)


def _keys(spec: QueueSpec, rows: sa.FromClause) -> AnySelect:
    return sa.select(*(rows.c[key.key].label(key.key) for key in spec.keys))


def _insert(
    spec: QueueSpec, rows: sa.FromClause, held: ClaimedJobs, settlement: Settlement, *, was_committed: bool = False
) -> Verb:
    unique = unique_key(spec)
    if unique is not None:
        return insert_again(spec, unique, sa.select(*rows.c))

    def back(rows: sa.FromClause) -> sa.Insert:
        return sa.insert(spec.table).from_select([column.key for column in rows.c], sa.select(*rows.c))

    steps = DeletedSteps(spec, held, lambda jobs: back(_again(spec, jobs, settlement)), was_committed)
    return in_steps(back(rows), steps)


def _values(spec: QueueSpec, job: Any, settlement: Settlement) -> dict[str, Any]:
    """Return a deleted row as it is inserted again; the instance has counted its start already."""
    mapper = sa.inspect(job).mapper
    values: dict[str, Any] = {}
    for column in stored_columns(spec):
        if mapper.columns.contains_column(column):
            values[column.key] = getattr(job, mapper.get_property_by_column(column).key)
        elif any(other.columns.contains_column(column) for other in spec.mapper.self_and_descendants):
            values[column.key] = None  # of another class in the same table
    if spec.has("attempts"):
        key = spec.columns["attempts"].key
        values[key] = (values[key] or 1) - 1 + settlement.starts
    changes = {"run_at": settlement.run_at, "last_error": settlement.error}
    changes |= {"started_at": settlement.started_at, "claimed_by": settlement.worker}
    values |= {spec.columns[role].key: value for role, value in changes.items() if value is not None and spec.has(role)}
    return values


def _rows(
    spec: QueueSpec, held: ClaimedJobs, settlement: Settlement, *, was_committed: bool = False
) -> AnySelect | sa.CompoundSelect[Any]:
    """Return as a query the deleted rows that this transaction deleted, and has not inserted again.

    :param was_committed: select those that another transaction deleted, which was committed.
    """
    tokens = {key: token for token, keys in held.claims if not isinstance(keys, sa.BindParameter) for key in keys}
    selects: list[AnySelect] = []
    # Other engines name their transactions, and carry out steps instead: to write all rows would take them longer.
    is_executed = all(str(token).isdecimal() for token in tokens.values())
    for job in held.jobs if is_executed else held.jobs[:1]:
        key = sa.inspect(job).identity
        back = sa.exists().where(spec.key_in(spec.keys, [key]))
        mine = transaction_was_committed(tokens[key]) if was_committed else transaction_id() == tokens[key]
        selects.append(_row(spec, job, settlement).where(mine, ~back))
    return selects[0] if len(selects) == 1 else sa.union_all(*selects)


def _again(spec: QueueSpec, jobs: Sequence[Any], settlement: Settlement) -> sa.Subquery:
    """Return the rows of some instances, for an engine that has looked before which of them were deleted."""
    return sa.union_all(*(_row(spec, job, settlement) for job in jobs)).subquery("sqlaqueue_held")


def _row(spec: QueueSpec, job: Any, settlement: Settlement) -> AnySelect:
    values = _values(spec, job, settlement)
    columns = [column for column in stored_columns(spec) if column.key in values]
    return sa.select(*(_cast(values[column.key], column).label(column.key) for column in columns))


def _cast(value: Any, column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    # Each value is cast, since a bare NULL in a query has type text. None as a parameter would be the null of JSON.
    if value is None:
        value = sa.null()
    elif not isinstance(value, sa.ColumnElement):
        value = sa.bindparam(None, value, type_=column.type)
    return converted(value, column.type)
