"""A database of each engine, given as a URL, and the call that prepares an engine for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import sqlalchemy as sa

import sqlaqueue.mariadb
import sqlaqueue.sqlite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Place(NamedTuple):
    """A database, and how to prepare engines for it."""

    url: str
    prepare: Callable[[Any], None]

    def engine(self, **options: Any) -> sa.Engine:
        """Return an engine that is prepared."""
        engine = sa.create_engine(self.url, **options)
        self.prepare(engine)
        return engine


@pytest.fixture(params=["sqlite", "mariadb"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "sqlite":
        yield Place(f"sqlite:///{tmp_path / 'jobs.db'}", sqlaqueue.sqlite.prepare)
        return
    server = request.getfixturevalue("mariadb")
    with server.database() as name:
        yield Place(server.url(name), sqlaqueue.mariadb.prepare)
