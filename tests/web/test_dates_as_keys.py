"""Keys that are dates: infinity and years before Christ, which Python does not have."""

from __future__ import annotations

import logging
import re
from datetime import date
from typing import Any
from urllib.parse import unquote

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from sqlaqueue import QueueConfig, QueueMixin
from sqlaqueue.web import Dashboard
from tests.models import shared
from tests.servers import Database
from tests.web.conftest import client, everything

KEYS = ["infinity", "-infinity", "0044-03-15 BC", "12000-01-01"]


@shared
def make_daily(strategy: str) -> Any:
    class Base(DeclarativeBase):
        pass

    class Daily(QueueMixin, Base):
        __tablename__ = "daily"
        __queue__ = QueueConfig(strategy=strategy)
        day: Mapped[date] = mapped_column(primary_key=True)
        note: Mapped[str | None]

    return Daily


@pytest.fixture(params=["update_status", "batch_select", "delete_returning"])
def daily(request: pytest.FixtureRequest, engine: sa.Engine) -> Any:
    model = make_daily(request.param)
    model.metadata.create_all(engine)
    with engine.begin() as connection:
        for key in (*KEYS, "2031-05-06"):
            connection.execute(sa.text("INSERT INTO daily (day) VALUES (CAST(:key AS date))"), {"key": key})
    return model


@pytest.mark.each_value
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_lists_show_them_and_no_page_fails(
    daily: Any, shared: Database, driver: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine: Any
    if driver == "psycopg":
        engine = sa.create_engine(shared.url("psycopg"), poolclass=sa.NullPool)
        factory: Any = sessionmaker(engine)
    else:
        engine = create_async_engine(shared.url("asyncpg"), poolclass=sa.NullPool)
        factory = async_sessionmaker(engine)
    async with client(Dashboard([daily], factory, access=everything)) as browser:
        for query in ("", "?sort=day", "?sort=-day", "?state=pending"):
            response = await browser.get(f"/queues/daily/jobs{query}")
            assert response.status_code == 200
            assert [key for key in (*KEYS, "2031-05-06") if key not in response.text] == []
        for path in ("/", "/queues/daily", "/queues/daily/claim", "/schedules"):
            assert (await browser.get(path)).status_code == 200
        for key in KEYS:
            for page in ("job", "edit", "confirm"):
                response = await browser.get(f"/queues/daily/{page}", params={"key": key, "action": "cancel"})
                assert response.status_code == 400
            for action in ("cancel", "requeue", "purge", "edit"):
                assert (await browser.post(f"/queues/daily/actions/{action}", data={"key": key})).status_code == 400
    if driver == "asyncpg":
        await engine.dispose()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_an_action_on_all_jobs_leaves_them_alone(daily: Any, engine: sa.Engine) -> None:
    async with client(Dashboard([daily], sessionmaker(engine), access=everything)) as browser:
        page = await browser.get("/queues/daily/confirm", params={"all": "1", "action": "cancel", "state": "pending"})
        assert page.status_code == 200
        assert "2031-05-06" in page.text
        form = dict(re.findall(r'name="([^"]+)" value="([^"]*)"', page.text))
        answer = await browser.post("/queues/daily/actions/cancel", data=form)
        assert answer.status_code == 303
        assert "cancelled:1" in unquote(answer.headers["location"])
        assert "unchanged" not in answer.headers["location"]
        left = await browser.get("/queues/daily/jobs", params={"state": "pending"})
    assert [key for key in KEYS if key not in left.text] == []
    assert "2031-05-06" not in left.text
