"""``python -m tests.history.dying_worker URL KIND``: a Consumer whose handler waits to be killed, or dies."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer
from tests.history.queues import make_model


def handle(_: Session, job: Any) -> None:
    """Report the job, and do what its payload says."""
    os.write(1, b"running\n")
    if job.payload == "die":
        os._exit(13)
    time.sleep(600)


if __name__ == "__main__":
    url, kind = sys.argv[1:]
    Consumer(make_model(kind), handle, sessionmaker(sa.create_engine(url)), lease=1, name="dying").run()
