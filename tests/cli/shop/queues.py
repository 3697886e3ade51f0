"""Consumers of the application."""

from __future__ import annotations

import os

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from sqlaqueue import AsyncConsumer, Consumer
from tests.cli.shop.models import Email, Letter, Task
from tests.cli.shop.tasks import send, send_async

URL = os.environ.get("SHOP_URL", "postgresql+psycopg://nobody@nowhere.invalid/shop")

consumer = Consumer(Email, send, sessionmaker(create_engine(URL)), poll_interval=0.05)
async_consumer = AsyncConsumer(
    Letter,
    send_async,
    async_sessionmaker(create_async_engine(URL.replace("+psycopg:", "+asyncpg:"))),
    poll_interval=0.05,
)
both = [consumer, async_consumer]
too_many = Consumer(
    Task, send, sessionmaker(create_engine(URL, pool_size=1, max_overflow=0)), concurrency=3, poll_interval=0.05
)
too_few_connections = [*both, too_many]
nothing: list[Consumer[Task]] = []
mixed = [consumer, "letter"]


def make() -> list[object]:
    return [Consumer(Task, send, sessionmaker(create_engine(URL)), poll_interval=0.05)]


def make_for(name: str) -> Consumer[Task]:
    raise NotImplementedError(name)


async def make_async() -> object:
    return async_consumer


def make_badly() -> object:
    return 1 // 0
