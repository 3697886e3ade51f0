"""Functions as jobs: the rows of a :class:`FunctionMixin` are calls, with the names of functions and parameters."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeAlias, TypeVar, overload

import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.orm.attributes import set_attribute

from sqlaqueue.exc import ConfigurationError, Fail, HandlerMisuseError, UnknownFunction, WrongArguments
from sqlaqueue.mapping.mixin import QueueMixin, queue_spec, spec_of
from sqlaqueue.queue.retry_policies import Delay, seconds
from sqlaqueue.sessions import article, async_class
from sqlaqueue.sql.types import DOCUMENT, not_in_document
from sqlaqueue.statements.verbs import delayed, storable
from sqlaqueue.texts import did_you_mean

if TYPE_CHECKING:
    # It needs greenlet, which sync code may lack.
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

    from sqlaqueue._typing import Role

    AnySession: TypeAlias = Session | scoped_session[Any] | AsyncSession | async_scoped_session[Any]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
J = TypeVar("J", bound="FunctionMixin")

_TYPES: dict[str, Any] = {"function": sa.Text(), "arguments": DOCUMENT, "result": DOCUMENT}


class FunctionMixin(QueueMixin):
    """Mixin that makes a mapped class a queue whose jobs are calls of functions.

    ::

        class Call(FunctionMixin, Base):
            __tablename__ = "call"

        @Call.task(name="send_report")
        def send_report(session: Session, to: str, pages: int = 1) -> None:
            print("a report of", pages, "pages for", to)

        Base.metadata.create_all(engine)
        send_report.enqueue(session, "ada@example.com", pages=3)
        session.commit()
        Consumer(Call, Call.run, sessions).run()

    It adds three columns to those of :class:`QueueMixin`: ``function`` is the name, ``arguments`` a JSON object by the
    names of the parameters, without the session, and ``result`` what the function has returned, as JSON; NULL for None.
    It adds a generated key ``id`` as well if the class has no primary key.
    """

    __functions__: ClassVar[dict[str, Task[Any, Any, Any, Any]]] = {}
    __returned__: ClassVar[str] = "result"

    if TYPE_CHECKING:
        id: Role[Any]
        function: Role[str]
        arguments: Role[dict[str, Any]]
        result: Role[Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give each queue functions of its own, which its subclasses share."""
        if queue_spec(cls) is None:
            cls.__functions__ = {}
        super().__init_subclass__(**kwargs)

    @classmethod
    def __table_cls__(cls, name: str, metadata: sa.MetaData, *items: Any, **options: Any) -> Any:
        """Create the table of a declarative class with the columns of a call."""
        if queue_spec(cls) is None:
            columns = {item.key for item in items if isinstance(item, sa.Column)}
            absent = [each for each in _TYPES if each not in columns and not hasattr(cls, each)]
            added: list[Any] = [sa.Column(each, _TYPES[each], nullable=each == "result") for each in absent]
            is_key = (getattr(item, "primary_key", isinstance(item, sa.PrimaryKeyConstraint)) for item in items)
            if "id" not in columns and not any(is_key):
                added.insert(0, sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True))
            items = (*added, *items)
        return super().__table_cls__(name, metadata, *items, **options)

    @overload
    @classmethod
    def task(cls, function: Callable[Concatenate[S, P], R], /) -> Task[S, P, R, Self]: ...
    @overload
    @classmethod
    def task(
        cls, /, *, name: str | None = None, max_attempts: int | None = None
    ) -> Callable[[Callable[Concatenate[S, P], R]], Task[S, P, R, Self]]: ...
    @classmethod
    def task(cls, function: Any = None, /, *, name: str | None = None, max_attempts: int | None = None) -> Any:
        """Register a function, whose first parameter is the session: a decorator, with or without options.

        :param name: its name in the rows; by default its module and qualified name.
        :param max_attempts: the limit of attempts of its calls; None for that of the queue.
        :raises ConfigurationError: if the name is taken or missing, there is no session, or an option is wrong.
        """
        if function is None:
            return lambda given: Task(cls, given, name, max_attempts)
        return Task(cls, function, name, max_attempts)

    @classmethod
    def run(cls, session: Session, job: Any) -> None:
        """Call the function of a job: the handler for ``Consumer(Call, Call.run, sessions)``."""
        task, bound = cls._call_of(session, job, is_async=False)
        task.keep_result(job, task.function(*bound.args, **bound.kwargs))

    @classmethod
    async def async_run(cls, session: AsyncSession, job: Any) -> None:
        """Call the coroutine function of a job: for ``AsyncConsumer(Call, Call.async_run, async_sessions)``."""
        task, bound = cls._call_of(session, job, is_async=True)
        task.keep_result(job, await task.function(*bound.args, **bound.kwargs))

    @classmethod
    def _call_of(cls, session: Any, job: Any, *, is_async: bool) -> tuple[Task[Any, Any, Any, Any], Any]:
        model = cls.__name__
        if not isinstance(job, cls):
            msg = f"{model}.run is called with one {model}, not with {article(job)}: leave out batch=True"
            raise HandlerMisuseError(msg)
        task = cls.__functions__.get(job.function)
        if task is None:
            near = did_you_mean(job.function, cls.__functions__)
            msg = (
                f"{model} has no function {job.function!r}: import its module in the worker, and requeue the job{near}"
            )
            raise UnknownFunction(msg)
        if task.is_async != is_async:
            kind, fix = ("a", "AsyncConsumer({0}, {0}.async_run") if task.is_async else ("no", "Consumer({0}, {0}.run")
            msg = f"{task.name} is {kind} coroutine function; run it by {fix.format(model)}, ...), in another queue"
            raise HandlerMisuseError(msg)
        return task, task.bound_to(session, job)


class Task(Generic[S, P, R, J]):
    """A registered function, as ``@Call.task`` returns it. A call of it calls the function, and enqueues nothing."""

    def __init__(self, model: type[J], function: Any, name: str | None, max_attempts: int | None) -> None:
        what, mapper = f"@{model.__name__}.task", spec_of(model).mapper
        if lacking := [name for name in _TYPES if not mapper.has_property(name)]:
            msg = f"{model.__name__} maps a Table without {' and '.join(lacking)}; map its columns to these attributes"
            raise ConfigurationError(msg)
        if not inspect.isfunction(function):
            msg = f"{what}({function!r}): decorate a function; give its name by {what}(name=...)"
            raise ConfigurationError(msg)
        update_wrapper(self, function)
        given: object = f"{function.__module__}.{function.__qualname__}" if name is None else name
        if not isinstance(given, str) or not given or given != storable(given) or (name is None and "<" in given):
            msg = f"{what}: {function!r} cannot be found again by the name {given!r}; give one by {what}(name=...)"
            raise ConfigurationError(msg)
        self.name, self.signature = given, inspect.signature(function)
        first = next(iter(self.signature.parameters.values()), None)
        if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
            msg = f"{what}: {self.name}{self.signature} takes no session; make it the first parameter"
            raise ConfigurationError(msg)
        self.model, self.function, self._session = model, function, first.name
        self.is_async = inspect.iscoroutinefunction(function)
        self._values = self._read(what, max_attempts=max_attempts)
        other = model.__functions__.setdefault(self.name, self)
        if other is not self:
            msg = f"{what}: {other.function.__code__} and {function.__code__} are both {self.name!r}; give one a name="
            raise ConfigurationError(msg)

    if TYPE_CHECKING:

        def __call__(self, session: S, /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    else:

        def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
            return self.function(*args, **kwargs)

    def options(self, *, delay: Delay | None = None, priority: int | None = None) -> Self:
        """Return the function with options for the calls that it enqueues.

        :param delay: seconds or :class:`~datetime.timedelta` after the INSERT, before which a call is not due.
        :param priority: calls with lower values run first.
        """
        task = copy(self)
        task._values = self._values | self._read(f"{self.name}.options", delay=delay, priority=priority)  # noqa: SLF001 - its own copy
        return task

    def _read(self, what: str, **given: Any) -> dict[str, Any]:
        attributes, values = spec_of(self.model).attributes, dict[str, Any]()
        for option, value in given.items():
            role, lowest = "run_at" if option == "delay" else option, 1 if option == "max_attempts" else -(2**15)
            if value is not None and role not in attributes:
                msg = f"{what}({option}=...): the queue {self.model.__name__} has no {role}; leave the option out"
                raise ConfigurationError(msg)
            good = type(value) is int and value in range(lowest, 2**15)
            if not (good or value is None or option == "delay"):
                msg = f"{what}({option}={value!r}): give an integer from {lowest} to 32767"
                raise ConfigurationError(msg)
            if value is not None:
                values[attributes[role]] = delayed(seconds(value, f"{what}(delay=...)")) if option == "delay" else value
        return values

    def enqueue(self, session: AnySession, /, *args: P.args, **kwargs: P.kwargs) -> J:
        """Add a call to the session's transaction, and return it; nothing is awaited, in an AsyncSession either.

        :raises WrongArguments: if the function cannot be called so, or JSON cannot hold an argument.
        """
        what = f"{self.name}.enqueue"
        if not isinstance(
            session, (Session, scoped_session, *map(async_class, ("AsyncSession", "async_scoped_session")))
        ):
            msg = f"{what}(): the first argument is a session, not {article(session)}"
            raise ConfigurationError(msg)
        arguments = self._bind(what, session, *args, **kwargs).arguments
        del arguments[self._session]
        for name, value in arguments.items():
            if wrong := not_in_document(value, f"the argument {name!r}"):
                msg = f"{what}(): {wrong}; give numbers, texts, lists or dicts, and the key of a row for the row"
                raise WrongArguments(msg)
        job = self.model()
        for attribute, value in {"function": self.name, "arguments": dict(arguments), **self._values}.items():
            set_attribute(job, attribute, value)  # a plain one is refused by an SQLModel, which has no such field
        session.add(job)
        return job

    def _bind(self, what: str, /, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
        try:
            return self.signature.bind(*args, **kwargs)
        except TypeError as error:
            msg = f"{what}(): {error}; the function is {self.name}{self.signature}"
            raise WrongArguments(msg) from None

    def bound_to(self, session: Any, job: Any) -> inspect.BoundArguments:
        """Return the arguments of a call; refuse those that the function does not take, as it may have changed."""
        stored = {**job.arguments, self._session: session}
        if unknown := stored.keys() - self.signature.parameters.keys():
            msg = f"{self.name}{self.signature} has no parameter {min(unknown)!r}, which this call has; add it"
            raise WrongArguments(msg)
        ordered = OrderedDict((name, stored[name]) for name in self.signature.parameters if name in stored)
        bound = inspect.BoundArguments(self.signature, ordered)
        return self._bind(self.name, *bound.args, **bound.kwargs)

    def keep_result(self, job: Any, value: Any) -> None:
        """Store what the function has returned in the row, which is written with the end of the job."""
        if wrong := not_in_document(value, "what it has returned"):
            msg = f"{self.name}: {wrong}; return numbers, texts, lists, dicts or None"
            raise Fail(msg, kind="result_not_json")
        if value is not None or job.result is not None:
            set_attribute(job, "result", value)
