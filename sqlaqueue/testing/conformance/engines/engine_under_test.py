"""What the suite needs of an engine beside the statements of the library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.orm import Session


@dataclass(frozen=True)
class Reason:
    """Why tests cannot hold on an engine."""

    why: str
    """What the engine lacks, in one sentence."""
    feature: str | None = None
    """What users do without, for the table of engines; None if the tests concern only another engine."""
    tried: bool = True
    """Whether the tests run nevertheless, and have to fail. False for tests that could only time out, or whose first
    statement exists on another engine only."""


class EngineUnderTest:
    """One kind of database."""

    dialect: ClassVar[str]
    """The name of SQLAlchemy's dialect."""
    title: ClassVar[str]
    """The name for people."""
    reasons: ClassVar[Mapping[str, Reason]] = {}
    """The tests that cannot hold: names of tests, or ``name[value]`` for one value of their parameters."""

    def reason(self, test: str, parameters: Mapping[str, Any]) -> Reason | None:
        """Return why a test cannot hold; None for a test that has to."""
        names = [test, *(f"{test}[{value}]" for value in parameters.values())]
        return next((self.reasons[name] for name in names if name in self.reasons), None)

    def lock_timeout(self, seconds: float) -> str:
        """Return the statement after which a transaction waits so long for locks."""
        raise NotImplementedError

    def end_transactions(self, engine: sa.Engine, tables: Sequence[sa.Table]) -> None:
        """End the transactions on some tables that a failed test has left open."""

    def kill(self, session: Session, engine: sa.Engine) -> None:
        """End the connection of a session, as the death of its process would."""
        raise NotImplementedError

    @contextmanager
    def without_triggers(self, session: Session, table: sa.Table) -> Iterator[None]:
        """Write to a table as a program does that bypasses its triggers."""
        yield
