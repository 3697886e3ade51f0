"""The jobs of a queue, as a list that filters, sorts and pages."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy.orm import Session
from starlette.responses import Response

from sqlaqueue.consumer.pace import RESCUE
from sqlaqueue.web.context import Context
from sqlaqueue.web.data.job_columns import OTHER, columns_of
from sqlaqueue.web.data.job_counts import Count, count_states
from sqlaqueue.web.data.job_pages import JobPage, ListRequest, parse_request, read_page
from sqlaqueue.web.data.parameters import ParameterError
from sqlaqueue.web.data.parts import Part, attempt_part
from sqlaqueue.web.errors import BadRequest
from sqlaqueue.web.pages.job_list import ListView, size_text

EMPTY = {
    None: ("No jobs.", "A job exists when the transaction that adds it commits."),
    "pending": ("No pending jobs.", "A job appears here when the transaction that adds it commits."),
    "due": ("No due jobs.", "Pending jobs become due when the time in run_at has come."),
    "processing": ("No processing jobs.", "The page of the queue shows whether any Consumer runs."),
    "expired": ("No lease has expired.", "A lease expires if its worker dies or loses the database."),
    "completed": (
        "No completed jobs.",
        "They are kept unless QueueConfig(on_complete='delete') or a retention is set.",
    ),
    "failed": ("No failed jobs.", "A job fails when its last attempt fails, or its handler raises Fail."),
    "cancelled": (
        "No cancelled jobs.",
        "A job is cancelled by the button Cancel, by a program, or when its handler raises Cancel.",
    ),
    OTHER: ("No other jobs.", "The status of each job is one of the queue's values."),
}
"""What a list without jobs says."""


async def jobs(context: Context) -> Response:
    """Show a page of the jobs of a queue."""
    columns = columns_of(context.queue.spec, context.settings.is_redacted)
    pairs = context.request.query_params.multi_items()
    try:
        request = parse_request(columns, pairs)
        if any(not value for _, value in pairs):
            # The form of the filter sends a parameter for each field that was left empty. The URL of the list, which
            # people copy, is without them.
            kept = [pair for pair in pairs if pair[1]]
            return context.redirect(context.url("jobs", queue=context.queue, query=kept))
        found, counts = await context.database.read(_read, request)
    except ParameterError as error:
        raise BadRequest(
            f"{error.parameter}: {error.problem}.", "Change it, or start from the list of all jobs."
        ) from None
    view = ListView(context, request, counts.value)
    return context.render(
        "jobs.html",
        queue=context.queue,
        view=view,
        page=found.value,
        problem_of_page=found.problem,
        problem_of_counts=counts.problem,
        empty_text=EMPTY[request.wanted.listed],
        size_text=size_text,
        rescue_seconds=round(RESCUE),
    )


def _read(session: Session, request: ListRequest) -> tuple[Part[JobPage], Part[Mapping[str | None, Count]]]:
    found = attempt_part(session, read_page, request)
    counts: Part[Mapping[str | None, Count]] = attempt_part(session, count_states, request.wanted)
    return found, counts
