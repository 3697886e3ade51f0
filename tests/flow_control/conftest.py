"""Each test finds an empty database."""

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from tests.servers import Database
from tests.shared_database import engine, shared

__all__ = ["engine", "shared"]


@pytest.fixture
def pool(shared: Database, engine: sa.Engine) -> Iterator[sa.Engine]:
    """An engine with connections for many Consumers, on the database of ``engine``."""
    many = sa.create_engine(shared.url(), pool_size=60)
    yield many
    many.dispose()
