"""Job queues for SQLAlchemy: a job is a row of your own model.

Inherit :class:`QueueMixin` and choose a strategy in the :class:`QueueConfig`. ``session.execute(claim(Model, n))`` then
returns instances that no other worker gets, and a :class:`Consumer` runs a handler for each job.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sqlaqueue import exc
from sqlaqueue._version import __version__
from sqlaqueue.exc import (
    Cancel,
    Fail,
    JobExists,
    JobFailed,
    JobResult,
    LeaseLost,
    Retry,
    Snooze,
    SqlaqueueError,
    Throttle,
    WaitTimeout,
)
from sqlaqueue.mapping.columns import queue_column
from sqlaqueue.mapping.mixin import QueueMixin
from sqlaqueue.mapping.waits import configure_waits as _configure_waits  # noqa: F401 - its listeners
from sqlaqueue.preparation import prepare
from sqlaqueue.queue.config import QueueConfig
from sqlaqueue.queue.options import ConcurrencyLimit, FairShare, InOrder, RateLimit, States, Unique, WaitFor
from sqlaqueue.queue.retry_policies import Constant, Exponential, Linear, RetryPolicy
from sqlaqueue.schedules.schedule import Schedule, Tick
from sqlaqueue.statements.claim import claim
from sqlaqueue.statements.verbs import (
    cancel,
    complete,
    consumers,
    extend,
    fail,
    is_paused,
    pause,
    purge,
    reconcile,
    release,
    requeue,
    rescue,
    resume,
    retry,
)
from sqlaqueue.unique.enqueue import Enqueued, enqueue

if TYPE_CHECKING:
    from sqlaqueue.async_scheduler import AsyncScheduler
    from sqlaqueue.consumer.async_consumer import AsyncConsumer
    from sqlaqueue.consumer.consumer import Consumer
    from sqlaqueue.consumer.core.events import JobEvent
    from sqlaqueue.copy.copy_in import async_copy_in, copy_in
    from sqlaqueue.functions import FunctionMixin
    from sqlaqueue.scheduler import Scheduler
    from sqlaqueue.unique.enqueue import async_enqueue
    from sqlaqueue.waiting.async_wait import async_wait, async_wait_all
    from sqlaqueue.waiting.wait import wait, wait_all

__all__ = [
    "AsyncConsumer",
    "AsyncScheduler",
    "Cancel",
    "ConcurrencyLimit",
    "Constant",
    "Consumer",
    "Enqueued",
    "Exponential",
    "Fail",
    "FairShare",
    "FunctionMixin",
    "InOrder",
    "JobEvent",
    "JobExists",
    "JobFailed",
    "JobResult",
    "LeaseLost",
    "Linear",
    "QueueConfig",
    "QueueMixin",
    "RateLimit",
    "Retry",
    "RetryPolicy",
    "Schedule",
    "Scheduler",
    "Snooze",
    "SqlaqueueError",
    "States",
    "Throttle",
    "Tick",
    "Unique",
    "WaitFor",
    "WaitTimeout",
    "__version__",
    "async_copy_in",
    "async_enqueue",
    "async_wait",
    "async_wait_all",
    "cancel",
    "claim",
    "complete",
    "consumers",
    "copy_in",
    "enqueue",
    "exc",
    "extend",
    "fail",
    "is_paused",
    "pause",
    "prepare",
    "purge",
    "queue_column",
    "reconcile",
    "release",
    "requeue",
    "rescue",
    "resume",
    "retry",
    "wait",
    "wait_all",
]


# Loaded when first used: a program that only enqueues does not need the Consumer, which is half of the package.
_LAZY = {
    "Consumer": "sqlaqueue.consumer.consumer",
    "FunctionMixin": "sqlaqueue.functions",
    "JobEvent": "sqlaqueue.consumer.core.events",
    "Scheduler": "sqlaqueue.scheduler",
    "copy_in": "sqlaqueue.copy.copy_in",
    "wait": "sqlaqueue.waiting.wait",
    "wait_all": "sqlaqueue.waiting.wait",
}
# SQLAlchemy's asyncio extension needs greenlet; sync code must be able to import this package without it.
_ASYNC = {
    "AsyncConsumer": "sqlaqueue.consumer.async_consumer",
    "AsyncScheduler": "sqlaqueue.async_scheduler",
    "async_copy_in": "sqlaqueue.copy.copy_in",
    "async_enqueue": "sqlaqueue.unique.enqueue",
    "async_wait": "sqlaqueue.waiting.async_wait",
    "async_wait_all": "sqlaqueue.waiting.async_wait",
}


def _remove_async(names: list[str]) -> None:
    """Remove names that ``from sqlaqueue import *`` cannot import."""
    names[:] = [name for name in names if name not in _ASYNC]


if find_spec("greenlet") is None:
    _remove_async(__all__)


def __getattr__(name: str) -> Any:
    if name in _ASYNC and find_spec("greenlet") is None:
        msg = f"sqlaqueue.{name} needs greenlet, as all async sessions do: pip install 'sqlaqueue[async]'"
        raise ImportError(msg, name="greenlet")
    module = _LAZY.get(name) or _ASYNC.get(name)
    if module is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    found = globals()[name] = getattr(import_module(module), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
