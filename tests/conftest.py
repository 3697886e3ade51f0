"""The fixtures of the whole suite: a fresh database a test, on one server a version.

The process that the user started runs the servers; the workers of pytest-xdist are told where they
are. See CONTRIBUTING.md for which fixture to ask for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import re
import signal
import sqlite3
import time
import traceback
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from _pytest.faulthandler import fault_handler_stderr_fd_key  # pytest keeps no public name for it
from sqlalchemy import event
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.orm import Mapper, Session, sessionmaker
from sqlalchemy.pool import Pool
from sqlalchemy.util import LRUCache

from sqlaqueue import log as library_log
from tests.models import KINDS
from tests.nearest import changed_files, nearest
from tests.servers import Database, Server, Servers, choose_versions, fast_directory, find_installations, running

if TYPE_CHECKING:  # runs without MariaDB and without processes need neither
    from xdist.workermanage import WorkerController  # type: ignore[import-untyped]  # it is typed, but does not say so

    from tests.mariadb.server import MariaDBServer

GROUPS = 4
"""The files fall into so many groups; each part of the tests is from one of them, if that comes out even."""

CLOSING = 5.0
"""Seconds in which threads that a test has stopped close their connections."""

ALL_IN_ALL = "tests/conformance/"
"""The folder whose tests run with all values of all parameters."""

APIS = {"sync", "async"}
ENGINES = {"postgresql", "sqlite", "mariadb"}

SECONDS = "sqlaqueue/seconds"
"""Where pytest's cache has the seconds that each test has taken."""

VERSIONS = pytest.StashKey[list[int]]()
SERVERS = pytest.StashKey[Servers]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--postgres",
        default="newest",
        metavar="VERSIONS",
        help="PostgreSQL to test against: newest (the default), all, or major versions: 15,16",
    )

    parser.addoption(
        "--part",
        metavar="K/N",
        help="run the K-th of N parts of the tests, counted from 1; tests marked `everywhere` are in every part",
    )

    parser.addoption(
        "--nearest",
        type=float,
        metavar="SECONDS",
        help="run the tests that are nearest to what differs from main, and together take so long",
    )
    parser.addoption(
        "--engines",
        metavar="NAMES",
        help="the engines of tests/conformance, such as sqlite,postgresql; all of them by default",
    )
    parser.addoption(
        "--seed",
        type=int,
        metavar="N",
        help="the seed of the random choices in tests/faults and tests/web; the report of a failed fault test has it",
    )
    parser.addoption(
        "--inputs",
        type=int,
        metavar="N",
        help="how many random requests tests/web/test_fuzz.py sends, and how many names tests/fuzz/test_names.py tries",
    )
    parser.addoption(
        "--every-mutant",
        action="store_true",
        help="test each mutant of tests/faults under each of its strategies, not under one: many mutants hang, "
        "and each of these tests takes until its timeout",
    )
    parser.addoption(
        "--citus",
        metavar="URL|BIN_DIR",
        help="test Citus as well: the URL of a database of a cluster, or the programs of a PostgreSQL with Citus",
    )


def part_of(config: pytest.Config) -> tuple[int, int] | None:
    """Return which part of how many is asked for, counted from 0."""
    part = config.getoption("--part")
    if not part:
        return None
    try:
        number, parts = (int(word) for word in str(part).split("/"))
    except ValueError as error:
        message = f"--part={part}: give K/N, such as 1/8"
        raise pytest.UsageError(message) from error
    return number - 1, parts


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files out as a whole, where a part is asked for: to import all takes longer than to run a few tests."""
    part = part_of(config)
    if part is None or not collection_path.match("test_*.py") or part[1] % GROUPS:
        return None
    name = str(collection_path.relative_to(config.rootpath))
    if zlib.crc32(name.encode()) % GROUPS == part[0] % GROUPS:
        return None
    return "mark.everywhere" not in collection_path.read_text() or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import the tests in each process from another one on: else all compile the same file at the same time."""
    config, told = session.config, getattr(session.config, "workerinput", None)
    tests = config.rootpath / "tests"
    if told is None or [Path(path).resolve() for path in config.args] != [tests]:
        return
    files = [path for path in sorted(tests.rglob("test_*.py")) if not pytest_ignore_collect(path, config)]
    first = len(files) * int(told["workerid"].removeprefix("gw")) // told["workercount"]
    for path in files[first:] + files[:first]:
        # What is wrong with it is told when it is collected.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(config.rootpath).with_suffix("").parts))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seconds, part = config.getoption("--nearest"), part_of(config)
    if seconds is not None:
        # After the tests that are deselected by their markers.
        names = nearest([item.nodeid for item in items], changed_files(), config.cache.get(SECONDS, {}), seconds)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in names])
        items[:] = [item for item in items if item.nodeid in names]
    if part is None:
        return
    number, parts = part if part[1] % GROUPS else (part[0] // GROUPS, part[1] // GROUPS)

    def is_in(item: pytest.Item) -> bool:
        if item.get_closest_marker("everywhere"):
            return True
        return number_of(item) % parts == number

    chosen = [item for item in items if is_in(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.hookimpl(specname="pytest_collection_modifyitems")
def pytest_leave_out_what_is_alike(items: list[pytest.Item]) -> None:
    """Leave to `full` what repeats values: a test meets each value of each parameter, but one strategy, API and engine.

    Which ones differs from test to test, so that all tests together meet all. The tests of faults meet two of each. The
    conformance suite and tests that are marked ``every_combination`` run with all, and those that are marked ``few(n)``
    with n combinations.
    """
    variants: dict[str, list[pytest.Function]] = {}
    for item in items:
        # After the rules of single folders, which mark some.
        if hasattr(item, "callspec") and not item.get_closest_marker("thorough"):
            assert isinstance(item, pytest.Function)
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, alike in variants.items():
        if len(alike) == 1 or name.startswith(ALL_IN_ALL) or alike[0].get_closest_marker("every_combination"):
            continue
        left = {item: values_of(item) for item in sorted(alike, key=number_of)}
        in_turn, met = chosen_in_turn(name, alike), set[Hashable]()
        few = alike[0].get_closest_marker("few")
        least = 0 if few is None else max(0, len(left) - few.args[0])
        while news := {item: len(left[item] - met) for item in left if item in in_turn}:
            best = max(news, key=lambda item: news[item])
            if not news[best] or len(left) <= least:
                break
            met |= left.pop(best)
        for item in left:
            item.add_marker(pytest.mark.thorough)


def axes_of(item: pytest.Function) -> list[list[str]]:
    """Return the parameters of a test; those that one decorator gives together are together."""
    marks = [mark.args[0] for mark in item.iter_markers("parametrize") if mark.args]
    axes = [names.replace(" ", "").split(",") if isinstance(names, str) else [*names] for names in marks]
    named = {name for axis in axes for name in axis}
    return axes + [[name] for name in item.callspec.params if name not in {*named, "postgres_version"}]


def values_of(item: pytest.Function) -> set[Hashable]:
    """Return the values of each parameter of a test, or of those that go together."""
    # The same objects in each combination; some cannot be hashed.
    return {(*axis, *(id(item.callspec.params.get(name)) for name in axis)) for axis in axes_of(item)}


def chosen_in_turn(name: str, alike: list[pytest.Function]) -> set[pytest.Function]:
    """Return the variants of a test with the strategies, the API and the engine that it meets by default."""
    found, number = {*alike}, 2 if name.startswith("tests/faults/") else 1
    for axis in axes_of(alike[0]):
        # A pair of strategies is a case; a driver that goes with an API is not.
        if len(axis) > 1 and axis[0] != "api":
            continue
        values = {str(item.callspec.params.get(axis[0])) for item in alike}
        if any(values <= alternatives for alternatives in ({*KINDS}, APIS, ENGINES)):
            chosen = sorted(values, key=lambda value: zlib.crc32(f"{name} {value}".encode()))[:number]
            # Not each strategy is tested with each API.
            found = {item for item in found if str(item.callspec.params.get(axis[0])) in chosen} or found
    return found


def number_of(item: pytest.Item) -> int:
    """Return a number that stays the same from run to run, and is another one for most other tests."""
    return zlib.crc32(without_version(item).encode())


def without_version(item: pytest.Item) -> str:
    """Return the name of a test without the server's version: a choice by it is the same on all of them."""
    return re.sub(r"-?pg\d+", "", item.nodeid)


class _Raising(logging.Handler):
    """Raises what a handler has raised, as pytest's own handlers do: it may be a mistake in a record of the library."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name in logging
        raise  # noqa: PLE0704 - it is called where the error is handled


def pytest_configure(config: pytest.Config) -> None:
    # While the tests are imported nothing becomes garbage. To look for some took a third of that time.
    gc.disable()
    library_log.reporter = _Raising()
    # PGOPTIONS, PGTZ and their like change what a client sees of any server.
    for name in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[name]
    if told := getattr(config, "workerinput", None):
        config.stash[SERVERS] = Servers.from_plain(told["servers"])
        config.stash[VERSIONS] = list(config.stash[SERVERS].bin_directories)
        return
    if config.pluginmanager.hasplugin("cacheprovider"):
        config.pluginmanager.register(Stopwatch(config))
    # A shell has commands in the background ignore Ctrl-C, and all their processes with them.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(fast_directory()))
    try:
        choice = choose_versions(str(config.getoption("--postgres")), find_installations())
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[VERSIONS] = choice


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    if SERVERS in config.stash or config.option.collectonly:
        return
    stack = contextlib.ExitStack()
    # Unlike a fixture's end, this also comes when the session breaks down.
    config.add_cleanup(stack.close)
    config.stash[SERVERS] = stack.enter_context(running(config.stash[VERSIONS]))


def pytest_collection_finish() -> None:
    """Leave what has been imported out of the search for garbage, which took a sixth of the time of the tests."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


class Stopwatch:
    """Adds up the seconds of each test, in the process that reports them, and leaves them to later runs."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.took = config, Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.took[report.nodeid] += round(report.duration, 2)

    def pytest_sessionfinish(self) -> None:
        self.config.cache.set(SECONDS, {**self.config.cache.get(SECONDS, {}), **self.took})


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    node.workerinput["servers"] = node.config.stash[SERVERS].to_plain()
    # After ten seconds it would be killed, and what coverage has recorded be lost: a loaded machine takes longer.
    node.nodemanager.EXIT_TIMEOUT = 120


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "postgres_version" in metafunc.fixturenames:
        versions = metafunc.config.stash[VERSIONS]
        metafunc.parametrize(
            "postgres_version",
            versions,
            ids=[f"pg{version}" for version in versions],
            scope="session",
        )


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Set pytest's timeout again, which it cancels when a test fails: the fixtures are yet to end, and can hang."""
    seconds = float(node.config.getini("faulthandler_timeout"))
    if seconds and isinstance(node, pytest.Item) and not node.config.getoption("usepdb"):
        stderr = node.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(seconds, file=stderr, exit=True)


class Connections:
    """The connections that a test has made, with the stack of each.

    One that is left open in a cycle is reported by Python when the garbage is collected: in the midst of another test.
    """

    def __init__(self) -> None:
        self.made: weakref.WeakKeyDictionary[Any, traceback.StackSummary] = weakref.WeakKeyDictionary()
        self.dialects: weakref.WeakSet[DefaultDialect] = weakref.WeakSet()

    def clear(self) -> None:
        self.made.clear()
        self.dialects.clear()

    def add(self, connection: Any) -> None:
        # Without the lines of the files, which are looked up when a stack is printed.
        self.made[connection] = traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)

    def open(self) -> list[Any]:
        return [connection for connection in list(self.made) if not is_closed(connection)]

    def watch(self) -> None:
        """Record what the drivers connect from now on."""
        self._watch_init(psycopg.BaseConnection)
        self._watch_init(asyncpg.Connection)
        self._watch_sqlite()
        # Not __init__, from whose arguments SQLAlchemy learns the options of an engine.
        DefaultDialect.__new__ = staticmethod(self._new_dialect)  # type: ignore[method-assign,assignment] # as above
        event.listen(Pool, "connect", self._forget_shared)

    def _new_dialect(self, kind: type[DefaultDialect], *_: Any, **__: Any) -> DefaultDialect:
        dialect = object.__new__(kind)
        self.dialects.add(dialect)
        return dialect

    def _watch_init(self, kind: Any) -> None:
        init = kind.__init__

        def watched(connection: Any, *arguments: Any, **options: Any) -> None:
            init(connection, *arguments, **options)
            self.add(connection)

        kind.__init__ = watched

    def _watch_sqlite(self) -> None:
        connect = sqlite3.connect

        def watched(*arguments: Any, factory: Any = SQLiteConnection, **options: Any) -> Any:
            connection = connect(*arguments, factory=factory, **options)
            self.add(connection)
            return connection

        sqlite3.connect = sqlite3.dbapi2.connect = watched

    def _forget_shared(self, connection: Any, record: Any) -> None:
        """Forget a connection of an engine that other tests use as well, which its fixture disposes of."""
        # SQLAlchemy has no public way from a connection to its engine.
        if record._ConnectionRecord__pool._dialect in self.dialects:
            return
        driver = record.driver_connection
        with contextlib.suppress(
            TypeError
        ):  # a driver that is not watched: its connections may have no weak references
            self.made.pop(driver, None)
            self.made.pop(getattr(driver, "_conn", None), None)  # of aiosqlite


class SQLiteConnection(sqlite3.Connection):
    """A connection with weak references; that of sqlite3 has none."""


def is_closed(connection: Any) -> bool:
    if isinstance(connection, sqlite3.Connection):
        try:
            connection.total_changes  # noqa: B018 - sqlite3 has no other way to ask, in any thread
        except sqlite3.ProgrammingError:
            return True
        return False
    return bool(connection.closed if isinstance(connection, psycopg.BaseConnection) else connection.is_closed())


CONNECTIONS = Connections()
CONNECTIONS.watch()


class SharedStatements(LRUCache[Any, Any]):
    """The compiled statements of all engines of this process.

    Each test has engines of its own, and to compile its statements again took a quarter of the time of the tests. As in
    the cache of one engine, a statement is found by its structure and by the dialect: here by the settings of that.
    """

    def __init__(self) -> None:
        super().__init__(3000)
        self._settings: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def __get__(self, engine: sa.Engine | None, _: object) -> SharedStatements:
        return self

    def __set__(self, engine: sa.Engine, own: object) -> None:
        """Leave out what the engine has made."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._shared(key), default)

    def __setitem__(self, key: Any, compiled: Any) -> None:
        super().__setitem__(self._shared(key), compiled)

    def _shared(self, key: Any) -> Any:
        dialect, *others = key
        _, _, has_translated_schemas, _ = others
        if has_translated_schemas:
            # The engines of one program translate the same names, those of several tests do not.
            return key
        settings = self._settings.get(dialect)
        if settings is None:
            # Not its operations such as do_commit(), which are replaced where they are watched. Another thread may be
            # its first user at the same time, and change it.
            known = sorted((name, value) for name, value in dict(vars(dialect)).items() if not name.startswith("do_"))
            settings = type(dialect), *((name, value if is_setting(value) else type(value)) for name, value in known)
            if hasattr(dialect, "server_version_info"):
                # Those of a dialect that has not been connected yet will change.
                self._settings[dialect] = settings
        return settings, *others


def is_setting(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, tuple)) or callable(value)


CACHE = SharedStatements()
for each in (sa.Engine, Mapper):
    each._compiled_cache = CACHE  # type: ignore[method-assign] # asked for by __get__


@pytest.fixture(autouse=True)
def no_open_connections() -> Iterator[None]:
    """Fail the test that leaves a connection open; those of fixtures that other tests share may stay."""
    CONNECTIONS.clear()
    yield
    until = time.monotonic() + CLOSING
    while (left := CONNECTIONS.open()) and time.monotonic() < until:
        time.sleep(0.01)
    if left:
        stacks = [f"{connection!r}, made by:\n{''.join(CONNECTIONS.made[connection].format())}" for connection in left]
        del left
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # these are reported here, not with a later test
            gc.collect()
        pytest.fail("The test has left connections open.\n\n" + "\n".join(stacks), pytrace=False)


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config, postgres_version: int) -> Server:
    """The server that all tests share: create what you like, never stop it."""
    return pytestconfig.stash[SERVERS].shared(postgres_version)


@pytest.fixture
def database(server: Server) -> Iterator[Database]:
    """An empty database of the test's own."""
    with server.database() as database:
        yield database


@pytest.fixture
def sessions(database: Database) -> Iterator[Callable[..., sessionmaker[Session]]]:
    """A function: create the tables of a class in the test's database, and return a maker of sessions on them.

    ``sessions(Job).kw["bind"]`` is the engine. Options are those of the engine: ``sessions(Job, pool_size=20)``.
    """
    with contextlib.ExitStack() as stack:

        def create(model: Any, **options: Any) -> sessionmaker[Session]:
            engine = sa.create_engine(database.url(), **options)
            stack.callback(engine.dispose)
            model.metadata.create_all(engine)
            return sessionmaker(engine)

        yield create


@pytest.fixture
def postgres_server(pytestconfig: pytest.Config, postgres_version: int) -> Iterator[Server]:
    """A server of the test's own, to be stopped, restarted and crashed."""
    with pytestconfig.stash[SERVERS].own(postgres_version) as server:
        yield server


@pytest.fixture(scope="session")
def mariadb(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDBServer]:
    """A MariaDB server, one for each process of the tests; without the program the tests are left out."""
    # It imports PyMySQL, which the other tests do without.
    from tests.mariadb.server import MariaDBServer, missing_program  # noqa: PLC0415 - only its tests need it

    reason = missing_program()
    if reason is not None:
        pytest.skip(reason)
    template = pytestconfig.stash[SERVERS].home / "mariadb"
    with MariaDBServer(tmp_path_factory.mktemp("mariadb"), template) as server:
        yield server
