"""Each test finds an empty database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from tests.flow_control.models import HELD
from tests.servers import Database
from tests.shared_database import engine, shared

__all__ = ["engine", "shared"]


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
