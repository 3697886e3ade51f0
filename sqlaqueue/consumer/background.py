"""Consumers in the background: ``with Consumer(...)`` and ``async with AsyncConsumer(...)``.

They are for a host program such as a web server, which handles signals itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextvars import copy_context
from types import TracebackType
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.sessions import check_shared_pool
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.log import fields, logger

START_TIMEOUT = 10.0
"""Seconds to wait for the first claim. A host must be able to start without its database."""

_pools: dict[ConsumerBase, sa.Engine] = {}
"""The engines of the Consumers that run in the background of this process."""
_pools_lock = threading.Lock()


class _Background:
    """One run in the background.

    :param on_start_known: called when the first claim has succeeded, the run has failed, or the claim is tried again.
    """

    def __init__(self, on_start_known: Callable[[], object]) -> None:
        self.on_start_known = on_start_known
        self.entered, self.stopping = False, False
        self.worker: Any = None
        """The thread or task of the run."""


class _InBackground(ConsumerBase):
    """What both kinds of Consumers share."""

    _background: _Background | None = None
    _error: BaseException | None = None

    @property
    def running(self) -> bool:
        """Whether it serves its queue, in ``run()``, ``drain()`` or a ``with`` block.

        If it is False within the block, the Consumer has ended; :attr:`error` contains the reason.
        """
        return self._context is not None

    @property
    def error(self) -> BaseException | None:
        """The error that ended the Consumer of a ``with`` block; None if there is none."""
        return self._error

    def _begin(self, context: ConsumerContext) -> None:
        background = self._background
        if background is not None:
            context.handles_signals, context.on_start_known = False, background.on_start_known
        super()._begin(context)

    def _engine_of(self, session: Session) -> sa.Engine:
        engine = super()._engine_of(session)
        if self._background is not None:
            with _pools_lock:
                sharing = [*(other for other, used in _pools.items() if used is engine), self]
                check_shared_pool(engine, sharing, "the Consumers of this process")
                _pools[self] = engine
        return engine

    def _new_background(self, on_start_known: Callable[[], object]) -> _Background:
        if self._background is not None or self._context is not None:
            msg = f"{self!r} is running already; make another Consumer, or raise its concurrency"
            raise ConfigurationError(msg)
        background = self._background = _Background(on_start_known)
        self._error = None
        # A stop before the run begins would have no effect.
        self.stop_requested = lambda: background.stopping
        return background

    def _enter(self, background: _Background) -> None:
        """Begin the block, or raise the error that ended the Consumer."""
        # Set first: an error that occurs now is either raised here, or logged.
        background.entered = True
        if self._error is not None:
            raise self._error

    def _stop_background(self) -> _Background:
        background = self._background
        if background is None:
            msg = f"{self!r} has not been entered; use it in a `with` statement"
            raise ConfigurationError(msg)
        background.stopping = True
        self.stop()
        return background

    def _failed_in_background(self, background: _Background, error: BaseException) -> None:
        self._error = error
        if background.entered:
            text = "%r raised %s: %s; it no longer serves its queue, and the program continues"
            kind = type(error).__name__
            extra = fields("consumer_failed", queue=self.queue, worker=self._settings.worker(), error_kind=kind)
            logger.error(text, self, kind, error, exc_info=error, extra=extra)

    def _ended_in_background(self, background: _Background) -> None:
        with _pools_lock:
            _pools.pop(self, None)
        background.on_start_known()

    def _left_background(self) -> None:
        self._background = self.stop_requested = None


class RunsInThread(_InBackground):
    """The ``with`` of a Consumer."""

    def __enter__(self) -> Self:
        """Serve the queue in a background thread until the block ends; signals are left to the host.

        :raises ConfigurationError: if the pool is too small for the Consumers of this process that share it, or the
            database lacks something. If the database does not answer within ten seconds, the block begins.
        """
        known = threading.Event()
        background = self._new_background(known.set)
        thread = threading.Thread(
            # Handlers see the variables of the program, as they do in a task.
            target=copy_context().run,
            args=(self._run_in_background, background),
            name=f"sqlaqueue-{self.queue}",
            daemon=True,
        )
        background.worker = thread
        thread.start()
        try:
            known.wait(START_TIMEOUT)
            self._enter(background)
        except BaseException:
            self._end_thread()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Stop the Consumer, wait for its end, and raise the error that ended it, unless the block raised one."""
        self._end_thread()
        if error is None and self._error is not None:
            raise self._error

    def _end_thread(self) -> None:
        background = self._stop_background()
        try:
            background.worker.join()
        finally:
            self._left_background()

    def _run_in_background(self, background: _Background) -> None:
        try:
            self._serve(draining=False)
        except BaseException as error:  # noqa: BLE001 - it is raised in the host's thread
            self._failed_in_background(background, error)
        finally:
            self._ended_in_background(background)

    def _serve(self, *, draining: bool) -> int:
        raise NotImplementedError


class RunsInTask(_InBackground):
    """The ``async with`` of an AsyncConsumer."""

    async def __aenter__(self) -> Self:
        """Serve the queue in a task until the block ends; signals are left to the host.

        :raises ConfigurationError: if the pool is too small for the Consumers of this process that share it, or the
            database lacks something. If the database does not answer within ten seconds, the block begins.
        """
        known = asyncio.Event()
        background = self._new_background(known.set)
        background.worker = asyncio.create_task(self._run_in_background(background), name=f"sqlaqueue-{self.queue}")
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(START_TIMEOUT):
                    await known.wait()
            self._enter(background)
        except BaseException:
            await self._end_task()
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Stop the Consumer, wait for its end, and raise the error that ended it, unless the block raised one.

        Cancelling this cancels the handlers, whose jobs are released.
        """
        await self._end_task()
        if error is None and self._error is not None:
            raise self._error

    async def _end_task(self) -> None:
        background = self._stop_background()
        try:
            await asyncio.wait([background.worker])
        except asyncio.CancelledError:
            background.worker.cancel()
            await asyncio.wait([background.worker])
            raise
        finally:
            self._left_background()

    async def _run_in_background(self, background: _Background) -> None:
        try:
            await self._serve(draining=False)
        except asyncio.CancelledError as error:
            if not background.stopping:
                self._failed_in_background(background, error)
            raise
        except Exception as error:  # noqa: BLE001 - it is raised in the host's task
            self._failed_in_background(background, error)
        finally:
            self._ended_in_background(background)

    async def _serve(self, *, draining: bool) -> int:
        raise NotImplementedError
