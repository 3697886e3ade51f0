"""Each test finds an empty database."""

from typing import Any

import pytest

from tests.schedules.models import make_report
from tests.shared_database import engine, session, shared

__all__ = ["engine", "session", "shared"]


@pytest.fixture
def report() -> Any:
    """A queue without special options, whose rows remain."""
    return make_report()
