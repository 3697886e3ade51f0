"""The context of a request: who asks, for which queue, and what a page needs to answer."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote, unquote, urlencode
from weakref import WeakValueDictionary

import anyio
from anyio.lowlevel import RunVar
from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from sqlaqueue.admin.state import Pause, pauses
from sqlaqueue.exc import StatementError
from sqlaqueue.log import fields, logger
from sqlaqueue.texts import printable
from sqlaqueue.web.data.reader import ParameterError
from sqlaqueue.web.data.records import Memory, Record, insert_record, note_undone, short_facts
from sqlaqueue.web.database import Database, Reader, of_this_loop
from sqlaqueue.web.errors import BadRequest, Forbidden, NotFound, PageError
from sqlaqueue.web.rendering import SERVER, ZONE, ZONE_COOKIE, Renderer, Zone, notices_in, numbers_in, zone_of
from sqlaqueue.web.security import FormData, read_form, write_audit
from sqlaqueue.web.settings import Access, Action, Queue, Settings

EXAMINED_FOR = 60.0
"""Seconds after which the queues are examined again when the first page is asked for."""

SCHEDULES_READ_FOR = 10.0
"""Seconds after which the first page reads the schedules again."""


class Attention:
    """How many things need a look on other pages, as far as is known about the queues that a user sees.

    :param state: what a dashboard keeps between requests.
    """

    def __init__(self, state: dict[str, Any], queues: Iterable[Queue]) -> None:
        self._known: dict[tuple[str, tuple[str, ...]], tuple[int, float]] = state.setdefault("attention", {})
        self._names = tuple(queue.name for queue in queues)

    def _last(self, what: str) -> tuple[int, float]:
        return self._known.get((what, self._names), (0, float("-inf")))

    @property
    def critical(self) -> int:
        return self._last("critical")[0]

    @property
    def schedules(self) -> int:
        return self._last("schedules")[0]

    def remember(self, what: Literal["critical", "schedules"], number: int) -> None:
        self._known[what, self._names] = (number, time.monotonic())

    @property
    def needs_schedules(self) -> bool:
        return time.monotonic() - self._last("schedules")[1] >= SCHEDULES_READ_FOR

    def needs_examination(self) -> bool:
        """Return whether the last examination was too long ago. If so, the caller makes one, and no other one does."""
        number, made_at = self._last("critical")
        if time.monotonic() - made_at < EXAMINED_FOR:
            return False
        self.remember("critical", number)
        return True


PATHS = {
    "overview": "",
    "queue": "queues/{queue}",
    "jobs": "queues/{queue}/jobs",
    "job": "queues/{queue}/job",
    "edit": "queues/{queue}/edit",
    "enqueue": "queues/{queue}/enqueue",
    "confirm": "queues/{queue}/confirm",
    "done": "queues/{queue}/done",
    "confirm_pause": "queues/{queue}/pause",
    "act": "queues/{queue}/actions/{action}",
    "claim": "queues/{queue}/claim",
    "workers": "workers",
    "confirm_worker": "workers/confirm",
    "act_on_worker": "workers/{action}",
    "failures": "failures",
    "search": "search",
    "schedules": "schedules",
    "edit_schedule": "schedules/edit",
    "act_on_schedule": "schedules/{action}",
    "health": "health",
    "audit": "audit",
    "zone": "zone",
    "events": "events",
    "export": "queues/{queue}/jobs.{form}",
    "api_queues": "api/queues",
    "api_queue": "api/queues/{queue}",
    "api_jobs": "api/queues/{queue}/jobs",
    "api_job": "api/queues/{queue}/job",
    "api_consumers": "api/consumers",
    "api_schedules": "api/schedules",
    "api_findings": "api/findings",
    "static": "static/{file}",
}
"""The path of each page below the one where the dashboard is mounted."""

Query = Mapping[str, str | int] | Sequence[tuple[str, str | int]]


ONCE, _ONCE_FOR = "once", 60.0
"""The field of a form that is to be carried out once, and the seconds for which its answer is remembered."""


class _NoRedirectError(Exception):
    """A form was refused."""


NOT_STORED = ("not_stored", 1)
"""The notice that what was done is missing in the table of the audit."""


@dataclass
class PageContext:
    request: Request
    access: Access
    settings: Settings
    database: Database
    renderer: Renderer
    state: dict[str, Any] = field(default_factory=dict)
    """What the pages keep between requests, such as results that several viewers share."""
    pauses: Sequence[tuple[Queue, Pause]] = ()
    """The paused ones of the queues that the user sees, which each page names."""

    @property
    def user(self) -> str:
        return self.access.user

    @property
    def reader(self) -> Reader:
        client = self.request.client
        return ("user", self.user) if self.user else ("address", "" if client is None else client.host)

    @cached_property
    def zone(self) -> Zone:
        """The time zone that the user has chosen; otherwise that of the server."""
        return zone_of(self.request.cookies.get(ZONE_COOKIE, SERVER)) or Zone()

    @property
    def here(self) -> str | None:
        """The path of this page, with its query, below the first page; None for one that a POST has made."""
        if self.request.method == "POST":
            return None
        query = [pair for pair in self.request.query_params.multi_items() if pair[0] != "notice"]
        path = quote(path_below_mount(self.request.scope).lstrip("/"), safe="/~")
        return path + (f"?{urlencode(query)}" if query else "")

    @cached_property
    def queues(self) -> list[Queue]:
        return [queue for queue in self.settings.queues.values() if self.access.reads(queue.name)]

    @cached_property
    def queue(self) -> Queue:
        queue = self.settings.by_slug(self.request.path_params["queue"])
        if queue is None or not self.access.reads(queue.name):
            raise NotFound("There is no such queue, or you have no access to it.", "Choose a queue from the overview.")
        return queue

    @property
    def attention(self) -> Attention:
        return Attention(self.state, self.queues)

    def may(self, action: Action, queue: Queue) -> bool:
        return self.access.may(action, queue.name)

    def require(self, action: Action, queue: Queue) -> None:
        if not self.may(action, queue):
            raise Forbidden(
                f"You may look at {queue.name}, but not do this ({action}).",
                "Ask for the right, which the access rule of the dashboard grants.",
            )

    async def form(self) -> FormData:
        return await read_form(self.request)

    async def once(self, form: FormData, carry_out: Callable[[], Awaitable[Response]]) -> Response:
        """Carry out a form that has the field :data:`ONCE`, and answer the same form with the same redirect.

        Who sends it twice, as by a double click, has it carried out once, if the same process serves both. What was
        refused is not remembered.
        """
        if not form.get(ONCE):
            return await carry_out()
        other: list[Response] = []

        async def redirect() -> str:
            response = await carry_out()
            if "location" not in response.headers:
                other.append(response)
                raise _NoRedirectError
            return response.headers["location"]

        sent = hashlib.sha256(repr(form.fields).encode()).digest()
        place = ("once", self.request.url.path, self.reader, sent)
        try:
            return self.redirect((await shared_result(self.state, place, _ONCE_FOR, redirect)).value)
        except _NoRedirectError:
            return other[0]

    def audit(self, action: str, queue: Queue, *, count: int | None = None, **facts: Any) -> None:
        write_audit(self.user, action, queue.name, count=count, **facts)

    async def record(
        self,
        action: str,
        queue: Queue,
        *,
        count: int | None = None,
        changes: Mapping[str, Any] | None = None,
        **facts: Any,
    ) -> list[tuple[str, int]]:
        """Log an action, and store it: in the table of the audit, or in memory.

        :param changes: what it has changed, if it can be undone.
        :returns: the notice that leads to what was done; or the one that it could not be stored.
        """
        self.audit(action, queue, count=count, **facts)
        made = Record(
            at=datetime.now(UTC),
            user=self.user,
            action=action,
            queue=queue.name,
            count=count,
            facts=short_facts(facts),
            changes=changes,
        )
        model = self.settings.audit
        if model is None:
            number = self.memory.add(made)
        else:
            stored = await self._store(queue, insert_record, model, made)
            if stored is None:
                return [NOT_STORED]
            number = stored
        return [("done" if changes is None else "undoable", number)]

    async def note_undone(self, queue: Queue, number: int) -> list[tuple[str, int]]:
        """Store that an action was undone; return the notice that it could not be stored, if so."""
        model = self.settings.audit
        if model is None:
            self.memory.note_undone(number)
            return []
        return [NOT_STORED] if await self._store(queue, note_undone, model, number) is None else []

    async def _store(self, queue: Queue, write: Callable[..., int], model: type[Any], what: Any) -> int | None:
        """Write into the table of the audit; return None, and log why, if that fails. What was done stays so."""
        try:
            return await self.database.write(write, model, what)
        except (SQLAlchemyError, PageError) as error:
            text = "the dashboard cannot store what was done in the table of %s: %s"
            # Of several lines, one could be read as another record.
            told = printable(str(error))
            logger.warning(text, model.__name__, told, extra=fields("dashboard_error", queue=queue.name))
            return None

    @property
    def memory(self) -> Memory:
        memory: Memory = self.state.setdefault("records", Memory())
        return memory

    @contextmanager
    def failures_audited(self, action: str, queue: Queue, **facts: Any) -> Iterator[None]:
        """Log an action that fails as well: if the connection was lost at its end, it may have been carried out.

        A request that names nothing that could be changed, as one with a malformed parameter, is no action.
        """
        try:
            yield
        except (ParameterError, StatementError):
            raise
        except BaseException as error:  # a server that cancels the request, as its browser has left, does not undo it
            cause = error.__cause__ if isinstance(error, PageError) else None
            self.audit(action, queue, **facts, error=type(cause or error).__name__)
            raise

    @property
    def has_audit(self) -> bool:
        """Whether there is a page of what was done that the user may see."""
        return self.settings.audit is not None and any(self.access.changes(queue.name) for queue in self.queues)

    @property
    def done_link(self) -> tuple[str, str] | None:
        """The text and the URL of the link to what was done before this page, if it says so."""
        # Of the page of an error as well, which has no access to the queue.
        queue = self.settings.by_slug(str(self.request.path_params.get("queue", "")))
        if queue is None or not self.access.changes(queue.name):
            return None
        for code, text in (("undoable", "Show what was changed, or undo it"), ("done", "Show what was done")):
            for number in numbers_in(self.request.query_params, code):
                return text, self.url("done", queue=queue, query={"id": number})
        return None

    def url(self, name: str, *, query: Query = (), **path: str | Queue) -> str:
        """Return the URL of a page, relative to this one: no path of a mount, or of a proxy, need be known."""
        segments = {key: value.slug if isinstance(value, Queue) else value for key, value in path.items()}
        parts = {key: quote(segment, safe="") for key, segment in segments.items()}
        if name == "static":
            query = {"v": self.renderer.static_version}
        end = f"?{urlencode(query)}" if query else ""
        depth = path_below_mount(self.request.scope).lstrip("/").count("/")
        return f"{'../' * depth or './'}{PATHS[name].format(**parts)}{end}"

    def render(self, template: str, *, status: int = 200, **values: Any) -> Response:
        ZONE.set(self.zone)
        text = self.renderer.render(
            template,
            context=self,
            url=self.url,
            may=self.may,
            zone_cookie=ZONE_COOKIE,
            server_zone=Zone(),
            settings=self.settings,
            notices=notices_in(self.request.query_params),
            **values,
        )
        return HTMLResponse(text, status_code=status)

    def redirect(self, url: str, *notices: tuple[str, int]) -> Response:
        """Return a redirect after a POST, so that a reload does not repeat it; notices are codes with numbers."""
        query = urlencode([("notice", f"{code}:{number}") for code, number in notices])
        joined = url if not query else f"{url}{'&' if '?' in url else '?'}{query}"
        return RedirectResponse(joined, status_code=303)


Page = Callable[[PageContext], Any]
"""A coroutine function of a context that returns a response."""


def path_below_mount(scope: Any) -> str:
    """Return the path of a request below the path where the dashboard is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    sent = None if scope.get("raw_path") is None else bytes(scope["raw_path"]).partition(b"?")[0].decode("latin-1")
    if sent is not None and path.endswith("/") and not sent.endswith("/") and path != "/":
        path = path[:-1]  # Litestar adds one to each path
    # Some frameworks leave the path as it is where they mount an application, others cut it.
    is_whole = sent is None or unquote(sent) == path
    if root and is_whole and (path == root or path.startswith(f"{root}/")):
        return path[len(root) :]
    return path


A = TypeVar("A")
B = TypeVar("B")


async def both(one: Awaitable[A], other: Awaitable[B]) -> tuple[A, B]:
    """Await two awaitables at the same time. An error of one is raised as it is; a task group would wrap it."""
    ones, others, errors = list[A](), list[B](), list[Exception]()

    async def keep(awaitable: Awaitable[A | B], results: list[A] | list[B]) -> None:
        try:
            results.append(await awaitable)  # type: ignore[arg-type]  # each list has the results of its awaitable
        except Exception as error:  # noqa: BLE001 - it is raised below
            errors.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(keep, one, ones)
        group.start_soon(keep, other, others)
    if errors:
        raise errors[0]
    return ones[0], others[0]


_LONGEST_PATH = 16_000


async def choose_zone(context: PageContext) -> Response:
    """Remember the time zone of the reader in a cookie, and go back to the page on which it was chosen."""
    form = await context.form()
    name, back = form.get("zone"), form.get("back")
    if zone_of(name) is None:
        raise BadRequest(f"zone={name[:100]}: there is no such time zone.", "Use a name such as Europe/Berlin or UTC.")
    if len(back) > _LONGEST_PATH or not all(" " < each < "\x7f" for each in back):
        raise BadRequest("back: it is no path of this dashboard.", "Start from the overview.")
    # Relative, so that it is never the page of another site.
    response = context.redirect(f"./{back}")
    # Without a path it is that of the dashboard, wherever that is mounted; the script sets it for the same one.
    value = f"{ZONE_COOKIE}={name}; Max-Age=31536000; SameSite=Lax"
    response.headers.append("Set-Cookie", value)
    return response


PAUSES_SHARED_FOR = 10.0
"""Seconds for which pages show the same pauses; what is paused here is shown at once."""

_PAUSES_TIMEOUT = 0.5


async def read_pauses(context: PageContext) -> Sequence[tuple[Queue, Pause]]:
    """Return which queues are paused, for the head of each page; none if that cannot be read."""
    queues = list(context.settings.queues.values())

    async def read() -> Mapping[str, Pause]:
        try:
            specs = [queue.spec for queue in queues]
            return await context.database.read(pauses, specs, statement_timeout=_PAUSES_TIMEOUT)
        except (PageError, SQLAlchemyError):
            return {}  # the page itself says what is wrong

    found = (await shared_result(context.state, _PAUSES, PAUSES_SHARED_FOR, read)).value
    return [(queue, found[queue.name]) for queue in context.queues if queue.name in found]


_PAUSES = "pauses"


def forget_pauses(context: PageContext) -> None:
    context.state.get("shared_results", {}).pop(_PAUSES, None)


T = TypeVar("T")

_LOCKS: RunVar[WeakValueDictionary[Any, anyio.Lock]] = RunVar("sqlaqueue_dashboard_locks")
"""Of each event loop, as a lock cannot be used by two."""


@dataclass(frozen=True)
class SharedResult(Generic[T]):
    value: T
    made_at: datetime
    until: float


async def shared_result(
    state: dict[str, Any], key: Any, seconds: float, make: Callable[[], Awaitable[T]]
) -> SharedResult[T]:
    """Return what ``make`` returns, or what it has returned for the same key less than ``seconds`` ago.

    Only one request makes it at a time, and the others wait for it. An error is not shared.

    :param state: where the results of one dashboard are kept.
    :param key: all that the result depends on, such as the queues that the user sees.
    """
    results: dict[Any, SharedResult[T]] = state.setdefault("shared_results", {})
    # A lock lives as long as somebody holds or waits for it.
    async with of_this_loop(_LOCKS, WeakValueDictionary[Any, anyio.Lock]).setdefault((id(state), key), anyio.Lock()):
        found = results.get(key)
        if found is None or found.until < time.monotonic():
            value = await make()
            now = time.monotonic()
            for other in [name for name, each in results.items() if each.until < now]:
                results.pop(other, None)
            found = results[key] = SharedResult(value, datetime.now(UTC), now + seconds)
        return found


def last_result(state: dict[str, Any], key: Any) -> SharedResult[Any] | None:
    """Return what :func:`shared_result` remembers for a key, without making it."""
    results: dict[Any, SharedResult[Any]] = state.get("shared_results", {})
    return results.get(key)
