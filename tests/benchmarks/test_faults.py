"""The comparison under faults: what it counts, its page, and that it finds lost jobs with real processes."""

import asyncio
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from docs.benchmarks import crew, runs, system_under_test
from docs.benchmarks.outcome import LATE, Outcome
from docs.benchmarks.report import Sample, Summary, summarise, write
from docs.benchmarks.runs import Run
from docs.benchmarks.server import bench_server
from docs.benchmarks.system_under_test import SystemUnderTest
from docs.benchmarks.systems import SYSTEMS, System, _by_name, protocol
from docs.benchmarks.systems.raw_sql import Raw
from docs.benchmarks.tables import BLOCK, FAULT_TABLES, FAULTS_PAGE, PAGE, fill, seconds, settings_table, table
from docs.benchmarks.workloads import Size, cases_of, faults
from tests.servers import Database

pytestmark = pytest.mark.once

CONTROL = "raw deleted first"
LEASED = "sqlaqueue update_status (lease 10 s)"


def run(number: int, begin: float, end: float = math.inf) -> Run:
    return Run(0, number, begin, end)


def test_a_job_is_lost_if_no_run_of_it_has_ended() -> None:
    outcome = Outcome({1: 10.0, 2: 10.0, 3: 10.0}, [run(1, 11, 12), run(2, 11)])
    assert (outcome.lost, outcome.cut_off, outcome.longest_wait) == (2, 1, math.inf)
    assert outcome.recovery([11.0]) == math.inf


def test_a_job_that_was_cut_off_and_ran_again_ran_once() -> None:
    outcome = Outcome({1: 10.0}, [run(1, 10), run(1, 15, 16)])
    assert (outcome.lost, outcome.cut_off, outcome.twice, outcome.longest_wait) == (0, 1, 0, 6.0)


def test_a_job_ran_twice_if_two_runs_have_ended_whoever_committed_it() -> None:
    outcome = Outcome({1: 10.0}, [run(1, 10, 11), run(1, 10, 12), run(2, 10, 11), run(2, 11, 12), run(2, 12, 13)])
    assert outcome.twice == 2
    assert outcome.longest_wait == 1.0
    assert outcome.finished(0, 11) == 0
    assert outcome.finished(11, 12) == 2


def test_recovery_ends_with_the_last_late_job() -> None:
    in_time, late = run(1, 10, 10 + LATE), run(2, 10, 18)
    assert Outcome({1: 10.0, 2: 10.0}, [in_time, late]).recovery([11.0]) == 7.0
    assert Outcome({1: 10.0}, [in_time]).recovery([10.5]) == 0.0
    assert Outcome({2: 10.0}, [late]).recovery([19.0]) == 0.0


def test_of_repeated_faults_the_last_one_before_a_job_is_late_counts() -> None:
    # The last kill has hit an idle process.
    assert Outcome({1: 10.0}, [run(1, 10), run(1, 18, 21)]).recovery([5.0, 11.0, 16.0]) == 10.0
    # An outage began before, and its end is what a recovery is measured from.
    assert Outcome({1: 10.0}, [run(1, 17, 18)]).recovery([15.0]) == 3.0


# -- the producer, the record and the processes --------------------------------------------------------------------


class Interrupted(Raw):
    """Loses its connection before the second chunk."""

    chunks = 0

    def enqueue(self, jobs: list[dict[str, Any]], request: Mapping[str, Any]) -> None:
        self.chunks += 1
        if self.chunks == 2:
            with psycopg.connect(self.url, autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s, 5000)", (self._connection.info.backend_pid,))
        super().enqueue(jobs, request)


def test_a_producer_continues_and_reports_what_was_acknowledged(database: Database) -> None:
    producer = Interrupted({"url": database.dsn})
    producer.prepare()
    producer.open()
    request = {"jobs": 6, "chunk": 2, "interval": 0.01, "way": "bulk"}
    acknowledged = asyncio.run(protocol._send_through_faults(producer, request, first=10))
    producer._connection.close()
    assert [(first, jobs) for first, jobs, _ in acknowledged] == [(10, 2), (14, 2)]
    with database.connect() as connection:
        rows = connection.execute("SELECT payload->>'reference' FROM job ORDER BY id").fetchall()
    assert [int(reference, 16) for (reference,) in rows] == [10, 11, 14, 15]


def test_a_later_process_with_the_same_id_keeps_the_record_of_the_earlier_one(tmp_path: Path) -> None:
    for number in (1, 2):
        log = protocol.RunLog(str(tmp_path), 10)
        log.end(log.begin(0, f"{number:x}"))
    assert sorted(one.number for one in runs.read(tmp_path, killed=-1.0)) == [1, 2]


def test_two_systems_of_one_name_are_refused() -> None:
    system = next(iter(SYSTEMS.values()))
    with pytest.raises(ValueError, match=f"two systems have the name '{system.name}'"):
        _by_name([system, system])


@pytest.mark.thorough
def test_a_process_that_ends_is_started_again(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_under_test, "command_of", program)
    monkeypatch.setattr(crew, "RESTART_AFTER", 0.1)
    system = SYSTEMS["raw row lock"]
    started: list[system_under_test.Program] = []

    def start(number: int) -> system_under_test.Program:
        started.append(system_under_test.Program(system, "work", {**system.options, "url": database.dsn}))
        return started[-1]

    workers = crew.Crew(start, 1)
    with workers.running():
        workers.kill(0)
        assert eventually(lambda: len(started) == 2, workers)
        # It ends by itself.
        os.kill(started[1].pid, signal.SIGTERM)
        assert eventually(lambda: len(started) == 3, workers)
    assert len(workers.exits) == 1
    assert all(one.has_ended for one in started)


def eventually(condition: Callable[[], bool], workers: crew.Crew) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        workers.tend()
    return condition()


# -- docs/evidence/faults-compared.md is generated -----------------------------------------------------------------
CASE = ("faults", "server crashed")


def blocks(text: str) -> dict[str, str]:
    return {name: body.strip() for _, name, body, _ in BLOCK.findall(text)}


def test_the_page_has_every_table_and_the_settings_of_each_system() -> None:
    found = blocks(FAULTS_PAGE.read_text())
    assert set(found) == {*FAULT_TABLES, "faults-about", "faults-settings"}
    assert found["faults-settings"] == settings_table()


def test_the_columns_are_those_of_the_cases() -> None:
    cases = {case.name for case in cases_of("faults")}
    assert {column.case for columns in FAULT_TABLES.values() for column in columns} == cases


def summary_of(*values: float) -> list[Summary]:
    return summarise([Sample(number, *CASE, "raw", "lost", value) for number, value in enumerate(values)], {})


def test_a_loss_in_one_of_several_runs_is_shown() -> None:
    assert table(FAULT_TABLES["faults-server-crashed"], summary_of(0, 0, 3)).splitlines()[-1] == "| raw | 3 |"


def test_a_recovery_that_has_no_end_is_shown_as_such() -> None:
    assert (seconds(math.inf), seconds(1.26)) == ("never", "1.3")


def test_results_fill_this_page_and_leave_the_page_of_the_benchmarks_alone(tmp_path: Path) -> None:
    results = tmp_path / "faults.json"
    server = {"server_version": "18.1", "fsync": "on"}
    about = {"date": "2026-01-02", "cores": 2, "memory_gib": 24, "python": "3.13.0", "server": server}
    write(results, {**about, "repeat": 1, "versions": {}}, [Sample(0, *CASE, "raw", "recovery_s", math.inf)], {})
    copies = [tmp_path / page.name for page in (FAULTS_PAGE, PAGE)]
    for copy, page in zip(copies, (FAULTS_PAGE, PAGE), strict=True):
        copy.write_text(page.read_text())
        fill([results], copy)
    filled = blocks(copies[0].read_text())
    assert filled["faults-server-crashed"].endswith("| raw | never |")
    assert filled["faults-about"].startswith("Measured on 2026-01-02")
    assert copies[1].read_text() == PAGE.read_text()


# -- with real processes -------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(CONTROL, faults.kill_processes, id="a control loses jobs"),
        pytest.param("raw row lock", faults.kill_processes, id="row lock, killed"),
        pytest.param("raw row lock", faults.terminate_sessions, id="row lock, terminated"),
        pytest.param(LEASED, faults.kill_processes, id="lease, killed"),
        pytest.param(LEASED, faults.refuse_connections, id="lease, connections refused"),
        pytest.param("sqlaqueue batch_select (batch_size=1)", faults.crash_server, id="batch_select, server crashed"),
    ],
)
def test_only_the_control_loses_jobs(
    name: str, fault: Callable[[faults.Stage], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The systems of this repository run in the environment of the tests, so nothing is installed.
    monkeypatch.setattr(system_under_test, "command_of", program)
    # Most handlers are busy, so that each kill interrupts some.
    monkeypatch.setattr(faults, "HANDLER", 0.3)
    # What a slow machine has not finished before the fault is finished afterwards.
    monkeypatch.setattr(faults, "STEADY", 0.0)
    system = SYSTEMS[name]
    options = {**system.options, **({"lease": 3.0} if "lease" in system.options else {})}
    with bench_server(durable=False) as server, SystemUnderTest.on(server, replace(system, options=options)) as sut:
        found = faults.under(sut, Size(0.05, 10.0), fault=fault, seconds=60)
        log = (server.directory / "log").read_text()
    assert found["committed"] > 200
    assert found["unfinished"] == 0
    # The fault has struck.
    assert (found["cut_off"] > 0) == (fault is faults.kill_processes)
    assert (found["terminated"] > 0) == (fault in {faults.terminate_sessions, faults.refuse_connections})
    assert ("was not properly shut down" in log) == (fault is faults.crash_server)
    assert ("too many connections for role" in log) == (fault is faults.refuse_connections)
    if name == CONTROL:
        # A kill between the deletion and the handler loses a job as well.
        assert found["lost"] >= found["cut_off"]
        assert found["recovery_s"] == found["longest_wait_s"] == math.inf
    else:
        assert found["lost"] == 0
        assert found["longest_wait_s"] < math.inf
    if name == "raw row lock" and fault is faults.terminate_sessions:
        # Another worker runs a job whose transaction has ended, while its first handler still runs.
        assert found["twice"] > 0


def program(system: System) -> list[str]:
    return [sys.executable, "-m", f"docs.benchmarks.systems.{system.environment}"]
