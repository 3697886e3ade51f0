"""Make the Consumers of a worker process from its options."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

from sqlaqueue.cli.processes.worker_options import WorkerOptions
from sqlaqueue.cli.shared.database import engine_for, parse_url
from sqlaqueue.cli.shared.errors import InputError, command_errors
from sqlaqueue.cli.shared.targets import Target, load, load_targets
from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.consumer.consumer import Consumer
from sqlaqueue.consumer.settings import function_of


def make_consumers(options: WorkerOptions) -> list[ConsumerBase]:
    """Return a Consumer for each target: the application's own, or a new one for a queue class.

    :raises InputError: if a handler or the database is missing, or an option has no effect.
    """
    pairs = [text.partition("=") for text in options.targets]
    loaded = [(target, handler) for text, _, handler in pairs for target in load_targets([text])]
    targets = [target for target, _ in loaded]
    classes = [target for target in targets if target.consumer is None]
    names = _handler_names(options, loaded)
    _check_options(options, targets, classes)
    handlers = [load(name) for name in names]
    made = iter(_consumers_of_classes(options, classes, handlers))
    consumers = [target.consumer or next(made) for target in targets]
    repeated = next((each for each in consumers if consumers.count(each) > 1), None)
    if repeated is not None:
        raise InputError(f"{repeated!r} is named twice; raise its concurrency instead")
    return consumers


def _handler_names(options: WorkerOptions, loaded: Sequence[tuple[Target, str]]) -> list[str]:
    """Return the handler of each queue class: the one in its target, or the next ``--handler``."""
    classes = [(target, handler) for target, handler in loaded if target.consumer is None]
    needless = next((target.text for target, handler in loaded if target.consumer is not None and handler), None)
    if needless is not None:
        raise InputError(f"{needless}: your Consumer has a handler already; remove the one given here")
    unbound = [target.text for target, handler in classes if not handler]
    if unbound and not options.handlers:
        raise InputError(
            f"{unbound[0]}: its handler is missing; write {unbound[0]}=module:function, or give "
            "--handler module:function"
        )
    # A handler from the settings is ignored if each class has one in its target.
    if classes and len(options.handlers) != len(unbound) and (unbound or "handler" in options.from_command_line):
        raise InputError(
            f"queue classes without a handler: {len(unbound)} ({', '.join(unbound) or 'none'}), --handler: "
            f"{len(options.handlers)}; give one --handler for each, in the same order, or write "
            "module:Class=module:function"
        )
    others = iter(options.handlers)
    return [handler or next(others) for _, handler in classes]


def _check_options(options: WorkerOptions, targets: Sequence[Target], classes: Sequence[Target]) -> None:
    if not classes:
        if options.from_command_line:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in options.from_command_line)
            raise InputError(f"{names}: no effect on {targets[0].text}, your own Consumer; set it there")
        return
    if options.url is None:
        raise InputError(
            f"{classes[0].text}: the database is missing; give --url "
            "postgresql+psycopg://user:password@host/database, or set SQLAQUEUE_URL"
        )


def _consumers_of_classes(
    options: WorkerOptions, classes: Sequence[Target], handlers: Sequence[Any]
) -> list[ConsumerBase]:
    kinds = [inspect.iscoroutinefunction(function_of(handler)) for handler in handlers]
    factories: dict[bool, Any] = {}
    for is_async in set(kinds):
        # For each Consumer one per handler call and one for maintenance; one listening connection for all of them.
        connections = 1 + kinds.count(is_async) * (1 + options.consumer_options.get("concurrency", 1))
        engine = engine_for(parse_url(options.url or ""), needs_async=is_async, connections=connections)
        factories[is_async] = _session_factory(engine)
    made = []
    for target, handler, is_async in zip(classes, handlers, kinds, strict=True):
        with command_errors(target.spec):
            kind = _consumer_class(is_async=is_async)
            made.append(kind(target.model, handler, factories[is_async], **options.consumer_options))
    return made


def _session_factory(engine: Any) -> Any:
    if isinstance(engine, sa.Engine):
        return sessionmaker(engine)
    from sqlalchemy.ext.asyncio import async_sessionmaker  # noqa: PLC0415 - needs greenlet, which sync code does not

    return async_sessionmaker(engine)


def _consumer_class(*, is_async: bool) -> Any:
    if not is_async:
        return Consumer
    from sqlaqueue.consumer.async_consumer import AsyncConsumer  # noqa: PLC0415 - as above

    return AsyncConsumer
