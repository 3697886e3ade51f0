"""A model that tests map with different configurations, and what they do with its jobs."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, claim, complete


def order(config: QueueConfig | None, **attributes: Any) -> type[Any]:
    """Map a class to the table ``orders``, as a queue with ``config``, or as no queue if it is None."""

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


def enqueue(engine: sa.Engine, model: type[Any], *articles: str, **values: Any) -> None:
    with Session(engine) as session:
        session.add_all(model(article=article, **values) for article in articles)
        session.commit()


def run_all(engine: sa.Engine, model: type[Any]) -> list[str]:
    """Claim and complete all due jobs, and return their articles."""
    with Session(engine) as session:
        jobs = session.scalars(claim(model, 100)).all()
        done = sorted(job.article for job in jobs)
        if jobs:
            session.execute(complete(jobs))
        session.commit()
        return done


def statuses(engine: sa.Engine) -> dict[str, str]:
    """Return the status of each row by its article."""
    with engine.connect() as connection:
        return {row.article: row.status for row in connection.execute(sa.text("SELECT article, status FROM orders"))}
