"""The public :class:`Schedule`: which jobs are enqueued, and when.

::

    nightly = Schedule("nightly", Report, cron="0 3 * * *", timezone="Europe/Berlin", values={"kind": "sales"})
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar

import sqlalchemy as sa

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.retry_policies import Delay, seconds
from sqlaqueue.schedules.attribute_values import missing_values, to_json
from sqlaqueue.schedules.due_ticks import MOST
from sqlaqueue.schedules.recurrence import Recurrence
from sqlaqueue.schedules.tables import ScheduleTables
from sqlaqueue.schedules.tick import Tick

T = TypeVar("T")
CatchUp = Literal["skip", "latest", "all"] | int

_CATCH_UP = {"skip": 0, "latest": 1, "all": MOST}
_LONGEST = timedelta(days=36525)
_NO_VALUES: Mapping[str, Any] = MappingProxyType({})


class Schedule(Generic[T]):
    """Enqueues a job of ``model`` at each tick, exactly once, however many processes fire the schedule.

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
    :param grace: seconds or a timedelta from the tick on, after which it counts as missed.
    :param skip_unfinished: do not fire while the last job of the schedule is unfinished.
    :raises ConfigurationError: for an invalid argument.
    :raises NotAQueueError: if ``model`` is not a queue.
    """

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
        grace: Delay = 60,
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
        self.catch_up = self._catch_up(catch_up)
        self.grace = self._span(grace, "grace")
        self.skip_unfinished = skip_unfinished
        if not (self.catch_up or self.grace):
            raise self._error("grace=0 with catch_up='skip' would fire nothing: each tick is fired a moment after it")
        self._check_model(values)
        self.tables = ScheduleTables.declare(self.spec)

    def __repr__(self) -> str:
        when = f"cron={self.cron!r}" if self.cron is not None else f"every={self.every!r}"
        return f"Schedule({self.name!r}, {self.model.__name__}, {when})"

    def columns(self) -> dict[str, Any]:
        """Return the definition as values of the columns of its row."""
        return {
            "queue": self.spec.name,
            "model": self.model.__name__,
            "cron": self.cron,
            "every": self.every,
            "timezone": self.timezone,
            "values": self.values,
            "factory": self.factory,
            "jitter": self.jitter,
            "catch_up": self.catch_up,
            "grace": self.grace,
            "skip_unfinished": self.skip_unfinished,
        }

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

    def _catch_up(self, given: Any) -> int:
        number = _CATCH_UP.get(given) if isinstance(given, str) else given
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MOST:
            raise self._error(f"catch_up={given!r}: give 'skip', 'latest', 'all', or a number from 0 to {MOST}")
        return number

    def _span(self, given: Any, argument: str) -> timedelta:
        length = seconds(given, f"{self._what}{argument}=")
        if length > _LONGEST.total_seconds():
            raise self._error(f"{argument}={given!r}: give a hundred years at most")
        return timedelta(seconds=length)

    def _error(self, text: str) -> ConfigurationError:
        return ConfigurationError(f"{self._what}{text}")
