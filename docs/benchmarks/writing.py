"""Handlers that add a row through their session, beside the same work written by hand with SQLAlchemy.

    python -m docs.benchmarks run --workload writing

By hand, threads take jobs from claims of 50. Each job has a session, a flush, one UPDATE by key and token, which the
driver prepares, and a commit: there is nothing else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from docs.benchmarks.server import BenchServer
from docs.benchmarks.systems import STRATEGIES
from docs.benchmarks.systems.protocol import payloads
from docs.benchmarks.systems.sqlaqueue_consumer import make_model
from sqlaqueue import Consumer, copy_in

JOBS, CLAIMED, BY_HAND = 3_000, 50, "by hand"
CASES = {"concurrency 1": 1, "concurrency 8": 8}
SYSTEMS = (BY_HAND, *STRATEGIES)

CLAIM = f"""
    UPDATE job SET status = 'processing', attempts = attempts + 1, lease_token = gen_random_uuid(),
                   lease_expires_at = now() + interval '1 minute'
    WHERE id = ANY (ARRAY(SELECT id FROM job WHERE status = 'pending' AND run_at <= now()
                          ORDER BY priority, run_at, id LIMIT {CLAIMED} FOR NO KEY UPDATE SKIP LOCKED))
    RETURNING *
"""


def drain_by_hand(model: Any, written: Any, sessions: Callable[[], Session], concurrency: int) -> None:
    """Drain the queue in threads, with the statements that are needed and no others."""
    table, buffer, lock = model.__table__, deque[Any](), threading.Lock()
    complete = (
        sa.update(table)
        .where(table.c.id == sa.bindparam("key"), table.c.lease_token == sa.bindparam("token"))
        .values(status="completed", finished_at=sa.func.now(), lease_token=None, lease_expires_at=None)
    )

    def take() -> Any:
        with lock:
            if not buffer:
                with sessions() as session:
                    buffer.extend(session.scalars(sa.select(model).from_statement(sa.text(CLAIM))))
                    session.expunge_all()
                    session.commit()
            return buffer.popleft() if buffer else None

    def work() -> None:
        while (job := take()) is not None:
            with sessions() as session:
                session.add_all([job, written(job=job.id)])
                session.flush()
                ended = session.connection().execute(complete, {"key": job.id, "token": job.lease_token})
                assert ended.rowcount == 1
                session.commit()

    threads = [threading.Thread(target=work) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(server: BenchServer, case: str, way: str, factor: float = 1.0) -> dict[str, float]:
    """Drain a queue; return the jobs a second, and the microseconds of CPU of client and server for a job."""
    concurrency, jobs = CASES[case], max(int(factor * JOBS), 50)
    strategy = "update_status" if way == BY_HAND else way
    model = make_model({"strategy": strategy, "on_complete": "keep"})
    base: Any = next(each for each in model.__mro__ if "registry" in vars(each))
    columns = {"id": sa.Column(sa.BigInteger, primary_key=True), "job": sa.Column(sa.BigInteger)}
    written: Any = type("Written", (base,), {"__tablename__": "written", "__module__": __name__, **columns})

    def handle(session: Session, job: Any) -> None:
        session.add(written(job=job.id))

    with server.database() as url:
        engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"), pool_size=concurrency + 2)
        base.metadata.create_all(engine)
        sessions = sessionmaker(engine)
        with sessions() as session:
            copy_in(session, model, payloads(jobs))
            session.commit()
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(sa.text("VACUUM ANALYZE"))
        server.checkpoint()
        began, client, used = time.perf_counter(), time.process_time(), server.cpu()
        if way == BY_HAND:
            drain_by_hand(model, written, sessions, concurrency)
        else:
            Consumer(model, handle, sessions, concurrency=concurrency).drain()
        took, client, used = time.perf_counter() - began, time.process_time() - client, server.cpu() - used
        with engine.connect() as connection:
            assert connection.scalar(sa.select(sa.func.count()).select_from(written.__table__)) == jobs
        engine.dispose()
    return {
        "jobs_per_second": jobs / took,
        "client_us_per_job": client / jobs * 1e6,
        "server_us_per_job": used / jobs * 1e6,
    }
