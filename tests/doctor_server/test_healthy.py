"""A new queue of each strategy yields no finding, with jobs and after they have run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, Limit
from tests.doctor_server.examine import examine
from tests.unique.models import KINDS, create, make_job

if TYPE_CHECKING:
    from tests.servers import Database

DRIVERS = ("psycopg", "psycopg2")


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_queue_and_a_drained_one(database: Database, kind: str) -> None:
    options: dict[str, Any] = {} if kind == "rows_are_messages" else {"limits": [Limit(5, per="key")]}
    job = make_job(kind, unique=None, **({} if kind == "existing_messages" else options))
    engine = sa.create_engine(database.url())
    create(engine, job)
    assert _findings(engine, job) == []
    with Session(engine) as session:
        jobs = [job(key=str(number)) for number in range(60)]
        session.add_all(jobs)
        session.commit()
        if kind == "existing_messages":
            message = job.metadata.tables["message"]
            session.execute(sa.insert(message), [{"job_id": each.id} for each in jobs])
            session.commit()
    assert _findings(engine, job) == []
    ran: list[Any] = []
    Consumer(job, lambda session, each: ran.append(each.id), sessionmaker(engine)).drain()
    assert len(ran) == 60
    assert _findings(engine, job) == []
    engine.dispose()


@pytest.mark.parametrize("driver", DRIVERS)
def test_another_driver(database: Database, driver: Any) -> None:
    engine = sa.create_engine(database.url(driver))
    job = make_job("update_status")
    create(engine, job)
    assert _findings(engine, job) == []
    engine.dispose()


def _findings(engine: sa.Engine, job: Any) -> list[Any]:
    # The servers of the tests do not wait for a disk, which is a finding.
    found = examine(engine, [job], deep=True)
    return [each for each in found if each.code not in {"fsync_off", "full_page_writes_off"}]
