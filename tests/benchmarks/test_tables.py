"""The tables of docs/performance.md are generated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.report import Sample, Summary, summarise, write
from tests.benchmarks.tables import BLOCK, PAGE, TABLES, costs_table, fill, significant, table
from tests.benchmarks.workloads import cases_of

pytestmark = pytest.mark.once

DRAIN = ("drain", "1 process")


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
    about = {
        "date": "2026-01-02",
        "cores": 2,
        "memory_gib": 24,
        "python": "3.13.0",
        "repeat": 3,
        "server": {"server_version": "18.1", "fsync": "on"},
        "versions": {"ours": {"sqlaqueue": "0.1.0"}},
    }
    write(results, about, measured(), {DRAIN: "raw delete 100"})
    fill([results], page)
    before, after = (blocks(text) for text in (PAGE.read_text(), page.read_text()))
    assert "41,200 (0.82)" in after["drain"]
    assert "PostgreSQL 18.1 on loopback (fsync on), Python 3.13.0; 3 runs in turn" in after["about"]
    assert {name for name in before if before[name] != after[name]} <= {"drain", "about"}


def test_results_of_flow_control_have_a_description_of_their_own(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    results = [tmp_path / "one.json", tmp_path / "two.json"]
    case = ("flow", "1 process of 1 thread")
    for repeat, path in enumerate(results, start=1):
        about = {
            "date": "2026-01-02",
            "cores": 2,
            "memory_gib": 24,
            "python": "3.13.0",
            "repeat": repeat,
            "server": {"server_version": "18.1", "fsync": "on"},
            "versions": {path.stem: {f"system of {path.stem}": "1.0"}},
        }
        measured_once = [Sample(0, *case, "sqlaqueue Order", "ratio", 0.25)] if repeat == 1 else []
        write(path, about, [Sample(0, *case, "sqlaqueue Fair", "ratio", 0.5), *measured_once], {})
    fill(results, page)
    before, after = (blocks(text) for text in (PAGE.read_text(), page.read_text()))
    assert "| sqlaqueue Fair | 50% |" in after["flow"]
    assert "1 to 2 runs in turn.\nVersions: system of one 1.0, system of two 1.0." in after["flow-about"]
    assert before["about"] == after["about"]


def blocks(text: str) -> dict[str, str]:
    return {name: body for _, name, body, _ in BLOCK.findall(text)}


def test_the_page_has_every_table_and_no_other() -> None:
    assert set(blocks(PAGE.read_text())) == {*TABLES, "costs", "about", "flow-about"}


def test_the_page_shows_costs_json() -> None:
    assert blocks(PAGE.read_text())["costs"].strip() == costs_table()


def test_every_column_belongs_to_a_case() -> None:
    for columns in TABLES.values():
        for column in columns:
            assert column.case in {case.name for case in cases_of(column.workload)}, column


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
