"""The queues of a random history, and a process that works on them."""

import asyncio
import random
import sys
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, mapped_column, relationship, sessionmaker

from sqlaqueue import AsyncConsumer, Constant, Consumer, WaitFor
from tests.models import new_base
from tests.waits.models import job_class

UNFINISHED = {
    "Batch": "SELECT count(*) FROM member WHERE batch_id = :key AND status NOT IN ('completed', 'failed', 'cancelled')",
    "Report": "SELECT count(*) FROM batch JOIN report ON report.batch_id = batch.id "
    "WHERE report.id = :key AND batch.status <> 'completed'",
    "Step": "SELECT count(*) FROM step JOIN step AS next ON next.previous_id = step.id "
    "WHERE next.id = :key AND step.status <> 'completed'",
}
"""For each class, how many jobs it should have waited for when it runs."""


def queues(strategies: list[str], *, deleted: bool = False) -> dict[str, Any]:
    """Return the classes: members, their batches, reports of batches, and chains of steps.

    :param deleted: whether completed members are deleted.
    """
    base = new_base()
    options: list[dict[str, Any]] = [
        {"strategy": each, "lease": 2, "max_attempts": 2, "retry": Constant(0.05)} for each in strategies
    ]

    def key() -> dict[str, Any]:
        return {"id": mapped_column(sa.Integer, primary_key=True)}

    step_key = key()
    found = [
        job_class(
            base,
            "Member",
            key()
            | {
                "batch_id": mapped_column(sa.ForeignKey("batch.id")),
                "batch": relationship("Batch", back_populates="members"),
            },
            on_complete="delete" if deleted else "keep",
            **options[0],
        ),
        job_class(
            base,
            "Batch",
            key() | {"members": relationship("Member", back_populates="batch")},
            waits_for="members",
            extra_columns=("is_open",),
            **options[1],
        ),
        job_class(
            base,
            "Report",
            key() | {"batch_id": mapped_column(sa.ForeignKey("batch.id")), "batch": relationship("Batch")},
            waits_for=WaitFor("batch", on_failure="cancel"),
            **options[2],
        ),
        job_class(
            base,
            "Step",
            step_key
            | {
                "previous_id": mapped_column(sa.ForeignKey("step.id")),
                "previous": relationship("Step", remote_side=[step_key["id"]]),
            },
            waits_for="previous",
            **options[3],
        ),
    ]
    sa.Table(
        "effect",
        base.metadata,
        sa.Column("kind", sa.Text),
        sa.Column("key", sa.Integer),
        sa.Column("early", sa.Integer),
    )
    sa.Table("mood", base.metadata, sa.Column("failing", sa.Float))
    return {model.__name__: model for model in found}


def handler(kind: str, chance: random.Random) -> Any:
    """Return a handler that has an effect, and fails now and then."""

    def handle(session: Session, job: Any) -> None:
        early = session.scalar(sa.text(UNFINISHED[kind]), {"key": job.id}) if kind in UNFINISHED else 0
        effect = sa.text("INSERT INTO effect VALUES (:kind, :key, :early)")
        session.execute(effect, {"kind": kind, "key": job.id, "early": early})
        if chance.random() < (session.scalar(sa.text("SELECT failing FROM mood")) or 0):
            message = "by chance"
            raise ValueError(message)

    return handle


def main(url: str, api: str, seed: str, deleted: str, *strategies: str) -> None:
    models, chance = queues(list(strategies), deleted=deleted == "True"), random.Random(seed)
    if api == "sync":
        engine = sa.create_engine(url, pool_size=30)
        made = [
            Consumer(model, handler(name, chance), sessionmaker(engine), concurrency=2)
            for name, model in models.items()
        ]
        Consumer.run_all(*made)
    else:
        asyncio.run(_serve(url.replace("+psycopg:", "+asyncpg:"), models, chance))


async def _serve(url: str, models: dict[str, Any], chance: random.Random) -> None:
    engine = create_async_engine(url, pool_size=30)

    def made_async(name: str) -> Any:
        handle = handler(name, chance)

        async def handle_async(session: AsyncSession, job: Any) -> None:
            await session.run_sync(handle, job)

        return handle_async

    made = [
        AsyncConsumer(model, made_async(name), async_sessionmaker(engine), concurrency=2)
        for name, model in models.items()
    ]
    await AsyncConsumer.run_all(*made)


if __name__ == "__main__":
    main(*sys.argv[1:])
