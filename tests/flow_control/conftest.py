"""Each test finds an empty database."""

import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue.mapping.mixin import spec_of
from tests.flow_control.models import HELD, create, make_job
from tests.servers import Database
from tests.shared_database import shared

if "FLOW" in os.environ:
    from flowengine import engine
else:
    from tests.shared_database import engine

__all__ = ["engine", "shared"]


ENQUEUED = importlib.import_module("sqlaqueue.testing.enqueued")
"""The module; the package has a function of this name."""


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
    many = sa.create_engine(shared.url(), pool_size=60)
    yield many
    many.dispose()


@pytest.fixture(params=HELD)
def held(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The configuration of a strategy whose transaction holds the jobs."""
    return HELD[request.param]
