"""sqlaqueue, with each strategy and both Consumers. The model has ten columns, which the handler reads.

With the option ``plain`` it is SQLAlchemy without a queue, to measure the costs of an insert. With ``bare`` the table
has the columns of a queue, but no indexes, triggers and side tables.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from docs.benchmarks.systems.protocol import Adapter, Meter, emit, main, version_of
from sqlaqueue import (
    AsyncConsumer,
    ConcurrencyLimit,
    Consumer,
    FairShare,
    InOrder,
    QueueConfig,
    QueueMixin,
    RateLimit,
    __version__,
    copy_in,
)
from sqlaqueue.mapping.mixin import spec_of

_PRIORITY, _DELAY = "priority", "delay"


class Fields:
    """The fields of a job."""

    id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
    recipient: Mapped[str]
    subject: Mapped[str]
    note: Mapped[str]
    reference: Mapped[str]
    language: Mapped[str]
    account: Mapped[int]
    amount: Mapped[int]
    share: Mapped[float]
    urgent: Mapped[bool]
    sent: Mapped[float]


def make_model(options: Mapping[str, Any]) -> Any:
    """Return a mapped class with a metadata of its own."""

    class Base(DeclarativeBase):
        pass

    if options.get("plain"):
        return type("Job", (Fields, Base), {"__tablename__": "job", "__module__": __name__})
    config = QueueConfig(
        strategy=options["strategy"],
        on_complete=options["on_complete"],
        attempt_history=options.get("history"),
        **flow_arguments(options.get("flow")),
    )
    body = {"__tablename__": "job", "__queue__": config, "__module__": __name__}
    return type("Job", (QueueMixin, Fields, Base), body)


def flow_arguments(flow: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of the configuration for the option ``flow``."""
    match flow and flow["kind"]:
        case None:
            return {}
        case "limit":
            per = "account" if flow and flow["per_key"] else None
            return {"flow_control": [ConcurrencyLimit(flow and flow["most"], per=per)]}
        case "order":
            return {"flow_control": [InOrder("account", by="id")]}
        case "fair":
            return {"flow_control": [FairShare("account")]}
        case "rate":
            return {"flow_control": [RateLimit(flow and flow["most"], every=1, per="account")]}
        case other:
            raise ValueError(other)


class SqlaqueueAdapter(Adapter):
    """Runs sqlaqueue."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.model = make_model(options)
        self.driver_url = self.url.replace("postgresql:", "postgresql+psycopg:")
        self.columns = [column.key for column in sa.inspect(self.model).column_attrs]

    def prepare(self) -> Any:
        engine = sa.create_engine(self.driver_url)
        if self.options.get("bare"):
            with engine.begin() as connection:
                connection.execute(sa.schema.CreateTable(self.model.__table__))
        else:
            self.model.metadata.create_all(engine)
        engine.dispose()
        age = "extract(epoch FROM now() - min(run_at))"
        remaining = "SELECT 1 FROM job WHERE status IN ('pending', 'processing') AND run_at <= now()"
        statements = {
            "finish": "UPDATE job SET status = 'completed', finished_at = now()",
            "due": f"SELECT count(*), {age} FROM job WHERE status IN ('pending', 'processing') AND run_at <= now()",
            "lock": "SELECT 1 FROM job WHERE status = 'pending' ORDER BY priority, run_at, id LIMIT 1 FOR UPDATE",
        }
        return remaining, {"sqlaqueue": __version__, **version_of("sqlalchemy", "psycopg")}, statements

    # -- enqueueing ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        self._engine = sa.create_engine(self.driver_url)
        self._insert = sa.insert(self.model)

    def enqueue(self, jobs: list[dict[str, Any]], request: Mapping[str, Any]) -> None:
        self._schedule(jobs, request)
        if request["way"] in {"copy", "fill"}:
            self._copy(jobs)
            return
        with Session(self._engine) as session:
            if request["way"] == "insert":
                session.execute(self._insert, jobs)
            else:
                session.add_all(self.model(**job) for job in jobs)
            session.commit()

    def _schedule(self, jobs: list[dict[str, Any]], request: Mapping[str, Any]) -> None:
        """Set the priority and the time of jobs."""
        if _PRIORITY in request:
            for job in jobs:
                job["priority"] = request[_PRIORITY]
        if _DELAY in request:
            run_at = datetime.now(UTC) + timedelta(seconds=request[_DELAY])
            for job in jobs:
                job["run_at"] = run_at

    def _copy(self, jobs: list[dict[str, Any]]) -> None:
        if not self.options.get("plain"):
            with Session(self._engine) as session:
                copy_in(session, self.model, jobs)
                session.commit()
            return
        names = list(jobs[0])
        with self._engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            with driver.cursor().copy(f"COPY job ({', '.join(names)}) FROM STDIN") as copy:
                for job in jobs:
                    copy.write_row([job[name] for name in names])
            # SQLAlchemy does not commit this transaction.
            driver.commit()

    # -- working ------------------------------------------------------------------------------------------------------

    def work(self, meter: Meter) -> Any:
        arguments = dict(self.options.get("consumer") or {})
        if self.options["processes"] > 1:
            arguments |= self.options.get("several_processes") or {}
        if "concurrency" in self.options:
            # Waiting handlers run concurrently, without batches. A held batch has one handler, so it is small here.
            arguments |= {"concurrency": self.options["concurrency"], "batch": False}
            if spec_of(self.model).strategy.holds_transaction:
                arguments["batch_size"] = self.options.get("held_batch", 10)
        if "lease" in self.options:
            arguments["lease"] = self.options["lease"]
        connections = arguments.get("concurrency", 1) + 1
        pool = {"pool_size": min(connections, 50), "max_overflow": max(connections - 50, 0)}
        if self.options["kind"] == "async":
            return self._work_async(meter, arguments, pool)
        return self._work(meter, arguments, pool)

    def _work(self, meter: Meter, arguments: dict[str, Any], pool: dict[str, int]) -> None:
        engine = sa.create_engine(self.driver_url, **pool)
        self._explain_claims(engine, meter)
        batch, one = _batch_reader(self.columns, meter), reader(self.columns, meter)

        def handle(session: Any, job: Any) -> None:
            place = meter.runs.begin(job.account, job.reference) if meter.runs else 0
            if meter.sleep:
                time.sleep(meter.sleep)
            one(session, job)
            if meter.runs:
                meter.runs.end(place)

        handler = batch if arguments.get("batch") else handle if meter.sleep or meter.runs else one
        consumer: Consumer[Any] = Consumer(self.model, handler, sessionmaker(engine), **arguments)
        with engine.connect():
            meter.wait_for_go()
        consumer.run()

    async def _work_async(self, meter: Meter, arguments: dict[str, Any], pool: dict[str, int]) -> None:
        engine = create_async_engine(self.driver_url, **pool)
        self._explain_claims(engine.sync_engine, meter)
        batch, one = _batch_reader(self.columns, meter), reader(self.columns, meter)

        async def handle(session: Any, job: Any) -> None:
            if meter.sleep:
                await asyncio.sleep(meter.sleep)
            one(session, job)

        async def handle_batch(session: Any, jobs: list[Any]) -> None:
            batch(session, jobs)

        factory = async_sessionmaker(engine)
        handler = handle_batch if arguments.get("batch") else handle
        consumer: AsyncConsumer[Any] = AsyncConsumer(self.model, handler, factory, **arguments)
        async with engine.connect():
            meter.wait_for_go()
        await consumer.run()

    def _explain_claims(self, engine: sa.Engine, meter: Meter) -> None:
        """Explain some of the claims before they are executed, in a savepoint that is rolled back."""
        every, after, seen = self.options.get("explain"), self.options.get("explain_after", 0), 0
        if not every:
            return

        @sa.event.listens_for(engine, "before_cursor_execute")
        def explain(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
            nonlocal seen
            if meter.count() < after or "SKIP LOCKED" not in statement or not self._is_claim(statement):
                return
            seen += 1
            if seen % every:
                return
            cursor.execute("SAVEPOINT benchmark")
            cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters)
            (plan,) = cursor.fetchone()[0]
            cursor.execute("ROLLBACK TO SAVEPOINT benchmark")
            top = plan["Plan"]
            buffers = top["Shared Hit Blocks"] + top["Shared Read Blocks"]
            took = plan["Execution Time"] + plan["Planning Time"]
            emit("claim", buffers=buffers, ms=took, jobs=top["Actual Rows"])

    @staticmethod
    def _is_claim(statement: str) -> bool:
        # Other statements with SKIP LOCKED do not return all columns.
        return "recipient" in statement


def reader(columns: list[str], meter: Meter) -> Any:
    """Return a handler that reads all columns of a job."""

    def read(session: Any, job: Any) -> None:
        for name in columns:
            getattr(job, name)
        meter.done(job.sent)

    return read


def _batch_reader(columns: list[str], meter: Meter) -> Any:
    read = reader(columns, meter)

    def read_all(session: Any, jobs: list[Any]) -> None:
        for job in jobs:
            read(session, job)

    return read_all


if __name__ == "__main__":
    main(SqlaqueueAdapter)
