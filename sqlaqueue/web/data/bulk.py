"""Actions on several jobs, given by their keys or by a filter: first a preview, then the action, batch by batch."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Literal, get_args

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.admin import changes
from sqlaqueue.admin.explain_job import duplicate_of
from sqlaqueue.admin.jobs import JobFilter, filtered_jobs
from sqlaqueue.consumer.core.errors import may_be_of_a_row
from sqlaqueue.exc import SqlaqueueError
from sqlaqueue.queue.names import DEAD_LETTER
from sqlaqueue.queue.options import FINISHED, UNFINISHED
from sqlaqueue.queue.run import Key, key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sessions import routing_to_primary
from sqlaqueue.sql.portable import Span, clock, converted, later
from sqlaqueue.strategies.delete_row import letters
from sqlaqueue.strategies.listing import key_labels
from sqlaqueue.web.data.edit_fields import EditableField, WrongValue, field_value, fields_of
from sqlaqueue.web.data.engines import text_of
from sqlaqueue.web.data.job import has_key, has_one_of, is_key, letter_of
from sqlaqueue.web.data.job_columns import JobColumn, JobColumns, states_of
from sqlaqueue.web.data.job_filters import JobsWanted
from sqlaqueue.web.data.job_pages import Count, ListRequest, count_states, read_page, read_rows
from sqlaqueue.web.data.job_sources import DeadLetters, source_of
from sqlaqueue.web.data.job_windows import Cell, JobRow
from sqlaqueue.web.data.reader import ParameterError, Part, attempt_part, problem_text
from sqlaqueue.web.data.undo import Changed, recorded

BulkAction = Literal["requeue", "cancel", "change", "purge"]
BULK_ACTIONS: tuple[BulkAction, ...] = get_args(BulkAction)

APPLIES_TO: dict[BulkAction, tuple[str, ...]] = {
    "requeue": FINISHED,
    "cancel": UNFINISHED,
    "change": ("pending",),
    "purge": FINISHED,
}
"""The states of the jobs that an action changes."""

CHANGEABLE = ("priority", "run_at", "max_attempts")
"""The roles whose values can be changed for many jobs."""

NOW = "now"
"""What may be typed for a time, beside a moment."""

MOST_KEYS = 1000

MOST_SHOWN = 20
MOST_AT_ONCE = 10_000
"""The number of jobs that one request changes."""

_BATCH = 500
_LONGEST = 20.0
"""The seconds after which no further batch is begun; proxies end requests after a minute, or half of one."""

SPREADS: dict[str, timedelta] = {
    "1min": timedelta(minutes=1),
    "10min": timedelta(minutes=10),
    "1h": timedelta(hours=1),
    "6h": timedelta(hours=6),
    "1d": timedelta(days=1),
}
"""Over how long the requeued jobs of one action can be spread, by the name in a form."""

_EFFECTS: dict[tuple[BulkAction, str], str] = {
    ("requeue", "waiting"): "left alone: waiting already",
    ("cancel", "waiting"): "will be cancelled",
    ("purge", "waiting"): "left alone: not finished",
    ("requeue", "pending"): "left alone: pending already",
    ("requeue", "processing"): "left alone: processing",
    ("cancel", "pending"): "will be cancelled",
    ("cancel", "processing"): "will be asked to stop",
    ("purge", "pending"): "left alone: not finished",
    ("purge", "processing"): "left alone: processing",
    ("change", "waiting"): "left alone: waiting for other jobs",
    ("change", "pending"): "will be changed",
    ("change", "processing"): "left alone: processing",
    **{("change", state): f"left alone: {state} already" for state in FINISHED},
    **{("requeue", state): "will be pending again" for state in FINISHED},
    **{("cancel", state): f"left alone: {state} already" for state in FINISHED},
    **{("purge", state): "will be deleted permanently" for state in FINISHED},
}


@dataclass(frozen=True)
class ByKeys:
    columns: JobColumns
    keys: tuple[str, ...]
    """As :func:`sqlaqueue.queue.run.key_text` writes them."""


@dataclass(frozen=True)
class ByFilter:
    """The jobs that a filter selects, up to the moment of a preview."""

    wanted: JobsWanted
    until: datetime | None = None
    """The moment of the preview; jobs that were enqueued or have finished later are left alone."""
    after: str | None = None
    """The cursor from which an action goes on."""
    most: int = MOST_AT_ONCE
    """The number of jobs that the preview has counted."""

    @property
    def columns(self) -> JobColumns:
        return self.wanted.columns


Selection = ByKeys | ByFilter

NewValues = Mapping[EditableField, Any]
"""What jobs get, as attributes of their class have it; a time may be the clock of the database."""

_NONE: NewValues = {}


@dataclass(frozen=True)
class PreviewedJob:
    row: JobRow
    effect: str
    is_changed: bool


@dataclass(frozen=True)
class Effect:
    state: str
    count: Count
    text: str
    is_changed: bool


@dataclass(frozen=True, kw_only=True)
class Preview:
    jobs: Part[Sequence[PreviewedJob]]
    effects: Part[Sequence[Effect]]
    missing: int
    """The number of given keys without a job."""
    now: datetime

    @property
    def changed(self) -> Count | None:
        """The number of jobs that would be changed; None if they could not be counted."""
        if self.effects.value is None:
            return None
        counts = [each.count for each in self.effects.value if each.is_changed]
        return Count(sum(each.number for each in counts), all(each.is_complete for each in counts))


@dataclass
class Done:
    changed: int = 0
    duplicates: int = 0
    left: int = 0
    asked: int = 0
    missing: int = 0
    """Jobs that had finished when they were to be cancelled."""
    unchanged: int = 0
    keys: list[str] = field(default_factory=list)
    """The keys of the jobs that the action was to change, for the audit; the first ones."""
    after: str | None = None
    """The cursor from which the action goes on, if jobs are left; else None."""
    problem: str = ""
    changes: list[Changed] = field(default_factory=list)
    """What was changed, to undo it."""


def by_filter(wanted: JobsWanted, action: BulkAction, **bounds: Any) -> ByFilter:
    """Return the jobs that a filter selects. Those that wait and those that failed may be in different tables."""
    if wanted.state is None and not wanted.columns.spec.has("status"):
        wanted = replace(wanted, state="failed" if action in {"requeue", "purge"} else "pending")
    # What becomes due, or loses its lease, after the preview is left alone as well.
    return ByFilter(replace(wanted, at=bounds.get("until")), **bounds)


def effect_of(spec: QueueSpec, action: BulkAction, state: str) -> str:
    text = _EFFECTS.get((action, state), "left alone: the queue does not use this status")
    if action == "cancel" and state == "pending" and spec.strategy.holds_transaction:
        text += "; what a worker is running will be asked to stop"
    if action == "requeue" and state in FINISHED and spec.has("attempts"):
        text += ", with attempts back at 0"
    if any(wait.to_many for wait in spec.waits) and state in APPLIES_TO[action] and action in {"requeue", "cancel"}:
        text += f"; members of a batch are {'cancelled as well' if action == 'cancel' else 'not requeued'}"
    return text


def preview(session: Session, action: BulkAction, chosen: Selection, names: str | None = None) -> Preview:
    """Return what an action would do.

    :param names: the columns that are shown of the first jobs, see :meth:`JobColumns.chosen`.
    """
    spec = chosen.columns.spec
    listed = chosen.wanted.listed if isinstance(chosen, ByFilter) else None
    shown = [each for each in chosen.columns.chosen(names, listed) if each.kind != "state" and not each.is_key]
    now = session.execute(sa.select(clock()), bind_arguments={"mapper": spec.mapper}).scalar_one()
    if isinstance(chosen, ByKeys):
        states = _states(session, chosen.columns, chosen.keys)
        jobs = attempt_part(session, _previewed, action, chosen.columns, chosen.keys[:MOST_SHOWN], shown)
        numbers = Counter(state for _, state in states)
        counts = {state: Count(number, is_complete=True) for state, number in numbers.items()}
        effects: Part[Sequence[Effect]] = Part(_effects(spec, action, counts))
        return Preview(jobs=jobs, effects=effects, missing=len(set(chosen.keys)) - len(states), now=now)
    if chosen.until is None:
        chosen = replace(chosen, wanted=replace(chosen.wanted, at=now))
    with session.begin_nested() as savepoint:
        page = read_page(session, ListRequest(chosen.wanted, after=chosen.after, is_walked=True), MOST_SHOWN)
        savepoint.rollback()  # with the settings of the planner
    first_keys = [job.key for job in page.jobs if is_key(chosen.columns, job.key)]
    jobs = attempt_part(session, _previewed, action, chosen.columns, first_keys, shown)
    return Preview(jobs=jobs, effects=attempt_part(session, _counted, action, chosen), missing=0, now=now)


def _counted(session: Session, action: BulkAction, chosen: ByFilter) -> list[Effect]:
    wanted, spec = chosen.wanted, chosen.columns.spec
    listed, states = count_states(session, wanted), states_of(spec)
    counts = {state: count for state, count in listed.items() if state in states}
    if wanted.state is not None:
        counts = {wanted.state: listed[wanted.listed]}
    return _effects(spec, action, counts)


def _effects(spec: QueueSpec, action: BulkAction, counts: dict[str, Count]) -> list[Effect]:
    found = [
        Effect(state, count, effect_of(spec, action, state), state in APPLIES_TO[action])
        for state, count in counts.items()
        if count.number or (not count.is_complete and state in APPLIES_TO[action])
    ]
    return sorted(found, key=lambda effect: not effect.is_changed)


def _previewed(
    session: Session, action: BulkAction, columns: JobColumns, keys: Sequence[str], shown: Sequence[JobColumn]
) -> Sequence[PreviewedJob]:
    spec, found = columns.spec, []
    rows = {job.key: job for job in read_rows(session, columns, keys, shown)}
    for key, state in _states(session, columns, keys):
        is_changed, text = state in APPLIES_TO[action], effect_of(spec, action, state)
        requeues = action == "requeue" and is_changed and spec.has("status")
        duplicate = duplicate_of(session, spec, key) if requeues else None
        if duplicate is not None:
            is_changed, text = False, f"left alone: its duplicate, job {key_text(duplicate.key)}, is {duplicate.state}"
        # Between the statements it may have changed, or be gone.
        row = rows.get(key_text(key), JobRow(key_text(key), state, [Cell(each, None) for each in shown], ()))
        found.append(PreviewedJob(replace(row, state=state), text, is_changed))
    return found


def _states(session: Session, columns: JobColumns, keys: Sequence[str]) -> list[tuple[Key, str]]:
    spec, found = columns.spec, []
    for some in _batches(list(dict.fromkeys(keys)), _BATCH):
        listed = filtered_jobs(_select(columns, some), JobFilter()).subquery("sqlaqueue_jobs")
        names = [listed.c[name] for name in key_labels(spec)]
        rows = session.execute(
            sa.select(*names, listed.c.state).order_by(*names), bind_arguments={"mapper": spec.mapper}
        )
        found += [(tuple(row[:-1]), row[-1]) for row in rows]
    return found


def _select(columns: JobColumns, keys: Sequence[str]) -> Any:
    return sa.select(columns.spec.model).where(has_one_of(columns, keys))


def _batches(keys: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(keys), size):
        yield keys[start : start + size]


def can_spread(columns: JobColumns) -> bool:
    """Return whether requeued jobs can become due one after the other: whether the queue has times to be due."""
    run_at = columns.by_role.get("run_at")
    # A redacted column cannot be edited either.
    return run_at is not None and not run_at.is_redacted


def act(
    session: Session,
    action: BulkAction,
    chosen: Selection,
    *,
    values: NewValues = _NONE,
    longest: float = _LONGEST,
    spread: timedelta | None = None,
) -> Done:
    """Carry out an action, commit each batch, and return what was done.

    By a filter it changes up to :data:`MOST_AT_ONCE` jobs, or as many as it can within some seconds; the result says
    from where it goes on.

    :param values: what pending jobs get, for the action ``change``.
    :param spread: over how long requeued jobs become due, at even distances; None for all at once.
    :raises ParameterError: if a key cannot be one of this queue, or the database refuses a value of the filter.
    :raises DBAPIError: if the first batch fails. After that, the result says what has happened.
    """
    done = Done()
    until = time.monotonic() + longest
    try:
        if isinstance(chosen, ByKeys):
            keys = list(dict.fromkeys(chosen.keys))
            spaced = None if spread is None else Spaced.begin(session, chosen.columns, spread, len(keys))
            for some in _batches(keys, _BATCH):
                _change(session, action, chosen.columns, some, done, spaced=spaced, values=values)
        else:
            _act_by_filter(session, action, chosen, done, until, spread=spread, values=values)
    except (DBAPIError, SqlaqueueError) as error:
        session.rollback()
        if not (done.changed or done.asked or done.duplicates):
            raise
        done.problem = problem_text(error)
    return done


@dataclass
class Spaced:
    """The moments at which requeued jobs become due: at even distances, from the first to the last."""

    begin_at: datetime
    distance: timedelta
    given: int = 0
    """How many jobs have one."""

    @classmethod
    def begin(cls, session: Session, columns: JobColumns, spread: timedelta, number: int) -> Spaced:
        now = session.execute(sa.select(clock()), bind_arguments={"mapper": columns.spec.mapper}).scalar_one()
        session.rollback()
        return cls(now, spread / max(number, 1))

    def give(self, session: Session, spec: QueueSpec, keys: Sequence[Key]) -> None:
        """Set when the jobs with these keys are due, in one statement; the caller commits."""
        run_at = spec.columns["run_at"]
        places = sa.func.row_number().over(order_by=[*spec.keys])
        rows = sa.select(*spec.keys, places.label("place")).where(spec.key_in(spec.keys, keys)).cte("sqlaqueue_places")
        first = sa.literal(self.begin_at + self.given * self.distance, sa.DateTime(timezone=True))
        due = later(first, (rows.c.place - 1) * sa.literal(self.distance, Span()))
        same = [key == rows.c[key.key] for key in spec.keys]
        session.execute(
            sa.update(spec.table).values({run_at: converted(due, run_at.type)}).where(*same),
            bind_arguments={"mapper": spec.mapper},
        )
        self.given += len(keys)


def _act_by_filter(
    session: Session,
    action: BulkAction,
    chosen: ByFilter,
    done: Done,
    until: float,
    *,
    spread: timedelta | None,
    values: NewValues,
) -> None:
    if chosen.wanted.state is not None and chosen.wanted.state not in APPLIES_TO[action]:
        return
    found = _found(session, action, chosen, done, until)
    if spread is None:
        for keys in found:
            _change(session, action, chosen.columns, keys, done, values=values)
        return
    # All of them first: the distance between two jobs follows from their number.
    every = [*found]
    spaced = Spaced.begin(session, chosen.columns, spread, sum(map(len, every)))
    for keys in every:
        _change(session, action, chosen.columns, keys, done, spaced=spaced)


def _found(session: Session, action: BulkAction, chosen: ByFilter, done: Done, until: float) -> Iterator[list[str]]:
    """Yield the keys of jobs that an action changes, a batch at a time; ``done`` says from where it goes on."""
    wanted, cursor, left = chosen.wanted, chosen.after, min(chosen.most, MOST_AT_ONCE)
    while left > 0:
        page = read_page(session, ListRequest(wanted, after=cursor, is_walked=True), min(_BATCH, left))
        session.rollback()  # with the settings of the planner
        keys = [job.key for job in page.jobs if job.state in APPLIES_TO[action] and is_key(chosen.columns, job.key)]
        newer = _later(session, chosen, keys)
        keys = [key for key in keys if key not in newer]
        if keys:
            yield keys
            left -= len(keys)
        cursor = done.after = page.next
        if cursor is None or time.monotonic() > until:
            return


def _later(session: Session, chosen: ByFilter, keys: Sequence[str]) -> set[str]:
    """Return which jobs were enqueued or have finished since the preview; also if these times are redacted.

    A queue that stores no such times cannot tell; its dead letters can.
    """
    spec, columns, until = chosen.columns.spec, chosen.columns, chosen.until
    if until is None or not keys:
        return set()
    found: Any
    if isinstance(source_of(columns, chosen.wanted), DeadLetters):
        written = spec.side_tables[DEAD_LETTER].c.created_at
        mine = sa.or_(*(letter_of(columns, key) for key in keys))
        found = letters(spec, sa.select(spec.model), "act").where(mine, written > until)
    else:
        # A column may have no time zone; the server then takes it as claims do.
        times = [spec.columns[role] for role in ("created_at", "finished_at") if spec.has(role)]
        is_late = sa.or_(sa.false(), *(converted(each, sa.DateTime(timezone=True)) > until for each in times))
        found = sa.select(*spec.keys).where(sa.or_(*(has_key(columns, key) for key in keys)), is_late)
    rows = found.subquery("sqlaqueue_later")
    parts = [text_of(rows.c[each.key]) for each in spec.keys]
    found = session.execute(sa.select(*parts), bind_arguments={"mapper": spec.mapper})
    return {key_text(row) for row in found}


def _note_refused(done: Done, refused: Iterable[Any]) -> None:
    keys = [key_text(key if isinstance(key, tuple) else (key,)) for key in refused]
    if keys:
        # Not the error itself: the text of a trigger may contain values that are redacted.
        listed = ", ".join(keys[:MOST_KEYS])
        done.problem = f"The database refuses to change job {listed}; the log has the error."


def _change(
    session: Session,
    action: BulkAction,
    columns: JobColumns,
    keys: Sequence[str],
    done: Done,
    *,
    spaced: Spaced | None = None,
    values: NewValues = _NONE,
) -> None:
    # Between the preview and now a job may have begun, or come to its end.
    jobs, only = _select(columns, keys), JobFilter(states=APPLIES_TO[action])
    done.keys += keys[: max(0, MOST_KEYS - len(done.keys))]
    before = done.changed + done.duplicates + done.left + done.asked + done.missing
    if action == "requeue":
        then = None if spaced is None else functools.partial(spaced.give, session, columns.spec)
        with recorded(session, columns, keys, done.changes):
            requeued = changes.requeue(session, jobs, only, batch_size=_BATCH, then=then)
        done.changed += requeued
        done.duplicates += len(requeued.duplicates)
        done.left += len(requeued.left)
        _note_refused(done, requeued.refused)
    elif action == "cancel":
        with recorded(session, columns, keys, done.changes):
            cancelled = changes.cancel(session, jobs, only, batch_size=_BATCH)
        done.changed += len(cancelled.cancelled)
        done.asked += len(cancelled.asked)
        done.missing += len(cancelled.missing)
        _note_refused(done, cancelled.refused)
    elif action == "change":
        with recorded(session, columns, keys, done.changes):
            _set(session, columns, keys, values, done)
    else:
        done.changed += changes.purge(session, jobs, only, batch_size=_BATCH)
    after = done.changed + done.duplicates + done.left + done.asked + done.missing
    done.unchanged += len(keys) - (after - before)


# -- new values for many jobs ------------------------------------------------------------------------------------------


def changeable(columns: JobColumns) -> list[EditableField]:
    """Return the fields whose values can be changed for many jobs: columns of the queue, none that is redacted."""
    return [each for each in fields_of(columns, columns.spec.mapper) if each.column.role in CHANGEABLE]


def new_values(columns: JobColumns, given: Mapping[str, str]) -> tuple[NewValues, Mapping[str, str]]:
    """Return the values that were typed, and by name what is wrong with the others. An empty text changes nothing."""
    values: dict[EditableField, Any] = {}
    errors: dict[str, str] = {}
    fields = {each.name: each for each in changeable(columns)}
    unknown = min(given.keys() - fields.keys(), default=None)
    if unknown is not None:
        raise ParameterError(unknown[:100], "it cannot be changed for many jobs")
    for name, typed in given.items():
        text, each = typed.strip(), fields[name]
        if not text:
            continue
        try:
            is_now = each.column.role == "run_at" and text == NOW
            values[each] = clock() if is_now else field_value(each, text)
        except WrongValue as error:
            errors[name] = str(error)
    return values, errors


def _set(session: Session, columns: JobColumns, keys: Sequence[str], values: NewValues, done: Done) -> None:
    """Give pending jobs new values, and commit. A row that somebody has locked, as its worker may have, is left alone.

    It is one UPDATE, of columns that are the queue's own: validators of the application are not called.
    """
    spec = columns.spec
    pending = [spec.in_state("pending")] if spec.has("status") else []
    with routing_to_primary(session):
        bind = {"mapper": spec.mapper}
        rows = sa.select(*spec.keys).where(has_one_of(columns, keys), *pending).order_by(*spec.keys)
        existing = [tuple(row) for row in session.execute(rows, bind_arguments=bind)]
        free = [tuple(row) for row in session.execute(spec.strategy.lock(spec, rows), bind_arguments=bind)]
        refused = _set_values(session, spec, free, {each.column.column: value for each, value in values.items()})
        session.commit()
    done.changed += len(free) - len(refused)
    done.left += len(existing) - len(free)
    _note_refused(done, refused)


def _set_values(
    session: Session, spec: QueueSpec, keys: Sequence[Key], values: Mapping[sa.Column[Any], Any]
) -> list[Key]:
    """Update locked rows, and return the keys of those that the database refuses to change."""
    if not keys:
        return []
    try:
        with changes.savepoint(session, spec.model):
            update = sa.update(spec.table).where(spec.key_in(spec.keys, keys)).values(dict(values))
            session.execute(update, bind_arguments={"mapper": spec.mapper})
    except DBAPIError as error:
        if not may_be_of_a_row(error):
            raise
        if len(keys) == 1:
            changes.warn_of_refusal(spec, keys[0], error)
            return [keys[0]]
        half = len(keys) // 2
        return [key for part in (keys[:half], keys[half:]) for key in _set_values(session, spec, part, values)]
    return []
