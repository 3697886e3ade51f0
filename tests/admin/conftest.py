"""Each test finds an empty database; ``setup`` is a queue of each kind in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.admin.models import Setup
from tests.shared_database import engine, shared
from tests.unique.models import KINDS

__all__ = ["engine", "setup", "shared"]


@pytest.fixture(params=KINDS)
def setup(engine: sa.Engine, request: pytest.FixtureRequest) -> Setup:
    return Setup.of(engine, request.param)


@pytest.fixture
def session(engine: sa.Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session
