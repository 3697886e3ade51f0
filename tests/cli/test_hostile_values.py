"""Keys, errors and names are input of others: they neither control a terminal nor forge lines of output or logs."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from sqlaqueue import admin
from sqlaqueue.cli import main
from sqlaqueue.cli.processes import PlainFormatter
from tests.cli.conftest import MODELS, Shop
from tests.cli.shop import schedules as app
from tests.cli.shop.models import Email, Row
from tests.schedules.models import start

pytestmark = pytest.mark.once

HOSTILE = "a\x1b]0;owned\x07\x1b[2J\x9b31m\r\n\u2028forged\u202eline\nforged: line\x00"[:-1]
REPORT = "tests.cli.shop.schedules:Report"
EMAIL, ROW = f"{MODELS}:Email", f"{MODELS}:Row"
KEY = f'1,"{HOSTILE}"'

COMMANDS = [
    ("jobs", ROW),
    ("jobs", EMAIL, "--state", "failed"),
    ("job", ROW, KEY),
    ("job", EMAIL, "1"),
    ("job", EMAIL, HOSTILE),
    ("failed", EMAIL),
    ("failed", ROW),
    ("stats", EMAIL),
    ("workers", EMAIL),
    ("health", EMAIL),
    ("why", EMAIL),
    ("why", EMAIL, "1"),
    ("why", ROW, KEY),
    ("why", ROW, f'2,"{HOSTILE}"'),
    ("doctor", EMAIL, ROW),
    ("doctor", EMAIL, ROW, "--deep"),
    ("schedules", "list", REPORT),
    ("schedules", "show", REPORT, HOSTILE),
    ("schedules", "pause", REPORT, HOSTILE),
    ("schedules", "show", REPORT, f"no{HOSTILE}"),
    ("pause", EMAIL),
    ("resume", EMAIL),
    ("reconcile", f"{MODELS}:Letter"),
    ("rescue", EMAIL),
    ("requeue", ROW, "--key", KEY, "--yes"),
    ("cancel", ROW, "--key", KEY, "--yes"),
    ("purge", ROW, "--key", KEY, "--yes"),
]
OTHERS = {"alembic-template", "bench", "demo", "metrics", "scheduler", "web", "worker"}
"""Commands that print nothing of jobs, or in formats for programs, or through the log."""


@pytest.fixture
def hostile_shop(shop: Shop) -> Shop:
    app.Base.metadata.create_all(shop.engine)
    start(shop.engine, app.schedules)
    shop.execute(
        "UPDATE sqlaqueue_schedule SET name = :name WHERE name = (SELECT min(name) FROM sqlaqueue_schedule)",
        name=HOSTILE,
    )
    shop.add(
        Email(id=1, to=HOSTILE, status="failed", attempts=2, last_error=f"{HOSTILE}: {HOSTILE}", claimed_by=HOSTILE),
        Row(year=1, number=HOSTILE, status="failed", attempts=2, last_error=HOSTILE),
    )
    shop.execute(
        "INSERT INTO sqlaqueue_consumer"
        " (id, queue, name, host, pid, version, listening, running, heartbeat_at, expires_at)"
        " SELECT id, 'email', :name, :name, 1, :name, true, jsonb_build_array(jsonb_build_array(cast(:name AS text))),"
        " now(), now() + interval '1 hour' FROM unnest(ARRAY['x', 'y']) AS id",
        name=HOSTILE,
    )
    return shop


def assert_harmless(text: str) -> None:
    assert [each for each in text if not each.isprintable() and each != "\n"] == []
    assert [line for line in text.splitlines() if line.startswith("forged: line")] == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2])[:40])
def test_commands_print_no_control_characters(hostile_shop: Shop, command: tuple[str, ...]) -> None:
    result = hostile_shop.invoke(*command)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert_harmless(result.output)


def test_all_commands_are_looked_at() -> None:
    assert {command[0] for command in COMMANDS} | OTHERS == set(main.commands)


def test_records_of_the_log_of_worker_processes_are_harmless() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PlainFormatter("%(levelname)s %(message)s"))
    try:
        raise ValueError(HOSTILE)  # noqa: TRY301 - its traceback is logged
    except ValueError:
        record = logging.LogRecord("sqlaqueue", logging.ERROR, __file__, 1, "job %s failed", (HOSTILE,), sys.exc_info())
    record.stack_info = HOSTILE
    handler.handle(record)
    text = stream.getvalue()
    assert [each for each in text if not each.isprintable() and each != "\n"] == []
    first, *others = text.splitlines()
    assert first.startswith("ERROR job a")
    assert "ValueError" in text
    assert all(line.startswith("  ") for line in others)


def test_an_explanation_as_a_text_is_harmless(hostile_shop: Shop) -> None:
    explanation = admin.Explanation(queue="email", key=(HOSTILE,), state="missing", reasons=[])
    assert_harmless(str(explanation))
