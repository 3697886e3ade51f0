"""One job: its row, its attempts, its lease, what holds it back, and the pages that show and preview it."""

import re
import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from html.parser import HTMLParser
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Mapped, Session, mapped_column

from sqlaqueue import ConcurrencyLimit, Consumer, Fail, QueueConfig, QueueMixin, Schedule, Unique, cancel
from sqlaqueue.testing import fire_schedules, travel
from sqlaqueue.web import Access
from sqlaqueue.web.data.job import DELETED, LONGEST, JobLife, events_of, read_life
from sqlaqueue.web.data.reader import ParameterError
from tests.models import execute, new_base, sent_statements
from tests.unique.models import make_job
from tests.web.jobs import KINDS, XSS, add, claimed, columns, complete_jobs, fail_jobs, new_queue
from tests.web.models import Kind, Queues
from tests.web.test_workers import failing, heartbeat
from tests.web.test_workers import job as refused_job


def life_of(engine: sa.Engine, model: Any, key: str = "1", *redact: str) -> JobLife:
    with Session(engine) as session:
        life = read_life(session, columns(model, *redact), key)
        assert not session.dirty
    assert life is not None
    return life


def texts(life: JobLife) -> dict[str, str | None]:
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
    sizes = {name: (len(value.text or ""), value.size) for name, value in life.row.values.items() if value.size}
    assert sizes["subject"] == (LONGEST, 3_000_000)
    assert sizes["payload"] == (LONGEST, 10_000_009)
    assert sizes["blob"] == (LONGEST, 500_000)
    assert max(received) <= LONGEST, "no statement has sent the whole value"


def test_values_of_hundreds_of_megabytes_are_not_read(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(recipient="a"))
    fill = "UPDATE email SET subject = repeat('a', 20000000), payload = jsonb_build_object('x', repeat('y', 30000000))"
    execute(engine, fill)
    stored = execute(engine, "SELECT pg_column_size(payload) FROM email")
    with Session(engine) as session:
        life = read_life(session, columns(queues.Email), "1")
    subject, payload = life.row.values["subject"], life.row.values["payload"]
    assert (len(subject.text or ""), subject.size, subject.is_in_bytes) == (LONGEST, 20_000_000, True)
    assert (payload.text, payload.size, payload.is_in_bytes) == (None, stored, True)


@pytest.mark.parametrize("kind", KINDS)
def test_each_strategy_tells_each_state(engine: sa.Engine, kind: str) -> None:
    model = new_queue(engine, kind)
    add(engine, model(id=1, key="a", note="b"))
    assert life_of(engine, model).state == "pending"
    assert life_of(engine, model).reasons.value[0].code == "no_consumer"
    assert texts(life_of(engine, model))["note"] == "b"
    fail_jobs(engine, model)
    life = life_of(engine, model)
    assert (life.state, texts(life)["note"]) == ("failed", "b")
    assert [event.error for event in events_of(life) if event.error] == ["ValueError: no stock"]
    assert kinds(life)[-1] == "finished"
    assert life.row.is_dead_letter is (kind == "rows_are_messages")


def test_running_job_shows_its_lease(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(recipient="a"))
    with claimed(engine, queues.Email):
        life = life_of(engine, queues.Email)
        assert life.state == "processing"
        lease = life.lease
        assert not lease.has_expired
        assert 0 < lease.seconds <= 60
        assert uuid.UUID(lease.token)
        assert "running" in kinds(life)
        execute(engine, "UPDATE email SET lease_expires_at = now() - interval '1 minute'")
        expired = life_of(engine, queues.Email)
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
    Consumer(queues.Email, handler, sessions, worker_name="shop").drain()
    execute(engine, "UPDATE email SET run_at = now()")
    Consumer(queues.Email, handler, sessions, worker_name="shop").drain()
    life = life_of(engine, queues.Email)
    assert [(each.attempt, each.outcome) for each in life.attempts.value] == [(2, "failed"), (1, "retried")]
    assert "ValueError: try again" in (life.attempts.value[1].traceback or "")
    assert kinds(life) == ["enqueued", "attempt", "attempt", "finished"]
    hidden = life_of(engine, queues.Email, "1", "last_error")
    assert [(each.error, each.traceback) for each in hidden.attempts.value] == [(None, None)] * 2
    assert "stock" not in repr(hidden)


def test_a_job_ends_after_its_attempts(engine: sa.Engine, queues: Queues, sessions: Any) -> None:
    """Also if the beginning of an attempt, which is counted back from when it was written, is later than the end."""
    add(engine, queues.Email(recipient="a"))
    Consumer(queues.Email, lambda session, email: None, sessions).drain()
    late = "started_at = finished_at + interval '1 s', ended_at = finished_at + interval '1 s'"
    execute(engine, f"UPDATE sqlaqueue_attempt SET {late} FROM email")
    assert kinds(life_of(engine, queues.Email)) == ["enqueued", "attempt", "finished"]


def test_deleted_job_is_known_by_its_attempts(engine: sa.Engine, queues: Queues, sessions: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    Consumer(queues.Email, lambda session, email: None, sessions).drain()
    execute(engine, "DELETE FROM email")
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
    with sent_statements(engine) as sent, Session(engine) as session:
        life = read_life(session, columns(queues.Email, *redact), "1")
    assert "secret" not in repr(life)
    assert [statement for statement, _ in sent if "email.subject" in statement or "email.payload" in statement] == []


def test_redacted_errors_of_heartbeats_are_not_told(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(id=7, recipient="a"))
    heartbeat(engine, "web:1", unclaimable=[refused_job("7", "LookupError: secret")])
    heartbeat(engine, "web:2", unclaimable=[failing("UndefinedColumn: secret")])
    reasons = life_of(engine, queues.Email, "7").reasons.value
    assert {each.code for each in reasons if "secret" in each.text} == {"unclaimable", "claims_fail"}
    hidden = life_of(engine, queues.Email, "7", "last_error").reasons.value
    assert [each.code for each in hidden] == [each.code for each in reasons]
    assert "secret" not in repr(hidden)


def test_redacted_worker_and_times_are_not_told(engine: sa.Engine, queues: Queues) -> None:
    add(engine, *(queues.Email(recipient="a") for _ in range(3)))
    execute(engine, "UPDATE email SET run_at = '2126-03-04 05:06+00' WHERE id = 3")
    fail_jobs(engine, queues.Email)
    with claimed(engine, queues.Email):
        execute(engine, "UPDATE email SET claimed_by = 'the-host'")
        execute(engine, "UPDATE sqlaqueue_attempt SET worker = 'the-host'")
        for key in "12":
            assert "the-host" in str(life_of(engine, queues.Email, key))
            life = life_of(engine, queues.Email, key, "claimed_by")
            assert "the-host" not in str([life, events_of(life)])
    assert "2126-03-04" in str(life_of(engine, queues.Email, "3").reasons)
    assert "2126-03-04" not in str(life_of(engine, queues.Email, "3", "run_at"))


def test_times_that_python_does_not_have(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(recipient="a"))
    for moment in ("infinity", "-infinity", "20000-01-01", "0044-03-15 BC"):
        execute(engine, "UPDATE email SET run_at = CAST(:moment AS timestamptz)", moment=moment)
        life = life_of(engine, queues.Email)
        assert moment.split(maxsplit=1)[0] in (texts(life)["run_at"] or "")
        assert kinds(life) == ["enqueued"]


def test_redacted_key_of_a_limit_is_not_told(engine: sa.Engine) -> None:
    model = new_queue(engine, flow_control=[ConcurrencyLimit(1, per="note")])
    add(engine, model(id=1, note="secret"), model(id=2, note="secret"))
    with claimed(engine, model):
        open_text = " ".join(each.text for each in life_of(engine, model, "2").reasons.value)
        assert "'secret'" in open_text
        assert "secret" not in repr(life_of(engine, model, "2", "note").reasons)


def test_unique_job_names_its_duplicate(engine: sa.Engine) -> None:
    model = new_queue(engine, unique=Unique("key"))
    add(engine, model(id=1, key="a"))
    fail_jobs(engine, model)
    add(engine, model(id=2, key="a"))
    uniqueness = life_of(engine, model).uniqueness.value
    assert (uniqueness.duplicate, [value.text for value in uniqueness.values]) == ("2", ["a"])


def test_tick_names_the_schedule(engine: sa.Engine, sessions: Any) -> None:
    model = make_job("update_status", unique=None)
    schedule = Schedule("nightly", model, every=timedelta(hours=1), values={"note": "x"})
    model.metadata.create_all(engine)
    with Session(engine) as session:
        fire_schedules(session, [schedule])
        travel(session, timedelta(hours=2))
        fire_schedules(session, [schedule])
        session.commit()
    life = life_of(engine, model)
    assert life.tick.value.schedule == "nightly"
    assert "nightly" in events_of(life)[0].text


def test_trace_is_shown(engine: sa.Engine, queues: Queues) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    model = new_queue(engine, extra_columns=("traceparent",))
    add(engine, model(id=1, traceparent=f"00-{trace}-00f067aa0ba902b7-01"))
    assert life_of(engine, model).trace == trace


def test_part_that_cannot_be_read_hides_no_other(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(recipient="a"))
    execute(engine, "DROP TABLE sqlaqueue_attempt")
    execute(engine, "DROP TABLE sqlaqueue_control")
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
    assert life.reasons.value


def test_adopted_table_has_few_roles(engine: sa.Engine) -> None:
    base = new_base()

    class Row(QueueMixin, base):
        __tablename__ = "row"
        __queue__ = QueueConfig(strategy="batch_select", adopt={"status": "state", "run_at": "due"})
        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str] = mapped_column(default="pending")
        due: Mapped[datetime | None]

    base.metadata.create_all(engine)
    add(engine, Row(id=1, due=datetime(2020, 1, 1)), Row(id=2, state="odd"))  # noqa: DTZ001 - a column without a zone
    assert kinds(life_of(engine, Row)) == ["due"]
    assert life_of(engine, Row, "2").state == "other"
    complete_jobs(engine, Row)
    assert life_of(engine, Row).state == "completed"


# -- the pages of one job: what they show, that no value is code, and what is answered for wrong addresses ---------

MEGABYTES = 10_000_000


class Page(HTMLParser):
    """The elements of a page, their attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def assert_harmless(text: str) -> Page:
    page = Page(text)
    assert [attributes for tag, attributes in page.tags if tag == "script"] == [
        attributes for tag, attributes in page.tags if tag == "script" and attributes.get("src")
    ]
    names = {name for _, attributes in page.tags for name in attributes}
    assert not [name for name in names if name.startswith("on") or name == "style"]
    assert "img" not in {tag for tag, _ in page.tags}
    links = [
        str(attributes.get(name))
        for _, attributes in page.tags
        for name in ("href", "src", "action")
        if name in attributes
    ]
    assert not [link for link in links if link.strip().lower().startswith(("javascript:", "data:"))]
    return page


async def get(client: Any, path: str, **query: Any) -> Any:
    async with client as browser:
        return await browser.get(path, params=query)


async def test_job_shows_its_values_exactly(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    key = 2**63 - 1
    add(engine, queues.Email(id=key, recipient="Zoë 🚀", kind=Kind.RECEIPT, big=-(2**63), payload={"n": 2**70}))
    response = await get(client_of(), "/queues/email/job", key=str(key))
    assert response.status_code == 200
    page = assert_harmless(response.text)
    for text in (str(key), "Zoë 🚀", "RECEIPT", str(-(2**63)), f'"n": {2**70}', "no_consumer", "Enqueued"):
        assert text in page.text, text


@pytest.mark.parametrize("kind", KINDS)
async def test_each_strategy_has_a_page_for_each_state(engine: sa.Engine, kind: str, client_of: Any) -> None:
    model = new_queue(engine, kind, unique=Unique("key"))
    add(engine, model(id=1, key=XSS, note=XSS))
    text = (await get(client_of(model), "/queues/job/job", key="1")).text
    assert XSS in assert_harmless(text).text
    with claimed(engine, model):
        assert (await get(client_of(model), "/queues/job/job", key="1")).status_code == 200
    fail_jobs(engine, model, error=XSS)
    response = await get(client_of(model), "/queues/job/job", key="1")
    page = assert_harmless(response.text)
    assert response.status_code == 200
    assert "failed" in page.text
    assert XSS in page.text
    for path in ("edit", "confirm"):
        response = await get(client_of(model), f"/queues/job/{path}", key="1", action="requeue")
        assert response.status_code == 200, path
        assert_harmless(response.text)


async def test_stored_scripts_are_text_in_every_column(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    values = {"recipient": XSS, "subject": XSS, "payload": {XSS: XSS}, "claimed_by": XSS, "last_error": XSS}
    add(engine, queues.Email(**values, status="failed", blob=XSS.encode()), queues.Picture(tenant=XSS, name=XSS))
    execute(
        engine,
        "INSERT INTO sqlaqueue_attempt (queue, key, attempt, ended_at, worker, outcome, error, traceback) "
        "VALUES ('email', '[1]', 1, now(), :x, 'failed', :x, :x)",
        x=XSS,
    )
    key = '"' + XSS.replace('"', '""') + '"'
    for path, query in (
        ("/queues/email/job", {"key": "1"}),
        ("/queues/email/edit", {"key": "1"}),
        ("/queues/email/confirm", {"key": "1", "action": "purge"}),
        ("/queues/email/confirm", {"all": "1", "action": "purge", "f.subject": XSS}),
        ("/queues/picture/job", {"key": f"{key},{key}"}),
        ("/queues/picture/confirm", {"key": f"{key},{key}", "action": "cancel"}),
        ("/queues/picture/edit", {"key": f"{key},{key}"}),
    ):
        response = await get(client_of(), path, **query)
        assert response.status_code == 200, path
        page = assert_harmless(response.text)
        assert "alert(" in page.text + str(page.tags) or query == {"key": "1", "action": "purge"}


async def test_wrong_links_of_the_application_are_left_out(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="javascript:alert(1)", big=5))
    links = {"Email.recipient": lambda value: value, "Email.big": "https://shop.example/big/{value}"}
    page = assert_harmless((await get(client_of(links=links), "/queues/email/job", key="1")).text)
    assert ("a", {"href": "https://shop.example/big/5", "rel": "noreferrer"}) in page.tags


async def test_ten_megabytes_are_cut(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a", payload={"x": "y" * MEGABYTES}))
    response = await get(client_of(), "/queues/email/job", key="1")
    assert response.status_code == 200
    assert len(response.text) < 200_000
    assert "The start of 10,000,009 characters" in response.text
    response = await get(client_of(), "/queues/email/edit", key="1")
    assert len(response.text) < 100_000
    assert "too large" in response.text


async def test_a_value_that_is_too_large_to_be_read(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    execute(engine, "UPDATE email SET subject = repeat('a', 40000000)")
    execute(engine, "UPDATE email SET payload = jsonb_build_object('x', repeat('y', 40000000))")
    response = await get(client_of(), "/queues/email/job", key="1")
    assert response.status_code == 200
    assert len(response.text) < 200_000
    assert re.search(r"44\d kB as stored, too large to be shown", response.text)
    assert "The start of 38.1 MB" in response.text
    response = await get(client_of(), "/queues/email/jobs", columns="subject,payload")
    assert response.status_code == 200
    assert len(response.text) < 100_000
    response = await get(client_of(), "/queues/email/edit", key="1")
    assert response.status_code == 200
    assert response.text.count("too large") == 2


async def test_redacted_values_are_on_no_page(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="secret", subject="secret", payload={"a": "secret"}))
    fail_jobs(engine, queues.Email, error="ValueError: secret")
    client = {"redact": ["recipient", "subject", "payload", "last_error"]}
    for path, query in (
        ("job", {"key": "1"}),
        ("edit", {"key": "1"}),
        ("confirm", {"action": "requeue", "key": "1"}),
        ("confirm", {"action": "requeue", "all": "1", "state": "failed"}),
    ):
        response = await get(client_of(**client), f"/queues/email/{path}", **query)
        assert response.status_code == 200
        assert "secret" not in response.text
        assert path != "job" or "redacted" in response.text
    assert "v.subject" not in (await get(client_of(**client), "/queues/email/edit", key="1")).text


async def test_traceback_is_folded_and_redacted_with_its_error(
    engine: sa.Engine, queues: Queues, client_of: Any, sessions: Any
) -> None:
    def refuse(_: Session, invoice: Any) -> None:
        raise Fail(kind="refused", reason="no") from ValueError("of the cause")

    add(engine, queues.Invoice())
    Consumer(queues.Invoice, refuse, sessions).drain()
    life = life_of(engine, queues.Invoice)
    (ended,) = [event for event in events_of(life) if event.error]
    assert ended.error == "refused: no"
    assert "in refuse" in (ended.traceback or "")
    text = (await get(client_of(), "/queues/invoice/job", key="1")).text
    folded = re.findall(r"<details><summary>Traceback</summary>.*?</details>", text, re.DOTALL)
    assert len(folded) == text.count("in refuse")
    assert all("in refuse" in each for each in folded)
    for path, error in (("/queues/invoice/jobs", "refused: no"), ("/queues/invoice", "<b>refused</b> no")):
        text = (await get(client_of(), path)).text
        assert error in text
        assert "Traceback" not in text
    hidden = (await get(client_of(redact=["last_error"]), "/queues/invoice/job", key="1")).text
    assert "in refuse" not in hidden


async def test_wrong_keys_have_a_page(queues: Queues, client_of: Any) -> None:
    async with client_of() as browser:
        for path in ("job", "edit"):
            assert (await browser.get(f"/queues/email/{path}")).status_code == 400
            for key in ("", "x", "1,2", str(2**63), "'; DROP TABLE email", "77"):
                response = await browser.get(f"/queues/email/{path}", params={"key": key})
                assert response.status_code == (404 if key == "77" else 400), key
                assert "Traceback" not in response.text


async def test_wrong_parameters_have_a_page(queues: Queues, client_of: Any) -> None:
    query: dict[str, Any]
    for query in (
        {"key": "1"},
        {"action": "drop", "key": "1"},
        {"action": "requeue", "all": "1", "key": "1"},
        {"action": "requeue", "all": "1", "state": "nothing"},
        {"action": "requeue", "all": "1", "f.nothing": "1"},
        {"action": "requeue", "all": "1", "until": "yesterday"},
        {"action": "requeue", "all": "1", "most": "-1"},
        {"action": "requeue", "all": "1", "from": "nonsense"},
        {"action": "requeue", "key": "x"},
        {"action": "requeue", "key": [str(each) for each in range(1001)]},
    ):
        response = await get(client_of(), "/queues/email/confirm", **query)
        assert response.status_code == 400, query
        assert "Traceback" not in response.text


async def test_unreadable_queue_is_no_queue(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    access = {"access": lambda _: Access(read=["invoice"], act=True)}
    for path in ("job", "edit", "confirm"):
        response = await get(client_of(**access), f"/queues/email/{path}", key="1", action="purge")
        missing = await get(client_of(**access), f"/queues/nothing/{path}", key="1", action="purge")
        assert (response.status_code, response.text) == (404, missing.text)


def main_of(page: str) -> str:
    """Return a page without its head, which has the form of the time zone."""
    return page.partition("<main")[2]


async def test_reader_is_offered_nothing(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    fail_jobs(engine, queues.Email)
    reader = {"access": lambda _: Access(read=True)}
    response = await get(client_of(**reader), "/queues/email/job", key="1")
    assert response.status_code == 200
    assert "<form" not in main_of(response.text)
    assert "Edit" not in response.text
    for path in ("edit", "confirm"):
        response = await get(client_of(**reader), f"/queues/email/{path}", key="1", action="purge")
        assert response.status_code == 403


async def test_why_a_retry_cannot_be_made(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    model = new_queue(engine, unique=Unique("key"))
    add(engine, model(id=1, key="a"))
    # A pending job runs anyway, so that nothing is said of Requeue.
    pending = Page((await get(client_of(model), "/queues/job/job", key="1")).text).text
    assert "Requeue" not in pending
    assert "not possible" not in pending
    fail_jobs(engine, model)
    add(engine, model(id=2, key="a"))
    assert "duplicate, job 2, counts" in (await get(client_of(model), "/queues/job/job", key="1")).text
    add(engine, queues.Email(recipient="a"))
    execute(
        engine,
        "INSERT INTO sqlaqueue_attempt (queue, key, attempt, ended_at, outcome) "
        "VALUES ('email', '[9]', 1, now(), 'failed')",
    )
    text = (await get(client_of(), "/queues/email/job", key="9")).text
    assert "row was deleted, so it cannot run again" in text


async def test_only_actions_that_make_sense_for_the_state_are_shown(
    engine: sa.Engine, queues: Queues, client_of: Any
) -> None:
    add(engine, *(queues.Email(recipient="a") for _ in range(4)))
    execute(engine, "UPDATE email SET status = 'failed' WHERE id = 2")
    execute(engine, "UPDATE email SET status = 'completed' WHERE id = 3")
    execute(engine, "UPDATE email SET status = 'processing', lease_expires_at = now() + interval '1 h' WHERE id = 4")

    async def shown(key: str) -> tuple[list[str], str]:
        text = (await get(client_of(), "/queues/email/job", key=key)).text
        head = text.partition('<div class="page-actions">')[2].partition('<div class="stack">')[0]
        buttons = re.findall(r"<(?:button|a) class=\"button[^>]*>([^<]+)<", head)
        assert buttons[-3:-1] == ["JSON", "Copy as JSON"]
        del buttons[-3:-1]
        return buttons, " ".join(re.findall(r'class="muted why"[^>]*>([^<]*)<', head))

    another = "Enqueue another…"
    assert await shown("1") == (["Edit…", another, "Cancel", "Refresh"], "")
    assert await shown("2") == (["Edit and requeue…", another, "Requeue", "Delete…", "Refresh"], "")
    assert await shown("3") == (["Edit and requeue…", another, "Requeue…", "Delete…", "Refresh"], "")
    why = "Edit is not possible: it is processing. Wait for its end, or cancel it first."
    assert await shown("4") == (["Edit…", another, "Cancel", "Refresh"], why)


async def test_an_expired_lease_says_who_rescues_the_job(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"), queues.Email(recipient="b"))
    expire = "UPDATE email SET status = 'processing', lease_expires_at = now() + :left, attempts = 1 WHERE id = :id"
    for key, left in ((1, timedelta(minutes=-1)), (2, timedelta(minutes=1))):
        execute(engine, expire, left=left, id=key)
    page = (await get(client_of(), "/queues/email/job", key="1")).text
    assert "looks for expired leases every 3 seconds" in page
    assert "no live Consumer is there to rescue it: start one, or use Rescue." in page
    assert "rescue()" not in page
    assert "Rescue" not in (await get(client_of(), "/queues/email/job", key="2")).text
    reader = {"access": lambda _: Access(read=True)}
    page = (await get(client_of(**reader), "/queues/email/job", key="1")).text
    assert "looks for expired leases every 3 seconds" in page
    assert "<form" not in main_of(page)
    async with client_of() as browser:
        response = await browser.post("/queues/email/actions/rescue?key=1")
        assert response.status_code == 303
        assert "/queues/email/job?key=1&notice=rescued" in response.headers["location"]
        assert "pending" in (await browser.get("/queues/email/job?key=1")).text


async def test_preview_says_what_happens(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, *(queues.Email(recipient="a") for _ in range(5)))
    with claimed(engine, queues.Email, 2):
        text = Page((await get(client_of(), "/queues/email/confirm", action="cancel", all="1")).text).text
    assert "Cancel 5 jobs?" in text
    assert re.search(r"processing\s+2\s+will be asked to stop", text)
    text = (await get(client_of(), "/queues/email/confirm", action="purge", key="1")).text
    assert "Delete 0 jobs" in text
    assert 'type="submit"' not in main_of(text)


async def test_preview_counts_up_to_a_limit(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    execute(engine, "INSERT INTO email (recipient, status) SELECT 'a', 'failed' FROM generate_series(1, 10050)")
    response = await get(client_of(), "/queues/email/confirm", action="requeue", all="1", state="failed")
    assert "Requeue 10,000+ jobs?" in response.text
    page = Page(main_of(response.text))
    rows = [attributes for tag, attributes in page.tags if tag == "a" and "job?key=" in str(attributes.get("href"))]
    assert len(rows) == 20
    fields = [attributes.get("name") for tag, attributes in page.tags if tag == "input"]
    assert sorted(map(str, fields)) == ["all", "state", "until"]


async def test_links_keep_strange_keys(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Picture(tenant='a,"&?#/', name="../%2f é"))
    async with client_of() as browser:
        listed = await browser.get("/queues/picture/jobs")
        page = Page(listed.text)
        (href,) = [str(a.get("href")) for tag, a in page.tags if tag == "a" and "job?key=" in str(a.get("href"))]
        response = await browser.get(str(listed.url.join(href)))
        assert response.status_code == 200
        assert parse_qs(urlsplit(href).query)["key"] == ['"a,""&?#/",../%2f é']


async def test_problem_of_one_part_is_in_its_panel(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="ada"))
    execute(engine, "DROP TABLE sqlaqueue_attempt")
    response = await get(client_of(), "/queues/email/job", key="1")
    assert response.status_code == 200
    assert "A table is missing" in response.text
    assert "ada" in response.text
