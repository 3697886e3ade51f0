"""Statements: their names begin with ``sqlaqueue_``, they can be printed for any dialect, and are compiled once."""

import contextlib
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, make_transient_to_detached, mapped_column, sessionmaker
from sqlalchemy.sql.elements import _anonymous_label  # the names that SQLAlchemy makes have no public type
from sqlalchemy.sql.selectable import AliasedReturnsRows

import sqlaqueue as sq
from sqlaqueue.admin import QueueAdmin, doctor
from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.mapping.runs import set_run
from sqlaqueue.queue.run import Run
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.strategies.update_status import UpdateStatus
from tests.contexts import statements_of
from tests.models import create, make_job

STRATEGIES = ("update_status", "batch_select", "delete_returning", "rows_are_messages")
RULES = [sq.ConcurrencyLimit(3, per="tenant"), sq.RateLimit(100, every=1, per="tenant")]
FULL: dict[str, Any] = {
    "unique": sq.Unique("to"),
    "attempt_history": timedelta(days=1),
    "retention": {"failed": timedelta(days=1)},
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {**FULL, "flow_control": [*RULES, sq.FairShare("tenant")]},
    "order": {**FULL, "flow_control": [*RULES, sq.InOrder("tenant", on_failure="continue")]},
}
FORMER = ("claimed", "picked", "consumed", "expired", "levels", "free", "wanted", "other", "new_rows", "old_rows")
"""Names that statements had, or that stand in functions of the database."""


def make_model(strategy: Any, table: str = "job", others: tuple[str, ...] = (), **config: Any) -> Any:
    if strategy == "rows_are_messages":
        strategy, config = "delete_returning", {**config, "rows_are_messages": True}

    class Base(DeclarativeBase):
        pass

    class Job(sq.QueueMixin, Base):
        __tablename__ = table
        __queue__ = sq.QueueConfig(strategy=strategy, **config)
        id: Mapped[int] = mapped_column(primary_key=True)
        to: Mapped[str] = mapped_column("my_to", default="ada")
        tenant: Mapped[str] = mapped_column("my_tenant", default="one")
        for name in others:
            locals()[f"a_{name}"] = mapped_column(name, sa.Text, default="x")

    return Job


@contextmanager
def statements_in(engine: sa.Engine) -> Iterator[tuple[list[Any], set[str]]]:
    """Collect the statements that are executed, and the names before a dot in their texts."""
    found: list[Any] = []
    anonymous: set[str] = set()

    def keep(_connection: Any, element: Any, *_: Any) -> None:
        found.append(element)

    def read(_connection: Any, _cursor: Any, text: str, *_: Any) -> None:
        anonymous.update(re.findall(r"\banon_\d+\.", text))

    sa.event.listen(engine, "before_execute", keep)
    sa.event.listen(engine, "before_cursor_execute", read)
    try:
        yield found, anonymous
    finally:
        sa.event.remove(engine, "before_execute", keep)
        sa.event.remove(engine, "before_cursor_execute", read)


def use_everything(model: Any, engine: sa.Engine) -> None:
    """Execute each verb, a Consumer, and what operators call."""

    def handle(session: Session, job: Any) -> None:
        match job.id % 4:
            case 0:
                raise sq.Fail("no such address")
            case 1:
                raise sq.Retry(3600)
            case 2:
                raise sq.Cancel("not wanted")

    sessions = sessionmaker(engine, expire_on_commit=False)
    with sessions() as session:
        session.add_all(model(id=number, to=str(number)) for number in range(1, 13))
        session.commit()
        held = spec_of(model).strategy.holds_transaction and spec_of(model).config.rates
        for verb in () if held else (sq.complete, sq.retry, sq.fail, sq.release, sq.cancel, sq.extend):
            session.execute(verb(session.scalars(sq.claim(model, 2)).all()))
            session.rollback()
        for statement in (sq.rescue(model), sq.purge(model), sq.cancel(sa.select(model).where(model.id == 12))):
            session.execute(statement)
            session.commit()
        if spec_of(model).strategy.name == "delete_returning" and not spec_of(model).config.rows_are_messages:
            session.execute(sq.reconcile(model))
        session.execute(sq.pause(model))
        session.execute(sq.is_paused(model))
        session.execute(sq.resume(model))
        session.commit()
    consumer: sq.Consumer[Any] = sq.Consumer(model, handle, sessions, poll_interval=0.05)
    consumer.drain()
    with sessions() as session:
        session.execute(sq.requeue(model))
        if spec_of(model).config.unique is not None:
            sq.enqueue(session, model(id=100, to="3"))
        session.commit()
        session.execute(sq.cancel(model))
        session.commit()
        admin = QueueAdmin(session, model)
        for call in (admin.stats, admin.depth, admin.failures, admin.consumers, admin.jobs):
            call()
        admin.explain(3)
        doctor(session, model)
        session.rollback()


def parts_of(element: Any) -> list[Any]:
    """Return an element and what it contains, each once: traversing it would visit what is shared again and again."""
    parts = {id(element): element}
    waiting = [element]
    while waiting:
        for child in waiting.pop().get_children():
            if id(child) not in parts:
                parts[id(child)] = child
                waiting.append(child)
    return list(parts.values())


def collisions(elements: list[Any], table: sa.Table) -> set[str]:
    """Return the names of CTEs, aliases and columns in statements that a program's name may be equal to."""
    found = set()
    known = {*table.c.keys(), *(column.name for column in table.c)}
    for element in elements:
        for rows in parts_of(element):
            # An anonymous one may be no part of the text: its name stands before a dot if it is.
            if not isinstance(rows, AliasedReturnsRows) or isinstance(rows.name, _anonymous_label):
                continue
            if not rows.name.startswith("sqlaqueue_"):
                found.add(f"{type(rows).__name__} {rows.name}")
            names = {column.name for column in rows.c}
            if any(name.startswith("my_") for name in names):
                found |= {f"column {name}" for name in names - known if not name.startswith("sqlaqueue_")}
    return found


@pytest.mark.once
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_names_of_ctes_aliases_and_columns_have_the_prefix(engine: sa.Engine, strategy: str, features: str) -> None:
    table = f"sqlaqueue_{strategy}_{features}"
    model = create(engine, make_model(strategy, table, **FEATURES[features]))
    with statements_in(engine) as (elements, anonymous):
        use_everything(model, engine)
    assert len(elements) > 40
    assert collisions(elements, model.__table__) == set()
    assert anonymous == set()


@pytest.mark.once
@pytest.mark.parametrize("table", ["claimed", "expired", "new_rows", "é" * 31 + "x"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_table_and_its_columns_may_have_any_name(engine: sa.Engine, strategy: str, table: str) -> None:
    """Even one of 63 bytes, and those that CTEs of the library had."""
    features = FEATURES["full"] if len(table) > 20 else {}
    model = create(engine, make_model(strategy, table, others=FORMER, **features))
    use_everything(model, engine)


@pytest.mark.once
@pytest.mark.parametrize("table", ["expired", "claimed", "picked"])
def test_jobs_of_a_dead_worker_are_rescued_in_any_table(engine: sa.Engine, table: str) -> None:
    model = create(engine, make_model("update_status", table))
    with Session(engine) as session:
        session.add(model(id=1))
        session.commit()
        session.scalars(sq.claim(model, 1)).all()
        session.commit()
        session.execute(sa.text(f"UPDATE {table} SET lease_expires_at = now() - interval '1 day'"))
        assert session.scalars(sq.rescue(model)).all() == [1]


# -- a statement can be printed for any dialect; only its execution on another database is refused ---------------------

_postgresql: Any = postgresql.dialect
_sqlite: Any = sqlite.dialect
LITERAL = {"compile_kwargs": {"literal_binds": True}}


def held_jobs(model: Any, token: Any) -> list[Any]:
    """Return instances as a claim returns them."""
    jobs = []
    for number in (1, 2):
        job = model(**dict.fromkeys(sa.inspect(model).columns.keys()))
        job.id, job.attempts = number, 1
        make_transient_to_detached(job)
        set_run(job, Run((number,), token, 1, 5))
        jobs.append(job)
    return jobs


def statements() -> Iterator[Any]:
    for kind in STRATEGIES:
        model = make_job(kind)
        jobs = held_jobs(model, uuid.UUID(int=7) if kind == "update_status" else "7")
        for name, statement in {
            "claim": sq.claim(model, 10),
            "claim a select": sq.claim(sa.select(model).where(model.id > 5), 10),
            "complete": sq.complete(jobs),
            "retry": sq.retry(jobs, delay=5, error="it's late"),
            "retry at": sq.retry(jobs, at=datetime.now(UTC)),
            "fail": sq.fail(jobs, error=ValueError("no")),
            "release": sq.release(jobs, delay=60),
            "extend": sq.extend(jobs),
            "cancel": sq.cancel(model),
            "cancel jobs": sq.cancel(jobs),
            "requeue": sq.requeue(model),
            "rescue": sq.rescue(model),
            "purge": sq.purge(model, older_than=5),
            "reconcile": sq.reconcile(model),
            "pause": sq.pause(model),
            "resume": sq.resume(model),
            "is_paused": sq.is_paused(model),
            "consumers": sq.consumers(model),
        }.items():
            yield pytest.param(statement, id=f"{name}-{kind}")


@pytest.mark.once
@pytest.mark.parametrize("statement", [*statements()])
def test_a_statement_is_printed(statement: Any) -> None:
    for text in (str(statement), str(statement.compile()), str(statement.compile(dialect=_postgresql()))):
        assert "job" in text or "sqlaqueue_" in text
    literal = str(statement.compile(dialect=_postgresql(paramstyle="named"), **LITERAL))
    assert "[POSTCOMPILE" not in literal
    # Of a DELETE with USING, and before 2.1 of JSONB, SQLAlchemy itself says that this database has none.
    with contextlib.suppress(NotImplementedError, sa.exc.UnsupportedCompilationError):
        assert str(statement.compile(dialect=_sqlite()))


@pytest.mark.once
def test_values_are_printed_as_they_are_sent() -> None:
    model = make_job()
    jobs = held_jobs(model, uuid.UUID(int=7))
    text = str(sq.retry(jobs, delay=5, error="it's late").compile(dialect=_postgresql(), **LITERAL))
    for part in ("'1,2'", f"'{uuid.UUID(int=7)}'", "'it''s late'", "make_interval(secs=>5.0)"):
        assert part in text


EXECUTE: dict[str, Callable[[Session, Any], Any]] = {
    "session": lambda session, statement: session.execute(statement),
    "connection": lambda session, statement: session.connection().execute(statement),
    "without a cache": lambda session, statement: session.execute(
        statement, execution_options={"compiled_cache": None}
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("how", EXECUTE)
def test_a_printed_statement_is_still_refused_elsewhere(how: str) -> None:
    engine = sa.create_engine("sqlite://")
    statement = sq.claim(make_job(), 10)
    assert str(statement)
    with Session(engine) as session, pytest.raises(ConfigurationError, match="engine is for sqlite"):
        EXECUTE[how](session, statement)
    engine.dispose()


# -- statements are compiled once: they have a cache key of SQLAlchemy, equal from call to call ------------------------

STATEMENTS = [
    "claim",
    "claim_and_notify",
    "claim_from_cursor",
    "claim_from_cursor_and_notify",
    "claim_quarantined",
    "claim_key",
]
COMPLETIONS = [dict(zip(("one", "kept", "limited"), given, strict=True)) for given in product([False, True], repeat=3)]
VERBS: dict[str, Callable[[Any], Any]] = {
    "complete": sq.complete,
    "retry": sq.retry,
    "fail": lambda jobs: sq.fail(jobs, error="why"),
    "extend": sq.extend,
    "cancel": sq.cancel,
    "requeue": sq.requeue,
}


@pytest.fixture(params=STRATEGIES)
def model(request: pytest.FixtureRequest) -> Any:
    return make_job(request.param)


@pytest.mark.everywhere
@pytest.mark.parametrize("name", STATEMENTS)
def test_statements_of_a_consumer_are_compiled_once(model: Any, name: str) -> None:
    statement, again = getattr(statements_of(model), name), getattr(statements_of(model), name)
    if statement is not None:
        assert statement._generate_cache_key() is not None
        assert statement._generate_cache_key() == again._generate_cache_key()


@pytest.mark.everywhere
@pytest.mark.parametrize("how", COMPLETIONS)
def test_completions_are_compiled_once(model: Any, how: dict[str, bool]) -> None:
    statements = statements_of(model)
    statement, again = statements.complete(**how), statements_of(model).complete(**how)
    assert statement is statements.complete(**how)
    if statement is not None:
        assert statement._generate_cache_key() is not None
        assert statement._generate_cache_key() == again._generate_cache_key()


@pytest.mark.once  # before 2.1, SQLAlchemy has no key for an INSERT from a SELECT
@pytest.mark.parametrize("verb", VERBS)
def test_verbs_are_compiled_once(model: Any, verb: str, engine: sa.Engine) -> None:
    model.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all(model() for _ in range(4))
        session.flush()
        jobs = session.scalars(sq.claim(model, 4)).all()
        keys = [VERBS[verb](some)._generate_cache_key() for some in (jobs[:2], jobs[2:])]
        assert keys[0] is not None
        assert keys[0] == keys[1]


@pytest.mark.everywhere
def test_rescue_is_compiled_once() -> None:
    assert sq.rescue(make_job())._generate_cache_key() is not None


def test_claims_of_different_numbers_are_different_statements(engine: sa.Engine) -> None:
    """Claims of a class are kept, each with its number, which may be given by name."""
    model = create(engine, make_model("update_status"))
    with Session(engine) as session:
        session.add_all(model(to=str(number)) for number in range(6))
        session.commit()
        for statement, number in [(sq.claim(model, 1), 1), (sq.claim(model, n=2), 2), (sq.claim(model, n=1), 1)]:
            assert len(session.scalars(statement).all()) == number
    assert sq.claim(model, n=2) is sq.claim(model, 2)


class AttachesNothing(UpdateStatus):
    def attach(self, spec: QueueSpec) -> None:
        """Leave out what all strategies of the library attach."""


@pytest.mark.parametrize("verb", [sq.pause, sq.resume, sq.is_paused, sq.consumers])
def test_a_verb_names_the_table_that_a_strategy_lacks(verb: Any) -> None:
    table = "sqlaqueue_consumer" if verb is sq.consumers else "sqlaqueue_control"
    said = rf"^{verb.__name__}\(Job\): the strategy 'update_status' does not attach the table {table}$"
    with pytest.raises(StatementError, match=said):
        verb(make_model(AttachesNothing()))
