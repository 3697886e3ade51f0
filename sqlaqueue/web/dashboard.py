"""The dashboard: an ASGI application."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias

from anyio.to_thread import run_sync
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route, Router

from sqlaqueue.asgi import Receive, Scope, Send, answer_lifespan
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.log import fields, logger
from sqlaqueue.web.access import Access
from sqlaqueue.web.context import PATHS, Context, Page, path_below_mount
from sqlaqueue.web.data.parts import problem_text
from sqlaqueue.web.database import Database
from sqlaqueue.web.errors import (
    BadRequest,
    Forbidden,
    NotFound,
    PageError,
    ServiceUnavailable,
    TooLarge,
    TooManyWindows,
    TooSlow,
)
from sqlaqueue.web.pages.actions import act_on_queue, act_on_schedule
from sqlaqueue.web.pages.claim import claim
from sqlaqueue.web.pages.confirm import confirm
from sqlaqueue.web.pages.edit import edit
from sqlaqueue.web.pages.events import events
from sqlaqueue.web.pages.health import health
from sqlaqueue.web.pages.job import job
from sqlaqueue.web.pages.jobs import jobs
from sqlaqueue.web.pages.overview import overview
from sqlaqueue.web.pages.queue import queue
from sqlaqueue.web.pages.schedules import schedules
from sqlaqueue.web.pages.static import static_response
from sqlaqueue.web.rendering.environment import Renderer
from sqlaqueue.web.security.headers import AS_IT_IS, secured
from sqlaqueue.web.security.hosts import check_host
from sqlaqueue.web.security.origins import check_origin
from sqlaqueue.web.settings import Column, Link, Settings

AccessRule: TypeAlias = Callable[[Request], "Access | Response | Awaitable[Access | Response | None] | None"]
"""Returns what the user of a request may do; None for nothing; or a response, such as a redirect to a login page."""

GET: dict[str, Page] = {
    "overview": overview,
    "queue": queue,
    "claim": claim,
    "schedules": schedules,
    "health": health,
    "events": events,
    "jobs": jobs,
    "job": job,
    "edit": edit,
    "confirm": confirm,
}
"""The pages by the names of their paths."""

POST: dict[str, Page] = {"act": act_on_queue, "act_on_schedule": act_on_schedule}
"""The actions by the names of their paths."""

ORIGINAL = "sqlaqueue.scope"
"""The key of the scope that the application has given."""

_OF_THE_APPLICATION = {"app", "router", "starlette.exception_handlers"}
"""What the scope of an application says about itself."""

_LEAVE_THE_BODY = {TooSlow.status, TooLarge.status}
"""The errors after which the rest of a form is not read."""

_NONE: Mapping[Any, Any] = {}


class Dashboard:
    """Shows queues, and changes their jobs: an ASGI application that mounts under any path.

    ::

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
    ) -> None:
        given: object = access  # without a type checker, callers may pass None
        if not callable(given):
            msg = (
                f"Dashboard(access={given!r}): give a function of a request that returns what its user may do, as in "
                "access=lambda request: Access(read=True)"
            )
            raise ConfigurationError(msg)
        self._access = access
        self._settings = Settings.of(models, redact, links, origins)
        mappers = [queue.spec.mapper for queue in self._settings.queues.values()]
        self._database = Database(session_factory, type(self).__name__, mappers)
        self._renderer = Renderer()
        self._state: dict[str, Any] = {}
        self._router = Router(self._routes(), redirect_slashes=False, default=self._not_found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
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
            response = self._error_response(Request(own), _as_page_error(error))
            await response(own, receive, own_send)

    def _routes(self) -> list[BaseRoute]:
        routes: list[BaseRoute] = [
            Route(f"/{PATHS[name]}", self._endpoint(page), methods=["GET"]) for name, page in GET.items()
        ]
        routes += [Route(f"/{PATHS[name]}", self._endpoint(page), methods=["POST"]) for name, page in POST.items()]
        return [*routes, Route(f"/{PATHS['static']}", self._static, methods=["GET"])]

    def _endpoint(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            try:
                access = await self._admitted(request)
                if isinstance(access, Response):
                    request.scope[AS_IT_IS] = True
                    return access
                context = self._context(request, access)
                response: Response = await page(context)
            except HTTPException:
                raise
            except PageError as error:
                return self._error_response(request, error)
            except Exception as error:  # noqa: BLE001 - the page says that something is wrong, the log says what
                return self._error_response(request, _unexpected(error))
            return response

        return serve

    async def _not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = NotFound("There is no such page.", "Start from the overview.")
        await self._error_response(Request(scope), error)(scope, receive, send)

    async def _static(self, request: Request) -> Response:
        return static_response(request, self._renderer)

    async def _admitted(self, request: Request) -> Access | Response:
        """Return what the user may do; or the response of the access rule."""
        check_host(request.headers.get("host", ""), self._settings.origins)
        if request.method not in {"GET", "HEAD"}:
            check_origin(request.headers, request.url.scheme, self._settings.origins)
        if any("\0" in part for part in (*request.path_params.values(), *request.query_params.values())):
            raise BadRequest("The address contains a NUL character.")
        rule = self._access
        call = getattr(rule, "__call__", rule)  # noqa: B004 - the method of an object may be a coroutine function
        is_async = inspect.iscoroutinefunction(rule) or inspect.iscoroutinefunction(call)
        asked = Request(request.scope[ORIGINAL])
        access: Any = rule(asked) if is_async else await run_sync(rule, asked)
        if inspect.isawaitable(access):
            access = await access
        if access is None:
            raise Forbidden("You have no access to this dashboard.", "Sign in to the application that it belongs to.")
        if not isinstance(access, Access | Response):
            msg = f"the access rule of the dashboard returned {access!r}; return an Access, a response or None"
            raise ConfigurationError(msg)
        if isinstance(access, Access):
            self._check_names(access)
        return access

    def _check_names(self, access: Access) -> None:
        unknown = [name for name in access.named_queues() if name not in self._settings.queues]
        if unknown:
            msg = f"the access rule named the queue {unknown[0]!r}; there are {', '.join(self._settings.queues)}"
            raise ConfigurationError(msg)

    def _context(self, request: Request, access: Access) -> Context:
        return Context(request, access, self._settings, self._database, self._renderer, self._state)

    def _error_response(self, request: Request, error: PageError) -> Response:
        # Without access: the page of an error names no queue.
        context = self._context(request, Access(read=False))
        response = context.render("error.html", status=error.status, error=error)
        if error.status in {ServiceUnavailable.status, TooManyWindows.status}:
            response.headers["Retry-After"] = "5"
        if error.status in _LEAVE_THE_BODY and str(request.scope.get("http_version", "")).startswith("1"):
            # Otherwise the server would go on reading what nobody needs.
            response.headers["Connection"] = "close"
        return response


def _unexpected(error: Exception) -> PageError:
    if isinstance(error, DBAPIError):
        logger.warning("the dashboard cannot show a page: %s", error.orig, extra=fields("dashboard_error"))
        return ServiceUnavailable(problem_text(error), "Reload the page when the cause is gone.")
    logger.error("the dashboard cannot show a page", exc_info=error, extra=fields("dashboard_error"))
    return PageError("The page could not be made.", "The log of the server has the error.")


def _as_page_error(error: HTTPException) -> PageError:
    made = PageError(str(error.detail))
    made.status, made.title = error.status_code, "This request cannot be served"
    return made


def _ends_with_slash(scope: Scope) -> bool:
    raw = scope.get("raw_path")
    return raw is None or bytes(raw).partition(b"?")[0].endswith(b"/")


def _with_slash(scope: Scope) -> str:
    raw = scope.get("raw_path") or (str(scope.get("root_path", "")) + str(scope["path"])).encode()
    last = bytes(raw).partition(b"?")[0].rpartition(b"/")[2].decode("latin-1")
    query = scope.get("query_string", b"").decode("latin-1")
    return f"./{last}/" + (f"?{query}" if query else "")
