"""Each test finds an empty database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.schedules.models import make_report
from tests.shared_database import engine, shared

__all__ = ["engine", "shared"]


@pytest.fixture
def session(engine: sa.Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


@pytest.fixture
def report() -> Any:
    """A queue without special options, whose rows remain."""
    return make_report()
