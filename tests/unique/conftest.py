"""Each test finds an empty database."""

from __future__ import annotations

from tests.shared_database import engine, session, shared

__all__ = ["engine", "session", "shared"]
