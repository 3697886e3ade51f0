"""A file with a queue, Consumers of both APIs on it, and processes under faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

from tests.consumer.conftest import APIS
from tests.faults.conftest import fork_server, seed_of
from tests.faults.harness import Harness
from tests.sqlite.bench import SQLiteBench

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.faults.fork_server import ForkServer

__all__ = ["fork_server"]

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
def make_harness(
    request: pytest.FixtureRequest, pytestconfig: pytest.Config, bench: SQLiteBench, fork_server: ForkServer
) -> MakeHarness:
    """Return a function that makes a harness on the file."""

    def make(**options: Any) -> AbstractContextManager[Harness]:
        rng = random.Random(f"{seed_of(pytestconfig)} {request.node.name}")
        return Harness(bench, fork_server, bench.file.path.parent, rng, **options).running()

    return make
