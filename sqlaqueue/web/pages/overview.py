"""The first page: all queues."""

from __future__ import annotations

from starlette.responses import Response

from sqlaqueue.web.context import Context


async def overview(context: Context) -> Response:
    """Show all queues that the user sees."""
    return context.render("overview.html")
