"""The dashboard: an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import anyio
import sqlalchemy as sa
from anyio.to_thread import run_sync
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route, Router

from sqlaqueue.consumer.notifications import listener
from sqlaqueue.consumer.notifications.async_listener import async_listener_of
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.log import fields, logger
from sqlaqueue.notify_payloads import Heartbeat, Payload, WaitRequest
from sqlaqueue.postgresql.triggers import channel_of
from sqlaqueue.sessions import primary_bind
from sqlaqueue.telemetry.asgi import Receive, Scope, Send, answer_lifespan
from sqlaqueue.texts import printable
from sqlaqueue.web import api, errors
from sqlaqueue.web.actions import (
    act_on_queue,
    act_on_schedule,
    act_on_worker,
    confirm,
    confirm_pause,
    confirm_worker,
    edit,
    edit_schedule,
    enqueue,
    show_audit,
    show_done,
)
from sqlaqueue.web.context import PATHS, Page, PageContext, choose_zone, path_below_mount, read_pauses
from sqlaqueue.web.data.engines import pages_of_engine
from sqlaqueue.web.data.reader import problem_text
from sqlaqueue.web.database import READER, Database, Reader
from sqlaqueue.web.jobs import job, jobs
from sqlaqueue.web.queues import claim, failures, health, overview, queue, schedules, workers
from sqlaqueue.web.rendering import shared_renderer
from sqlaqueue.web.search import search
from sqlaqueue.web.security import AS_IT_IS, check_host, check_origin, check_reader, secured
from sqlaqueue.web.settings import Access, Column, Link, Queue, Settings

MOST_VIEWERS = 100
"""How many windows are served at once; each has a connection to the web server, and reads its page again and again."""

MOST_OF_A_READER = 20
"""How many of them one reader has, so that no reader takes them all from the others."""

_GATHER = 0.2
"""Seconds for which the notifications of a queue are gathered: a busy queue sends thousands in a second."""


class Viewer:
    """An open window: which of its queues have changed since it was last told."""

    def __init__(self) -> None:
        self._changed: set[str] = set()
        self._event = asyncio.Event()

    def add(self, queue: str) -> None:
        self._changed.add(queue)
        self._event.set()

    async def wait(self, seconds: float) -> bool:
        """Wait until something has changed, or for some seconds; return whether something has."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()
        return bool(self._changed)

    def take(self) -> list[str]:
        changed = sorted(self._changed)
        self._changed.clear()
        self._event.clear()
        return changed


class Channel:
    """The subscriber of a queue's channel, for all windows that show the queue."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._is_gathering = False
        self.viewers: set[Viewer] = set()

    # Called in the thread or the event loop of the listener.

    def receive(self, payload: Payload) -> None:
        if not isinstance(payload, Heartbeat | WaitRequest):
            self.listening_lost()

    def listening_lost(self) -> None:
        """Tell the windows soon: something has changed, or a notification of it may have been missed."""
        if not self._is_gathering:
            self._is_gathering = True
            # A loop that is closed has no windows.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.call_later, _GATHER, self._tell)

    def until_overdue(self) -> float:
        return float("inf")

    def notification_overdue(self) -> None:
        pass

    def _tell(self) -> None:
        self._is_gathering = False
        for viewer in self.viewers:
            viewer.add(self._queue)


class Broadcaster:
    """Tells the open windows of one dashboard and event loop that something has changed in a queue.

    While at least one window shows a queue, its channel is subscribed to, by the listener that Consumers of this
    process use as well. Notifications only say that it is worth looking; what windows show, they read themselves.
    Behind a pooler, where no notification arrives, windows are told by the timer of their stream.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._channels: dict[str, Channel] = {}
        self.windows: Counter[Reader] = Counter()

    @contextlib.asynccontextmanager
    async def watch(self, queues: Iterable[Queue], reader: Reader) -> AsyncIterator[Viewer]:
        """Give a viewer that is told of changes in these queues while the block runs."""
        viewer, watched = Viewer(), list(queues)
        self.windows[reader] += 1
        try:
            for queue in watched:
                self._subscribe(viewer, queue)
            yield viewer
        finally:
            self.windows[reader] -= 1
            if not self.windows[reader]:
                del self.windows[reader]
            # A request that is cancelled must not leave its subscriptions.
            with anyio.CancelScope(shield=True):
                for queue in watched:
                    await self._unsubscribe(viewer, queue)

    def _subscribe(self, viewer: Viewer, queue: Queue) -> None:
        channel = self._channels.get(queue.name)
        if channel is None:
            channel = self._channels[queue.name] = Channel(queue.name)
            engine, name = self._engine_of(queue), channel_of(queue.spec)
            if not pages_of_engine(engine.dialect).has_notifications:
                pass  # the timer tells the windows
            elif self._database.is_async:
                async_listener_of(engine).add(name, channel)
            else:
                listener.listen(engine, name, channel)
        channel.viewers.add(viewer)

    async def _unsubscribe(self, viewer: Viewer, queue: Queue) -> None:
        channel = self._channels.get(queue.name)
        if channel is None:
            return
        channel.viewers.discard(viewer)
        if channel.viewers:
            return
        del self._channels[queue.name]
        engine = self._engine_of(queue)
        if not pages_of_engine(engine.dialect).has_notifications:
            return
        if self._database.is_async:
            await async_listener_of(engine).remove(channel)
        else:
            # It may wait for the listener's thread.
            await asyncio.to_thread(listener.unlisten, engine, channel)

    def _engine_of(self, queue: Queue) -> sa.Engine:
        session: Any = self._database.sessions()
        sync_session = session.sync_session if self._database.is_async else session
        engine: sa.Engine = primary_bind(sync_session, queue.spec.mapper).engine
        return engine


SHORTEST = 1.0
"""Seconds between two events, at least."""

TIMER = 5.0
"""Seconds after which an event is sent although no notification has arrived: the end of a job sends none."""

LIFETIME = 300.0
"""Seconds after which the stream ends. The browser opens another one, for which access is checked again."""

_LOOK = 0.5


class EventStream(Response):
    """Server-sent events that tell a window to read its page again.

    An event names the queues that have changed, and contains nothing of their jobs: what the window may see is decided
    when it reads its page.
    """

    media_type = "text/event-stream"

    def __init__(self, broadcaster: Broadcaster, queues: Iterable[Queue], reader: Reader) -> None:
        # nginx would gather events until its buffer is full.
        super().__init__(headers={"X-Accel-Buffering": "no"}, media_type=self.media_type)
        del self.headers["content-length"]
        self._broadcaster, self._queues, self._reader = broadcaster, list(queues), reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the browser leaves, the server stops or the time is over."""
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        if scope["method"] == "HEAD":
            await send(start)
            await send({"type": "http.response.body", "body": b""})
            return
        # The window counts before anything is waited for: of many requests at once, no more than the limits are served.
        watching = self._broadcaster.watch(self._queues, self._reader)
        async with watching as viewer, anyio.create_task_group() as tasks:
            await send(start)
            tasks.start_soon(_disconnected, receive, tasks.cancel_scope)
            with contextlib.suppress(OSError):  # the browser has left
                await self._send_events(viewer, send)
            tasks.cancel_scope.cancel()

    async def _send_events(self, viewer: Viewer, send: Send) -> None:
        # Not all at one time, after a server that had many windows was restarted.
        end = time.monotonic() + LIFETIME * random.uniform(0.8, 1)  # noqa: S311 - it guards nothing
        await _send(send, ": connected\n\n")
        last = time.monotonic()
        while (now := time.monotonic()) < end and not server_stops():
            until_timer = last + TIMER - now
            changed = await viewer.wait(min(_LOOK, max(until_timer, 0)))
            now = time.monotonic()
            if changed and now < last + SHORTEST:
                await asyncio.sleep(min(_LOOK, last + SHORTEST - now))
            elif changed or now >= last + TIMER:
                await _send(send, f"data: {json.dumps({'queues': viewer.take()})}\n\n")
                last = now
        await send({"type": "http.response.body", "body": b""})


async def _send(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _disconnected(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def server_stops() -> bool:
    """Return whether the web server has been told to stop.

    It waits until all responses have ended, and tells them nothing. uvicorn, also under gunicorn, handles signals by a
    method of its server, which then sets ``should_exit``.
    """
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return getattr(server, "should_exit", False) is True


async def events(context: PageContext) -> Response:
    """Return the events of the queues that the parameters ``queue`` name, or of all that the user sees."""
    by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Broadcaster]
    by_loop = context.state.setdefault("broadcasters", WeakKeyDictionary())
    loop, reader = asyncio.get_running_loop(), context.reader
    if loop not in by_loop:
        by_loop[loop] = Broadcaster(context.database)
    windows, advice = by_loop[loop].windows, "Close some, or reload this page now and then."
    if windows[reader] >= MOST_OF_A_READER:
        raise errors.TooManyWindows(f"{MOST_OF_A_READER} of your windows are kept up to date already.", advice)
    if windows.total() >= MOST_VIEWERS:
        raise errors.TooManyWindows(f"{MOST_VIEWERS} windows are kept up to date already.", advice)
    slugs = context.request.query_params.getlist("queue")
    found = [queue for queue in context.queues if queue.slug in slugs or not slugs]
    if len(found) < len(set(slugs)):
        raise errors.NotFound(
            "There is no such queue, or you have no access to it.", "Choose a queue from the overview."
        )
    return EventStream(by_loop[loop], found, reader)


_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FOR_EVER = {"Cache-Control": "public, max-age=31536000, immutable"}


AccessRule: TypeAlias = Callable[[Request], "Access | Response | Awaitable[Access | Response | None] | None"]
"""Returns what the user of a request may do; None for nothing; or a response, such as a redirect to a login page."""

GET: dict[str, Page] = {
    "overview": overview,
    "queue": queue,
    "claim": claim,
    "workers": workers,
    "confirm_worker": confirm_worker,
    "failures": failures,
    "search": search,
    "schedules": schedules,
    "edit_schedule": edit_schedule,
    "health": health,
    "events": events,
    "jobs": jobs,
    "job": job,
    "edit": edit,
    "enqueue": enqueue,
    "confirm": confirm,
    "export": api.export,
    "api_queues": api.queues,
    "api_queue": api.one_queue,
    "api_jobs": api.jobs,
    "api_job": api.job,
    "api_consumers": api.consumers,
    "api_schedules": api.schedules,
    "api_findings": api.findings,
    "confirm_pause": confirm_pause,
    "done": show_done,
    "audit": show_audit,
}

POST: dict[str, Page] = {
    "act": act_on_queue,
    "act_on_schedule": act_on_schedule,
    "act_on_worker": act_on_worker,
    "zone": choose_zone,
}

_PAGES = {page for name, page in GET.items() if name not in {"events", "export"} and not name.startswith("api_")}
"""Those that people read, and that name the paused queues."""

ORIGINAL = "sqlaqueue.scope"
"""The key of the scope that the application has given."""

_OF_THE_APPLICATION = {"app", "router", "starlette.exception_handlers"}
"""What the scope of an application says about itself."""

_LEAVE_THE_BODY = {errors.TooSlow.status, errors.TooLarge.status}
"""The errors after which the rest of a form is not read."""

_NONE: Mapping[Any, Any] = {}


class Dashboard:
    """Shows queues, and changes their jobs: an ASGI application that mounts under any path.

    ::

        from starlette.applications import Starlette
        from starlette.requests import Request

        def access(request: Request) -> Access | None:
            return Access(read=True, act=True, user="ada") if request.headers.get("x-user") == "ada" else None

        app = Starlette()
        app.mount("/queues", Dashboard([Email, Invoice], sessionmaker(engine), access=access))

    :param models: the queue classes.
    :param session_factory: creates sessions: a ``sessionmaker`` or an ``async_sessionmaker``. At most four are used at
        the same time, each statement has a timeout, and counts have a limit.
    :param access: returns the :class:`Access` of a request, None to refuse it, or a response, such as a redirect to a
        login page. It is a function, which is called in a thread, or a coroutine function.
    :param redact: columns whose values are not shown, filtered, sorted by or edited: ``Email.body``, ``"Email.body"``,
        or ``"body"`` for all queues. Error texts may repeat a value; redact ``last_error`` as well if they do.
    :param links: URLs by column, in which ``{value}`` stands for the value, such as
        ``{Email.customer_id: "https://shop.example/customers/{value}"}``; or a function of the value.
    :param origins: the schemes and hosts under which browsers reach it, such as ``["https://ops.example.com"]``.
        Requests for other hosts than these and this machine are refused.
    :param audit: a mapped class that inherits :class:`AuditMixin`, in whose table the dashboard keeps who did what.
        Without it, it remembers the last actions of its process, which can be undone, and has no page *Audit*.
    :raises NotAQueueError: if one of ``models`` is not a queue.
    :raises ConfigurationError: for any other invalid argument.
    """

    def __init__(
        self,
        models: Iterable[type[Any]],
        session_factory: Callable[[], Any],
        *,
        access: AccessRule,
        redact: Iterable[Column] = (),
        links: Mapping[Any, Link] = _NONE,
        origins: Iterable[str] = (),
        audit: type[Any] | None = None,
    ) -> None:
        given: object = access  # without a type checker, callers may pass None
        if not callable(given):
            raise ConfigurationError(
                f"Dashboard(access={given!r}): give a function of a request that returns what its user may do, as in "
                "access=lambda request: Access(read=True)"
            )
        self._access = access
        self._settings = Settings.of(models, redact, links, origins, audit)
        self._database = Database(session_factory, type(self).__name__)
        self._renderer = shared_renderer()
        self._state: dict[str, Any] = {}
        routes = [Route(f"/{PATHS[name]}", self._endpoint(page), methods=["GET"]) for name, page in GET.items()]
        routes += [Route(f"/{PATHS[name]}", self._endpoint(page), methods=["POST"]) for name, page in POST.items()]
        routes.append(Route(f"/{PATHS['static']}", self._static, methods=["GET"]))
        self._router = Router(routes, redirect_slashes=False, default=self._not_found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "lifespan":
            await answer_lifespan(receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_below_mount(scope)
        # The access rule gets the scope of the application, with the whole path. Without the application in it, what
        # Starlette answers by itself, such as 405, is sent from here.
        own = {key: value for key, value in scope.items() if key not in _OF_THE_APPLICATION}
        own |= {"path": path, "root_path": "", ORIGINAL: scope}
        own_send = secured(own, send)
        if path == "" or (path == "/" and not _ends_with_slash(scope)):
            # The links of the first page are relative to a path with a slash at the end.
            await RedirectResponse(_with_slash(scope), status_code=307)(own, receive, own_send)
            return
        try:
            await self._router(own, receive, own_send)
        except HTTPException as error:
            if "app" in scope:
                raise  # an error of the access rule, which the application answers in its own way
            shown = errors.PageError(str(error.detail))
            shown.status, shown.title = error.status_code, "This request cannot be answered"
            await self._error_response(Request(own), shown)(own, receive, own_send)

    def _endpoint(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            try:
                access = await self._admitted(request)
                if isinstance(access, Response):
                    request.scope[AS_IT_IS] = True
                    return access
                context = self._context(request, access)
                READER.set(context.reader)
                if page in _PAGES and context.queues:
                    context.pauses = await read_pauses(context)
                response: Response = await page(context)
            except HTTPException:
                raise
            except errors.PageError as error:
                return self._error_response(request, error)
            except Exception as error:  # noqa: BLE001 - the page says that something is wrong, the log says what
                return self._error_response(request, _unexpected(error))
            return response

        return serve

    async def _not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = errors.NotFound("There is no such page.", "Start from the overview.")
        await self._error_response(Request(scope), error)(scope, receive, send)

    async def _static(self, request: Request) -> Response:
        # Without a check of access: static files contain nothing of the queues.
        name = request.path_params["file"]
        content = self._renderer.static_files.get(name)
        if content is None:
            return PlainTextResponse("Not found", status_code=404)
        current = request.query_params.get("v") == self._renderer.static_version
        cache = _FOR_EVER if current else {"Cache-Control": "no-cache"}
        return Response(content, media_type=_TYPES[name[name.rindex(".") :]], headers=cache)

    async def _admitted(self, request: Request) -> Access | Response:
        """Return what the user may do; or the response of the access rule."""
        check_host(request.headers.get("host", ""), self._settings.origins)
        if request.method in {"GET", "HEAD"}:
            check_reader(request.headers)
        else:
            check_origin(request.headers, request.url.scheme, self._settings.origins)
        if any("\0" in part for part in (*request.path_params.values(), *request.query_params.values())):
            raise errors.BadRequest("The address contains a NUL character.")
        rule = self._access
        call = getattr(rule, "__call__", rule)  # noqa: B004 - the method of an object may be a coroutine function
        is_async = inspect.iscoroutinefunction(rule) or inspect.iscoroutinefunction(call)
        asked = Request(request.scope[ORIGINAL])
        access: Any = rule(asked) if is_async else await run_sync(rule, asked)
        if inspect.isawaitable(access):
            access = await access
        if access is None:
            raise errors.Forbidden(
                "You have no access to this dashboard.", "Sign in to the application that it belongs to."
            )
        if not isinstance(access, Access | Response):
            raise ConfigurationError(
                f"the access rule of the dashboard returned {access!r}; return an Access, a response or None"
            )
        names = access.named_queues() if isinstance(access, Access) else ()
        unknown = next((name for name in names if name not in self._settings.queues), None)
        if unknown is not None:
            raise ConfigurationError(
                f"the access rule named the queue {unknown!r}; there are {', '.join(self._settings.queues)}"
            )
        return access

    def _context(self, request: Request, access: Access) -> PageContext:
        return PageContext(request, access, self._settings, self._database, self._renderer, self._state)

    def _error_response(self, request: Request, error: errors.PageError) -> Response:
        # Without access: the page of an error names no queue.
        context = self._context(request, Access(read=False))
        if path_below_mount(request.scope).startswith("/api/"):
            response = api.error_answer(error.status, error.text, error.advice)
        else:
            response = context.render("error.html", status=error.status, error=error)
        if error.status in {errors.ServiceUnavailable.status, errors.TooManyWindows.status}:
            response.headers["Retry-After"] = "5"
        if error.status in _LEAVE_THE_BODY and str(request.scope.get("http_version", "")).startswith("1"):
            # Otherwise the server would go on reading what nobody needs.
            response.headers["Connection"] = "close"
        return response


def _unexpected(error: Exception) -> errors.PageError:
    if isinstance(error, DBAPIError):
        # It may repeat a value of several lines, one of which could be read as another record.
        told = printable(str(error.orig))
        logger.warning("the dashboard cannot show a page: %s", told, extra=fields("dashboard_error"))
        return errors.ServiceUnavailable(problem_text(error), "Reload the page when the cause is gone.")
    logger.error("the dashboard cannot show a page", exc_info=error, extra=fields("dashboard_error"))
    return errors.PageError("The page could not be made.", "The log of the server has the error.")


def _ends_with_slash(scope: Scope) -> bool:
    raw = scope.get("raw_path")
    return raw is None or bytes(raw).partition(b"?")[0].endswith(b"/")


def _with_slash(scope: Scope) -> str:
    raw = scope.get("raw_path") or (str(scope.get("root_path", "")) + str(scope["path"])).encode()
    last = bytes(raw).partition(b"?")[0].rpartition(b"/")[2].decode("latin-1")
    query = scope.get("query_string", b"").decode("latin-1")
    return f"./{last}/" + (f"?{query}" if query else "")
