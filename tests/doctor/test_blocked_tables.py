"""A session that has locked a table of a queue is named, not those that wait for it."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

from tests.doctor.conftest import Patient
from tests.doctor.models import Email


def test_the_session_that_others_wait_for(patient: Patient) -> None:
    limits = {"blocked_for": timedelta(0), "transaction_open": timedelta(0), "lock_timeout": timedelta(milliseconds=10)}
    with patient.database.connect() as holder, patient.database.connect() as waiter:
        holder.execute("BEGIN")
        holder.execute("LOCK TABLE email IN ACCESS EXCLUSIVE MODE")
        pids = [connection.info.backend_pid for connection in (holder, waiter)]
        thread = threading.Thread(target=waiter.execute, args=["SELECT count(*) FROM email"])
        thread.start()
        deadline = time.monotonic() + 30
        with patient.database.connect() as watcher:
            while not watcher.execute("SELECT FROM pg_locks WHERE NOT granted AND waitstart IS NOT NULL").fetchall():
                assert time.monotonic() < deadline
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
