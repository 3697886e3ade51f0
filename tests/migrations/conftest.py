"""Databases that are used again and again, where a test leaves them as it found them."""

from __future__ import annotations

from tests.models.conftest import supply, tidy  # noqa: F401 - fixtures are found by being here
