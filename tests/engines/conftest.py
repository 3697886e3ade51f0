"""A database of each engine, given as a URL, with the call that prepares an engine for it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import sqlaqueue.mariadb
import sqlaqueue.sqlite

Sessions = Callable[[Any], sessionmaker[Session]]


class Place(NamedTuple):
    """A database, and how to prepare engines for it."""

    url: str
    prepare: Callable[[Any], None]


@pytest.fixture(params=["sqlite", "mariadb"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "sqlite":
        yield Place(f"sqlite:///{tmp_path / 'jobs.db'}", sqlaqueue.sqlite.prepare)
        return
    server = request.getfixturevalue("mariadb")
    with server.database() as name:
        yield Place(server.url(name), sqlaqueue.mariadb.prepare)


@pytest.fixture
def engine(place: Place) -> Iterator[sa.Engine]:
    engine = sa.create_engine(place.url)
    place.prepare(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def sessions(engine: sa.Engine) -> Sessions:
    """A function: create the tables of a class, and return a maker of sessions on them."""

    def create(model: Any) -> sessionmaker[Session]:
        model.metadata.create_all(engine)
        return sessionmaker(engine)

    return create
