"""A worker process of the demo: ``python -m sqlaqueue.demo.worker STRATEGY BATCH``.

A Consumer, and a line on standard output for each of its events, from which the show knows who holds what.
"""

from __future__ import annotations

import os
import sys
import threading

from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, JobEvent
from sqlaqueue.demo.models import MODELS, FileJob, read_file

URL = "SQLAQUEUE_DEMO_URL"
PAUSE_AT = "SQLAQUEUE_DEMO_PAUSE_AT"

go_on = threading.Event()


def handle(session: Session, job: FileJob) -> None:
    """Read the file; at the one in the middle, wait for what the show decides: to go on, or SIGKILL."""
    if job.path == os.environb[PAUSE_AT.encode()]:
        tell("paused")
        go_on.wait()
    read_file(session, job)


def tell(line: str) -> None:
    """Write a line, whole and at once: the next moment may be this process's last."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def tell_event(event: JobEvent) -> None:
    """Say what happened to which job."""
    tell(f"{event.name} {event.key[0]}")


def listen(consumer: Consumer[FileJob]) -> None:
    """Wait for the word to go on. The end of the input is the end of the show, also when that was killed."""
    while os.read(sys.stdin.fileno(), 80):
        go_on.set()
    go_on.set()
    consumer.stop()


def main() -> None:
    """Work until SIGTERM."""
    strategy, batch = sys.argv[1:]
    engine = create_engine(os.environ[URL])
    consumer = Consumer(
        MODELS[strategy], handle, sessionmaker(engine), batch_size=int(batch), poll_interval=0.1, grace=5
    )
    for event in ("claimed", "completed", "retried", "failed", "cancelled", "released", "rescued", "lease_lost"):
        consumer.on(event, tell_event)
    threading.Thread(target=listen, args=[consumer], daemon=True).start()
    tell("ready")
    consumer.run()
    engine.dispose()


if __name__ == "__main__":
    main()
