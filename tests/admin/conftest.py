"""Each test finds an empty database; ``setup`` is a queue of each kind in it."""

import pytest
import sqlalchemy as sa

from tests.admin.models import Setup
from tests.shared_database import engine, session, shared
from tests.unique.models import KINDS

__all__ = ["engine", "session", "setup", "shared"]


@pytest.fixture(params=KINDS)
def setup(engine: sa.Engine, request: pytest.FixtureRequest) -> Setup:
    return Setup.of(engine, request.param)
