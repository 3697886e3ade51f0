"""The server's settings, its clock and its notification queue; connections, poolers, and locked tables."""

import asyncio
import re
import threading
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from sqlaqueue import ConcurrencyLimit, InOrder
from sqlaqueue.admin.doctor.examination import Examination, Thresholds
from sqlaqueue.admin.doctor.server import (
    check_clock,
    check_durability,
    check_lock_table,
    check_pool,
    check_pooler,
    check_server_connections,
)
from sqlaqueue.admin.doctor.vacuum import check_notification_queue
from tests.doctor.conftest import Patient, apply, codes, find, new_role, plain_engine, restart_with
from tests.doctor.models import Email
from tests.programs import wait_until
from tests.servers import PROGRAM, Database, Pooler
from tests.unique.models import make_job


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


def test_a_setting_of_the_role(database: Database) -> None:
    with new_role(database, "hasty") as hasty:
        apply(database.dsn, "ALTER ROLE hasty SET synchronous_commit = off;")
        finding = find("synchronous_commit_off", hasty, checks=[check_durability])
        assert finding.fixes == ("ALTER ROLE hasty RESET synchronous_commit;",)
        apply(database.dsn, finding.fixes[0])
        assert "synchronous_commit_off" not in codes(hasty, checks=[check_durability])


def test_lock_table(own: Database, own_engine: sa.Engine) -> None:
    restart_with(own, "max_locks_per_transaction = 10")
    flow: dict[str, Any] = {
        "flow_control": [ConcurrencyLimit(2, per="key"), ConcurrencyLimit(5), InOrder("note", by="id")]
    }
    checks = [check_lock_table]
    for model in (
        make_job("update_status", None, **flow),
        make_job("batch_select", None, flow_control=[ConcurrencyLimit(5)]),
    ):
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
    restart_with(own, "max_notify_queue_pages = 64")
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


# -- connections that run out, and poolers -------------------------------------------------------------------------

needs_pgbouncer = pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed; apt-get install pgbouncer")


def test_connections_of_the_server(own: Database, own_engine: sa.Engine) -> None:
    restart_with(own, "max_connections = 23")
    check = [check_server_connections]
    # Three are reserved for superusers; the examination has one as well.
    opened = [psycopg.connect(own.dsn, application_name="leak's", autocommit=True) for _ in range(16)]
    assert codes(own_engine, checks=check) == []
    opened.append(psycopg.connect(own.dsn, application_name="other", autocommit=True))
    finding = find("connections_used", own_engine, checks=check, connection_idle=timedelta(0))
    assert finding.summary.startswith("18 of the server's 20 connections are in use: 16 of the role postgres and the")
    assert repr("leak's") in finding.summary
    # Sessions that were used just now are not ended.
    assert "max_connections" in find("connections_used", own_engine, checks=check).fixes[0]
    apply(own.dsn, finding.fixes[0])
    assert codes(own_engine, checks=check) == []
    for connection in opened:
        connection.close()


def test_the_other_fix_raises_the_limit(own: Database, own_engine: sa.Engine) -> None:
    check = [check_server_connections]
    finding = find("connections_used", own_engine, checks=check, connections_used=0.001)
    apply(own.dsn, finding.fixes[-1])
    own.server.restart()
    assert find("connections_used", own_engine, checks=check, connections_used=0.001).facts["limit"] == 2 * 297 - 3


@pytest.mark.parametrize(
    ("size", "overflow", "expected"), [(1, 0, ["small_pool"]), (1, 1, []), (5, 10, []), (1, -1, [])]
)
def test_pool(database: Database, size: int, overflow: int, expected: list[str]) -> None:
    engine = sa.create_engine(database.url(), pool_size=size, max_overflow=overflow)
    assert codes(engine, checks=[check_pool]) == expected
    if expected:
        assert "pool_size=2" in find("small_pool", engine, checks=[check_pool]).consequence
    engine.dispose()


def options(driver: str) -> dict[str, Any]:
    return {"connect_args": {"prepare_threshold": None}} if driver == "psycopg" else {}


@needs_pgbouncer
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
@pytest.mark.parametrize("pool_size", [1, 5])
def test_pooler_in_transaction_mode(database: Database, driver: str, pool_size: int) -> None:
    with Pooler(database, "transaction") as pooler:
        # Also where the examination has the only connection of the engine's pool.
        engine = sa.create_engine(pooler.url(driver), pool_size=pool_size, max_overflow=0, **options(driver))
        finding = find("transaction_pooler", engine, checks=[check_pooler])
        assert finding.severity == "warning"
        first, _, last = finding.facts["pids"]
        assert f"the processes {first} and {last}" in finding.summary
        assert str(database.server.directory) in finding.summary
        engine.dispose()
    found = re.search(r"SQLAQUEUE_URL='(.*)'", finding.fixes[0])
    assert found is not None
    direct = plain_engine(found[1])
    assert codes(direct, checks=[check_pooler]) == []


@needs_pgbouncer
def test_pooler_in_session_mode(database: Database) -> None:
    with Pooler(database, "session") as pooler:
        engine = sa.create_engine(pooler.url("psycopg"), **options("psycopg"))
        assert codes(engine, checks=[check_pooler]) == []
        engine.dispose()


@needs_pgbouncer
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_pooler_without_a_free_connection(database: Database, driver: str) -> None:
    with Pooler(database, "transaction", size=1) as pooler:
        engine = sa.create_engine(pooler.url(driver), **options(driver))
        limits = {"statement_timeout": timedelta(seconds=1)}
        finding = find("transaction_pooler", engine, checks=[check_pooler], **limits)
        assert finding.severity == "notice"
        assert "its mode is not known" in finding.summary
        engine.dispose()


def codes_of_async_engine(url: str, **options: Any) -> list[str]:
    def check(connection: sa.Connection) -> list[str]:
        return [each.code for each in check_pooler(Examination(connection, [], Thresholds(), deep=False))]

    async def run() -> list[str]:
        engine = create_async_engine(url, **options)
        async with engine.connect() as connection:
            found = await connection.run_sync(check)
        await engine.dispose()
        return found

    return asyncio.run(run())


def test_async_engine(database: Database) -> None:
    assert codes_of_async_engine(database.url("asyncpg")) == []


@needs_pgbouncer
def test_async_engine_behind_a_pooler(database: Database) -> None:
    unprepared = {"statement_cache_size": 0, "prepared_statement_cache_size": 0}
    with Pooler(database, "transaction") as pooler:
        url = pooler.url("asyncpg")
        assert codes_of_async_engine(url, connect_args=unprepared, pool_size=1, max_overflow=0) == [
            "transaction_pooler"
        ]


# -- a session that has locked a table of a queue is named, not those that wait for it -----------------------------


def test_the_session_that_others_wait_for(patient: Patient) -> None:
    limits = {"blocked_for": timedelta(0), "transaction_open": timedelta(0), "lock_timeout": timedelta(milliseconds=10)}
    with patient.database.connect() as holder, patient.database.connect() as waiter:
        holder.execute("BEGIN")
        holder.execute("LOCK TABLE email IN ACCESS EXCLUSIVE MODE")
        pids = [connection.info.backend_pid for connection in (holder, waiter)]
        thread = threading.Thread(target=waiter.execute, args=["SELECT count(*) FROM email"])
        thread.start()
        wait_until(lambda: patient.execute("SELECT FROM pg_locks WHERE NOT granted AND waitstart IS NOT NULL"))
        found = patient.findings(Email, **limits)
        blocked = [each for each in found if each.code == "blocked_table"]
        assert [(each.facts["pid"], each.facts["waiting"], each.facts["tables"]) for each in blocked] == [
            (pids[0], 1, ["email"])
        ]
        assert found[0].severity == "critical"
        assert f"Session {pids[0]} " in blocked[0].summary
        assert blocked[0].summary.endswith("It is idle in a transaction; its last statement: LOCK email.")
        assert not any(f"pg_terminate_backend({pids[1]})" in fix for each in found for fix in each.fixes), "it waits"
        patient.repair(blocked[0].fixes[0])
        holder.close()
        thread.join(30)
        assert not thread.is_alive()
        assert [each for each in patient.findings(Email, **limits) if each.code == "blocked_table"] == []


def test_a_lock_that_nobody_waits_for_is_none(patient: Patient) -> None:
    with patient.database.connect() as holder:
        holder.execute("BEGIN")
        holder.execute("LOCK TABLE email IN SHARE UPDATE EXCLUSIVE MODE")
        assert patient.findings(Email, blocked_for=timedelta(0)) == []
        holder.execute("ROLLBACK")
