"""Each test finds an empty database."""

from tests.shared_database import engine, shared

__all__ = ["engine", "shared"]
