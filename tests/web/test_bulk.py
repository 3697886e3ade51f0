"""Actions on several jobs: what a preview promises, and what is done, beside workers."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import Consumer, InOrder, Unique
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.web.data import bulk
from sqlaqueue.web.data.bulk import BulkAction, ByKeys, Done, Preview, Selection, act, by_filter, preview
from sqlaqueue.web.data.job_filters import parse_filter
from sqlaqueue.web.data.reader import ParameterError
from tests.models import execute, sent_statements
from tests.programs import Program, wait_until
from tests.servers import Database
from tests.web import jobs
from tests.web.conftest import hidden
from tests.web.jobs import KINDS, RAN, add, claimed, columns, fail_jobs, new_queue, states, wanted
from tests.web.models import Queues


def look(engine: sa.Engine, action: BulkAction, chosen: Selection) -> Preview:
    with Session(engine) as session:
        found = preview(session, action, chosen)
        assert not session.dirty
    return found


def do(engine: sa.Engine, action: BulkAction, chosen: Selection, **options: Any) -> Done:
    with Session(engine) as session:
        return act(session, action, chosen, **options)


def of_keys(model: Any, *keys: Any) -> ByKeys:
    return ByKeys(columns(model), tuple(map(str, keys)))


def of_filter(model: Any, action: BulkAction, *pairs: tuple[str, str], **bounds: Any) -> Selection:
    return by_filter(wanted(model, *pairs), action, **bounds)


def effects(found: Preview) -> dict[str, tuple[int, bool]]:
    assert found.effects.value is not None, found.effects.problem
    return {each.state: (each.count.number, each.is_changed) for each in found.effects.value}


@pytest.fixture(params=KINDS)
def plain(engine: sa.Engine, request: pytest.FixtureRequest) -> Any:
    return new_queue(engine, request.param)


def test_actions_by_keys_change_what_the_preview_says(engine: sa.Engine, plain: Any) -> None:
    add(engine, *(plain(id=number, key="a", note="x") for number in range(1, 5)))
    fail_jobs(engine, plain, 2)
    chosen = of_keys(plain, 1, 2, 3, 99)
    found = look(engine, "requeue", chosen)
    assert effects(found) == {"failed": (2, True), "pending": (1, False)}
    assert (found.missing, found.changed.number if found.changed else 0) == (1, 2)
    done = do(engine, "requeue", chosen)
    assert (done.changed, done.unchanged) == (2, 2)
    assert set(states(engine, plain).values()) == {"pending"}
    done = do(engine, "cancel", of_keys(plain, 1, 2))
    assert (done.changed, done.asked) == (2, 0)
    assert sorted(states(engine, plain).items()) == [
        ("1", "cancelled"),
        ("2", "cancelled"),
        ("3", "pending"),
        ("4", "pending"),
    ]
    done = do(engine, "purge", of_keys(plain, 1, 3))
    assert (done.changed, done.unchanged) == (1, 1)
    assert sorted(states(engine, plain)) == ["2", "3", "4"]


def test_actions_by_filter_change_what_it_selects(engine: sa.Engine, plain: Any) -> None:
    add(engine, *(plain(id=number, note="x" if number % 2 else "y") for number in range(1, 9)))
    fail_jobs(engine, plain, 8)
    pairs = [("state", "failed"), ("f.note", "x")]
    assert effects(look(engine, "requeue", of_filter(plain, "requeue", *pairs))) == {"failed": (4, True)}
    done = do(engine, "requeue", of_filter(plain, "requeue", *pairs))
    assert (done.changed, done.after) == (4, None)
    assert {key for key, state in states(engine, plain).items() if state == "pending"} == {"1", "3", "5", "7"}
    assert do(engine, "cancel", of_filter(plain, "cancel", ("f.note", "x"))).changed == 4
    done = do(engine, "purge", of_filter(plain, "purge", ("f.note", "y")))
    assert done.changed == 4
    assert set(states(engine, plain)) == {"1", "3", "5", "7"}


def test_kind_of_error_is_a_filter(engine: sa.Engine, plain: Any) -> None:
    add(engine, *(plain(id=number) for number in range(1, 5)))
    fail_jobs(engine, plain, 2, error="ValueError: a")
    fail_jobs(engine, plain, 2, error="KeyError: a")
    done = do(engine, "requeue", of_filter(plain, "requeue", ("state", "failed"), ("error", "KeyError")))
    assert done.changed == 2
    assert sorted(states(engine, plain).values()) == ["failed", "failed", "pending", "pending"]


def test_preview_shows_the_first_jobs_with_what_happens(engine: sa.Engine, queues: Queues) -> None:
    add(engine, *(queues.Email(recipient="a") for _ in range(30)))
    with claimed(engine, queues.Email, 3):
        found = look(engine, "cancel", of_filter(queues.Email, "cancel"))
        assert effects(found) == {"pending": (27, True), "processing": (3, True)}
        assert found.jobs.value is not None
        assert len(found.jobs.value) == 20
        found = look(engine, "cancel", of_keys(queues.Email, *range(1, 31)))
        running = [job.effect for job in found.jobs.value if job.row.state == "processing"]
        assert running == ["will be asked to stop"] * 3


@pytest.mark.parametrize("by", ["keys", "filter"])
def test_preview_shows_columns_and_errors_wherever_the_jobs_are(engine: sa.Engine, plain: Any, by: str) -> None:
    add(engine, *(plain(id=number, key="a", note=f"note {number}") for number in range(1, 5)))
    fail_jobs(engine, plain, 2, error="ValueError: bad\nTraceback")
    chosen = of_keys(plain, 2, 1, 3) if by == "keys" else of_filter(plain, "requeue", ("state", "failed"))
    found = look(engine, "requeue", chosen).jobs.value
    assert found is not None
    shown = {job.row.key: {cell.column.name: cell.text for cell in job.row.cells} for job in found}
    assert {key: cells["note"] for key, cells in shown.items() if key in "12"} == {"1": "note 1", "2": "note 2"}
    errors = {key: cells.get("last_error") for key, cells in shown.items()}
    is_stored = "last_error" in columns(plain)
    assert errors == {key: "ValueError: bad" if is_stored and key in "12" else None for key in shown}
    assert all("status" not in cells and "id" not in cells for cells in shown.values())
    # Those of the list from which they were chosen.
    with Session(engine) as session:
        again = preview(session, "requeue", chosen, "note").jobs.value
    assert {tuple(cell.column.name for cell in job.row.cells) for job in again or ()} == {("note",)}


@pytest.mark.parametrize(
    ("options", "text"), [({}, ", with attempts back at 0"), ({"columns": {"attempts": None}}, "")]
)
def test_preview_of_a_requeue_tells_what_becomes_of_the_attempts(
    engine: sa.Engine, options: dict[str, Any], text: str
) -> None:
    model = new_queue(engine, **options)
    add(engine, model(id=1))
    fail_jobs(engine, model)
    found = look(engine, "requeue", of_keys(model, 1))
    assert [job.effect for job in found.jobs.value] == [f"will be pending again{text}"]


def test_jobs_after_the_preview_are_left_alone(engine: sa.Engine, queues: Queues) -> None:
    add(engine, *(queues.Email(recipient="a") for _ in range(3)))
    fail_jobs(engine, queues.Email, 2)
    seen = look(engine, "requeue", of_filter(queues.Email, "requeue", ("state", "failed")))
    fail_jobs(engine, queues.Email, 1)
    done = do(engine, "requeue", of_filter(queues.Email, "requeue", ("state", "failed"), until=seen.now))
    assert done.changed == 2
    seen = look(engine, "cancel", of_filter(queues.Email, "cancel"))
    add(engine, queues.Email(recipient="late"))
    assert do(engine, "cancel", of_filter(queues.Email, "cancel", until=seen.now)).changed == 2
    assert states(engine, queues.Email)["4"] == "pending"
    done = do(engine, "purge", of_filter(queues.Email, "purge", most=1))
    assert done.changed == 1, "no more than the preview has counted"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("redacted", [(), ("created_at", "finished_at")])
def test_jobs_after_the_preview_are_left_alone_though_their_times_are_hidden(
    engine: sa.Engine, kind: str, redacted: tuple[str, ...]
) -> None:
    model = new_queue(engine, kind)
    add(engine, *(model(id=number) for number in (1, 2, 3)))
    fail_jobs(engine, model, 2)
    names = [role for role in redacted if role in spec_of(model).columns]
    chosen = by_filter(parse_filter(columns(model, *names), [("state", "failed")]), "purge")
    seen = look(engine, "purge", chosen)
    fail_jobs(engine, model, 1)
    # The newest would be the first ones.
    assert do(engine, "purge", replace(chosen, until=seen.now, most=2)).changed == 2
    assert list(states(engine, model)) == ["3"]


def test_large_actions_go_on_where_they_stopped(
    engine: sa.Engine, queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "MOST_AT_ONCE", 100)
    monkeypatch.setattr(bulk, "_BATCH", 50)
    execute(engine, "INSERT INTO email (recipient, status) SELECT 'a', 'failed' FROM generate_series(1, 260)")
    chosen = of_filter(queues.Email, "requeue", ("state", "failed"))
    done = do(engine, "requeue", chosen)
    assert done.changed == 100
    assert done.after is not None
    rounds = 0
    while done.after is not None:
        done = do(engine, "requeue", of_filter(queues.Email, "requeue", ("state", "failed"), after=done.after))
        rounds += 1
    assert (rounds, set(states(engine, queues.Email).values())) == (2, {"pending"})
    stopped = do(engine, "cancel", of_filter(queues.Email, "cancel"), longest=0)
    assert stopped.changed == 50, "one batch, as the time was over"
    assert stopped.after is not None


def test_duplicates_are_told(engine: sa.Engine) -> None:
    model = new_queue(engine, unique=Unique("key"))
    add(engine, model(id=1, key="a"), model(id=2, key="b"))
    fail_jobs(engine, model, 2)
    add(engine, model(id=3, key="a"))
    found = look(engine, "requeue", of_keys(model, 1, 2))
    assert [(job.row.key, job.is_changed) for job in found.jobs.value] == [("1", False), ("2", True)]
    assert "job 3" in found.jobs.value[0].effect
    done = do(engine, "requeue", of_keys(model, 1, 2))
    assert (done.changed, done.duplicates, done.unchanged) == (1, 1, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_dead_letter_with_a_duplicate_stays(engine: sa.Engine, kind: str) -> None:
    model = new_queue(engine, kind, unique=Unique("key"))
    add(engine, model(id=1, key="a"))
    fail_jobs(engine, model, 1)
    add(engine, model(id=2, key="a"))
    done = do(engine, "requeue", of_keys(model, 1))
    assert (done.changed, done.duplicates) == (0, 1)
    assert states(engine, model)["2"] == "pending"


def test_running_jobs_are_asked_and_not_waited_for(engine: sa.Engine, plain: Any) -> None:
    add(engine, *(plain(id=number) for number in range(1, 4)))
    with claimed(engine, plain, 2):
        done = do(engine, "cancel", of_keys(plain, 1, 2, 3))
        assert (done.changed, done.asked) == (1, 2)
        assert do(engine, "requeue", of_keys(plain, 1)).changed == 0
        assert do(engine, "purge", of_keys(plain, 1)).changed == 0


def test_cancelled_run_ends_once(engine: sa.Engine, plain: Any, sessions: Any) -> None:
    started, stop = threading.Event(), threading.Event()
    runs: list[int] = []

    def handler(_: Session, job: Any) -> None:
        runs.append(job.id)
        started.set()
        assert stop.wait(30)

    add(engine, plain(id=1), plain(id=2))
    with Consumer(plain, handler, sessions, batch_size=1):
        assert started.wait(30)
        done = do(engine, "cancel", of_filter(plain, "cancel"))
        assert done.asked + done.changed == 2
        stop.set()
    assert len(runs) == len(set(runs))
    if done.changed:
        assert len(runs) == 1


def test_blocking_head_is_not_purged(engine: sa.Engine) -> None:
    model = new_queue(engine, flow_control=[InOrder("key", by="id")])
    add(engine, model(id=1, key="a"), model(id=2, key="a"))
    fail_jobs(engine, model, 1)
    done = do(engine, "purge", of_keys(model, 1))
    assert (done.changed, done.unchanged) == (0, 1)


def test_composite_keys(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Picture(tenant='a,"', name="b"), queues.Picture(tenant="c", name="d"))
    keys = list(states(engine, queues.Picture))
    assert len(keys) == 2
    found = look(engine, "cancel", ByKeys(columns(queues.Picture), ('"a,""",b', "c,d", "x,y")))
    assert (effects(found), found.missing) == ({"pending": (2, True)}, 1)
    assert do(engine, "cancel", ByKeys(columns(queues.Picture), ('"a,""",b',))).changed == 1
    assert sorted(states(engine, queues.Picture).values()) == ["cancelled", "pending"]


def test_malformed_keys_are_refused(engine: sa.Engine, queues: Queues) -> None:
    for key in ("x", "1;DROP TABLE email", str(2**63), "1,2", "'"):
        for operation in (do, look):
            with pytest.raises(ParameterError):
                operation(engine, "purge", of_keys(queues.Email, key))


def test_refusal_of_one_job_is_told(engine: sa.Engine, queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "_BATCH", 2)
    add(engine, *(queues.Email(recipient="a") for _ in range(5)))
    execute(engine, "ALTER TABLE email ADD CHECK (id <> 3 OR status <> 'cancelled')")
    done = do(engine, "cancel", of_keys(queues.Email, 1, 2, 3, 4, 5))
    assert (done.changed, done.unchanged) == (4, 1)
    assert done.problem == "The database refuses to change job 3; the log has the error."
    with pytest.raises(sa.exc.IntegrityError):
        do(engine, "cancel", of_keys(queues.Email, 3))


def test_action_that_applies_to_no_state_reads_nothing(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Email(recipient="a"))
    with sent_statements(engine) as sent:
        done = do(engine, "requeue", of_filter(queues.Email, "requeue", ("state", "pending")))
    assert (done.changed, sent) == (0, [])


def test_old_jobs_without_a_time_are_selected(engine: sa.Engine, queues: Queues) -> None:
    execute(engine, "INSERT INTO email (recipient, status) VALUES ('a', 'failed')")
    seen = look(engine, "requeue", of_filter(queues.Email, "requeue"))
    later = seen.now + timedelta(seconds=1)
    assert do(engine, "requeue", of_filter(queues.Email, "requeue", until=later)).changed == 1


def test_keys_that_no_row_can_have_are_missing(engine: sa.Engine, queues: Queues) -> None:
    add(engine, queues.Invoice(note="a"))
    found = look(engine, "cancel", of_keys(queues.Invoice, 1, 2**40, 2**63 - 1))
    assert (effects(found), found.missing) == ({"pending": (1, True)}, 2)
    assert do(engine, "cancel", of_keys(queues.Invoice, 1, 2**40)).changed == 1


# -- cancel and delete by filter while four processes run the jobs: nothing is lost, run twice, or run after its end --

SIZE, GROUPS, PROCESSES, LATER = 100, 5, 4, 30
ALWAYS = ("update_status", "delete_returning")
JOBS = SIZE * GROUPS


@contextmanager
def workers(url: str, kind: str) -> Iterator[None]:
    started = [Program(jobs.__name__, url, kind) for _ in range(PROCESSES)]
    try:
        yield
        for process in started:
            process.signal()
        codes = [process.end() for process in started]
    finally:
        for process in started:
            process.clear()
    output = [process.output for process in started]
    assert codes == [0] * PROCESSES, output
    assert [text for text in output if "Traceback" in text] == []


async def act_on_all(browser: httpx.AsyncClient, action: str, **filters: str) -> None:
    """Look at the preview, and do what it offers."""
    page = await browser.get("/queues/job/confirm", params={"all": "1", "action": action, **filters})
    assert page.status_code == 200, page.text
    form = dict(hidden(page.text))
    if form:  # there are such jobs
        answer = await browser.post(f"/queues/job/actions/{action}", data=form)
        assert answer.status_code == 303, answer.text


def enqueue(engine: sa.Engine, model: Any, group: int) -> None:
    """Enqueue a group of jobs. However fast the workers are, some of each group but the first are left to cancel."""
    first, later = group * SIZE + 1, datetime.now(UTC) + timedelta(hours=1)
    added = [model(id=number, note=str(group)) for number in range(first, first + SIZE)]
    for job in added[-LATER:] if group else ():
        job.run_at = later
    add(engine, *added)


@pytest.mark.once
@pytest.mark.parametrize(
    "kind", [each if each in ALWAYS else pytest.param(each, marks=pytest.mark.thorough) for each in KINDS]
)
async def test_nothing_is_lost(
    engine: sa.Engine, shared: Database, kind: str, client_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = new_queue(engine, kind)
    execute(engine, RAN)
    enqueue(engine, model, 0)
    caplog.set_level(logging.INFO, "sqlaqueue.audit")

    def gone(group: int) -> tuple[datetime, set[int]]:
        """Return which of the jobs that were enqueued have no row any more, and a time after that."""
        with engine.connect() as connection:
            left = set(connection.scalars(sa.text("SELECT id FROM job")))
            now = connection.scalar(sa.text("SELECT clock_timestamp()"))
        assert now is not None
        return now, set(range(1, (group + 1) * SIZE + 1)) - left

    reported: list[tuple[datetime, set[int]]] = []
    async with client_of(model) as browser:
        with workers(shared.url(), kind):
            wait_until(lambda: execute(engine, "SELECT count(*) FROM ran") > PROCESSES)
            for group in range(1, GROUPS):
                enqueue(engine, model, group)
                await act_on_all(browser, "cancel", state="pending", **{"f.note": str(group)})
                for state in ("cancelled", "completed") if kind != "rows_are_messages" else ("cancelled",):
                    await act_on_all(browser, "purge", state=state)
                reported.append(gone(group))
            wait_until(lambda: execute(engine, UNFINISHED[kind]) == 0, seconds=120)
    audits: list[Any] = [record for record in caplog.records if record.name == "sqlaqueue.audit"]
    counts = {action: sum(each.count for each in audits if each.action == action) for action in ("cancel", "purge")}
    with engine.connect() as connection:
        ran = connection.execute(sa.text("SELECT id, attempt, at FROM ran")).all()
    # Each job was either run or cancelled; of those that were asked to stop some had not begun. None was run twice in
    # one attempt.
    asked = sum(each.facts.get("asked", 0) for each in audits)
    assert counts["cancel"] <= JOBS - len({row.id for row in ran}) <= counts["cancel"] + asked
    assert len({(row.id, row.attempt) for row in ran}) == len(ran)
    assert counts["cancel"] >= LATER * (GROUPS - 1)
    # What was deleted had been run before, or never.
    late = [(row.id, row.at, moment) for moment, ids in reported for row in ran if row.id in ids and row.at > moment]
    assert late == []
    assert counts["purge"] > 0


UNFINISHED = {
    kind: "SELECT count(*) FROM job"
    + ("" if kind == "rows_are_messages" else " WHERE status IN ('pending', 'processing')")
    for kind in KINDS
}
