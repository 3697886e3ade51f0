"""Models whose queue changes from one migration to the next."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, mapped_column

from sqlaqueue import QueueConfig, QueueMixin


def order(config: QueueConfig | None, **attributes: Any) -> type[Any]:
    """Map a class to the table ``orders``: a queue with this config, or no queue at all."""

    class Base(DeclarativeBase):
        pass

    body = {
        "__tablename__": "orders",
        "id": mapped_column(sa.Integer, primary_key=True),
        "article": mapped_column(sa.Text, nullable=False),
        **attributes,
    }
    if config is None:
        return type("Order", (Base,), body)
    return type("Order", (QueueMixin, Base), {**body, "__queue__": config})
