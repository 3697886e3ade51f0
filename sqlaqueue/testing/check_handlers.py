"""Check that each queue of an application has a handler that can run its jobs: :func:`check_handlers`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_type_hints

import sqlalchemy as sa
from sqlalchemy.orm import Session, registry

from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.consumer.settings import check_handler, function_of, is_coroutine_function
from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.mapping.mixin import queue_spec


def check_handlers(base: Any, handlers: Mapping[type[Any], Any] | Iterable[Any]) -> None:
    """Check that each queue mapped by ``base`` has a handler, and that each handler can be called with its jobs.

    A handler takes a session and a job, or a list of jobs if its Consumer has ``batch=True``. Annotations are
    compared: the job's with the queue class, and the session's with the kind of the function, as a coroutine function
    is called with an AsyncSession.

    :param base: the declarative base of the application, or its ``registry``.
    :param handlers: the handler of each queue class, or the application's Consumers.
    :raises AssertionError: with all queues that have no handler, and all handlers that do not fit.
    :raises StatementError: if ``base`` or ``handlers`` is something else.
    """
    mapped = base if isinstance(base, registry) else getattr(base, "registry", None)
    if not isinstance(mapped, registry):
        msg = f"check_handlers({base!r}, ...): give the declarative base of the models, or their registry"
        raise StatementError(msg)
    mapped.configure()
    found = list(_pairs(handlers))
    problems = [problem for model, handler, batch in found for problem in _problems(model, handler, batch=batch)]
    served = [model for model, *_ in found]
    for mapper in mapped.mappers:
        spec = queue_spec(mapper.class_)
        if spec is None or (mapper.polymorphic_on is not None and mapper.polymorphic_identity is None):
            continue
        if not any(issubclass(mapper.class_, model) for model in served):
            problems.append(f"{mapper.class_.__name__}: there is no handler for its jobs")
    if problems:
        raise AssertionError("\n".join(sorted(problems)))


def _pairs(handlers: Any) -> Iterable[tuple[type[Any], Any, bool]]:
    """Return each class with its handler, and whether that takes a list of jobs."""
    if isinstance(handlers, Mapping):
        for model, handler in handlers.items():
            if not isinstance(model, type) or queue_spec(model) is None:
                msg = f"check_handlers(..., {{{model!r}: ...}}): give queue classes as keys"
                raise StatementError(msg)
            yield model, handler, False
        return
    for consumer in handlers if isinstance(handlers, Iterable) else [handlers]:
        if not isinstance(consumer, ConsumerBase):
            msg = f"check_handlers(..., [{consumer!r}]): give a dict of handlers by class, or Consumers"
            raise StatementError(msg)
        settings = consumer.settings
        if settings.dispatch is None:
            yield settings.selection.entity, consumer.handler, settings.batch
        else:
            for model, handler in settings.dispatch.by_class.items():
                yield model, handler, settings.batch


def _problems(model: type[Any], handler: Any, *, batch: bool) -> Sequence[str]:
    try:
        check_handler(handler, model.__name__, batch=batch)
    except ConfigurationError as error:
        return [str(error)]
    name = getattr(handler, "__name__", repr(handler))
    session, job = _annotations(handler)
    problems = []
    is_async = is_coroutine_function(handler)
    if isinstance(session, type) and not _fits_session(session, is_async=is_async):
        kind, right = ("a coroutine function", "AsyncSession") if is_async else ("a function", "Session")
        problems.append(
            f"{model.__name__}: {name} is {kind}, so its first argument is of class {right} and not {session.__name__}"
        )
    if not batch and isinstance(job, type) and _is_mapped(job) and not issubclass(model, job):
        problems.append(f"{model.__name__}: {name} takes jobs of class {job.__name__}")
    return problems


def _annotations(handler: Callable[..., Any]) -> tuple[Any, Any]:
    """Return what the first two parameters are annotated with; None for what cannot be told."""
    try:
        hints = get_type_hints(function_of(handler))
        # Those of a partial are the ones that are still to be given.
        names = list(inspect.signature(handler).parameters)
    except (NameError, TypeError, ValueError, AttributeError):
        return None, None
    known = [hints.get(name) for name in names[:2]]
    return (known[0], known[1]) if len(known) > 1 else (None, None)


def _fits_session(annotated: type[Any], *, is_async: bool) -> bool:
    if _is_mapped(annotated):
        return False
    if issubclass(annotated, Session):
        return not is_async
    is_of_async = any(cls.__module__.startswith("sqlalchemy.ext.asyncio") for cls in annotated.__mro__)
    return is_async or not is_of_async


def _is_mapped(cls: type[Any]) -> bool:
    return sa.inspect(cls, raiseerr=False) is not None
