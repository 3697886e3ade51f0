"""Types of the arguments of this package's functions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.orm import Session, scoped_session

from sqlaqueue._typing import AnySelect
from sqlaqueue.consumer.consumer import Consumer

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

    from sqlaqueue.consumer.async_consumer import AsyncConsumer

T = TypeVar("T")

AnySession = Session | scoped_session[Any]
Handler = Callable[[Any, T], object] | Mapping[Any, Callable[[Any, Any], object]] | Consumer[Any]
Jobs = type[T] | AnySelect
"""A queue class, or a select of its jobs."""

if TYPE_CHECKING:
    AnyAsyncSession = AsyncSession | async_scoped_session[Any]
    AsyncHandler = (
        Callable[[Any, T], Awaitable[object]]
        | Mapping[Any, Callable[[Any, Any], Awaitable[object]]]
        | AsyncConsumer[Any]
    )
