"""Each test finds an empty database of PostgreSQL, which the tests of a module share."""

from tests.shared_database import engine, shared

__all__ = ["engine", "shared"]
