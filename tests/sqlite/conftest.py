"""A file with a queue, Consumers of both APIs on it, and processes under faults."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from sqlalchemy.orm import Session, sessionmaker

from tests.consumer.conftest import APIS
from tests.faults.conftest import rng
from tests.faults.harness import Harness
from tests.sqlite.models import SQLiteBench, made

__all__ = ["rng"]

MakeHarness = Callable[..., AbstractContextManager[Harness]]


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bench(tmp_path: Path, api: str) -> Iterator[SQLiteBench]:
    """The queue in a file, with Consumers of one API, sync or async."""
    bench = SQLiteBench(tmp_path / "jobs.db", api)
    yield bench
    bench.engine.dispose()


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[sessionmaker[Session]]:
    """Sessions on a new file with the tables of all queues with options."""
    sessions = made(tmp_path / "jobs.db")
    yield sessions
    sessions.kw["bind"].dispose()


@pytest.fixture
def make_harness(bench: SQLiteBench, rng: random.Random) -> MakeHarness:
    """Return a function that makes a harness on the file."""
    return lambda **options: Harness(bench, bench.file.path.parent, rng, **options)
