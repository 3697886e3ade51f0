"""Each test finds an empty database with the tables of ``queues``, and asks a dashboard by ``client_of``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from sqlalchemy.orm import sessionmaker

from sqlaqueue.web import Access, Dashboard
from tests.shared_database import engine, shared
from tests.web.models import Queues

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = ["engine", "shared"]

HERE = "http://localhost"


@pytest.fixture
def queues(engine: sa.Engine) -> Queues:
    queues = Queues()
    queues.metadata.create_all(engine)
    return queues


@pytest.fixture
def sessions(engine: sa.Engine) -> sessionmaker[Any]:
    return sessionmaker(engine)


def everything(_: Any) -> Access:
    return Access(read=True, act=True, user="ada")


def client(app: Any) -> httpx.AsyncClient:
    """Return a client that asks an ASGI application as a browser on this machine would."""
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(
        transport=transport, base_url=HERE, headers={"Sec-Fetch-Site": "same-origin", "Origin": HERE}
    )


@pytest.fixture
def client_of(queues: Queues, sessions: Any) -> Callable[..., httpx.AsyncClient]:
    """Return a client of a dashboard of ``queues``; the arguments are those of the dashboard."""

    def make(*models: Any, factory: Any = sessions, access: Any = everything, **options: Any) -> httpx.AsyncClient:
        return client(Dashboard(models or queues.all, factory, access=access, **options))

    return make
