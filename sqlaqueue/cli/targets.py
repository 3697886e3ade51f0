"""What the texts on the command line name: queue classes, Consumers, handlers of an application."""

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

from sqlaqueue.cli.errors import InputError, first_line
from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.exc import NotAQueueError
from sqlaqueue.mapping.mixin import QueueMixin, spec_of
from sqlaqueue.queue.spec import QueueSpec

_EXAMPLE = "give module:attribute, such as app.models:Email"


@dataclass(frozen=True)
class Target:
    """A queue that somebody named."""

    text: str
    model: type[Any]
    """The class whose jobs are meant."""
    consumer: ConsumerBase | None = None
    """The Consumer that was named, if it was one."""

    @property
    def spec(self) -> QueueSpec:
        """The queue."""
        return spec_of(self.model)


def load_targets(texts: Sequence[str]) -> list[Target]:
    """Return the queues that the texts name.

    :raises InputError: for a text that names none, saying what to do.
    """
    return [target for text in texts for target in _targets(text)]


def load(text: str) -> Any:
    """Return what ``module:attribute`` names. The current directory can be imported from.

    :raises InputError: when it is not there, or its module cannot be imported.
    """
    name, colon, path = text.partition(":")
    if not colon or not path or not all(part.isidentifier() for part in name.split(".")):
        hint = f"; a module is named like app.models, not {name!r}" if "/" in name or name.endswith(".py") else ""
        raise InputError(f"{text!r}: {_EXAMPLE}{hint}")
    if (here := os.fspath(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    found: Any = _module(name, text)
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise InputError(f"{text}: {_missing(found, name, part)}") from None
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
    wrong = [each for each in listed if not isinstance(each, ConsumerBase)]
    if wrong or not listed:
        what = f"it is {wrong[0]!r}" if wrong else "it is empty"
        raise InputError(
            f"{text}: {what}; name a queue class, a Consumer or AsyncConsumer, a list of them, or a function that "
            "returns one of these"
        )
    return [Target(text, each.model, each) for each in listed]


def _called(function: Any, text: str) -> Any:
    if inspect.iscoroutinefunction(function):
        raise InputError(f"{text}: it is a coroutine function; make it a plain one that returns the AsyncConsumer")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InputError(f"{text}: the function that makes a Consumer is called without arguments: {error}") from None
    except ValueError:
        pass  # some built-in, which does not tell; the call will
    try:
        return function()
    except Exception as error:
        raise InputError(f"{text}: it raised {_said(error)}") from error


def _module(name: str, text: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise InputError(f"{text}: importing {name} failed: {_said(error)}") from error
        raise InputError(
            f"{text}: there is no module {error.name}; it is looked for in the current directory ({Path.cwd()}), in "
            "PYTHONPATH and among what is installed"
        ) from None
    except (Exception, SystemExit) as error:
        raise InputError(f"{text}: importing {name} failed: {_said(error)}") from error


def _said(error: BaseException) -> str:
    """Return an error with the place in the user's files where it happened."""
    said = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, SyntaxError):
        return said
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith("<")]
    own = os.fspath(Path(__file__).parent.parent)
    places = [each for each in frames if not each.filename.startswith(own)]
    return f"{said} ({places[-1].filename}, line {places[-1].lineno})" if places else said


def _missing(where: Any, module: str, name: str) -> str:
    names = [each for each in dir(where) if not each.startswith("_")]
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"{module} has no attribute {name}; did you mean {close[0]}?"
    fitting = [each for each in names if _fits(getattr(where, each, None))]
    there = f"; there are {', '.join(fitting)}" if fitting else ""
    return f"{module} has no attribute {name}{there}"


def _fits(found: Any) -> bool:
    if isinstance(found, type):
        return found is not QueueMixin and issubclass(found, QueueMixin)
    return isinstance(found, ConsumerBase)
