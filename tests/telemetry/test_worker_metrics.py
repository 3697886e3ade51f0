"""The metrics of workers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import AsyncConsumer, Consumer, Snooze
from sqlaqueue.prometheus import instrument
from tests.servers import Database
from tests.telemetry.models import MODELS, Base, Leased


@pytest.fixture
def sessions(database: Database) -> Iterator[sessionmaker[Session]]:
    engine = sa.create_engine(database.url("psycopg"))
    Base.metadata.create_all(engine)
    yield sessionmaker(engine)
    engine.dispose()


def behave(job: Any) -> None:
    if job.text == "fail":
        raise ValueError(job.text)
    if job.text == "snooze":
        raise Snooze(60)


def add(sessions: Any, model: Any, *texts: str) -> None:
    with sessions() as session:
        session.add_all([model(text=text) for text in texts])
        session.commit()


def values(registry: CollectorRegistry, name: str) -> dict[str, float]:
    """Return the samples of a metric by its labels other than the queue."""
    return {
        ",".join(value for label, value in sample.labels.items() if label != "queue"): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == name
    }


EXPECTED = {"completed": 2, "retried": 2, "failed": 1, "cancelled": 0, "released": 1}


@pytest.mark.parametrize("model", MODELS)
def test_what_a_consumer_did(sessions: sessionmaker[Session], model: Any) -> None:
    registry = CollectorRegistry()
    consumer = Consumer(model, lambda session, job: behave(job), sessions)
    instrument(consumer, registry=registry)
    instrument(consumer, registry=registry)
    assert values(registry, "sqlaqueue_worker_jobs_total") == dict.fromkeys(EXPECTED, 0), "exported from the start"
    add(sessions, model, "good", "good", "fail", "snooze")
    consumer.drain()
    assert values(registry, "sqlaqueue_worker_jobs_total") == EXPECTED
    assert values(registry, "sqlaqueue_worker_job_duration_seconds_count") == {"": 6}
    assert values(registry, "sqlaqueue_worker_job_wait_seconds_count") == {"": 6}
    assert values(registry, "sqlaqueue_worker_jobs_in_flight") == {"": 0}
    claims = values(registry, "sqlaqueue_worker_claims_total")
    assert claims["found"] >= 1
    assert claims["empty"] >= 1
    assert values(registry, "sqlaqueue_worker_claim_duration_seconds_count") == {"": sum(claims.values())}


async def test_an_async_consumer_and_another_queue_share_a_registry(
    database: Database, sessions: sessionmaker[Session]
) -> None:
    registry, engine = CollectorRegistry(), create_async_engine(database.url("asyncpg"))

    async def handler(session: Any, job: Any) -> None:
        behave(job)

    for model in MODELS:
        add(sessions, model, "good", "good", "fail", "snooze")
        consumer = AsyncConsumer(model, handler, async_sessionmaker(engine))
        instrument(consumer, registry=registry)
        await consumer.drain()
    await engine.dispose()
    text = generate_latest(registry).decode()
    for model in MODELS:
        queue = model.__tablename__
        for outcome, number in EXPECTED.items():
            assert f'sqlaqueue_worker_jobs_total{{outcome="{outcome}",queue="{queue}"}} {number:.1f}\n' in text


def test_a_batch_counts_each_of_its_jobs(sessions: sessionmaker[Session]) -> None:
    registry, seen = CollectorRegistry(), list[float]()
    add(sessions, Leased, *"abc")

    def handler(session: Session, jobs: list[Any]) -> None:
        seen.extend(values(registry, "sqlaqueue_worker_jobs_in_flight").values())

    consumer = Consumer(Leased, handler, sessions, batch=True, batch_size=10)
    instrument(consumer, registry=registry)
    consumer.drain()
    assert seen == [3]
    assert values(registry, "sqlaqueue_worker_jobs_total")["completed"] == 3
    assert values(registry, "sqlaqueue_worker_job_duration_seconds_count") == {"": 1}
