"""The command line and the demo work with a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import Fail, Limit, QueueConfig, QueueMixin
from tests.cli.conftest import fill, sqlaqueue
from tests.sqlite.features import Email, made

pytestmark = pytest.mark.once

EMAIL = "tests.sqlite.features:Email"


def refuse(_: object, job: Email) -> None:
    raise Fail("no such address")


class Base(DeclarativeBase):
    pass


class Limited(QueueMixin, Base):
    __tablename__ = "limited"
    __queue__ = QueueConfig(limits=[Limit(2)])

    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def url(tmp_path: Path) -> str:
    sessions = made(tmp_path / "jobs.db")
    with sessions() as session:
        session.add_all(Email() for _ in range(3))
        session.commit()
    sessions.kw["bind"].dispose()
    return f"sqlite:///{tmp_path}/jobs.db"


def test_workers_run_jobs_and_operators_look_at_them(url: str) -> None:
    result = sqlaqueue("worker", EMAIL, "--handler", "tests.sqlite.test_command_line:refuse", "--url", url, "--drain")
    assert result.returncode == 0, result.stderr
    assert "no such address" in sqlaqueue("failed", EMAIL, "--url", url).stdout
    assert "3" in sqlaqueue("requeue", EMAIL, "--yes", "--url", url).stdout
    for command in ("stats", "jobs", "health", "pause", "resume", "rescue", "reconcile", "purge"):
        confirmed = ["--yes"] if command == "purge" else []
        result = sqlaqueue(command, EMAIL, *confirmed, "--url", url)
        assert "Traceback" not in result.stderr, command
        # No worker is there, which `health` reports.
        assert result.returncode == (1 if command == "health" else 0), (command, result.stdout, result.stderr)
    assert "pending" in sqlaqueue("why", EMAIL, "1", "--url", url).stdout


def test_commands_of_postgresql_are_refused(url: str) -> None:
    for command in ("doctor", "web"):
        result = sqlaqueue(command, EMAIL, "--url", url)
        assert result.returncode != 0
        assert "not available on SQLite" in result.stderr


def test_workers_refuse_an_option_before_they_ask_for_its_table(url: str) -> None:
    names = [f"tests.sqlite.test_command_line:{name}" for name in ("Limited", "refuse")]
    result = sqlaqueue("worker", "=".join(names), "--url", url, "--drain")
    assert result.returncode != 0
    assert "Limited: QueueConfig(limits=...) is not available on SQLite" in result.stderr


@pytest.mark.parametrize("path", ["nothing.db", ":memory:"])
def test_a_file_that_does_not_exist_is_refused(path: str, tmp_path: Path) -> None:
    """SQLite would create it."""
    result = sqlaqueue("stats", EMAIL, "--url", f"sqlite:///{path}")
    assert (result.returncode, "there is no file" in result.stderr) == (2, True)
    assert not Path(path).exists()


def test_the_demo_needs_no_server(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    number = fill(files)
    result = sqlaqueue("demo", "--sqlite", "--path", files, "--workers", "2", "--batch", "8")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{number} files: every one stored exactly once, none lost" in result.stdout
    refused = sqlaqueue("demo", "--sqlite", "--strategy", "batch_select")
    assert (refused.returncode, "--strategy update_status" in refused.stderr) == (2, True)
