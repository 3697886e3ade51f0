"""The public :class:`Schedule` and :class:`Tick`, how jobs are stored in one, and which of them are due."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, TypeVar
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.orm import Mapper, Session, scoped_session

from sqlaqueue._typing import AnySelect
from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.mapping.mixin import QueueMixin, spec_of
from sqlaqueue.postgresql.side_tables import key_json
from sqlaqueue.queue.options import naming_options
from sqlaqueue.queue.retry_policies import Delay, seconds
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.schedules.recurrence import MOST, Recurrence, ScheduleTables
from sqlaqueue.sessions import check_session, routing_to_primary, session_in_scope
from sqlaqueue.sql.portable import (
    Span,
    clock,
    converted,
    elapsed,
    epoch,
    later,
    least,
    nulls_first,
    seconds_between,
    seconds_of,
)

# -- the attribute values of scheduled jobs, which are stored as JSON --------------------------------------------------

_SETTABLE = ("priority", "max_attempts")
"""The roles that a schedule may give a value; the others are the queue's."""

_LARGEST_EXACT = 2.0**53
"""From here on not every integer has a floating-point number."""

_READERS: dict[type[Any], Callable[[Any], Any]] = {
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
    timedelta: lambda seconds: timedelta(seconds=seconds),
    Decimal: Decimal,
    UUID: UUID,
}


def to_json(spec: QueueSpec, mapper: Mapper[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return attribute values as JSON.

    :raises ConfigurationError: for a value that is no attribute's, or that would not be the same when it is read.
    """
    name = mapper.class_.__name__
    written = {}
    for attribute, value in values.items():
        column = _column(spec, mapper, attribute)
        try:
            text = json.dumps(_written(value), allow_nan=False)
            written[attribute] = json.loads(text, parse_float=_stored_float)
            same = ... if "\\u0000" in text else _read(mapper, column, written[attribute])
            json.dumps(written[attribute], ensure_ascii=False).encode()
        except (TypeError, ValueError):
            same = ...
        if type(same) is not type(value) or same != value:
            msg = (
                f"values={{{attribute!r}: ...}}: {value!r} cannot be stored as JSON and read again for "
                f"{name}.{attribute}; set it in make=, a function that returns the {name} of a tick"
            )
            raise ConfigurationError(msg)
    return written


def from_json(spec: QueueSpec, mapper: Mapper[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attribute values that :func:`to_json` has written, or that were written by SQL.

    :raises ConfigurationError: for an attribute that does not exist or that a schedule cannot set, and for a value that
        is none of its column's type.
    """
    return {attribute: _read(mapper, _column(spec, mapper, attribute), value) for attribute, value in values.items()}


def missing_values(spec: QueueSpec, mapper: Mapper[Any], values: Mapping[str, Any]) -> list[str]:
    """Return the attributes that have neither a value nor a default, and cannot be NULL."""
    generated = set(spec.attributes.values())
    tables = set(mapper.tables)
    return [
        attribute
        for attribute, column in mapper.columns.items()
        if not getattr(column, "nullable", True)  # a column_property() has an expression
        and column.default is None
        and column.server_default is None
        and column is not mapper.polymorphic_on
        # The ORM sets the foreign keys that join the tables of a class. No key of a column with a default is looked at:
        # its table may be imported later.
        and not any(key.column.table in tables - {column.table} for key in column.foreign_keys)
        and not (column.primary_key and column.table.autoincrement_column is column)
        and attribute not in {*values, *generated}
    ]


def _column(spec: QueueSpec, mapper: Mapper[Any], attribute: str) -> Any:
    name = mapper.class_.__name__
    column = mapper.columns.get(attribute)
    if column is None:
        known = ", ".join(each for each in mapper.columns.keys() if each not in spec.attributes.values())  # noqa: SIM118 - no dict
        msg = f"values={{{attribute!r}: ...}}: {name} has no column attribute {attribute!r}; it has {known}"
        raise ConfigurationError(msg)
    roles = [role for role, each in spec.attributes.items() if each == attribute and role not in _SETTABLE]
    if roles:
        msg = f"values={{{attribute!r}: ...}}: {name}.{attribute} belongs to the queue; a schedule cannot set it"
        raise ConfigurationError(msg)
    return column


def _written(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value) if isinstance(value, Decimal | UUID) else value


def _stored_float(text: str) -> float:
    """Return a number of JSON as it is after it was stored: JSONB keeps whole numbers as such."""
    number = float(text)
    if abs(number) >= _LARGEST_EXACT:
        # It would come back as an integer of another value.
        raise ValueError(text)
    return number


def _read(mapper: Mapper[Any], column: Any, value: Any) -> Any:
    if value is None:
        return None
    members = getattr(column.type, "enum_class", None)
    try:
        if members is not None:
            return members[value]
        reader = _READERS.get(column.type.python_type)
        return value if reader is None else reader(value)
    except NotImplementedError:
        return value
    except (ValueError, KeyError, TypeError, ArithmeticError):
        attribute = mapper.get_property_by_column(column).key
        msg = f"values={{{attribute!r}: {value!r}}}: this is no value of {mapper.class_.__name__}.{attribute}"
        raise ConfigurationError(msg) from None


class Tick(NamedTuple):
    """The moment at which a schedule wanted a job.

    ``Schedule(make=)`` receives it, and a handler asks for that of its job::

        def write_report(session, report):
            tick = Tick.of(session, report)
            print(tick.schedule, tick.at, tick.late)
    """

    schedule: str
    """The name of the schedule."""
    at: datetime
    """The moment, in UTC."""
    late: timedelta
    """The time from then until now, by the database's clock."""

    @staticmethod
    def of(session: Session | scoped_session[Any], job: Any) -> Tick | None:
        """Return the tick for which a schedule has enqueued a job; None for any other job.

        Ticks are kept for a week, and the newest hundred of each schedule indefinitely. In async code:
        ``await session.run_sync(Tick.of, job)``.

        :param job: an instance that is in the database.
        :raises NotAQueueError: if it is no instance of a queue class.
        :raises StatementError: if it is not in the database.
        """
        check_session(session, "Tick.of", is_async=False)
        spec = spec_of(type(job) if isinstance(job, QueueMixin) else job)
        state: Any = sa.inspect(job)
        key = state.identity
        if key is None:
            msg = f"Tick.of(): this {type(job).__name__} is not in the database"
            raise StatementError(msg)
        return tick_of_key(session, spec, key)


def tick_of_key(session: Session | scoped_session[Any], spec: QueueSpec, key: Key) -> Tick | None:
    """Return the tick of the job with a key, whose row may be deleted already."""
    ticks = ScheduleTables.look_up(spec).ticks
    if any(getattr(column.type, "timezone", False) for column in spec.keys):
        # The text of a moment depends on the time zone of the session.
        same = [
            converted(ticks.c.key[place].astext, column.type) == sa.literal(part, column.type)
            for place, (column, part) in enumerate(zip(spec.keys, key, strict=True))
        ]
    else:
        pairs = zip(key, spec.keys, strict=True)
        literals = [converted(sa.literal(part, column.type), column.type) for part, column in pairs]
        same = [ticks.c.key == key_json(literals)]
    ticked = (
        sa.select(ticks.c.schedule, ticks.c.tick, elapsed(ticks.c.tick, clock()))
        .where(ticks.c.queue == spec.name, *same)
        # A key may have been used by an earlier job.
        .order_by(ticks.c.fired_at.desc())
        .limit(1)
    )
    own: Session = session_in_scope(session)
    # A replica may not have the tick yet.
    with routing_to_primary(own):
        found = own.execute(ticked, bind_arguments={"mapper": spec.mapper}).one_or_none()
    return None if found is None else Tick(found[0], found[1].astimezone(UTC), found[2])


T = TypeVar("T")
CatchUp = Literal["skip", "latest", "all"] | int

STORED = ("cron", "every", "timezone", "values", "factory", "jitter", "catch_up", "misfire_grace", "skip_unfinished")
"""The attributes of a Schedule that are columns of its row as well."""

_CATCH_UP = {"skip": 0, "latest": 1, "all": MOST}
_LONGEST = timedelta(days=36525)
_NO_VALUES: Mapping[str, Any] = MappingProxyType({})


class Schedule(Generic[T]):
    """Enqueues a job of ``model`` at each tick, exactly once, with any number of processes.

    It is stored in the table ``sqlaqueue_schedule`` when a process that has it starts, and read from there at each
    firing. A definition that was changed at run time is kept until it is reset.

    :param name: identifies the schedule in the database.
    :param model: a queue class, or a subclass of one.
    :param cron: a cron expression of five fields, or six with seconds first, or ``"@daily"`` and the like. It needs
        ``sqlaqueue[cron]``.
    :param every: seconds or a timedelta between two ticks, from the moment when the schedule was created.
    :param timezone: the time zone of the cron expression.
    :param values: the values of attributes of each job. They are stored as JSON.
    :param make: ``make(tick)`` returns the job of a tick, a new instance of ``model``. It must be quick, and needs no
        session. ``values`` are set on what it returns.
    :param jitter: seconds or a timedelta; each job is due later than its tick by a part of it, which follows from the
        names of schedule and tick.
    :param catch_up: how many missed ticks are fired when processes run again: ``"latest"`` for one, ``"skip"`` for
        none, a number up to 1000, or ``"all"`` for 1000. The newest are fired.
    :param misfire_grace: seconds or a timedelta from a tick on, after which it counts as missed; younger ticks are all
        fired. None for a minute, or until the next tick if that is sooner: then a schedule of every ten seconds does
        not fire several jobs at the same time.
    :param skip_unfinished: do not fire while the last job of the schedule is unfinished.
    :raises ConfigurationError: for an invalid argument.
    :raises NotAQueueError: if ``model`` is not a queue.

    ::

        nightly = Schedule("nightly", Invoice, cron="0 3 * * *", timezone="Europe/Berlin", values={"amount": 10})
    """

    @naming_options
    def __init__(
        self,
        name: str,
        model: type[T],
        *,
        cron: str | None = None,
        every: Delay | None = None,
        timezone: str = "UTC",
        values: Mapping[str, Any] = _NO_VALUES,
        make: Callable[[Tick], T] | None = None,
        jitter: Delay = 0,
        catch_up: CatchUp = "latest",
        misfire_grace: Delay | None = None,
        skip_unfinished: bool = False,
    ) -> None:
        self.name, self.model = name, model
        self.spec = spec_of(model)
        self._what = f"Schedule({name!r}, {model.__name__}): "
        given: object = name  # without a type checker, callers may pass any object
        if not isinstance(given, str) or not given.strip() or "\0" in given:
            raise self._error("give it a name, a text that is not empty")
        interval = None if every is None else self._span(every, "every")
        if cron is not None and not isinstance(given_cron := cron, str):
            raise self._error(f"cron={given_cron!r}: give a text, such as '0 3 * * *'")
        if not isinstance(given_skip := skip_unfinished, bool):
            raise self._error(f"skip_unfinished={given_skip!r}: give True or False")
        self.cron, self.every, self.timezone = cron, interval, timezone
        if not isinstance(values, Mapping):
            raise self._error(f"values={values!r}: give a dict of attributes")
        try:
            Recurrence(cron, interval, timezone, datetime.now(UTC)).check()
            self.values = to_json(self.spec, self._mapper, values)
        except ConfigurationError as error:
            raise self._error(str(error)) from None
        self.make = make
        self.factory = None if make is None else self._factory(make)
        self.jitter = self._span(jitter, "jitter")
        number: object = _CATCH_UP.get(catch_up) if isinstance(catch_up, str) else catch_up
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MOST:
            raise self._error(f"catch_up={catch_up!r}: give 'skip', 'latest', 'all', or a number from 0 to {MOST}")
        self.catch_up = number
        self.misfire_grace = None if misfire_grace is None else self._span(misfire_grace, "misfire_grace")
        self.skip_unfinished = skip_unfinished
        if self.misfire_grace == timedelta(0) and not self.catch_up:
            raise self._error(
                "misfire_grace=0 with catch_up='skip' would fire nothing: each tick is fired a moment after it"
            )
        self._check_model(values)
        self.tables = ScheduleTables.declare(self.spec)

    def __repr__(self) -> str:
        when = f"cron={self.cron!r}" if self.cron is not None else f"every={self.every!r}"
        return f"Schedule({self.name!r}, {self.model.__name__}, {when})"

    def columns(self) -> dict[str, Any]:
        """Return the definition as values of the columns of its row."""
        own = {name: getattr(self, name) for name in STORED}
        return {"queue": self.spec.name, "model": self.model.__name__, **own}

    @property
    def _mapper(self) -> Any:
        return sa.inspect(self.model)

    def _check_model(self, values: Mapping[str, Any]) -> None:
        if self.jitter and not self.spec.has("run_at"):
            raise self._error(
                f"jitter= needs the queue attribute 'run_at', which {self.model.__name__} leaves out; "
                f"{self.spec.config.fix_for('run_at')}"
            )
        if self.make is None and dataclasses.is_dataclass(self.model):
            try:
                inspect.signature(self.model).bind(**values)
            except TypeError as error:
                raise self._error(f"{error}; give values={{...}} for it, or make=") from None
        columns = self._mapper.columns
        empty = [name for name, value in self.values.items() if value is None and not columns[name].nullable]
        if empty:
            raise self._error(f"values={{{empty[0]!r}: None}}: {self.model.__name__}.{empty[0]} cannot be NULL")
        missing = [] if self.make is not None else missing_values(self.spec, self._mapper, values)
        if missing:
            names = ", ".join(f"{self.model.__name__}.{each}" for each in missing)
            raise self._error(
                f"{names} cannot be NULL and has no default; give values={{{missing[0]!r}: ...}}, or make=, a function "
                f"that returns the {self.model.__name__} of a tick"
            )

    def _factory(self, make: Any) -> str:
        """Return the name of the function, by which processes know whether they have it."""
        wanted = f"give a function make(tick) that returns a new {self.model.__name__}"
        if not callable(make):
            raise self._error(f"make={make!r}: {wanted}")
        if inspect.iscoroutinefunction(make):
            raise self._error(f"make={make!r} is a coroutine function, which is not awaited; {wanted}")
        try:
            inspect.signature(make).bind(None)
        except TypeError as error:
            raise self._error(f"make={make!r} cannot be called with a tick: {error}; {wanted}") from None
        except ValueError:
            pass  # a built-in without a signature
        module = getattr(make, "__module__", None) or type(make).__module__
        return f"{module}:{getattr(make, '__qualname__', type(make).__qualname__)}"

    def _span(self, given: Any, argument: str) -> timedelta:
        length = seconds(given, f"{self._what}{argument}=")
        if length > _LONGEST.total_seconds():
            raise self._error(f"{argument}={given!r}: give a hundred years at most")
        return timedelta(seconds=length)

    def _error(self, text: str) -> ConfigurationError:
        return ConfigurationError(f"{self._what}{text}")


@dataclass(eq=False)
class ScheduleGroup:
    """The schedules of all queues in one MetaData and schema, as a process knows them."""

    tables: ScheduleTables
    spec: QueueSpec
    """One of the queues: the sessions send the statements to its engine."""
    declared: dict[str, Schedule[Any]] = field(default_factory=dict)
    """The schedules of the program, by name."""

    @property
    def bind(self) -> dict[str, Any]:
        """The ``bind_arguments`` of statements, as a session may have several engines."""
        return {"mapper": self.spec.mapper}

    @property
    def specs(self) -> Sequence[QueueSpec]:
        """The queues for which the program declares schedules."""
        return list(dict.fromkeys([self.spec, *(each.spec for each in self.declared.values())]))

    @property
    def factories(self) -> dict[str, Callable[..., Any]]:
        """The functions ``make`` of the program, by the names that are stored."""
        return {
            each.factory: each.make
            for each in self.declared.values()
            if each.factory is not None and each.make is not None
        }


def schedule_groups(schedules: Iterable[Any], what: str) -> list[ScheduleGroup]:
    """Return the groups of a program's schedules.

    :param schedules: Schedules; a queue class stands for the schedules of its tables that were added at run time.
    :param what: what was given the schedules, for errors.
    :raises ConfigurationError: for anything else, and for schedules that cannot be told apart.
    """
    if isinstance(schedules, Schedule | str | type) or not isinstance(schedules, Iterable):
        msg = f"{what}: schedules={schedules!r}: give a list of Schedules"
        raise ConfigurationError(msg)
    groups: dict[tuple[int, str | None], ScheduleGroup] = {}
    for each in schedules:
        if not isinstance(each, Schedule | type):
            msg = f"{what}: schedules=[{each!r}]: this is no Schedule, and no queue class"
            raise ConfigurationError(msg)
        spec = each.spec if isinstance(each, Schedule) else spec_of(each)
        tables = ScheduleTables.declare(spec)
        group = groups.setdefault((id(tables.metadata), tables.schema), ScheduleGroup(tables, spec))
        if isinstance(each, Schedule):
            _add(group, each, what)
    return list(groups.values())


def _add(group: ScheduleGroup, schedule: Schedule[Any], what: str) -> None:
    name, other = schedule.name, group.declared.get(schedule.name)
    if other is not None and other is not schedule:
        msg = f"{what}: two schedules have the name {name!r}, which identifies one of them in the database"
        raise ConfigurationError(msg)
    known = None if schedule.factory is None else group.factories.get(schedule.factory)
    if known is not None and known is not schedule.make:
        msg = (
            f"{what}: Schedule({name!r}): make= has the name {schedule.factory} as another schedule's function has; "
            "define it by `def` at the top level of a module"
        )
        raise ConfigurationError(msg)
    group.declared[name] = schedule


# -- SQL about the rows of schedules -----------------------------------------------------------------------------------

PAUSED = "paused"
"""The ``planned_for`` of a paused schedule, whose ticks are passed over until it is resumed."""

BATCH = 100
"""How many schedules are fired in one transaction, at most."""

AHEAD = timedelta(days=1)
"""If the last tick is further in the future than this, the clock was wrong, and has been set back since."""


def plan(table: sa.FromClause) -> sa.ColumnElement[str]:
    """Return what ``next_tick`` depends on, as a text.

    It is stored in ``planned_for`` with each ``next_tick``, so a row whose text differs was changed since, by whatever
    means, and its next tick has to be computed again.
    """
    seconds: sa.ColumnElement[Any] = seconds_of(table.c.every)
    edited: sa.ColumnElement[Any] = epoch(table.c.edited_at)
    timing = sa.func.concat_ws("|", table.c.cron, seconds, table.c.timezone, edited)
    return sa.case((table.c.paused_at.is_(None), timing), else_=sa.literal_column(f"'{PAUSED}'"))


def due_in(table: sa.FromClause) -> sa.ColumnElement[Any]:
    """Return the seconds after which a schedule has to be looked at; negative for one that is late, NULL for never."""
    running = table.c.paused_at.is_(None)
    ahead = table.c.last_tick > later(clock(), sa.literal(AHEAD, Span()))
    replanned = sa.or_(
        table.c.planned_for.is_distinct_from(plan(table)), sa.and_(running, sa.or_(table.c.next_tick.is_(None), ahead))
    )
    until_tick = sa.case((running, _until(table.c.next_tick)))
    soonest = least(_until(table.c.run_requested_at), until_tick)
    return sa.case((replanned, sa.literal_column("0")), else_=soonest)


def is_known(group: ScheduleGroup, table: sa.FromClause) -> sa.ColumnElement[bool]:
    """Return the condition that this process has the class of a schedule's jobs, and the function that makes them."""
    model = sa.func.coalesce(table.c.model, "", type_=sa.Text())
    classes = [sa.and_(table.c.queue == queue, model == name) for queue, name in group.tables.classes()]
    factories = sorted(group.factories)
    return sa.and_(sa.or_(*classes), sa.or_(table.c.factory.is_(None), table.c.factory.in_(factories)))


def _until(moment: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return seconds_between(clock(), moment)


def due(
    group: ScheduleGroup,
    columns: Sequence[sa.ColumnElement[Any]],
    *,
    failing: Collection[str],
    only: Collection[str] | None = None,
) -> AnySelect:
    """Return a SELECT of the first schedules that are due and that this process can fire, the most urgent first.

    :param failing: the names of schedules to leave out.
    :param only: the names of the schedules to look at; None for all.
    """
    table = group.tables.schedules
    found = sa.select(*columns).where(is_known(group, table), due_in(table) <= 0)
    if failing:
        found = found.where(table.c.name.not_in(sorted(failing)))
    if only is not None:
        found = found.where(table.c.name.in_(sorted(only)))
    return found.order_by(nulls_first(table.c.next_tick.asc())).limit(BATCH)
