"""The server's settings, its clock, and its notification queue."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from sqlaqueue import Limit, Order
from sqlaqueue.admin.doctor.server import check_clock, check_durability, check_lock_table
from sqlaqueue.admin.doctor.vacuum import check_notification_queue
from tests.doctor_server.examine import apply, codes, find, plain_engine, wait_until
from tests.unique.models import make_job

if TYPE_CHECKING:
    import sqlalchemy as sa

    from tests.servers import Database


@pytest.mark.parametrize(
    ("ahead", "severity", "words"),
    [
        (0, None, ""),
        (1, None, ""),
        (5, "warning", "s ahead of"),
        (-5, "warning", "s behind"),
        (90, "critical", "s ahead of"),
        (-3600, "critical", "s behind"),
    ],
)
def test_clock(engine: sa.Engine, ahead: int, severity: str | None, words: str) -> None:
    check = [partial(check_clock, now=lambda: datetime.now(UTC) + timedelta(seconds=ahead))]
    if severity is None:
        assert codes(engine, checks=check) == []
        return
    finding = find("clock_difference", engine, checks=check)
    assert finding.severity == severity
    assert finding.facts["seconds"] == pytest.approx(ahead, abs=1)
    assert words in finding.summary


def test_a_slow_round_trip_is_no_difference(engine: sa.Engine) -> None:
    def slow() -> datetime:
        time.sleep(0.2)
        return datetime.now(UTC)

    # When the server read its clock within that time is not known.
    check = [partial(check_clock, now=slow)]
    assert codes(engine, checks=check, clock_difference=timedelta(milliseconds=50)) == []


@pytest.mark.parametrize("setting", ["fsync", "full_page_writes", "synchronous_commit"])
def test_durability(own: Database, own_engine: sa.Engine, setting: str) -> None:
    for each in ("fsync", "full_page_writes"):
        apply(own.dsn, f"ALTER SYSTEM SET {each} = on;")
    apply(own.dsn, f"ALTER SYSTEM SET {setting} = off;\nSELECT pg_reload_conf();")
    wait_until(lambda: codes(own_engine, checks=[check_durability]) == [f"{setting}_off"])
    finding = find(f"{setting}_off", own_engine, checks=[check_durability])
    assert finding.severity == ("notice" if setting == "synchronous_commit" else "critical")
    assert "configuration file" in finding.summary
    apply(own.dsn, finding.fixes[0])
    wait_until(lambda: codes(own_engine, checks=[check_durability]) == [])


def test_a_setting_of_the_engine(own: Database) -> None:
    engine = plain_engine(own.url(), connect_args={"options": "-c synchronous_commit=off"})
    finding = find("synchronous_commit_off", engine, checks=[check_durability])
    assert "options of this connection" in finding.summary
    assert "Remove it from the options of the engine" in finding.fixes[0]
    engine.dispose()


def test_a_setting_of_the_role(database: Database) -> None:
    with database.connect() as admin:
        admin.execute("CREATE ROLE hasty LOGIN")
        admin.execute("ALTER ROLE hasty SET synchronous_commit = off")
        engine = plain_engine(database.url().replace("postgres@", "hasty@"))
        try:
            finding = find("synchronous_commit_off", engine, checks=[check_durability])
            assert finding.fixes == ("ALTER ROLE hasty RESET synchronous_commit;",)
            apply(database.dsn, finding.fixes[0])
            assert "synchronous_commit_off" not in codes(engine, checks=[check_durability])
        finally:
            engine.dispose()
            admin.execute("DROP ROLE hasty")


def test_lock_table(own: Database, own_engine: sa.Engine) -> None:
    apply(own.dsn, "ALTER SYSTEM SET max_locks_per_transaction = 10;")
    own_engine.dispose()
    own.server.restart()
    flow: dict[str, Any] = {"limits": [Limit(2, per="key"), Limit(5)], "order": Order("note", by="id")}
    flow["columns"] = {"started_at": "started_at"}
    checks = [check_lock_table]
    for model in (make_job("update_status", None, **flow), make_job("batch_select", None, limits=[Limit(5)])):
        assert codes(own_engine, [model], checks) == []
    job = make_job("batch_select", None, **flow)
    finding = find("small_lock_table", own_engine, [job], checks)
    assert (finding.severity, finding.queue) == ("notice", "job")
    assert finding.facts["locks_of_claim"] == 1001
    apply(own.dsn, finding.fixes[0])
    own.server.restart()
    assert codes(own_engine, [job], checks) == []


def notify(database: Database, number: int) -> None:
    with database.connect() as connection:
        for each in range(number):
            connection.execute("SELECT pg_notify('jobs', %s)", [f"{each:07900d}"])


def test_a_listener_in_a_transaction(database: Database, engine: sa.Engine) -> None:
    # On a server that other tests use, the queue has little room to fill.
    check, limits = [check_notification_queue], {"notification_queue": 1e-9}
    with psycopg.connect(database.dsn, application_name="deaf") as listener:
        listener.execute("LISTEN jobs")
        listener.commit()
        listener.execute("SELECT 1")
        notify(database, 10)
        assert codes(engine, checks=check) == []
        finding = find("notification_queue_full", engine, checks=check, **limits)
        assert finding.severity == "warning"
        assert finding.facts["usage"] > 0


def test_a_full_queue(own: Database, own_engine: sa.Engine) -> None:
    if own.version < 17:
        pytest.skip("the size of the queue can be set from PostgreSQL 17 on; it is 8 GB before")
    apply(own.dsn, "ALTER SYSTEM SET max_notify_queue_pages = 64;")
    own_engine.dispose()
    own.server.restart()
    check = [check_notification_queue]
    listener = psycopg.connect(own.dsn, application_name="deaf")
    listener.execute("LISTEN jobs")
    listener.commit()
    notify(own, 20)
    assert codes(own_engine, checks=check) == []
    listener.execute("SELECT 1")
    notify(own, 20)
    assert codes(own_engine, checks=check) == []
    notify(own, 20)
    assert find("notification_queue_full", own_engine, checks=check).severity == "warning"
    notify(own, 20)
    finding = find("notification_queue_full", own_engine, checks=check)
    assert finding.severity == "critical"
    assert f"Session {listener.info.backend_pid} " in finding.summary
    assert "'deaf'" in finding.summary
    with own.connect() as other, pytest.raises(psycopg.errors.ProgramLimitExceeded):
        for _ in range(20):
            other.execute("SELECT pg_notify('jobs', %s)", ["x" * 7900])
    apply(own.dsn, finding.fixes[0])
    wait_until(lambda: codes(own_engine, checks=check) == [])
    listener.close()
