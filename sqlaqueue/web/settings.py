"""The arguments of a dashboard, checked: its queues, redacted columns, links and origins."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args
from urllib.parse import quote, urlsplit

import sqlalchemy as sa
from sqlalchemy.orm import InstrumentedAttribute

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.log import fields, logger
from sqlaqueue.mapping.mixin import spec_of, specs_by_name
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.web.data.records import check_audit

Column: TypeAlias = str | InstrumentedAttribute[Any]
"""``Email.body``, or ``"Email.body"``, or ``"body"`` for the columns of this name in all queues."""

Link: TypeAlias = str | Callable[[Any], str | None]
"""A URL in which ``{value}`` stands for the column's value; or a function of the value that returns a URL or None."""

_WHAT = "Dashboard"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Queue:
    name: str
    model: type[Any]
    spec: QueueSpec
    slug: str


@dataclass(frozen=True)
class Settings:
    queues: Mapping[str, Queue]
    """By name, in the order in which they were given."""
    origins: frozenset[str] = frozenset()
    """The origins under which browsers reach the dashboard, beside those of this machine."""
    redacted: frozenset[tuple[str, str]] = frozenset()
    """The redacted columns: the name of the queue and the name of the column in the table."""
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    audit: type[Any] | None = None
    """The class whose table keeps the actions."""

    @classmethod
    def of(
        cls,
        models: Iterable[type[Any]],
        redact: Iterable[Column],
        links: Mapping[Any, Link],
        origins: Iterable[str],
        audit: Any = None,
    ) -> Settings:
        specs = specs_by_name(models, _WHAT, of_one_name="; set QueueConfig(name=...), or show them in two dashboards")
        queues = {name: Queue(name, spec.model, spec, _slug(name)) for name, spec in specs.items()}
        redacted = {found for each in _listed(redact, "redact") for found in _columns(queues, each, "redact")}
        for queue, key in redacted:
            spec = queues[queue].spec
            if key in {each.key for each in spec.keys}:
                raise ConfigurationError(
                    f"{_WHAT}(redact=...): {key!r} is in the primary key of {spec.model.__name__}, which is the "
                    "address of a job and cannot be hidden; leave it out"
                )
        given: object = links
        if not isinstance(given, Mapping):
            raise ConfigurationError(f"{_WHAT}(links={links!r}): give a dictionary of columns and URLs")
        checked = {
            found: _link(column, link) for column, link in links.items() for found in _columns(queues, column, "links")
        }
        served = frozenset(map(_origin, _listed(origins, "origins")))
        return cls(queues, served, frozenset(redacted), checked, check_audit(audit))

    def by_slug(self, slug: str) -> Queue | None:
        return next((queue for queue in self.queues.values() if queue.slug == slug), None)

    def is_redacted(self, spec: QueueSpec, column: str) -> bool:
        """Return whether a column, by its name in the table or its role, must not be shown."""
        role = spec.columns.get(column)
        name = column if role is None or column in spec.table.c else str(role.key)
        return (spec.name, name) in self.redacted

    def is_attribute_redacted(self, spec: QueueSpec, attribute: str) -> bool:
        """Return whether an attribute of whichever class of the queue must not be shown."""
        columns = [mapper.columns.get(attribute) for mapper in spec.mapper.self_and_descendants]
        names = {attribute, *(str(each.key) for each in columns if isinstance(each, sa.Column))}
        return any(self.is_redacted(spec, name) for name in names)

    def link(self, spec: QueueSpec, column: str, value: Any) -> str | None:
        """Return the URL to which a value leads; none of a scheme but http and https, which might execute a script."""
        link = self.links.get((spec.name, column))
        if link is None or value is None:
            return None
        if isinstance(link, str):
            url: object = link.replace("{value}", quote(str(value), safe=""))
        else:
            try:
                url = link(value)
            except Exception:  # a function of the application: one value must not hide a page
                text = "the function for the links of %s of the queue %s failed"
                logger.exception(text, column, spec.name, extra=fields("dashboard_error", queue=spec.name))
                return None
        return str(url) if url is not None and _is_safe(str(url)) else None


def _slug(name: str) -> str:
    """Return a name as one segment of a path, which servers and browsers leave as it is."""
    if _PLAIN_NAME.fullmatch(name):
        return name
    return "~" + base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def _listed(given: Any, argument: str) -> Collection[Any]:
    if isinstance(given, str | InstrumentedAttribute) or not isinstance(given, Iterable):
        raise ConfigurationError(f"{_WHAT}({argument}={given!r}): give a list, as in {argument}=[{given!r}]")
    return list(given)


def _columns(queues: Mapping[str, Queue], column: Any, argument: str) -> list[tuple[str, str]]:
    """Return the columns that are meant, each as the name of its queue and its name in the table."""
    if isinstance(column, InstrumentedAttribute):
        class_name, name = column.class_.__name__, column.key
    elif isinstance(column, str):
        class_name, _, name = column.rpartition(".")
    else:
        raise ConfigurationError(
            f"{_WHAT}({argument}=...): {column!r} is not a column; give Email.body, 'Email.body' or 'body'"
        )
    found: list[tuple[str, str]] = []
    for spec in (queue.spec for queue in queues.values()):
        if class_name in {"", spec.name, *(mapper.class_.__name__ for mapper in spec.mapper.self_and_descendants)}:
            found += [(spec.name, key) for key in _column_names(spec, class_name, name)]
    if not found:
        where = f"queue class {class_name}" if class_name else "queue"
        raise ConfigurationError(
            f"{_WHAT}({argument}=...): no {where} has a column {name!r}; name an attribute of a queue class, as in "
            "'Email.body'"
        )
    return found


def _column_names(spec: QueueSpec, class_name: str, name: str) -> list[str]:
    """Return the columns of an attribute: subclasses may have different columns under one name.

    :param class_name: the class that is meant, with its subclasses; the queue's own name, or none, for all classes.
    """
    all_of_them = list(spec.mapper.self_and_descendants)
    named = [mapper for mapper in all_of_them if mapper.class_.__name__ == class_name]
    meant = [each for mapper in named for each in mapper.self_and_descendants]
    found = [mapper.columns.get(name) for mapper in meant or all_of_them]
    keys = dict.fromkeys(str(each.key) for each in found if isinstance(each, sa.Column))
    if keys:
        return list(keys)
    if name in spec.columns:
        return [str(spec.columns[name].key)]
    return [name] if name in spec.table.c else []


def _link(column: Any, link: Any) -> Link:
    if callable(link):
        return link  # type: ignore[no-any-return]  # whatever it is, its result is checked when it is called
    if not isinstance(link, str) or "{value}" not in link or not _is_safe(link):
        raise ConfigurationError(
            f"{_WHAT}(links={{{column!s}: {link!r}}}): give a URL as in 'https://shop.example/customers/{{value}}'"
        )
    return link


def _is_safe(url: str) -> bool:
    # Browsers ignore control characters and white space in front of a scheme, and take a backslash for a slash. Two of
    # them begin the name of another site: "/" in front of a value that begins with one was meant as a path.
    if any(ord(each) <= 0x20 or ord(each) == 0x7F for each in url):  # noqa: PLR2004 - ASCII
        return False
    if url.startswith("\\") or url[:2].replace("\\", "/") == "//":
        return False
    try:
        return urlsplit(url).scheme in {"", "http", "https"}
    except ValueError:
        return False


def _origin(origin: Any) -> str:
    try:
        parts = urlsplit(origin)
        well_formed = parts.scheme in {"http", "https"} and parts.hostname and parts.path in {"", "/"}
        if well_formed and not (parts.query or parts.fragment or "@" in parts.netloc):
            return f"{parts.scheme}://{parts.netloc.lower()}"
    except (ValueError, TypeError, AttributeError):
        pass
    raise ConfigurationError(
        f"{_WHAT}(origins=[{origin!r}]): give the scheme and host under which browsers reach it, as in "
        "'https://ops.example.com'"
    )


Action = Literal["enqueue", "requeue", "cancel", "edit", "purge", "pause", "schedule", "workers"]
"""What a user can do: enqueue a job like another one, requeue finished jobs, cancel unfinished ones, edit arguments,
delete finished jobs, pause and resume a queue, run, pause and resume its schedules, which can be edited with
``enqueue`` as well, and ask its Consumers to be quiet or to stop."""

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
        The actions are ``enqueue``, ``requeue``, ``cancel``, ``edit``, ``purge``, ``pause``, ``schedule`` and
        ``workers``. A queue
        that the user does not see cannot be changed.
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
                raise ConfigurationError(
                    f"Access({name}={given!r}): give True, False, or a list of queue classes, as in [{given}]"
                )
        if isinstance(self.act, Mapping):
            for queue, actions in self.act.items():
                _check_actions(queue, actions)
        given_user: object = self.user  # without a type checker, callers may pass the user object
        if not isinstance(given_user, str):
            raise ConfigurationError(f"Access(user={given_user!r}): give the name of the user as a text, for the audit")

    @property
    def sees_all(self) -> bool:
        """Whether the user sees all queues, and so what other sessions of their database do."""
        return self.read is True

    def changes(self, queue: str) -> bool:
        """Return whether the user may carry out any action in a queue, and so see what others have done there."""
        return any(self.may(action, queue) for action in ACTIONS)

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
        raise ConfigurationError(
            f"Access(act={{{_name(queue)!r}: {actions!r}}}): {what}; the actions are {', '.join(ACTIONS)}"
        )


def _name(queue: str | type[Any]) -> str:
    return queue if isinstance(queue, str) else spec_of(queue).name
