"""What handlers record, and what was admitted too many by it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import runs
from tests.benchmarks.runs import Run
from tests.benchmarks.systems import FLOW
from tests.benchmarks.systems.protocol import RunLog, payloads

pytestmark = pytest.mark.once

TWO, ONE, FOUR = (FLOW[name] for name in ("Limit(2) of each key", "Limit(1) of each key", "Limit(4) of the queue"))


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
    assert runs.too_many(runs_of(1, (0, 5), (0, 5)), FLOW["Fair"]) is None


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
from tests.benchmarks.systems.protocol import RunLog

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
