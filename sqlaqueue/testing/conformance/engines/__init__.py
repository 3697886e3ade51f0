"""The engines of the suite: for each, what differs in the tests, and which tests cannot hold there, with the reason."""

from __future__ import annotations

import sqlalchemy as sa

from sqlaqueue.testing.conformance.engines.engine_under_test import EngineUnderTest, Reason
from sqlaqueue.testing.conformance.engines.mariadb import MariaDBUnderTest
from sqlaqueue.testing.conformance.engines.postgresql import PostgreSQLUnderTest
from sqlaqueue.testing.conformance.engines.sqlite import SQLiteUnderTest

ENGINES: tuple[EngineUnderTest, ...] = (PostgreSQLUnderTest(), SQLiteUnderTest(), MariaDBUnderTest())
"""One for each dialect."""


def engine_under_test(engine: sa.Engine) -> EngineUnderTest:
    """Return what the suite knows about the database of an engine.

    :raises LookupError: for a dialect that the suite does not know.
    """
    known = {each.dialect: each for each in ENGINES}
    if engine.dialect.name not in known:
        msg = f"the conformance suite knows {', '.join(known)}, not {engine.dialect.name}"
        raise LookupError(msg)
    return known[engine.dialect.name]


__all__ = ["ENGINES", "EngineUnderTest", "Reason", "engine_under_test"]
