"""Processes that enqueue the same jobs while workers run them: no two twins count, and no job is lost."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

import sqlaqueue.mariadb
from sqlaqueue.consumer import pace
from tests.unique.models import create, make_job
from tests.unique.random_process import CONFIGURATIONS
from tests.unique.test_killed_processes import Processes, check_nothing_is_lost, check_twins, drain

if TYPE_CHECKING:
    from pathlib import Path

    from tests.mariadb.server import MariaDBServer

pytestmark = pytest.mark.once

ROLES = ("producer", "producer", "producer", "administrator", "worker", "worker")
USUAL = ("unfinished", "waiting")
NAMES = [name for name, (kind, _) in CONFIGURATIONS.items() if kind == "update_status"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in USUAL else pytest.mark.thorough) for name in NAMES]
)
def test_no_two_twins_count_and_no_job_is_lost(
    mariadb: MariaDBServer,
    tmp_path: Path,
    name: str,
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, unique = CONFIGURATIONS[name]
    job = make_job(kind, unique, max_attempts=4, lease=1)
    rng = random.Random(pytestconfig.getoption("--seed") or time.time_ns())
    with mariadb.database() as database:
        engine = sa.create_engine(mariadb.url(database))
        sqlaqueue.mariadb.prepare(engine)
        create(engine, job)
        processes = Processes(mariadb.url(database), name, tmp_path, rng)
        observed = 0
        try:
            for role in ROLES:
                processes.start(role)
            for _ in range(3):
                before, until = len(processes.enqueued()), time.monotonic() + 60
                while len(processes.enqueued()) < before + 40:
                    assert time.monotonic() < until, "nothing is enqueued"
                    observed += len(check_twins(engine, job, unique.states))
                    time.sleep(0.02)
                    processes.replace_dead()
                processes.kill_one()
        finally:
            processes.kill_all()
        assert observed > 20
        # Of the jobs that wait for twins with one key, each rescue lets one go on.
        monkeypatch.setattr(pace, "RESCUE", 0.2)
        drain(engine, job)
        check_nothing_is_lost(engine, job, processes.enqueued())
        engine.dispose()
