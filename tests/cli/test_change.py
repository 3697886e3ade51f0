"""``requeue``, ``cancel``, ``purge``, ``rescue``, ``reconcile``, ``pause``, ``resume``, and their functions."""

import os
import pty
import subprocess
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import claim
from sqlaqueue.admin import Cancelled, JobFilter, QueueAdmin
from sqlaqueue.admin.changes import in_batches, purge_some, requeue_some
from tests.cli.conftest import BARE, COMMAND, EMAIL, LETTER, MODELS, NEWSLETTER, ROW, SEND, TASK, Shop
from tests.cli.shop.models import Bare, Email, Letter, Newsletter, Row, Task
from tests.cli.shop.queues import Base, Sync

pytestmark = pytest.mark.once

NOW = datetime.now(UTC)


def days(number: float) -> datetime:
    return NOW - timedelta(days=number)


def keys(shop: Shop, where: str, table: str = "email") -> list[int]:
    return [row[0] for row in shop.execute(f"SELECT id FROM {table} WHERE {where} ORDER BY id")]


def test_requeue_changes_failed_jobs_only(shop: Shop) -> None:
    shop.add(Email(status="failed", attempts=2), Email(status="completed"), Email(status="cancelled"), Email())
    printed = shop.ok("requeue", EMAIL, "--yes")
    assert printed == "email: 1 job requeued\n"
    assert keys(shop, "status = 'pending'") == [1, 4]
    assert keys(shop, "attempts = 0") == [1, 2, 3, 4]


def test_options_select_jobs(shop: Shop) -> None:
    shop.add(
        *(
            Email(status="failed", last_error=error, finished_at=days(age))
            for error, age in [("ValueError: a", 9), ("ValueError: b", 1), ("Value: c", 9), (None, 9)]
        )
    )

    def selected(*options: str) -> int:
        (found,) = shop.json("requeue", EMAIL, "--dry-run", *options)
        assert found["changed"] == 0
        return int(found["found"])

    assert selected() == 4
    assert selected("--kind", "ValueError") == 2
    assert selected("--kind", "ValueError", "--older-than", "7d") == 1
    assert selected("--newer-than", "1w") == 1
    assert selected("--kind", "") == 1
    assert selected("--key", "1", "--key", "3", "--key", "99") == 2
    assert selected("--state", "cancelled", "--state", "completed") == 0
    assert selected("--limit", "3") == 3
    assert keys(shop, "status = 'failed'") == [1, 2, 3, 4]
    shop.ok("requeue", EMAIL, "--yes", "--kind", "ValueError", "--older-than", "7d12h")
    assert keys(shop, "status = 'pending'") == [1]


def test_it_asks_for_confirmation(shop: Shop) -> None:
    shop.add(Email(status="failed"), Email(status="completed"))
    for answer in ("n\n", ""):
        result = shop.invoke("purge", EMAIL, answer=answer)
        assert result.exit_code == 1
        assert "email: 2 jobs (1 completed, 1 failed) will be deleted. Continue?" in result.stderr
    assert len(keys(shop, "true")) == 2
    result = shop.invoke("purge", EMAIL, answer="y\n")
    assert (result.exit_code, result.stdout) == (0, "email: 2 jobs deleted\n")
    assert keys(shop, "true") == []
    # Without jobs it does not ask.
    assert shop.ok("purge", EMAIL) == "email: no jobs to delete\n"


def test_a_dry_run_shows_the_number_and_changes_nothing(shop: Shop) -> None:
    shop.add(Email(status="failed"), Email(), Email())
    assert shop.ok("purge", EMAIL, "--dry-run") == "email: 1 job (1 failed) would be deleted\n"
    printed = shop.ok("cancel", EMAIL, "--dry-run")
    assert printed == "email: 2 jobs (2 pending) would be cancelled or asked to stop\n"
    assert shop.states("email") == {"failed": 1, "pending": 2}


def test_purge_deletes_old_jobs_in_batches(shop: Shop) -> None:
    shop.add(
        *(Email(status="completed", finished_at=days(8)) for _ in range(25)),
        *(Email(status="completed", finished_at=days(1)) for _ in range(5)),
        Email(status="failed", finished_at=days(8)),
    )
    committed: list[int] = []
    which = JobFilter(states=("completed",), older_than=timedelta(days=7))
    with Session(shop.engine) as session:
        for number in in_batches(session, Email, which, purge_some, size=10):
            assert not session.in_transaction()
            committed.append(number)
    assert committed == [10, 10, 5]
    assert shop.states("email") == {"completed": 5, "failed": 1}
    shop.ok("purge", EMAIL, "--yes", "--batch-size", "2", "--limit", "3")
    assert len(keys(shop, "true")) == 3


def test_cancel_cancels_pending_jobs_and_asks_running_ones_to_stop(shop: Shop) -> None:
    shop.add(Email(), Email(created_at=days(2)), Email(status="processing"), Newsletter())
    assert shop.ok("cancel", NEWSLETTER, "--yes") == "email: 1 job cancelled\n"
    assert shop.ok("cancel", EMAIL, "--yes", "--older-than", "1d") == "email: 1 job cancelled\n"
    assert keys(shop, "status = 'cancelled'") == [2, 4]
    assert shop.ok("cancel", EMAIL, "--yes", "--state", "processing") == (
        "email: 0 jobs cancelled, 1 job running and asked to stop\n"
    )
    assert [tuple(row) for row in shop.execute("SELECT queue, key FROM sqlaqueue_control")] == [("email", [3])]
    assert keys(shop, "status = 'pending'") == [1]
    told = shop.ok("cancel", EMAIL, "--yes", "--key", "1", "--key", "2", "--key", "99")
    assert told == "email: 1 job cancelled, 2 jobs neither pending nor running: 2 99\n"
    told = shop.ok("cancel", EMAIL, "--key", "99")
    assert told == "email: 0 jobs cancelled, 1 job neither pending nor running: 99\n"
    (found,) = shop.json("cancel", EMAIL, "--yes", "--key", "3", "--key", "99")
    assert found == {"queue": "email", "found": 1, "changed": 0, "asked": [3], "missing": [99]}


def test_composite_keys(shop: Shop) -> None:
    shop.add(*(Row(year=2024, number=number, status="failed") for number in ("a", "b,c", "d")))
    shop.ok("requeue", ROW, "--yes", "--key", '2024,"b,c"', "--key", "2024,a", "--batch-size", "1")
    assert shop.states("row") == {"pending": 2, "failed": 1}
    result = shop.invoke("requeue", ROW, "--yes", "--key", "2024")
    assert result.exit_code == 2
    assert "Row has a key of 2 columns; write it as year,number" in result.stderr


def test_rows_that_are_messages(shop: Shop) -> None:
    shop.add(*(Task() for _ in range(4)))
    shop.ok("cancel", TASK, "--yes", "--key", "4")
    assert shop.start("worker", TASK, "--handler", f"{MODELS}:fall_ill", "--drain").end() == 0
    assert keys(shop, "true", "task") == []

    def selected(*options: str) -> int:
        return int(shop.json("requeue", TASK, "--dry-run", *options)[0]["found"])

    assert selected() == 3
    assert selected("--state", "cancelled") == 1
    assert selected("--kind", "ValueError") == 3
    assert selected("--kind", "ValueError", "--newer-than", "1h", "--key", "2") == 1
    assert selected("--older-than", "1h") == 0
    shop.ok("requeue", TASK, "--yes", "--key", "2")
    assert keys(shop, "true", "task") == [2]
    assert shop.ok("purge", TASK, "--yes", "--state", "cancelled") == "task: 1 job deleted\n"
    assert shop.ok("purge", TASK, "--yes", "--batch-size", "1") == "task: 2 jobs deleted\n"
    for verb in ("rescue", "reconcile"):
        assert "0 jobs" in shop.ok(verb, TASK)


def test_a_job_changed_after_it_was_counted_is_not_changed(shop: Shop) -> None:
    shop.add(Email(status="failed"), Email(status="failed"))
    which = JobFilter(states=("failed",))
    with Session(shop.engine) as session:
        shop.execute("UPDATE email SET status = 'completed' WHERE id = 1")
        assert requeue_some(session, Email, which, [(1,), (2,)]) == 1
        session.commit()
    assert shop.states("email") == {"completed": 1, "pending": 1}


def test_a_locked_row_is_skipped(shop: Shop) -> None:
    shop.add(*(Email(status="completed") for _ in range(3)))
    with shop.engine.begin() as other:
        other.execute(sa.text("SELECT FROM email WHERE id = 2 FOR UPDATE"))
        assert shop.ok("purge", EMAIL, "--yes", "--batch-size", "2") == "email: 2 jobs deleted\n"
    assert keys(shop, "true") == [2]


def test_rescue_releases_expired_leases(shop: Shop) -> None:
    shop.add(*(Email(status="processing", attempts=1, lease_expires_at=days(1)) for _ in range(2)))
    shop.execute("UPDATE email SET lease_token = gen_random_uuid()")
    assert shop.ok("rescue", EMAIL, "--dry-run") == "email: 2 jobs would be rescued\n"
    assert shop.states("email") == {"processing": 2}
    assert shop.json("rescue", EMAIL) == [{"queue": "email", "found": 2, "changed": 2}]
    assert shop.states("email") == {"pending": 2}


def test_reconcile_repairs_what_bypassed_the_triggers(shop: Shop) -> None:
    shop.execute("SET LOCAL session_replication_role = replica; INSERT INTO letter (status) VALUES ('pending')")
    assert shop.ok("reconcile", LETTER, "--dry-run") == "letter: 1 job would be reconciled\n"
    assert shop.ok("reconcile", LETTER) == "letter: 1 job reconciled\n"
    assert shop.ok("reconcile", LETTER) == "letter: 0 jobs reconciled\n"


def test_options_for_attributes_that_the_model_leaves_out(shop: Shop) -> None:
    shop.add(Bare(status="failed"))
    for option, attribute in [("--older-than=1d", "finished_at"), ("--kind=ValueError", "last_error")]:
        result = shop.invoke("requeue", BARE, "--yes", option)
        assert result.exit_code == 2
        assert f"needs the queue attribute '{attribute}', which Bare leaves out" in result.stderr
    assert shop.ok("requeue", BARE, "--yes") == "bare: 1 job requeued\n"


def test_pause_and_resume(shop: Shop) -> None:
    shop.add(Letter(), Email())
    assert shop.ok("pause", LETTER, EMAIL) == "letter is paused\nemail is paused\n"
    assert shop.ok("pause", LETTER, "--reason", "the office is closed") == "letter is paused\n"
    with Session(shop.engine) as session:
        told = QueueAdmin(session, Letter).pause_info()
        assert told is not None
        assert told.reason == "the office is closed"
        assert told.author
    refused = shop.invoke("pause", EMAIL, "--reason", "x" * 201)
    assert (refused.exit_code, "at most 200 characters" in refused.stderr) == (2, True)
    assert shop.json("resume", EMAIL) == [{"queue": "email", "paused": False}]
    drain = (*SEND, "--drain")
    assert shop.start("worker", LETTER, EMAIL, *SEND, *drain).end() == 0
    assert shop.done() == {("email", "1"): 1}
    assert shop.ok("resume", LETTER) == "letter is resumed\n"
    assert shop.start("worker", LETTER, *drain).end() == 0
    assert ("letter", "1") in shop.done()


def test_no_row_is_locked_between_two_batches(shop: Shop) -> None:
    shop.add(*(Email(status="failed") for _ in range(4)))
    with Session(shop.engine) as session:
        batches = in_batches(session, Email, JobFilter(states=("failed",)), requeue_some, size=2)
        assert next(batches) == 2
        assert len(shop.execute("SELECT id FROM email FOR UPDATE NOWAIT")) == 4
        assert list(batches) == [2]


def test_requeue_names_the_duplicates_of_jobs_that_it_cancels(shop: Shop) -> None:
    Base.metadata.create_all(shop.engine)
    for customer, status in [(1, "failed"), (1, "pending"), (2, "failed"), (2, "pending"), (3, "failed")]:
        shop.add(Sync(customer=customer, status=status))
    target = "tests.cli.shop.queues:Sync"
    (found,) = shop.json("requeue", target, "--yes", "--key", "1")
    assert (found["changed"], found["duplicates"], found["left"]) == (0, {"1": "2"}, [])
    printed = shop.ok("requeue", target, "--yes")
    assert printed == "sync: 1 job requeued, 1 job not, because of a duplicate: 3 (duplicate 4)\n"
    assert keys(shop, "status = 'cancelled'", "sync") == [1, 3]


def test_requeue_says_which_jobs_the_database_refuses(shop: Shop) -> None:
    shop.add(Email(status="failed", to="refused"), Email(status="failed"), Email(status="failed"))
    shop.execute("ALTER TABLE email ADD CONSTRAINT rule CHECK (status <> 'pending' OR \"to\" <> 'refused')")
    (found,) = shop.json("requeue", EMAIL, "--yes", "--key", "1", "--key", "2")
    assert found["changed"] == 1
    assert list(found["refused"]) == ["1"]
    assert "rule" in found["refused"]["1"]
    printed = shop.ok("requeue", EMAIL, "--yes")
    assert printed.startswith("email: 1 job requeued, 1 job not, as the database refuses: 1 (")


# -- the functions behind the commands ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [Email, Letter, Row, Task])
def test_cancel_returns_the_outcome_of_each_job(shop: Shop, model: Any) -> None:
    """A running job is held by another worker, by a lease or its transaction."""
    new: Any = (lambda number: Row(year=1, number=str(number))) if model is Row else (lambda _: model())
    with Session(shop.engine) as session, Session(shop.engine) as worker:
        jobs = [new(number) for number in range(4)]
        session.add_all(jobs)
        session.commit()
        keys = [sa.inspect(job).identity for job in jobs]
        keys = [key if len(key) > 1 else key[0] for key in keys]
        [held] = worker.scalars(claim(model, 1)).all()
        if model is Email:
            worker.commit()
        running = sa.inspect(held).identity
        running = running if len(running) > 1 else running[0]
        waiting = [key for key in keys if key != running]
        session.delete(jobs[keys.index(waiting[0])])
        session.commit()
        admin = QueueAdmin(session, model)
        done = admin.cancel(jobs)
        assert done == Cancelled(cancelled=waiting[1:], asked=[running], missing=[waiting[0]])
        # Of a class or a select no job is missing.
        assert admin.cancel() == Cancelled(asked=[running])
        text, unknown = ("9,9", (9, "9")) if model is Row else ("99", 99)
        named = JobFilter(states=("pending", "processing"), keys=(text,))
        assert admin.cancel(sa.select(model), named) == Cancelled(missing=[unknown])
        worker.rollback()


@pytest.mark.parametrize("size", [1, 1000])
def test_cancel_in_batches(shop: Shop, size: int) -> None:
    shop.add(*(Email() for _ in range(5)), Email(status="processing"), Email(status="completed"))
    with Session(shop.engine) as session:
        done = QueueAdmin(session, Email).cancel(sa.select(Email).where(Email.id != 2), batch_size=size)
        assert done == Cancelled(cancelled=[1, 3, 4, 5], asked=[6])
        jobs = session.scalars(sa.select(Email).order_by(Email.id)).all()
        done = QueueAdmin(session, Email).cancel(jobs, batch_size=size)
        assert done == Cancelled(cancelled=[2], asked=[6], missing=[1, 3, 4, 5, 7])


def test_a_job_with_a_dead_letter_is_shown(shop: Shop) -> None:
    with Session(shop.engine) as session:
        session.add(Task())
        session.commit()
        assert QueueAdmin(session, Task).cancel().cancelled == [1]
        info, row = QueueAdmin(session, Task).job(1) or (None, {})
        assert (info.state, row["id"]) == ("cancelled", 1)


# -- progress ------------------------------------------------------------------------------------------------------


def on_terminal(shop: Shop, *arguments: str) -> tuple[str, str]:
    """Run a command whose standard error is a terminal; return what it writes to the terminal, and its output."""
    terminal, end = pty.openpty()
    try:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=end, text=True, env=shop.environment, check=True
        )
        os.write(end, b"end")
        shown = b""
        while not shown.endswith(b"end"):
            shown += os.read(terminal, 65536)
    finally:
        os.close(end)
        os.close(terminal)
    return shown.decode().removesuffix("end"), done.stdout


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("command", "status"), [("requeue", "failed"), ("cancel", "pending"), ("purge", "completed"), ("reconcile", None)]
)
def test_progress_is_shown_on_a_terminal(shop: Shop, command: str, status: str | None) -> None:
    options = ["--yes", "--batch-size", "7"] if status else []
    target = EMAIL if status else LETTER
    shop.add(*(Email(status=status or "pending") for _ in range(20)))
    shown, output = on_terminal(shop, command, target, *options)
    assert ("20/20" in shown) == (status is not None)
    assert ("email" if status else "letter") in shown
    assert "20 jobs" in output if status else "0 jobs" in output
    # The line is removed at the end, and never in the output.
    assert "/20" not in output


def test_progress_is_not_shown_elsewhere(shop: Shop) -> None:
    shop.add(*(Email(status="failed") for _ in range(3)))
    assert on_terminal(shop, "requeue", EMAIL, "--yes", "--json", "--limit", "1")[0] == ""
    result = shop.invoke("requeue", EMAIL, "--yes")
    assert (result.stdout, result.stderr) == ("email: 2 jobs requeued\n", "")
