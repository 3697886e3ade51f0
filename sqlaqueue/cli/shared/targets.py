"""Import what the command line names: queue classes, Consumers and handlers of an application."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from sqlaqueue.cli.shared.errors import InputError, first_line
from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.exc import NotAQueueError
from sqlaqueue.mapping.mixin import QueueMixin, queue_spec, spec_of
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.scheduler import SchedulerBase

_EXAMPLE = "give module:attribute, such as app.models:Email"


@dataclass(frozen=True)
class Target:
    """A queue named on the command line."""

    text: str
    model: type[Any]
    """The queue class."""
    consumer: ConsumerBase | None = None
    """The Consumer, if the target names one."""
    scheduler: SchedulerBase | None = None
    """The Scheduler, if the target names one."""

    @property
    def spec(self) -> QueueSpec:
        """The queue."""
        return spec_of(self.model)


def load_targets(texts: Sequence[str], *, modules: bool = False) -> list[Target]:
    """Return the queues of the targets; a target may name several Consumers.

    :param modules: whether a target may be a module, such as ``app.models``, for the queue classes in it.
    :raises InputError: if a target names no queue.
    """
    return [
        target for text in texts for target in (_in_module(text) if modules and ":" not in text else _targets(text))
    ]


def load(text: str) -> Any:
    """Import ``module:attribute``, also from the current directory.

    :raises InputError: if the import fails, or there is no such attribute.
    """
    name, colon, path = text.partition(":")
    if not colon or not path or not _is_module_name(name):
        raise InputError(f"{text!r}: {_EXAMPLE}{_module_hint(name)}")
    found: Any = _module(name, text)
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise InputError(f"{text}: {_no_attribute(found, name, part)}") from None
    return found


def _targets(text: str) -> list[Target]:
    found = load(text)
    if isinstance(found, type) and not issubclass(found, ConsumerBase):
        try:
            spec_of(found)
        except NotAQueueError as error:
            raise InputError(f"{text}: {error}") from None
        return [Target(text, found)]
    if callable(found) and not isinstance(found, ConsumerBase | type):
        found = _called(found, text)
    listed: list[Any] = list(found) if isinstance(found, list | tuple) else [found]
    others = [each for each in listed if not isinstance(each, ConsumerBase)]
    if others or not listed:
        what = f"it is {others[0]!r}" if others else "it is empty"
        raise InputError(
            f"{text}: {what}; name a queue class, a Consumer or AsyncConsumer, a list of them, or a function that "
            "returns one of these"
        )
    return [Target(text, each.model, each) for each in listed]


def _called(function: Any, text: str) -> Any:
    if inspect.iscoroutinefunction(function):
        raise InputError(f"{text}: it is a coroutine function; let a plain function return the AsyncConsumer")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InputError(f"{text}: a function that returns a Consumer is called without arguments: {error}") from None
    except ValueError:
        pass  # a built-in without a signature; the call fails if it needs arguments
    try:
        return function()
    except Exception as error:
        raise InputError(f"{text}: it raised {_description(error)}") from error


def _in_module(name: str) -> list[Target]:
    """Return the queues whose classes are in a module; of a class and its subclasses, the one that has the table."""
    if not _is_module_name(name):
        raise InputError(f"{name!r}: {_EXAMPLE}, or a module, such as app.models{_module_hint(name)}")
    found = [queue_spec(each) for each in vars(_module(name, name)).values() if isinstance(each, type)]
    models = dict.fromkeys(spec.model for spec in found if spec is not None)
    if not models:
        raise InputError(f"{name}: the module has no queue class; name the one that has, such as app.models")
    return [Target(f"{name}:{model.__name__}", model) for model in models]


def _is_module_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _module_hint(name: str) -> str:
    return f"; write a module as app.models, not as {name!r}" if "/" in name or name.endswith(".py") else ""


def _module(name: str, text: str) -> ModuleType:
    if (here := os.fspath(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise InputError(f"{text}: importing {name} failed: {_description(error)}") from error
        raise InputError(
            f"{text}: there is no module {error.name} in the current directory ({Path.cwd()}), in PYTHONPATH or "
            "among the installed packages"
        ) from None
    except (Exception, SystemExit) as error:
        raise InputError(f"{text}: importing {name} failed: {_description(error)}") from error


def _description(error: BaseException) -> str:
    """Return the message of an error, with the line of the application that raised it."""
    text = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, SyntaxError):
        return text
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith("<")]
    own = os.fspath(Path(__file__).parents[2])
    places = [each for each in frames if not each.filename.startswith(own)]
    return f"{text} ({places[-1].filename}, line {places[-1].lineno})" if places else text


def _no_attribute(where: Any, module: str, name: str) -> str:
    names = [each for each in dir(where) if not each.startswith("_")]
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"{module} has no attribute {name}; did you mean {close[0]}?"
    targets = [each for each in names if _is_target(getattr(where, each, None))]
    hint = f"; its queues are {', '.join(targets)}" if targets else ""
    return f"{module} has no attribute {name}{hint}"


def _is_target(found: Any) -> bool:
    if isinstance(found, type):
        return found is not QueueMixin and issubclass(found, QueueMixin)
    return isinstance(found, ConsumerBase)
