"""What a user says about a queue: :class:`QueueConfig` and :class:`States`. Frozen, no I/O.

A model carries its config in ``__queue__``; abstract bases and parent classes hand it down::

    class Email(QueueMixin, Base):
        __queue__ = QueueConfig(strategy="update_status", max_attempts=5)
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from sqlaqueue.backoff import Delay, Exponential, RetryPolicy, seconds
from sqlaqueue.exc import ConfigurationError

if TYPE_CHECKING:
    from sqlaqueue.strategies.base import ClaimStrategy

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
)
"""The names of the queue attributes; each is a role that some column of the model plays."""

LEASE_ROLES = ("lease_token", "lease_expires_at", "claimed_by")
"""The roles that only a strategy with leases uses."""

OPT_IN_ROLES = ("started_at",)
"""The roles that a queue has only where its config places them."""

STATES = ("pending", "processing", "completed", "failed", "cancelled")
FINISHED = ("completed", "failed", "cancelled")


_SHORTEST_LEASE = 1.0
_LONGEST_LEASE = 366 * 86400.0
_MOST_ATTEMPTS = 2**15 - 1
_SHORTEST_RETENTION = 1.0
_LONGEST_RETENTION = 100 * 366 * 86400.0


def is_count(number: object) -> bool:
    """Whether ``number`` is a whole number from 1 on; True and False are not meant as numbers."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def check_lease(lease: Delay, what: str) -> None:
    """Refuse leases that nobody can keep alive, and those after which nobody would wait for a dead worker's jobs."""
    if not _SHORTEST_LEASE <= seconds(lease, what) <= _LONGEST_LEASE:
        msg = (
            f"{what.replace('...', repr(lease))}: a lease lasts from one second, or it could not be kept alive, "
            "to a year, for a dead worker keeps its jobs as long"
        )
        raise ConfigurationError(msg)


@dataclass(frozen=True, kw_only=True)
class States:
    """The values that the ``status`` column holds for each state.

    Give another word (or enum member, or integer) to speak an existing table's vocabulary, None for a
    state that the table cannot hold: what would need that state then says so.

    :raises ConfigurationError: when two states share a value.
    """

    pending: Any = "pending"
    processing: Any = "processing"
    completed: Any = "completed"
    failed: Any = "failed"
    cancelled: Any = "cancelled"

    def __post_init__(self) -> None:
        """Refuse words that would make two states one."""
        if self.pending is None:
            msg = "States(pending=None): every queue needs a value for waiting jobs"
            raise ConfigurationError(msg)
        seen: dict[Any, str] = {}
        for state, word in self.items():
            if word is None:
                continue
            if not isinstance(word, Hashable):
                msg = f"States({state}={word!r}): give a text, an integer or a member of an enum"
                raise ConfigurationError(msg)
            if word in seen:
                msg = (
                    f"States: {seen[word]} and {state} are both {word!r}; "
                    f"give each state a value of its own, or None to {state}"
                )
                raise ConfigurationError(msg)
            seen[word] = state

    def items(self) -> list[tuple[str, Any]]:
        """Return the states' names with their values, in the order of a job's life."""
        return [(f.name, getattr(self, f.name)) for f in fields(self)]


@dataclass(frozen=True, kw_only=True)
class QueueConfig:
    """How one mapped class works as a queue.

    :param strategy: the name of a claim strategy, or an instance of one.
    :param max_attempts: how many runs a job gets before it is failed for good; a row's own
        ``max_attempts`` overrides it.
    :param lease: how long a claimed job belongs to its worker without a sign of life, in seconds or a
        timedelta; a live Consumer extends it. Strategies that hold a transaction have no lease.
    :param retry: the policy that gives the delay before the next attempt, see :mod:`sqlaqueue.backoff`.
    :param columns: which attribute plays a role: ``{"status": "queue_status"}`` puts the role on another
        attribute, ``{"status": "status"}`` adopts an attribute that the class defines itself, and
        ``{"priority": None}`` leaves the role out.
    :param states: the values of the ``status`` column.
    :param on_complete: ``"keep"`` leaves completed rows in the table, ``"delete"`` deletes them.
    :param retention: how long finished jobs are kept, for each state in seconds or a timedelta, such as
        ``{"completed": timedelta(days=7), "failed": timedelta(days=90)}``. Consumers delete what is older. Jobs in
        states that are not named are kept for ever.
    :param notify: whether enqueueing wakes idle consumers by NOTIFY.
    :param name: the queue's name in logs and side tables; the table's name by default.
    :raises ConfigurationError: for values that cannot be meant.
    """

    strategy: str | ClaimStrategy = "update_status"
    max_attempts: int = 5
    lease: Delay = timedelta(minutes=1)
    retry: RetryPolicy = field(default_factory=Exponential)
    columns: Mapping[str, str | None] = field(default_factory=dict)
    states: States = field(default_factory=States)
    on_complete: Literal["keep", "delete"] = "keep"
    retention: Mapping[str, Delay] = field(default_factory=dict)
    notify: bool = True
    name: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, and make the mapping read-only."""
        if not is_count(self.max_attempts) or self.max_attempts > _MOST_ATTEMPTS:
            msg = f"QueueConfig(max_attempts={self.max_attempts!r}): give a whole number from 1 to {_MOST_ATTEMPTS}"
            raise ConfigurationError(msg)
        check_lease(self.lease, "QueueConfig(lease=...)")
        if not callable(self.retry):
            msg = f"QueueConfig(retry={self.retry!r}): give a policy such as sqlaqueue.Exponential(), or a callable"
            raise ConfigurationError(msg)
        if self.on_complete not in {"keep", "delete"}:
            msg = f'QueueConfig(on_complete={self.on_complete!r}): give "keep" or "delete"'
            raise ConfigurationError(msg)
        if not isinstance(self.states, States):
            msg = f"QueueConfig(states={self.states!r}): give sqlaqueue.States(...)"
            raise ConfigurationError(msg)
        name: object = self.name  # what a caller without a type checker passes may be anything
        if name is not None and (not isinstance(name, str) or not name):
            msg = f"QueueConfig(name={self.name!r}): give a text, or None for the table's name"
            raise ConfigurationError(msg)
        if not isinstance(self.notify, bool):
            msg = f"QueueConfig(notify={self.notify!r}): give True or False"
            raise ConfigurationError(msg)
        self._check_columns()
        object.__setattr__(self, "retention", MappingProxyType(self._checked_retention()))
        object.__setattr__(self, "columns", MappingProxyType(dict(self.columns)))

    def _check_columns(self) -> None:
        given: object = self.columns  # what a caller without a type checker passes may be anything
        if not isinstance(given, Mapping) or not all(isinstance(name, str | None) for name in given.values()):
            msg = f"QueueConfig(columns={given!r}): give the name of an attribute, or None, to each queue attribute"
            raise ConfigurationError(msg)
        unknown = sorted(set(self.columns) - set(ROLES), key=str)
        if unknown:
            names, known = ", ".join(map(repr, unknown)), ", ".join(ROLES)
            msg = f"QueueConfig(columns=...): {names} is no queue attribute; they are {known}"
            raise ConfigurationError(msg)
        placed = [attribute for attribute in self.columns.values() if attribute is not None]
        twice = sorted({attribute for attribute in placed if placed.count(attribute) > 1})
        if twice:
            msg = f"QueueConfig(columns=...): the attribute {twice[0]!r} is given to two queue attributes"
            raise ConfigurationError(msg)

    def _checked_retention(self) -> dict[str, timedelta]:
        given: object = self.retention  # what a caller without a type checker passes may be anything
        if not isinstance(given, Mapping):
            msg = (
                f"QueueConfig(retention={given!r}): give a time to each state, as in {{'completed': timedelta(days=7)}}"
            )
            raise ConfigurationError(msg)
        checked = {}
        for state, age in given.items():
            what = f"QueueConfig(retention={{{state!r}: ...}})"
            if state not in FINISHED:
                why = "jobs that are not finished are not deleted" if state in STATES else "there is no such state"
                msg = f"{what}: {why}; give some of {', '.join(FINISHED)}"
                raise ConfigurationError(msg)
            if state == "completed" and self.on_complete == "delete":
                msg = f'{what}: on_complete="delete" leaves no completed jobs to keep; leave out one of the two'
                raise ConfigurationError(msg)
            if not _SHORTEST_RETENTION <= seconds(age, what) <= _LONGEST_RETENTION:
                instead = 'on_complete="delete" keeps none, and ' if state == "completed" else ""
                msg = (
                    f"{what.replace('...', repr(age))}: give from one second to 100 years; {instead}a state that is "
                    "not named keeps its jobs for ever"
                )
                raise ConfigurationError(msg)
            checked[state] = timedelta(seconds=seconds(age))
        return checked

    @property
    def lease_duration(self) -> timedelta:
        """The lease as a timedelta."""
        return timedelta(seconds=seconds(self.lease))
