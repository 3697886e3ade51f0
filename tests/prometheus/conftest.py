"""Each test finds an empty database; ``setup`` is a queue of each kind in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.admin.models import Setup
from tests.shared_database import engine, shared
from tests.unique.models import KINDS

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = ["engine", "setup", "shared"]


@pytest.fixture(params=KINDS)
def setup(engine: sa.Engine, request: pytest.FixtureRequest) -> Setup:
    return Setup.of(engine, request.param, unique=None)
