"""What keeps dead rows is named, and the fix ends it: sessions, slots, prepared transactions and standbys."""

import contextlib
import re
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from sqlaqueue.admin.doctor.server import check_server
from sqlaqueue.admin.doctor.vacuum import check_horizon
from sqlaqueue.postgresql.catalog_text import statement_kind
from tests.doctor.conftest import apply, codes, examine, find, new_role, plain_engine, restart_with
from tests.models import make_job
from tests.programs import wait_until
from tests.servers import Database, Server, standby_of

CHECK = [check_horizon]
AT_ONCE = {"transaction_open": timedelta(0)}
FEEDBACK = "hot_standby_feedback = on"


@contextlib.contextmanager
def session(database: Database, application: str) -> Iterator[psycopg.Connection[Any]]:
    connection = psycopg.connect(database.dsn, application_name=application)
    try:
        yield connection
    finally:
        connection.close()


def consume_ids(database: Database, number: int) -> None:
    with database.connect() as connection:
        for _ in range(number):
            connection.execute("SELECT pg_current_xact_id()")


def vacuum_removes_a_dead_row(database: Database) -> bool:
    """Tell whether VACUUM removes a row that dies now."""
    with database.connect() as connection:
        connection.execute("DROP TABLE IF EXISTS t")
        connection.execute("CREATE TABLE t AS SELECT 1 AS a")
        connection.execute("DELETE FROM t")
    return vacuum_empties_the_table(database)


def vacuum_empties_the_table(database: Database) -> bool:
    with database.connect() as connection:
        connection.execute("VACUUM t")
        pages = connection.execute("SELECT pg_relation_size('t')").fetchone()
    return pages == (0,)


@pytest.mark.parametrize(
    ("isolation", "statement"),
    [("READ COMMITTED", "SELECT pg_current_xact_id()"), ("REPEATABLE READ", "SELECT 1 AS snapshot")],
)
def test_idle_in_transaction(database: Database, engine: sa.Engine, isolation: str, statement: str) -> None:
    with session(database, "forgotten") as idle:
        idle.execute(f"SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {isolation}".encode())
        idle.commit()
        idle.execute(statement.encode())
        consume_ids(database, 3)
        assert codes(engine, checks=CHECK) == []
        assert not vacuum_removes_a_dead_row(database)
        finding = find("idle_in_transaction", engine, checks=CHECK, **AT_ONCE)
        pid = idle.info.backend_pid
        for part in (f"Session {pid} ", "role postgres", "'forgotten'", "idle in a transaction"):
            assert part in finding.summary
        assert finding.summary.endswith("; its last statement: SELECT.")
        assert finding.facts["age"] >= 3
        assert finding.facts["seconds"] > 0
        assert codes(engine, checks=CHECK, horizon_age=2) == ["idle_in_transaction"]
        apply(database.dsn, finding.fixes[0])
        wait_until(lambda: codes(engine, checks=CHECK, **AT_ONCE) == [])
        assert vacuum_removes_a_dead_row(database)


def test_the_second_fix_limits_idle_transactions_of_the_role(database: Database, engine: sa.Engine) -> None:
    with new_role(database, "careless") as careless:
        idle = psycopg.connect(database.dsn.replace("user=postgres", "user=careless"))
        idle.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        idle.execute("SELECT 1")
        finding = find("idle_in_transaction", engine, [make_job("batch_select")], CHECK, **AT_ONCE)
        assert "handlers" in finding.fixes[1]
        apply(database.dsn, finding.fixes[1])
        wait_until(lambda: codes(engine, checks=CHECK, **AT_ONCE) == [])
        idle.close()
        with careless.connect() as again:
            assert again.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar() == "5min"


def test_a_transaction_without_a_snapshot_keeps_nothing(database: Database, engine: sa.Engine) -> None:
    with session(database, "reader") as idle:
        idle.execute("SELECT 1")
        assert codes(engine, checks=CHECK, **AT_ONCE) == []
        assert vacuum_removes_a_dead_row(database)


def test_sessions_of_other_databases_keep_nothing(server: Server, database: Database, engine: sa.Engine) -> None:
    with server.database() as other, session(other, "elsewhere") as idle:
        idle.execute("SELECT pg_current_xact_id()")
        assert codes(engine, checks=CHECK, **AT_ONCE) == []
        assert vacuum_removes_a_dead_row(database)


def test_long_statement(database: Database, engine: sa.Engine) -> None:
    with session(database, "report") as busy:

        def run() -> None:
            with contextlib.suppress(psycopg.Error):
                busy.execute("SELECT pg_sleep(600)")

        thread = threading.Thread(target=run)
        thread.start()
        wait_until(lambda: codes(engine, checks=CHECK, **AT_ONCE))
        finding = find("long_transaction", engine, checks=CHECK, **AT_ONCE)
        assert f"Session {busy.info.backend_pid} " in finding.summary
        assert finding.summary.endswith("; its last statement: SELECT.")
        apply(database.dsn, finding.fixes[0])
        thread.join()
        wait_until(lambda: codes(engine, checks=CHECK, **AT_ONCE) == [])


def test_no_value_of_a_statement_is_told(database: Database, engine: sa.Engine) -> None:
    with session(database, "careless") as idle:
        idle.execute("CREATE TABLE customer (name text, card text)")
        idle.execute("INSERT INTO customer (name, card) VALUES ('Ada', 'secret')")
        finding = find("idle_in_transaction", engine, checks=CHECK, **AT_ONCE)
        assert finding.summary.endswith("; its last statement: INSERT customer.")
        assert "secret" not in repr(finding)
        assert finding.facts["statement"] == "INSERT customer"


@pytest.mark.once
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("UPDATE public.email SET to_ = 'secret'", "UPDATE public.email"),
        ("select a, lower(b) from only email where c = 'secret'", "SELECT email"),
        ("SELECT 'secret FROM secret'", "SELECT"),
        ("SELECT $$ FROM secret $$", "SELECT"),
        ("SELECT E'\\' FROM secret'", "SELECT"),
        ("SELECT a /* secret FROM secret */ FROM email", "SELECT"),
        ("/* secret */ -- secret\n DELETE FROM email", "DELETE email"),
        ("/* secret", ""),
        ("secret", ""),
        ("", ""),
        ("SELECT extract(epoch FROM secret), $1 FROM email", "SELECT email"),
        ("WITH a AS (SELECT id FROM secret WHERE b = $1) UPDATE email SET c = 1", "UPDATE email"),
        ("WITH a AS (SELECT 'secret') UPDATE email SET c = 1", "WITH"),
        ('LOCK TABLE "Entry of a book" IN SHARE MODE', 'LOCK "Entry of a book"'),
        ("ALTER ROLE ada PASSWORD 'secret'", "ALTER"),
        ("CREATE UNIQUE INDEX CONCURRENTLY i ON email (a)", "CREATE email"),
        ("COMMIT;", "COMMIT"),
    ],
)
def test_of_a_statement_its_keyword_and_table_are_told(text: str, kind: str) -> None:
    assert statement_kind(text) == kind


def test_prepared_transaction(own: Database, own_engine: sa.Engine) -> None:
    restart_with(own, "max_prepared_transactions = 5")
    gid = "it's prepared"
    with own.connect() as connection:
        connection.execute("CREATE TABLE a (b int)")
        connection.execute("BEGIN; INSERT INTO a VALUES (1); PREPARE TRANSACTION 'it''s prepared'")
    with own.server.database() as other:
        with other.connect() as connection:
            connection.execute("BEGIN; SELECT pg_current_xact_id(); PREPARE TRANSACTION 'other'")
        assert codes(own_engine, checks=CHECK) == []
        finding = find("prepared_transaction", own_engine, checks=CHECK, **AT_ONCE)
        assert repr(gid) in finding.summary
        assert "role postgres" in finding.summary
        assert not vacuum_removes_a_dead_row(own)
        apply(own.dsn, finding.fixes[0])
        assert codes(own_engine, checks=CHECK, **AT_ONCE) == []
        assert vacuum_removes_a_dead_row(own)
        apply(other.dsn, "ROLLBACK PREPARED 'other';")


def test_logical_slot(own: Database, own_engine: sa.Engine) -> None:
    restart_with(own, "wal_level = logical")
    with own.connect() as connection:
        connection.execute("SELECT pg_create_logical_replication_slot('left_behind', 'pgoutput')")
    consume_ids(own, 5)
    assert codes(own_engine, checks=CHECK) == []
    finding = find("replication_slot", own_engine, checks=CHECK, horizon_age=3)
    assert "left_behind" in finding.summary
    assert own.name in finding.summary
    assert "system catalogs" in finding.consequence
    assert "WAL" in finding.consequence
    if own.version >= 17:
        assert "has not been in use since" in finding.summary
        found = find("replication_slot", own_engine, checks=CHECK, slot_inactive=timedelta(0))
        assert found.facts["inactive_since"] is not None
    else:
        assert "is not in use" in finding.summary
        assert codes(own_engine, checks=CHECK, slot_inactive=timedelta(0)) == []
    apply(own.dsn, finding.fixes[0])
    assert codes(own_engine, checks=CHECK, horizon_age=3) == []


def test_hidden_sessions(database: Database) -> None:
    with new_role(database, "limited") as limited, session(database, "secret") as idle:
        idle.execute("SELECT pg_current_xact_id()")
        consume_ids(database, 5)
        # When the transaction began is not known.
        hidden, *others = examine(limited, checks=CHECK, **AT_ONCE)
        assert (hidden.code, hidden.severity, others) == ("hidden_sessions", "notice", [])
        assert "limited" in hidden.summary
        finding = find("long_transaction", limited, checks=CHECK, horizon_age=3)
        assert f"Session {idle.info.backend_pid} " in finding.summary
        assert "'secret'" in finding.summary
        assert "may not see" in finding.summary
        apply(database.dsn, hidden.fixes[0])
        assert codes(limited, checks=CHECK, **AT_ONCE) == ["idle_in_transaction"]


# -- a real standby: its feedback keeps dead rows of the primary, and it can run no queue itself -------------------


def test_feedback_without_and_with_a_slot(own: Database, own_engine: sa.Engine) -> None:
    with own.connect() as primary, standby_of(own.server, FEEDBACK) as standby:
        report = psycopg.connect(standby.dsn(own.name), application_name="report")
        report.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        report.execute("SELECT 1")

        def age() -> int:
            consume_ids(own, 1)
            row = primary.execute("SELECT max(age(backend_xmin)) FROM pg_stat_replication").fetchone()
            return row[0] or 0 if row else 0

        wait_until(lambda: age() > 5)
        assert codes(own_engine, checks=CHECK) == []
        finding = find("standby_feedback", own_engine, checks=CHECK, horizon_age=5, transaction_open=timedelta(0))
        assert "walreceiver" in finding.summary
        assert f"process {finding.facts['pid']})" in finding.summary
        assert not vacuum_removes_a_dead_row(own)

        # The standby keeps its xmin by a slot from now on.
        primary.execute("SELECT pg_create_physical_replication_slot('of_standby')")
        apply(standby.dsn(), "ALTER SYSTEM SET primary_slot_name = 'of_standby';\nSELECT pg_reload_conf();")
        wait_until(lambda: codes(own_engine, checks=CHECK, horizon_age=5) == ["replication_slot"])
        slot = find("replication_slot", own_engine, checks=CHECK, horizon_age=5, transaction_open=timedelta(0))
        assert slot.summary.startswith("The physical replication slot of_standby is in use by the process")
        assert slot.fixes == finding.fixes
        assert not vacuum_removes_a_dead_row(own)
        apply(standby.dsn(), slot.fixes[0])
        wait_until(lambda: codes(own_engine, checks=CHECK, horizon_age=5) == [])
        wait_until(lambda: vacuum_empties_the_table(own))
        report.close()

        def found() -> list[str]:
            consume_ids(own, 3)
            return codes(own_engine, checks=CHECK, horizon_age=2)

        # Without feedback the slot keeps WAL, and no rows.
        apply(standby.dsn(), slot.fixes[1])
        wait_until(lambda: found() == [])
        apply(standby.dsn(), "ALTER SYSTEM SET hot_standby_feedback = on;\nSELECT pg_reload_conf();")
        wait_until(lambda: found() == ["replication_slot"])
        standby.stop()
        consume_ids(own, 10)
        wait_until(lambda: "in use by" not in find("replication_slot", own_engine, checks=CHECK, horizon_age=5).summary)
        left = find("replication_slot", own_engine, checks=CHECK, horizon_age=5)
        apply(own.dsn, left.fixes[0])
        assert codes(own_engine, checks=CHECK, horizon_age=5) == []


def test_a_standby_is_read_only(own: Database) -> None:
    with standby_of(own.server, FEEDBACK) as standby:
        engine = plain_engine(standby.url(database=own.name))
        wait_until(lambda: find("server_in_recovery", engine, checks=[check_server]).fixes[1:])
        finding = find("server_in_recovery", engine, checks=[check_server, check_horizon])
        assert finding.severity == "critical"
        assert str(standby.directory) in finding.summary
        found = re.search(r"SQLAQUEUE_URL='(.*)'", finding.fixes[0])
        assert found is not None
        primary = plain_engine(found[1])
        assert codes(primary, checks=[check_server]) == []
        apply(standby.dsn(), finding.fixes[1])
        wait_until(lambda: codes(engine, checks=[check_server]) == [])


@pytest.mark.parametrize("level", ["DATABASE {database}", "ROLE careful", "ROLE careful IN DATABASE {database}"])
def test_read_only_by_default(database: Database, level: str) -> None:
    with new_role(database, "careful", "LOGIN SUPERUSER") as careful:
        where = level.format(database=database.name)
        apply(database.dsn, f"ALTER {where} SET default_transaction_read_only = on;")
        finding = find("read_only_default", careful, checks=[check_server])
        assert finding.severity == "critical"
        place = where.replace("ROLE ", "").replace("DATABASE ", "")
        assert place in finding.summary.replace("ALTER ROLE ", "").replace("DATABASE ", "")
        apply(database.dsn, finding.fixes[0])
        assert codes(careful, checks=[check_server]) == []


def test_an_old_server(database: Database, engine: sa.Engine) -> None:
    assert codes(engine, checks=[check_server], oldest_server=database.version) == []
    finding = find("old_server", engine, checks=[check_server], oldest_server=database.version + 1)
    assert str(database.version) in finding.summary
