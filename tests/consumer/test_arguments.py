"""Arguments that cannot be meant are refused; and which handler gets the jobs of which class."""

import asyncio
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, MutableSequence, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import AsyncConsumer, Constant, Consumer, QueueConfig, QueueMixin
from sqlaqueue.exc import ConfigurationError, NotAQueueError
from sqlaqueue.statements.claim import worker_name
from tests.consumer.bench import Bench, Server
from tests.consumer.models import STRATEGIES, Handler, models
from tests.models import execute, make_job
from tests.servers import Database
from tests.servers import Server as PostgresServer

Job = models("update_status").job
sessions: Any = sessionmaker()
async_sessions: Any = async_sessionmaker()


def handler(session: Any, job: Any) -> None:
    """Handle a job."""


async def async_handler(session: Any, job: Any) -> None:
    """Handle a job in an event loop."""


class CallableHandler:
    def __call__(self, session: Any, job: Any) -> None:
        """Handle a job."""


class AsyncCallableHandler:
    async def __call__(self, session: Any, job: Any) -> None:
        """Handle a job in an event loop."""


@pytest.mark.parametrize(
    "given", [async_handler, partial(async_handler), AsyncCallableHandler(), AsyncCallableHandler().__call__]
)
def test_a_consumer_refuses_coroutine_functions(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="AsyncConsumer"):
        Consumer(Job, given, sessions)


@pytest.mark.parametrize("given", [handler, partial(handler), CallableHandler(), CallableHandler().__call__])
def test_an_async_consumer_refuses_other_functions(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="async def"):
        AsyncConsumer(Job, given, async_sessions)


def generator(session: Any, job: Any) -> Any:
    yield


async def async_generator(session: Any, job: Any) -> Any:
    yield


class GeneratorCallable:
    def __call__(self, session: Any, job: Any) -> Any:
        yield


@pytest.mark.parametrize("given", [generator, async_generator, partial(async_generator), GeneratorCallable()])
@pytest.mark.parametrize("made", [Consumer, AsyncConsumer])
def test_generator_functions_are_refused(made: Any, given: Any) -> None:
    """A call of one runs nothing, and its job would count as completed."""
    with pytest.raises(ConfigurationError, match=r"is an? (async )?generator function"):
        made(Job, given, sessions if made is Consumer else async_sessions)
    with pytest.raises(ConfigurationError, match=r"is an? (async )?generator function"):
        made(Job, {Job: given}, sessions if made is Consumer else async_sessions)


def list_handler(session: Session, jobs: list[Any]) -> None: ...


def sequence_handler(session: Session, jobs: Sequence[Any]) -> None: ...


def job_handler(session: Session, job: Job) -> None: ...


def unknown_handler(session: Session, job: "list[NotImported]") -> None: ...  # type: ignore[name-defined] # as a name that only type checkers import  # noqa: F821 - the same


def odd_handler(session: Session, job: ["of", "something"]) -> None: ...  # type: ignore[valid-type] # any expression may be an annotation  # noqa: F821 - the same


def broken_handler(session: Session, job: "sa.Missing") -> None: ...  # type: ignore[name-defined] # as of another version


def starred_handler(*arguments: Any) -> None: ...


async def async_list_handler(session: AsyncSession, jobs: list[Any]) -> None: ...


@pytest.mark.parametrize("given", [list_handler, sequence_handler, partial(list_handler)])
def test_a_handler_of_lists_needs_batch(given: Any) -> None:
    Consumer(Job, given, sessions, batch=True)
    message = (
        r"Consumer: the handler \w+ takes a list of jobs by its annotation, and is called with one job; give batch="
    )
    with pytest.raises(ConfigurationError, match=message):
        Consumer(Job, given, sessions)
    with pytest.raises(ConfigurationError, match="takes a list of jobs"):
        Consumer(Job, {Job: given}, sessions)


@pytest.mark.parametrize("kind", [list, MutableSequence, Sequence, Collection, Iterable])
@pytest.mark.parametrize("of_any", [False, True])
def test_each_annotation_of_a_list_needs_batch(kind: Any, *, of_any: bool) -> None:
    def annotated(session: Any, jobs: Any) -> None: ...

    annotated.__annotations__["jobs"] = kind[Any] if of_any else kind
    Consumer(Job, annotated, sessions, batch=True)
    with pytest.raises(ConfigurationError, match="the handler annotated takes a list of jobs by its annotation"):
        Consumer(Job, annotated, sessions)


def test_a_handler_of_one_job_refuses_batch() -> None:
    Consumer(Job, job_handler, sessions)
    with pytest.raises(
        ConfigurationError, match=r"takes one by its annotation; annotate list\[Job\], or leave out batch"
    ):
        Consumer(Job, job_handler, sessions, batch=True)


def test_an_async_handler_of_lists_needs_batch() -> None:
    AsyncConsumer(Job, async_list_handler, async_sessions, batch=True)
    with pytest.raises(ConfigurationError, match="AsyncConsumer: the handler async_list_handler takes a list of jobs"):
        AsyncConsumer(Job, async_list_handler, async_sessions)


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(
    "given",
    [handler, unknown_handler, odd_handler, broken_handler, starred_handler, lambda session, jobs: None, print],
)
def test_a_handler_without_a_known_annotation_is_accepted(given: Any, *, batch: bool) -> None:
    Consumer(Job, given, sessions, batch=batch)


def test_both_kinds_have_the_same_options_and_each_is_described() -> None:
    first, second = (inspect.signature(kind).parameters for kind in (Consumer, AsyncConsumer))
    assert {name: one.default for name, one in first.items()} == {name: one.default for name, one in second.items()}
    keywords = [name for name, one in first.items() if one.kind is one.KEYWORD_ONLY]
    assert {"worker_name", "middleware", "grace", "distribution"} < {*keywords}
    assert [*first] == ["model", "handler", "session_factory", *keywords]
    described = re.findall(r":param (\w+):", Consumer.__doc__ or "")
    assert sorted(described) == sorted(first)


@pytest.mark.parametrize("given", [async_handler, generator])
def test_listeners_that_nothing_would_run_are_refused(given: Any) -> None:
    consumer = Consumer(Job, handler, sessions)
    for event in ("completed", "polled"):
        with pytest.raises(ConfigurationError, match="a call of it runs nothing"):
            consumer.on(event, given)  # type: ignore[call-overload]  # the event is one of two kinds


@pytest.mark.parametrize("given", [handler, partial(handler), CallableHandler(), CallableHandler().__call__, print])
def test_a_consumer_accepts_callables(given: Any) -> None:
    Consumer(Job, given, sessions)


@pytest.mark.parametrize("given", [async_handler, partial(async_handler), AsyncCallableHandler()])
def test_an_async_consumer_accepts_coroutine_functions(given: Any) -> None:
    AsyncConsumer(Job, given, async_sessions)


def test_a_worker_is_named_by_the_process_that_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may make a Consumer before it forks."""
    named, other = Consumer(Job, job_handler, sessions, worker_name="mails"), Consumer(Job, job_handler, sessions)
    monkeypatch.setattr("os.getpid", lambda: 7)
    host = worker_name().removesuffix(":7")
    assert (named._settings.worker(), other._settings.worker()) == (f"{host}:7:mails", f"{host}:7")


def test_an_option_that_does_not_exist_is_refused() -> None:
    unknown: Any = {"around": ()}
    with pytest.raises(ConfigurationError, match=r"^Consumer\(\): got an unexpected keyword argument 'around'"):
        Consumer(Job, job_handler, sessions, **unknown)
    with pytest.raises(ConfigurationError, match=r"^AsyncConsumer\(\): got .*; its parameters are model, handler, "):
        AsyncConsumer(Job, async_handler, async_sessions, **unknown)


Other = make_job(attributes={"__tablename__": "other"})
SameTable = make_job()
Letter = make_job(
    attributes={
        "kind": mapped_column(sa.String),
        "__mapper_args__": {"polymorphic_on": "kind", "polymorphic_identity": "letter"},
    }
)
Narrow = type("Narrow", (Letter,), {"__mapper_args__": {"polymorphic_identity": "narrow"}})
JobT = TypeVar("JobT", bound=Letter)


def swapped_handler(job: Letter, session: Session) -> None: ...


def other_handler(session: Session, job: "Other") -> None: ...


def narrow_handler(session: Session, job: "Narrow") -> None: ...


def union_handler(session: Session, job: "Other | Letter") -> None: ...


def same_table_handler(session: Session, job: SameTable) -> None: ...


def base_handler(session: Session, job: QueueMixin) -> None: ...


def variable_handler(session: Session, job: "JobT") -> None: ...


@wraps(other_handler)
def wrapping_handler(session: Session, job: Letter) -> None: ...


class AnnotatedHandler:
    def __call__(self, session: Session, job: "Other") -> None: ...


@pytest.mark.parametrize(
    "given", [narrow_handler, union_handler, same_table_handler, base_handler, variable_handler, wrapping_handler]
)
def test_a_handler_whose_annotations_may_fit_is_accepted(given: Any) -> None:
    Consumer(Letter, given, sessions)
    Consumer(sa.select(Letter), {Letter: given, Narrow: handler}, sessions)


@pytest.mark.parametrize(
    "given", [other_handler, partial(other_handler), AnnotatedHandler(), AnnotatedHandler().__call__]
)
def test_a_handler_of_another_queue_is_refused(given: Any) -> None:
    said = r"^Consumer\(Job, ...\): the handler \w+ takes jobs of the class Job by its annotation"
    with pytest.raises(ConfigurationError, match=said):
        Consumer(Letter, given, sessions)
    with pytest.raises(ConfigurationError, match=said):
        Consumer(Letter, {Letter: given, Narrow: handler}, sessions)
    with pytest.raises(
        ConfigurationError, match=r"^Consumer\(Narrow, ...\): the handler \w+ takes jobs of the class Job"
    ):
        Consumer(Letter, {Letter: handler, Narrow: given}, sessions)


def test_swapped_parameters_are_refused() -> None:
    said = r"swapped_handler takes a Job first by its annotation, and is called with the session first"
    with pytest.raises(ConfigurationError, match=said):
        Consumer(Letter, swapped_handler, sessions)


@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency=0"),
        ({"worker_name": 3}, r"worker_name=3\): give a text"),
        ({"worker_name": "a\0b"}, r"worker_name='a\\x00b'\): give a text; no database stores a NUL"),
        ({"worker_name": "a\ud800b"}, r"worker_name='a\\ud800b'\): give a text; no database stores a NUL"),
        ({"concurrency": 1.5}, "concurrency=1.5"),
        ({"concurrency": True}, "concurrency=True"),
        ({"batch_size": -1}, "batch_size=-1"),
        ({"batch_size": "10"}, "batch_size='10'"),
        ({"poll_interval": 0}, "poll_interval=0"),
        ({"poll_interval": -1}, "poll_interval"),
        ({"poll_interval": float("nan")}, "poll_interval"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": -1}, "timeout"),
        ({"grace": -1}, "grace"),
        ({"grace": float("inf")}, "grace"),
        ({"lease": 0.5}, "lease=0.5"),
        ({"retry": 5}, "retry=5"),
    ],
)
def test_invalid_numbers_are_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    given: Any = (handler, sessions) if kind is Consumer else (async_handler, async_sessions)
    with pytest.raises(ConfigurationError, match=message):
        kind(Job, *given, **options)


@pytest.mark.parametrize(
    "given",
    [None, "handler", lambda: None, lambda session: None, lambda session, job, more: None, lambda *, session: None],
)
def test_callables_with_other_parameters_are_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"\(session, job\)"):
        Consumer(Job, given, sessions)
    with pytest.raises(ConfigurationError, match=r"\(session, jobs\)"):
        Consumer(Job, given, sessions, batch=True)


def test_a_class_that_is_no_queue_is_refused() -> None:
    with pytest.raises(NotAQueueError, match="Owner"):
        Consumer(models("update_status").owner, handler, sessions)


def test_sessions_of_the_other_api_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="makes AsyncSession.*use AsyncConsumer"):
        Consumer(Job, handler, async_sessions)
    with pytest.raises(ConfigurationError, match="makes Session.*use Consumer"):
        AsyncConsumer(Job, async_handler, sessions)
    with pytest.raises(ConfigurationError, match="makes AsyncSession.*use AsyncConsumer"):
        Consumer(Job, handler, lambda: async_sessions()).run()
    # The way before SQLAlchemy had an async_sessionmaker.
    AsyncConsumer(Job, async_handler, sessionmaker(class_=AsyncSession))  # type: ignore[call-overload] # no Session


def test_objects_that_are_no_session_factory_are_refused() -> None:
    """Named with the fix when the Consumer is made, not by a TypeError in its first claim."""
    url = "postgresql+psycopg://ada:secret@localhost/app"
    engine, async_engine = sa.create_engine(url), create_async_engine(url)
    for given, sync_fix, async_fix in [
        (
            engine,
            r"Consumer: Engine\(.*\) is an Engine, where a session factory is needed; give sessionmaker\(engine\)$",
            r"give async_sessionmaker\(engine\) of an engine from create_async_engine\(\), or use Consumer$",
        ),
        (
            async_engine,
            r"give sessionmaker\(engine\) of an engine from create_engine\(\), or use AsyncConsumer$",
            r"AsyncEngine, where a session factory is needed; give async_sessionmaker\(engine\)$",
        ),
        (Session(engine), r"is a Session, .* give sessionmaker\(engine\)$", "or use Consumer$"),
        (AsyncSession(async_engine), "or use AsyncConsumer$", r"AsyncSession, .* give async_sessionmaker\(engine\)$"),
        (url, r"is a str, which is not callable; give sessionmaker\(engine\)$", "is a str, which is not callable"),
        (None, "is a NoneType", "is a NoneType"),
    ]:
        with pytest.raises(ConfigurationError, match=sync_fix) as refused:
            Consumer(Job, handler, given)
        assert "secret" not in str(refused.value)
        with pytest.raises(ConfigurationError, match=async_fix):
            AsyncConsumer(Job, async_handler, given)


def test_a_factory_that_gives_one_session_twice_is_refused(server: PostgresServer) -> None:
    """What one statement commits or closes would be another one's: a held batch would be handed out to others."""
    session = Session(sa.create_engine(server.url()))
    with pytest.raises(ConfigurationError, match="returns the same session each time; give a sessionmaker"):
        Consumer(Job, handler, lambda: session).run()

    async def run() -> None:
        async with AsyncSession(create_async_engine(server.url("asyncpg"))) as session:
            await AsyncConsumer(Job, async_handler, lambda: session).run()

    with pytest.raises(ConfigurationError, match="returns the same session each time; give a sessionmaker"):
        asyncio.run(run())


def test_a_factory_that_makes_no_session_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="makes int"):
        Consumer(Job, handler, lambda: 5).run()


# -- a handler for each class of a queue whose table holds several -------------------------------------------------


class Models:
    """A base with two subclasses in its table, and one of these with a subclass of its own."""

    def __init__(self, strategy: str) -> None:
        class Base(DeclarativeBase):
            pass

        class Message(QueueMixin, Base):
            __tablename__ = "message"
            __queue__ = QueueConfig(strategy=strategy, max_attempts=2, retry=Constant(delay=0))
            __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_abstract": True}  # noqa: RUF012 - as SQLAlchemy reads it
            id: Mapped[int] = mapped_column(primary_key=True)
            kind: Mapped[str]

        class Email(Message):
            __mapper_args__ = {"polymorphic_identity": "email"}  # noqa: RUF012 - as SQLAlchemy reads it
            to: Mapped[str | None]

        class Letter(Email):
            __mapper_args__ = {"polymorphic_identity": "letter"}  # noqa: RUF012 - as SQLAlchemy reads it

        class Text(Message):
            __mapper_args__ = {"polymorphic_identity": "text"}  # noqa: RUF012 - as SQLAlchemy reads it
            number: Mapped[str | None]

        self.Base, self.Message, self.Email, self.Letter, self.Text = Base, Message, Email, Letter, Text


@pytest.fixture
def kinds(strategy: str, engine: sa.Engine) -> Models:
    kinds = Models(strategy)
    kinds.Base.metadata.create_all(engine)
    return kinds


def drain(
    database: Database, api: str, model: Any, handlers: Mapping[Any, Callable[[Any], object]], **options: Any
) -> int:
    """Drain with a handler for each class, which is called with the jobs alone."""

    def adapted(handler: Callable[[Any], object]) -> Handler:
        async def handle(_: Any, jobs: Any) -> None:
            handler(jobs)

        return handle

    return Server(database, api, model, {kind: adapted(one) for kind, one in handlers.items()}, **options).drain()


def add(engine: sa.Engine, *jobs: Any) -> None:
    with Session(engine) as session:
        for job in jobs:
            session.add(job)
            session.flush()
        session.commit()


def states(engine: sa.Engine) -> dict[str, int]:
    with engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT kind || ' ' || status, count(*)::int FROM message GROUP BY 1")
        return {row[0]: row[1] for row in found}


def test_each_class_has_its_handler(shared: Database, engine: sa.Engine, kinds: Models, api: str) -> None:
    seen: list[tuple[str, str]] = []
    add(engine, kinds.Email(), kinds.Text(), kinds.Letter(), kinds.Email())
    handlers = {
        kinds.Email: lambda job: seen.append(("email", type(job).__name__)),
        kinds.Text: lambda job: seen.append(("text", type(job).__name__)),
    }
    assert drain(shared, api, kinds.Message, handlers) == 4
    # A class without a handler of its own is served by that of the class it inherits from.
    assert seen == [("email", "Email"), ("text", "Text"), ("email", "Letter"), ("email", "Email")]


def test_the_handler_of_the_nearest_class_is_called(
    shared: Database, engine: sa.Engine, kinds: Models, api: str
) -> None:
    seen: list[str] = []
    add(engine, kinds.Email(), kinds.Text(), kinds.Letter())
    handlers = {kinds.Message: lambda job: seen.append("message"), kinds.Letter: lambda job: seen.append("letter")}
    drain(shared, api, kinds.Message, handlers)
    assert sorted(seen) == ["letter", "message", "message"]


def test_a_batch_has_jobs_of_one_class(shared: Database, engine: sa.Engine, kinds: Models, api: str) -> None:
    seen: list[list[str]] = []
    add(engine, kinds.Email(), kinds.Text(), kinds.Letter(), kinds.Text())

    def fail(_: Any) -> None:
        raise ValueError

    handlers = {kinds.Email: lambda jobs: seen.append([type(job).__name__ for job in jobs]), kinds.Text: fail}
    drain(shared, api, kinds.Message, handlers, batch=True)
    assert seen == [["Email", "Letter"]]
    assert states(engine) == {"email completed": 1, "letter completed": 1, "text failed": 2}


def test_jobs_of_unknown_classes_are_not_claimed(shared: Database, engine: sa.Engine, kinds: Models, api: str) -> None:
    """A newer version of the program has enqueued them; SQLAlchemy itself could not even load them."""
    execute(engine, "INSERT INTO message (kind, priority) VALUES ('fax', -1), ('text', 0)")
    handlers = {kinds.Email: lambda *_: None, kinds.Text: lambda *_: None}
    assert drain(shared, api, kinds.Message, handlers) == 1
    assert states(engine) == {"fax pending": 1, "text completed": 1}


def test_some_jobs_of_some_classes(shared: Database, engine: sa.Engine, kinds: Models, api: str) -> None:
    add(engine, kinds.Email(to="a"), kinds.Email(to="b"), kinds.Letter(to="a"), kinds.Text())
    some = sa.select(kinds.Email).where(kinds.Email.to == "a")
    assert drain(shared, api, some, {kinds.Email: lambda *_: None}) == 2
    assert states(engine) == {"email completed": 1, "email pending": 1, "letter completed": 1, "text pending": 1}


KINDS = Models(STRATEGIES[0])


@pytest.mark.once
@pytest.mark.parametrize(("kind", "one"), [(Consumer, handler), (AsyncConsumer, async_handler)])
@pytest.mark.parametrize(
    ("model", "classes", "said"),
    [
        (KINDS.Message, [], "no handler for Email, Letter, Text; add Email: handler, or Message: handler for all"),
        (KINDS.Message, [KINDS.Email], "no handler for Text; add Text: handler"),
        (KINDS.Message, [KINDS.Letter, KINDS.Text], "no handler for Email;"),
        (KINDS.Email, [KINDS.Email, KINDS.Text], r"\{Text: ...\}\): Text is not Email or a subclass of it"),
        (sa.select(KINDS.Email), [KINDS.Text], "Text is not Email or a subclass of it"),
        (KINDS.Message, [KINDS.Message, int], "int is not Message or a subclass of it"),
        (KINDS.Message, [KINDS.Message, "Email"], "'Email' is not Message or a subclass of it"),
    ],
)
def test_invalid_handlers_are_refused(kind: Any, one: Any, model: Any, classes: list[Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        kind(model, dict.fromkeys(classes, one), sessions)


@pytest.mark.once
def test_each_handler_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="a handler is a callable"):
        Consumer(KINDS.Message, {KINDS.Message: 5}, sessions)  # type: ignore[dict-item] # the point of this test
    with pytest.raises(ConfigurationError, match="is called as"):
        Consumer(KINDS.Message, {KINDS.Message: handler, KINDS.Text: lambda job: None}, sessions)  # type: ignore[dict-item] # the point of this test
    with pytest.raises(ConfigurationError, match="use AsyncConsumer"):
        Consumer(KINDS.Message, {KINDS.Message: handler, KINDS.Text: async_handler}, sessions)
    with pytest.raises(ConfigurationError, match="async def"):
        AsyncConsumer(KINDS.Message, {KINDS.Message: async_handler, KINDS.Text: handler}, async_sessions)  # type: ignore[dict-item] # the point of this test


@pytest.mark.once
def test_a_class_that_is_mapped_later_is_noticed(engine: sa.Engine) -> None:
    later = Models("update_status")
    later.Base.metadata.create_all(engine)
    consumer = Consumer(later.Message, {later.Email: handler, later.Text: handler}, sessionmaker(engine))
    assert consumer.drain() == 0
    type("Fax", (later.Message,), {"__mapper_args__": {"polymorphic_identity": "fax"}})
    with pytest.raises(ConfigurationError, match="no handler for Fax"):
        consumer.drain()


@pytest.mark.once
def test_a_queue_of_one_class(sync_leased: Bench) -> None:
    sync_leased.enqueue(2)
    assert Consumer(sync_leased.Job, {sync_leased.Job: handler}, sync_leased.sessions).drain() == 2
