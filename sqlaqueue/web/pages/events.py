"""The stream of events that keeps the open windows up to date."""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from starlette.responses import Response

from sqlaqueue.web.context import Context
from sqlaqueue.web.errors import NotFound, TooManyWindows
from sqlaqueue.web.live.broadcaster import MOST_OF_A_READER, MOST_VIEWERS, Broadcaster, Reader
from sqlaqueue.web.live.event_stream import EventStream
from sqlaqueue.web.settings import Queue

_KEY = "broadcasters"
_ADVICE = "Close some, or reload this page now and then."


async def events(context: Context) -> Response:
    """Return the events of the queues that the parameters ``queue`` name, or of all that the user sees."""
    broadcaster, reader = _broadcaster(context), _reader(context)
    if broadcaster.has_enough(reader):
        raise TooManyWindows(f"{MOST_OF_A_READER} of your windows are kept up to date already.", _ADVICE)
    if broadcaster.is_full:
        raise TooManyWindows(f"{MOST_VIEWERS} windows are kept up to date already.", _ADVICE)
    return EventStream(broadcaster, _queues(context), reader)


def _reader(context: Context) -> Reader:
    """Return who asks: applications need not name their users."""
    client = context.request.client
    return ("user", context.user) if context.user else ("address", "" if client is None else client.host)


def _broadcaster(context: Context) -> Broadcaster:
    by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Broadcaster]
    by_loop = context.state.setdefault(_KEY, WeakKeyDictionary())
    loop = asyncio.get_running_loop()
    if loop not in by_loop:
        by_loop[loop] = Broadcaster(context.database)
    return by_loop[loop]


def _queues(context: Context) -> list[Queue]:
    slugs = context.request.query_params.getlist("queue")
    if not slugs:
        return context.queues
    found = [queue for queue in context.queues if queue.slug in slugs]
    if len(found) < len(set(slugs)):
        raise NotFound("There is no such queue, or you have no access to it.", "Choose a queue from the overview.")
    return found
