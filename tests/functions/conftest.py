"""An engine of each database, with an empty database; PostgreSQL's is shared by the tests of a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from sqlaqueue import prepare
from tests.servers import Database
from tests.shared_database import shared

__all__ = ["shared"]


@pytest.fixture(params=["postgresql", "sqlite", "mariadb"])
def engine(request: pytest.FixtureRequest, shared: Database, tmp_path: Path) -> Iterator[sa.Engine]:
    if request.param == "mariadb":
        server = request.getfixturevalue("mariadb")
        with server.database() as name:
            engine = prepare(sa.create_engine(server.url(name)))
            yield engine
            engine.dispose()
        return
    if request.param == "sqlite":
        engine = prepare(sa.create_engine(f"sqlite:///{tmp_path / 'jobs.db'}"))
    else:
        engine = sa.create_engine(shared.url())
    yield engine
    if request.param == "postgresql":
        with engine.begin() as connection:
            connection.exec_driver_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    engine.dispose()
