"""Each test finds an empty database: of PostgreSQL, and of the other engines as well if it asks for an engine only."""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import sqlalchemy as sa

import sqlaqueue
from sqlaqueue.mapping.mixin import spec_of
from tests.flow_control.models import HELD, create, make_job
from tests.servers import Database
from tests.shared_database import engine as of_postgresql
from tests.shared_database import shared

__all__ = ["of_postgresql", "shared"]

OTHERS = ["sqlite", "mariadb"]
ON_ALL = {"test_limits", "test_order", "test_pairs", "test_held_back", "test_consumers"}
"""The modules of tests that run on all engines."""


ENQUEUED = importlib.import_module("sqlaqueue.testing.enqueued")
"""The module; the package has a function of this name."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on each engine; by default half of them run on one other engine than PostgreSQL."""
    if "engine" not in metafunc.fixturenames:
        return
    others = (
        OTHERS if metafunc.module.__name__.rpartition(".")[2] in ON_ALL and "held" not in metafunc.fixturenames else []
    )
    number = crc32(metafunc.definition.name.encode()) % (2 * len(OTHERS))
    marks = [[] if place == number else [pytest.mark.thorough] for place in range(len(OTHERS))]
    kinds = [pytest.param(other, marks=marks[place]) for place, other in enumerate(others)]
    metafunc.parametrize("engine", ["postgresql", *kinds], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is about PostgreSQL on the other engines."""

    def is_apart(item: Any) -> bool:
        on = getattr(getattr(item, "callspec", None), "params", {}).get("engine", "postgresql")
        return on in OTHERS and item.get_closest_marker("postgresql") is not None

    left_out = [item for item in items if is_apart(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not is_apart(item)]


@pytest.fixture
def engine(request: pytest.FixtureRequest, shared: Database, tmp_path: Path) -> Iterator[sa.Engine]:
    if request.param == "postgresql":
        yield request.getfixturevalue("of_postgresql")
        return
    if request.param == "sqlite":
        made = sqlaqueue.prepare(sa.create_engine(f"sqlite:///{tmp_path / 'jobs.db'}", pool_size=60))
        yield made
        made.dispose()
        return
    server = request.getfixturevalue("mariadb")
    with server.database() as name:
        made = sqlaqueue.prepare(sa.create_engine(server.url(name), pool_size=60))
        yield made
        made.dispose()


@pytest.fixture
def travelling(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function: create a queue, the only one for which ``travel()`` lets time pass.

    It would try the tables of each class in this process, and other tests have made hundreds.
    """

    def make(**config: Any) -> Any:
        job = create(engine, make_job(**config))
        monkeypatch.setattr(ENQUEUED, "_queues", lambda: [spec_of(job)])
        return job

    return make


@pytest.fixture
def pool(shared: Database, engine: sa.Engine) -> Iterator[sa.Engine]:
    """An engine with connections for many Consumers, on the database of ``engine``."""
    if engine.dialect.name != "postgresql":
        yield engine
        return
    many = sa.create_engine(shared.url(), pool_size=60)
    yield many
    many.dispose()


@pytest.fixture(params=HELD)
def held(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The configuration of a strategy whose transaction holds the jobs."""
    return HELD[request.param]
