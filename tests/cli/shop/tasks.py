"""Its handlers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tests.cli.shop.models import Done, Letter

VALUE = 7


def _done(job: object) -> Done:
    key = ",".join(map(str, sa.inspect(job).identity))
    return Done(queue=type(job).__tablename__, job=key, pid=os.getpid())


def send(session: Session, job: object) -> None:
    session.add(_done(job))


def send_all(session: Session, jobs: list[object]) -> None:
    session.add_all([Done(queue="batch", job=str(len(jobs)), pid=os.getpid())])


async def send_async(session: AsyncSession, job: object) -> None:
    await asyncio.sleep(0)
    session.add(_done(job))


def send_slowly(session: Session, job: object) -> None:
    """Wait until the file $SHOP_GO_ON exists."""
    session.add(_done(job))
    at_work = Path(os.environ["SHOP_AT_WORK"])
    at_work.write_text(str(os.getpid()))
    while not Path(os.environ["SHOP_GO_ON"]).exists():
        time.sleep(0.01)


async def send_stubbornly(session: AsyncSession, job: object) -> None:
    """Never end, not even when the task is cancelled."""
    await asyncio.to_thread(Path(os.environ["SHOP_AT_WORK"]).write_text, "")
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


def fall_ill(session: Session, job: object) -> None:
    msg = f"no: {job}"
    raise ValueError(msg)


def send_on(session: Session, job: object) -> None:
    """Enqueue a job into another queue."""
    session.add_all([_done(job), Letter()])


def die(session: Session, job: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def without_arguments() -> None:
    pass


def log_interpreter_settings(session: Session, job: object) -> None:
    said = f"young: {gc.get_threshold()[0]} frozen: {gc.get_freeze_count() > 0} switch: {sys.getswitchinterval()}"
    logging.getLogger("sqlaqueue").info(said)
