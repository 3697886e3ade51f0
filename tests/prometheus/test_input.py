"""Wrong arguments, and a missing extra, are answered with the fix."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from sqlaqueue import AsyncConsumer, admin
from sqlaqueue.exc import ConfigurationError, NotAQueueError, StatementError
from sqlaqueue.prometheus import QueueCollector, metrics_app
from tests.prometheus.test_gauges import make_two
from tests.unique.models import make_job

pytestmark = pytest.mark.once

ENGINE = sa.create_engine("postgresql+psycopg://nowhere.invalid/none")
ASYNC_ENGINE = create_async_engine("postgresql+asyncpg://nowhere.invalid/none")
FIRST, SECOND = make_two()


async def handle(session: Any, job: Any) -> None:
    raise NotImplementedError


def make_consumer() -> AsyncConsumer[Any]:
    return AsyncConsumer(FIRST, handle, async_sessionmaker(ASYNC_ENGINE))


@pytest.mark.parametrize("export", [QueueCollector, metrics_app])
@pytest.mark.parametrize(
    ("models", "error", "words"),
    [
        (FIRST, ConfigurationError, "(First): give a list of queue classes"),
        (5, ConfigurationError, "(5): give a list of queue classes"),
        ([], ConfigurationError, "([]): give at least one queue class"),
        ([int], NotAQueueError, "int is not a queue"),
        ([FIRST, make_consumer()], NotAQueueError, "is not a mapped class"),
        ([make_job("update_status"), make_job("batch_select")], ConfigurationError, "are both named 'job'"),
    ],
)
def test_models(export: Any, models: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        export(models, sessionmaker(ENGINE))
    assert words in str(raised.value)
    if error is ConfigurationError:
        assert export.__name__ in str(raised.value)


@pytest.mark.parametrize("export", [QueueCollector, metrics_app])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"statement_timeout": 0}, "(statement_timeout=0): give more than zero"),
        ({"statement_timeout": -1}, "(statement_timeout=...) must be seconds"),
        ({"max_age": "soon"}, "(max_age=...) must be seconds"),
        ({"count_limit": 0}, "(count_limit=0): give an integer of 1 or more"),
        ({"count_limit": 1.5}, "(count_limit=1.5): give an integer of 1 or more"),
    ],
)
def test_options(export: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        export([FIRST], sessionmaker(ENGINE), **options)
    assert f"{export.__name__}{words}" in str(raised.value)


@pytest.mark.parametrize("given", [async_sessionmaker(ASYNC_ENGINE), ASYNC_ENGINE, make_consumer()])
def test_a_registry_collects_in_sync_code(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"use metrics_app\(models, async_sessionmaker\(engine\)\)"):
        QueueCollector([FIRST], given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (ENGINE, "give sessionmaker(engine)"),
        (ASYNC_ENGINE, "give async_sessionmaker(engine)"),
        ("postgresql://user:secret@host/app", "the session factory is a str"),
    ],
)
def test_session_factories(given: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        metrics_app([FIRST], given)
    assert words in str(raised.value)
    assert "secret" not in str(raised.value)


def test_the_limit_of_a_depth() -> None:
    with sessionmaker(ENGINE)() as session, pytest.raises(StatementError, match=r"depth\(First\): limit=0"):
        admin.depth(session, FIRST, limit=0)


@pytest.mark.parametrize("program", ["import sqlaqueue.prometheus", "from sqlaqueue.cli import main; main()"])
def test_a_missing_extra(program: str) -> None:
    code = f"import sys; sys.modules['prometheus_client'] = None; {program}"
    done = subprocess.run(
        [sys.executable, "-c", code, "metrics", "--alerts"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "sqlaqueue.prometheus needs prometheus_client: pip install 'sqlaqueue[prometheus]'" in done.stderr
    assert "main" in program or done.stderr.count("Error") == 1 or "ModuleNotFoundError" in done.stderr
    if "main" in program:
        assert len(done.stderr.splitlines()) == 1
