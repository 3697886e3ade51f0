"""The former name of :mod:`tests.consumer.handler_io`, until its importers outside of this folder have the new one."""

from __future__ import annotations

from tests.consumer.handler_io import DEADLINE, AsyncHandlerIO, Handler, HandlerIO, for_async, for_sync

__all__ = ["DEADLINE", "AsyncHandlerIO", "Handler", "HandlerIO", "for_async", "for_sync"]
