"""Configuration of a queue: :class:`QueueConfig`, which is frozen.

A model has its configuration in ``__queue__``, and inherits it from abstract bases and parent classes::

    class Email(QueueMixin, Base):
        __queue__ = QueueConfig(strategy="update_status", max_attempts=5)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.options import (
    FINISHED,
    STATES,
    ConcurrencyLimit,
    FairShare,
    FlowRule,
    InOrder,
    RateLimit,
    States,
    Unique,
    WaitFor,
    checked_flow_control,
    checked_waits_for,
    naming_options,
)
from sqlaqueue.queue.retry_policies import Delay, Exponential, RetryPolicy, seconds
from sqlaqueue.queue.strategy_protocol import Strategy
from sqlaqueue.texts import did_you_mean

ROLES = (
    "status",
    "priority",
    "run_at",
    "attempts",
    "max_attempts",
    "last_error",
    "created_at",
    "finished_at",
    "lease_token",
    "lease_expires_at",
    "claimed_by",
    "started_at",
    "traceparent",
    "waits_for_count",
    "cancelled_for",
    "is_open",
)
"""The names of the queue attributes. Each is a role that a column of the model can have."""

LEASE_ROLES = ("lease_token", "lease_expires_at", "claimed_by")
"""The roles that only strategies with leases use."""

ExtraColumn = Literal["started_at", "traceparent", "claimed_by", "is_open"]

EXTRA_ROLES: tuple[ExtraColumn, ...] = get_args(ExtraColumn)
"""The roles that a queue has only if its config asks for them; ``claimed_by`` is there anyway where leases are."""

WAIT_ROLES = ("waits_for_count", "cancelled_for")
"""The roles of jobs that wait for others."""

StrategyName = Literal["update_status", "delete_returning", "batch_select"]

_SHORTEST_LEASE = 1.0
_LONGEST_LEASE = 366 * 86400.0
_MOST_ATTEMPTS = 2**15 - 1
_SHORTEST_RETENTION = 1.0
_LONGEST_RETENTION = 100 * 366 * 86400.0


def is_count(number: object) -> bool:
    """Return whether ``number`` is an integer of 1 or more; booleans are not."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def check_lease(lease: Delay, what: str) -> None:
    """Refuse a lease that is shorter than a second or longer than a year.

    :raises ConfigurationError: with ``what``, in which ``...`` stands for the lease.
    """
    if not _SHORTEST_LEASE <= seconds(lease, what) <= _LONGEST_LEASE:
        msg = (
            f"{what.replace('...', repr(lease))}: a lease must be from one second, to be extended in time, to one "
            "year, since jobs of a dead worker wait for its end"
        )
        raise ConfigurationError(msg)


@dataclass(frozen=True, kw_only=True)
class QueueConfig:
    """The configuration of a queue: what a model assigns to ``__queue__``.

    ::

        class Call(QueueMixin, Base):
            __tablename__ = "call"
            __queue__ = QueueConfig(
                max_attempts=10,
                retention={"completed": timedelta(days=7)},
                flow_control=[ConcurrencyLimit(2, per="host")],
            )

            id: Mapped[int] = mapped_column(primary_key=True)
            host: Mapped[str]

    :param strategy: how jobs are claimed: the name of a strategy, or an instance of one.

        ``"update_status"``, the default: the claim sets the status and a lease; no transaction is open while a handler
        runs. It suits handlers that take long, or that do anything outside the database.

        ``"batch_select"``: a transaction holds the rows of the jobs while their handlers run. It suits short handlers
        that read and write rows of the same database.

        ``"delete_returning"``: as ``"batch_select"``, but jobs are claimed from a small table of messages. It suits job
        tables that are large, wide, or written by other programs.
    :param max_attempts: how often a job is attempted before it fails for good. The ``max_attempts`` of a row overrides
        it.
    :param lease: how long a claim is valid unless it is extended, in seconds or as a timedelta. Consumers extend the
        leases of the jobs that they run. Strategies that hold a transaction have no lease.
    :param retry: the policy that returns the delay before the next attempt, see
        :mod:`sqlaqueue.queue.retry_policies`.
    :param columns: changes the attributes that ``QueueMixin`` adds: ``{"status": "queue_status"}`` renames the
        attribute, ``{"status": "status"}`` uses an attribute that the class defines itself, and ``{"priority": None}``
        leaves the role out. Roles that are not named get an attribute of the same name.
    :param extra_columns: the optional attributes that the queue has as well: ``"started_at"``, when the last run
        started; ``"traceparent"``, the trace of the transaction that enqueued the job; ``"claimed_by"``, the worker
        that ran the job last, for strategies without leases; and ``"is_open"``, for a batch that is filled in several
        transactions and waits until it is False. For type checkers the class may annotate them, without a
        value: ``started_at: Mapped[datetime | None]``.
    :param adopt: makes an existing table a queue without adding columns: ``{"status": "state", "run_at": "due"}``
        names the attribute of the class for each role. Roles that are not named are left out. It cannot be combined
        with ``columns``.
    :param rows_are_messages: True lets a claim **delete the row of the job**; the table then has no status. Only some
        strategies support it, such as ``"delete_returning"``.
    :param states: the values of the ``status`` column.
    :param on_complete: ``"keep"`` leaves the rows of completed jobs in the table, ``"delete"`` deletes them.
    :param retention: how long finished jobs are kept, by state, in seconds or as timedeltas, such as
        ``{"completed": timedelta(days=7), "failed": timedelta(days=90)}``. Consumers delete older jobs. Jobs in states
        that are not named are kept.
    :param attempt_history: how long ended attempts are kept in the table ``sqlaqueue_attempt``, in seconds or as a
        timedelta; None for no history. Consumers write a row for each attempt, and delete older ones.
    :param statistics: True lets Consumers count what ends in each minute, and how long it waited and ran, in the table
        ``sqlaqueue_minute``, from which the dashboard draws the last 30 days. They write it once a minute.
    :param unique: refuses a second job with the same values of some attributes, see :class:`~sqlaqueue.Unique`.
    :param flow_control: a list of rules that delay jobs, in any order:
        :class:`~sqlaqueue.ConcurrencyLimit` limits how many jobs run at the same time, :class:`~sqlaqueue.RateLimit`
        how many start within a period; with :class:`~sqlaqueue.InOrder` the jobs of a key run strictly one after the
        other, with :class:`~sqlaqueue.FairShare` keys alternate.
    :param waits_for: the name of a relationship to other jobs, or several: a job is ``waiting`` until these have ended.
        With a relationship to many jobs it is a batch, and runs once when all its members have ended; with one to a
        single job it runs when that has completed. :class:`~sqlaqueue.WaitFor` says what a failure does.
    :param notify: whether enqueueing wakes idle Consumers by NOTIFY; on SQLite and MariaDB, whether a thread of each
        process looks for jobs of other processes.
    :param name: the name of the queue in logs and side tables; the name of the table by default.
    :raises ConfigurationError: for invalid values.
    """

    strategy: StrategyName | Strategy = "update_status"
    max_attempts: int = 5
    lease: Delay = timedelta(minutes=1)
    retry: RetryPolicy = field(default_factory=Exponential)
    columns: Mapping[str, str | None] = field(default_factory=dict)
    extra_columns: Sequence[ExtraColumn] = ()
    adopt: Mapping[str, str] | None = None
    rows_are_messages: bool = False
    states: States = field(default_factory=States)
    on_complete: Literal["keep", "delete"] = "keep"
    retention: Mapping[str, Delay] = field(default_factory=dict)
    attempt_history: Delay | None = None
    statistics: bool = False
    unique: Unique | None = None
    flow_control: Sequence[FlowRule] = ()
    waits_for: str | WaitFor | Sequence[str | WaitFor] = ()
    notify: bool = True
    name: str | None = None

    def __post_init__(self) -> None:
        """Refuse invalid values, and make the mappings read-only."""
        if not is_count(self.max_attempts) or self.max_attempts > _MOST_ATTEMPTS:
            msg = f"QueueConfig(max_attempts={self.max_attempts!r}): use an integer from 1 to {_MOST_ATTEMPTS}"
            raise ConfigurationError(msg)
        check_lease(self.lease, "QueueConfig(lease=...)")
        if not callable(self.retry):
            msg = f"QueueConfig(retry={self.retry!r}): use a policy such as sqlaqueue.Exponential(), or a callable"
            raise ConfigurationError(msg)
        if self.on_complete not in {"keep", "delete"}:
            msg = f'QueueConfig(on_complete={self.on_complete!r}): use "keep" or "delete"'
            raise ConfigurationError(msg)
        if not isinstance(self.states, States):
            msg = f"QueueConfig(states={self.states!r}): use sqlaqueue.States(...)"
            raise ConfigurationError(msg)
        name: object = self.name  # without a type checker, callers may pass any object
        if name is not None and (not isinstance(name, str) or not name):
            msg = f"QueueConfig(name={self.name!r}): use a text, or None for the table's name"
            raise ConfigurationError(msg)
        for option in ("notify", "statistics"):
            given: object = getattr(self, option)  # without a type checker, callers may pass any object
            if not isinstance(given, bool):
                msg = f"QueueConfig({option}={given!r}): use True or False"
                raise ConfigurationError(msg)
        self._check_columns()
        object.__setattr__(self, "extra_columns", self._checked_extra_columns())
        if self.adopt is not None:
            self._check_adopt(self.adopt)
            object.__setattr__(self, "adopt", MappingProxyType(dict(self.adopt)))
        self._check_rows_are_messages()
        self._check_unique()
        object.__setattr__(self, "flow_control", checked_flow_control(self.flow_control))
        object.__setattr__(self, "waits_for", checked_waits_for(self.waits_for))
        self._check_waits()
        object.__setattr__(self, "retention", MappingProxyType(self._checked_retention()))
        object.__setattr__(self, "attempt_history", self._checked_attempt_history())
        object.__setattr__(self, "columns", MappingProxyType(dict(self.columns)))

    def _check_columns(self) -> None:
        given: object = self.columns  # without a type checker, callers may pass any object
        if not isinstance(given, Mapping) or not all(isinstance(name, str | None) for name in given.values()):
            msg = f"QueueConfig(columns={given!r}): map each queue attribute to the name of an attribute, or None"
            raise ConfigurationError(msg)
        _check_roles("columns", given)

    def _checked_extra_columns(self) -> tuple[ExtraColumn, ...]:
        given: object = self.extra_columns  # without a type checker, callers may pass any object
        if isinstance(given, str) or not isinstance(given, Sequence):
            names = f"({given!r},)" if isinstance(given, str) else "('started_at',)"
            msg = f"QueueConfig(extra_columns={given!r}): use a tuple of names, as in {names}"
            raise ConfigurationError(msg)
        what = f"QueueConfig(extra_columns={tuple(given)!r})"
        for name in given:
            if name not in EXTRA_ROLES:
                why = "is not optional" if name in ROLES else "is not a queue attribute"
                hint = "" if name in ROLES else did_you_mean(str(name), EXTRA_ROLES)
                msg = f"{what}: {name!r} {why}; use some of {', '.join(EXTRA_ROLES)}{hint}"
                raise ConfigurationError(msg)
            if given.count(name) > 1:
                msg = f"{what}: {name!r} is named twice; leave one of them out"
                raise ConfigurationError(msg)
            if self.adopt is not None:
                msg = f"{what}: adopt= adds no columns; name the column of the table there, adopt={{{name!r}: ...}}"
                raise ConfigurationError(msg)
            if self.columns.get(name, name) is None:
                msg = f"{what}: it contradicts columns={{{name!r}: None}}; leave out one of the two"
                raise ConfigurationError(msg)
        return tuple(given)

    def _check_adopt(self, given: object) -> None:
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given.values()):
            msg = (
                f"QueueConfig(adopt={given!r}): map each queue attribute that the class has to its attribute, as in "
                "{'status': 'state'}; those that are not named are left out"
            )
            raise ConfigurationError(msg)
        if self.columns:
            msg = (
                f"QueueConfig(columns={dict(self.columns)!r}, adopt={dict(given)!r}): use one of the two. adopt= "
                "names columns of an existing table and adds none; columns= changes the columns that QueueMixin adds"
            )
            raise ConfigurationError(msg)
        _check_roles("adopt", given)

    def _check_rows_are_messages(self) -> None:
        if not isinstance(self.rows_are_messages, bool):
            msg = f"QueueConfig(rows_are_messages={self.rows_are_messages!r}): use True or False"
            raise ConfigurationError(msg)
        if not self.rows_are_messages:
            return
        option, given = ("columns", self.columns) if self.adopt is None else ("adopt", self.adopt)
        if given.get("status") is not None:
            msg = (
                f"QueueConfig(rows_are_messages=True, {option}={{'status': {given['status']!r}, ...}}): a row that the "
                "claim deletes has no status. Leave out rows_are_messages to keep the rows, or 'status' to delete them"
            )
            raise ConfigurationError(msg)

    def _check_waits(self) -> None:
        """Refuse waiting jobs where a state or a column of theirs is missing, and their column where none wait."""
        if not self.waits_for:
            if "is_open" in self.extra_columns:
                msg = (
                    "QueueConfig(extra_columns=('is_open',)): only a batch can be open, and this queue waits for no "
                    'jobs; name a relationship to its members with waits_for="rows", or leave it out'
                )
                raise ConfigurationError(msg)
            return
        if self.rows_are_messages:
            msg = (
                f"QueueConfig(rows_are_messages=True, waits_for={self.waits_for!r}): a job that waits has a status; "
                "leave out one of the two"
            )
            raise ConfigurationError(msg)

    def _check_unique(self) -> None:
        unique: object = self.unique  # without a type checker, callers may pass any object
        if unique is not None and not isinstance(unique, Unique):
            msg = f"QueueConfig(unique={unique!r}): use sqlaqueue.Unique('customer_id', 'kind')"
            raise ConfigurationError(msg)

    def _checked_retention(self) -> dict[str, timedelta]:
        given: object = self.retention  # without a type checker, callers may pass any object
        if not isinstance(given, Mapping):
            msg = f"QueueConfig(retention={given!r}): map states to durations, as in {{'completed': timedelta(days=7)}}"
            raise ConfigurationError(msg)
        checked = {}
        for state, age in given.items():
            what = f"QueueConfig(retention={{{state!r}: ...}})"
            if state not in FINISHED:
                why = "only finished jobs are deleted" if state in STATES else "there is no such state"
                msg = f"{what}: {why}; use some of {', '.join(FINISHED)}"
                raise ConfigurationError(msg)
            if state == "completed" and self.on_complete == "delete":
                msg = f'{what}: on_complete="delete" keeps no completed jobs; leave out one of the two'
                raise ConfigurationError(msg)
            if not _SHORTEST_RETENTION <= seconds(age, what) <= _LONGEST_RETENTION:
                instead = 'on_complete="delete" keeps none, and ' if state == "completed" else ""
                msg = (
                    f"{what.replace('...', repr(age))}: use from one second to 100 years; {instead}jobs in states "
                    "that are not named are kept indefinitely"
                )
                raise ConfigurationError(msg)
            checked[state] = timedelta(seconds=seconds(age))
        return checked

    def _checked_attempt_history(self) -> timedelta | None:
        given = self.attempt_history
        if given is None:
            return None
        try:
            kept = seconds(given)
        except ConfigurationError:
            kept = -1
        if not _SHORTEST_RETENTION <= kept <= _LONGEST_RETENTION:
            msg = (
                f"QueueConfig(attempt_history={given!r}): use seconds or a timedelta, from one second to 100 years, as "
                "in attempt_history=timedelta(days=14), or None for no history"
            )
            raise ConfigurationError(msg)
        return timedelta(seconds=kept)

    @cached_property
    def limits(self) -> tuple[ConcurrencyLimit, ...]:
        """The limits among the rules of flow control."""
        return tuple(one for one in self.flow_control if isinstance(one, ConcurrencyLimit))

    @cached_property
    def rates(self) -> tuple[RateLimit, ...]:
        """The rates among the rules of flow control."""
        return tuple(one for one in self.flow_control if isinstance(one, RateLimit))

    @cached_property
    def order(self) -> InOrder | None:
        """The rule that runs the jobs of a key one after the other; None without one."""
        return next((one for one in self.flow_control if isinstance(one, InOrder)), None)

    @cached_property
    def fair(self) -> FairShare | None:
        """The rule by which keys alternate; None without one."""
        return next((one for one in self.flow_control if isinstance(one, FairShare)), None)

    @cached_property
    def extra_roles(self) -> frozenset[str]:
        """The optional roles that the queue has: those of ``extra_columns``, and what flow control and waiting need."""
        waits = {"waits_for_count"} if self.waits_for else set()
        cancels = {"cancelled_for"} if any(each.on_failure == "cancel" for each in self.waits) else set()
        return frozenset(self.extra_columns) | ({"started_at"} if self.order is not None else set()) | waits | cancels

    @property
    def waits(self) -> tuple[WaitFor, ...]:
        """The relationships of ``waits_for``."""
        return cast("tuple[WaitFor, ...]", self.waits_for)

    def attribute_for(self, role: str, default: str | None = None) -> str | None:
        """Return the attribute that has a role, None if the role is left out.

        :param default: the attribute, unless the config names another.
        """
        if self.adopt is not None:
            return self.adopt.get(role)
        if role == "status" and self.rows_are_messages:
            return None
        return self.columns.get(role, default)

    def fix_for(self, role: str) -> str:
        """Return the change of the config that adds a role, for errors."""
        if self.adopt is not None:
            return f"name its column with QueueConfig(adopt={{{role!r}: ...}})"
        if role == "status" and self.rows_are_messages:
            return "leave out rows_are_messages=True"
        if self.columns.get(role, role) is None:
            return f"remove {role!r}: None from QueueConfig(columns=...)"
        if role in EXTRA_ROLES:
            return f"add it with QueueConfig(extra_columns={(*self.extra_columns, role)!r})"
        return f"add it with QueueConfig(columns={{{role!r}: {role!r}}})"


# The decorator cannot stand in the class, whose constructor is generated.
type.__setattr__(QueueConfig, "__init__", naming_options(QueueConfig.__init__))


def _check_roles(option: str, given: Mapping[Any, Any]) -> None:
    """Refuse unknown roles, and one attribute for two roles."""
    unknown = sorted(set(given) - set(ROLES), key=str)
    if unknown:
        names, known = ", ".join(map(repr, unknown)), ", ".join(ROLES)
        hint = did_you_mean(str(unknown[0]), ROLES)
        if given[unknown[0]] in ROLES:
            hint = f"; the queue attribute comes first: {{{given[unknown[0]]!r}: {unknown[0]!r}}}"
        msg = f"QueueConfig({option}=...): {names} is not a queue attribute; those are {known}{hint}"
        raise ConfigurationError(msg)
    attributes = [attribute for attribute in given.values() if attribute is not None]
    twice = sorted({attribute for attribute in attributes if attributes.count(attribute) > 1})
    if twice:
        msg = f"QueueConfig({option}=...): the attribute {twice[0]!r} has two roles"
        raise ConfigurationError(msg)
