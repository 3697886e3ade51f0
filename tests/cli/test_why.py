"""``sqlaqueue why``: explanations of jobs and of queues."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from tests.cli.conftest import MODELS, QUEUES, Shop
from tests.cli.shop.models import Bare, Email, Letter, Newsletter, Row, Task

pytestmark = pytest.mark.once

LATER = datetime(2100, 1, 1, tzinfo=UTC)


def test_a_job(shop: Shop) -> None:
    shop.add(Email(), Email(status="failed", last_error="ValueError: no", finished_at=LATER))
    said = shop.ok("why", f"{MODELS}:Email", "1")
    assert said == (
        "email 1 is pending\n  no_consumer: No live Consumer serves email: none has sent a heartbeat recently; "
        "start one, for instance with `sqlaqueue worker`.\n"
    )
    assert "email 2 is failed\n  finished: It failed at 2100-01-01" in shop.ok("why", f"{MODELS}:Email", "2")


def test_a_job_as_json(shop: Shop) -> None:
    shop.add(Row(year=1, number="2"))
    found = shop.json("why", f"{MODELS}:Row", "1,2")
    assert [reason.pop("code") for reason in found["reasons"]] == ["no_consumer"]
    assert found == {
        "queue": "row",
        "key": "1,2",
        "state": "pending",
        "reasons": [{"text": found["reasons"][0]["text"]}],
    }


def test_a_job_that_does_not_exist(shop: Shop) -> None:
    shop.add(Email())
    for arguments in (["--json"], []):
        result = shop.invoke("why", f"{MODELS}:Task", "7", *arguments)
        assert result.exit_code == 1
    assert result.stdout.startswith("task 7 is missing\n  missing: There is no job 7 in task")
    # A single-table subclass selects its own jobs, as in all commands.
    assert shop.invoke("why", f"{MODELS}:Newsletter", "1").exit_code == 1
    shop.add(Newsletter())
    assert shop.invoke("why", f"{MODELS}:Newsletter", "2").exit_code == 0


def test_a_key_of_a_wrong_type(shop: Shop) -> None:
    result = shop.invoke("why", f"{MODELS}:Email", "x")
    assert result.exit_code == 2
    assert "the key 'x': Email.id is an integer, and 'x' is none" in result.stderr


def test_a_queue(shop: Shop) -> None:
    shop.add(Email(run_at=LATER), Email(run_at=LATER + timedelta(days=1)), Email(status="failed"))
    assert shop.ok("why", f"{MODELS}:Email").splitlines() == [
        "email",
        "  No live Consumer serves it; start one, for instance with `sqlaqueue worker`.",
        "  Due: 0 jobs; the next one is due at 2100-01-01 00:00:00 UTC.",
        "  Failed: 1 job; `sqlaqueue failed` shows why.",
    ]
    shop.ok("pause", f"{MODELS}:Email")
    shop.execute(
        "INSERT INTO sqlaqueue_consumer (id, queue, name, host, pid, version, listening, running, heartbeat_at, "
        "expires_at) VALUES ('a', 'email', 'a', 'web', 1, '1', true, '[]', now(), now() + interval '1 minute')"
    )
    shop.add(Email(), Email())
    said = shop.ok("why", f"{MODELS}:Email").splitlines()
    assert said[1:3] == [
        "  It is paused, so no job is claimed; `sqlaqueue resume` ends that.",
        "  1 live Consumer serves it; 0 jobs running.",
    ]
    assert said[3].startswith("  Due: 2 jobs, the oldest of them for ")


@pytest.mark.parametrize("job", [Letter(), Task(), Bare()], ids=lambda job: type(job).__name__)
def test_a_queue_of_each_strategy(shop: Shop, job: object) -> None:
    shop.add(job)
    found = shop.json("why", f"{MODELS}:{type(job).__name__}")
    assert (found["due"], found["next_due"], found["failed"], found["paused"]) == (1, None, 0, False)


def test_several_queues(shop: Shop) -> None:
    process = shop.start("why", f"{QUEUES}:both", SQLAQUEUE_URL=None)
    assert process.end() == 0
    assert [line.strip() for line in process.lines if not line.startswith(" ")] == ["email", "letter"]
    assert json.loads(shop.ok("why", f"{MODELS}:Email", "--json"))["queue"] == "email"
