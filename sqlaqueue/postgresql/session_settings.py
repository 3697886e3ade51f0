"""Settings that transactions give to the statements in them, by ``SET LOCAL``."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa


def session_setting(name: str) -> sa.ColumnElement[Any]:
    """Return a setting as a text, NULL if it is not set.

    After a transaction with ``SET LOCAL`` the setting of the session is an empty text, not NULL.
    """
    # As the server prints it: Alembic compares defaults as texts, as the comparison of their values would be NULL.
    return sa.literal_column(f"NULLIF(current_setting('{name}'::text, true), ''::text)", sa.Text())
