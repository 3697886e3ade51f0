"""Settings that transactions give to the statements in them, by ``SET LOCAL``."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa


def session_setting(name: str) -> sa.ColumnElement[Any]:
    """Return a setting as a text, NULL if it is not set.

    After a transaction with ``SET LOCAL`` the setting of the session is an empty text, not NULL.
    """
    # Literals, as DDL has no parameters.
    value = sa.func.current_setting(sa.literal_column(f"'{name}'"), sa.true(), type_=sa.Text())
    return sa.func.nullif(value, sa.literal_column("''"), type_=sa.Text())
