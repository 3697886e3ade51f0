"""A worker process of the demo: ``python -m sqlaqueue.demo.worker STRATEGY BATCH``.

It runs a Consumer, and prints a line for each of its events, from which the demo derives the jobs that it holds.
"""

from __future__ import annotations

import os
import sys
import threading

from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, JobEvent
from sqlaqueue.demo.database import connect
from sqlaqueue.demo.models import MODELS, FileJob, read_file

URL = "SQLAQUEUE_DEMO_URL"
PAUSE_AT = "SQLAQUEUE_DEMO_PAUSE_AT"

resumed = threading.Event()


def handle(session: Session, job: FileJob) -> None:
    """Read the file; before the one in the middle, wait until the demo resumes or kills this worker."""
    if job.path == os.environb[PAUSE_AT.encode()]:
        print_line("paused")
        resumed.wait()
    read_file(session, job)


def print_line(line: str) -> None:
    """Write a line unbuffered, as this process may be killed at any time."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def print_event(event: JobEvent) -> None:
    """Print an event and the key of its job."""
    print_line(f"{event.name} {event.key[0]}")


def read_input(consumer: Consumer[FileJob]) -> None:
    """Resume when a line arrives; stop at the end of the input, when the demo has ended or was killed."""
    while os.read(sys.stdin.fileno(), 80):
        resumed.set()
    resumed.set()
    consumer.stop()


def main() -> None:
    """Run jobs until SIGTERM."""
    strategy, batch = sys.argv[1:]
    engine = connect(os.environ[URL])
    consumer = Consumer(
        MODELS[strategy], handle, sessionmaker(engine), batch_size=int(batch), poll_interval=0.1, grace=5
    )
    for event in ("claimed", "completed", "retried", "failed", "cancelled", "released", "rescued", "lease_lost"):
        consumer.on(event, print_event)
    threading.Thread(target=read_input, args=[consumer], daemon=True).start()
    print_line("ready")
    consumer.run()
    engine.dispose()


if __name__ == "__main__":
    main()
