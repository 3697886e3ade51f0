"""What blocks a queue, as its Consumers say, and the page of all Consumers."""

import enum
import html
import json
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import Consumer, QueueConfig, QueueMixin
from sqlaqueue.admin import QueueAdmin
from sqlaqueue.admin.state import about_consumer, unclaimable_jobs, workers
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.web import Access
from sqlaqueue.web.settings import ACTIONS
from tests.models import execute
from tests.programs import wait_until
from tests.web.conftest import ask, hidden
from tests.web.models import new_base

SECRET = "'the secret' is not among the defined enum values"


def heartbeat(
    engine: sa.Engine,
    name: str = "web:1",
    queue: str = "email",
    *,
    unclaimable: Sequence[dict[str, Any]] = (),
    running: Sequence[Sequence[str]] = (),
    dead: bool = False,
    listening: bool = True,
) -> str:
    """Write what a Consumer writes about itself, and return its id."""
    execute(
        engine,
        "INSERT INTO sqlaqueue_consumer (id, queue, name, host, pid, version, listening, running, unclaimable, "
        "heartbeat_at, expires_at) VALUES (:id, :queue, :name, 'web', 1, '1', :listening, CAST(:running AS jsonb), "
        "CAST(:unclaimable AS jsonb), now(), now() + :left * interval '1 min')",
        id=f"{queue}-{name}",
        queue=queue,
        name=name,
        listening=listening,
        running=json.dumps([list(key) for key in running]),
        unclaimable=json.dumps(list(unclaimable)),
        left=-1 if dead else 1,
    )
    return f"{queue}-{name}"


def job(key: str, error: str = "LookupError: it is newer") -> dict[str, Any]:
    return {"key": [key], "error": error}


def failing(error: str = "UndefinedColumn: email.kind", seconds: float = 60) -> dict[str, Any]:
    return {"failures": 7, "seconds": seconds, "error": error}


async def page_of(browser: httpx.AsyncClient, path: str = "") -> str:
    response = await browser.get(f"/{path}")
    assert response.status_code == 200, response.text
    return html.unescape(response.text)


def part_of(page: str, id: str) -> str:  # noqa: A002 - as HTML calls it
    """Return a section of a page by its id; empty if there is none."""
    part = page.partition(f'id="{id}"')[2]
    return part if id == "health" else part.partition("</section>")[0]


pytestmark = pytest.mark.usefixtures("queues")


@pytest.mark.usefixtures("no_examination")
async def test_blocked_queues_are_named_on_the_first_page_the_worst_first(client_of: Any, engine: sa.Engine) -> None:
    heartbeat(engine, "web:1", unclaimable=[job("7"), job("8")])
    heartbeat(engine, "web:2")
    heartbeat(engine, "web:3", "invoice", unclaimable=[failing()])
    attention = part_of(await page_of(client_of()), "attention")
    first, second = attention.split("<li>")[1:]
    assert 'badge--critical"><a href="./queues/invoice#blockers">' in first
    assert "every claim fails since" in first
    assert "UndefinedColumn: email.kind" in first
    # Another Consumer runs these jobs.
    assert 'badge--warning"><a href="./queues/email#blockers">' in second
    assert "2 jobs cannot be claimed: 7, LookupError: it is newer" in second


@pytest.mark.usefixtures("no_examination")
async def test_the_first_page_names_a_few_blocked_queues(
    client_of: Any, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 'id="attention" class="panel panel--attention" data-live aria-label="What needs a look" hidden' in (
        await page_of(client_of())
    )
    monkeypatch.setattr("sqlaqueue.web.queues.MOST_BLOCKED", 1)
    for queue in ("email", "invoice", "picture"):
        heartbeat(engine, queue=queue, unclaimable=[failing()])
    attention = part_of(await page_of(client_of()), "attention")
    assert attention.count("#blockers") == 1
    assert "and 2 more queues; Health lists them" in attention


async def test_the_page_of_a_queue_names_all_that_blocks_it(client_of: Any, engine: sa.Engine) -> None:
    heartbeat(engine, "web:1", unclaimable=[failing(seconds=60), job("7")])
    heartbeat(engine, "web:2", unclaimable=[failing("UndefinedTable: email", 600), job("7"), job("8")])
    blockers = part_of(await page_of(client_of(), "queues/email"), "blockers")
    assert "Every claim fails, so no job runs." in blockers
    # Which fails for the longest time is first.
    assert blockers.index("UndefinedTable: email") < blockers.index("UndefinedColumn: email.kind")
    assert blockers.count('href="../queues/email/job?key=7"') == 1
    assert "web:1, web:2 (web:1)" in blockers
    assert 'href="../queues/email/edit?key=8"' in blockers
    assert 'href="../queues/email/confirm?action=cancel&key=8"' in blockers
    heartbeat(engine, "web:3")
    blockers = part_of(await page_of(client_of(), "queues/email"), "blockers")
    assert "The claims of 2 of 3 Consumers fail; the other Consumers run the jobs." in blockers
    assert part_of(await page_of(client_of(), "queues/invoice"), "blockers") == ""


async def test_buttons_need_the_right(client_of: Any, engine: sa.Engine) -> None:
    heartbeat(engine, unclaimable=[job("7")])
    for path, id_ in (("queues/email", "blockers"), ("health", "health")):
        reader = part_of(await page_of(client_of(access=lambda _: Access(read=True)), path), id_)
        assert "email/job?key=7" in reader
        assert "/edit?" not in reader
        assert "/confirm?" not in reader
        canceller = client_of(access=lambda _: Access(read=True, act={"email": ["cancel"]}))
        shown = part_of(await page_of(canceller, path), id_)
        assert "/edit?" not in shown
        assert "email/confirm?action=cancel&key=7" in shown


async def test_errors_are_hidden_where_they_are_redacted(client_of: Any, engine: sa.Engine) -> None:
    heartbeat(engine, "web:1", unclaimable=[failing(f"{SECRET}."), job("7", f"LookupError: {SECRET}.")])
    heartbeat(engine, "web:2", "invoice", unclaimable=[job("1", f"LookupError: {SECRET}")])
    browser = client_of(redact=["email.last_error"])
    for path in ("", "queues/email"):
        page = await page_of(browser, path)
        assert SECRET not in part_of(page, "attention").partition("invoice")[0]
        assert SECRET not in part_of(page, "blockers")
        assert "(hidden)" in page
    health = (await page_of(browser, "health")).partition("<h2")[2]
    of_email = health.partition(">email<")[2].partition(">invoice<")[0]
    assert "claims_fail" in of_email
    assert "email/job?key=7" in of_email
    assert "(hidden)" in of_email
    assert SECRET not in of_email
    # Those of another queue are shown.
    assert SECRET in await page_of(browser, "queues/invoice")


async def test_whatever_a_heartbeat_says_is_no_code(client_of: Any, engine: sa.Engine) -> None:
    code = "<script>alert(1)</script>"
    heartbeat(engine, code, unclaimable=[failing(code), job(code, code), {"key": 1}, {"failures": "x"}, {}])
    for path in ("", "queues/email", "health"):
        response = await client_of().get(f"/{path}")
        assert response.status_code == 200
        assert code not in response.text
        assert "&lt;script&gt;" in response.text


class Size(enum.Enum):
    SMALL = "small"


def make_parcel(strategy: str) -> Any:
    class Parcel(QueueMixin, new_base()):
        __tablename__ = "parcel"
        __queue__ = QueueConfig(strategy=strategy)
        id: Mapped[int] = mapped_column(primary_key=True)
        # A text in the database, which a newer version of the program has more values for.
        size: Mapped[Size] = mapped_column(sa.Enum(Size, native_enum=False, create_constraint=False, length=20))

    return Parcel


@contextmanager
def consuming(engine: sa.Engine, model: Any, handle: Any = lambda *_: None, **options: Any) -> Any:
    """Run a Consumer in a thread, on connections of its own."""
    own = sa.create_engine(engine.url)
    consumer = Consumer(model, handle, sessionmaker(own), **{"poll_interval": 0.1, **options})
    thread = threading.Thread(target=consumer.run, name="consumer")
    thread.start()
    try:
        yield consumer
    finally:
        consumer.stop()
        thread.join(30)
        own.dispose()
        assert not thread.is_alive(), "the Consumer does not end"


@pytest.mark.parametrize("strategy", ["update_status", "batch_select", "delete_returning"])
async def test_a_row_that_cannot_be_loaded_is_found_edited_and_cancelled(engine: sa.Engine, strategy: str) -> None:
    parcel = make_parcel(strategy)
    parcel.metadata.create_all(engine)
    execute(engine, "INSERT INTO parcel (id, size) VALUES (1, 'HUGE'), (2, 'HUGE'), (3, 'SMALL')")

    def blocked() -> bool:
        with Session(engine) as session:
            return [*map(len, map(unclaimable_jobs, QueueAdmin(session, parcel).consumers()))] == [2]

    with consuming(engine, parcel):
        wait_until(blocked)
        browser = ask(engine, parcel)
        page = part_of(await page_of(browser, "queues/parcel"), "blockers")
        assert "LookupError: 'HUGE' is not among the defined enum values" in page
        assert (await browser.get("/queues/parcel/job?key=1")).status_code == 200
        preview = await browser.get("/queues/parcel/confirm?action=cancel&key=1")
        done = await browser.post("/queues/parcel/actions/cancel", data=dict(hidden(preview.text)))
        assert "notice=cancelled%3A1" in done.headers["location"]
        form = await browser.get("/queues/parcel/edit?key=2")
        for wrong in ("HUGE", "LARGE"):
            fields = {**dict(hidden(form.text)), "v.size": wrong}
            refused = await browser.post("/queues/parcel/actions/edit", data=fields)
            assert refused.status_code in {409, 422}
        fields = {**dict(hidden(form.text)), "v.size": "SMALL"}
        done = await browser.post("/queues/parcel/actions/edit", data=fields)
        assert done.status_code == 303, html.unescape(done.text)
        assert "notice=edited%3A1" in done.headers["location"]


# -- the page of all Consumers ------------------------------------------------------------------------------------

ABOUT = {"handlers": ["app.jobs:send"]}
ASK = "workers/confirm?action=quiet&queue=email&id=email-web%3A1"


async def test_all_consumers_are_listed(client_of: Any, engine: sa.Engine) -> None:
    heartbeat(engine, "web:1", unclaimable=[failing(), ABOUT], running=[["7"], ["8"]])
    heartbeat(engine, "web:2", unclaimable=[{**ABOUT, "quiet": True}])
    heartbeat(engine, "web:3", "picture", listening=False, running=[["a,b", "c"]])
    page = await page_of(client_of(), "workers")
    one, two, three = part_of(page, "workers").split("<tbody>")[1].split("<tr>")[1:]
    assert "web:1" in one
    assert "web, process 1, version 1" in one
    assert "app.jobs:send" in one
    assert 'href="./queues/email/job?key=7"' in one
    assert ">listening<" in one
    assert 'href="./queues/email#blockers">claims fail<' in one
    assert ">quiet<" in two
    assert ">idle<" in two
    assert "claims fail" not in two
    assert 'href="./queues/picture/job?key=%22a%2Cb%22%2Cc"' in three
    assert ">only polls<" in three
    assert "not known" in three
    assert 'id="dead"' not in page
    assert "email" not in part_of(
        await page_of(client_of(access=lambda _: Access(read=["picture"])), "workers"), "workers"
    )


async def test_the_dead_are_listed_with_what_they_have_lost(client_of: Any, queues: Any, engine: sa.Engine) -> None:
    claimed = "UPDATE email SET status = 'processing', lease_token = gen_random_uuid(), lease_expires_at = now()"
    execute(engine, "INSERT INTO email (recipient) SELECT 'ada' FROM generate_series(1, 4)")
    execute(engine, f"{claimed}, claimed_by = 'web:1' WHERE id = 2")
    execute(engine, f"{claimed}, claimed_by = 'web:2' WHERE id = 3")
    execute(engine, f"{claimed}, claimed_by = 'web:9' WHERE id = 4")
    heartbeat(engine, "web:1", dead=True, running=[["1"], ["2"]], unclaimable=[ABOUT])
    heartbeat(engine, "web:2", dead=True)
    execute(engine, "UPDATE sqlaqueue_consumer SET id = 'before' WHERE name = 'web:2'")
    heartbeat(engine, "web:2")
    heartbeat(engine, "web:3", "invoice", dead=True)
    page = await page_of(client_of(), "workers")
    assert part_of(page, "workers").count('<th scope="row">') == 1
    dead = part_of(page, "dead")
    rows = dead.split("<tr>")[1:]
    one, two, three = (next(row for row in rows if f">{name}<" in row) for name in ("web:1", "web:2", "web:3"))
    assert one.count("email/job?key=1") == 1
    assert one.count("email/job?key=2") == 2
    assert "app.jobs:send" in one
    # A live Consumer has the same name, or leases name nobody.
    assert part_after(two, "Not rescued yet").startswith('<span class="muted">not known')
    assert part_after(three, "Not rescued yet").startswith('<span class="muted">not known')
    assert "Quiet" not in dead
    hidden = part_of(await page_of(client_of(redact=["email.claimed_by"]), "workers"), "dead")
    assert hidden.count("email/job?key=2") == 1, "it is said to be claimed by the dead Consumer"


def part_after(row: str, label: str) -> str:
    return row.partition(f'data-label="{label}">')[2]


async def test_a_consumer_is_asked_after_a_preview(client_of: Any, engine: sa.Engine, audit: Any) -> None:
    heartbeat(engine, running=[["7"]])
    browser = client_of()
    preview = await browser.get(f"/{ASK}")
    text = html.unescape(preview.text)
    assert "No other Consumer of email claims jobs: its jobs will wait." in text
    assert "it ran 1 job" in text
    assert await requests(engine) == []
    done = await browser.post("/workers/quiet", data=dict(hidden(preview.text)))
    assert done.status_code == 303
    page = await page_of(browser, "workers?notice=quiet_asked:1")
    assert "The Consumer was asked to claim no more jobs." in page
    assert ">asked to be quiet<" in page
    assert await requests(engine) == [["sqlaqueue_quiet", "email-web:1"]]
    fields = {"queue": "email", "id": "email-web:1"}
    assert (await browser.post("/workers/resume", data=fields)).status_code == 303
    assert await requests(engine) == []
    assert (await browser.post("/workers/stop", data=fields)).status_code == 303
    assert ">asked to stop<" in await page_of(browser, "workers")
    facts = "queue='email' worker='web:1' id='email-web:1'"
    assert audit() == [f"user='ada' action={action}_worker {facts}" for action in ("quiet", "resume", "stop")]


async def requests(engine: sa.Engine) -> list[Any]:
    with engine.connect() as connection:
        return [*connection.scalars(sa.text("SELECT key FROM sqlaqueue_control"))]


@pytest.mark.parametrize("action", ["quiet", "resume", "stop"])
async def test_asking_a_consumer_needs_a_right_of_its_own(client_of: Any, engine: sa.Engine, action: str) -> None:
    heartbeat(engine)
    fields = {"queue": "email", "id": "email-web:1"}
    others = [each for each in ACTIONS if each != "workers"]
    for access in (
        Access(read=True),
        Access(read=True, act={"email": others}),
        Access(read=True, act={"invoice": ["workers"]}),
    ):
        browser = client_of(access=lambda _, access=access: access)
        assert "/confirm?" not in await page_of(browser, "workers")
        assert (await browser.get(f"/{ASK}")).status_code == 403
        assert (await browser.post(f"/workers/{action}", data=fields)).status_code == 403
    unseen = client_of(access=lambda _: Access(read=["invoice"], act=True))
    assert (await unseen.post(f"/workers/{action}", data=fields)).status_code == 404
    assert await requests(engine) == []
    allowed = client_of(access=lambda _: Access(read=True, act={"email": ["workers"]}))
    assert (await allowed.post(f"/workers/{action}", data=fields)).status_code == 303


async def test_what_is_no_live_consumer_or_no_request_is_refused(client_of: Any, engine: sa.Engine) -> None:
    heartbeat(engine, "web:1", dead=True)
    heartbeat(engine, "web:2", "invoice")
    browser = client_of()
    for queue, id_ in (("email", "email-web:1"), ("email", "invoice-web:2"), ("email", ""), ("none", "x")):
        assert (await browser.post("/workers/stop", data={"queue": queue, "id": id_})).status_code == 404
    fields = {"queue": "invoice", "id": "invoice-web:2"}
    assert (await browser.post("/workers/kill", data=fields)).status_code == 404
    assert (await browser.get("/workers/confirm?action=kill&queue=invoice&id=invoice-web:2")).status_code == 404
    headers = {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"}
    assert (await browser.post("/workers/stop", data=fields, headers=headers)).status_code == 403
    assert await requests(engine) == []


async def test_a_queue_that_cannot_be_read_hides_no_other_one(client_of: Any, engine: sa.Engine) -> None:
    heartbeat(engine)
    execute(engine, "DROP TABLE sqlaqueue_control CASCADE")
    page = await page_of(client_of(), "workers")
    assert "email: A table is missing. Run the migrations of the application" in page


async def test_workers_obey_the_page(engine: sa.Engine) -> None:
    parcel = make_parcel("update_status")
    parcel.metadata.create_all(engine)
    browser = ask(engine, parcel)
    with consuming(engine, parcel, worker_name="packer"):
        wait_until(lambda: len(_workers(engine, parcel)) == 1 and _workers(engine, parcel)[0].listening)
        page = await page_of(browser, "workers")
        assert "packer" in page
        assert "tests.web.test_workers:consuming" in page or "tests.web.test_workers:<lambda>" in page
        (worker,) = _workers(engine, parcel)
        fields = {"queue": "parcel", "id": worker.id}
        await browser.post("/workers/quiet", data=fields)
        wait_until(lambda: about_consumer(_workers(engine, parcel)[0]).quiet)
        assert ">quiet<" in await page_of(browser, "workers")
        await browser.post("/workers/stop", data=fields)
        wait_until(lambda: _workers(engine, parcel) == [])
        assert "No Consumer runs" in await page_of(browser, "workers")


def _workers(engine: sa.Engine, model: Any) -> list[Any]:
    with Session(engine) as session:
        return [*workers(session, spec_of(model))]
