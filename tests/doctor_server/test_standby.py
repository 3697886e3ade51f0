"""A real standby: its feedback keeps dead rows of the primary, and it can run no queue itself."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest

from sqlaqueue.admin.doctor.server import check_server
from sqlaqueue.admin.doctor.vacuum import check_horizon
from tests.doctor_server.examine import apply, codes, find, plain_engine, wait_until
from tests.doctor_server.standby import standby_of
from tests.doctor_server.test_horizon import consume_ids, vacuum_empties_the_table, vacuum_removes_a_dead_row

if TYPE_CHECKING:
    import sqlalchemy as sa

    from tests.servers import Database

CHECK = [check_horizon]


def test_feedback_without_and_with_a_slot(own: Database, own_engine: sa.Engine) -> None:
    with own.connect() as primary, standby_of(own.server) as standby:
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
    with standby_of(own.server) as standby:
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
        engine.dispose()
        primary.dispose()


@pytest.mark.parametrize("level", ["DATABASE {database}", "ROLE careful", "ROLE careful IN DATABASE {database}"])
def test_read_only_by_default(database: Database, level: str) -> None:
    with database.connect() as admin:
        admin.execute("CREATE ROLE careful LOGIN SUPERUSER")
        where = level.format(database=database.name)
        admin.execute(f"ALTER {where} SET default_transaction_read_only = on".encode())
        engine = plain_engine(database.url().replace("postgres@", "careful@"))
        try:
            finding = find("read_only_default", engine, checks=[check_server])
            assert finding.severity == "critical"
            assert where.replace("ROLE ", "").replace("DATABASE ", "") in finding.summary.replace(
                "ALTER ROLE ", ""
            ).replace("DATABASE ", "")
            apply(database.dsn, finding.fixes[0])
            assert codes(engine, checks=[check_server]) == []
        finally:
            engine.dispose()
            admin.execute("DROP ROLE careful")


def test_an_old_server(database: Database, engine: sa.Engine) -> None:
    assert codes(engine, checks=[check_server], oldest_server=database.version) == []
    finding = find("old_server", engine, checks=[check_server], oldest_server=database.version + 1)
    assert str(database.version) in finding.summary
