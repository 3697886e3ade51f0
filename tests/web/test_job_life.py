"""The life of a job: its row, its attempts, its lease, and what holds it back."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import Consumer, Fail, Limit, QueueConfig, QueueMixin, Schedule, cancel
from sqlaqueue.testing import fire_schedules, travel
from sqlaqueue.web.data.job import DELETED, LONGEST, JobLife, events_of, read_life
from sqlaqueue.web.data.reader import ParameterError
from tests.unique.models import create, make_job
from tests.web.jobs_of import KINDS, XSS, add, claimed, columns, complete_jobs, fail_jobs
from tests.web.models import Kind, Queues


def life_of(engine: sa.Engine, model: Any, key: str = "1", *redact: str) -> JobLife:
    with Session(engine) as session:
        life = read_life(session, columns(model, *redact), key)
        assert not session.dirty
    assert life is not None
    return life


def texts(life: JobLife) -> dict[str, str | None]:
    assert life.row is not None
    return {name: value.text for name, value in life.row.values.items()}


def kinds(life: JobLife) -> list[str]:
    return [event.kind for event in events_of(life)]


def test_values_are_exact(engine: sa.Engine, queues: Queues) -> None:
    reference = uuid.uuid4()
    add(
        engine,
        queues.Email(
            id=2**63 - 1,
            recipient="Zoë 🚀",
            subject=XSS,
            kind=Kind.RECEIPT,
            payload={"n": 2**70, "deep": [1, None]},
            total=Decimal("12345678901234.5000"),
            urgent=False,
            at=datetime(2030, 1, 1, tzinfo=UTC),
            reference=reference,
            blob=b"\x00\xff",
            big=-(2**63),
        ),
    )
    life = life_of(engine, queues.Email, str(2**63 - 1))
    found = texts(life)
    assert found["id"] == str(2**63 - 1)
    assert (found["recipient"], found["subject"], found["kind"]) == ("Zoë 🚀", XSS, "RECEIPT")
    assert str(2**70) in (found["payload"] or "")
    assert (found["total"], found["urgent"], found["blob"]) == ("12345678901234.5000", "false", "\\x00ff")
    assert (found["big"], found["reference"], found["day"]) == (str(-(2**63)), str(reference), None)
    assert life.row is not None
    assert life.row.values["at"].moment == datetime(2030, 1, 1, tzinfo=UTC)


def test_large_values_are_cut_by_the_database(engine: sa.Engine, queues: Queues) -> None:
    add(
        engine,
        queues.Email(recipient="a", subject="a" * 3_000_000, payload={"x": "y" * 10_000_000}, blob=b"z" * 500_000),
    )
    with Session(engine) as session:
        received: list[int] = []

        def count(_: Any, cursor: Any, *__: Any) -> None:
            result = cursor.pgresult
            if result is not None and result.ntuples:
                columns = range(result.nfields)
                received.extend(len(result.get_value(0, column) or b"") for column in columns)

        sa.event.listen(engine, "after_cursor_execute", count)
        life = read_life(session, columns(queues.Email), "1")
        sa.event.remove(engine, "after_cursor_execute", count)
    assert life is not None
    assert life.row is not None
    sizes = {name: (len(value.text or ""), value.size) for name, value in life.row.values.items() if value.size}
    assert sizes["subject"] == (LONGEST, 3_000_000)
    assert sizes["payload"] == (LONGEST, 10_000_009)
    assert sizes["blob"] == (LONGEST, 500_000)
    assert max(received) <= LONGEST, "no statement has sent the whole value"


def test_values_of_hundreds_of_megabytes_are_not_read(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(recipient="a"))
    fill = "UPDATE email SET subject = repeat('a', 20000000), payload = jsonb_build_object('x', repeat('y', 30000000))"
    with engine.begin() as connection:
        connection.exec_driver_sql(fill)
        stored = connection.scalar(sa.text("SELECT pg_column_size(payload) FROM email"))
    with Session(engine) as session:
        life = read_life(session, columns(queues.Email), "1")
    assert life is not None
    assert life.row is not None
    subject, payload = life.row.values["subject"], life.row.values["payload"]
    assert (len(subject.text or ""), subject.size, subject.is_in_bytes) == (LONGEST, 20_000_000, True)
    assert (payload.text, payload.size, payload.is_in_bytes) == (None, stored, True)


@pytest.mark.parametrize("kind", KINDS)
def test_each_strategy_tells_each_state(engine: sa.Engine, kind: str) -> None:
    model = make_job(kind, unique=None)
    create(engine, model)
    add(engine, model(id=1, key="a", note="b"))
    assert life_of(engine, model).state == "pending"
    assert life_of(engine, model).reasons.value[0].code == "no_consumer"
    assert texts(life_of(engine, model))["note"] == "b"
    fail_jobs(engine, model)
    life = life_of(engine, model)
    assert (life.state, texts(life)["note"]) == ("failed", "b")
    assert [event.error for event in events_of(life) if event.error] == ["ValueError: no stock"]
    assert kinds(life)[-1] == "finished"
    assert life.row is not None
    assert life.row.is_dead_letter is (kind == "rows_are_messages")


def test_running_job_shows_its_lease(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(recipient="a"))
    with claimed(engine, queues.Email):
        life = life_of(engine, queues.Email)
        assert life.state == "processing"
        lease = life.lease
        assert lease is not None
        assert not lease.has_expired
        assert 0 < lease.seconds <= 60
        assert uuid.UUID(lease.token)
        assert "running" in kinds(life)
        with engine.begin() as connection:
            connection.execute(sa.text("UPDATE email SET lease_expires_at = now() - interval '1 minute'"))
        expired = life_of(engine, queues.Email)
        assert expired.lease is not None
        assert expired.lease.has_expired
        assert expired.reasons.value[0].code == "lease_expired"


def test_cancellation_of_a_running_job_is_told(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(recipient="a"))
    with claimed(engine, queues.Email), Session(engine) as session:
        session.execute(cancel(sa.select(queues.Email)))
        session.commit()
        life = life_of(engine, queues.Email)
        assert life.cancellation.value is not None
        assert "asked" in kinds(life)


def test_held_job_is_told_to_be_locked(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Invoice(note="a"))
    with claimed(engine, queues.Invoice):
        life = life_of(engine, queues.Invoice)
        assert life.state == "pending"
        assert life.reasons.value[0].code == "locked"


def test_attempt_history_is_the_timeline(engine: sa.Engine, queues: Queues, sessions: Any) -> None:
    def handler(_: Session, email: Any) -> None:
        raise Fail("out of stock") if email.attempts == 2 else ValueError("try again")

    add(engine, queues.Email(recipient="a"))
    Consumer(queues.Email, handler, sessions, name="shop").drain()
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE email SET run_at = now()"))
    Consumer(queues.Email, handler, sessions, name="shop").drain()
    life = life_of(engine, queues.Email)
    assert life.attempts.value is not None
    assert [(each.attempt, each.outcome) for each in life.attempts.value] == [(2, "failed"), (1, "retried")]
    assert "ValueError: try again" in (life.attempts.value[1].traceback or "")
    assert kinds(life) == ["enqueued", "attempt", "attempt", "finished"]
    hidden = life_of(engine, queues.Email, "1", "last_error")
    assert hidden.attempts.value is not None
    assert [(each.error, each.traceback) for each in hidden.attempts.value] == [(None, None)] * 2
    assert "stock" not in repr(hidden)


def test_a_job_ends_after_its_attempts(engine: sa.Engine, queues: Queues, sessions: Any) -> None:
    """Also if the beginning of an attempt, which is counted back from when it was written, is later than the end."""
    add(engine, queues.Email(recipient="a"))
    Consumer(queues.Email, lambda session, email: None, sessions).drain()
    with engine.begin() as connection:
        late = "started_at = finished_at + interval '1 s', ended_at = finished_at + interval '1 s'"
        connection.execute(sa.text(f"UPDATE sqlaqueue_attempt SET {late} FROM email"))
    assert kinds(life_of(engine, queues.Email)) == ["enqueued", "attempt", "finished"]


def test_deleted_job_is_known_by_its_attempts(engine: sa.Engine, queues: Queues, sessions: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    Consumer(queues.Email, lambda session, email: None, sessions).drain()
    with engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM email"))
    life = life_of(engine, queues.Email)
    assert (life.state, life.row, kinds(life)) == (DELETED, None, ["attempt"])
    with Session(engine) as session:
        assert read_life(session, columns(queues.Email), "2") is None


def test_composite_keys_and_strange_ones(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Picture(tenant='a,"b', name=XSS, width=1))
    found = life_of(engine, queues.Picture, f'"a,""b","{XSS.replace(chr(34), chr(34) * 2)}"')
    assert texts(found)["name"] == XSS
    assert life_of(engine, queues.Picture, found.key).key == found.key
    for key in ("a", "a,b,c", ""):
        with Session(engine) as session, pytest.raises(ParameterError):
            read_life(session, columns(queues.Picture), key)
    for key in ("x", "1.5", str(2**63), "1 OR 1=1"):
        with Session(engine) as session, pytest.raises(ParameterError):
            read_life(session, columns(queues.Email), key)


def test_redacted_values_are_not_read(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(recipient="secret", subject="secret", payload={"a": "secret"}))
    fail_jobs(engine, queues.Email, error="ValueError: secret")
    redact = ("recipient", "subject", "payload", "last_error", "claimed_by", "lease_token")
    with Session(engine) as session:
        sent: list[str] = []
        sa.event.listen(engine, "before_cursor_execute", lambda *given: sent.append(given[2]))
        life = read_life(session, columns(queues.Email, *redact), "1")
    assert "secret" not in repr(life)
    assert [statement for statement in sent if "email.subject" in statement or "email.payload" in statement] == []


def test_redacted_worker_and_times_are_not_told(engine: sa.Engine, queues: Queues) -> None:
    add(engine, *(queues.Email(recipient="a") for _ in range(3)))
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE email SET run_at = '2126-03-04 05:06+00' WHERE id = 3"))
    fail_jobs(engine, queues.Email)
    with claimed(engine, queues.Email):
        with engine.begin() as connection:
            connection.execute(sa.text("UPDATE email SET claimed_by = 'the-host'"))
            connection.execute(sa.text("UPDATE sqlaqueue_attempt SET worker = 'the-host'"))
        for key in "12":
            assert "the-host" in str(life_of(engine, queues.Email, key))
            life = life_of(engine, queues.Email, key, "claimed_by")
            assert "the-host" not in str([life, events_of(life)])
    assert "2126-03-04" in str(life_of(engine, queues.Email, "3").reasons)
    assert "2126-03-04" not in str(life_of(engine, queues.Email, "3", "run_at"))


@pytest.mark.parametrize("moment", ["infinity", "-infinity", "20000-01-01", "0044-03-15 BC"])
def test_times_that_python_does_not_have(engine: sa.Engine, queues: Queues, moment: str) -> None:
    add(engine, queues.Email(recipient="a"))
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE email SET run_at = CAST(:moment AS timestamptz)"), {"moment": moment})
    life = life_of(engine, queues.Email)
    assert moment.split(maxsplit=1)[0] in (texts(life)["run_at"] or "")
    assert kinds(life) == ["enqueued"]


def test_redacted_key_of_a_limit_is_not_told(engine: sa.Engine) -> None:
    model = make_job("update_status", unique=None, limits=[Limit(1, per="note")])
    create(engine, model)
    add(engine, model(id=1, note="secret"), model(id=2, note="secret"))
    with claimed(engine, model):
        open_text = " ".join(each.text for each in life_of(engine, model, "2").reasons.value)
        assert "'secret'" in open_text
        assert "secret" not in repr(life_of(engine, model, "2", "note").reasons)


def test_unique_job_names_its_twin(engine: sa.Engine) -> None:
    model = make_job("update_status")
    create(engine, model)
    add(engine, model(id=1, key="a"))
    fail_jobs(engine, model)
    add(engine, model(id=2, key="a"))
    uniqueness = life_of(engine, model).uniqueness.value
    assert uniqueness is not None
    assert (uniqueness.twin, [value.text for value in uniqueness.values]) == ("2", ["a"])


def test_tick_names_the_schedule(engine: sa.Engine, sessions: Any) -> None:
    model = make_job("update_status", unique=None)
    schedule = Schedule("nightly", model, every=timedelta(hours=1), values={"note": "x"})
    create(engine, model)
    with Session(engine) as session:
        fire_schedules(session, [schedule])
        travel(session, timedelta(hours=2))
        fire_schedules(session, [schedule])
        session.commit()
    life = life_of(engine, model)
    assert life.tick.value is not None
    assert life.tick.value.schedule == "nightly"
    assert "nightly" in events_of(life)[0].text


def test_trace_is_shown(engine: sa.Engine, queues: Queues) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    model = make_job("update_status", unique=None, columns={"traceparent": "traceparent"})
    create(engine, model)
    add(engine, model(id=1, traceparent=f"00-{trace}-00f067aa0ba902b7-01"))
    assert life_of(engine, model).trace == trace


def test_part_that_cannot_be_read_hides_no_other(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(recipient="a"))
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE sqlaqueue_attempt"))
        connection.execute(sa.text("DROP TABLE sqlaqueue_control"))
    life = life_of(engine, queues.Email)
    assert "missing" in life.attempts.problem
    assert "missing" in life.cancellation.problem
    assert "missing" in life.reasons.problem
    assert texts(life)["recipient"] == "a"


def test_role_that_may_only_read_sees_all(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(recipient="a"))
    with Session(engine) as session:
        session.execute(sa.text("SET TRANSACTION READ ONLY"))
        life = read_life(session, columns(queues.Email), "1")
    assert life is not None
    assert life.reasons.value


def test_adopted_table_has_few_roles(engine: sa.Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Row(QueueMixin, Base):
        __tablename__ = "row"
        __queue__ = QueueConfig(strategy="batch_select", adopt={"status": "state", "run_at": "due"})
        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str] = mapped_column(default="pending")
        due: Mapped[datetime | None]

    Base.metadata.create_all(engine)
    add(engine, Row(id=1, due=datetime(2020, 1, 1)), Row(id=2, state="odd"))  # noqa: DTZ001 - a column without a zone
    assert kinds(life_of(engine, Row)) == ["due"]
    assert life_of(engine, Row, "2").state == "other"
    complete_jobs(engine, Row)
    assert life_of(engine, Row).state == "completed"
