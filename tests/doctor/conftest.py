"""The queues in a database, what examines them, and what executes a fix."""

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.orm import Session

from sqlaqueue import __version__
from sqlaqueue.admin import Finding, Thresholds, doctor
from sqlaqueue.admin.doctor.examination import Examination
from sqlaqueue.admin.doctor.server import check_durability
from sqlaqueue.cli import main
from sqlaqueue.mapping.mixin import spec_of
from tests.doctor.models import MODELS, Base, Email
from tests.servers import Database, Server

examining = importlib.import_module("sqlaqueue.admin.doctor.doctor")
COMMAND = "sqlaqueue "


class Patient:
    """A database with all queues."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.engine = plain_engine(database.url())

    def execute(self, *statements: str) -> Any:
        """Execute each statement in a transaction of its own, as psql does."""
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for statement in statements:
                result = connection.exec_driver_sql(statement)
            return result.all() if result.returns_rows else None

    def analyze(self) -> None:
        """Gather the statistics of the tables; those of the catalogs as well would take ten times as long."""
        self.execute("ANALYZE " + ", ".join(f'"{name}"' for name in Base.metadata.tables))

    def add(self, *jobs: Any) -> None:
        with Session(self.engine) as session:
            session.add_all(jobs)
            session.commit()

    def findings(self, *models: type[Any], deep: bool = False, **limits: Any) -> list[Finding]:
        with Session(self.engine) as session:
            return doctor(session, *(models or MODELS), deep=deep, thresholds=Thresholds(**limits))

    def find(self, code: str, *models: type[Any], **options: Any) -> Finding:
        """Return the finding with this code, of which there must be one."""
        found = self.findings(*models, **options)
        matching = [each for each in found if each.code == code]
        assert len(matching) == 1, found
        return matching[0]

    def codes(self, *models: type[Any], **options: Any) -> list[str]:
        return [each.code for each in self.findings(*models, **options)]

    def repair(self, fix: str) -> None:
        """Execute a fix, as an operator copies it: SQL statements, or a command."""
        if fix.startswith(COMMAND):
            arguments = fix.removeprefix(COMMAND).split()
            result = CliRunner().invoke(main, arguments, env={"SQLAQUEUE_URL": self.database.url()})
            assert result.exit_code == 0, result.output
            return
        apply(self.database.dsn, fix)

    def repaired(self, code: str, *models: type[Any], fix: int = 0, **options: Any) -> Finding:
        """Return the finding with this code, and execute its fix, after which it must be gone."""
        finding = self.find(code, *models, **options)
        self.repair(finding.fixes[fix])
        assert code not in self.codes(*models, **options)
        return finding

    def healed(self, code: str, *models: type[Any], fix: int = 0) -> Finding:
        """Return the finding with this code, and execute its fix, after which nothing must be wrong."""
        finding = self.find(code, *models)
        self.repair(finding.fixes[fix])
        assert self.findings(*models) == []
        return finding


def split(fix: str) -> list[str]:
    statements, quoted, begin = [], False, 0
    for at, line in enumerate(lines := fix.splitlines()):
        quoted ^= line.count("$sqlaqueue$") % 2 == 1
        if line.endswith(";") and not quoted:
            statements.append("\n".join(lines[begin : at + 1]))
            begin = at + 1
    assert begin == len(lines), fix
    return statements


@pytest.fixture(autouse=True)
def _durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what would be found in each test: the servers of the tests do not wait for a disk."""
    others = tuple(check for check in examining.CHECKS if check is not check_durability)
    monkeypatch.setattr(examining, "CHECKS", others)


@pytest.fixture(scope="session")
def healthy(server: Server) -> Iterator[str]:
    """The name of a database with all queues, to be copied."""
    with server.database() as database:
        Base.metadata.create_all(plain_engine(database.url()))
        yield database.name


@pytest.fixture
def patient(server: Server, healthy: str) -> Iterator[Patient]:
    with server.database(healthy) as database:
        yield Patient(database)


def add_consumer(patient: Patient, queue: str, **values: Any) -> None:
    row = {
        "id": "1",
        "queue": queue,
        "name": "web:1",
        "host": "web",
        "pid": 1,
        "version": __version__,
        "listening": True,
        "running": [],
        "claimed": 0,
        "heartbeat_at": sa.func.now(),
        "expires_at": sa.text("now() + interval '1 minute'"),
        **values,
    }
    table = Email.metadata.tables["sqlaqueue_consumer"]
    with patient.engine.begin() as connection:
        connection.execute(sa.insert(table).values(row))


def long(**by_name: float) -> dict[str, timedelta]:
    """Return thresholds from seconds."""
    return {name: timedelta(seconds=value) for name, value in by_name.items()}


# -- one check by itself, and the server that it looks at ----------------------------------------------------------


def examine(
    engine: sa.Engine,
    models: Iterable[Any] = (),
    checks: Iterable[Callable[[Examination], Iterator[Finding]]] = (),
    *,
    deep: bool = False,
    **thresholds: Any,
) -> list[Finding]:
    """Return what checks find, in a read-only transaction as a doctor has it."""
    with engine.connect() as plain:
        connection = plain.execution_options(postgresql_readonly=True)
        connection.execute(sa.text("SET LOCAL statement_timeout = '5s'"))
        specs = [spec_of(model) for model in models]
        examination = Examination(connection, specs, Thresholds(**thresholds), deep)
        return [finding for check in checks for finding in check(examination)]


def find(code: str, *arguments: Any, **options: Any) -> Finding:
    """Return the one finding of a code, with what every finding has."""
    found = [each for each in examine(*arguments, **options) if each.code == code]
    assert len(found) == 1, found
    (finding,) = found
    assert finding.summary.endswith("."), finding.summary
    assert finding.consequence.endswith("."), finding.consequence
    return finding


def codes(*arguments: Any, **options: Any) -> list[str]:
    return [finding.code for finding in examine(*arguments, **options)]


def mended(patient: Patient, code: str, model: Any, *checks: Any) -> Finding:
    """Return the one finding of a code, and execute its fix, after which these checks find nothing."""
    finding = find(code, patient.engine, [model], checks)
    patient.repair(finding.fixes[0])
    assert codes(patient.engine, [model], checks) == []
    return finding


def apply(dsn: str, fix: str) -> None:
    """Execute a fix as psql does: one statement after the other, each by itself."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        # CONCURRENTLY does not work in a transaction, not even that of several statements sent at once.
        for statement in split(fix):
            connection.execute(statement.encode())


def restart_with(database: Database, setting: str) -> None:
    """Change a setting of a test's own server that needs a restart."""
    apply(database.dsn, f"ALTER SYSTEM SET {setting};")
    database.server.restart()


def plain_engine(url: str, **options: Any) -> sa.Engine:
    return sa.create_engine(url, poolclass=sa.NullPool, **options)


@contextlib.contextmanager
def new_role(database: Database, name: str, options: str = "LOGIN") -> Iterator[sa.Engine]:
    """Create a role, and return an engine that connects as this role."""
    # Roles are those of the whole server.
    with database.connect() as administrator:
        administrator.execute(f'CREATE ROLE "{name}" {options}'.encode())
        try:
            yield plain_engine(database.url().replace("postgres@", f"{name}@"))
        finally:
            administrator.execute(f'DROP OWNED BY "{name}"'.encode())
            administrator.execute(f'DROP ROLE "{name}"'.encode())


@pytest.fixture
def engine(database: Database) -> sa.Engine:
    return plain_engine(database.url())


@pytest.fixture
def own(postgres_server: Server) -> Iterator[Database]:
    """A database on a server of the test's own."""
    with postgres_server.database() as database:
        yield database


@pytest.fixture
def own_engine(own: Database) -> sa.Engine:
    return plain_engine(own.url())
