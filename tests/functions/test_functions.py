"""Functions as jobs: what is stored, what runs, and what is refused."""

import asyncio
import inspect
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Mapped, MappedAsDataclass, Session, mapped_column, relationship, scoped_session, sessionmaker
from sqlmodel import SQLModel

from sqlaqueue import (
    AsyncConsumer,
    Cancel,
    Constant,
    Consumer,
    Fail,
    FunctionMixin,
    JobResult,
    QueueConfig,
    QueueMixin,
    Retry,
    Snooze,
    Unique,
    enqueue,
    prepare,
    requeue,
    wait,
)
from sqlaqueue.exc import ConfigurationError, NotAQueueError, UnknownFunction, WrongArguments
from sqlaqueue.texts import split_error
from tests.models import STRATEGIES, make_job, new_base

pytestmark = pytest.mark.once


def make(engine: sa.Engine | None = None, bases: tuple[type, ...] = (), **config: Any) -> Any:
    """Return a class of calls, and create its tables."""
    body = {"__module__": __name__, "__tablename__": "call", "__queue__": QueueConfig(**config)}
    model: Any = type("Call", (FunctionMixin, *(bases or (new_base(),))), body)
    if engine is not None:
        model.metadata.create_all(engine)
    return model


PLACES = [
    *(("postgresql", strategy) for strategy in STRATEGIES),
    *(("mariadb", strategy) for strategy in STRATEGIES if strategy != "delete_returning"),
    ("sqlite", "update_status"),
]


def drain(engine: sa.Engine, model: Any) -> dict[str, Any]:
    """Run what is due, and return the states by the names of the functions."""
    Consumer(model, model.run, sessionmaker(engine)).drain()
    return rows(engine, model)


def rows(engine: sa.Engine, model: Any) -> dict[str, Any]:
    with Session(engine) as session:
        found = session.scalars(sa.select(model))
        return {job.function: (job.status, job.result, split_error(job.last_error)[0] or None) for job in found}


def send_report(session: Session, to: str, pages: int = 1, *more: int, bold: bool = False, **options: Any) -> Any:
    assert isinstance(session, Session)
    return {"to": to, "pages": pages, "more": more, "bold": bold, "options": options}


async def send_later(session: AsyncSession, to: str) -> str:
    await asyncio.sleep(0)
    assert isinstance(session, AsyncSession)
    return f"sent to {to}"


# -- what runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.few(4)
@pytest.mark.parametrize(("engine", "strategy"), [*PLACES, ("mariadb", "rows_are_messages")], indirect=["engine"])
def test_a_function_runs_with_its_arguments(engine: sa.Engine, strategy: str) -> None:
    messages = {"strategy": "delete_returning", "rows_are_messages": True}
    model = make(engine, **(messages if strategy == "rows_are_messages" else {"strategy": strategy}))
    calls = list[Any]()

    @model.task(name="none")
    def none(session: Session) -> None:
        calls.append(session)

    task = model.task(send_report)
    with Session(engine) as session:
        job = task.enqueue(session, "ada", 3, 4, 5, bold=True, size="A4")
        assert isinstance(job, model)
        assert job in session
        none.enqueue(session)
        session.commit()
        if strategy != "rows_are_messages":
            named = {"to": "ada", "pages": 3, "more": [4, 5], "bold": True, "options": {"size": "A4"}}
            assert (job.function, job.arguments) == (f"{__name__}.send_report", named)
            assert wait_for(engine, model, job.id).value == named
    found = drain(engine, model)
    assert len(calls) == 1
    if strategy == "rows_are_messages":
        assert found == {}
    else:
        assert found["none"] == ("completed", None, None)
        with Session(engine) as session:
            assert session.scalar(sa.select(sa.func.count()).where(model.result.is_(sa.null()))) == 1


def test_the_traceback_begins_with_the_function(engine: sa.Engine) -> None:
    model = make(engine, max_attempts=1)

    @model.task(name="refuse")
    def refuse(session: Session) -> None:
        raise LookupError("no address")

    with Session(engine) as session:
        refuse.enqueue(session)
        session.commit()
    drain(engine, model)
    with Session(engine) as session:
        error = session.scalars(sa.select(model.last_error)).one()
    first, head, place, *_ = error.splitlines()
    assert (first, head) == ("LookupError: no address", "Traceback (most recent call last):")
    assert place.endswith(", in refuse")


def wait_for(engine: sa.Engine, model: Any, key: Any) -> Any:
    sessions = sessionmaker(engine)
    Consumer(model, model.run, sessions).drain()
    return wait(sessions, model, key)


@pytest.mark.few(3)
@pytest.mark.parametrize(("engine", "strategy"), PLACES, indirect=["engine"])
def test_a_coroutine_function_runs(engine: sa.Engine, strategy: str) -> None:
    model = make(engine, strategy=strategy)
    task = model.task(name="later", max_attempts=2)(send_later)

    async def run() -> None:
        drivers = {"postgresql": "postgresql+asyncpg", "sqlite": "sqlite+aiosqlite", "mariadb": "mariadb+asyncmy"}
        async_engine = prepare(create_async_engine(engine.url.set(drivername=drivers[engine.dialect.name])))
        sessions = async_sessionmaker(async_engine)
        async with sessions() as session:
            task.enqueue(session, "ada")
            await session.commit()
            assert await task(session=session, to="bob") == "sent to bob"
        await AsyncConsumer(model, model.async_run, sessions).drain()
        await async_engine.dispose()

    asyncio.run(run())
    assert rows(engine, model) == {"later": ("completed", "sent to ada", None)}


def test_the_row_is_part_of_the_transaction(engine: sa.Engine) -> None:
    model = make(engine)
    task = model.task(send_report)
    with Session(engine) as session:
        task.enqueue(session, "ada")
        session.rollback()
    assert rows(engine, model) == {}


def test_a_scoped_session_is_one(engine: sa.Engine) -> None:
    model = make(engine)
    sessions = scoped_session(sessionmaker(engine))
    model.task(send_report).enqueue(sessions, "ada")
    sessions.commit()
    sessions.remove()
    assert len(rows(engine, model)) == 1


def test_options_apply_to_what_is_enqueued_with_them(engine: sa.Engine) -> None:
    model = make(engine)
    task = model.task(name="report", max_attempts=3)(send_report)
    with Session(engine) as session:
        plain = task.enqueue(session, "a")
        late = task.options(delay=timedelta(hours=1)).options(priority=5).enqueue(session, "b")
        soon = task.options(delay=0, priority=-1).enqueue(session, "c")
        session.commit()
        assert [job.max_attempts for job in (plain, late, soon)] == [3, 3, 3]
        assert [job.priority for job in (plain, late, soon)] == [0, 5, -1]
        assert timedelta(minutes=59) < late.run_at - plain.run_at < timedelta(minutes=61)
        assert soon.run_at - plain.run_at < timedelta(minutes=1)
    Consumer(model, model.run, sessionmaker(engine)).drain()
    with Session(engine) as session:
        assert [job.status for job in session.scalars(sa.select(model).order_by(model.id))] == [
            "completed",
            "pending",
            "completed",
        ]


@pytest.mark.few(1)
def test_signals_and_errors_end_a_call_as_they_end_a_job(engine: sa.Engine) -> None:
    model = make(engine, retry=Constant(3600))
    raised = {
        "retry": Retry(3600, error="busy"),
        "snooze": Snooze(3600),
        "fail": Fail("no", kind="refused"),
        "cancel": Cancel("gone"),
        "error": ValueError("wrong"),
    }

    def call(session: Session, which: str) -> None:
        session.execute(sa.update(model).where(model.function == which).values(max_attempts=7))
        raise raised[which]

    with Session(engine) as session:
        for name in raised:
            model.task(name=name)(call).enqueue(session, name)
        session.commit()
    assert drain(engine, model) == {
        "retry": ("pending", None, "Retry: busy"),
        "snooze": ("pending", None, None),
        "fail": ("failed", None, "refused: no"),
        "cancel": ("cancelled", None, "gone"),
        "error": ("pending", None, "ValueError: wrong"),
    }
    with Session(engine) as session:
        # What a function has written is undone.
        assert session.scalars(sa.select(model.max_attempts)).all() == [None] * 5


@pytest.mark.few(1)
def test_only_a_completed_call_has_a_value(engine: sa.Engine) -> None:
    model = make(engine, max_attempts=1)
    answers = iter([1, None, 2, ValueError("no")])

    @model.task(name="answer")
    def answer(_: Session) -> Any:
        if isinstance(one := next(answers), Exception):
            raise one
        return one

    found, nulls = list[Any](), list[Any]()
    with Session(engine) as session:
        answer.enqueue(session)
        session.commit()
        for _ in range(4):
            result = wait_for(engine, model, 1)
            found.append((result.state, result.value))
            nulls.append(session.scalar(sa.select(sa.func.count()).where(model.result.is_(sa.null()))))
            session.execute(requeue(sa.select(model)))
            session.commit()
    # None replaces what the run before has returned; what an error leaves there is no value.
    assert found == [("completed", 1), ("completed", None), ("completed", 2), ("failed", None)]
    assert nulls == [0, 1, 0, 0]
    plain = JobResult("completed", make_job()(payload="x"))
    assert (plain.value, JobResult("gone", None).value) == (None, None)


def test_max_attempts_of_a_task_is_the_limit(engine: sa.Engine) -> None:
    model = make(engine, max_attempts=9, retry=Constant(0))
    calls = list[int]()

    @model.task(name="fails", max_attempts=2)
    def fails(_: Session) -> None:
        calls.append(1)
        raise ValueError

    with Session(engine) as session:
        fails.enqueue(session)
        session.commit()
    assert drain(engine, model)["fails"][0] == "failed"
    assert len(calls) == 2


@pytest.mark.parametrize("engine", ["postgresql", "sqlite"], indirect=True)
def test_calls_can_be_unique(engine: sa.Engine) -> None:
    """MariaDB compares no JSON."""
    model = make(engine, unique=Unique("function", "arguments"))
    task = model.task(send_report)
    with Session(engine) as session:
        first = task.enqueue(session, "ada")
        [again] = enqueue(session, task.enqueue(session, to="ada"))
        [other] = enqueue(session, task.enqueue(session, to="bob"))
        assert (again.created, again.job, other.created) == (False, first, True)
        session.commit()
    assert len(rows(engine, model)) == 1  # of one function
    with Session(engine) as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(model)) == 2


# -- what fails --------------------------------------------------------------------------------------------------------


def test_an_unknown_function_fails_for_good(engine: sa.Engine, caplog: pytest.LogCaptureFixture) -> None:
    model = make(engine)
    model.task(name="send_report")(send_report)
    with Session(engine) as session:
        session.add(model(function="send_reprot", arguments={}))
        session.commit()
    status, _, error = drain(engine, model)["send_reprot"]
    assert status == "failed"
    assert error.startswith("UnknownFunction: Call has no function 'send_reprot': import its module in the worker")
    assert error.endswith("did you mean 'send_report'?")
    assert issubclass(UnknownFunction, Fail)
    assert "Traceback" not in caplog.text


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (datetime(2026, 1, 1, tzinfo=UTC), "what it has returned is datetime.datetime"),
        ({"a": [1, {2}]}, "what it has returned['a'][1] is {2}, which JSON cannot hold"),
        (float("nan"), "is nan"),
        ({1: 2}, "has the key 1, and JSON has only texts"),
        ("\0", "has a NUL"),
        ("\ud800", "half of a character"),
    ],
)
def test_a_result_that_json_cannot_hold_fails_the_job(engine: sa.Engine, value: Any, said: str) -> None:
    model = make(engine)

    @model.task(name="returns")
    def returns(_: Session) -> Any:
        return value

    with Session(engine) as session:
        returns.enqueue(session)
        session.commit()
    status, result, error = drain(engine, model)["returns"]
    assert (status, result) == ("failed", None)
    assert error.startswith("result_not_json: returns: what it has returned")
    assert said in error


@pytest.mark.few(1)
def test_a_function_that_has_changed_is_retried(engine: sa.Engine) -> None:
    model = make(engine, retry=Constant(3600))
    model.task(name="report")(lambda s, to: to)
    with Session(engine) as session:
        session.add(model(function="report", arguments={"pages": 1, "to": "ada"}))
        session.commit()
    status, _, error = drain(engine, model)["report"]
    assert status == "pending"
    assert error == "WrongArguments: report(s, to) has no parameter 'pages', which this call has; add it"
    with Session(engine) as session:
        session.execute(sa.update(model).values(arguments={}, run_at=sa.func.now()))
        session.commit()
    assert "missing a required argument: 'to'" in drain(engine, model)["report"][2]


def test_a_function_of_the_other_kind_says_who_runs_it(engine: sa.Engine) -> None:
    model = make(engine)
    task = model.task(send_later)
    with Session(engine) as session:
        task.enqueue(session, "ada")
        session.commit()
    [(status, _, error)] = drain(engine, model).values()
    assert status == "pending"
    assert "is a coroutine function; run it by AsyncConsumer(Call, Call.async_run, ...)" in error
    plain = make()
    plain.task(name="x")(send_report)
    with pytest.raises(Exception, match=r"x is no coroutine function; run it by Consumer\(Call, Call.run, ...\)"):
        asyncio.run(plain.async_run(None, plain(function="x", arguments={})))


def test_a_batch_is_no_call() -> None:
    model = make()
    with pytest.raises(Exception, match=r"Call.run is called with one Call, not with a list: leave out batch=True"):
        model.run(None, [model(function="x")])


# -- what is refused when it is enqueued -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((), {}, "missing a required argument: 'to'"),
        (("ada",), {"to": "bob"}, "multiple values for argument 'to'"),
        ((datetime(2026, 1, 1, tzinfo=UTC),), {}, "the argument 'to' is datetime.datetime"),
        (("ada", {1: 2}), {}, "the argument 'pages' has the key 1"),
        (("ada", 1, 2, b"x"), {}, r"the argument 'more'[1] is b'x', which JSON cannot hold"),
        (("ada",), {"size": float("inf")}, "the argument 'options'['size'] is inf"),
        (("a\0",), {}, "the argument 'to' has a NUL"),
    ],
)
def test_wrong_arguments_are_refused_at_once(args: Any, kwargs: Any, said: str) -> None:
    task = make().task(send_report)
    session = Session()
    with pytest.raises(WrongArguments, match=re.escape(said)) as caught:
        task.enqueue(session, *args, **kwargs)
    assert isinstance(caught.value, TypeError)
    assert str(caught.value).startswith(f"{__name__}.send_report.enqueue(): ")
    assert not session.new


def test_an_argument_that_contains_itself_is_refused() -> None:
    circle = list[Any]()
    circle.append(circle)
    with pytest.raises(WrongArguments, match="the argument 'to'"):
        make().task(send_report).enqueue(Session(), circle)


def test_arguments_may_have_any_name() -> None:
    task = make().task(name="x")(lambda db, what, self, model, *, name, session: (what, self, model, name, session))
    job = task.enqueue(Session(), what=1, self=2, model=3, name=4, session=5)
    assert job.arguments == {"what": 1, "self": 2, "model": 3, "name": 4, "session": 5}
    assert task(db=None, what=1, self=2, model=3, name=4, session=5) == (1, 2, 3, 4, 5)


def test_the_session_comes_first() -> None:
    with pytest.raises(ConfigurationError, match="the first argument is a session, not a str"):
        make().task(send_report).enqueue("ada", 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"delay": -1}, r"send_report.options\(delay=...\) must be seconds or a timedelta, zero or more, not -1"),
        ({"delay": "soon"}, r"options\(delay=...\) must be seconds"),
        ({"priority": "high"}, r"send_report.options\(priority='high'\): give an integer from -32768 to 32767"),
        ({"priority": True}, r"options\(priority=True\)"),
        ({"priority": 2**15}, r"options\(priority=32768\)"),
    ],
)
def test_wrong_options_are_refused(options: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make().task(send_report).options(**options)


def test_options_that_the_queue_lacks_are_refused() -> None:
    model = make(columns={"priority": None, "max_attempts": None})
    task = model.task(send_report)
    with pytest.raises(ConfigurationError, match=r"options\(priority=...\): the queue Call has no priority"):
        task.options(priority=1)
    with pytest.raises(ConfigurationError, match=r"@Call.task\(max_attempts=...\): the queue Call has no max_attempts"):
        model.task(name="other", max_attempts=1)(send_report)


# -- what is refused when it is registered -----------------------------------------------------------------------------


def test_a_name_has_one_function() -> None:
    model = make()
    model.task(name="report")(send_report)
    one, other = (
        rf'<code object {name} at \w+, file "{re.escape(__file__)}", line \d+>'
        for name in ("send_report", "send_later")
    )
    both = f"{one} and {other} are both 'report'; give one a name="
    with pytest.raises(ConfigurationError, match=f"@Call.task: {both}"):
        model.task(name="report")(send_later)
    # Another queue has names of its own.
    make().task(name="report")(send_later)


def test_a_decorated_function_is_the_function_still() -> None:
    task = make().task(send_report)
    assert task(Session(), "ada")["to"] == task(session=Session(), to="ada")["to"] == "ada"
    assert (task.__name__, task.__module__) == ("send_report", __name__)
    assert inspect.signature(task) == inspect.signature(send_report)


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        (lambda session: session, {}, "cannot be found again by the name"),
        (make, {"name": ""}, "give one by"),
        (make, {"name": 5}, "give one by"),
        ("send_report", {}, "decorate a function"),
        (print, {}, "decorate a function"),
        (lambda: None, {"name": "x"}, r"x\(\) takes no session; make it the first parameter"),
        (lambda *args: None, {"name": "x"}, r"takes no session"),
        (send_report, {"max_attempts": 0}, r"@Call.task\(max_attempts=0\): give an integer from 1 to 32767"),
        (send_report, {"max_attempts": 10**6}, "give an integer from 1 to 32767"),
    ],
)
def test_what_is_no_task_is_refused(function: Any, options: Any, said: str) -> None:
    model = make()
    with pytest.raises(ConfigurationError, match=said) as caught:
        model.task(**options)(function) if options else model.task(function)
    assert str(caught.value).startswith("@Call.task")
    assert model.__functions__ == {}


def test_only_mapped_classes_have_functions() -> None:
    with pytest.raises(NotAQueueError, match="FunctionMixin is not mapped"):
        FunctionMixin.task(send_report)


# -- how a class is mapped ---------------------------------------------------------------------------------------------


def test_the_class_has_three_columns_and_a_key_more_than_a_queue() -> None:
    model = make()
    base = new_base()

    class Plain(QueueMixin, base):  # type: ignore[misc] # the base is Any
        __tablename__ = "call"
        id: Mapped[int] = mapped_column(primary_key=True)

    assert model.metadata.tables.keys() == base.metadata.tables.keys()
    assert set(model.__table__.columns.keys()) - set(Plain.__table__.columns.keys()) == {
        "function",
        "arguments",
        "result",
    }
    assert [column.key for column in model.__table__.primary_key] == ["id"]


def test_a_class_may_have_its_own_key_and_columns(engine: sa.Engine) -> None:
    base = new_base()

    class Call(FunctionMixin, base):  # type: ignore[misc] # the base is Any
        __tablename__ = "call"
        number: Mapped[int] = mapped_column(primary_key=True)
        function: Mapped[str] = mapped_column("name", sa.String(50), index=True)
        tenant: Mapped[str | None] = mapped_column(sa.String(50))

    base.metadata.create_all(engine)
    assert {"id", "function"}.isdisjoint(Call.__table__.columns.keys())
    task = Call.task(send_report)
    with Session(engine) as session:
        task.enqueue(session, "ada").tenant = "a"
        session.commit()
    assert drain(engine, Call)[f"{__name__}.send_report"][0] == "completed"


def test_subclasses_share_the_functions(engine: sa.Engine) -> None:
    base = new_base()

    class Call(FunctionMixin, base):  # type: ignore[misc] # the base is Any
        __tablename__ = "call"
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "call"}  # noqa: RUF012 - as SQLAlchemy has it
        kind: Mapped[str] = mapped_column(sa.String(50))

    class Urgent(Call):
        __mapper_args__ = {"polymorphic_identity": "urgent"}  # noqa: RUF012 - as SQLAlchemy has it

    base.metadata.create_all(engine)
    task = Urgent.task(send_report)
    with Session(engine) as session:
        assert isinstance(task.enqueue(session, "ada"), Urgent)
        session.commit()
    assert drain(engine, Call)[f"{__name__}.send_report"][0] == "completed"


def test_an_abstract_class_gives_each_queue_its_own_functions() -> None:
    base = new_base()

    class Calls(FunctionMixin, base):  # type: ignore[misc] # the base is Any
        __abstract__ = True

    class One(Calls):
        __tablename__ = "one"

    class Other(Calls):
        __tablename__ = "other"

    One.task(send_report)
    assert (len(One.__functions__), len(Other.__functions__)) == (1, 0)
    with pytest.raises(NotAQueueError, match="Calls is abstract"):
        Calls.task(send_report)


def test_a_dataclass_works(engine: sa.Engine) -> None:
    model = make(engine, (MappedAsDataclass, new_base()))
    with Session(engine) as session:
        model.task(send_report).enqueue(session, "ada")
        session.commit()
    assert drain(engine, model)[f"{__name__}.send_report"][0] == "completed"


def test_a_table_without_the_columns_is_refused() -> None:
    base = new_base()
    table = sa.Table("call", base.metadata, sa.Column("id", sa.Integer, primary_key=True))
    model: Any = type("Call", (FunctionMixin, base), {"__table__": table, "__module__": __name__})
    with pytest.raises(ConfigurationError, match="Call maps a Table without function and arguments and result"):
        model.task(send_report)


def test_a_task_may_be_registered_before_all_classes_are_mapped() -> None:
    base = new_base()

    class Call(FunctionMixin, base):  # type: ignore[misc] # the base is Any
        __tablename__ = "call"
        parent_id: Mapped[int | None] = mapped_column(sa.ForeignKey("parent.id"))
        parent: Mapped[Any] = relationship("NotMappedYet")

    try:
        assert Call.task(send_report).name == f"{__name__}.send_report"
    finally:
        base.registry.dispose()


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_model_of_sqlmodel_works(engine: sa.Engine) -> None:
    class Call(FunctionMixin, SQLModel, table=True):
        metadata = sa.MetaData()

    Call.metadata.create_all(engine)
    with Session(engine) as session:
        Call.task(send_report).enqueue(session, "ada")
        session.commit()
    assert drain(engine, Call)[f"{__name__}.send_report"][0] == "completed"
