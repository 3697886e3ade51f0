"""What a user says about a queue: :class:`QueueConfig` and :class:`States`. Frozen, no I/O.

A model carries its config in ``__queue__``; abstract bases and parent classes hand it down::

    class Email(QueueMixin, Base):
        __queue__ = QueueConfig(strategy="update_status", max_attempts=5)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.retry_policies import Delay, Exponential, RetryPolicy, seconds
from sqlaqueue.queue.strategy import Strategy

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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that names what is written almost like ``name``, nothing where nothing is."""
    alike = get_close_matches(name, known)
    return f"; did you mean {' or '.join(map(repr, alike))}?" if alike else ""


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
    :param retry: the policy that gives the delay before the next attempt, see :mod:`sqlaqueue.queue.retry_policies`.
    :param columns: changes what ``QueueMixin`` adds to a table of the queue's own: ``{"status": "queue_status"}`` puts
        the role on another attribute, ``{"status": "status"}`` adopts an attribute that the class defines itself, and
        ``{"priority": None}`` leaves the role out. A role that is not named gets a column of its name.
    :param adopt: makes an existing table a queue as it stands: ``{"status": "state", "run_at": "due"}`` names the
        attributes of the class that play a role. Nothing is added: a role that is not named is left out. It excludes
        ``columns``.
    :param rows_are_messages: True lets a claim **delete the job's row**: the table is a plain list of things to do,
        without a status. Only strategies that can do so take it, such as ``"delete_returning"``.
    :param states: the values of the ``status`` column.
    :param on_complete: ``"keep"`` leaves completed rows in the table, ``"delete"`` deletes them.
    :param retention: how long finished jobs are kept, for each state in seconds or a timedelta, such as
        ``{"completed": timedelta(days=7), "failed": timedelta(days=90)}``. Consumers delete what is older. Jobs in
        states that are not named are kept for ever.
    :param notify: whether enqueueing wakes idle consumers by NOTIFY.
    :param name: the queue's name in logs and side tables; the table's name by default.
    :raises ConfigurationError: for values that cannot be meant.
    """

    strategy: str | Strategy = "update_status"
    max_attempts: int = 5
    lease: Delay = timedelta(minutes=1)
    retry: RetryPolicy = field(default_factory=Exponential)
    columns: Mapping[str, str | None] = field(default_factory=dict)
    adopt: Mapping[str, str] | None = None
    rows_are_messages: bool = False
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
        if self.adopt is not None:
            self._check_adopt(self.adopt)
            object.__setattr__(self, "adopt", MappingProxyType(dict(self.adopt)))
        self._check_rows_are_messages()
        object.__setattr__(self, "retention", MappingProxyType(self._checked_retention()))
        object.__setattr__(self, "columns", MappingProxyType(dict(self.columns)))

    def _check_columns(self) -> None:
        given: object = self.columns  # what a caller without a type checker passes may be anything
        if not isinstance(given, Mapping) or not all(isinstance(name, str | None) for name in given.values()):
            msg = f"QueueConfig(columns={given!r}): give the name of an attribute, or None, to each queue attribute"
            raise ConfigurationError(msg)
        _check_placing("columns", given)

    def _check_adopt(self, given: object) -> None:
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given.values()):
            msg = (
                f"QueueConfig(adopt={given!r}): give the name of an attribute to each queue attribute that the class "
                "has, as in {'status': 'state'}; those that are not named are left out"
            )
            raise ConfigurationError(msg)
        if self.columns:
            msg = (
                f"QueueConfig(columns={dict(self.columns)!r}, adopt={dict(given)!r}): give one of the two. adopt= "
                "names what an existing table has, and adds nothing; columns= changes what QueueMixin adds"
            )
            raise ConfigurationError(msg)
        _check_placing("adopt", given)

    def _check_rows_are_messages(self) -> None:
        if not isinstance(self.rows_are_messages, bool):
            msg = f"QueueConfig(rows_are_messages={self.rows_are_messages!r}): give True or False"
            raise ConfigurationError(msg)
        if not self.rows_are_messages:
            return
        word, placed = ("columns", self.columns) if self.adopt is None else ("adopt", self.adopt)
        if placed.get("status") is not None:
            msg = (
                f"QueueConfig(rows_are_messages=True, {word}={{'status': {placed['status']!r}, ...}}): a row that the "
                "claim deletes has no status. Leave rows_are_messages out to keep the rows, or 'status' to have them "
                "deleted"
            )
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

    def placed(self, role: str, default: str | None = None) -> str | None:
        """Return the attribute that plays a role, None for a role that is left out.

        :param default: where a role is that the config says nothing of.
        """
        if self.adopt is not None:
            return self.adopt.get(role)
        if role == "status" and self.rows_are_messages:
            return None
        return self.columns.get(role, default)

    def fix_for(self, role: str) -> str:
        """Return what a user changes to get a role that is left out."""
        if self.adopt is not None:
            return f"name the column that has it, with QueueConfig(adopt={{{role!r}: ...}})"
        if role == "status" and self.rows_are_messages:
            return "leave out rows_are_messages=True"
        if role not in self.columns:
            return f"add it with QueueConfig(columns={{{role!r}: {role!r}}})"
        return f"remove {role!r}: None from QueueConfig(columns=...)"


def _check_placing(word: str, given: Mapping[Any, Any]) -> None:
    """Refuse roles that there are not, and one attribute for two roles."""
    unknown = sorted(set(given) - set(ROLES), key=str)
    if unknown:
        names, known = ", ".join(map(repr, unknown)), ", ".join(ROLES)
        hint = did_you_mean(str(unknown[0]), ROLES)
        if given[unknown[0]] in ROLES:
            hint = f"; the queue attribute comes first: {{{given[unknown[0]]!r}: {unknown[0]!r}}}"
        msg = f"QueueConfig({word}=...): {names} is no queue attribute; they are {known}{hint}"
        raise ConfigurationError(msg)
    placed = [attribute for attribute in given.values() if attribute is not None]
    twice = sorted({attribute for attribute in placed if placed.count(attribute) > 1})
    if twice:
        msg = f"QueueConfig({word}=...): the attribute {twice[0]!r} is given to two queue attributes"
        raise ConfigurationError(msg)
