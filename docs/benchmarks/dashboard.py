"""What a list of jobs costs in a large table: the buffers and the time of its pages.

*Buffers* are the pages of 8 kB that all statements of a page of the list touch, by EXPLAIN (ANALYZE, BUFFERS). They
depend on the rows and the indexes only. *Milliseconds* are the median of the calls of ``read_page()``, in this process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from docs.benchmarks.server import bench_server
from sqlaqueue import QueueConfig, QueueMixin
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.web.data.job_columns import JobColumns, columns_of
from sqlaqueue.web.data.job_pages import count_states, cursor_text, parse_request, read_page
from sqlaqueue.web.data.job_sources import orders_of, source_of
from tests.models import sent_statements

Pairs = Sequence[tuple[str, str]]

BATCH = 1000
"""The number of rows with the same created_at, as one INSERT writes them."""


class Base(DeclarativeBase):
    """The tables of the benchmark."""


class Email(QueueMixin, Base):
    """A queue with an index of each kind."""

    __tablename__ = "email"
    __queue__ = QueueConfig(strategy="update_status", columns={"created_at": "created_at"})
    id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
    customer_id: Mapped[int] = mapped_column(index=True)
    kind: Mapped[str] = mapped_column(index=True)
    subject: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(sa.DateTime(timezone=True), server_default=sa.func.now(), index=True)


FILL = """
INSERT INTO email (id, customer_id, kind, subject, status, priority, run_at, created_at, finished_at, attempts)
SELECT n, n %% (%(rows)s / 1000), (ARRAY['welcome', 'receipt', 'newsletter'])[1 + n %% 3], 'Message ' || n,
       CASE WHEN n > %(rows)s * 0.99 THEN 'pending' WHEN n %% 1000 = 0 THEN 'failed' ELSE 'completed' END,
       n %% 3, timestamptz '2030-01-01' + n / %(batch)s * interval '1 s',
       timestamptz '2030-01-01' + n / %(batch)s * interval '1 s', NULL, 1
FROM generate_series(%(first)s::bigint, %(last)s::bigint) n
"""


@dataclass(frozen=True)
class Case:
    """A list.

    :param at: where the page begins, as a part of all rows; None for the first page.
    """

    name: str
    parameters: Pairs
    at: float | None = None


CASES = [
    Case("newest keys, first page", []),
    Case("newest keys, middle", [], 0.5),
    Case("newest keys, last pages", [], 0.001),
    Case("created_at, first page", [("sort", "-created_at")]),
    Case("created_at, middle", [("sort", "-created_at")], 0.5),
    Case("kind (three values), first page", [("sort", "kind")]),
    Case("kind (three values), middle", [("sort", "kind")], 0.5),
    Case("pending in claim order, first page", [("state", "pending"), ("sort", "priority")]),
    Case("one customer of a thousand jobs, first page", [("f.customer_id", "7")]),
    Case("one customer of a thousand jobs, middle", [("f.customer_id", "7")], 0.5),
    Case("failed, without an index, first page", [("state", "failed")]),
    Case("failed, without an index, middle", [("state", "failed")], 0.5),
    Case("no match, without an index", [("f.subject", "none")]),
]


@dataclass(frozen=True)
class Figures:
    """What a page took."""

    name: str
    jobs: int
    buffers: int
    milliseconds: float


def measure(url: str, rows: int) -> list[Figures]:
    """Fill a table, and measure each case."""
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    Base.metadata.create_all(engine)
    _fill(engine, rows)
    columns = columns_of(spec_of(Email), lambda *_: False)
    found = [_measured(engine, case.name, _page_of(columns, case, rows)) for case in CASES]
    wanted = parse_request(columns, []).wanted
    found.append(_measured(engine, "the counts of all lists", lambda session: len(count_states(session, wanted))))
    engine.dispose()
    return found


def table(found: Sequence[Figures]) -> str:
    """Return the figures as a table."""
    lines = ["| list | jobs | buffers | ms |", "| --- | --: | --: | --: |"]
    lines += [f"| {each.name} | {each.jobs} | {each.buffers:,} | {each.milliseconds:.1f} |" for each in found]
    return "\n".join(lines)


def _fill(engine: sa.Engine, rows: int) -> None:
    step = 500_000
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ALTER TABLE email DISABLE TRIGGER USER")
        for first in range(1, rows + 1, step):
            last = min(first + step - 1, rows)
            connection.exec_driver_sql(FILL, {"rows": rows, "batch": BATCH, "first": first, "last": last})
        connection.exec_driver_sql("ALTER TABLE email ENABLE TRIGGER USER")
        connection.exec_driver_sql("VACUUM ANALYZE email")
        connection.exec_driver_sql("CHECKPOINT")


def _page_of(columns: JobColumns, case: Case, rows: int) -> Callable[[Session], int]:
    def read(session: Session) -> int:
        return len(read_page(session, request(session)).jobs)

    def request(session: Session) -> Any:
        if case.at is None:
            return parse_request(columns, case.parameters)
        if id(session) not in cursors:
            cursors[id(session)] = _cursor(session, columns, case, rows)
        return parse_request(columns, [*case.parameters, ("after", cursors[id(session)])])

    cursors: dict[int, str] = {}
    return read


def _cursor(session: Session, columns: JobColumns, case: Case, rows: int) -> str:
    """Return the cursor of a job in the list, whose position is read from its row."""
    request = parse_request(columns, case.parameters)
    source = source_of(columns, request.wanted)
    orders = orders_of(session, source, source.parts())
    sort = request.sort or "-id"
    order = orders.by(sort.removeprefix("-"), is_descending=sort.startswith("-"))
    if order is None:
        raise LookupError(sort)
    values = [sa.cast(sa.func.to_json(each.column).op("#>>")(sa.text("'{}'")), sa.Text()) for each in order.all]
    return cursor_text(
        order,
        session.execute(
            sa.select(*values).where(Email.id >= int(rows * (case.at or 0))).order_by(Email.id).limit(1)
        ).one(),
    )


def _measured(engine: sa.Engine, name: str, read: Callable[[Session], int]) -> Figures:
    with Session(engine) as session:
        read(session)
        with sent_statements(engine) as sent:
            jobs = read(session)
        times = []
        for _ in range(7):
            begun = time.perf_counter()
            read(session)
            times.append(time.perf_counter() - begun)
        connection, buffers = session.connection(), 0
        for statement, parameters in sent:
            if "set_config" not in statement:
                plan = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters)
                top = plan.scalar_one()[0]["Plan"]
                buffers += top["Shared Hit Blocks"] + top["Shared Read Blocks"]
    return Figures(name, jobs, buffers, statistics.median(times) * 1000)


def main(*, rows: int) -> int:
    """Print the figures."""
    with bench_server(durable=False, more="max_wal_size = 4GB") as server, server.database() as url:
        print(f"{rows:,} rows")
        print(table(measure(url, rows)))
    return 0
