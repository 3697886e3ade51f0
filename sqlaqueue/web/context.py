"""The context of a request: who asks, for which queue, and what a page needs to answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import quote, unquote, urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from sqlaqueue.exc import StatementError
from sqlaqueue.web.access import Access, Action
from sqlaqueue.web.attention import Attention, attention_of
from sqlaqueue.web.data.parameters import ParameterError
from sqlaqueue.web.database import Database
from sqlaqueue.web.errors import Forbidden, NotFound, PageError
from sqlaqueue.web.rendering.environment import Renderer
from sqlaqueue.web.rendering.notices import notices_in
from sqlaqueue.web.security.audit import write_audit
from sqlaqueue.web.security.forms import FormData, read_form
from sqlaqueue.web.settings import Queue, Settings

PATHS = {
    "overview": "",
    "queue": "queues/{queue}",
    "jobs": "queues/{queue}/jobs",
    "job": "queues/{queue}/job",
    "edit": "queues/{queue}/edit",
    "confirm": "queues/{queue}/confirm",
    "act": "queues/{queue}/actions/{action}",
    "claim": "queues/{queue}/claim",
    "schedules": "schedules",
    "act_on_schedule": "schedules/{action}",
    "health": "health",
    "events": "events",
    "static": "static/{file}",
}
"""The path of each page below the one where the dashboard is mounted."""

Query = Mapping[str, str | int] | Sequence[tuple[str, str | int]]


@dataclass
class Context:
    """One request."""

    request: Request
    access: Access
    settings: Settings
    database: Database
    renderer: Renderer
    state: dict[str, Any] = field(default_factory=dict)
    """What the pages keep between requests, such as results that several viewers share."""

    @property
    def user(self) -> str:
        """The name of the user, for the audit."""
        return self.access.user

    @cached_property
    def queues(self) -> list[Queue]:
        """The queues that the user sees."""
        return [queue for queue in self.settings.queues.values() if self.access.reads(queue.name)]

    @cached_property
    def queue(self) -> Queue:
        """The queue in the path.

        :raises NotFound: if there is none, or the user does not see it.
        """
        queue = self.settings.by_slug(self.request.path_params["queue"])
        if queue is None or not self.access.reads(queue.name):
            raise NotFound("There is no such queue, or you have no access to it.", "Choose a queue from the overview.")
        return queue

    @property
    def attention(self) -> Attention:
        """How many things need a look on other pages, as far as is known."""
        return attention_of(self.state, self.queues)

    def may(self, action: Action, queue: Queue) -> bool:
        """Return whether the user may carry out an action in a queue."""
        return self.access.may(action, queue.name)

    def require(self, action: Action, queue: Queue) -> None:
        """Refuse a user that may not carry out an action.

        :raises Forbidden: if so.
        """
        if not self.may(action, queue):
            raise Forbidden(
                f"You may look at {queue.name}, but not do this ({action}).",
                "Ask for the right, which the access rule of the dashboard grants.",
            )

    async def form(self) -> FormData:
        """Return the form of a POST."""
        return await read_form(self.request)

    def audit(self, action: str, queue: Queue, *, count: int | None = None, **facts: Any) -> None:
        """Log an action of the user."""
        write_audit(self.user, action, queue.name, count=count, **facts)

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

    def url(self, name: str, *, query: Query = (), **path: str | Queue) -> str:
        """Return the URL of a page, relative to the page of this request.

        So the dashboard need not know under which path it is mounted, or what a proxy has cut off.
        """
        parts = {key: quote(_segment(value), safe="") for key, value in path.items()}
        if name == "static":
            query = {"v": self.renderer.static_version}
        end = f"?{urlencode(query)}" if query else ""
        return f"{self._to_root}{PATHS[name].format(**parts)}{end}"

    @property
    def _to_root(self) -> str:
        depth = path_below_mount(self.request.scope).lstrip("/").count("/")
        return "../" * depth or "./"

    def render(self, template: str, *, status: int = 200, **values: Any) -> Response:
        """Return a page."""
        text = self.renderer.render(
            template,
            context=self,
            url=self.url,
            may=self.may,
            settings=self.settings,
            notices=notices_in(self.request.query_params),
            **values,
        )
        return HTMLResponse(text, status_code=status)

    def redirect(self, url: str, *notices: tuple[str, int]) -> Response:
        """Return a redirect after a POST, so that a reload does not repeat it.

        :param url: what :meth:`url` has returned.
        :param notices: what the next page says: codes of ``rendering/notices.py``, each with a number.
        """
        query = urlencode([("notice", f"{code}:{number}") for code, number in notices])
        joined = url if not query else f"{url}{'&' if '?' in url else '?'}{query}"
        return RedirectResponse(joined, status_code=303)


Page = Callable[[Context], Any]
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


def _segment(value: str | Queue) -> str:
    return value.slug if isinstance(value, Queue) else value
