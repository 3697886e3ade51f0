"""Rows that are their own message: the claim deletes the job's row itself.

Serves ``delete_returning`` with ``rows_are_messages=True``, for a model without a ``status``. A claimed instance is
handed out detached: its row is gone, and the Session could neither refresh nor update it. Running again means inserting
the row anew; a job that fails for good moves to ``sqlaqueue_dead_letter``, from where ``requeue()`` brings it back. The
rollback of the claim's transaction, or a crash, brings the row back as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.sql.visitors import replacement_traverse

from sqlaqueue._typing import AnySelect
from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.keys import Key
from sqlaqueue.queue.backend import DEAD_LETTER, backend
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.queue.strategy import ClaimedJobs, ClaimRequest, RequiredPrivilege, Settlement, Verb
from sqlaqueue.strategies.base import TOKEN, ClaimStrategy, named
from sqlaqueue.strategies.indexes import add_index
from sqlaqueue.strategies.job_listing import SHOWN, labelled_keys
from sqlaqueue.strategies.required_privileges import everything
from sqlaqueue.strategies.retention_index import attach_to_dead_letters, oldest_first


class OwnMessage(ClaimStrategy):
    """``delete_returning`` for a table without a state, such as a plain list of things to do."""

    name: ClassVar[str] = "delete_returning"
    holds_transaction: ClassVar[bool] = True
    keeps_rows: ClassVar[bool] = False
    supports_scan_range: ClassVar[bool] = True
    required_roles: ClassVar[Mapping[str, str]] = {}

    def attach(self, spec: QueueSpec) -> None:
        """Add the claim's index where the key alone is not its order, the ledger and the dead letters."""
        super().attach(spec)
        for column in spec.table.c:
            if column.identity is not None and column.identity.always:
                msg = (
                    f"{spec.model.__name__}.{column.key} is GENERATED ALWAYS, but a job without a status is inserted "
                    "again, with its key, when it is to run again; use Identity() without always=True, or keep status"
                )
                raise ConfigurationError(msg)
        backend().side_tables.crash_journal(spec)
        backend().side_tables.dead_letter(spec)
        if spec.order_roles:
            add_index(spec, "claim", spec.claim_order)

    def attach_retention(self, spec: QueueSpec) -> None:
        """Add an index to the dead letters."""
        attach_to_dead_letters(spec, backend().side_tables.dead_letter(spec))

    def required_privileges(self, spec: QueueSpec) -> Iterator[RequiredPrivilege]:
        """The claim deletes the job's row, and a job that runs again is inserted."""
        yield from everything(spec.table)
        yield from (right for right in super().required_privileges(spec) if right.table is not spec.table)

    def claim(self, request: ClaimRequest) -> AnySelect:
        """Lock the best rows, delete them and return them."""
        spec = request.spec
        waiting = self.pick(spec, request.candidates, *spec.keys)
        picked = backend().claims.take(request, waiting, spec.table, lock_rows=self.lock, first_due=self.best)
        claimed = (
            sa.delete(spec.table)
            .where(self.among(spec, spec.keys, picked))
            .returning(*named(spec.table.c))
            .cte("claimed")
        )
        # The row is gone: that the transaction is still the same is all that tells whose the job is.
        return self.in_claim_order(spec, claimed).add_columns(backend().claims.transaction_id().label(TOKEN))

    @staticmethod
    def lock(spec: QueueSpec, rows: AnySelect, *others: sa.FromClause, skip_locked: bool = True) -> AnySelect:
        """Return ``rows`` with the full lock, since they are about to be deleted.

        A row that a child's foreign key shares is passed over; asking for less would make the DELETE wait for it.
        """
        return rows.with_for_update(of=[spec.table, *others], skip_locked=skip_locked)

    def extend(self, spec: QueueSpec, held: ClaimedJobs, lease: Any) -> Verb:
        """Change nothing: the jobs are held for as long as the transaction lives."""
        return _keys(spec, _rows(spec, held, Settlement("pending")).subquery("held"))

    def restore(self, spec: QueueSpec, held: ClaimedJobs) -> Verb:
        """Insert the rows again as they were, unless the transaction that deleted them was rolled back."""
        rows = _rows(spec, held, Settlement("pending", starts=0), was_committed=True).subquery("held")
        return sa.insert(spec.table).from_select([column.key for column in rows.c], sa.select(*rows.c))

    def settle(self, spec: QueueSpec, held: ClaimedJobs, settlement: Settlement) -> Verb:
        """Leave the rows deleted, insert them again, or move them to the dead letters."""
        rows = _rows(spec, held, settlement).subquery("held")
        if settlement.state == "pending":
            return sa.insert(spec.table).from_select([column.key for column in rows.c], sa.select(*rows.c))
        if settlement.state == "completed":
            return _keys(spec, rows)
        return _keys(spec, rows).add_cte(
            backend().side_tables.bury(spec, rows, settlement.state, settlement.error).cte("buried")
        )

    # -- the dead letters are this queue's finished jobs -------------------------------------------------------

    def cancel(self, spec: QueueSpec, chosen: AnySelect) -> Verb:
        """Move waiting rows to the dead letters as cancelled; ask those that somebody holds to stop."""
        wanted = self.pick(spec, chosen, *spec.keys).cte("wanted")
        free = self.lock(spec, self.pick(spec, chosen, *spec.keys)).cte("free")
        deleted = (
            sa.delete(spec.table)
            .where(self.same_key(spec, spec.keys, free))
            .returning(*named(spec.table.c))
            .cte("deleted")
        )
        running = sa.select(*wanted.c).except_(sa.select(*free.c)).subquery("running")
        asked = backend().side_tables.request_cancellation(spec, running).cte("asked")
        buried = backend().side_tables.bury(spec, deleted, "cancelled", None).cte("buried")
        return _keys(spec, deleted).add_cte(asked, buried)

    def requeue(self, spec: QueueSpec, chosen: AnySelect) -> Verb:
        """Insert dead letters again, their attempts counted from zero."""
        dead = spec.side_tables[DEAD_LETTER]
        letters = _locked(_letters(spec, dead, chosen, "requeue"), dead).cte("letters")
        opened = (
            sa.delete(dead)
            .where(dead.c.queue == letters.c.letter_queue, dead.c.key == letters.c.letter_key)
            .returning(dead.c.key)
            .cte("opened")
        )
        fresh: dict[str, Any] = {column.key: letters.c[column.key] for column in _stored(spec)}
        resets: dict[str, Any] = {"attempts": sa.literal(0), "run_at": clock()}
        fresh |= {spec.columns[role].key: value for role, value in resets.items() if spec.has(role)}
        rows = sa.select(*fresh.values()).where(letters.c.letter_key == opened.c.key)
        return sa.insert(spec.table).from_select(list(fresh), rows)

    def job_state(self, spec: QueueSpec, key: Key) -> AnySelect:
        """Look for the row, then among the dead letters: a row may have been enqueued after its namesake died."""
        dead = spec.side_tables[DEAD_LETTER]
        name = backend().side_tables.key_json(
            [_cast(part, column) for part, column in zip(key, spec.keys, strict=True)]
        )
        waits = sa.select(sa.literal("pending", sa.Text()).label("state"), sa.cast(sa.null(), sa.Text()).label("error"))
        buried = sa.select(dead.c.state, dead.c.error).where(dead.c.queue == spec.name, dead.c.key == name)
        both = sa.union_all(waits.where(spec.key_in(spec.keys, [key])), buried).subquery("both")
        return sa.select(both).order_by(both.c.state != "pending").limit(1)

    def purge(self, spec: QueueSpec, chosen: AnySelect, states: Sequence[str], age: Any, limit: Any) -> Verb:
        """Delete dead letters."""
        dead = spec.side_tables[DEAD_LETTER]
        old = _locked(_letters(spec, dead, chosen, "purge"), dead).where(dead.c.state.in_(states))
        if age is not None:
            moment = dead.c.created_at
            old = old.where(moment <= clock() - age).order_by(*oldest_first(spec, states, moment))
        letters = old.limit(limit).cte("letters")
        gone = (
            sa.delete(dead)
            .where(dead.c.queue == letters.c.letter_queue, dead.c.key == letters.c.letter_key)
            .returning(dead.c.key)
            .cte("gone")
        )
        return _keys(spec, letters).add_cte(gone)

    def list_jobs(self, spec: QueueSpec, chosen: AnySelect, states: Sequence[str] | None = None) -> AnySelect:
        """Show the rows as waiting jobs, and the dead letters as those that are finished."""
        dead = spec.side_tables[DEAD_LETTER]
        buried = _letters(spec, dead, chosen, "survey").subquery("buried")
        roles = [role for role in SHOWN if spec.has(role) and role not in {"finished_at", "last_error"}]
        none = {"finished_at": sa.cast(sa.null(), dead.c.created_at.type), "last_error": sa.cast(sa.null(), sa.Text())}
        rows = chosen.with_only_columns(
            *labelled_keys(spec, chosen),
            sa.literal("pending", sa.Text()).label("state"),
            *(spec.columns[role].label(role) for role in roles),
            *((spec.columns[role] if spec.has(role) else null).label(role) for role, null in none.items()),
            maintain_column_froms=True,
        )
        letters = sa.select(
            *(buried.c[key.key] for key in spec.keys),
            buried.c.letter_state,
            *(buried.c[spec.columns[role].key] for role in roles),
            buried.c.letter_time,
            buried.c.letter_error,
        )
        if states is not None:
            rows = rows.where(sa.true() if "pending" in states else sa.false())
            letters = letters.where(buried.c.letter_state.in_(states))
        both = sa.union_all(rows, letters).subquery("both")
        return sa.select(*both.c)


def _keys(spec: QueueSpec, rows: sa.FromClause) -> AnySelect:
    return sa.select(*(rows.c[key.key].label(key.key) for key in spec.keys))


def _stored(spec: QueueSpec) -> list[sa.Column[Any]]:
    return [column for column in spec.table.c if column.computed is None]


def _values(spec: QueueSpec, job: Any, settlement: Settlement) -> dict[str, Any]:
    """Return a deleted row as it is written again; the instance in memory has counted its start already."""
    mapper = sa.inspect(job).mapper
    values: dict[str, Any] = {}
    for column in _stored(spec):
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
    """Return those of the deleted rows as a query that this transaction deleted, and has not inserted again.

    :param was_committed: those that another one deleted, which was committed.
    """
    tokens = {key: token for token, keys in held.claims if not isinstance(keys, sa.BindParameter) for key in keys}
    selects: list[AnySelect] = []
    for job in held.jobs:
        values = _values(spec, job, settlement)
        columns = [
            _cast(values[column.key], column).label(column.key) for column in _stored(spec) if column.key in values
        ]
        key = sa.inspect(job).identity
        back = sa.exists().where(spec.key_in(spec.keys, [key]))
        mine = (
            backend().claims.was_committed(tokens[key])
            if was_committed
            else backend().claims.transaction_id() == tokens[key]
        )
        selects.append(sa.select(*columns).where(mine, ~back))
    return selects[0] if len(selects) == 1 else sa.union_all(*selects)


def _cast(value: Any, column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    # Each value is cast, since a bare NULL in a query reads as text; None as a parameter would be JSON's own null.
    if value is None:
        value = sa.null()
    elif not isinstance(value, sa.ColumnElement):
        value = sa.bindparam(None, value, type_=column.type)
    return sa.cast(value, column.type)


def _letters(spec: QueueSpec, dead: sa.Table, chosen: AnySelect, verb: str) -> AnySelect:
    """Return the dead letters as rows of the model's table, with the user's conditions applied to them.

    What the table of dead letters itself knows of them has names that begin with ``letter_``.
    """
    rows = backend().side_tables.stored_rows(dead, _stored(spec))
    letters = sa.select(
        *(rows.c[column.key] for column in _stored(spec)),
        dead.c.queue.label("letter_queue"),
        dead.c.key.label("letter_key"),
        dead.c.state.label("letter_state"),
        dead.c.error.label("letter_error"),
        dead.c.created_at.label("letter_time"),
    ).select_from(dead.join(rows, sa.true()))
    return letters.where(dead.c.queue == spec.name, *_conditions(spec, rows, chosen, verb))


def _locked(letters: AnySelect, dead: sa.Table) -> AnySelect:
    return letters.with_for_update(of=dead, skip_locked=True)


def _conditions(spec: QueueSpec, rows: sa.FromClause, chosen: AnySelect, verb: str) -> list[sa.ColumnElement[bool]]:
    """Return what ``chosen`` asks of rows in the model's table as conditions on ``rows``."""
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
