"""The values of ``QueueConfig``: states, unique jobs and the rules of flow control."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from itertools import pairwise
from typing import Any, Literal, TypeVar, cast

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.retry_policies import Delay, seconds
from sqlaqueue.texts import did_you_mean

# -- constructors ------------------------------------------------------------------------------------------------------

InitT = TypeVar("InitT", bound=Callable[..., None])


def naming_options(init: InitT) -> InitT:
    """Return an ``__init__`` that refuses wrong arguments with the class and its parameters.

    Python's own error names the class that defines ``__init__``, and no parameters.
    """
    signature = inspect.signature(init)
    parameters = [*signature.parameters.values()][1:]
    known = [each.name for each in parameters if each.kind is not each.VAR_POSITIONAL]
    shown = ", ".join(each.name if each.name in known else f"*{each.name}" for each in parameters)

    @functools.wraps(init)
    def named(self: Any, *args: Any, **options: Any) -> None:
        try:
            signature.bind(self, *args, **options)
        except TypeError as error:
            hints = [did_you_mean(name, known) for name in options if name not in known]
            msg = f"{type(self).__name__}(): {error}; its parameters are {shown}{''.join(hints)}"
            raise ConfigurationError(msg) from None
        init(self, *args, **options)

    return cast("InitT", named)


# -- flow control ------------------------------------------------------------------------------------------------------
# The rules of ``QueueConfig(flow_control=[...])``.


Number = int | str | Callable[[Any], Any] | Any
"""A number, the name of an attribute that has it, or a scalar select, which may depend on the job's class."""

OnFailure = Literal["block", "continue", "cancel"]

_SHORTEST_RATE = 0.001
_LONGEST_RATE = 366 * 86400.0
_MOST = 2**31 - 1


class FlowRule:
    """One rule of ``QueueConfig(flow_control=[...])``."""

    per: tuple[str, ...]
    """The attributes whose values are the key; empty for a rule of the whole queue."""


@dataclass(frozen=True, init=False, eq=False)
class ConcurrencyLimit(FlowRule):
    """How many jobs of a queue, or of each key, may run at the same time.

    Each claim reads the limit. It may be changed while Consumers run: lowering it stops no running job.

    :param most: the number; or the name of an attribute of the class, so that each job has its own; or a scalar select,
        or a function that takes the class and returns one. NULL is no limit, and 0 lets no job start.
    :param per: the name of an attribute, or several, whose values are the key. A job without a value in one of them has
        no limit. None for one limit for the whole queue.
    :raises ConfigurationError: for invalid values.

    ::

        class Export(QueueMixin, Base):
            __tablename__ = "export"
            __queue__ = QueueConfig(flow_control=[ConcurrencyLimit(2, per="customer_id"), ConcurrencyLimit(10)])

            id: Mapped[int] = mapped_column(primary_key=True)
            customer_id: Mapped[int]
    """

    most: Number
    per: tuple[str, ...]

    @naming_options
    def __init__(self, most: Number, *, per: str | Sequence[str] | None = None) -> None:
        """Refuse invalid values."""
        what = f"ConcurrencyLimit({most!r})"
        _check_number(most, what, least=0)
        object.__setattr__(self, "most", most)
        object.__setattr__(self, "per", _attributes(per, f"ConcurrencyLimit(per={per!r})"))


@dataclass(frozen=True, init=False)
class RateLimit(FlowRule):
    """How many jobs of a queue, or of each key, may start within a period.

    The starts are spread: after a burst, one job may start every ``every / most``.

    :param most: how many jobs may start in each period.
    :param every: the length of the period, in seconds or as a timedelta.
    :param per: as in :class:`ConcurrencyLimit`.
    :param burst: how many jobs may start together after a pause; by default ``most``.
    :raises ConfigurationError: for invalid values.

    ::

        class Call(QueueMixin, Base):
            __tablename__ = "call"
            __queue__ = QueueConfig(flow_control=[RateLimit(10, every=1, per="host", burst=20)])

            id: Mapped[int] = mapped_column(primary_key=True)
            host: Mapped[str]
    """

    most: int
    every: timedelta
    per: tuple[str, ...]
    burst: int

    @naming_options
    def __init__(
        self, most: int, *, every: Delay, per: str | Sequence[str] | None = None, burst: int | None = None
    ) -> None:
        """Refuse invalid values."""
        set_field = object.__setattr__
        numbers: dict[str, object] = {"": most, "burst=": most if burst is None else burst}
        for name, number in numbers.items():
            if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= _MOST:
                msg = f"RateLimit({name}{number!r}): use an integer of 1 or more"
                raise ConfigurationError(msg)
        what = f"RateLimit(every={every!r})"
        if not _SHORTEST_RATE <= seconds(every, what) <= _LONGEST_RATE:
            msg = f"{what}: use from one millisecond to one year"
            raise ConfigurationError(msg)
        set_field(self, "most", most)
        set_field(self, "every", timedelta(seconds=seconds(every)))
        set_field(self, "per", _attributes(per, f"RateLimit(per={per!r})"))
        set_field(self, "burst", most if burst is None else burst)


@dataclass(frozen=True, init=False)
class InOrder(FlowRule):
    """Jobs of the same key run strictly one after the other.

    The head of a key is its first unfinished job, and only the head may run. A job that has started and waits, for a
    retry for example, stays the head. A job that is not due and has never started is skipped. To know which jobs have
    started, the queue has the column ``started_at``.

    :param attributes: the names of the attributes whose values are the key, without ``per=``. A job without a value in
        one of them has no place in an order.
    :param by: the name of the attribute whose values give the order. It must not change; jobs of equal values follow
        their primary keys.
    :param on_failure: what a failed head does to its key: ``"block"`` holds the other jobs back until it is requeued
        or deleted, ``"continue"`` lets them run, ``"cancel"`` cancels those that wait.
    :raises ConfigurationError: for invalid values.

    ::

        class Edit(QueueMixin, Base):
            __tablename__ = "edit"
            __queue__ = QueueConfig(flow_control=[InOrder("document_id", on_failure="continue")])

            id: Mapped[int] = mapped_column(primary_key=True)
            document_id: Mapped[int]
    """

    per: tuple[str, ...]
    by: str
    on_failure: OnFailure

    @naming_options
    def __init__(self, *attributes: str, by: str = "id", on_failure: OnFailure = "block") -> None:
        """Refuse invalid values."""
        what = f"InOrder({', '.join(map(repr, attributes))})"
        if not attributes:
            msg = 'InOrder(): give the name of an attribute whose values are the key, as in InOrder("customer_id")'
            raise ConfigurationError(msg)
        object.__setattr__(self, "per", _attributes(attributes, what))
        given: object = by  # without a type checker, callers may pass any object
        if not isinstance(given, str) or not given:
            msg = f"InOrder(by={by!r}): use the name of an attribute that does not change"
            raise ConfigurationError(msg)
        object.__setattr__(self, "by", by)
        if on_failure not in {"block", "continue", "cancel"}:
            msg = f'InOrder(on_failure={on_failure!r}): use "block", "continue" or "cancel"'
            raise ConfigurationError(msg)
        object.__setattr__(self, "on_failure", on_failure)


@dataclass(frozen=True, init=False, eq=False)
class FairShare(FlowRule):
    """Among the jobs of one priority, keys alternate.

    :param attributes: the names of the attributes whose values are the key, without ``per=``. NULL is a key as well.
    :param weight: how many jobs of a key one round has: a number, the name of an attribute, or a scalar select as in
        :class:`ConcurrencyLimit`.
    :raises ConfigurationError: for invalid values.

    ::

        class Import(QueueMixin, Base):
            __tablename__ = "import"
            __queue__ = QueueConfig(flow_control=[FairShare("customer_id", weight=3)])

            id: Mapped[int] = mapped_column(primary_key=True)
            customer_id: Mapped[int]
    """

    per: tuple[str, ...]
    weight: Number

    @naming_options
    def __init__(self, *attributes: str, weight: Number = 1) -> None:
        """Refuse invalid values."""
        what = f"FairShare({', '.join(map(repr, attributes))})"
        if not attributes:
            msg = (
                'FairShare(): give the name of an attribute whose values share workers, as in FairShare("customer_id")'
            )
            raise ConfigurationError(msg)
        object.__setattr__(self, "per", _attributes(attributes, what))
        _check_number(weight, f"FairShare(weight={weight!r})", least=1)
        object.__setattr__(self, "weight", weight)


FLOW_RULES: Mapping[str, type[FlowRule]] = {
    each.__name__: each for each in (ConcurrencyLimit, RateLimit, InOrder, FairShare)
}
"""The classes of rules by name, in the order in which a config keeps them."""

_FLOW_EXAMPLE = '[ConcurrencyLimit(2, per="customer_id"), InOrder("document_id")]'


def checked_flow_control(given: object) -> tuple[FlowRule, ...]:
    """Return the rules of ``QueueConfig(flow_control=...)`` in an order that does not depend on the given one.

    Limits and rates of keys come before those of the whole queue.

    :raises ConfigurationError: for anything but a list of rules, and for rules that contradict each other.
    """
    if isinstance(given, FlowRule):
        name = type(given).__name__
        msg = f"QueueConfig(flow_control={name}(...)): put it in a list, as in flow_control=[{name}(...)]"
        raise ConfigurationError(msg)
    if isinstance(given, str) or not isinstance(given, Sequence):
        msg = f"QueueConfig(flow_control={given!r}): use a list of rules, as in {_FLOW_EXAMPLE}"
        raise ConfigurationError(msg)
    for one in given:
        if not isinstance(one, tuple(FLOW_RULES.values())):
            msg = (
                f"QueueConfig(flow_control=[...]): {one!r} is not an instance of {', '.join(FLOW_RULES)}; write for "
                f"example {_FLOW_EXAMPLE}"
            )
            raise ConfigurationError(msg)
    rules = [one for kind in FLOW_RULES.values() for one in sorted(given, key=_place) if isinstance(one, kind)]
    for one, following in pairwise(rules):
        if type(one) is type(following) and (isinstance(one, InOrder | FairShare) or _place(one) == _place(following)):
            name = type(one).__name__
            which = "a queue has one" if isinstance(one, InOrder | FairShare) else "two of them have the same key"
            msg = f"QueueConfig(flow_control=[{name}(...), {name}(...)]): {which}; leave one of them out"
            raise ConfigurationError(msg)
    return tuple(rules)


def _place(rule: FlowRule) -> tuple[bool, tuple[str, ...], timedelta]:
    """Return the place of a rule among those of its class: two rules with the same place contradict each other."""
    return (not rule.per, rule.per, rule.every if isinstance(rule, RateLimit) else timedelta())


def _attributes(per: object, what: str) -> tuple[str, ...]:
    names = () if per is None else (per,) if isinstance(per, str) else per
    if not isinstance(names, Sequence) or not all(isinstance(name, str) and name for name in names):
        msg = f"{what}: use the name of an attribute, or several names"
        raise ConfigurationError(msg)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        msg = f"{what}: the attribute {twice[0]!r} is named twice"
        raise ConfigurationError(msg)
    if per is not None and not names:
        msg = f"{what}: name at least one attribute, or leave per out"
        raise ConfigurationError(msg)
    return tuple(names)


def _check_number(given: object, what: str, *, least: int) -> None:
    if isinstance(given, int) and not isinstance(given, bool) and least <= given <= _MOST:
        return
    if given is None or isinstance(given, int | float | bytes) or (isinstance(given, str) and not given.isidentifier()):
        msg = f"{what}: use an integer of {least} or more, the name of an attribute, or a scalar select"
        raise ConfigurationError(msg)


# -- batches and dependencies ------------------------------------------------------------------------------------------


@dataclass(frozen=True, init=False)
class WaitFor:
    """A job waits for the jobs of a relationship, and becomes pending when none of them is waited for any more.

    ``QueueConfig(waits_for="rows")`` is short for ``QueueConfig(waits_for=WaitFor("rows"))``.

    :param relationship: the name of a relationship of the class to another queue, or to itself. If it leads to many
        jobs, the job is a batch, and they are its members; if it leads to one, the job depends on that.
    :param on_failure: what the failure or the cancellation of one of them does: ``"block"`` lets the job wait until
        that one is requeued and completed, ``"cancel"`` cancels the job until that one is requeued, ``"continue"``
        counts it as ended. The default is ``"continue"`` for a batch, and ``"block"`` for a job that depends on
        another.
    :raises ConfigurationError: for invalid values.

    ::

        class Report(QueueMixin, Base):
            __tablename__ = "report"
            __queue__ = QueueConfig(waits_for=WaitFor("pages", on_failure="block"))

            id: Mapped[int] = mapped_column(primary_key=True)
            pages: Mapped[list["Page"]] = relationship(back_populates="report")
    """

    relationship: str
    on_failure: OnFailure | None

    @naming_options
    def __init__(self, relationship: str, *, on_failure: OnFailure | None = None) -> None:
        """Refuse invalid values."""
        given: object = relationship  # without a type checker, callers may pass any object
        if not isinstance(given, str) or not given:
            msg = f'WaitFor({given!r}): use the name of a relationship, as in WaitFor("rows")'
            raise ConfigurationError(msg)
        if on_failure not in {None, "block", "continue", "cancel"}:
            msg = f'WaitFor({given!r}, on_failure={on_failure!r}): use "block", "continue" or "cancel"'
            raise ConfigurationError(msg)
        object.__setattr__(self, "relationship", relationship)
        object.__setattr__(self, "on_failure", on_failure)


def checked_waits_for(given: object) -> tuple[WaitFor, ...]:
    """Return ``QueueConfig(waits_for=...)`` as a tuple.

    :raises ConfigurationError: for anything but names of relationships and :class:`WaitFor`.
    """
    listed = (given,) if isinstance(given, str | WaitFor) else given
    if not isinstance(listed, Sequence) or not all(isinstance(each, str | WaitFor) for each in listed):
        msg = (
            f'QueueConfig(waits_for={given!r}): name a relationship, or several, as in waits_for=("extract", "review")'
        )
        raise ConfigurationError(msg)
    waits = tuple(WaitFor(each) if isinstance(each, str) else each for each in listed)
    names = [each.relationship for each in waits]
    for name in names:
        if names.count(name) > 1:
            msg = f"QueueConfig(waits_for=...): the relationship {name!r} is named twice; leave one of them out"
            raise ConfigurationError(msg)
    return waits


# -- states ------------------------------------------------------------------------------------------------------------
# The states of a job, and the values of the status column for them: :class:`States`.


STATES = ("waiting", "pending", "processing", "completed", "failed", "cancelled")
"""The states of a job; only jobs of a queue with ``waits_for`` are ever waiting."""

UNFINISHED = ("waiting", "pending", "processing")
"""The states of a job that will run, or runs."""

FINISHED = ("completed", "failed", "cancelled")
"""The states of a job that will not run again."""


@dataclass(frozen=True, kw_only=True)
class States:
    """The value of the ``status`` column for each state.

    For an existing table give its own values: texts, integers or enum members. None means that the table has no value
    for the state; operations that need the state then raise an error. Only a queue with ``waits_for`` has waiting jobs.

    ::

        QueueConfig(states=States(pending="new", completed="done"))

    It is imported together with ``QueueConfig``, in which a program writes it.

    :raises ConfigurationError: if two states have the same value.
    """

    pending: Any = "pending"
    processing: Any = "processing"
    completed: Any = "completed"
    failed: Any = "failed"
    cancelled: Any = "cancelled"
    waiting: Any = "waiting"

    def __post_init__(self) -> None:
        """Refuse values that do not identify a state."""
        if self.pending is None:
            msg = "States(pending=None): every queue needs a value for pending jobs"
            raise ConfigurationError(msg)
        seen: dict[Any, str] = {}
        for state, value in self.items():
            if value is None:
                continue
            if not isinstance(value, Hashable):
                msg = f"States({state}={value!r}): use a text, an integer or an enum member"
                raise ConfigurationError(msg)
            if value in seen and state == value == "waiting":
                # The default gives way: most queues have no jobs that wait for others.
                object.__setattr__(self, state, None)
                continue
            if value in seen:
                msg = (
                    f"States: {seen[value]} and {state} are both {value!r}; "
                    f"use a different value for each state, or None for {state}"
                )
                raise ConfigurationError(msg)
            seen[value] = state

    def items(self) -> list[tuple[str, Any]]:
        """Return the names of the states with their values."""
        return [(f.name, getattr(self, f.name)) for f in fields(self)]


COUNTED = ("pending", "processing")
"""The states in which unique jobs count by default. A waiting job counts as a pending one."""

_SHORTEST_PERIOD = 1.0
_LONGEST_PERIOD = 100 * 366 * 86400.0

OnReturn = Literal["cancel", "wait"]


@dataclass(frozen=True, init=False)
class Unique:
    """At most one job with the same values of some attributes, among the jobs in some states.

    A second job with the same values is a *duplicate*. A unique partial index refuses it, however it is inserted;
    :func:`~sqlaqueue.enqueue` returns the first job instead, or does what its ``on_duplicate`` says.

    :param attributes: the names of attributes of the class that have columns in the queue's table.
    :param states: the states in which a job counts: ``"pending"``, and by default ``"processing"``. A job that waits
        for other jobs (``waits_for``) counts as a pending one.
    :param within: the length of a period, in seconds or as a timedelta: jobs count only with those that were created in
        the same period. Periods follow each other from Monday, 1970-01-05, 00:00 UTC. None for no limit.
    :param nulls_distinct: whether jobs with a NULL in one of the attributes are never duplicates, as in SQL.
    :param on_return: what becomes of a job that would be pending again while a duplicate of it counts: ``"cancel"``
        cancels it, with the duplicate's key in ``last_error``; ``"wait"`` leaves it until the duplicate no longer
        counts.
    :raises ConfigurationError: for invalid values.

    ::

        class Reminder(QueueMixin, Base):
            __tablename__ = "reminder"
            __queue__ = QueueConfig(unique=Unique("customer_id", "kind", within=timedelta(hours=1)))

            id: Mapped[int] = mapped_column(primary_key=True)
            customer_id: Mapped[int]
            kind: Mapped[str]
    """

    attributes: tuple[str, ...]
    states: tuple[str, ...]
    within: timedelta | None
    nulls_distinct: bool
    on_return: OnReturn

    @naming_options
    def __init__(
        self,
        *attributes: str,
        states: Sequence[str] = COUNTED,
        within: Delay | None = None,
        nulls_distinct: bool = True,
        on_return: OnReturn = "cancel",
    ) -> None:
        """Refuse invalid values."""
        set_field = object.__setattr__
        set_field(self, "attributes", _checked_attributes(attributes))
        set_field(self, "states", _checked_states(states))
        set_field(self, "within", None if within is None else _checked_period(within))
        if not isinstance(nulls_distinct, bool):
            msg = f"Unique(nulls_distinct={nulls_distinct!r}): use True or False"
            raise ConfigurationError(msg)
        set_field(self, "nulls_distinct", nulls_distinct)
        if on_return not in {"cancel", "wait"}:
            msg = f'Unique(on_return={on_return!r}): use "cancel" or "wait"'
            raise ConfigurationError(msg)
        set_field(self, "on_return", on_return)

    @property
    def finished(self) -> tuple[str, ...]:
        """The states of finished jobs that count."""
        return tuple(state for state in self.states if state in FINISHED)


def _checked_attributes(given: tuple[object, ...]) -> tuple[str, ...]:
    names = [name for name in given if isinstance(name, str) and name]
    if not given or len(names) != len(given):
        msg = (
            f"Unique({', '.join(map(repr, given))}): give the names of attributes, as in Unique('customer_id', 'kind')"
        )
        raise ConfigurationError(msg)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        msg = f"Unique(...): the attribute {twice[0]!r} is named twice"
        raise ConfigurationError(msg)
    return tuple(names)


def _checked_states(given: object) -> tuple[str, ...]:
    what = f"Unique(states={given!r})"
    if isinstance(given, str) or not isinstance(given, Sequence):
        msg = f"{what}: use a tuple of states, such as {COUNTED!r}"
        raise ConfigurationError(msg)
    unknown = [state for state in given if state not in STATES]
    if unknown:
        msg = f"{what}: there is no state {unknown[0]!r}; use some of {', '.join(STATES[1:])}"
        raise ConfigurationError(msg)
    if "waiting" in given:
        msg = f"{what}: a waiting job counts as a pending one; leave it out"
        raise ConfigurationError(msg)
    if "pending" not in given:
        msg = f'{what}: a new job is pending, so "pending" must be among them'
        raise ConfigurationError(msg)
    if set(given) - set(COUNTED) and "processing" not in given:
        msg = (
            f"{what}: a job that counts while it is pending and again after it has finished must count while it runs; "
            'add "processing"'
        )
        raise ConfigurationError(msg)
    # In the order of a job's life, so that two spellings are equal.
    return tuple(state for state in STATES if state in given)


def _checked_period(within: Delay) -> timedelta:
    what = f"Unique(within={within!r})"
    if not _SHORTEST_PERIOD <= seconds(within, what) <= _LONGEST_PERIOD:
        msg = f"{what}: use from one second to 100 years"
        raise ConfigurationError(msg)
    return timedelta(seconds=seconds(within))
