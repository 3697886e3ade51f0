"""A worker process of a test: it runs jobs, and writes down which, until SIGTERM.

``python -m tests.web.worker URL KIND``
"""

from __future__ import annotations

import sys
import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer
from tests.unique.models import make_job

RAN = "CREATE TABLE ran (id bigint NOT NULL, attempt int, pid int NOT NULL, at timestamptz NOT NULL)"
"""The table with a row for each call of a handler."""

WRITE = sa.text("INSERT INTO ran VALUES (:id, :attempt, pg_backend_pid(), clock_timestamp())")


def main(url: str, kind: str) -> None:
    """Run jobs until SIGTERM."""
    engine = sa.create_engine(url)
    # A call is recorded at once, whatever becomes of the job's transaction.
    own = sa.create_engine(url, isolation_level="AUTOCOMMIT")

    def handler(_: Session, job: Any) -> None:
        with own.connect() as connection:
            connection.execute(WRITE, {"id": job.id, "attempt": getattr(job, "attempts", None)})
        time.sleep(0.02)

    Consumer(make_job(kind, unique=None), handler, sessionmaker(engine), concurrency=2).run()
    own.dispose()
    engine.dispose()


if __name__ == "__main__":
    main(*sys.argv[1:])
