"""Random histories of unique keys, with processes that are killed: no two duplicates count, and no job is lost."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.duplicates import (
    CONFIGURATIONS,
    RULES,
    DuplicateHistory,
    Duplicates,
    administrate,
    model_of,
    produce,
    violations,
    work,
)
from tests.faults.history import Record
from tests.servers import Database

pytestmark = pytest.mark.once

USUAL = ("waiting",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in USUAL else pytest.mark.thorough) for name in CONFIGURATIONS]
)
def test_no_two_duplicates_count_and_no_job_is_lost(
    database: Database, sessions: Callable[..., Any], tmp_path: Path, rng: random.Random, name: str
) -> None:
    engine = sessions(model_of(name)).kw["bind"]
    with Duplicates(engine, database.url(), name, tmp_path, rng) as test:
        test.run((produce, produce, administrate, work, work), jobs=25)
        test.drain()
        history = test.history()
        assert violations(history) == {}
    assert sum(map(len, history.observed)) > 20
    # Of rows that a claim deletes, only the dead letters are left.
    assert len(history.jobs) > (10 if "status" in test.job.__table__.c else 0)
    assert history.duplicates or "waiting" not in str(test.unique.states)


def history_with(counts: dict[str, int], **jobs: tuple[str, str | None]) -> DuplicateHistory:
    """Return the history of two jobs, of which the second was cancelled for the first."""
    records = [Record(key, "produce0", "enqueueing", key) for key in (1, 2)]
    left = {1: ("completed", None), 2: ("cancelled", "duplicate of job 1")} | {
        int(key[1:]): job for key, job in jobs.items()
    }
    return DuplicateHistory([*records, Record(3, "test", "observed", None, {"counts": counts})], left)


@pytest.mark.parametrize(
    ("history", "broken"),
    [
        (history_with({"a": 1, "b": 1}), set()),
        (history_with({"a": 2, "b": 1}), {"no_two_duplicates_count"}),
        (history_with({}, _3=("completed", None)), {"each_job_has_an_end"}),
        (history_with({}, _1=("pending", None)), {"each_job_has_an_end"}),
        (history_with({}, _2=("cancelled", "duplicate of job 7")), {"duplicates_existed"}),
    ],
)
def test_each_violation_is_reported(history: DuplicateHistory, broken: set[str]) -> None:
    assert violations(history).keys() == broken
    assert broken <= {rule.__name__ for rule in RULES}
