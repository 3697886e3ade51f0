"""The ledger of strategies that hold a transaction is written beside it, and must not tie two locks together."""

from __future__ import annotations

import threading

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from sqlaqueue.serving import runs
from sqlaqueue.serving.patience import Patience, _Statement
from tests.consumer.bench import Bench, wait_until
from tests.consumer.conftest import Supply


@pytest.fixture
def held(supply: Supply, colour: str) -> Bench:
    """The empty queue of a strategy that holds a transaction."""
    return supply.take("batch_select", colour)


def test_whoever_locks_both_tables_is_let_through(held: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would wait for the Consumer's jobs, and the Consumer for its ledger, and no server would see it."""
    monkeypatch.setattr(runs, "LEDGER_PATIENCE", 0.2)
    held.enqueue(3)
    table = held.Job.__table__.name
    waits = """
        SELECT count(*) FROM pg_stat_activity
        WHERE wait_event_type = 'Lock' AND query LIKE '%INSERT INTO sqlaqueue_ledger%' AND pid <> pg_backend_pid()
    """
    with held.engine.connect() as admin:
        admin.execute(sa.text("LOCK TABLE sqlaqueue_ledger"))
        with held.consumer().running():
            wait_until(lambda: held.execute(waits))
            got_through = threading.Event()

            def lock_the_other() -> None:
                admin.execute(sa.text(f"LOCK TABLE {table}"))
                got_through.set()

            threading.Thread(target=lock_the_other, daemon=True).start()
            assert got_through.wait(30), "it waits for the Consumer, which waits for it"
            admin.rollback()
            wait_until(lambda: held.states() == {"completed": 3})
    held.assert_tidy()


def test_a_server_that_takes_no_cancellation_ends_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """It may be restarting, or have no connection left: whoever looks after the others goes on."""

    class Refusing:
        def cancel(self) -> None:
            raise OperationalError("cancel", {}, Exception("too many clients"))

    patience = Patience(lambda: None)
    statement = _Statement(Refusing(), deadline=0.0)
    patience._open.add(statement)
    patience.break_off()
    assert statement.canceller is not None
    statement.canceller.join()
    assert "cannot break a statement off" in caplog.text
    assert patience.until_look() < 1
