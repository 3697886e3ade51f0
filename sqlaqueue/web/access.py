"""What a request may see and do: the :class:`Access` that the application's access rule returns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import spec_of

Action = Literal["requeue", "cancel", "edit", "purge", "pause", "schedule"]
"""What a user can do: requeue finished jobs, cancel unfinished ones, edit arguments, delete finished jobs, pause and
resume a queue, and run, pause and resume its schedules."""

ACTIONS: tuple[Action, ...] = get_args(Action)

Queues: TypeAlias = bool | Collection[str | type[Any]]
"""True for all queues; or the classes or the names of queues."""

Actions: TypeAlias = bool | Collection[str]
"""True for all actions; or some of :data:`ACTIONS`."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """What the user of a request may see and do.

    ::

        Access(read=True)  # sees all queues, changes nothing
        Access(read=True, act=[Email], user="ada")  # changes the jobs of one queue
        Access(read=[Email, Invoice], act={Email: ["requeue", "cancel"]}, user="ada")

    :param read: the queues that the user sees: True for all, or classes or names.
    :param act: the queues whose jobs the user may change, or a dictionary of queues with the actions allowed in each.
        The actions are ``requeue``, ``cancel``, ``edit``, ``purge``, ``pause`` and ``schedule``. A queue that the user
        does not see cannot be changed.
    :param user: the name of the user, for the audit.
    :raises ConfigurationError: for an unknown action, or anything else than these.
    :raises NotAQueueError: for a class that is not a queue.
    """

    read: Queues
    act: Queues | Mapping[str | type[Any], Actions] = False
    user: str = ""

    def __post_init__(self) -> None:
        for name, given in (("read", self.read), ("act", self.act)):
            if not isinstance(given, bool) and (isinstance(given, str) or not isinstance(given, Collection)):
                msg = f"Access({name}={given!r}): give True, False, or a list of queue classes, as in [{given}]"
                raise ConfigurationError(msg)
        if isinstance(self.act, Mapping):
            for queue, actions in self.act.items():
                _check_actions(queue, actions)
        given_user: object = self.user  # without a type checker, callers may pass the user object
        if not isinstance(given_user, str):
            msg = f"Access(user={given_user!r}): give the name of the user as a text, for the audit"
            raise ConfigurationError(msg)

    def reads(self, queue: str) -> bool:
        """Return whether the user sees a queue."""
        return self.read if isinstance(self.read, bool) else queue in set(map(_name, self.read))

    def may(self, action: Action, queue: str) -> bool:
        """Return whether the user may carry out an action in a queue."""
        if not self.reads(queue):
            return False
        if isinstance(self.act, bool):
            return self.act
        if isinstance(self.act, Mapping):
            allowed = {_name(each): actions for each, actions in self.act.items()}.get(queue, False)
            return allowed if isinstance(allowed, bool) else action in allowed
        return queue in set(map(_name, self.act))

    def named_queues(self) -> Iterator[str]:
        """Yield the names of the queues that are named, so that a misspelt one is found."""
        for given in (self.read, self.act):
            if not isinstance(given, bool):
                yield from map(_name, given)


def _check_actions(queue: str | type[Any], actions: object) -> None:
    if isinstance(actions, bool):
        return
    listed = [actions] if isinstance(actions, str) or not isinstance(actions, Collection) else actions
    unknown = [each for each in listed if each not in ACTIONS]
    if unknown or listed is not actions:
        what = f"there is no action {unknown[0]!r}" if unknown else "give a list of actions"
        msg = f"Access(act={{{_name(queue)!r}: {actions!r}}}): {what}; the actions are {', '.join(ACTIONS)}"
        raise ConfigurationError(msg)


def _name(queue: str | type[Any]) -> str:
    if isinstance(queue, str):
        return queue
    return spec_of(queue).name
