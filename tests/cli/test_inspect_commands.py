"""``stats``, ``failed`` and ``workers``."""

from __future__ import annotations

import json
import signal
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.cli.conftest import MODELS, QUEUES, TASKS, Shop
from tests.cli.shop.models import Bare, Email, Letter, Newsletter, Row, Task
from tests.programs import wait_until

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
    found = stats(shop, f"{MODELS}:Email")
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
    assert stats(shop, f"{MODELS}:Email")["expired_leases"] == 2
    assert stats(shop, f"{MODELS}:Letter")["expired_leases"] == 0
    said = " ".join(shop.ok("stats", f"{MODELS}:Email").split())
    assert "email: 2 leases of running jobs have expired; Consumers rescue the jobs, or `sqlaqueue rescue`" in said
    shop.execute("DELETE FROM email WHERE lease_expires_at < now()")
    assert "expired" not in shop.ok("stats", f"{MODELS}:Email")


def test_stats_show_a_missing_index(shop: Shop) -> None:
    shop.execute("DROP INDEX ix_email_queue_claim")
    assert stats(shop, f"{MODELS}:Email")["missing_indexes"] == ["ix_email_queue_claim"]
    said = " ".join(shop.ok("stats", f"{MODELS}:Email").split())
    assert "missing or invalid indexes: ix_email_queue_claim; `alembic revision" in said


def test_stats_of_active_jobs_only(shop: Shop) -> None:
    shop.add(Email(status="completed"), Email())
    found = stats(shop, f"{MODELS}:Email", "--active")
    assert (found["states"], found["failed_by_attempts"]) == ({"pending": 1, "processing": 0}, {})


def test_stats_of_rows_that_are_messages(shop: Shop) -> None:
    shop.add(Task(), Task(run_at=LATER), Task())
    shop.execute("UPDATE task SET run_at = now() - interval '1 hour' WHERE id = 1")
    shop.ok("cancel", f"{MODELS}:Task", "--key", "3", "--yes")
    assert shop.start("worker", f"{MODELS}:Task", "--handler", f"{TASKS}:fall_ill", "--drain").end() == 0
    shop.add(Task(id=9))
    found = stats(shop, f"{MODELS}:Task")
    assert found["states"] == {"pending": 2, "failed": 1, "cancelled": 1}
    assert found["due"] == 1
    assert found["failed_by_attempts"] == {"1": 1}


def test_stats_of_a_model_with_few_attributes(shop: Shop) -> None:
    shop.add(Bare(), Bare(status="failed"))
    found = stats(shop, f"{MODELS}:Bare")
    assert (found["due"], found["oldest_due"], found["failed_by_attempts"]) == (1, None, {})


def test_stats_of_a_subclass_count_only_its_jobs(shop: Shop) -> None:
    shop.add(Email(), Newsletter(), Newsletter(status="failed"))
    assert stats(shop, f"{MODELS}:Newsletter")["states"]["pending"] == 1
    assert stats(shop, f"{MODELS}:Email")["states"]["pending"] == 2


def test_stats_count_unknown_status_values(shop: Shop) -> None:
    shop.add(Email(status="archived"), Email())
    assert stats(shop, f"{MODELS}:Email")["states"]["other"] == 1


def test_the_table_of_stats_shows_paused_queues(shop: Shop) -> None:
    shop.add(Email(), Letter(status="failed", attempts=2))
    shop.ok("pause", f"{MODELS}:Letter")
    printed = shop.ok("stats", f"{MODELS}:Email", f"{MODELS}:Letter")
    header, email, letter, paused, note = printed.splitlines()
    assert header.split()[:2] == ["queue", "pending"]
    assert email.split()[:2] == ["email", "1"]
    assert letter.split()[:4] == ["letter", "0", "0", "1"]
    assert paused == "letter is paused"
    assert note == "letter: failed by attempts: 1 after 2"


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_watching_ends_with_ctrl_c(shop: Shop, options: tuple[str, ...]) -> None:
    shop.add(Email())
    process = shop.start("stats", f"{MODELS}:Email", "--watch", "0.05", *options)
    process.wait_for("email")
    shop.add(Email(status="failed", attempts=41))
    process.wait_for("41" if options else "after 41")
    process.signal(signal.SIGINT)
    assert process.end() == 0
    assert "Traceback" not in process.output
    if options:
        assert json.loads(process.lines[0])[0]["states"]["pending"] == 1


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
    found = shop.json("failed", f"{MODELS}:Email", "--examples", "2")
    assert [(group["kind"], group["count"], group["keys"]) for group in found] == [
        ("ValueError", 5, ["5", "4"]),
        ("", 1, ["7"]),
        ("other", 1, ["6"]),
    ]
    assert found[0]["error"] == "ValueError: 4"
    assert datetime.fromisoformat(found[0]["newest"]) == now - timedelta(hours=6)
    assert found[1]["newest"] is None
    printed = shop.ok("failed", f"{MODELS}:Email")
    assert "(no error)" in printed
    assert "[bold]no colon" in printed
    assert "6 h ago" in printed


def test_an_order_number_is_not_a_kind_of_error(shop: Shop) -> None:
    texts = [
        *("order 1: no stock", "order 2: no stock", "order-3: no stock"),
        *("no_stock: order 4: none", "no_stock: order 5: none", "shop.no_stock: order 6"),
        *("ValueError: ", "the lease expired: its worker died or lost the database"),
    ]
    shop.add(*(Email(status="failed", last_error=text) for text in texts))
    found = {group["kind"]: group["count"] for group in shop.json("failed", f"{MODELS}:Email")}
    assert found == {"other": 3, "no_stock": 2, "shop.no_stock": 1, "ValueError": 1, "LeaseExpired": 1}
    (selected,) = shop.json("requeue", f"{MODELS}:Email", "--dry-run", "--error", "no_stock")
    assert selected["found"] == 2


def test_failed_jobs_with_a_composite_key_and_without_a_status(shop: Shop) -> None:
    shop.add(Row(year=2024, number="a", status="failed", last_error="Oh: no"), Task())
    assert shop.json("failed", f"{MODELS}:Row")[0]["keys"] == ["2024,a"]
    assert shop.ok("failed", f"{MODELS}:Task") == "task: no failed jobs\n"
    assert shop.start("worker", f"{MODELS}:Task", "--handler", f"{TASKS}:fall_ill", "--drain").end() == 0
    (group,) = shop.json("failed", f"{MODELS}:Task")
    assert (group["kind"], group["count"], group["keys"]) == ("ValueError", 1, ["1"])
    assert group["newest"] is not None


def test_failed_jobs_of_a_model_without_last_error(shop: Shop) -> None:
    shop.add(Bare(status="failed"))
    assert shop.json("failed", f"{MODELS}:Bare") == [
        {"queue": "bare", "kind": "", "count": 1, "newest": None, "error": None, "keys": ["1"]}
    ]


def test_workers_shows_the_consumers_of_a_queue(shop: Shop) -> None:
    without = shop.invoke("workers", f"{MODELS}:Email")
    assert (without.exit_code, without.stdout) == (1, "no Consumers\n")
    worker = shop.start("worker", f"{MODELS}:Email", "--handler", f"{TASKS}:send", "--name", "postman")
    wait_until(lambda: shop.invoke("workers", f"{MODELS}:Email", "--here").exit_code == 0, lambda: worker.output)
    (row,) = shop.json("workers", f"{MODELS}:Email")
    assert row["pid"] == worker.pid
    assert row["name"].endswith("postman")
    assert row["running"] == []
    printed = shop.ok("workers", f"{MODELS}:Email")
    assert "postman" in printed
    assert stats(shop, f"{MODELS}:Email")["consumers"] == 1
    # The other queue has no Consumer.
    assert shop.invoke("workers", f"{MODELS}:Email", f"{MODELS}:Letter").exit_code == 1
    worker.signal()
    assert worker.end() == 0
    assert shop.invoke("workers", f"{MODELS}:Email", "--json").exit_code == 1


def test_workers_of_another_machine_are_not_here(shop: Shop) -> None:
    shop.execute(
        "INSERT INTO sqlaqueue_consumer (id, queue, host, pid, version, listening, running, heartbeat_at, expires_at) "
        "VALUES ('x', 'letter', 'elsewhere', 1, '1', true, '[[\"7\"]]', now(), now() + interval '1 minute')"
    )
    assert shop.invoke("workers", f"{MODELS}:Letter").exit_code == 0
    assert shop.invoke("workers", f"{MODELS}:Letter", "--here").exit_code == 1
    # Under a strategy that holds a transaction the number comes from the Consumer's heartbeat.
    assert stats(shop, f"{MODELS}:Letter")["running"] == 1


def test_the_database_of_a_consumer_is_used(shop: Shop) -> None:
    for target in ("consumer", "async_consumer", "make"):
        process = shop.start("stats", f"{QUEUES}:{target}", "--json", SQLAQUEUE_URL=None)
        assert process.end() == 0, process.output
        assert json.loads(process.output)[0]["consumers"] == 0


def test_an_async_driver(shop: Shop) -> None:
    shop.add(Email())
    url = shop.database.url("asyncpg")
    assert json.loads(shop.ok("stats", f"{MODELS}:Email", "--json", SQLAQUEUE_URL=url))[0]["due"] == 1
    assert shop.ok("cancel", f"{MODELS}:Email", "--yes", SQLAQUEUE_URL=url) == "email: 1 job cancelled\n"


def test_single_jobs_are_listed(shop: Shop) -> None:
    now = datetime.now(UTC)
    shop.add(
        *(
            Email(status="failed", last_error=f"ValueError: {number}", finished_at=now - timedelta(hours=10 - number))
            for number in range(5)
        ),
        Email(),
    )
    found = shop.json("jobs", f"{MODELS}:Email", "--state", "failed", "--limit", "3")
    assert [(job["key"], job["state"], job["last_error"]) for job in found] == [
        (str(key), "failed", f"ValueError: {key - 1}") for key in (5, 4, 3)
    ]
    printed = shop.ok("jobs", f"{MODELS}:Email")
    assert len(printed.splitlines()) == 1 + 6
    assert "ValueError: 4" in printed
    assert shop.ok("jobs", f"{MODELS}:Email", "--state", "cancelled") == "no such jobs\n"
    shop.add(Bare())
    assert "pending" in shop.ok("jobs", f"{MODELS}:Bare")


def test_one_job_is_shown(shop: Shop) -> None:
    shop.add(Email(to="bob@example.com", status="failed", last_error="ValueError: a\nb"), Row(year=1, number="b,c"))
    printed = shop.ok("job", f"{MODELS}:Email", "1")
    assert printed.startswith("email 1 is failed\n")
    assert "bob@example.com" in printed
    found = shop.json("job", f"{MODELS}:Row", '1,"b,c"')
    assert (found["state"], found["row"]["number"]) == ("pending", "b,c")
    result = shop.invoke("job", f"{MODELS}:Email", "2")
    assert (result.exit_code, result.stderr) == (1, "Error: email: there is no job 2\n")


def test_jobs_of_several_queues_are_told_apart(shop: Shop) -> None:
    """A target may name several Consumers."""
    shop.add(*(kind(status="failed", last_error="ValueError: no") for kind in (Email, Letter)))
    target = f"{QUEUES}:both"
    listed = shop.ok("jobs", target).splitlines()
    assert listed[0].split()[:2] == ["queue", "key"]
    assert [line.split()[:2] for line in listed[-2:]] == [["email", "1"], ["letter", "1"]]
    grouped = shop.ok("failed", target).splitlines()
    assert [line for line in grouped if line.endswith(":")] == ["email:", "letter:"]
    assert [group["queue"] for group in shop.json("failed", target)] == ["email", "letter"]
