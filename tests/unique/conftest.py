"""Each test finds an empty database."""

from tests.shared_database import engine, session, shared

__all__ = ["engine", "session", "shared"]
