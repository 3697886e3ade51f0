"""An engine of each database, with an empty database, and a database of PostgreSQL for programs."""

from tests.shared_database import database, shared
from tests.shared_database import each_engine as engine

__all__ = ["database", "engine", "shared"]
