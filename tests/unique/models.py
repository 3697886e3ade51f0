"""The models of the tests: one unique queue of each kind."""

from typing import Any

from sqlalchemy.orm import mapped_column

from sqlaqueue import Unique
from tests import models
from tests.models import KEEPING_ROWS, KINDS, TEXT, create, shared

__all__ = ["KEEPING_ROWS", "KINDS", "TEXT", "create", "make_job"]

BY_KEY = Unique("key")


@shared
def make_job(kind: str, unique: Unique | None = BY_KEY, **options: Any) -> Any:
    attributes = {"key": mapped_column(TEXT), "note": mapped_column(TEXT)}
    return models.make_job(kind, attributes, unique=unique, **options)
