"""Each engine carries its strategies, and the page about engines says what it cannot."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

import sqlaqueue
from sqlaqueue.testing import StrategyConformance
from sqlaqueue.testing.conformance.engines import ENGINES, EngineUnderTest
from tests.conformance.__main__ import PAGES, page
from tests.mariadb.server import MariaDBServer
from tests.strategies.conftest import class_engine as engine

__all__ = ["engine"]


class TestUpdateStatusOnPostgreSQL(StrategyConformance):
    strategy = "update_status"


class TestBatchSelectOnPostgreSQL(StrategyConformance):
    strategy = "batch_select"


class TestDeleteReturningOnPostgreSQL(StrategyConformance):
    strategy = "delete_returning"


class TestRowsThatAreTheirOwnMessageOnPostgreSQL(StrategyConformance):
    strategy = "delete_returning"
    columns = {"status": None}  # noqa: RUF012 - declared by the base class


@pytest.mark.once
class TestUpdateStatusOnSQLite(StrategyConformance):
    """The strategy with leases only; ``tests/sqlite`` tests that the others are refused."""

    strategy = "update_status"

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[sa.Engine]:
        """Return an engine on a file that the tests of one class share."""
        engine = sqlaqueue.prepare(
            sa.create_engine(f"sqlite:///{tmp_path_factory.mktemp('conformance') / 'jobs.db'}", pool_size=12)
        )
        event.listen(engine, "connect", _do_not_sync)
        yield engine
        engine.dispose()


def _do_not_sync(connection: Any, _: object) -> None:
    # No test of the suite ends the machine.
    connection.execute("PRAGMA synchronous = OFF")


class OnMariaDB(StrategyConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, mariadb: MariaDBServer) -> Iterator[sa.Engine]:
        """Return an engine on a database that the tests of one class share."""
        with mariadb.database() as name:
            engine = sqlaqueue.prepare(sa.create_engine(mariadb.url(name), pool_size=12))
            yield engine
            engine.dispose()


@pytest.mark.once
class TestUpdateStatusOnMariaDB(OnMariaDB):
    strategy = "update_status"


@pytest.mark.once
class TestBatchSelectOnMariaDB(OnMariaDB):
    strategy = "batch_select"


@pytest.mark.once
class TestRowsThatAreTheirOwnMessageOnMariaDB(OnMariaDB):
    strategy = "delete_returning"
    columns = {"status": None}  # noqa: RUF012 - declared by the base class


# -- the page ----------------------------------------------------------------------------------------------------------


@pytest.mark.once
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_tables_of_the_pages_are_up_to_date(path: Path) -> None:
    assert path.read_text() == page(path), "run python -m tests.conformance --write"


@pytest.mark.once
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.dialect)
def test_each_reason_is_that_of_a_test(engine: EngineUnderTest) -> None:
    for name in engine.reasons:
        test, _, value = name.partition("[")
        function = getattr(StrategyConformance, test)
        if value:
            marks = [mark for mark in function.pytestmark if mark.name == "parametrize"]
            assert any(value.removesuffix("]") in mark.args[1] for mark in marks), inspect.getsource(function)
