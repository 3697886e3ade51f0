"""The database of a command: its URL, or the session factory of a Consumer."""

from __future__ import annotations

import asyncio
import difflib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import click
import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue.cli.output import InputError, command_errors, first_line
from sqlaqueue.exc import NotAQueueError
from sqlaqueue.mapping.mixin import QueueMixin, queue_spec, spec_of
from sqlaqueue.preparation import prepare
from sqlaqueue.queue.spec import QueueSpec

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from sqlaqueue.consumer.base import ConsumerBase
    from sqlaqueue.scheduler import SchedulerBase

# -- targets -----------------------------------------------------------------------------------------------------------

_TARGET_EXAMPLE = "give module:attribute, such as app.models:Email"


@dataclass(frozen=True)
class Target:
    """A queue named on the command line."""

    text: str
    model: type[Any]
    consumer: ConsumerBase | None = None
    scheduler: SchedulerBase | None = None

    @property
    def spec(self) -> QueueSpec:
        return spec_of(self.model)


class TargetArgument(click.Argument):
    """The target of a command, or several; if none is given, what ``target`` names in [tool.sqlaqueue].

    Before a key or names, an argument without a colon is no target then: it is the key, or the first of the names.
    """

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[Any]]:
        from click.shell_completion import CompletionItem  # noqa: PLC0415 - only the shell's completion needs it

        return [CompletionItem(each) for each in targets_like(incomplete)]

    def handle_parse_result(self, ctx: click.Context, opts: Any, args: list[str]) -> tuple[Any, list[str]]:
        name = str(self.name)
        default = ctx.lookup_default(name)
        given = _given(opts, name)
        if default and given and isinstance(given, str) and ":" not in given:
            given = _given_before(ctx, opts, given)
        if default and not given:
            if self.nargs == 1 and len(default) > 1:
                names = ", ".join(default)
                raise InputError(f"target in [tool.sqlaqueue]: {names}: this command takes one of them; name it")
            opts[name] = default[0] if self.nargs == 1 else tuple(default)
        return super().handle_parse_result(ctx, opts, args)


def _given_before(ctx: click.Context, opts: Any, given: str) -> str:
    """Return the target; an empty text if what was given in its place belongs to the argument after it."""
    for other in ctx.command.params:
        if isinstance(other, click.Argument) and not isinstance(other, TargetArgument):
            name = str(other.name)
            after = _given(opts, name)
            if other.nargs != 1:
                opts[name] = (given, *after)
                return ""
            if not after:
                opts[name] = given
                return ""
    return given


def _given(opts: Any, name: str) -> Any:
    # What stands for an argument that is missing differs between releases of click.
    value = opts.get(name)
    return value if isinstance(value, str | tuple | list) else ()


targets_argument = click.argument("targets", cls=TargetArgument, metavar="TARGET...", nargs=-1, required=True)
target_argument = click.argument("target", cls=TargetArgument, metavar="TARGET")


def load_targets(texts: Sequence[str], *, to_run: bool = False, of_a_key: bool = False) -> list[Target]:
    """Return the queues of the targets: of a class, of Consumers, or of a module.

    :param to_run: whether their jobs are to be run: of a module, its Consumers are taken, and not its classes.
    :param of_a_key: whether a key is given as well, which says nothing about the jobs of another queue.
    """
    of_module = _consumers_of_module if to_run else _queues_of_module
    found = [target for text in texts for target in (_targets(text) if ":" in text else of_module(text))]
    if of_a_key and len(found) > 1:
        names = ", ".join(f"{each.model.__module__}:{each.model.__name__}" for each in found)
        raise InputError(f"{texts[0]}: it has several queues, and a key belongs to one; name its queue: {names}")
    return found


def load(text: str) -> Any:
    """Import ``module:attribute``, also from the current directory."""
    name, colon, path = text.partition(":")
    if not colon or not path or not _is_module_name(name):
        raise InputError(f"{text!r}: {_TARGET_EXAMPLE}{_module_hint(name)}")
    found: Any = _module(name, text)
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise InputError(f"{text}: {_no_attribute(found, name, part)}") from None
    return found


def _targets(text: str) -> list[Target]:
    found = load(text)
    if isinstance(found, type) and not issubclass(found, _consumer_class()):
        try:
            spec_of(found)
        except NotAQueueError as error:
            raise InputError(f"{text}: {error}") from None
        return [Target(text, found)]
    if callable(found) and not isinstance(found, type) and not _is_consumer(found):
        found = _called(found, text)
    listed: list[Any] = list(found) if isinstance(found, list | tuple) else [found]
    others = [each for each in listed if not _is_consumer(each)]
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


def load_module(name: str) -> ModuleType:
    """Import a module that is a target."""
    if not _is_module_name(name):
        raise InputError(f"{name!r}: {_TARGET_EXAMPLE}, or a module, such as app.models{_module_hint(name)}")
    return _module(name, name)


def _queues_of_module(name: str) -> list[Target]:
    """Return the queues of the classes and Consumers in a module; of a class and its subclasses, one for the table."""
    module = load_module(name)
    listed = [one for each in _lists_of_consumers(module).values() for one in each]
    makers = _makers_of_consumers(module)
    if len(makers) == 1 and not listed:
        listed = [target.consumer for target in _targets(f"{name}:{next(iter(makers))}") if target.consumer is not None]
    consumers: dict[type[Any], ConsumerBase] = {}
    for consumer in [*_consumers(module).values(), *listed]:
        consumers.setdefault(spec_of(consumer.model).model, consumer)
    specs = [queue_spec(each) for each in vars(module).values() if isinstance(each, type)]
    classes = dict.fromkeys(spec.model for spec in specs if spec is not None)
    if not classes and not consumers:
        raise InputError(f"{name}: the module has no queue class and no Consumer; name one that has, as app.models")
    return [
        Target(f"{name if model in classes else model.__module__}:{model.__name__}", model, consumers.get(model))
        for model in classes | dict.fromkeys(consumers)
    ]


def _consumers_of_module(name: str) -> list[Target]:
    """Return the Consumers of the only list or function in a module; without one, those that are by themselves."""
    module = load_module(name)
    several = [*_lists_of_consumers(module), *_makers_of_consumers(module)]
    if len(several) > 1:
        names = ", ".join(f"{name}:{each}" for each in several)
        raise InputError(f"{name}: the module has several lists or functions of Consumers; name one of them: {names}")
    if several:
        return _targets(f"{name}:{several[0]}")
    found = [Target(f"{name}:{attribute}", each.model, each) for attribute, each in _consumers(module).items()]
    if not found:
        raise InputError(
            f"{name}: the module has no Consumer; give it one, a list of them, or a function that is annotated to "
            "return them, such as `def workers() -> list[Consumer]`; or name a queue class with its handler, as "
            "app.models:Email=app.tasks:send"
        )
    return found


def _consumers(module: ModuleType) -> dict[str, ConsumerBase]:
    return _distinct(module, _is_consumer)


def _lists_of_consumers(module: ModuleType) -> dict[str, Sequence[ConsumerBase]]:
    return _distinct(module, lambda each: isinstance(each, list | tuple) and {*map(_is_consumer, each)} == {True})


def _makers_of_consumers(module: ModuleType) -> dict[str, Callable[[], Any]]:
    """Return the functions without arguments whose annotation says that they return Consumers."""

    def makes_consumers(each: Any) -> bool:
        if not inspect.isfunction(each) or inspect.iscoroutinefunction(each):
            return False
        signature = inspect.signature(each)
        required = [one for one in signature.parameters.values() if one.default is one.empty]
        # As a text: its names may be imported for type checkers only.
        said = _CONSUMER.search(str(signature.return_annotation))
        if said is None or required:
            return False
        named = each.__globals__.get(said[0])
        return named is None or (isinstance(named, type) and issubclass(named, _consumer_class()))

    return _distinct(module, makes_consumers)


_CONSUMER = re.compile(r"\b(Async)?Consumer\b")


def _is_consumer(each: object) -> bool:
    return isinstance(each, _consumer_class())


def _consumer_class() -> Any:
    """Return the class of all Consumers; nothing if no target has imported it, so that commands need not either."""
    module = sys.modules.get("sqlaqueue.consumer.base")
    return () if module is None else module.ConsumerBase


def _distinct(module: ModuleType, is_wanted: Callable[[Any], bool]) -> dict[str, Any]:
    """Return the attributes of a module by name, each object once."""
    wanted = {name: each for name, each in vars(module).items() if is_wanted(each)}
    first = {id(each): name for name, each in reversed(wanted.items())}
    return {name: each for name, each in wanted.items() if first[id(each)] == name}


def targets_like(text: str) -> list[str]:
    """Return the targets that begin with a text: modules below the current directory, and the queues of one of them."""
    name, colon, beginning = text.partition(":")
    package, dot, last = name.rpartition(".")
    found = [] if colon else [each.name for each in pkgutil.iter_modules([os.fspath(Path(*package.split(".")))])]
    modules = [f"{package}{dot}{each}" for each in found if each.startswith(last) and each != "__main__"]
    if not colon and name not in modules:
        return modules
    # What a module prints while it is imported is no completion, nor is why that fails.
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), suppress(InputError):
        attributes = vars(load_module(name))
        queues = [key for key, each in attributes.items() if key.startswith(beginning) and _is_target(each)]
        modules += [f"{name}:{each}" for each in queues if not each.startswith("_")]
    return modules


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
    own = os.fspath(Path(__file__).parents[1])
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
        # The mixins of this package are no queues.
        return issubclass(found, QueueMixin) and not found.__module__.startswith("sqlaqueue.")
    return _is_consumer(found)


P = ParamSpec("P")
T = TypeVar("T")

_EXAMPLE = "postgresql+psycopg://user:password@host/database"
_MARIADB = {"mariadb", "mysql"}
_MARIADB_EXAMPLE = "mariadb+pymysql://user:password@host/database"
_MARIADB_SYNC, _MARIADB_ASYNC = "pymysql", "asyncmy"
_FILE_EXAMPLE = "sqlite:///jobs.db"
_SYNC, _ASYNC = ("psycopg", "psycopg2"), ("psycopg", "asyncpg")
_SECRET = {"passfile", "passwd", "password", "sslpassword", "ssl_key_password"}
"""Options of drivers that are secret, or lead to a secret."""

_CONNECT_TIMEOUT = 10
"""Seconds to wait for a connection. By default drivers wait for a minute or more if the host does not answer."""


def parse_url(text: str) -> sa.URL:
    """Return the URL of a database. An error does not repeat it, as it may contain a password."""
    try:
        url = sa.make_url(text)
    except (ArgumentError, ValueError):
        raise InputError(f"--url: this is not the URL of a database; write it as {_EXAMPLE}") from None
    if "@" in (url.host or ""):
        raise InputError("--url: it contains more than one @; write an @ of the password as %40")
    backend, plus, driver = url.drivername.partition("+")
    if backend == "sqlite":
        # Neither a file that does not exist, which SQLite would create, nor a database in memory.
        if url.database is None or not Path(url.database).is_file():
            raise InputError(f"--url: there is no file {url.database!r}; write it as {_FILE_EXAMPLE}")
        return url
    if backend in _MARIADB:
        if plus and driver not in {_MARIADB_SYNC, _MARIADB_ASYNC}:
            raise InputError(f"--url: the driver {driver!r} is not supported; write it as {_MARIADB_EXAMPLE}")
        return url
    if backend not in {"postgresql", "postgres"}:
        needed = "sqlaqueue needs PostgreSQL, SQLite or MariaDB"
        raise InputError(f"--url: {backend}:// is not supported, {needed}; write it as {_EXAMPLE}")
    if plus and driver not in {*_SYNC, *_ASYNC}:
        raise InputError(f"--url: the driver {driver!r} is not supported; write it as {_EXAMPLE}")
    return url.set(drivername="postgresql" + plus + driver)


def shown_url(url: sa.URL) -> str:
    """Return the text of a URL without what is secret in it, which options of a driver may be as well."""
    hidden = {name: "***" for name in url.query if name in _SECRET}
    return url.update_query_dict(hidden).render_as_string(hide_password=True)


def _engine_for_mariadb(url: sa.URL, *, needs_async: bool | None, connections: int | None) -> Any:
    is_async = url.drivername.endswith(_MARIADB_ASYNC) if needs_async is None else needs_async
    driver = _MARIADB_ASYNC if is_async else _MARIADB_SYNC
    if importlib.util.find_spec(driver) is None:
        kind = "async" if is_async else "sync"
        raise InputError(f"--url: {kind} handlers need {driver}: pip install 'sqlaqueue[{driver}]'")
    options: dict[str, Any] = {"connect_args": {"connect_timeout": _CONNECT_TIMEOUT}}
    if connections is not None:
        options |= {"pool_size": connections}
    url = url.set(drivername=f"{url.get_backend_name()}+{driver}")
    return prepare(_create(url, is_async=is_async, options=options))


def _engine_for_file(url: sa.URL, *, needs_async: bool | None, connections: int | None) -> Any:
    is_async = url.drivername.endswith("aiosqlite") if needs_async is None else needs_async
    if is_async and importlib.util.find_spec("aiosqlite") is None:
        raise InputError("--url: async handlers need aiosqlite: pip install 'sqlaqueue[aiosqlite]'")
    options = {} if connections is None else {"pool_size": connections}
    url = url.set(drivername="sqlite+aiosqlite" if is_async else "sqlite")
    return prepare(_create(url, is_async=is_async, options=options))


def _create(url: sa.URL, *, is_async: bool, options: dict[str, Any]) -> Any:
    if not is_async:
        return sa.create_engine(url, **options)
    from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415 - needs greenlet, which sync code does not

    return create_async_engine(url, **options)


def engine_for(url: sa.URL, *, needs_async: bool | None = None, connections: int | None = None) -> Any:
    """Return an Engine or AsyncEngine.

    :param needs_async: whether to return an AsyncEngine; None to let the URL's driver decide.
    :param connections: the size of the pool; None for SQLAlchemy's default.
    """
    if url.get_backend_name() == "sqlite":
        return _engine_for_file(url, needs_async=needs_async, connections=connections)
    if url.get_backend_name() in _MARIADB:
        with command_errors():
            return _engine_for_mariadb(url, needs_async=needs_async, connections=connections)
    known = _ASYNC if needs_async else _SYNC if needs_async is False else (*_SYNC, "asyncpg")
    _, _, driver = url.drivername.partition("+")
    if not driver:
        driver = next((each for each in known if importlib.util.find_spec(each)), "")
        if not driver:
            raise InputError("--url: no driver is installed: pip install 'sqlaqueue[psycopg]'")
    if driver not in known:
        kind = "async" if needs_async else "sync"
        raise InputError(f"--url: {driver} cannot be used with {kind} handlers; use postgresql+{known[0]}://")
    if importlib.util.find_spec(driver) is None:
        raise InputError(f"--url: {driver} is not installed: pip install {driver}")
    is_async = driver == "asyncpg" if needs_async is None else needs_async
    if is_async and importlib.util.find_spec("greenlet") is None:
        raise InputError("--url: async handlers need greenlet: pip install 'sqlaqueue[async]'")
    options: dict[str, Any] = {
        "connect_args": {"timeout" if driver == "asyncpg" else "connect_timeout": _CONNECT_TIMEOUT}
    }
    if driver != "asyncpg" and "connect_timeout" in url.query:
        options = {}
    if connections is not None:
        options |= {"pool_size": connections}
    url = url.set(drivername=f"postgresql+{driver}")
    with command_errors():
        return _create(url, is_async=is_async, options=options)


def session_factory_of(engine: Any) -> Any:
    if isinstance(engine, sa.Engine):
        return sessionmaker(engine)
    from sqlalchemy.ext.asyncio import async_sessionmaker  # noqa: PLC0415 - needs greenlet, which sync code does not

    return async_sessionmaker(engine)


class TargetDatabase:
    """Runs functions on a Session, whether the session factory is sync or async; disposes of the engine it is given."""

    def __init__(self, sessions: Callable[[], Any], engine: Any = None) -> None:
        self._sessions = sessions
        self._engine: Any = engine
        self._runner: asyncio.Runner | None = None

    @classmethod
    def of(cls, target: Target, url: str | None) -> Self:
        """Return the database of a queue; ``--url`` takes precedence over the session factory of a Consumer."""
        if url is not None:
            engine = engine_for(parse_url(url))
            return cls(session_factory_of(engine), engine)
        user = target.consumer or target.scheduler
        if user is not None:
            return cls(user.session_factory)
        raise InputError(
            f"{target.text}: the database is missing; give --url {_EXAMPLE}, set SQLAQUEUE_URL, or "
            "name a Consumer instead"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(self._engine, sa.Engine):
            self._engine.dispose()
        if self._runner is not None:
            # Its connections cannot be closed after their event loop.
            disposing: Any = self._engine.dispose()
            self._runner.run(disposing)
            self._runner.close()

    def connect(self, model: type[Any]) -> None:
        """Fail if the database never answers: the URL is most likely wrong. One that stops later is waited for."""
        self.run(lambda session: session.connection(bind_arguments={"mapper": model}))

    def run(self, operation: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``operation(session, ...)`` with a new session, and return its result."""
        session = self._sessions()
        if isinstance(session, Session):
            with session:
                return operation(session, *args, **kwargs)
        if not hasattr(session, "run_sync"):
            made = type(session).__name__
            raise InputError(
                f"{self._sessions!r} makes {made}; give a Consumer a sessionmaker or an async_sessionmaker"
            )
        if self._runner is None:
            self._runner = asyncio.Runner()
            self._engine = session.bind

        async def carry_out() -> T:
            async with session:
                result: T = await session.run_sync(operation, *args, **kwargs)
                return result

        return self._runner.run(carry_out())


def open_targets(targets: Iterable[Target], url: str | None) -> Iterator[tuple[Target, Callable[..., Any]]]:
    """Yield each queue, and a function that calls an operation with a session and its class.

    Errors of the operation become errors of the command line. The database is open until the next one is asked for.
    """
    for target in targets:
        with TargetDatabase.of(target, url) as database:
            yield target, partial(run_for, target, database)


def run_for(target: Target, database: TargetDatabase, operation: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    with command_errors(target.spec):
        return database.run(operation, target.model, *args, **kwargs)
