"""One worker process: its Consumers, made or found, and how they serve side by side.

Each Consumer has a thread, all AsyncConsumers have one event loop in a thread of its own, and the main thread answers
signals.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue.cli.database import Database, engine_for, parse_url
from sqlaqueue.cli.errors import FailedError, InputError, first_line, told_apart
from sqlaqueue.cli.order import Order, begin_log
from sqlaqueue.cli.targets import Target, load, load_targets
from sqlaqueue.consumer.base import ConsumerBase, function_of
from sqlaqueue.consumer.signals import signal_handlers
from sqlaqueue.consumer.startup import check_ready
from sqlaqueue.consumer.sync import Consumer
from sqlaqueue.exc import SqlaqueueError
from sqlaqueue.log import fields, logger
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.spec import QueueSpec

if TYPE_CHECKING:
    from sqlaqueue.consumer.aio import AsyncConsumer

_YOUNG = 50_000
"""How many objects are made before the garbage collector looks at them: more than the jobs of a few batches have."""

_SWITCH = 0.001
"""Seconds for which a thread may go on, while another one that has its answer from the database waits to do so."""

_LOOK = 0.1
"""Seconds between looks at what signals and other threads have set."""


class Service:
    """The Consumers of this process.

    :param begun: called when they are about to serve.
    """

    def __init__(self, order: Order, begun: Callable[[], None]) -> None:
        self._order, self._begun = order, begun
        self._stopping = False
        self._errors: list[tuple[ConsumerBase, BaseException]] = []
        self._ended = 0
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Take on no more work, now or before any has begun; may be called from a signal handler."""
        # An Event could deadlock here: the handler may interrupt its wait().
        self._stopping = True

    def run(self) -> None:
        """Make the Consumers and serve, until a signal arrives or, when draining, nothing is due.

        :raises click.ClickException: when it cannot begin, or a Consumer ends with an error.
        """
        with signal_handlers.stop_on_signal(self.stop):
            consumers = make_consumers(self._order)
            begin_log(self._order.log_level)
            try:
                for consumer in consumers:
                    _check(consumer)
                self._begun()
                _collect_less_often()
                sys.setswitchinterval(_SWITCH)
                self._serve(consumers)
            finally:
                _close(consumers)
        if self._errors:
            _raise(*self._errors[0])
        if self._order.drain:
            extra = fields("drained", count=self._ended)
            logger.info("nothing is due; runs that ended: %d", self._ended, extra=extra)

    def _serve(self, consumers: Sequence[ConsumerBase]) -> None:
        while not self._stopping:
            before = self._ended
            self._serve_once(consumers)
            # What one queue's jobs have put into another one may have come after that one was empty.
            if not self._order.drain or self._errors or len(consumers) == 1 or self._ended == before:
                break

    def _serve_once(self, consumers: Sequence[ConsumerBase]) -> None:
        threads = [
            threading.Thread(target=self._work, args=(each,), name=f"sqlaqueue-{each.queue}", daemon=True)
            for each in consumers
            if isinstance(each, Consumer)
        ]
        others: list[Any] = [each for each in consumers if not isinstance(each, Consumer)]
        if others:
            threads.append(threading.Thread(target=self._loop, args=(others,), name="sqlaqueue-loop", daemon=True))
        for thread in threads:
            thread.start()
        while alive := [thread for thread in threads if thread.is_alive()]:
            if self._stopping or self._errors:
                # Again and again: one that has not begun yet has nothing to stop.
                for consumer in consumers:
                    consumer.stop()
            alive[0].join(_LOOK)

    def _work(self, consumer: Consumer[Any]) -> None:
        try:
            if self._order.drain:
                self._count(consumer.drain())
            else:
                consumer.run()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self._errors.append((consumer, error))

    def _loop(self, consumers: Sequence[AsyncConsumer[Any]]) -> None:
        try:
            asyncio.run(self._run_all(consumers))
        except BaseException as error:  # noqa: BLE001 - as above
            self._errors.append((consumers[0], error))

    def _count(self, ended: int) -> None:
        with self._lock:
            self._ended += ended

    async def _run_all(self, consumers: Sequence[AsyncConsumer[Any]]) -> None:
        await asyncio.gather(*map(self._run_one, consumers))
        for consumer in consumers:
            # Its connections end with the loop in which they were made.
            async with consumer.session_factory() as session:
                engine = session.bind
            if hasattr(engine, "dispose"):
                await engine.dispose()

    async def _run_one(self, consumer: AsyncConsumer[Any]) -> None:
        try:
            if self._order.drain:
                self._count(await consumer.drain())
            else:
                await consumer.run()
        except Exception as error:  # noqa: BLE001 - as above
            self._errors.append((consumer, error))


def _raise(consumer: ConsumerBase, error: BaseException) -> None:
    extra = fields("consumer_failed", queue=consumer.queue, error_kind=type(error).__name__)
    logger.debug("%r ended with an error", consumer, exc_info=error, extra=extra)
    with told_apart():
        if isinstance(error, SqlaqueueError | SQLAlchemyError):
            raise error
    raise FailedError(f"{consumer!r}: {type(error).__name__}: {first_line(error)}") from error


def _check(consumer: ConsumerBase) -> None:
    """Refuse a database that does not answer or lacks something."""

    def look(session: Session, spec: QueueSpec) -> None:
        connection = session.connection(bind_arguments={"mapper": spec.mapper})
        backend().check_dialect(connection.dialect, repr(consumer))
        check_ready(connection, spec)

    target = Target(consumer.queue, consumer.model, consumer)
    with Database(consumer.session_factory) as database, told_apart(target.spec):
        database.run(look, target.spec)


def _close(consumers: Sequence[ConsumerBase]) -> None:
    """Close the connections that nobody uses any more; those of the event loop have ended with it."""
    for consumer in consumers:
        session = consumer.session_factory()
        if isinstance(session, Session):
            with session:
                session.get_bind(sa.inspect(consumer.model)).engine.dispose()


# -- making them -------------------------------------------------------------------------------------------------


def make_consumers(order: Order) -> list[ConsumerBase]:
    """Return the Consumers that the targets are, or stand for.

    :raises InputError: when something is missing, or has no effect.
    """
    bound = [text.partition("=") for text in order.targets]
    loaded = [(target, handler) for text, _, handler in bound for target in load_targets([text])]
    targets = [target for target, _ in loaded]
    classes = [target for target in targets if target.consumer is None]
    texts = _handlers(order, loaded)
    _check_said(order, targets, classes)
    handlers = [load(text) for text in texts]
    made = iter(_for_classes(order, classes, handlers))
    consumers = [target.consumer or next(made) for target in targets]
    twice = next((each for each in consumers if consumers.count(each) > 1), None)
    if twice is not None:
        raise InputError(f"{twice!r} is named twice; raise its concurrency instead")
    return consumers


def _handlers(order: Order, loaded: Sequence[tuple[Target, str]]) -> list[str]:
    """Return what handles the jobs of each target that is a class: what it is bound to, or the next --handler."""
    classes = [(target, handler) for target, handler in loaded if target.consumer is None]
    brings = next((target.text for target, handler in loaded if target.consumer is not None and handler), None)
    if brings is not None:
        raise InputError(f"{brings}: a Consumer that you have made brings its handler; leave out the one here")
    unbound = [target.text for target, handler in classes if not handler]
    if unbound and not order.handlers:
        raise InputError(
            f"{unbound[0]}: which function handles its jobs? Write {unbound[0]}=module:function, or give "
            "--handler module:function"
        )
    # One that is in the settings gives way to what is written here.
    if classes and len(order.handlers) != len(unbound) and (unbound or "handler" in order.said):
        raise InputError(
            f"queue classes without a handler: {len(unbound)} ({', '.join(unbound) or 'none'}), --handler: "
            f"{len(order.handlers)}; give one for each, in the same order, or bind each as module:Class=module:function"
        )
    others = iter(order.handlers)
    return [handler or next(others) for _, handler in classes]


def _check_said(order: Order, targets: Sequence[Target], classes: Sequence[Target]) -> None:
    if not classes:
        if order.said:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in order.said)
            raise InputError(f"{options}: no effect on {targets[0].text}, a Consumer that you have made; say it there")
        return
    if order.url is None:
        raise InputError(
            f"{classes[0].text}: in which database? Give --url postgresql+psycopg://user:password@host/database, or "
            "set SQLAQUEUE_URL"
        )


def _for_classes(order: Order, classes: Sequence[Target], handlers: Sequence[Any]) -> list[ConsumerBase]:
    kinds = [inspect.iscoroutinefunction(function_of(handler)) for handler in handlers]
    factories: dict[bool, Any] = {}
    for is_async in set(kinds):
        # For each Consumer its handlers' and its own, and one for all of them to listen with.
        connections = 1 + kinds.count(is_async) * (1 + order.options.get("concurrency", 1))
        engine = engine_for(parse_url(order.url or ""), needs_async=is_async, connections=connections)
        factories[is_async] = _sessions(engine)
    made = []
    for target, handler, is_async in zip(classes, handlers, kinds, strict=True):
        with told_apart(target.spec):
            made.append(_class(is_async=is_async)(target.model, handler, factories[is_async], **order.options))
    return made


def _sessions(engine: Any) -> Any:
    if isinstance(engine, sa.Engine):
        return sessionmaker(engine)
    from sqlalchemy.ext.asyncio import async_sessionmaker  # noqa: PLC0415 - sync code does without greenlet

    return async_sessionmaker(engine)


def _class(*, is_async: bool) -> Any:
    if not is_async:
        return Consumer
    from sqlaqueue.consumer.aio import AsyncConsumer  # noqa: PLC0415 - as above

    return AsyncConsumer


def _collect_less_often() -> None:
    """Spare the garbage collector what is there now and stays, and most of the jobs that come and go.

    A job is an instance and what SQLAlchemy keeps of it: some ten objects, which are gone when it is settled. Looked at
    as often as is usual, most of them are looked at before, kept for older, and found again among all that stays.
    """
    gc.freeze()
    young, *older = gc.get_threshold()
    # 0 means that somebody has switched it off.
    if 0 < young < _YOUNG:
        gc.set_threshold(_YOUNG, *older)
