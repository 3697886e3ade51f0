"""The programs of docs/benchmarks: their arithmetic, their tables, and that short measurements end."""

import math
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from docs.benchmarks import history, runs, snapshot
from docs.benchmarks.beside_raw.measures import cell, medians
from docs.benchmarks.report import Sample, Summary, join, quantile, read, summarise, write
from docs.benchmarks.run import OWN, QUICK_SYSTEMS, QUICK_WORKLOADS
from docs.benchmarks.runs import Run
from docs.benchmarks.server import bench_server
from docs.benchmarks.snapshot import OURS, PEERS, Minute, measure
from docs.benchmarks.sqlite.__main__ import cases, file
from docs.benchmarks.sqlite.sides import LibrarySqlite, RawSqlite
from docs.benchmarks.system_under_test import SystemUnderTest
from docs.benchmarks.systems import FLOW, SYSTEMS
from docs.benchmarks.systems.protocol import RunLog, payloads
from docs.benchmarks.systems.sqlaqueue_consumer import make_model
from docs.benchmarks.tables import BLOCK, PAGE, TABLES, costs_table, fill, significant, table
from docs.benchmarks.workloads import WORKLOADS, cases_of, flow_claims, participants
from sqlaqueue import claim, copy_in
from sqlaqueue.mapping.mixin import spec_of
from tests.servers import Database

pytestmark = pytest.mark.once

REFERENCES = {("drain", "1 process"): "raw"}


def samples(*values: tuple[int, str, float]) -> list[Sample]:
    return [Sample(run, "drain", "1 process", who, "jobs_per_second", value) for run, who, value in values]


def test_ratios_are_taken_within_a_run() -> None:
    # The machine was half as fast in the second run, which affects the ratio of the medians, but not that within runs.
    measured = samples(
        (0, "raw", 100), (0, "ours", 80), (1, "raw", 50), (1, "ours", 40), (2, "raw", 100), (2, "ours", 70)
    )
    raw, ours = summarise(measured, REFERENCES)
    assert (raw.ratio, ours.ratio) == (1.0, 0.8)
    assert (ours.median, ours.least, ours.most, ours.runs) == (70, 40, 80, 3)


def test_a_run_without_the_reference_has_no_ratio() -> None:
    (ours,) = summarise(samples((0, "ours", 80)), REFERENCES)
    assert ours.ratio is None


def test_the_spread_is_relative_to_the_median() -> None:
    (ours,) = summarise(samples((0, "ours", 80), (1, "ours", 100), (2, "ours", 120)), {})
    assert ours.spread == pytest.approx(0.4)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1), (0.0, 1)])
def test_quantiles(share: float, expected: float) -> None:
    assert quantile(list(range(100, 0, -1)), share) == expected


def test_no_values_have_no_quantile() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        quantile([], 0.5)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "results" / "one.json"
    write(path, {"cores": 2}, samples((0, "raw", 100), (0, "ours", 80)), REFERENCES)
    about, summaries = read(path)
    assert about == {"cores": 2}
    assert [(one.system, one.median, one.ratio) for one in summaries] == [("raw", 100, 1.0), ("ours", 80, 0.8)]


def test_the_runs_of_several_files_have_consecutive_numbers(tmp_path: Path) -> None:
    for number, value in enumerate((80, 60)):
        write(tmp_path / f"{number}.json", {}, samples((0, "raw", 100), (0, "ours", value)), REFERENCES)
    joined, references = join([tmp_path / "0.json", tmp_path / "1.json"])
    ours = summarise(joined, references)[1]
    assert (ours.runs, ours.median, ours.ratio) == (2, 70, pytest.approx(0.7))


def test_every_case_includes_several_systems_and_its_reference() -> None:
    for workload in WORKLOADS:
        for case in cases_of(workload):
            included = [system.name for system in participants(workload, case, SYSTEMS.values())]
            assert len(included) > 1, (workload, case.name)
            assert case.reference in included, (workload, case.name)


def test_systems_with_flow_control_take_part_in_its_workloads_only() -> None:
    for workload in WORKLOADS:
        for case in cases_of(workload):
            for system in participants(workload, case, SYSTEMS.values()):
                assert ("flow" in system.options) == workload.startswith("flow"), (workload, system.name)


# -- the tables of docs/evidence/benchmarks.md are generated -------------------------------------------------------
DRAIN = ("drain", "1 process")
ABOUT = {
    "date": "2026-01-02",
    "cores": 2,
    "memory_gib": 24,
    "python": "3.13.0",
    "server": {"server_version": "18.1", "fsync": "on"},
}


def measured() -> list[Sample]:
    return [
        Sample(0, *DRAIN, "raw delete 100", "jobs_per_second", 50_000),
        Sample(0, *DRAIN, "sqlaqueue", "jobs_per_second", 41_234),
        Sample(0, *DRAIN, "sqlaqueue", "connections", 2),
    ]


def summaries() -> list[Summary]:
    return summarise(measured(), {DRAIN: "raw delete 100"})


def test_a_table_has_the_columns_with_results() -> None:
    assert table(TABLES["drain"], summaries()).splitlines() == [
        "|  | 1 process | connections |",
        "| --- | --: | --: |",
        "| raw delete 100 | 50,000 (1.00) |  |",
        "| sqlaqueue | 41,200 (0.82) | 2 |",
    ]


def test_without_results_there_is_no_table() -> None:
    assert not table(TABLES["latency"], summaries())


def test_tables_without_new_results_are_kept(tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "results.json"
    page.write_text(PAGE.read_text())
    about = {**ABOUT, "repeat": 3, "versions": {"ours": {"sqlaqueue": "0.1.0"}}}
    write(results, about, measured(), {DRAIN: "raw delete 100"})
    fill([results], page)
    before, after = (blocks(text) for text in (PAGE.read_text(), page.read_text()))
    assert "41,200 (0.82)" in after["drain"]
    assert "PostgreSQL 18.1 on loopback (fsync on), Python 3.13.0; 3 alternating runs" in after["about"]
    assert {name for name in before if before[name] != after[name]} <= {"drain", "about"}


def test_results_of_flow_control_have_a_description_of_their_own(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    results = [tmp_path / "one.json", tmp_path / "two.json"]
    case = ("flow", "1 process of 1 thread")
    for repeat, path in enumerate(results, start=1):
        about = {**ABOUT, "repeat": repeat, "versions": {path.stem: {f"system of {path.stem}": "1.0"}}}
        measured_once = [Sample(0, *case, "sqlaqueue InOrder", "ratio", 0.25)] if repeat == 1 else []
        write(path, about, [Sample(0, *case, "sqlaqueue FairShare", "ratio", 0.5), *measured_once], {})
    fill(results, page)
    before, after = (blocks(text) for text in (PAGE.read_text(), page.read_text()))
    assert "| sqlaqueue FairShare | 50% |" in after["flow"]
    assert "1 to 2 alternating runs.\nVersions: system of one 1.0, system of two 1.0." in after["flow-about"]
    assert before["about"] == after["about"]


def blocks(text: str) -> dict[str, str]:
    return {name: body for _, name, body, _ in BLOCK.findall(text)}


def test_the_page_has_every_table_and_no_other() -> None:
    assert set(blocks(PAGE.read_text())) == {*TABLES, "costs", "about", "flow-about", "snapshot"}


def test_the_page_shows_costs_json() -> None:
    assert blocks(PAGE.read_text())["costs"].strip() == costs_table()


def test_every_column_belongs_to_a_case() -> None:
    for columns in TABLES.values():
        for column in columns:
            own = OWN.get(column.workload)
            known = own.CASES if own else {case.name for case in cases_of(column.workload)}
            assert column.case in known, column


def test_the_quick_choice_consists_of_systems_and_workloads() -> None:
    assert set(QUICK_SYSTEMS) <= set(SYSTEMS)
    assert set(QUICK_WORKLOADS) <= {*WORKLOADS, *OWN}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (1.239, "1.24"),
        (12.39, "12.4"),
        (99.99, "100"),
        (123.9, "124"),
        (41_234, "41,200"),
    ],
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


# -- what handlers record, and what was admitted too many by it ----------------------------------------------------
TWO, ONE, FOUR = (
    FLOW[name]
    for name in (
        "ConcurrencyLimit(2) of each key",
        "ConcurrencyLimit(1) of each key",
        "ConcurrencyLimit(4) of the queue",
    )
)


def runs_of(key: int, *times: tuple[float, float]) -> list[Run]:
    return [Run(key, number, begin, end) for number, (begin, end) in enumerate(times)]


def test_runs_at_once_are_counted() -> None:
    assert runs.at_once(runs_of(0, (0, 5), (1, 3), (2, 4), (4, 6))) == 3


def test_a_run_that_begins_when_another_one_ends_follows_it() -> None:
    assert runs.at_once(runs_of(0, (0, 1), (1, 2), (2, 3))) == 1


def test_a_limit_of_each_key_is_exceeded_by_runs_of_one_key() -> None:
    same, other = runs_of(1, (0, 5), (1, 5), (2, 5)), runs_of(2, (0, 5), (1, 5))
    assert runs.too_many(same + other, ONE) == 2
    assert runs.too_many(same + other, TWO) == 1
    assert runs.too_many(other, TWO) == 0


def test_a_limit_of_the_queue_is_exceeded_by_runs_of_all_keys() -> None:
    all_runs = [run for key in range(5) for run in runs_of(key, (0, 5))]
    assert runs.too_many(all_runs, ONE) == 0
    assert runs.too_many(all_runs, FOUR) == 1


def test_turns_have_no_limit() -> None:
    assert runs.too_many(runs_of(1, (0, 5), (0, 5)), FLOW["FairShare"]) is None


def test_a_rate_is_exceeded_in_the_worst_period() -> None:
    # Two at once, then one every tenth of a second.
    assert runs.above_rate([0, 0, 0.1, 0.2, 5, 5], per_second=10, burst=2) == 0
    assert runs.above_rate([0, 0, 0.1, 0.15, 5], per_second=10, burst=2) == 1
    assert runs.above_rate([0, 1, 7, 7, 7, 7], per_second=10, burst=2) == 2


def test_runs_out_of_order_are_counted() -> None:
    assert runs.out_of_order([*runs_of(1, (0, 1), (1, 2)), *runs_of(2, (5, 6), (6, 7))]) == 0
    assert runs.out_of_order(runs_of(1, (0, 2), (1, 3))) == 1
    assert runs.out_of_order(runs_of(1, (4, 5), (1, 2))) == 1


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    log = RunLog(str(tmp_path), 10)
    for job in payloads(2, first=7, keys=4, first_key=100):
        log.end(log.begin(job["account"], job["reference"]))
    log.begin(5, "ff")
    first, second, unfinished = runs.read(tmp_path, killed=1e12)
    assert (first.key, first.number, second.key, second.number) == (103, 7, 100, 8)
    assert 0 < first.begin <= first.end <= second.begin
    assert (unfinished.key, unfinished.number, unfinished.end) == (5, 255, 1e12)


def test_an_unfinished_run_after_a_kill_has_not_ended(tmp_path: Path) -> None:
    RunLog(str(tmp_path), 10).begin(1, "1")
    assert [run.end for run in runs.read(tmp_path, killed=1e-9)] == [math.inf]


PROGRAM = """
import sys, time
from docs.benchmarks.systems.protocol import RunLog

log = RunLog(sys.argv[1], 10)
log.end(log.begin(1, "1"))
log.begin(2, "2")
print("begun", flush=True)
time.sleep(600)
"""


def test_records_of_a_killed_process_are_complete(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        os.kill(process.pid, signal.SIGKILL)
    assert [(run.key, run.end == 1e12) for run in runs.read(tmp_path, killed=1e12)] == [(1, False), (2, True)]


# -- the systems and loads of the workloads about flow control -----------------------------------------------------


def options_of(name: str) -> dict[str, Any]:
    return dict(SYSTEMS[f"sqlaqueue {name}"].options)


@pytest.mark.parametrize("name", FLOW)
def test_a_model_has_the_flow_control_of_its_system(name: str) -> None:
    config, flow = spec_of(make_model(options_of(name))).config, FLOW[name]
    found = {
        "limit": [(one.most, one.per) for one in config.limits],
        "rate": [(one.most, one.per) for one in config.rates],
        "order": [] if config.order is None else [(1, config.order.per)],
        "fair": [] if config.fair is None else [(None, config.fair.per)],
    }
    expected = [(flow.get("most"), ("account",) if flow["per_key"] else ())]
    assert found == {kind: expected if kind == flow["kind"] else [] for kind in found}


def test_the_plain_system_has_none() -> None:
    config = spec_of(make_model(options_of("plain"))).config
    assert [config.limits, config.rates, config.order, config.fair] == [(), (), None, None]


def test_jobs_that_a_load_starts_count_as_running(database: Database) -> None:
    model = make_model(options_of("ConcurrencyLimit(1) of each key"))
    engine = sa.create_engine(database.url("psycopg"))
    model.metadata.create_all(engine)
    with Session(engine) as session:
        copy_in(session, model, payloads(20, keys=10))
        session.commit()
        session.execute(sa.text(f"{flow_claims._START} WHERE id <= 10 AND account < 8"))
        session.commit()
        assert sorted(job.account for job in session.scalars(claim(model, 100))) == [8, 9]
    engine.dispose()


# -- the measurements of the library beside a loop by hand end, and a drain completes the jobs of both -------------
CASES = [pytest.param(*found, id=found[0]) for found in cases(20) if "4 processes" not in found[0]]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "case"), CASES)
def test_both_sides_are_measured(name: str, case: partial[float]) -> None:
    found = medians(case, [partial(file, side, "NORMAL") for side in (RawSqlite, LibrarySqlite)], 1)
    assert len(found) == 2
    assert min(found) > 0
    assert cell(name, 1234.567) == ("1,234.57" if name.endswith("ms") else "1,235")


# -- the measurement of an attempt history runs, and what does not depend on the machine stays within bounds -------


@pytest.mark.thorough
def test_the_costs_of_a_history() -> None:
    case = history.CASES[0]
    with bench_server(durable=False, more="autovacuum = off") as server:
        found = history.compare(server, case, 1, factor=0.1)
    assert found.ratio > 0
    # A row with its three index entries.
    assert 200 < found.wal_with - found.wal_without < 700


# -- the workloads that run in this process ------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("workload", "system"), [("writing", "by hand"), ("writing", "update_status"), ("commits", "no Consumer")]
)
def test_a_workload_of_this_process_is_measured(workload: str, system: str) -> None:
    own = OWN[workload]
    with bench_server(durable=False) as server:
        found = own.measure(server, next(iter(own.CASES)), system, factor=0.01)
    assert found.pop("notifications", 0) == 0
    assert min(found.values()) >= 0
    columns = {column.figure for columns in TABLES.values() for column in columns if column.workload == workload}
    assert columns <= {*found, "notifications"}


# -- a steady load while a snapshot is open ------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_steady_load_meets_an_open_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """All figures are real: the load arrives, is handled, and leaves dead rows that the snapshot keeps."""
    own = [sys.executable, "-m", "docs.benchmarks.systems.sqlaqueue_consumer"]
    monkeypatch.setattr("docs.benchmarks.system_under_test.command_of", lambda _: own)
    with bench_server(durable=False) as server, SystemUnderTest.on(server, SYSTEMS[OURS[0]]) as sut:
        first, *_, last = measure(sut, minutes=0.1, rate=50, every=2)
        [left] = sut.row("SELECT count(*) FROM job")
    assert last.minute >= 0.1
    assert min(first.rate + last.rate, first.sent + last.sent, last.p99, last.table_mib, last.index_mib) > 0
    assert last.dead > first.dead
    assert last.held > first.held > 0
    assert last.cpu > 0
    assert (last.oldest > 0) == (last.due > 0)
    # Finished jobs are deleted, and no more than the load can be left.
    assert left <= 50 * 8


def minutes_of(system: str, *rates: float) -> list[dict[str, Any]]:
    rest = {"sent": 800, "oldest": 0.5, "p99": 0.25, "cpu": 0.3, "table_mib": 10, "index_mib": 5, "held": 9}
    return [
        {"system": system, "minute": number, "rate": rate, "due": 3 * number, "dead": 1000 * number, **rest}
        for number, rate in enumerate(rates, start=1)
    ]


def test_the_table_has_the_first_the_last_and_the_last_common_minute() -> None:
    lines = [*minutes_of(PEERS[0], 700, 690), *minutes_of(OURS[0], 800, 790, 801)]
    assert snapshot.table(lines).splitlines()[2:] == [
        f"| {OURS[0]} | 1 | 800 | 3 | 0.5 | 0.25 | 0.3 | 1,000 | 10.0 | 5.00 |",
        f"| {OURS[0]} | 2 | 790 | 6 | 0.5 | 0.25 | 0.3 | 2,000 | 10.0 | 5.00 |",
        f"| {OURS[0]} | 3 | 801 | 9 | 0.5 | 0.25 | 0.3 | 3,000 | 10.0 | 5.00 |",
        f"| {PEERS[0]} | 1 | 700 | 3 | 0.5 | 0.25 | 0.3 | 1,000 | 10.0 | 5.00 |",
        f"| {PEERS[0]} | 2 | 690 | 6 | 0.5 | 0.25 | 0.3 | 2,000 | 10.0 | 5.00 |",
    ]
    assert [one.rate for one in snapshot.by_system(lines)[OURS[0]]] == [800, 790, 801]
    assert Minute.__dataclass_fields__.keys() == minutes_of(OURS[0], 1)[0].keys() - {"system"}


def test_the_table_says_when_and_with_what_it_was_measured() -> None:
    machine = {"cores": 2, "memory_gib": 24, "python": "3.13.0", "server": {"server_version": "18"}}
    about = {"date": "2026-01-02", "commit": "12345678", **machine, "versions": {"ours": {"sqlaqueue": "0.1"}}}
    lines = [
        {"system": OURS[0], "about": about},
        *minutes_of(OURS[0], 800),
        {"system": PEERS[0], "about": {**about, "date": "2026-01-03", "versions": {"theirs": {"theirs": "4.0"}}}},
        *minutes_of(PEERS[0], 700),
    ]
    said, _, rest = snapshot.block(lines).partition("\n\n")
    assert said.startswith("Measured on 2026-01-03: 2 cores, 24 GiB, PostgreSQL 18 on loopback")
    assert said.endswith("1 run.\nVersions: sqlaqueue 0.1 (12345678), theirs 4.0.")
    assert rest.startswith(snapshot.table(lines))
