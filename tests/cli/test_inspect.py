"""``stats``, ``failed``, ``workers``, ``jobs``, ``job`` and ``why``."""

import json
import re
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import BARE, EMAIL, LETTER, MODELS, NEWSLETTER, QUEUES, ROW, TASK, WORKER, Shop
from tests.cli.shop.models import Bare, Base, Email, Letter, Newsletter, Row, Task
from tests.programs import wait_until
from tests.servers import Server

pytestmark = pytest.mark.once

LATER = datetime.now(UTC) + timedelta(days=1)


def stats(shop: Shop, *arguments: str) -> dict[str, Any]:
    (found,) = shop.json("stats", *arguments)
    return dict(found)


def test_stats_of_jobs_in_all_states(shop: Shop) -> None:
    shop.add(
        *(
            Email(status=state, attempts=attempts)
            for state, attempts in [("completed", 1), ("failed", 1), ("failed", 2)]
        ),
        Email(run_at=datetime.now(UTC) - timedelta(hours=2)),
        Email(),
        Email(run_at=LATER),
        Email(status="processing"),
    )
    found = stats(shop, EMAIL)
    assert 7200 <= found.pop("oldest_due") < 7300
    assert found == {
        "queue": "email",
        "strategy": "update_status",
        "states": {"pending": 3, "processing": 1, "completed": 1, "failed": 2, "cancelled": 0},
        "due": 2,
        "running": 1,
        "failed_by_attempts": {"1": 1, "2": 1},
        "paused": False,
        "consumers": 0,
        "at_limit": [],
        "missing_indexes": [],
        "expired_leases": 0,
    }


def test_stats_show_expired_leases(shop: Shop) -> None:
    now = datetime.now(UTC)
    shop.add(*(Email(status="processing", attempts=1, lease_expires_at=now - timedelta(1)) for _ in range(2)))
    shop.add(Email(status="processing", attempts=1, lease_expires_at=now + timedelta(1)), Letter())
    assert stats(shop, EMAIL)["expired_leases"] == 2
    assert stats(shop, LETTER)["expired_leases"] == 0
    said = " ".join(shop.ok("stats", EMAIL).split())
    assert "email: 2 leases of running jobs have expired; Consumers rescue the jobs, or `sqlaqueue rescue`" in said
    shop.execute("DELETE FROM email WHERE lease_expires_at < now()")
    assert "expired" not in shop.ok("stats", EMAIL)


def test_stats_show_a_missing_index(shop: Shop) -> None:
    shop.execute("DROP INDEX ix_email_queue_claim")
    assert stats(shop, EMAIL)["missing_indexes"] == ["ix_email_queue_claim"]
    said = " ".join(shop.ok("stats", EMAIL).split())
    assert "missing or invalid indexes: ix_email_queue_claim; `alembic revision" in said


def test_stats_of_active_jobs_only(shop: Shop) -> None:
    shop.add(Email(status="completed"), Email())
    found = stats(shop, EMAIL, "--active")
    assert (found["states"], found["failed_by_attempts"]) == ({"pending": 1, "processing": 0}, {})


def test_stats_of_rows_that_are_messages(shop: Shop) -> None:
    shop.add(Task(), Task(run_at=LATER), Task())
    shop.execute("UPDATE task SET run_at = now() - interval '1 hour' WHERE id = 1")
    shop.ok("cancel", TASK, "--key", "3", "--yes")
    assert shop.start("worker", TASK, "--handler", f"{MODELS}:fall_ill", "--drain").end() == 0
    shop.add(Task(id=9))
    found = stats(shop, TASK)
    assert found["states"] == {"pending": 2, "failed": 1, "cancelled": 1}
    assert found["due"] == 1
    assert found["failed_by_attempts"] == {"1": 1}


def test_stats_of_a_model_with_few_attributes(shop: Shop) -> None:
    shop.add(Bare(), Bare(status="failed"))
    found = stats(shop, BARE)
    assert (found["due"], found["oldest_due"], found["failed_by_attempts"]) == (1, None, {})


def test_stats_of_a_subclass_count_only_its_jobs(shop: Shop) -> None:
    shop.add(Email(), Newsletter(), Newsletter(status="failed"))
    assert stats(shop, NEWSLETTER)["states"]["pending"] == 1
    assert stats(shop, EMAIL)["states"]["pending"] == 2


def test_stats_count_unknown_status_values(shop: Shop) -> None:
    shop.add(Email(status="archived"), Email())
    assert stats(shop, EMAIL)["states"]["other"] == 1


def test_the_table_of_stats_shows_paused_queues(shop: Shop) -> None:
    shop.add(Email(), Letter(status="failed", attempts=2))
    shop.ok("pause", LETTER)
    printed = shop.ok("stats", EMAIL, LETTER)
    header, email, letter, paused, note = printed.splitlines()
    assert header.split()[:2] == ["queue", "pending"]
    assert email.split()[:2] == ["email", "1"]
    assert letter.split()[:4] == ["letter", "0", "0", "1"]
    assert paused == "letter is paused"
    assert note == "letter: 1 failed after 2 attempts"


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_watching_ends_with_ctrl_c(shop: Shop, options: tuple[str, ...]) -> None:
    shop.add(Email())
    process = shop.start("stats", EMAIL, "--watch", "0.05", *options)
    process.wait_for("email")
    shop.add(Email(status="failed", attempts=41))
    process.wait_for("41" if options else "after 41")
    process.signal(signal.SIGINT)
    assert process.end() == 0
    assert "Traceback" not in process.output
    if options:
        assert json.loads(process.lines[0])[0]["states"]["pending"] == 1


def test_watching_goes_on_when_the_database_restarts(postgres_server: Server, tmp_path: Path) -> None:
    """It keeps its connection, and says once that the database is gone."""
    with postgres_server.database() as database:
        shop = Shop(database, tmp_path)
        Base.metadata.create_all(shop.engine)
        process = shop.start("stats", EMAIL, "--watch", "0.05")
        process.wait_for("email")
        sessions = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        before = shop.execute(sessions)
        number = process.output.count("oldest due")
        wait_until(lambda: process.output.count("oldest due") > number + 3)
        assert shop.execute(sessions) == before
        assert len(before) == 1
        postgres_server.restart()
        process.wait_for("the database answers again")
        shop.add(Email(status="failed", attempts=41))
        process.wait_for("after 41")
        process.signal(signal.SIGINT)
        assert process.end() == 0
        assert process.output.count("the database does not answer: ") == process.output.count("answers again") == 1
        shop.engine.dispose()


def test_watching_begins_with_an_answer(shop: Shop) -> None:
    """The URL is most likely wrong."""
    nowhere = shop.invoke("stats", EMAIL, "--watch", "--url", "postgresql://localhost:1/nowhere")
    assert nowhere.exit_code == 3


def test_failed_jobs_are_grouped_by_kind_of_error(shop: Shop) -> None:
    now = datetime.now(UTC)
    shop.add(
        *(
            Email(status="failed", last_error=f"ValueError: {number}", finished_at=now - timedelta(hours=10 - number))
            for number in range(5)
        ),
        Email(status="failed", last_error="[bold]no colon\nsecond: line", finished_at=now),
        Email(status="failed"),
        Email(status="completed", last_error="ValueError: tried again"),
    )
    found = shop.json("failed", EMAIL, "--examples", "2")
    assert [(group["kind"], group["count"], group["keys"]) for group in found] == [
        ("ValueError", 5, ["5", "4"]),
        ("", 1, ["7"]),
        ("other", 1, ["6"]),
    ]
    assert found[0]["error"] == "ValueError: 4"
    assert datetime.fromisoformat(found[0]["newest"]) == now - timedelta(hours=6)
    assert found[1]["newest"] is None
    printed = shop.ok("failed", EMAIL)
    assert all(line.split()[0] in {"queue", "email"} for line in printed.splitlines() if not line.startswith(" "))
    assert "(no error)" in printed
    assert "[bold]no colon" in printed
    assert re.search(r"6 h( \d+ s)? ago", printed)


def test_an_order_number_is_not_a_kind_of_error(shop: Shop) -> None:
    texts = [
        *("order 1: no stock", "order 2: no stock", "order-3: no stock"),
        *("no_stock: order 4: none", "no_stock: order 5: none", "shop.no_stock: order 6"),
        *("ValueError: ", "the lease expired: its worker died or lost the database"),
    ]
    shop.add(*(Email(status="failed", last_error=text) for text in texts))
    found = {group["kind"]: group["count"] for group in shop.json("failed", EMAIL)}
    assert found == {"other": 3, "no_stock": 2, "shop.no_stock": 1, "ValueError": 1, "LeaseExpired": 1}
    (selected,) = shop.json("requeue", EMAIL, "--dry-run", "--kind", "no_stock")
    assert selected["found"] == 2


def test_failed_jobs_with_a_composite_key_and_without_a_status(shop: Shop) -> None:
    shop.add(Row(year=2024, number="a", status="failed", last_error="Oh: no"), Task())
    assert shop.json("failed", ROW)[0]["keys"] == ["2024,a"]
    assert shop.ok("failed", TASK) == "task: no failed jobs\n"
    assert shop.start("worker", TASK, "--handler", f"{MODELS}:fall_ill", "--drain").end() == 0
    (group,) = shop.json("failed", TASK)
    assert (group["kind"], group["count"], group["keys"]) == ("ValueError", 1, ["1"])
    assert group["newest"] is not None
    assert "in fall_ill" in group["error"]
    assert "Traceback" not in shop.ok("failed", TASK)
    assert "in fall_ill" in shop.ok("failed", TASK, "--traceback")
    assert "Traceback (most recent call last):" in shop.ok("job", TASK, "1")


def test_failed_jobs_of_a_model_without_last_error(shop: Shop) -> None:
    shop.add(Bare(status="failed"))
    assert shop.json("failed", BARE) == [
        {"queue": "bare", "kind": "", "count": 1, "newest": None, "error": None, "keys": ["1"]}
    ]


def test_workers_shows_the_consumers_of_a_queue(shop: Shop) -> None:
    without = shop.invoke("workers", EMAIL)
    assert (without.exit_code, without.stdout) == (1, "no Consumers\n")
    worker = shop.start(*WORKER, "--worker-name", "postman")
    wait_until(lambda: shop.invoke("workers", EMAIL, "--here").exit_code == 0, lambda: worker.output)
    (row,) = shop.json("workers", EMAIL)
    assert row["pid"] == worker.pid
    assert row["name"].endswith("postman")
    assert row["running"] == []
    printed = shop.ok("workers", EMAIL)
    assert "postman" in printed
    assert stats(shop, EMAIL)["consumers"] == 1
    # The other queue has no Consumer.
    assert shop.invoke("workers", EMAIL, LETTER).exit_code == 1
    worker.signal()
    assert worker.end() == 0
    assert shop.invoke("workers", EMAIL, "--json").exit_code == 1


def test_workers_are_asked_to_be_quiet_to_claim_again_and_to_stop(shop: Shop) -> None:
    worker = shop.start(*WORKER, "--worker-name", "postman")
    wait_until(lambda: shop.invoke("workers", EMAIL).exit_code == 0, lambda: worker.output)
    wait_until(lambda: [each["listening"] for each in shop.json("workers", EMAIL)] == [True], lambda: worker.output)
    (row,) = shop.json("workers", EMAIL)
    assert row["quiet"] is False
    assert len(row["handlers"]) == 1
    assert ":" in row["handlers"][0]
    name, process = row["name"], f"{row['host']}:{row['pid']}"
    assert shop.ok("workers", EMAIL, LETTER, "--quiet", name) == f"email: {name} was asked to claim no more jobs\n"
    wait_until(lambda: [each["quiet"] for each in shop.json("workers", EMAIL)] == [True], lambda: worker.output)
    assert "quiet" in shop.ok("workers", EMAIL)
    shop.add(Email())
    asked = f"was asked to claim no more jobs ({name}); `sqlaqueue workers --resume` ends that."
    assert f"  Each {asked}\n" in shop.ok("why", EMAIL)
    assert shop.json("why", EMAIL)["all_quiet"] == [name]
    (reason,) = shop.json("why", EMAIL, "1")["reasons"]
    assert (reason["code"], "--resume" in reason["text"]) == ("all_quiet", True)
    assert shop.ok("workers", EMAIL, "--resume", process) == f"email: {name} was asked to claim jobs again\n"
    wait_until(lambda: [each["quiet"] for each in shop.json("workers", EMAIL)] == [False], lambda: worker.output)
    (asked,) = shop.json("workers", EMAIL, "--stop", name, "--here")
    assert (asked["queue"], asked["name"], asked["pid"], asked["asked"]) == ("email", name, row["pid"], "stop")
    assert worker.end() == 0


def test_wrong_requests_to_workers(shop: Shop) -> None:
    nobody = shop.invoke("workers", EMAIL, "--stop", "ada")
    assert (nobody.exit_code, nobody.stderr) == (
        2,
        "Error: --stop ada: no live Consumer of these queues has this name; no Consumer is alive\n",
    )
    shop.execute(
        "INSERT INTO sqlaqueue_consumer (id, queue, name, host, pid, version, listening, running, heartbeat_at, "
        "expires_at) VALUES ('x', 'letter', 'grace', 'elsewhere', 1, '1', true, '[]', now(), now() + interval '1 min')"
    )
    other = shop.invoke("workers", LETTER, "--quiet", "ada")
    assert "there are grace" in other.stderr
    assert shop.invoke("workers", LETTER, "--quiet", "grace", "--here").exit_code == 2
    both = shop.invoke("workers", LETTER, "--quiet", "grace", "--stop", "grace")
    assert "--quiet and --stop: give one of them at a time" in both.stderr


def test_workers_of_another_machine_are_not_here(shop: Shop) -> None:
    shop.execute(
        "INSERT INTO sqlaqueue_consumer (id, queue, host, pid, version, listening, running, heartbeat_at, expires_at) "
        "VALUES ('x', 'letter', 'elsewhere', 1, '1', true, '[[\"7\"]]', now(), now() + interval '1 minute')"
    )
    assert shop.invoke("workers", LETTER).exit_code == 0
    assert shop.invoke("workers", LETTER, "--here").exit_code == 1
    # Under a strategy that holds a transaction the number comes from the Consumer's heartbeat.
    assert stats(shop, LETTER)["running"] == 1


def test_the_database_of_a_consumer_is_used(shop: Shop) -> None:
    for target in ("consumer", "async_consumer", "make"):
        process = shop.start("stats", f"{QUEUES}:{target}", "--json", SQLAQUEUE_URL=None)
        assert process.end() == 0, process.output
        assert json.loads(process.output)[0]["consumers"] == 0


def test_the_queues_of_a_module(shop: Shop) -> None:
    shop.add(Email(status="failed", last_error="ValueError: no"))
    assert {row["queue"] for row in shop.json("stats", MODELS)} == {"email", "letter", "row", "task", "bare"}
    assert "ValueError: no" in shop.ok("failed", MODELS)
    assert shop.invoke("doctor", MODELS).exit_code in {0, 1}


WITH_A_LIST = f"""
from {MODELS} import Email, Newsletter
from {QUEUES} import both
"""
WITH_BOTH = f"""
from {QUEUES} import Consumer, consumer, nothing
a_list = [consumer]
def letters() -> list[Consumer]: raise NotImplementedError
"""
WITH_ANOTHER = f"""
from {QUEUES} import consumer
class Consumer: pass
def of_a_broker() -> Consumer: raise NotImplementedError
"""
WITH_A_FUNCTION = f"""
import {QUEUES} as queues
from {QUEUES} import Consumer
def workers() -> "tuple[Consumer, ...]": return (queues.consumer, queues.async_consumer)
"""


@pytest.mark.parametrize(
    ("code", "queues"),
    [
        (WITH_A_LIST, ["email", "letter"]),
        (WITH_BOTH, ["email"]),
        (WITH_ANOTHER, ["email"]),
        (WITH_A_FUNCTION, ["email", "letter"]),
    ],
    ids=["list", "list and function", "function of another library", "function"],
)
def test_the_consumers_of_a_module_know_its_database(shop: Shop, code: str, queues: list[str]) -> None:
    (shop.directory / "work.py").write_text(code)
    process = shop.start("stats", "work", "--json", SQLAQUEUE_URL=None)
    assert process.end() == 0, process.output
    assert [row["queue"] for row in json.loads(process.output)] == queues


@pytest.mark.parametrize(
    "arguments",
    [("job", MODELS, "1"), ("why", MODELS, "1"), ("jobs", MODELS, "--key", "1"), ("cancel", MODELS, "--key", "1")],
    ids=lambda arguments: arguments[0],
)
def test_a_key_needs_its_queue(shop: Shop, arguments: tuple[str, ...]) -> None:
    result = shop.invoke(*arguments)
    assert result.exit_code == 2
    assert "several queues, and a key belongs to one; name its queue: tests.cli.shop.models:Email, " in result.stderr


def test_an_async_driver(shop: Shop) -> None:
    shop.add(Email())
    url = shop.database.url("asyncpg")
    assert json.loads(shop.ok("stats", EMAIL, "--json", SQLAQUEUE_URL=url))[0]["due"] == 1
    assert shop.ok("cancel", EMAIL, "--yes", SQLAQUEUE_URL=url) == "email: 1 job cancelled\n"


def test_single_jobs_are_listed(shop: Shop) -> None:
    now = datetime.now(UTC)
    shop.add(
        *(
            Email(status="failed", last_error=f"ValueError: {number}", finished_at=now - timedelta(hours=10 - number))
            for number in range(5)
        ),
        Email(),
    )
    found = shop.json("jobs", EMAIL, "--state", "failed", "--limit", "3")
    assert [(job["key"], job["state"], job["last_error"]) for job in found] == [
        (str(key), "failed", f"ValueError: {key - 1}") for key in (5, 4, 3)
    ]
    printed = shop.ok("jobs", EMAIL)
    assert len(printed.splitlines()) == 1 + 6
    assert "ValueError: 4" in printed
    assert shop.ok("jobs", EMAIL, "--state", "cancelled") == "no such jobs\n"
    shop.add(Bare())
    assert "pending" in shop.ok("jobs", BARE)


def test_one_job_is_shown(shop: Shop) -> None:
    shop.add(Email(to="bob@example.com", status="failed", last_error="ValueError: a\nb"), Row(year=1, number="b,c"))
    printed = shop.ok("job", EMAIL, "1")
    assert printed.startswith("email 1 is failed\n")
    assert "bob@example.com" in printed
    found = shop.json("job", ROW, '1,"b,c"')
    assert (found["state"], found["row"]["number"]) == ("pending", "b,c")
    result = shop.invoke("job", EMAIL, "2")
    assert (result.exit_code, result.stderr) == (1, "Error: email: there is no job 2\n")


def test_jobs_of_several_queues_are_told_apart(shop: Shop) -> None:
    """A target may name several Consumers."""
    shop.add(*(kind(status="failed", last_error="ValueError: no") for kind in (Email, Letter)))
    target = f"{QUEUES}:both"
    listed = shop.ok("jobs", target).splitlines()
    assert listed[0].split()[:2] == ["queue", "key"]
    assert [line.split()[:2] for line in listed[-2:]] == [["email", "1"], ["letter", "1"]]
    grouped = shop.ok("failed", target).splitlines()
    assert [line.split()[:2] for line in grouped] == [
        ["queue", "kind"],
        ["email", "ValueError"],
        ["letter", "ValueError"],
    ]
    assert [group["queue"] for group in shop.json("failed", target)] == ["email", "letter"]


# -- why: explanations of jobs and of queues ----------------------------------------------------------------------

IN_2100 = datetime(2100, 1, 1, tzinfo=UTC)


def test_a_job(shop: Shop) -> None:
    shop.add(Email(), Email(status="failed", last_error="ValueError: no", finished_at=IN_2100))
    said = shop.ok("why", EMAIL, "1")
    assert said == (
        "email 1 is pending\n  no_consumer: No live Consumer works for email: all have stopped, or none has run for a "
        "day; start one, for instance with `sqlaqueue worker`.\n"
    )
    assert "email 2 is failed\n  finished: It failed at 2100-01-01" in shop.ok("why", EMAIL, "2")


def test_a_job_as_json(shop: Shop) -> None:
    shop.add(Row(year=1, number="2"))
    found = shop.json("why", ROW, "1,2")
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
        result = shop.invoke("why", TASK, "7", *arguments)
        assert result.exit_code == 1
    assert result.stdout.startswith("task 7 is missing\n  missing: There is no job 7 in task")
    # A single-table subclass selects its own jobs, as in all commands.
    assert shop.invoke("why", NEWSLETTER, "1").exit_code == 1
    shop.add(Newsletter())
    assert shop.invoke("why", NEWSLETTER, "2").exit_code == 0


def test_a_key_of_a_wrong_type(shop: Shop) -> None:
    result = shop.invoke("why", EMAIL, "x")
    assert result.exit_code == 2
    assert "the key 'x': Email.id is an integer, and 'x' is not" in result.stderr


def test_a_queue(shop: Shop) -> None:
    shop.add(Email(run_at=IN_2100), Email(run_at=IN_2100 + timedelta(days=1)), Email(status="failed"))
    assert shop.ok("why", EMAIL).splitlines() == [
        "email",
        "  No live Consumer works for it; start one, for instance with `sqlaqueue worker`.",
        "  Due: 0 jobs; the next one is due at 2100-01-01 00:00:00 UTC.",
        "  Failed: 1 job; `sqlaqueue failed` shows why.",
    ]
    shop.ok("pause", EMAIL)
    shop.execute(
        "INSERT INTO sqlaqueue_consumer (id, queue, name, host, pid, version, listening, running, heartbeat_at, "
        "expires_at) VALUES ('a', 'email', 'a', 'web', 1, '1', true, '[]', now(), now() + interval '1 minute')"
    )
    shop.add(Email(), Email())
    said = shop.ok("why", EMAIL).splitlines()
    assert said[1:3] == [
        "  It is paused, so no job is claimed; `sqlaqueue resume` ends that.",
        "  1 live Consumer works for it; 0 jobs running.",
    ]
    assert said[3].startswith("  Due: 2 jobs, the oldest of them for ")
    report = '[{"failures": 8, "seconds": 5, "error": "column email.note does not exist"}]'
    shop.execute(f"UPDATE sqlaqueue_consumer SET unclaimable = '{report}'")
    said = shop.ok("why", EMAIL).splitlines()
    assert said[3].startswith("  Every claim of a has failed since 2")
    assert said[3].endswith(" UTC: column email.note does not exist.")
    assert [each["failures"] for each in shop.json("why", EMAIL)["claims_fail"]] == [8]


@pytest.mark.parametrize("job", [Letter(), Task(), Bare()], ids=lambda job: type(job).__name__)
def test_a_queue_of_each_strategy(shop: Shop, job: object) -> None:
    shop.add(job)
    found = shop.json("why", f"{MODELS}:{type(job).__name__}")
    assert (found["due"], found["next_due"], found["failed"], found["paused"]) == (1, None, 0, False)


def test_several_queues(shop: Shop) -> None:
    process = shop.start("why", f"{QUEUES}:both", SQLAQUEUE_URL=None)
    assert process.end() == 0
    assert [line.strip() for line in process.lines if not line.startswith(" ")] == ["email", "letter"]
    assert json.loads(shop.ok("why", EMAIL, "--json"))["queue"] == "email"
