"""Fixtures: a database, an engine, and a project whose migrations have been applied."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from tests.mapping.conftest import supply, tidy  # noqa: F401 - fixtures are found by being here
from tests.migrations.project import Project

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.servers import Database


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no bytecode: a migration edited within the second it was written would run as first compiled."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.fixture
def engine(database: Database) -> Iterator[sa.Engine]:
    engine = sa.create_engine(database.url())
    yield engine
    engine.dispose()


@pytest.fixture
def make(database: Database, tmp_path: Path) -> Callable[[type[Any]], Project]:
    """Return a function that makes a project whose database matches a model."""

    def make(model: type[Any], **options: Any) -> Project:
        project = Project(directory=tmp_path, database=database, metadata=model.metadata, options=options)
        project.revise("create")
        project.upgrade()
        return project

    return make
