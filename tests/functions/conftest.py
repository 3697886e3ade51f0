"""An engine of each database, with an empty database."""

from tests.shared_database import each_engine as engine
from tests.shared_database import shared

__all__ = ["engine", "shared"]
