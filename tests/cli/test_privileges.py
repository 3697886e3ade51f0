"""A role without privileges: one line with the missing GRANT, and the exit code of a database that is not ready."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

from sqlaqueue import Consumer
from sqlaqueue.exc import DatabaseNotReadyError
from tests.cli.conftest import MODELS, TASKS, Shop
from tests.cli.shop.models import Email

pytestmark = pytest.mark.once

OTHERS = ("Letter", "Task")


@pytest.fixture
def role(shop: Shop) -> Iterator[str]:
    """Yield a role that may only connect."""
    role = f"role_{uuid.uuid4().hex[:8]}"
    shop.execute(f"CREATE ROLE {role} LOGIN")
    yield role
    shop.execute(f"DROP OWNED BY {role}")
    shop.execute(f"DROP ROLE {role}")


def url_of(shop: Shop, role: str) -> str:
    return shop.database.url().replace("postgres@", f"{role}@")


@pytest.mark.parametrize("name", ["Email", *(pytest.param(each, marks=pytest.mark.thorough) for each in OTHERS)])
def test_a_worker_without_privileges(shop: Shop, role: str, name: str) -> None:
    worker = shop.start("worker", f"{MODELS}:{name}", "--handler", f"{TASKS}:send", SQLAQUEUE_URL=url_of(shop, role))
    assert worker.end() == 3, worker.output
    assert "INSERT INTO" not in worker.output
    errors = [line for line in worker.lines if " INFO " not in line]
    assert len(errors) == 1, worker.output
    assert errors[0].startswith(f"Error: the role of this Consumer of {name} lacks privileges that its queue needs;")
    assert "GRANT SELECT" in errors[0]


COMMANDS = {
    "stats": [],
    "failed": [],
    "workers": [],
    "pause": [],
    "resume": [],
    "cancel": ["--key", "1", "--yes"],
    "requeue": ["--key", "1", "--yes"],
    "purge": ["--older-than", "1d", "--yes"],
}


def test_a_consumer_without_privileges(shop: Shop, role: str, caplog: pytest.LogCaptureFixture) -> None:
    """The maintenance tasks log nothing, as the error is raised."""
    engine = sa.create_engine(url_of(shop, role), poolclass=sa.NullPool)
    consumer = Consumer(Email, lambda session, job: None, sessionmaker(engine))
    with pytest.raises(DatabaseNotReadyError, match="GRANT SELECT"):
        consumer.run()
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    "command",
    [each if each in {"stats", "cancel"} else pytest.param(each, marks=pytest.mark.thorough) for each in COMMANDS],
)
def test_a_command_without_privileges(shop: Shop, role: str, command: str) -> None:
    result = shop.invoke(command, f"{MODELS}:Email", *COMMANDS[command], SQLAQUEUE_URL=url_of(shop, role))
    assert result.exit_code == 3, result.output
    (line,) = result.stderr.splitlines()
    assert "permission denied for table" in line
    assert "GRANT" in line
