"""Databases that are used again and again, where a test leaves them as it found them; and a project in one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from tests.migrations.project import Project
from tests.models.conftest import supply, tidy  # noqa: F401 - fixtures are found by being here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.servers import Database


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Migrations are edited within the second in which they were written: what was compiled would pass for new."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.fixture
def engine(database: Database) -> Iterator[sa.Engine]:
    engine = sa.create_engine(database.url())
    yield engine
    engine.dispose()


@pytest.fixture
def make(database: Database, tmp_path: Path) -> Callable[[type[Any]], Project]:
    """Return a project whose database is as a model wants it."""

    def make(model: type[Any], **options: Any) -> Project:
        project = Project(directory=tmp_path, database=database, metadata=model.metadata, options=options)
        project.revise("create")
        project.upgrade()
        return project

    return make
