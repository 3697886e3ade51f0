"""Whether a pooler in transaction mode is between this engine and the server."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from sqlaqueue.admin.diagnosis.checks.settings import use_server
from sqlaqueue.admin.diagnosis.examination import Examination
from sqlaqueue.admin.diagnosis.finding import Finding
from sqlaqueue.postgresql.server import announced_pid, backend_pid, probe_backends, server_state


def check_pooler(examination: Examination) -> Iterator[Finding]:
    """Find a pooler that gives each transaction another connection to the server.

    A driver is told the process id of the server's process when it connects. If statements are executed by a process
    of another id, there is a pooler in between. Only then two further connections are opened, to see whether it
    changes the process from one transaction to the next. Threshold: ``statement_timeout``.
    """
    connection = examination.connection
    executing = backend_pid(connection)
    announced = announced_pid(connection)
    if announced == executing:
        return
    pids = _probe(examination)
    if pids and pids[0] == pids[-1]:
        # In session mode a client keeps its connection, and notifications arrive.
        return
    server = server_state(connection)
    between = f"A pooler is between this engine and the server {server.address}:{server.port}"
    if pids:
        seen = f"two transactions of one connection were executed by the processes {pids[0]} and {pids[-1]}"
        summary = f"{between}, in transaction mode: {seen}."
    else:
        waited = f"{examination.thresholds.statement_timeout.total_seconds():g} s"
        summary = f"{between}; it gave no further connection within {waited}, so its mode is not known."
    yield Finding(
        severity="warning" if pids else "notice",
        code="transaction_pooler",
        queue=None,
        summary=summary,
        consequence=(
            "In transaction mode LISTEN has no effect, so that Consumers find new jobs only by polling. Programs that "
            "add jobs may stay behind it."
        ),
        fixes=(use_server(server, server.address, server.port),),
        facts={"executing": executing, "announced": announced, "pids": [*pids], "address": server.address},
    )


def _probe(examination: Examination) -> Sequence[int]:
    """Return the process ids of further transactions; none if the pooler has no connection left for them."""
    engine = examination.connection.engine
    if engine.dialect.is_async:
        # Its connections belong to the event loop of this thread.
        return probe_backends(engine)
    found: list[int] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.extend(probe_backends(engine))
        except Exception as error:  # noqa: BLE001 - raised below, in the thread of the examination
            errors.append(error)

    # A pooler whose connections are all in use, one of them by this examination, keeps a client waiting.
    thread = threading.Thread(target=run, name="sqlaqueue-pooler-probe", daemon=True)
    thread.start()
    thread.join(examination.thresholds.statement_timeout.total_seconds())
    if errors:
        raise errors[0]
    return [] if thread.is_alive() else found
