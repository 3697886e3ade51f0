"""The frame: which requests are served, mounted under any path, in which words, and by which sessions."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin

import anyio
import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from litestar import Litestar, asgi
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Mapped, Session, mapped_column, sessionmaker
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.routing import Mount

import sqlaqueue.web
from sqlaqueue import QueueConfig, QueueMixin, Unique
from sqlaqueue.exc import StatementError
from sqlaqueue.web import Access, Dashboard
from sqlaqueue.web import context as context_module
from sqlaqueue.web import database as database_module
from sqlaqueue.web.context import PATHS, shared_result
from sqlaqueue.web.data.reader import attempt_part
from sqlaqueue.web.database import MOST_AT_ONCE, READER, Database
from sqlaqueue.web.errors import ServiceUnavailable
from sqlaqueue.web.security import SECURITY_HEADERS
from tests.web.conftest import HERE, client, everything, hidden
from tests.web.jobs import add, created, fail_jobs, new_queue
from tests.web.models import Queues, new_base


def links(response: httpx.Response) -> list[str]:
    """Return the absolute URLs of what a page links to."""
    return [urljoin(str(response.url), each) for each in re.findall(r'(?:href|src|action)="([^"]+)"', response.text)]


def in_starlette(dashboard: Any, path: str = "/ops") -> Any:
    return Starlette(routes=[Mount(path, dashboard)])


def in_fastapi(dashboard: Any, path: str = "/ops") -> Any:
    app = FastAPI()
    app.mount(path, dashboard)
    return app


def in_litestar(dashboard: Any, path: str = "/ops") -> Any:
    return Litestar([asgi(path, is_mount=True, copy_scope=True)(dashboard)])


nothing_found = pytest.mark.usefixtures("no_examination")


async def test_first_page_names_all_queues(client_of: Any) -> None:
    response = await client_of().get("/")
    assert response.status_code == 200
    assert [name in response.text for name in ("email", "invoice", "picture")] == [True] * 3


async def test_async_sessions_serve_as_well(queues: Any, shared: Any) -> None:
    engine = create_async_engine(shared.url("asyncpg"))
    app = Dashboard(queues.all, async_sessionmaker(engine), access=everything)
    assert (await client(app).get("/")).status_code == 200
    await engine.dispose()


@nothing_found
@pytest.mark.parametrize("mount", [in_starlette, in_fastapi, in_litestar])
@pytest.mark.parametrize("path", ["/ops", "/deep/er/queues"])
async def test_mounted_links_stay_below_the_path(mount: Any, path: str, dashboard: Any) -> None:
    async with client(mount(dashboard, path)) as browser:
        first = await browser.get(path, follow_redirects=True)
        assert (first.status_code, first.url.path) == (200, f"{path}/")
        found = links(first)
        assert found
        assert [each for each in found if not each.startswith(f"{HERE}{path}/")] == []
        for each in found:
            if "/static/" in each:
                assert (await browser.get(each)).status_code == 200
        below = await browser.get(f"{path}/queues/email/nothing")
        assert [each for each in links(below) if not each.startswith(f"{HERE}{path}/")] == []


@nothing_found
async def test_proxy_that_cuts_the_path_needs_no_setting(dashboard: Any) -> None:
    response = await client(dashboard).get("/")
    seen = "https://ops.example.com/admin/queues/"
    targets = [urljoin(seen, each) for each in re.findall(r'(?:href|src)="([^"]+)"', response.text)]
    assert [each for each in targets if not each.startswith(seen)] == []


async def test_refuses_to_start_without_an_access_rule(queues: Any, sessions: Any) -> None:
    with pytest.raises(TypeError, match="access"):
        Dashboard(queues.all, sessions)  # type: ignore[call-arg]  # the mistake that is tested
    with pytest.raises(Exception, match="Dashboard\\(access=None\\): give a function"):
        Dashboard(queues.all, sessions, access=None)  # type: ignore[arg-type]  # its types are those of its own


async def test_nobody_sees_nothing(client_of: Any) -> None:
    response = await client_of(access=lambda _: None).get("/")
    assert response.status_code == 403
    assert "email" not in response.text


async def test_access_rule_may_answer_itself(client_of: Any) -> None:
    async def rule(_: Any) -> RedirectResponse:
        return RedirectResponse("/login")

    response = await client_of(access=rule).get("/")
    assert (response.status_code, response.headers["location"]) == (307, "/login")


async def test_error_of_the_access_rule_is_the_applications(queues: Any, sessions: Any) -> None:
    def rule(_: Any) -> Access:
        raise HTTPException(401, headers={"WWW-Authenticate": "Basic"})

    response = await client(in_starlette(Dashboard(queues.all, sessions, access=rule))).get("/ops/")
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Basic")


@nothing_found
async def test_access_rule_sees_the_whole_path(queues: Any, sessions: Any) -> None:
    seen: list[str] = []

    def rule(request: Any) -> Access:
        seen.append(request.url.path)
        return Access(read=True)

    await client(in_starlette(Dashboard(queues.all, sessions, access=rule))).get("/ops/")
    assert seen == ["/ops/"]


@nothing_found
async def test_queue_without_access_is_not_named(client_of: Any) -> None:
    response = await client_of(access=lambda _: Access(read=["invoice"])).get("/")
    assert "invoice" in response.text
    assert "email" not in response.text


@pytest.mark.parametrize("given", [True, "ada", Access(read=["emial"])])
async def test_wrong_access_shows_nothing_and_is_logged(
    given: Any, client_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    response = await client_of(access=lambda _: given).get("/")
    assert response.status_code == 500
    assert "email" not in response.text
    assert "the access rule" in caplog.text


async def test_other_hosts_are_refused(client_of: Any) -> None:
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "[", "10.0.0.7"):
        response = await client_of().get("/", headers={"Host": host})
        assert response.status_code == 421, host
        assert "email" not in response.text


async def test_own_hosts_are_served(client_of: Any) -> None:
    dashboard = client_of(origins=["https://ops.example.com"])
    for host in ("localhost", "localhost:8000", "127.0.0.1:8420", "[::1]:8420", "ops.example.com"):
        assert (await dashboard.get("/queues/email/jobs", headers={"Host": host})).status_code == 200, host


async def test_headers_forbid_inline_code_frames_and_caches(client_of: Any) -> None:
    for path in ("/", "/nothing"):
        headers = (await client_of().get(path)).headers
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert headers["x-frame-options"] == "DENY"
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")


@pytest.mark.few(1)
@nothing_found
@pytest.mark.parametrize("mounted", [None, in_starlette, in_fastapi, in_litestar])
async def test_every_answer_has_the_headers(mounted: Any, dashboard: Any) -> None:
    app, below = (dashboard, "") if mounted is None else (mounted(dashboard), "/ops")
    parts = {"queue": "email", "action": "pause", "file": "dashboard.css", "form": "csv"}
    paths = [f"/{each.format(**parts)}" for each in PATHS.values()]
    paths += ["/nothing", "/queues/nothing", "/queues/email/", "/static/nothing", "//", "/%00", "/queues/%2e%2e"]
    if mounted is in_litestar:  # the others answer this one themselves
        paths.append("")
    seen = set()
    async with client(app) as browser:
        # A framework changes no answer for its method.
        for method in METHODS if mounted is None else ("GET", "POST", "OPTIONS"):
            for path in paths:
                if path == "/events" and method == "GET":
                    continue  # it has no end; test_live.py looks at it
                response = await browser.request(method, below + path)
                seen.add(response.status_code)
                missing = [name for name in SECURITY_HEADERS if name not in response.headers]
                assert not missing, (method, path, response.status_code, missing)
                names = [name for name, _ in response.headers.multi_items()]
                assert len(set(names)) == len(names), (method, path, names)
                if "/static/" not in path:
                    assert response.headers["cache-control"] == "no-store"
    assert {200, 303, 400, 404, 405} <= seen
    assert mounted is not in_litestar or 307 in seen


async def test_answer_of_the_access_rule_is_sent_as_it_is(client_of: Any) -> None:
    login = HTMLResponse("<style>p {color: red}</style>", headers={"Content-Security-Policy": "style-src 'self'"})
    headers = (await client_of(access=lambda _: login).get("/")).headers
    assert headers["content-security-policy"] == "style-src 'self'"
    assert "x-frame-options" not in headers


async def test_static_files_are_these_only(client_of: Any) -> None:
    async with client_of() as browser:
        assert (await browser.get("/static/dashboard.css")).headers["content-type"].startswith("text/css")
        for name in ("../dashboard.py", "..%2fdashboard.py", "%2e%2e/dashboard.py", "templates", "", "x.css"):
            assert (await browser.get(f"/static/{name}")).status_code == 404


async def test_unreachable_database_is_a_page_with_advice(queues: Any, client_of: Any) -> None:
    engine = sa.create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    response = await client_of(factory=sa.orm.sessionmaker(engine)).get("/")
    # The first page shows the queues even so.
    assert response.status_code in {200, 503}
    assert "Traceback" not in response.text


async def test_unexpected_error_is_logged_and_not_shown(
    queues: Any, sessions: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rule(_: Any) -> Access:
        message = "secret <script>"
        raise RuntimeError(message)

    with caplog.at_level(logging.ERROR):
        response = await client(Dashboard(queues.all, sessions, access=rule)).get("/")
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "RuntimeError: secret" in caplog.text


async def test_lifespan_and_websockets_are_answered(dashboard: Any) -> None:
    sent: list[Any] = []
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    await dashboard({"type": "lifespan"}, receive, send)
    await dashboard({"type": "websocket"}, receive, send)
    assert [each["type"] for each in sent] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
        "websocket.close",
    ]


# -- the pages use the words of the glossary, and the same parts look the same everywhere --------------------------

TEMPLATES = sorted((Path(sqlaqueue.web.__file__).parent / "templates").glob("*.html"))
PAGES = (
    "/",
    "/health",
    "/schedules",
    *(f"/queues/{queue}{rest}" for queue in ("email", "invoice", "picture") for rest in ("", "/jobs", "/claim")),
    "/queues/email/job?key=1",
    "/queues/email/edit?key=1",
    "/queues/email/confirm?action=cancel&all=1",
)


def text_of(page: str) -> str:
    """Return the text of a page without code and without columns of the application."""
    main = page.partition("<main")[2]
    return re.sub(r"<[^>]+>", " ", re.sub(r"<(code|pre)\b.*?</\1>", " ", main, flags=re.DOTALL))


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_state_and_a_consumer_have_one_name(template: Path) -> None:
    text = template.read_text()
    # A worker is a thread or task of a Consumer; what the pages show are Consumers. A state is called "processing".
    assert not re.search(r"\bWorkers?\b|\b[Nn]o worker\b|>Running<|\"Running\"|\b[Rr]unning jobs?\b", text)


async def test_each_page_has_plain_words_breadcrumbs_and_buttons(
    engine: sa.Engine, queues: Queues, client_of: Any
) -> None:
    add(engine, queues.Email(recipient="a"))
    async with client_of() as browser:
        for path in PAGES:
            response = await browser.get(path)
            assert response.status_code == 200, path
            text = text_of(response.text)
            assert not re.search(r"\b(requeue|cancel|rescue|purge|pause|resume|enqueue|claim)\(\)", text), path
            for crumbs in re.findall(r'<nav class="crumbs".*?</nav>', response.text, re.DOTALL):
                assert crumbs.count("<a ") == crumbs.count(">/<") + 1, path
            refresh = re.findall(r'<a class="([^"]*)"[^>]*>Refresh</a>', response.text)
            assert set(refresh) <= {"button"}, path


async def test_explanations_name_buttons_instead_of_functions(engine: sa.Engine, client_of: Any) -> None:
    model = new_queue(engine, unique=Unique("key"))
    add(engine, model(id=1, key="a"))
    fail_jobs(engine, model, error="ValueError: requeue() is no good")
    async with client_of(model) as browser:
        page = (await browser.get("/queues/job/job?key=1")).text
        assert "requeue() is no good" in page
        assert "; Requeue makes it pending again." in page
        add(engine, model(id=2, key="a"))
        assert (
            "; Requeue does not make it pending again while its duplicate"
            in (await browser.get("/queues/job/job?key=1")).text
        )


# -- results that several viewers share ----------------------------------------------------------------------------


async def test_one_makes_it_and_the_others_wait() -> None:
    made: list[int] = []
    state: dict[str, Any] = {}

    async def make() -> int:
        made.append(1)
        await anyio.sleep(0.01)
        return len(made)

    results: list[int] = []

    async def ask() -> None:
        results.append((await shared_result(state, "key", 60, make)).value)

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(ask)
    assert results == [1] * 5


async def test_an_old_result_is_made_again_and_others_are_dropped() -> None:
    state: dict[str, Any] = {}
    numbers = iter(range(10))

    async def make() -> int:
        return next(numbers)

    assert (await shared_result(state, "other", -1, make)).value == 0
    assert [(await shared_result(state, "key", seconds, make)).value for seconds in (-1, -1, 60, 60)] == [1, 2, 3, 3]
    assert list(state["shared_results"]) == ["key"]


async def test_an_error_is_not_shared() -> None:
    state: dict[str, Any] = {}
    answers = iter([ValueError("x"), 5])

    async def make() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(ValueError, match="x"):
        await shared_result(state, "key", 60, make)
    assert (await shared_result(state, "key", 60, make)).value == 5


async def test_the_locks_of_shared_results_do_not_stay() -> None:
    """A form that is carried out once has a key of its own."""
    state: dict[str, Any] = {}

    async def make() -> int:
        await asyncio.sleep(0.01)
        return len(context_module._LOCKS.get())

    found = await asyncio.gather(*(shared_result(state, number % 2, 60, make) for number in range(6)))
    assert {each.value for each in found} == {2}
    assert dict(context_module._LOCKS.get()) == {}


UNSEEN = "\x1b[2J\u202egpj\u2066x\u200b\ufeff\x9b\u00ad\u2064\u3164\U000e0041"


async def test_characters_that_are_not_seen_are_escaped_but_in_forms(client_of: Any, engine: sa.Engine) -> None:
    class Named(QueueMixin, new_base()):
        __tablename__ = "named"
        __queue__ = QueueConfig()
        name: Mapped[str] = mapped_column(sa.String(50), primary_key=True)
        note: Mapped[str | None] = mapped_column(sa.Text)

    created(engine, Named)
    hebrew = "\u05e9\u05dc\u05d5\u05dd\ta"
    add(engine, Named(name=UNSEEN, note=f"{UNSEEN}\nx"), Named(name=hebrew))
    key = quote(UNSEEN)
    async with client_of(Named) as browser:
        for path in ("jobs?", "job?", "edit?", "confirm?action=cancel&"):
            page = (await browser.get(f"/queues/named/{path}&key={key}".replace("jobs?&key", "jobs?job"))).text
            sent = re.findall(r'value="[^"]*"|<textarea.*?</textarea>', page, re.DOTALL)
            seen = page
            for each in sent:
                seen = seen.replace(each, "")
            assert "\\u001b[2J\\u202egpj\\u2066x\\u200b\\ufeff\\u009b\\u00ad\\u2064\\u3164\\udb40\\udc41" in seen, path
            assert not {*UNSEEN} - {*"[2Jgpjx"} & {*seen}, path
            assert any(UNSEEN in each for each in sent), path
        assert hebrew in (await browser.get("/queues/named/jobs")).text
        text = (await browser.get(f"/api/queues/named/job?key={key}")).text
        assert not {*UNSEEN} - {*"[2Jgpjx"} & {*text}
        assert json.loads(text)["key"] == UNSEEN
        page = (await browser.get(f"/queues/named/confirm?action=cancel&key={key}")).text
        done = await browser.post("/queues/named/actions/cancel", data=dict(hidden(page)))
        assert "notice=cancelled%3A1" in done.headers["location"]


# -- sessions within limits: timeouts, read-only transactions, and how many are used at once -----------------------


@pytest.fixture(params=["sync", "psycopg", "asyncpg"])
async def database(request: pytest.FixtureRequest, shared: Any, engine: sa.Engine) -> AsyncIterator[Database]:
    if request.param == "sync":
        yield Database(sessionmaker(engine), "Dashboard")
        return
    made = create_async_engine(shared.url(request.param), pool_size=8)
    yield Database(async_sessionmaker(made), "Dashboard")
    await made.dispose()


def setting(session: Session, name: str) -> Any:
    return session.scalar(sa.select(sa.func.current_setting(name)))


async def test_reading_has_a_timeout_and_writes_nothing(database: Database) -> None:
    def read(session: Session) -> tuple[Any, ...]:
        return setting(session, "statement_timeout"), setting(session, "transaction_read_only")

    assert await database.read(read, statement_timeout=1.5) == ("1500ms", "on")
    assert await database.read(read, read_only=False) == ("2s", "off")

    def create(session: Session) -> None:
        session.execute(sa.text("CREATE TABLE made (id int)"))

    with pytest.raises(sa.exc.DBAPIError, match="read-only"):
        await database.read(create)


async def test_reading_rolls_back(database: Database) -> None:
    def create(session: Session) -> None:
        session.execute(sa.text("CREATE TABLE made (id int)"))

    def exists(session: Session) -> bool:
        return bool(session.scalar(sa.text("SELECT to_regclass('made') IS NOT NULL")))

    await database.read(create, read_only=False)
    assert not await database.read(exists)


async def test_each_transaction_of_an_action_has_the_timeout(database: Database) -> None:
    def commit_twice(session: Session) -> list[Any]:
        found = []
        for _ in range(2):
            found.append(setting(session, "statement_timeout"))
            session.commit()
        return found

    assert await database.write(commit_twice, statement_timeout=7) == ["7s", "7s"]


async def test_limits_do_not_stay_on_the_connection(database: Database) -> None:
    def timeout(session: Session) -> Any:
        return setting(session, "statement_timeout")

    await database.write(timeout, statement_timeout=7)
    if database.is_async:
        async with database.sessions() as session:
            assert await session.run_sync(timeout) == "0"
    else:
        with database.sessions() as session:
            assert timeout(session) == "0"


async def test_slow_statement_is_cancelled(database: Database) -> None:
    with pytest.raises(sa.exc.DBAPIError, match="timeout"):
        await database.read(lambda session: session.execute(sa.text("SELECT pg_sleep(30)")), statement_timeout=0.2)


async def test_a_few_sessions_serve_many_requests(database: Database) -> None:
    def count(session: Session) -> int:
        session.execute(sa.text("SELECT pg_sleep(0.05)"))
        # Autovacuum has sessions of its own in each database.
        mine = "backend_type = 'client backend' AND datname = current_database() AND state <> 'idle'"
        active = f"SELECT count(*) FROM pg_stat_activity WHERE {mine}"
        return int(session.scalar(sa.text(active)) or 0)

    counts = await asyncio.gather(*(database.read(count) for _ in range(20)))
    assert max(counts) <= MOST_AT_ONCE


async def test_slow_pages_of_one_reader_do_not_delay_those_of_another(database: Database, engine: sa.Engine) -> None:
    async def read_as(name: str, sql: str) -> Any:
        READER.set(("user", name))
        return await database.read(lambda session: session.scalar(sa.text(sql)), statement_timeout=30)

    with engine.connect() as other:
        other.exec_driver_sql("SELECT pg_advisory_xact_lock(1)")
        slow = [asyncio.create_task(read_as("eve", "SELECT pg_advisory_xact_lock(1)")) for _ in range(MOST_AT_ONCE)]
        assert await asyncio.create_task(read_as("ada", "SELECT 1")) == 1
        assert not any(task.done() for task in slow)
        other.rollback()
    await asyncio.gather(*slow)


async def test_each_request_reads_as_its_user_or_its_address(
    queues: Any, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = set[Any]()
    open_session = database_module.open_session

    def opened(factory: Any) -> Any:
        readers.add(READER.get())
        return open_session(factory)

    monkeypatch.setattr(database_module, "open_session", opened)
    made = Dashboard(queues.all, sessions, access=lambda request: Access(read=True, user=request.headers["x-user"]))
    async with client(made) as browser:
        for name, expected in (("ada", ("user", "ada")), ("", ("address", "127.0.0.1"))):
            assert (await browser.get("/queues/email", headers={"X-User": name})).status_code == 200
            assert readers == {expected}
            readers.clear()


async def test_connections_from_before_a_restart_are_replaced(database: Database, engine: sa.Engine) -> None:
    async def read() -> Any:
        return await database.read(lambda session: session.scalar(sa.select(1)))

    assert await read() == 1
    with engine.connect() as connection:
        others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        connection.execute(sa.text(f"SELECT pg_terminate_backend(pid) {others}"))
    assert await read() == 1


async def test_database_that_cannot_be_reached() -> None:
    engine = sa.create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    with pytest.raises(ServiceUnavailable):
        await Database(sessionmaker(engine), "Dashboard").read(lambda session: session.scalar(sa.select(1)))


def test_a_part_that_fails_does_not_hide_the_others(engine: sa.Engine) -> None:
    def missing(session: Session) -> Any:
        return session.scalar(sa.text("SELECT 1 FROM not_there"))

    def refused(_: Session) -> Any:
        message = "needs a column"
        raise StatementError(message)

    with Session(engine) as session:
        problem = attempt_part(session, missing)
        assert (problem.value, problem.problem[:18]) == (None, "A table is missing")
        assert attempt_part(session, refused).problem == "needs a column"
        assert attempt_part(session, lambda session: session.scalar(sa.select(5))).value == 5
        secret = attempt_part(session, lambda session: session.scalar(sa.text("SELECT 'secret'::int")))
        assert "secret" not in secret.problem


@pytest.mark.parametrize("driver", ["sync", "psycopg", "asyncpg"])
async def test_sessions_without_transactions_are_refused(shared: Any, driver: str) -> None:
    ran: list[Any] = []

    def operation(session: Session) -> None:
        ran.append(session.scalar(sa.select(1)))

    async def refused(database: Database) -> None:
        for run in (database.read, database.write):
            with pytest.raises(ServiceUnavailable, match="AUTOCOMMIT"):
                await run(operation)

    if driver == "sync":
        engine = sa.create_engine(shared.url(), isolation_level="AUTOCOMMIT")
        await refused(Database(sessionmaker(engine), "Dashboard"))
        engine.dispose()
    else:
        made = create_async_engine(shared.url(driver), isolation_level="AUTOCOMMIT")
        await refused(Database(async_sessionmaker(made), "Dashboard"))
        await made.dispose()
    assert ran == []
