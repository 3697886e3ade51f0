"""Type checks: the functions for tests."""

from __future__ import annotations

from datetime import timedelta
from typing import assert_type

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, scoped_session

from sqlaqueue import AsyncConsumer, Consumer, JobResult
from sqlaqueue.testing import (
    RunResult,
    async_crash,
    async_drain,
    async_enqueued,
    async_run_job,
    async_travel,
    async_wait_until,
    check_handlers,
    crash,
    drain,
    enqueued,
    run_job,
    travel,
    wait_until,
)
from tests.typing.claiming import Base, Email, User
from tests.typing.consuming import greet, make_async_session, make_session, send, send_async


def results_have_the_type_of_the_job(session: Session, scoped: scoped_session[Session], email: Email) -> None:
    """Functions of a Session."""
    assert_type(enqueued(session, Email, to="ada"), list[Email])
    enqueued(scoped, select(Email))
    assert_type(run_job(session, email, send), RunResult[Email])
    run_job(scoped, email, Consumer(Email, send, make_session))
    run_job(session, email, {Email: send})
    assert_type(drain(session, Email, send, scheduled=True), int)
    drain(session, select(Email), send)
    travel(session, timedelta(hours=1))
    crash(session, email)
    assert_type(wait_until(make_session, email, "completed"), JobResult[Email])
    assert_type(wait_until(make_session, (Email, 5), "failed", timeout=5), JobResult[Email])
    check_handlers(Base, {Email: send, User: greet})


def handlers_are_checked_against_the_job(session: Session, email: Email) -> None:
    """A handler of another model is a type error."""
    run_job(session, email, greet)  # type: ignore[arg-type]  # that is the mistake
    wait_until(make_session, email, "done")  # type: ignore[call-overload]  # that is the mistake


async def async_results(session: AsyncSession, email: Email) -> None:
    """Functions of an AsyncSession."""
    assert_type(await async_enqueued(session, Email), list[Email])
    assert_type(await async_run_job(session, email, send_async), RunResult[Email])
    await async_run_job(session, email, AsyncConsumer(Email, send_async, make_async_session))
    assert_type(await async_drain(session, Email, send_async), int)
    await async_travel(session, 60)
    await async_crash(session, email)
    assert_type(await async_wait_until(make_async_session, email, "completed"), JobResult[Email])
    await async_run_job(session, email, send)
    await async_drain(session, Email, Consumer(Email, send, make_session), check=True, limit=5)
