"""Processes that enqueue the same jobs while workers run them: no two twins count, and no job is lost."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from sqlaqueue.consumer import pace
from tests.faults.conftest import rng as rng  # noqa: PLC0414 - a fixture
from tests.faults.twins import CONFIGURATIONS, Twins, administrate, engine_of, model_of, produce, violations, work

if TYPE_CHECKING:
    from pathlib import Path

    from tests.mariadb.server import MariaDBServer

pytestmark = pytest.mark.once

USUAL = ("unfinished", "waiting")
NAMES = [name for name, (kind, _) in CONFIGURATIONS.items() if kind == "update_status"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in USUAL else pytest.mark.thorough) for name in NAMES]
)
def test_no_two_twins_count_and_no_job_is_lost(
    mariadb: MariaDBServer, tmp_path: Path, name: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mariadb.database() as database:
        url = mariadb.url(database)
        engine = engine_of(url)
        model_of(name).metadata.create_all(engine)
        with Twins(engine, url, name, tmp_path, rng) as test:
            test.run((produce, produce, produce, administrate, work, work), jobs=40)
            # Of the jobs that wait for twins with one key, each rescue lets one go on.
            monkeypatch.setattr(pace, "RESCUE", 0.2)
            test.drain()
            history = test.history()
            assert violations(history) == {}
        assert sum(map(len, history.observed)) > 20
        assert len(history.jobs) > 10
        assert history.twins or "waiting" not in str(test.unique.states)
        engine.dispose()
