"""The traceback below the text of an error: in rows, in logs, and in what ``wait()`` returns."""

import logging
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import Cancel, Consumer, Fail, QueueConfig, QueueMixin, Retry, prepare, wait
from sqlaqueue.consumer.core.errors import STACK_LIMIT, stack_text
from sqlaqueue.texts import split_error
from tests.consumer.bench import Bench, logged

HEAD = "Traceback (most recent call last):"


def look_up(name: str) -> None:
    raise LookupError(f"no {name}")


def caught(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whichever it is
        return error
    pytest.fail("no error")


def test_row_and_log_have_the_same_traceback(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """It begins with the program's frames, and contains no values of variables."""
    caplog.set_level(logging.DEBUG, "sqlaqueue")
    password = "hunter2"[::-1]

    async def work(io: Any, job: Any) -> None:
        try:
            look_up(password[:0] + "address")
        except LookupError as error:
            raise ValueError("not sent") from error

    (key,) = bench.enqueue(1)
    bench.consumer(work, retry=lambda *_: 60).drain()
    first, stack = split_error(bench.row(key).last_error)
    assert first == "ValueError: not sent"
    assert stack is not None
    assert stack.startswith(HEAD)
    assert all(text in stack for text in ("in look_up", "LookupError: no address", "direct cause"))
    assert "/sqlaqueue/consumer/" not in stack
    assert password not in stack
    (record,) = logged(caplog, "retried")
    assert logging.Formatter().formatException(record.exc_info) == f"{stack}\n{first}"


def test_signals_have_no_traceback_but_that_of_their_cause(bench: Bench) -> None:
    signals = {1: Retry(error="later"), 2: Fail("no address"), 3: Cancel("not needed")}

    async def work(io: Any, job: Any) -> None:
        if job.id in signals:
            raise signals[job.id]
        try:
            look_up("address")
        except LookupError:
            raise Fail("bounced", kind="bounce")  # noqa: B904 - the context is what is tested

    keys = bench.enqueue(4)
    bench.consumer(work, retry=lambda *_: 60).drain()
    texts = [bench.row(key).last_error for key in keys]
    assert texts[:3] == ["Retry: later", "Fail: no address", "not needed"]
    first, stack = split_error(texts[3])
    assert first == "bounce: bounced"
    assert "in look_up" in (stack or "")


def test_a_known_traceback_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another line of the same function is another traceback."""

    def fail(number: int) -> None:
        if number == 1:
            look_up("first")
        look_up("second")

    texts = [stack_text(caught(partial(fail, number))) for number in (1, 2)]
    assert texts[0] != texts[1]
    monkeypatch.setattr(traceback, "format_tb", pytest.fail)
    assert [stack_text(caught(partial(fail, number))) for number in (1, 2)] == texts


def leave(_: object) -> None:
    raise SystemExit


Unreadable: Any = type("Unreadable", (Exception,), {"__suppress_context__": property(leave)})


def test_the_error_of_a_statement_shows_which_one_it_was(bench: Bench) -> None:
    """The driver's error, which it has as its cause, would leave no room for the handler's frames."""

    async def work(io: Any, job: Any) -> None:
        await io.execute(sa.text("SELECT 1 / 0"))

    (key,) = bench.enqueue(1)
    bench.consumer(work, retry=lambda *_: 60).drain()
    first, stack = split_error(bench.row(key).last_error)
    assert "division by zero" in first
    assert 'await io.execute(sa.text("SELECT 1 / 0"))' in (stack or "")
    assert "direct cause" not in (stack or "")
    assert len(stack or "") <= STACK_LIMIT


def recurse(depth: int) -> None:
    if depth:
        recurse_again(depth)
    look_up("end")


def recurse_again(depth: int) -> None:
    recurse(depth - 1)


def test_a_long_traceback_keeps_both_ends() -> None:
    text = stack_text(caught(lambda: recurse(200))) or ""
    assert STACK_LIMIT - 200 < len(text) <= STACK_LIMIT
    assert text.startswith(HEAD)
    assert "in caught" in text.partition("left out")[0]
    assert "in look_up" in text.partition("left out")[2]
    short = stack_text(caught(lambda: recurse(200)), 300) or ""
    assert 0 < len(short) <= 300
    assert "in look_up" in short
    assert stack_text(caught(lambda: recurse(200)), 50) is None


def test_groups_notes_and_errors_without_a_text() -> None:
    group = caught(lambda: (_ for _ in ()).throw(ExceptionGroup("two", [caught(lambda: look_up("a")), KeyError("b")])))
    error, stack = split_error(f"ExceptionGroup: two\n{stack_text(group)}")
    assert error == "ExceptionGroup: two"
    assert all(text in (stack or "") for text in ("LookupError: no a", "KeyError: 'b'"))
    noted = caught(lambda: look_up("a"))
    noted.add_note("for the order 17")
    assert (stack_text(noted) or "").endswith("\nfor the order 17")
    assert stack_text(Unreadable()) is None
    assert stack_text(ValueError("never raised")) is None
    other = ValueError("of a cause that was never raised")
    other.__cause__ = KeyError("x")
    assert (stack_text(other) or "").startswith(f"{HEAD}\nKeyError: 'x'")


@pytest.mark.parametrize("length", [20, 400])
def test_a_short_column_has_what_fits(tmp_path: Path, length: int) -> None:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(max_attempts=1, columns={"last_error": "last_error"})
        id: Mapped[int] = mapped_column(primary_key=True)
        last_error: Mapped[str | None] = mapped_column(sa.String(length))  # type: ignore[assignment]  # a column of its own

    def work(session: Session, job: Job) -> None:
        recurse(100)

    engine = prepare(sa.create_engine(f"sqlite:///{tmp_path / 'jobs'}", poolclass=sa.NullPool))
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add(Job())
        session.commit()
        Consumer(Job, work, sessionmaker(engine)).drain()
        text = session.scalars(sa.select(Job.last_error)).one()
    assert text is not None
    assert len(text) <= length
    assert text.startswith("LookupError: no end")
    assert ("in look_up" in text) == (length == 400)
    assert wait(sessionmaker(engine), Job, 1, check=False).error == "LookupError: no end"
