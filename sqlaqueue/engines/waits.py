"""Jobs that wait for others (``QueueConfig(waits_for=...)``), on engines whose triggers cannot count at a commit.

Nothing is counted: a claim reads from the states of the others whether a job still waits.

* **Before a claim** that would find too few jobs, it looks among the waiting ones for those that wait no more, and
  makes them pending. One that finds enough looks now and then, so that a long queue does not keep them waiting. Jobs
  that are pending and have to wait, as after a requeue, become waiting.
* **After it has locked jobs**, a claim leaves out those that wait, such as a batch that has just got a member: nobody
  can add another one to a row that is locked.
* **Triggers** refuse what a look could not see: a member of a batch that has begun, and a reference that became NULL.

So settlements, rescues and deletes cost nothing, and a state is seen whatever has changed it. The count of a job only
says whether it waits.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.pool import NullPool, QueuePool

from sqlaqueue._typing import AnySelect
from sqlaqueue.engines.work import Given, Work
from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.postgresql.waits import awaited_jobs
from sqlaqueue.postgresql.waits_at_commit import FAILED, NOT_BEGUN
from sqlaqueue.queue.options import STATES, UNFINISHED
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import QueueSpec, WaitRelation
from sqlaqueue.queue.strategy_protocol import CancelSteps, ClaimRequest, LookSteps, ReturnSteps
from sqlaqueue.sql.engine import OF_TEST, OtherEngine, pool_limit, steps_of
from sqlaqueue.sql.portable import clock, greatest, setting
from sqlaqueue.sql.types import object_name
from sqlaqueue.strategies.columns import by_index, by_key

_LOOKED = "sqlaqueue_looked"
"""The name of the parameter with the number of jobs that a look reads."""

_SHARE = 10
"""A claim that finds enough jobs looks again after so many times as long as the last look took."""

TRIGGERS = "sqlaqueue_waits_"
"""How the names of the triggers begin."""

_AT_ONCE = 1000
"""How many jobs a look makes pending."""

_LOST = "the job that it waited for was deleted, or its reference to it"


# -- conditions --------------------------------------------------------------------------------------------------------


def _statuses(
    spec: QueueSpec, column: Callable[[sa.Column[Any]], Any], states: Iterable[str]
) -> list[sa.ColumnElement[bool]]:
    """Return the conditions that a row is in a state: one for each state that has a value.

    :param column: returns a column of the row.
    """
    status = column(spec.columns["status"])
    known = [state for state in states if getattr(spec.config.states, state) is not None]
    return [status == spec.literal(state) for state in known]


def _of(rows: sa.FromClause) -> Callable[[sa.Column[Any]], Any]:
    return lambda column: rows.c[column.key]


def _awaits(
    wait: WaitRelation, states: Iterable[str], but: tuple[Work, QueueSpec, Sequence[Key]] | None = None
) -> sa.ColumnElement[bool]:
    """Return the condition that one of the jobs that a job waits for is in one of some states.

    :param but: jobs that are passed over: the keys of those of a queue.
    """
    jobs, (*same, _) = awaited_jobs(wait)
    if but is not None and but[1] is wait.awaited:
        work, spec, keys = but
        same.append(~work.among(spec, [jobs.c[key.key] for key in spec.keys], keys))
    # A subquery for each state: the index of the foreign key and the status leads to the first one.
    found = [sa.exists().where(*same, each) for each in _statuses(wait.awaited, _of(jobs), states)]
    return sa.or_(sa.false(), *(each.correlate(wait.waiting.table) for each in found))


def _refers(wait: WaitRelation, column: Callable[[Any], Any] = lambda column: column) -> sa.ColumnElement[bool]:
    return sa.and_(*(column(here).is_not(None) for here, _ in wait.pairs))


def ready(spec: QueueSpec, *, exact: bool = True) -> list[sa.ColumnElement[bool]]:
    """Return the conditions that a job waits for nothing.

    :param exact: whether a member with a status that is none of its queue's counts as well. To see that there is none,
        all members are read, by an index.
    """
    conditions = []
    if spec.has("is_open"):
        conditions.append(~sa.func.coalesce(spec.columns["is_open"], sa.false()))
    for wait in spec.waits:
        if wait.is_strict:
            conditions.append(sa.or_(~_refers(wait), _awaits(wait, wait.satisfying)))
        elif exact:
            jobs, (*same, counts) = awaited_jobs(wait)
            conditions.append(~sa.exists().select_from(jobs).where(*same, counts).correlate(spec.table))
        else:
            conditions.append(~_awaits(wait, [state for state in STATES if state not in wait.satisfying]))
    return conditions


def _doomed(wait: WaitRelation, engine: OtherEngine) -> list[tuple[sa.ColumnElement[bool], bool]]:
    """Return the conditions by which a waiting job is cancelled, each with whether it has lost what it waited for."""
    found = [(_awaits(wait, FAILED), False)] if wait.on_failure == "cancel" else []
    if wait.is_strict and engine.has_one_writer:
        # SQLite does not enforce foreign keys by default.
        jobs, (*same, _) = awaited_jobs(wait)
        there = sa.exists().select_from(jobs).where(*same).correlate(wait.waiting.table)
        found.append((sa.and_(_refers(wait), ~there), True))
    return found


def waits_no_more(spec: QueueSpec, engine: OtherEngine) -> sa.ColumnElement[bool]:
    """Return the condition that a claim would make a waiting job pending, or cancel it."""
    doomed = [condition for wait in spec.waits for condition, _ in _doomed(wait, engine)]
    return sa.and_(spec.in_state("waiting"), sa.or_(sa.and_(*ready(spec, exact=False)), *doomed))


# -- claims ------------------------------------------------------------------------------------------------------------


class Looks:
    """The statements by which the claims of one request look at waiting jobs, built once.

    :param window: a SELECT of the keys of the first due jobs; its limit is the parameter ``limit``.
    :param keys: the condition that a job is one of those whose keys are given, in the parameter ``name``.
    """

    def __init__(
        self, engine: OtherEngine, request: ClaimRequest, window: AnySelect, limit: str, keys: Any, name: str
    ) -> None:
        self._spec = spec = request.spec
        self._window, self._limit, self._keys = window, limit, name
        rows: AnySelect = spec.strategy.pick(spec, request.candidates, *spec.keys).where(spec.in_state("waiting"))
        self._any = rows.where(waits_no_more(spec, engine)).limit(1)
        likely = rows.where(*ready(spec, exact=False))
        self._likely = likely.order_by(*spec.claim_order).limit(sa.bindparam(_LOOKED, type_=sa.Integer()))
        self._ready = engine.locked(by_index(rows.where(keys, *ready(spec)), spec.table, "PRIMARY"))
        self._still = by_index(sa.select(*spec.keys).where(keys, *ready(spec)), spec.table, "PRIMARY")

    def before(self, work: Work, wanted: int) -> bool:
        """Let the first ``wanted`` due jobs be such that do not wait; return whether waiting ones were looked at.

        :raises StatementError: if the transaction would not see what others have committed since it began.
        """
        spec, size = self._spec, wanted
        if not work.engine.has_one_writer:
            self._check_isolation(work)
        while True:
            first = work.found(spec.keys, work.limited(self._window), {self._limit: size})
            free = self._free(work, first)
            early = [key for key in first if key not in free]
            if not early:
                break
            with _apart(work) as own:
                rows = sa.select(*spec.keys).where(own.among(spec, spec.keys, early), spec.in_state("pending"))
                changed = own.lock(spec.keys, rows.order_by(*spec.keys), waits=False)
                _make_waiting(own, spec, changed)
            if not changed and size >= _AT_ONCE:
                # The claim passes over what others have locked as well.
                break
            size = max(wanted, _AT_ONCE)
        wants_more = len(free) < wanted or self._is_due(work)
        if wants_more:
            self.look(work, wanted)
        return wants_more

    def after(self, work: Work, locked: Sequence[Key]) -> list[Key]:
        """Return those of some locked jobs that do not wait.

        The others have got something to wait for meanwhile. They stay pending, and the next claim makes them waiting.
        """
        free = self._free(work, locked)
        return [key for key in locked if key in free]

    def _free(self, work: Work, keys: Sequence[Key]) -> set[Key]:
        """Return those of some jobs that do not wait."""
        return {*work.found(self._spec.keys, self._still, {self._keys: self._spec.bind_keys(keys)})} if keys else set()

    def _check_isolation(self, work: Work) -> None:
        level = str(work.connection.scalar(_ISOLATION)).upper().replace("-", " ")
        if level != "READ COMMITTED":
            msg = (
                f"{self._spec.model.__name__}: a claim of jobs that wait for other jobs needs READ COMMITTED, and this "
                f"transaction has {level}, which would not see a job that has just been added to those; create the "
                "engine without isolation_level, so that sqlaqueue.prepare(engine) sets the level"
            )
            raise StatementError(msg)

    def _is_due(self, work: Work) -> bool:
        """Return whether a claim is to look that finds enough jobs."""
        next_look: float = _next_looks.get(work.engine, {}).get(self._spec, 0.0)
        return time.monotonic() >= next_look

    def look(self, work: Work, wanted: int) -> bool:
        """Make jobs pending that wait no more; return whether there were any."""
        began, found = time.monotonic(), False
        if work.found(self._spec.keys, work.limited(self._any)):
            with _apart(work) as own:
                found = self._promote(own, wanted)
        ended = time.monotonic()
        _next_looks.setdefault(work.engine, WeakKeyDictionary())[self._spec] = ended + _SHARE * (ended - began)
        return found

    def _promote(self, work: Work, wanted: int) -> bool:
        # More than are wanted, as the next claims would look for them again.
        spec, found = self._spec, list[Key]()
        cancel_doomed(work, spec)
        size = wanted = max(wanted, _AT_ONCE)
        while True:
            likely = work.found(spec.keys, work.limited(self._likely), {_LOOKED: size})
            if likely:
                found = work.found(spec.keys, self._ready, {self._keys: spec.bind_keys(likely)})[:wanted]
            if len(found) == wanted or len(likely) < size:
                break
            # Those that only seem to be ready must not keep others behind them from being found.
            size *= 4
        make_pending(work, spec, found)
        return bool(found)


@contextlib.contextmanager
def _apart(work: Work) -> Iterator[Work]:
    """Change jobs in a transaction that ends at once, unless the database has one writer.

    That of the claim may last as long as a handler, and hold what it has looked at. In the transaction of a test, or if
    the pool has no other connection to give, the claim's own is used.
    """
    connection = work.connection
    pool: Any = connection.engine.pool
    limit = pool_limit(pool)
    is_full = limit is not None and pool.checkedout() >= limit
    shares = is_full or not isinstance(pool, QueuePool | NullPool)
    if work.engine.has_one_writer or shares or connection.connection.info.get(OF_TEST):
        yield work
        return
    options = {name: value for name, value in connection.get_execution_options().items() if name == _SCHEMAS}
    with connection.engine.connect() as own:
        own.execution_options(isolation_level="READ COMMITTED", **options)
        with own.begin():
            yield Work(work.engine, own, None, work.given, work.criteria)


_SCHEMAS = "schema_translate_map"
_ISOLATION = sa.select(setting("transaction_isolation"))

_next_looks: WeakKeyDictionary[OtherEngine, Any] = WeakKeyDictionary()
"""By engine and queue: when a claim looks that has found enough jobs."""


def make_pending(work: Work, spec: QueueSpec, keys: Sequence[Key]) -> None:
    values: dict[str, Any] = {"status": spec.status_value("pending"), "waits_for_count": 0}
    if spec.has("run_at"):
        run_at = spec.columns["run_at"]
        # A job that has waited is not late: it is due from now on.
        values["run_at"] = sa.case((run_at.is_not(None), greatest(run_at, clock(), type_=run_at.type)))
    _change(work, spec, keys, values)


def _make_waiting(work: Work, spec: QueueSpec, keys: Sequence[Key], **values: Any) -> None:
    _change(work, spec, keys, {"status": spec.status_value("waiting"), "waits_for_count": 1, **values})


def _change(work: Work, spec: QueueSpec, keys: Sequence[Key], values: Mapping[str, Any]) -> None:
    if keys:
        given = {spec.columns[role]: value for role, value in values.items() if spec.has(role)}
        change = sa.update(spec.table).where(work.among(spec, spec.keys, keys))
        work.connection.execute(by_key(change.values(work.read(spec.keys, given, keys))))


def look(work: Work, steps: LookSteps, _: Any) -> tuple[Any, Given]:
    """Look at the waiting and the pending jobs of a range of keys, as a claim would; return those that have changed."""
    spec, of_range = steps.spec, steps.part.holds(steps.spec.keys)
    rows = sa.select(*spec.keys).where(of_range).order_by(*spec.keys)
    with work.all_or_none(rows):
        cancelled = cancel_doomed(work, spec, of_range)
        free = work.lock(spec.keys, rows.where(spec.in_state("waiting"), *ready(spec)), waits=False)
        make_pending(work, spec, free)
        early = rows.where(spec.in_state("pending"), ~sa.and_(sa.true(), *ready(spec)))
        waiting = work.lock(spec.keys, early, waits=False)
        _make_waiting(work, spec, waiting)
    return work.returned(spec, [*cancelled, *free, *waiting])


# -- failures ----------------------------------------------------------------------------------------------------------


def cancel_doomed(work: Work, spec: QueueSpec, *of_range: sa.ColumnElement[bool]) -> list[Key]:
    """Cancel the waiting jobs that can never run, and what waits for them in turn; return those of the queue."""
    cancelled = list[Key]()
    for wait in spec.waits:
        for doomed, is_lost in _doomed(wait, work.engine):
            rows = sa.select(*spec.keys).where(spec.in_state("waiting"), *of_range, doomed).order_by(*spec.keys)
            keys = work.lock(spec.keys, rows, waits=False)
            if is_lost:
                _cancel(work, spec, keys, _LOST, None)
                cancelled += keys
            cancelled += _cancel_for(work, spec, _behind(work, spec, keys, "waiting") if is_lost else [(wait, keys)])
    return cancelled


def _cancel_for(work: Work, spec: QueueSpec, doomed: Iterable[tuple[WaitRelation, Sequence[Key]]]) -> list[Key]:
    """Cancel locked jobs because of failed ones, which the reason names, and those that wait for them in turn.

    :returns: those of a queue.
    """
    left, cancelled = deque(doomed), list[Key]()
    while left:
        wait, keys = left.popleft()
        gone = list[Key]()
        for cause, some in _causes(work, wait, keys).items():
            reason = f"{wait.awaited.model.__name__} {', '.join(map(str, cause))} has failed or was cancelled"
            _cancel(work, wait.waiting, some, reason, wait.name)
            gone += some
        left += _behind(work, wait.waiting, gone, "waiting")
        cancelled += gone if wait.waiting is spec else []
    return cancelled


def _causes(work: Work, wait: WaitRelation, keys: Sequence[Key]) -> dict[Key, list[Key]]:
    """Return some jobs by the key of the first failed one that each of them waits for."""
    spec, other = wait.waiting, wait.awaited
    jobs, (*same, _) = awaited_jobs(wait)
    failed, theirs = sa.or_(*_statuses(other, _of(jobs), FAILED)), [jobs.c[key.key] for key in other.keys]
    first = (sa.select(each).where(*same, failed).order_by(*theirs).limit(1).correlate(spec.table) for each in theirs)
    rows = sa.select(*spec.keys, *(each.scalar_subquery() for each in first))
    causes: dict[Key, list[Key]] = {}
    for row in work.connection.execute(rows.where(work.among(spec, spec.keys, keys))).all() if keys else ():
        causes.setdefault(tuple(row[len(spec.keys) :]), []).append(tuple(row[: len(spec.keys)]))
    if not causes or work.engine.has_one_writer:
        return causes
    # Locked, or a requeue of them would not see what is cancelled here. One that is being requeued is passed over.
    table = other.table
    mine = by_index(sa.select(*other.keys).where(work.among(other, other.keys, [*causes])), table, "PRIMARY")
    mine = mine.where(sa.or_(*_statuses(other, _of(table), FAILED))).with_for_update(read=True, skip_locked=True)
    return {cause: causes[cause] for cause in work.found(other.keys, mine)}


def _behind(work: Work, spec: QueueSpec, keys: Sequence[Key], state: str) -> Iterator[tuple[WaitRelation, list[Key]]]:
    """Lock the jobs in a state that wait for some others, and that a failure of those cancels."""
    for wait in spec.awaited_by if keys else ():
        if wait.on_failure == "cancel":
            waiting = wait.waiting
            jobs, (*same, _) = awaited_jobs(wait)
            theirs = work.among(spec, [jobs.c[key.key] for key in spec.keys], keys)
            found = work.found(waiting.keys, sa.select(*waiting.keys).where(*same, theirs, waiting.in_state(state)))
            mine = sa.select(*waiting.keys).where(work.among(waiting, waiting.keys, found), waiting.in_state(state))
            # A job that was cancelled is locked for a moment only, and nothing would bring it back later.
            waits = state == "cancelled"
            yield wait, work.lock(waiting.keys, mine.order_by(*waiting.keys), waits=waits) if found else []


def _cancel(work: Work, spec: QueueSpec, keys: Sequence[Key], reason: str, cause: str | None) -> None:
    error = spec.truncated_error(sa.literal(reason, sa.Text()))
    values = {"finished_at": clock(), "last_error": error, "cancelled_for": cause}
    _change(work, spec, keys, {"status": spec.status_value("cancelled"), **values})


def bring_back(work: Work, steps: ReturnSteps, statement: Any) -> tuple[Any, Given]:
    """Let jobs wait again that were cancelled for those that are about to be requeued, unless others have failed."""
    left = deque([(steps.spec, work.lock(steps.spec.keys, steps.finished, waits=True))])
    while left:
        spec, keys = left.popleft()
        for wait, cancelled in _behind(work, spec, keys, "cancelled"):
            waiting = wait.waiting
            strict = [each for each in waiting.waits if each.on_failure == "cancel"]
            failed = sa.or_(*(_awaits(each, FAILED, (work, spec, keys)) for each in strict))
            mine = [work.among(waiting, waiting.keys, cancelled), waiting.columns["cancelled_for"].is_not(None)]
            back = work.found(waiting.keys, sa.select(*waiting.keys).where(*mine, ~failed))
            left.append((waiting, _let_wait(work, waiting, back)))
    return statement, work.given


def _let_wait(work: Work, spec: QueueSpec, keys: Sequence[Key]) -> list[Key]:
    """Let cancelled jobs wait again, but for those whose place a duplicate has taken; return their keys."""
    gone: dict[str, Any] = dict.fromkeys(("finished_at", "last_error", "cancelled_for"))
    if spec.config.unique is None:
        _make_waiting(work, spec, keys, **gone)
        return [*keys]
    back = list[Key]()
    for key in keys:
        with contextlib.suppress(IntegrityError), work.all_or_none(sa.select(*spec.keys)):
            _make_waiting(work, spec, [key], **gone)
            back.append(key)
    return back


def cancellations_of_members(work: Work, spec: QueueSpec, keys: Sequence[Key]) -> Iterator[CancelSteps]:
    """Yield the cancellations of the members of some batches."""
    for wait in spec.waits if keys else ():
        if wait.to_many:
            other, (jobs, (*same, _)) = wait.awaited, awaited_jobs(wait)
            unfinished = sa.or_(*_statuses(other, _of(jobs), UNFINISHED))
            rows = sa.select(*(jobs.c[key.key] for key in other.keys)).where(*same, unfinished)
            members = work.found(other.keys, rows.where(work.among(spec, spec.keys, keys)))
            chosen = sa.select(other.model).where(work.among(other, other.keys, members))
            steps = steps_of(other.strategy.cancel(other, chosen)) if members else None
            yield from () if steps is None else steps.each


# -- triggers ----------------------------------------------------------------------------------------------------------


def check_waits(spec: QueueSpec, title: str) -> None:
    """Refuse a reference that may become NULL without a trigger: MariaDB executes none for ON DELETE SET NULL.

    :param title: the name of the database.
    """
    for wait in spec.waits:
        if wait.is_strict and wait.on_delete.startswith("SET"):
            msg = (
                f"{wait.full_name}: the foreign key has ON DELETE {wait.on_delete}, and QueueConfig(waits_for=...) is "
                f"not available with that on {title}: a job whose reference is gone could not be distinguished from "
                f'one that waits for nothing; leave ondelete out, or use WaitFor({wait.name!r}, on_failure="continue")'
            )
            raise ConfigurationError(msg)


@dataclass(frozen=True)
class _Text:
    """The text of triggers: what is written in another way from database to database, or from schema to schema."""

    dialect: sa.Dialect
    now: str
    schemas: Mapping[str | None, str | None]
    """The schemas by which those of the tables are replaced."""

    @property
    def is_sqlite(self) -> bool:
        return self.dialect.name == "sqlite"

    def quoted(self, name: str) -> str:
        return str(self.dialect.identifier_preparer.quote(name))

    def prefix(self, table: sa.Table) -> str:
        schema = self.schemas.get(table.schema, table.schema)
        return f"{self.dialect.identifier_preparer.quote_schema(schema)}." if schema else ""

    def column_of(self, row: str) -> Callable[[Any], Any]:
        """Return a function for the columns of the row before the change, OLD, or after it, NEW."""
        return lambda column: sa.literal_column(f"{row}.{self.quoted(column.name)}", column.type)

    def sql(self, expression: Any) -> str:
        options: dict[str, Any] = {}
        if self.schemas:
            options = {"schema_translate_map": self.schemas, "render_schema_translate": True}
        return str(expression.compile(dialect=self.dialect, compile_kwargs={"literal_binds": True}, **options))


def triggers_of(spec: QueueSpec, connection: sa.Connection, now: str) -> dict[str, str]:
    """Return the statements that create the triggers of the table of a queue, by the names of the triggers.

    :param now: the present moment in SQL.
    """
    schemas = connection.get_execution_options().get("schema_translate_map") or {}
    text, plain = (_Text(connection.dialect, now, each) for each in (schemas, {}))
    found: dict[str, str] = {}
    for write, wait, *event in _triggers(spec):
        (purpose, when, body), parts = (write(each, wait, *event) for each in (text, plain))
        # The digest tells one of an earlier version, or of other states, apart.
        digest = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:8]
        name = object_name(TRIGGERS.rstrip("_"), wait.waiting.table.name, wait.name, purpose, digest)
        prefix = text.prefix(spec.table)
        table = f"{'' if text.is_sqlite else prefix}{text.quoted(spec.table.name)}"
        found[name] = f"CREATE TRIGGER {prefix}{text.quoted(name)} {when} ON {table} {body}"
    return found


def _triggers(spec: QueueSpec) -> Iterator[tuple[Any, ...]]:
    """Yield the functions that write the triggers of a queue, with their arguments."""
    batches = [wait for wait in spec.awaited_by if wait.to_many]
    yield from ((_refuse_late, wait, event) for wait in batches for event in ("INSERT", "UPDATE"))
    yield from ((_cancel_lost, wait) for wait in spec.waits if wait.is_strict)


def _refuse_late(text: _Text, wait: WaitRelation, event: str) -> tuple[str, str, str]:
    """Return the parts of the trigger that refuses a new member of a batch that has begun."""
    spec, member, batch = wait.waiting, wait.awaited, wait.waiting.table.alias("sqlaqueue_batch")
    old, new = text.column_of("OLD"), text.column_of("NEW")
    its = [batch.c[here.key] == new(there) for here, there in wait.pairs]
    ended = sa.or_(*_statuses(member, new, wait.satisfying))
    applies: list[Any] = [new(there).is_not(None) for _, there in wait.pairs]
    applies.append(~sa.func.coalesce(ended, sa.false()))
    if event == "UPDATE":
        applies.append(sa.or_(*(old(there).is_distinct_from(new(there)) for _, there in wait.pairs)))
    # Where a claim holds its transaction, the row of a pending batch is locked as long as it runs.
    has_begun = ~sa.func.coalesce(sa.or_(*_statuses(spec, _of(batch), NOT_BEGUN)), sa.false())
    refusal = f"{spec.model.__name__} has started or ended: it takes no further {member.model.__name__}"
    message, purpose = text.sql(sa.literal(refusal)), f"late_{event.lower()}"
    if text.is_sqlite:
        condition = text.sql(sa.and_(*applies, sa.exists().where(*its, has_begun)))
        return purpose, f"AFTER {event}", f"WHEN {condition} BEGIN SELECT RAISE(ABORT, {message}); END"
    # The row stays locked, so that the batch cannot begin before the member is committed. The foreign key locks it only
    # after the trigger has read the state, and for UPDATE and INSERT .. SELECT the server reads that without a lock.
    begun = text.sql(sa.select(has_begun).where(*its))
    body = (
        f"FOR EACH ROW BEGIN DECLARE sqlaqueue_begun BOOLEAN; IF {text.sql(sa.and_(*applies))} THEN "
        f"SET sqlaqueue_begun = ({begun} LOCK IN SHARE MODE); IF sqlaqueue_begun THEN SIGNAL SQLSTATE '23000' "
        f"SET MYSQL_ERRNO = 4025, MESSAGE_TEXT = {message}; END IF; END IF; END"
    )
    return purpose, f"BEFORE {event}", body


def _cancel_lost(text: _Text, wait: WaitRelation) -> tuple[str, str, str]:
    """Return the parts of the trigger that cancels a job whose reference to an unfinished or failed one is removed."""
    spec, jobs = wait.waiting, wait.awaited_rows
    old, new = text.column_of("OLD"), text.column_of("NEW")
    same = [jobs.c[there.key] == old(here) for here, there in wait.pairs]
    ended = sa.or_(*_statuses(wait.awaited, _of(jobs), wait.satisfying))
    counts = sa.exists().where(*same, ~sa.func.coalesce(ended, sa.false()))
    condition = text.sql(
        sa.and_(_refers(wait, old), ~_refers(wait, new), sa.or_(*_statuses(spec, new, NOT_BEGUN)), counts)
    )
    error = spec.columns.get("last_error")
    lost = _LOST[: getattr(getattr(error, "type", None), "length", None)]
    values = {"status": text.sql(spec.literal("cancelled")), "finished_at": text.now, "last_error": f"'{lost}'"}
    row = "" if text.is_sqlite else "NEW."
    columns = {role: text.quoted(spec.columns[role].name) for role in values if spec.has(role)}
    sets = ", ".join(f"{row}{column} = {values[role]}" for role, column in columns.items())
    if text.is_sqlite:
        mine = text.sql(sa.and_(*(key == new(key) for key in spec.keys)))
        update = f"UPDATE {text.quoted(spec.table.name)} SET {sets} WHERE {mine}"  # noqa: S608 - the names are quoted
        return "lost", "AFTER UPDATE", f"WHEN {condition} BEGIN {update}; END"
    return "lost", "BEFORE UPDATE", f"FOR EACH ROW BEGIN IF {condition} THEN SET {sets}; END IF; END"
