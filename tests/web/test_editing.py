"""Edits of a job's arguments: what can be edited, what is refused, and that no worker runs what is being edited."""

import json
import threading
import uuid
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, validates

from sqlaqueue import Consumer, QueueConfig, QueueMixin, Unique
from sqlaqueue.web.data.edit import Edited, EditForm, read_form, save
from sqlaqueue.web.data.job_columns import indented, parse_exact
from sqlaqueue.web.data.reader import ParameterError
from tests.models import execute, sent_statements
from tests.web.conftest import act
from tests.web.jobs import KINDS, XSS, add, claimed, columns, created, fail_jobs, new_queue, states
from tests.web.models import Kind, Queues, new_base

FULL: dict[str, Any] = {
    "recipient": "ada",
    "subject": "Re: ",
    "kind": Kind.WELCOME,
    "payload": {"n": 2**70, "x": 1.5},
    "total": Decimal("1.5"),
    "urgent": True,
    "day": date(2030, 1, 2),
    "at": datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC),
    "reference": uuid.UUID(int=1),
    "big": 2**63 - 1,
}


class Plain(DeclarativeBase):
    pass


class Letter(QueueMixin, Plain):
    """A queue with validators, a check, a foreign key and types that convert."""

    __tablename__ = "letter"
    __queue__ = QueueConfig()
    __table_args__ = (sa.CheckConstraint("weight > 0", name="weight_is_positive"),)

    class Upper(sa.types.TypeDecorator[str]):
        impl = sa.String
        cache_ok = True

        def process_bind_param(self, value: Any, dialect: Any) -> Any:
            return None if value is None else value.lower()

        def process_result_value(self, value: Any, dialect: Any) -> Any:
            return None if value is None else value.upper()

    class Money(sa.types.TypeDecorator[Any]):
        impl = sa.Integer
        cache_ok = True

        def process_bind_param(self, value: Any, dialect: Any) -> Any:
            return None if value is None else value[0]

        def process_result_value(self, value: Any, dialect: Any) -> Any:
            return None if value is None else (value, "EUR")

    id: Mapped[int] = mapped_column(primary_key=True)
    parent_id: Mapped[int | None] = mapped_column(sa.ForeignKey("letter.id"))
    weight: Mapped[int] = mapped_column(default=1)
    code: Mapped[str] = mapped_column(sa.String(5), default="a")
    upper: Mapped[str | None] = mapped_column(Upper)
    price: Mapped[Any] = mapped_column(Money, nullable=True)
    twice: Mapped[int] = mapped_column(sa.Computed("weight * 2", persisted=True))

    @validates("code")
    def check_code(self, _: str, code: str) -> str:
        if " " in code:
            message = "a code has no spaces"
            raise ValueError(message)
        return code.upper()


@event.listens_for(Letter, "before_update")
def no_heavy_ones(_: Any, __: Any, letter: Letter) -> None:
    if letter.weight > 1000:
        message = "too heavy"
        raise ValueError(message)


def form_of(engine: sa.Engine, model: Any, key: str = "1", *redact: str) -> EditForm:
    with Session(engine) as session:
        form = read_form(session, columns(model, *redact), key)
    assert form is not None
    return form


def texts(form: EditForm | None) -> dict[str, str | None]:
    return {each.field.name: each.text for each in form.fields}


def edit(
    engine: sa.Engine,
    model: Any,
    given: Mapping[str, str | None],
    *,
    key: str = "1",
    version: str | None = None,
    requeue: bool = True,
    redact: tuple[str, ...] = (),
) -> Edited:
    if version is None:
        version = form_of(engine, model, key).job.version
    with Session(engine) as session:
        # An edit that waited for a lock of the same test would wait for ever.
        session.execute(sa.text("SET LOCAL lock_timeout = '10s'"))
        return save(session, columns(model, *redact), key, version, given, requeue=requeue)


def errors(edited: Edited) -> dict[str, str]:
    return {each.field.name: each.error for each in edited.form.fields if each.error and not each.is_fixed}


def loaded(engine: sa.Engine, model: Any, key: Any = 1) -> Any:
    with Session(engine) as session:
        return session.get_one(model, key)


@pytest.fixture
def letters(engine: sa.Engine) -> type[Letter]:
    Plain.metadata.create_all(engine)
    add(engine, Letter(id=1))
    return Letter


def test_form_offers_the_columns_of_the_application(engine: sa.Engine, queues: Queues, letters: Any) -> None:
    add(engine, queues.Email(**FULL))
    form = form_of(engine, queues.Email)
    assert list(texts(form)) == ["customer_id", *FULL, "priority", "run_at", "max_attempts"]
    found = texts(form)
    assert (found["kind"], found["urgent"], found["big"]) == ("WELCOME", "true", str(2**63 - 1))
    assert found["at"] == "2030-01-02T03:04:05+00:00"
    assert found["payload"] == f'{{\n  "n": {2**70},\n  "x": 1.5\n}}'
    assert list(texts(form_of(engine, letters))) == [
        "parent_id",
        "weight",
        "code",
        "upper",
        "price",
        "priority",
        "run_at",
        "max_attempts",
    ]
    assert "subject" not in texts(form_of(engine, queues.Email, "1", "subject"))


def test_each_type_is_written(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(**FULL))
    given: dict[str, str | None] = {
        "recipient": XSS,
        "subject": None,
        "kind": "RECEIPT",
        "payload": '{"a": [1, 2.5, "ü"]}',
        "total": "-12345678901234.5001",
        "urgent": "false",
        "day": "2031-12-31",
        "at": "2031-01-01T00:00+02:00",
        "reference": str(uuid.UUID(int=2)),
        "big": str(-(2**63)),
        "priority": "-3",
        "run_at": "2040-01-01T00:00:00Z",
        "max_attempts": "9",
    }
    edited = edit(engine, queues.Email, given)
    assert (edited.outcome, sorted(edited.columns)) == ("saved", sorted(given))
    email = loaded(engine, queues.Email)
    assert (email.recipient, email.subject, email.kind) == (XSS, None, Kind.RECEIPT)
    assert (email.payload, email.total, email.urgent) == ({"a": [1, 2.5, "ü"]}, Decimal("-12345678901234.5001"), False)
    assert (email.day, email.at) == (date(2031, 12, 31), datetime(2030, 12, 31, 22, tzinfo=UTC))
    assert (email.reference, email.big, email.priority) == (uuid.UUID(int=2), -(2**63), -3)
    assert (email.run_at, email.max_attempts) == (datetime(2040, 1, 1, tzinfo=UTC), 9)


def test_null_of_json_is_no_null(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(**FULL))
    for given, stored in ((None, None), ("null", "null")):
        assert edit(engine, queues.Email, {"payload": given}).outcome == "saved"
        assert execute(engine, "SELECT payload::text FROM email") == stored


def test_wrong_values_are_told_and_kept(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(**FULL))
    for name, text, error in (
        ("big", str(2**63), "integer"),
        ("big", "1.0", "integer"),
        ("big", "", "integer"),
        ("total", "1.00001", "decimals"),
        ("total", "1e17", "before the point"),
        ("total", "NaN", "number"),
        ("payload", "{", "no JSON"),
        ("payload", "NaN", "no JSON"),
        ("payload", "1.00000000000000000001", "rounded"),
        ("payload", "[" * 60_000, "no JSON"),
        ("at", "2030-01-01T00:00", "zone"),
        ("at", "yesterday", "date"),
        ("day", "2030-02-30", "date"),
        ("kind", "OTHER", "Choose"),
        ("urgent", "yes", "true or false"),
        ("reference", "x", "UUID"),
        ("recipient", None, "must have a value"),
        ("priority", "40000", "32767"),
    ):
        edited = edit(engine, queues.Email, {name: text, "subject": "typed"})
        assert edited.outcome == "wrong", (name, text)
        assert error in errors(edited)[name]
        assert (texts(edited.form)[name], texts(edited.form)["subject"]) == (text, "typed")
    assert loaded(engine, queues.Email).subject == "Re: "


def test_line_breaks_of_browsers_are_no_change(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(recipient="a\nb", payload={"a": [1]}))
    given = {
        "recipient": "a\r\nb",
        "payload": (texts(form_of(engine, queues.Email))["payload"] or "").replace("\n", "\r\n"),
    }
    assert edit(engine, queues.Email, given).outcome == "unchanged"


def test_line_breaks_of_browsers_are_not_stored(engine: sa.Engine, queues: Queues) -> None:
    for key, (stored, typed, written) in enumerate(
        (
            ("a\nb", "a\r\nbc", "a\nbc"),
            ("a\n", "a", "a"),
            ("a", "a\r\n", "a\n"),
            ("a\u2028b", "a\r\nb", "a\nb"),
            ("a\r\nb", "a\r\nbc", "a\r\nbc"),
        )
    ):
        add(engine, queues.Email(id=key, recipient=stored))
        assert edit(engine, queues.Email, {"recipient": typed}, key=str(key)).columns == ["recipient"], stored
        assert loaded(engine, queues.Email, key).recipient == written


async def test_a_short_text_with_line_breaks_has_a_field_of_several_lines(client_of: Any, engine: sa.Engine) -> None:
    class Note(QueueMixin, new_base()):
        __tablename__ = "note"
        __queue__ = QueueConfig()
        id: Mapped[int] = mapped_column(primary_key=True)
        text: Mapped[str] = mapped_column(sa.String(50))

    created(engine, Note)
    add(engine, Note(text="one"), Note(text="one\ntwo"))
    one, two = [(await client_of(Note).get(f"/queues/note/edit?key={key}")).text for key in (1, 2)]
    assert '<input id="v.text"' in one
    assert '<textarea id="v.text"' in two


def test_numbers_in_json_that_is_not_edited_stay_exact(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(recipient="a"))
    exact = '{"a": 1.000000000000000000001}'
    execute(engine, "UPDATE email SET payload = CAST(:text AS jsonb)", text=exact)
    payload = texts(form_of(engine, queues.Email))["payload"]
    assert edit(engine, queues.Email, {"payload": payload, "recipient": "b"}).columns == ["recipient"]
    assert execute(engine, "SELECT payload::text FROM email") == exact


def test_validators_events_and_constraints_are_told_at_the_form(engine: sa.Engine, letters: Any) -> None:
    refused = edit(engine, letters, {"code": "a b", "weight": "7"})
    assert errors(refused) == {"code": "a code has no spaces"}
    assert texts(refused.form)["weight"] == "7"
    for name, wrong in (("weight", "-1"), ("parent_id", "99")):
        assert list(errors(edit(engine, letters, {name: wrong}))) == [name]
    for given, problem in (({"weight": "1001"}, "ValueError: too heavy"), ({"upper": "\ud800"}, "refused")):
        edited = edit(engine, letters, given)
        assert edited.outcome == "wrong", given
        assert problem in edited.form.problem
    assert errors(edit(engine, letters, {"code": "abcdef"})) == {"code": "Use at most 5 characters."}
    assert edit(engine, letters, {"code": "xyz"}).outcome == "saved"
    assert loaded(engine, letters).code == "XYZ", "the validator of the application has run"


def test_violated_constraints_are_told_beside_their_fields(engine: sa.Engine) -> None:
    base = new_base()

    class Owner(base):
        __tablename__ = "owner"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Task(QueueMixin, base):
        __tablename__ = "task"
        __queue__ = QueueConfig(unique=Unique("topic"))
        id: Mapped[int] = mapped_column(primary_key=True)
        owner_id: Mapped[int | None] = mapped_column(sa.ForeignKey("owner.id"))
        code: Mapped[str | None] = mapped_column(unique=True)
        place: Mapped[int] = mapped_column("Place", default=0)
        row: Mapped[int] = mapped_column(default=0)
        hint: Mapped[str | None]
        topic: Mapped[str | None]
        __table_args__ = (
            sa.CheckConstraint("\"Place\" >= 0 AND code <> 'row'", name="places"),
            sa.CheckConstraint("row < 10"),
            sa.UniqueConstraint("Place", "row", name="one_place"),
            sa.Index("hint_once", "hint", unique=True),
        )

    base.metadata.create_all(engine)
    add(engine, Task(id=1, topic="a", place=1), Task(id=2, code="x", place=2, row=2, hint="s", topic="b"))
    for given, found in (
        ({"owner_id": "7"}, {"owner_id": "No row of owner has this value (task_owner_id_fkey)."}),
        ({"code": "x"}, {"code": "Another row has this value already (task_code_key)."}),
        ({"place": "-1"}, dict.fromkeys(("place", "code"), "The check places does not allow this value.")),
        ({"row": "10"}, {"row": "The check task_row_check does not allow this value."}),
        (
            {"place": "2", "row": "2"},
            dict.fromkeys(("place", "row"), "Another row has these values together already (one_place)."),
        ),
        (
            {"topic": "b"},
            {"topic": "It would have a duplicate: another job has the same values of the unique columns."},
        ),
        ({"hint": "s"}, {"hint": "Another row has this value already (hint_once)."}),
    ):
        edited = edit(engine, Task, given)
        assert (edited.outcome, errors(edited)) == ("wrong", found)
        assert edited.form.problem == ""
        assert {**texts(edited.form), **given} == texts(edited.form), "what was typed is not lost"
    # The constraint of a column that the form does not show, and one that the model does not know.
    execute(engine, "UPDATE task SET hint = 'hidden text' WHERE id = 1")
    execute(engine, "ALTER TABLE task ADD CONSTRAINT unknown CHECK (row <> 7 OR hint IS NULL)")
    edited = edit(engine, Task, {"row": "7"}, redact=("hint",))
    assert errors(edited) == {}
    assert edited.form.problem == "The database refused the values: they violate unknown."
    execute(engine, "ALTER TABLE task ALTER topic SET NOT NULL")
    assert errors(edit(engine, Task, {"topic": None})) == {"topic": "A value is required."}


def test_trigger_of_the_application_may_refuse(engine: sa.Engine, letters: Any) -> None:
    execute(
        engine,
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'not on a sunday'; END $$; "
        "CREATE TRIGGER refuse BEFORE UPDATE ON letter FOR EACH ROW EXECUTE FUNCTION refuse()",
    )
    edited = edit(engine, letters, {"weight": "2"})
    assert "not on a sunday" in edited.form.problem


def test_words_of_triggers_and_events_are_hidden_beside_redacted_columns(
    engine: sa.Engine, letters: Any, caplog: pytest.LogCaptureFixture
) -> None:
    @event.listens_for(letters, "before_update")
    def tell(_: Any, __: Any, letter: Letter) -> None:
        if letter.weight == 3:
            message = f"the listener has seen {letter.upper}"
            raise ValueError(message)

    execute(
        engine,
        "CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'the trigger has seen %', NEW.upper; END $$; "
        "CREATE TRIGGER tell BEFORE UPDATE ON letter FOR EACH ROW EXECUTE FUNCTION tell()",
    )
    add(engine, letters(id=2, upper="HIDDEN"))
    try:
        for weight, what in (("2", "A trigger refused the values"), ("3", "It was refused: ValueError")):
            assert "has seen hidden" in edit(engine, letters, {"weight": weight}, key="2").form.problem.lower()
            caplog.clear()
            problem = edit(engine, letters, {"weight": weight}, key="2", redact=("upper",)).form.problem
            assert problem.startswith(f"{what}. Its text is hidden")
            assert "hidden" in caplog.text.lower()
            assert "has seen" in caplog.text
    finally:
        event.remove(letters, "before_update", tell)


async def test_a_number_that_only_a_float_would_take_as_infinite_is_refused(client_of: Any, engine: sa.Engine) -> None:
    class Ratio(QueueMixin, new_base()):
        __tablename__ = "ratio"
        __queue__ = QueueConfig()
        id: Mapped[int] = mapped_column(primary_key=True)
        value: Mapped[float] = mapped_column(sa.Float, index=True)
        note: Mapped[str | None]

    created(engine, Ratio)
    add(engine, Ratio(id=1, value=float("inf")), Ratio(id=2, value=float("nan")), Ratio(id=3, value=1.0))
    for wrong in ("1e400", "-1e400", "9" * 400, "inf", "nan"):
        assert list(errors(edit(engine, Ratio, {"value": wrong}, key="3"))) == ["value"], wrong
    assert edit(engine, Ratio, {"value": "1e308"}, key="3").outcome == "saved"
    # One that is there already stays as it is, and no page fails for it.
    text = texts(form_of(engine, Ratio))["value"]
    assert edit(engine, Ratio, {"value": text, "note": "x"}).columns == ["note"]
    assert loaded(engine, Ratio).value == float("inf")
    async with client_of(Ratio) as browser:
        for path in ("jobs?sort=-value", "jobs?f.value.min=5", "job?key=1", "edit?key=1"):
            assert (await browser.get(f"/queues/ratio/{path}")).status_code == 200, path
        assert (await browser.get("/api/queues/ratio/job?key=2")).status_code == 200


@pytest.mark.parametrize("typed", ["1e999999999", "-1e-999999999", "0e999999999", f"0.{'1' * 999}"])
async def test_a_number_of_too_many_digits_is_refused(
    client_of: Any, engine: sa.Engine, queues: Queues, typed: str
) -> None:
    add(engine, queues.Email(recipient="a"))
    answer = await act(
        client_of(), "edit", key="1", version=form_of(engine, queues.Email).job.version, **{"v.total": typed}
    )
    assert answer.status_code == 422
    assert "Write a number, such as 12.50." in answer.text


def test_types_that_convert(engine: sa.Engine, letters: Any) -> None:
    add(engine, letters(id=2, upper="ABC", price=(5, "EUR")))
    form = form_of(engine, letters, "2")
    assert texts(form)["upper"] == "ABC"
    assert [each.field.name for each in form.fields if each.is_fixed] == ["price"]
    assert "lower" not in errors(edit(engine, letters, {"upper": "lower"}, key="2"))["upper"]
    assert edit(engine, letters, {"upper": "XYZ"}, key="2").outcome == "saved"
    assert loaded(engine, letters, 2).upper == "XYZ"
    with pytest.raises(ParameterError):
        edit(engine, letters, {"price": "7"}, key="2")


def test_columns_that_are_not_offered_are_refused(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(recipient="a"))
    for name in ("id", "status", "attempts", "lease_token", "nothing", "subject"):
        with pytest.raises(ParameterError):
            edit(engine, queues.Email, {name: "1"}, redact=("subject",))


def test_large_values_are_left_as_they_are(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(recipient="a", payload={"x": "y" * 10_000_000}))
    form = form_of(engine, queues.Email)
    assert [each.field.name for each in form.fields if each.is_fixed] == ["payload"]
    with sent_statements(engine) as sent:
        assert edit(engine, queues.Email, {"recipient": "b"}).outcome == "saved"
    assert [statement for statement, _ in sent if "email.payload," in statement and "left(" not in statement] == []
    assert execute(engine, "SELECT length(payload ->> 'x') FROM email") == 10_000_000


def test_changed_row_is_shown_beside_what_was_typed(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(recipient="a", subject="one"))
    version = form_of(engine, queues.Email).job.version
    execute(engine, "UPDATE email SET subject = 'theirs'")
    edited = edit(engine, queues.Email, {"subject": "mine", "recipient": "a"}, version=version)
    assert edited.outcome == "changed"
    both = {each.field.name: (each.text, each.stored) for each in edited.form.fields if each.is_changed}
    assert both == {"subject": ("mine", "theirs")}
    assert loaded(engine, queues.Email).subject == "theirs"
    again = edit(engine, queues.Email, {"subject": "mine"}, version=edited.form.job.version)
    assert again.outcome == "saved"


def test_job_that_ran_meanwhile_is_not_edited(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(recipient="a"))
    version = form_of(engine, queues.Email).job.version
    fail_jobs(engine, queues.Email)
    assert edit(engine, queues.Email, {"subject": "x"}, version=version).outcome == "changed"
    execute(engine, "DELETE FROM email")
    assert edit(engine, queues.Email, {"subject": "x"}, version=version).outcome == "missing"


@pytest.mark.parametrize("kind", KINDS)
def test_finished_job_is_edited_and_requeued(engine: sa.Engine, kind: str) -> None:
    model = new_queue(engine, kind)
    add(engine, model(id=1, key="a", note="old"))
    fail_jobs(engine, model)
    edited = edit(engine, model, {"note": "new"})
    assert (edited.outcome, list(edited.columns)) == ("requeued", ["note"])
    job = loaded(engine, model)
    assert (states(engine, model), job.note, job.key, job.attempts) == ({"1": "pending"}, "new", "a", 0)
    fail_jobs(engine, model)
    when = "2040-01-01T00:00:00+00:00"
    assert edit(engine, model, {"run_at": when}).outcome == "requeued"
    assert loaded(engine, model).run_at == datetime.fromisoformat(when)


def test_finished_job_is_edited_and_stays(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(recipient="a"))
    fail_jobs(engine, queues.Email)
    assert edit(engine, queues.Email, {"recipient": "b"}, requeue=False).outcome == "saved"
    assert (states(engine, queues.Email), loaded(engine, queues.Email).recipient) == ({"1": "failed"}, "b")


@pytest.mark.parametrize("kind", KINDS)
def test_duplicate_is_told_and_nothing_is_changed(engine: sa.Engine, kind: str) -> None:
    model = new_queue(engine, kind, unique=Unique("key"))
    add(engine, model(id=1, key="a", note="old"))
    fail_jobs(engine, model)
    add(engine, model(id=2, key="b"), model(id=3, key="a"))
    edited = edit(engine, model, {"note": "new"})
    assert edited.outcome == "wrong"
    # The unique index refuses an inserted row; a stored one is not requeued.
    assert "duplicate" in (errors(edited).get("key") or edited.form.problem)
    assert states(engine, model) == {"1": "failed", "2": "pending", "3": "pending"}
    clash = edit(engine, model, {"key": "a"}, key="2")
    assert "duplicate" in errors(clash)["key"]
    assert edit(engine, model, {"key": "free"}).outcome == "requeued"


def test_dead_letter_is_inserted_by_the_orm(engine: sa.Engine) -> None:
    model = new_queue(engine, "rows_are_messages")
    add(engine, model(id=1, note="old", max_attempts=3))
    fail_jobs(engine, model)
    seen: list[tuple[str, int]] = []
    event.listen(model, "before_insert", lambda _, __, job: seen.append((job.note, job.max_attempts)))
    assert edit(engine, model, {"note": "new"}).outcome == "requeued"
    assert seen == [("new", 3)]
    assert execute(engine, "SELECT count(*) FROM sqlaqueue_dead_letter") == 0


@pytest.mark.parametrize("kind", KINDS)
def test_claimed_job_is_refused(engine: sa.Engine, kind: str) -> None:
    model = new_queue(engine, kind)
    add(engine, model(id=1, note="old"))
    version = form_of(engine, model).job.version
    with claimed(engine, model) as jobs:
        edited = edit(engine, model, {"note": "new"}, version=version)
        assert edited.outcome == "refused"
        assert edited.form.refused
        assert texts(edited.form)["note"] == "new"
        assert jobs[0].note == "old"


@pytest.mark.parametrize("kind", KINDS)
def test_edits_beside_a_consumer_lose_nothing(engine: sa.Engine, kind: str, sessions: Any) -> None:
    """Each job runs once, and with the arguments of the last edit that was reported as saved."""
    model = new_queue(engine, kind)
    number = 24
    add(engine, *(model(id=each, note="0") for each in range(1, number + 1)))
    ran: list[tuple[int, str]] = []
    lock = threading.Lock()

    def handler(_: Session, job: Any) -> None:
        with lock:
            ran.append((job.id, job.note))

    saved = dict.fromkeys(range(1, number + 1), "0")
    done = threading.Event()

    def edit_all() -> None:
        for turn in range(1, 4):
            for each in range(number, 0, -1):
                with Session(engine) as session:
                    form = read_form(session, columns(model), str(each))
                    if form is None or form.job.state != "pending":
                        continue
                    session.rollback()
                    edited = save(
                        session, columns(model), str(each), form.job.version, {"note": str(turn)}, requeue=False
                    )
                if edited.outcome == "saved":
                    saved[each] = str(turn)
        done.set()

    thread = threading.Thread(target=edit_all)
    thread.start()
    with Consumer(model, handler, sessions, batch_size=2):
        assert done.wait(60)
        thread.join()
        deadline = datetime.now(UTC) + timedelta(seconds=60)
        while len(ran) < number and datetime.now(UTC) < deadline:
            threading.Event().wait(0.05)
    assert len(ran) == number
    assert dict(ran) == saved


def test_json_keeps_numbers(engine: sa.Engine) -> None:
    text = '{"a":[1,2.50000000000000000001,{}],"b":"x, \\"{y}","c":[],"d":' + "9" * 6000 + "}"
    assert json.loads(indented(text), parse_int=str, parse_float=str) == json.loads(
        text, parse_int=str, parse_float=str
    )
    assert indented('[{"a":1},[]]') == '[\n  {\n    "a": 1\n  },\n  []\n]'
    assert len(indented("[" * 50_000 + "]" * 50_000)) < 200_000
    assert len(indented("[" * 100 + "1," * 40_000 + "1" + "]" * 100)) < 2_000_000
    assert parse_exact('{"a": 2.50, "b": 1e3}') == {"a": 2.5, "b": 1000.0}
