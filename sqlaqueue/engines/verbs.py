"""The verbs in steps, for engines that cannot carry one out as one statement.

Each verb is a plain function: candidates, locks, changes, rows. A statement tells by an execution option which verb it
is (:func:`~sqlaqueue.sql.engine.in_steps`). The steps are executed before it, in the same transaction, and a verb
returns what is executed in its place: the rows that were changed.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakSet

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import FromStatement
from sqlalchemy.orm.util import LoaderCriteriaOption
from sqlalchemy.sql.base import Executable

from sqlaqueue._typing import AnySelect
from sqlaqueue.engines.admission import Admission
from sqlaqueue.engines.notifications import send
from sqlaqueue.engines.waits import Looks, bring_back, cancellations_of_members, look
from sqlaqueue.engines.work import KEYS, Given, Work, among_step, several, table_of
from sqlaqueue.flow_control.keys import KeyOrder
from sqlaqueue.notify_payloads import CLAIMED, Signal
from sqlaqueue.postgresql.side_tables import bury, request_cancellation
from sqlaqueue.postgresql.triggers import channel_of
from sqlaqueue.queue.names import DEAD_LETTER
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.strategy_protocol import (
    CancelSteps,
    ClaimSteps,
    DeletedSteps,
    FailSteps,
    JudgeSteps,
    LetterSteps,
    LockSteps,
    LookSteps,
    RescueSteps,
    ReturnSteps,
)
from sqlaqueue.sql.engine import OURS, OtherEngine, Steps, mark_of, own_work, steps_for
from sqlaqueue.sql.portable import clock
from sqlaqueue.sql.types import as_library_statement
from sqlaqueue.strategies.base import TOKEN
from sqlaqueue.strategies.columns import by_index, by_key, index_for, named
from sqlaqueue.strategies.listing import has_history, record_rescued
from sqlaqueue.strategies.unique_key import DUPLICATE, judge, unique_key
from sqlaqueue.strategies.update_status import LEASE_EXPIRED

_WINDOW = "sqlaqueue_window"
"""The name of the parameter with the number of rows that a query of candidates reads."""


def carry_out(
    engine: OtherEngine, connection: sa.Connection, steps: Steps, statement: Any, given: Given
) -> tuple[Any, Given]:
    """Execute the steps of a statement; return what is executed at the end, with its parameters."""
    criteria = [*_criteria_of(statement)]
    for each in steps.each:
        work = Work(engine, connection, steps.shown, given, criteria)
        statement, given = _VERBS[type(each)](work, each, statement)
    return statement, given


def _criteria_of(statement: Any) -> Iterator[Any]:
    while isinstance(statement, Executable):
        options = statement._with_options  # noqa: SLF001 - SQLAlchemy 2.0 and 2.1 have no public access to the options
        yield from (option for option in options if isinstance(option, LoaderCriteriaOption))
        statement = getattr(statement, "element", None)


# -- claim -------------------------------------------------------------------------------------------------------------


class _ClaimStatements:
    """The statements of one claim, built once."""

    def __init__(self, work: Work, steps: ClaimSteps) -> None:
        request, spec, engine = steps.request, steps.request.spec, work.engine
        waiting, change = spec.strategy.claim_in_steps(request)
        waiting = work.limited(waiting)
        among = spec.key_in(spec.keys, sa.bindparam(KEYS, (), expanding=len(spec.keys) > 1))
        self.spec, self.request, self.announcements = spec, request, steps.announcements
        first = spec.strategy.first_due(spec, waiting, spec.table, request.limit, request.scan_range)
        self.waiting, self.candidates = waiting, first
        if not request.few:
            self.candidates = engine.locked(by_index(first, spec.table, index_for(spec, "claim")))
        rows = spec.strategy.first_due(spec, waiting, spec.table, None, request.scan_range)
        self.window = rows.limit(sa.bindparam(_WINDOW, type_=sa.Integer()))
        self.again = engine.locked(by_index(rows.where(among), spec.table, "PRIMARY"))
        self.admission = None if request.admits_all or not spec.flow_rules else Admission(engine, request, waiting)
        self.looks: Looks | None = None
        if spec.waits and not request.admits_all:
            self.looks = Looks(engine, request, self.window, _WINDOW, among, KEYS)
        self.change: Any = None
        self.deletes = False
        self.rows: Any
        if isinstance(change, sa.Delete) and steps.columns:
            token = sa.bindparam(TOKEN, type_=sa.Text()).label(TOKEN)
            deleted = as_library_statement(change.where(among).returning(*named(steps.columns), token))
            self.rows, self.deletes = deleted.execution_options(**{OURS: spec}), True
            return
        if isinstance(change, sa.Update) and steps.columns:
            self.change = by_key(change.where(among))
        shown = by_index(sa.select(*(steps.columns or spec.keys)).where(among), spec.table, "PRIMARY")
        if self.change is None:
            # At REPEATABLE READ of MariaDB, a SELECT without a lock would show the rows as they were before.
            shown = engine.locked(shown, waits=True)
        self.rows = as_library_statement(shown.order_by(*spec.claim_order))

    def wanted(self, work: Work) -> int:
        """Return how many jobs the claim takes at most."""
        limit = self.request.limit
        return int(work.given.get(limit.key, limit.value))


_claims: WeakKeyDictionary[OtherEngine, WeakKeyDictionary[ClaimSteps, _ClaimStatements]] = WeakKeyDictionary()
"""The statements of claims. A program may execute one statement on several engines."""


def _claim(work: Work, steps: ClaimSteps, statement: Any) -> tuple[Any, Given]:
    """Lock the first due rows, change them, and return them in claim order."""
    connection, given = work.connection, work.given
    known = {} if work.criteria else _claims.setdefault(work.engine, WeakKeyDictionary())
    parts = known.get(steps)
    if parts is None:
        parts = known[steps] = _ClaimStatements(work, steps)
    spec = parts.spec
    work.engine.begin_steps(connection, parts.rows)
    keys = _lock_first(work, parts) if parts.looks is None else _lock_ready(work, parts, parts.looks)
    bound = {KEYS: spec.bind_keys(several(keys))}
    if parts.change is not None and keys:
        connection.execute(parts.change, bound)
    if parts.announcements is not None:
        answered = given.get(parts.announcements.key, "")
        send(connection.connection.info, channel_of(spec), f"{CLAIMED} {len(keys)} {answered}")
    if parts.deletes:
        shown: Any = work.shown
        return shown(parts.rows), {**bound, TOKEN: _name_transaction(connection) if keys else ""}
    rows = parts.rows if parts.admission is None else parts.admission.in_order(parts.rows, keys)
    return (_returning(statement, rows) if steps.columns else rows), bound


def _lock_first(work: Work, parts: _ClaimStatements) -> list[Key]:
    """Lock the first due rows; return their keys."""
    spec = parts.spec
    if parts.admission is not None:
        return parts.admission.keys(work.connection, work.given)
    if spec.strategy.holds_transaction and not work.engine.has_one_writer:
        return _hold(work, parts)
    if parts.request.few:
        return work.lock(spec.keys, parts.candidates, waits=False)
    return work.found(spec.keys, parts.candidates)


def _lock_ready(work: Work, parts: _ClaimStatements, looks: Looks) -> list[Key]:
    """Lock the first due rows of jobs that do not wait for others; return their keys."""
    wanted = parts.wanted(work)
    has_looked = looks.before(work, wanted)
    keys = looks.after(work, _lock_first(work, parts))
    # What flow control has admitted counts as begun, so it is asked once.
    if len(keys) == wanted or has_looked or parts.admission is not None or not looks.look(work, wanted):
        return keys
    return looks.after(work, _lock_first(work, parts))


def _hold(work: Work, parts: _ClaimStatements) -> list[Key]:
    """Lock the first due rows for as long as the jobs run; return their keys.

    They are found without locks, in windows, and locked by their keys. MariaDB keeps the lock of each row that a scan
    looks at, also of those that the program's filter passes over.
    """
    spec, wanted, keys, tried = parts.spec, parts.wanted(work), list[Key](), set[Key]()
    size = 2 * wanted + 16
    while len(keys) < wanted:
        window = [tuple(row) for row in work.connection.execute(parts.window, {**work.given, _WINDOW: size})]
        fresh = [key for key in dict.fromkeys(window) if key not in tried]
        while fresh and len(keys) < wanted:
            chosen = fresh[: wanted - len(keys)]
            fresh = fresh[len(chosen) :]
            tried.update(chosen)
            locked = work.connection.execute(parts.again, {**work.given, KEYS: spec.bind_keys(chosen)})
            keys += dict.fromkeys(tuple(row) for row in locked)
        if len(window) < size:
            break
        size *= 4
    return keys


def _returning(statement: Any, rows: Any) -> Any:
    """Return the statement of a claim with the rows that were claimed, and with the options of the program."""
    clone, inner = statement.options(), statement.element
    # As often as the program has wrapped the claim by from_statement().
    clone.element = _returning(inner, rows) if isinstance(inner, FromStatement) else rows
    return clone


# -- settle, extend, purge ---------------------------------------------------------------------------------------------


def _lock(work: Work, steps: LockSteps, statement: Any) -> tuple[Any, Given]:
    """Lock the rows of a change, which finds them by their keys."""
    if work.engine.has_one_writer:
        return statement, work.given
    keys = work.lock(steps.keys, steps.rows, waits=steps.waits, limited=steps.limited)
    if steps.joins:
        # By the keys alone: to join the SELECT, the server may look at other rows, and wait for their locks.
        statement = statement.where(among_step(steps.keys))
        statement._where_criteria = statement._where_criteria[-1:]  # noqa: SLF001 - there is no public way to take one away
    if steps.values:
        statement = statement.values(work.read(steps.keys, steps.values, keys))
    return statement, {**work.given, KEYS: several(keys) if len(steps.keys) > 1 else [key[0] for key in keys]}


def _cancel_behind(work: Work, steps: FailSteps, statement: Any) -> tuple[Any, Given]:
    """Cancel the pending jobs behind heads of an order that are about to fail."""
    spec, connection = steps.spec, work.connection
    order = KeyOrder(spec, spec.config.order.per, spec.config.order)
    columns = [*order.columns, *order.by]
    has_place = [column.is_not(None) for column in order.columns]
    heads = sa.select(*spec.keys).where(steps.failing, *has_place).order_by(*spec.keys)
    failing = work.lock(spec.keys, heads, waits=steps.waits)
    rows = (
        sa.select(*columns, order.hashed(spec.table)).where(work.among(spec, spec.keys, failing)).order_by(*spec.keys)
    )
    roles = {"status": spec.status_value("cancelled"), "finished_at": clock(), "lease_token": None}
    values = {spec.columns[role]: value for role, value in roles.items() if spec.has(role)}
    for *row, hashed in connection.execute(rows).all() if failing else ():
        same = [column == value for column, value in zip(order.columns, row, strict=False)]
        place = [sa.literal(value, by.type) for by, value in zip(order.by, row[len(same) :], strict=True)]
        pending = [spec.in_state("pending"), *same, order.hashed(spec.table) == hashed]
        behind = sa.select(*spec.keys).where(*pending, sa.tuple_(*order.by) > sa.tuple_(*place)).order_by(*spec.keys)
        # By their keys and in their order, as claims lock them: two transactions must not wait for each other.
        keys = [tuple(key) for key in connection.execute(behind)]
        cancelled = (
            sa.update(spec.table).where(work.among(spec, spec.keys, keys), spec.in_state("pending")).values(values)
        )
        if keys:
            connection.execute(by_key(cancelled))
    return statement, work.given


# -- cancel, rescue, requeue -------------------------------------------------------------------------------------------


def _cancel(work: Work, steps: CancelSteps, _: Any) -> tuple[Any, Given]:
    """Cancel the jobs that are not running and not locked, and request the cancellation of the others."""
    spec = steps.spec
    with work.all_or_none(steps.waiting):
        free = work.lock(spec.keys, steps.waiting, waits=False)
        if spec.waits:
            # Nobody runs them, so a request would be forgotten. Who adds members to a batch has locked it meanwhile.
            others = work.lock(spec.keys, steps.waiting.where(spec.in_state("waiting")), waits=True)
            free = [*dict.fromkeys([*free, *others])]
        among = work.among(spec, spec.keys, free)
        if free and isinstance(steps.cancelled, sa.Delete):
            rows = by_index(sa.select(*named(spec.table.c)).where(among), spec.table, "PRIMARY")
            work.connection.execute(bury(spec, rows.subquery("sqlaqueue_deleted"), "cancelled", None), work.given)
            work.changed(spec.keys, steps.cancelled.where(among))
        elif free and isinstance(steps.cancelled, sa.Update):
            work.connection.execute(by_key(steps.cancelled.where(among)))
        unfinished = steps.unfinished
        if work.criteria:
            # SQLAlchemy applies them to a SELECT that is executed, not to one within an INSERT.
            mine = work.found(spec.keys, work.limited(unfinished))
            unfinished = unfinished.where(work.among(spec, spec.keys, mine))
        running = unfinished.subquery("sqlaqueue_running")
        work.connection.execute(request_cancellation(spec, running), work.given)
        for members in cancellations_of_members(work, spec, free):
            _cancel(Work(work.engine, work.connection, lambda rows: rows, {}, ()), members, None)
    return work.listed(spec, free) if isinstance(steps.cancelled, sa.Delete) else work.returned(spec, free)


def _rescue(work: Work, steps: RescueSteps, _: Any) -> tuple[Any, Given]:
    """Insert the attempts of jobs whose lease has expired, and rescue these jobs."""
    spec = steps.spec
    with work.all_or_none(steps.expired):
        keys = work.lock(spec.keys, steps.expired, waits=False)
        if keys:
            _record(work, steps.spec, steps.expired, keys)
            values = work.read(spec.keys, steps.values, keys)
            rescued = steps.rescued.where(work.among(spec, spec.keys, keys)).values(values)
            keys = work.changed(spec.keys, rescued)
    return work.returned(spec, keys)


def _record(work: Work, spec: Any, runs: AnySelect, keys: Sequence[Key]) -> None:
    """Insert the attempts that a rescue ends.

    :param runs: a SELECT of the keys of jobs, and of what the history has of their runs.
    """
    keyed = [*runs.selected_columns][: len(spec.keys)]
    # At REPEATABLE READ the server locks each row that such a SELECT looks at.
    mine = by_index(runs.where(work.among(spec, keyed, keys)), table_of(keyed, spec.keys), "PRIMARY")
    work.connection.execute(record_rescued(spec, mine.subquery("sqlaqueue_expired"), LEASE_EXPIRED), work.given)


def _change_if_unique(work: Work, steps: JudgeSteps, _: Any) -> tuple[Any, Given]:
    """Look for duplicates of the jobs, and change those with and those without one."""
    spec, number, changed = steps.spec, len(steps.spec.keys), list[Key]()
    duplicates: dict[Key, Any] = {}
    unique: Any = unique_key(spec)
    with work.all_or_none(steps.rows):
        locked = work.lock(spec.keys, steps.rows, waits=steps.waits)
        mine = steps.rows.where(work.among(spec, spec.keys, locked))
        judged: AnySelect = sa.select(*judge(spec, unique, mine, *steps.more).c)
        types = [judged.selected_columns[name].type for name in steps.more]
        alike: dict[tuple[Any, ...], list[Key]] = {}
        for row in work.connection.execute(judged, work.given).all() if locked else ():
            key = tuple(row[:number])
            duplicates[key] = row[-1]
            alike.setdefault((*row[number:-1], row[-1] is None), []).append(key)
        if steps.rescues and has_history(spec):
            # A job that has waited for its duplicate had no run.
            ran = [key for (waited, *_), keys in alike.items() if not waited for key in keys]
            if ran:
                _record(work, spec, steps.rows, ran)
        for (*values, is_alone), keys in alike.items():
            given: dict[str, Any] = {
                name: sa.literal(value, type_) for name, value, type_ in zip(steps.more, values, types, strict=True)
            }
            # A job is told which is its duplicate, by a CASE that is not too long.
            size = len(keys) if is_alone else _TOLD
            for some in (keys[first : first + size] for first in range(0, len(keys), size)):
                told = SimpleNamespace(c={**given, DUPLICATE: _duplicate_of(spec, some, duplicates)})
                back, instead, where = steps.change(told)
                written = back if is_alone else instead
                if written:
                    update = sa.update(spec.table).where(work.among(spec, spec.keys, some), *where)
                    changed += work.changed(spec.keys, update.values(work.read(spec.keys, written, some)))
    shown = changed if steps.rescues else [*duplicates]
    return work.returned(spec, shown, _duplicate_of(spec, shown, duplicates).label(DUPLICATE))


_TOLD = 100
"""To how many jobs one statement tells their duplicates."""


def _duplicate_of(spec: Any, keys: Sequence[Key], duplicates: Mapping[Key, Any]) -> sa.ColumnElement[Any]:
    """Return the key of the duplicate of each of some jobs, as a text; NULL for one without."""
    taken = [(_is(spec, key), sa.literal(duplicates[key], sa.Text())) for key in keys if duplicates[key] is not None]
    return sa.case(*taken, else_=sa.null()) if taken else sa.literal(None, sa.Text())


def _is(spec: Any, key: Key) -> sa.ColumnElement[bool]:
    return sa.and_(*(column == part for column, part in zip(spec.keys, key, strict=True)))


# -- jobs whose rows claims delete -------------------------------------------------------------------------------------
# The database tells neither which transaction has deleted a row, nor whether that was committed. So the transaction
# gets a name with its first claim, which is the token of its jobs, and a savepoint. If that is still there when the
# transaction is rolled back, then no statement has ended the transaction before, such as COMMIT or CREATE TABLE.

_TRANSACTION = "sqlaqueue_transaction"
"""The savepoint, and the entry in the ``info`` of a connection with the name of its transaction."""

_undone: deque[str] = deque(maxlen=10_000)
"""The names of the last transactions that were rolled back."""


def _name_transaction(connection: sa.Connection) -> str:
    info = connection.connection.info
    if _TRANSACTION not in info:
        connection.exec_driver_sql(f"SAVEPOINT {_TRANSACTION}")
        info[_TRANSACTION] = f"claim {uuid4().hex}"
    name: str = info[_TRANSACTION]
    return name


def _forget_transactions(engine: sa.Engine) -> None:
    """Forget the name of a transaction when it ends."""

    @event.listens_for(engine, "commit")
    @event.listens_for(engine, "commit_twophase")
    def committed(connection: sa.Connection, *_: Any) -> None:
        if not connection.invalidated:
            connection.connection.info.pop(_TRANSACTION, None)

    @event.listens_for(engine, "rollback")
    @event.listens_for(engine, "rollback_twophase")
    def rolled_back(connection: sa.Connection, *_: Any) -> None:
        name = None if connection.invalidated else connection.connection.info.pop(_TRANSACTION, None)
        if name is None:
            return
        with contextlib.suppress(Exception):
            own: Any = connection.connection.cursor()
            own.execute(f"RELEASE SAVEPOINT {_TRANSACTION}")
            own.close()
            _undone.append(name)


def _write_deleted(work: Work, steps: DeletedSteps, _: Any) -> tuple[Any, Given]:
    """Insert jobs again, or bury them, whose rows a claim has deleted, and that have not come back since."""
    spec, present = steps.spec, work.connection.connection.info.get(_TRANSACTION)
    held: Any = steps.held.claims
    tokens: dict[Key, str] = {key: token for token, keys in held for key in keys}
    jobs: dict[Key, Any] = {}
    for job in steps.held.jobs:
        key: Any = sa.inspect(job).identity
        if tokens[key] not in _undone if steps.was_committed else tokens[key] == present:
            jobs[key] = job
    back = by_index(sa.select(*spec.keys).where(work.among(spec, spec.keys, [*jobs])), spec.table, "PRIMARY")
    work.engine.begin_steps(work.connection, back)
    for key in work.found(spec.keys, back) if jobs else ():
        del jobs[key]
    if jobs and steps.change is not None:
        _insert(work, spec, steps.change([*jobs.values()]))
    return work.listed(spec, [*jobs])


def _insert(work: Work, spec: Any, insert: sa.Insert) -> None:
    work.connection.execute(insert, work.given)
    if insert.table is spec.table:
        send(work.connection.connection.info, channel_of(spec), Signal.POLL)


def _delete_letters(work: Work, steps: LetterSteps, _: Any) -> tuple[Any, Given]:
    """Delete dead letters, and insert them as jobs where these are requeued."""
    spec, dead = steps.spec, steps.spec.side_tables[DEAD_LETTER]
    # As the text that is stored: another one may be the same JSON.
    places = [dead.c.queue, sa.type_coerce(dead.c.key, sa.Text())]
    with work.all_or_none(steps.letters):
        wanted = steps.letters.with_only_columns(*places, maintain_column_froms=True)
        among = sa.tuple_(*places).in_(several(work.lock(places, wanted, waits=False, limited=steps.limited)))
        mine = by_index(steps.letters.where(among), dead, "PRIMARY").subquery("sqlaqueue_letters")
        keys = work.found(spec.keys, sa.select(*(mine.c[key.key] for key in spec.keys)))
        if keys and steps.back is not None:
            _insert(work, spec, steps.back(mine))
        if keys:
            work.changed([dead.c.queue, dead.c.key], sa.delete(dead).where(among))
    return work.listed(spec, keys)


_VERBS: Mapping[type[Any], Callable[[Work, Any, Any], tuple[Any, Given]]] = {
    ClaimSteps: _claim,
    LockSteps: _lock,
    LookSteps: look,
    ReturnSteps: bring_back,
    FailSteps: _cancel_behind,
    CancelSteps: _cancel,
    DeletedSteps: _write_deleted,
    LetterSteps: _delete_letters,
    RescueSteps: _rescue,
    JudgeSteps: _change_if_unique,
}


# -- where statements are executed -------------------------------------------------------------------------------------

_IN_STEP: ContextVar[bool] = ContextVar("sqlaqueue_in_step", default=False)
"""Whether a step is being executed, which has no steps of its own."""


def carry_out_statements(engine: sa.Engine, other: OtherEngine) -> None:
    """Execute the steps of each statement of the library before the statement itself.

    :param other: refuses the claims of queues that its database cannot carry.
    """
    supported: WeakSet[Any] = WeakSet()
    if not other.has_one_writer:
        _forget_transactions(engine)

    @event.listens_for(engine, "before_execute", retval=True)
    def execute(
        connection: sa.Connection,
        statement: Any,
        multiparams: Any,
        params: Mapping[str, Any],
        execution_options: Mapping[str, Any],
    ) -> tuple[Any, Any, Any]:
        mark = mark_of(statement, execution_options)
        if mark is None or _IN_STEP.get():
            return statement, multiparams, params
        if mark is not True and mark not in supported:
            other.check_supported(mark)
            supported.add(mark)
        steps = steps_for(statement, execution_options)
        if steps is None:
            return statement, multiparams, params
        token = _IN_STEP.set(True)
        try:
            with own_work():
                at_end, given = carry_out(other, connection, steps, statement, params)
        finally:
            _IN_STEP.reset(token)
        return at_end, (), given
