"""The check of a list of queue classes that an application gives to a class or function of the library."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.spec import QueueSpec


def specs_by_name(models: Iterable[type[Any]], what: str, *, of_one_name: str) -> dict[str, QueueSpec]:
    """Return the queues of some classes by their names, in the order of the list; a class may be listed twice.

    :param what: the class or function that was given the list, for error messages.
    :param of_one_name: what to do about two queues of one name, for the error message.
    :raises NotAQueueError: if one of ``models`` is not a queue.
    :raises ConfigurationError: if it is not a list, or an empty one, and for two queues of one name.
    """
    given: object = models  # without a type checker, callers may pass a class
    if isinstance(given, type) or not isinstance(given, Iterable):
        name = given.__name__ if isinstance(given, type) else repr(given)
        msg = f"{what}({name}): give a list of queue classes, as in {what}([{name}], ...)"
        raise ConfigurationError(msg)
    found: dict[str, QueueSpec] = {}
    for model in models:
        spec = spec_of(model)
        other = found.setdefault(spec.name, spec)
        if other is not spec:
            both = f"{other.model.__name__} and {spec.model.__name__}"
            msg = f"{what}: {both} are both named {spec.name!r}{of_one_name}"
            raise ConfigurationError(msg)
    if not found:
        msg = f"{what}([]): give at least one queue class"
        raise ConfigurationError(msg)
    return found
