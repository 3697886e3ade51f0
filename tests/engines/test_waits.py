"""Jobs that wait for others, on SQLite and MariaDB: what claims look at, what triggers refuse, and who comes back."""

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

import sqlaqueue
from sqlaqueue import (
    ConcurrencyLimit,
    Consumer,
    States,
    Unique,
    cancel,
    claim,
    purge,
    reconcile,
    requeue,
)
from sqlaqueue.admin import QueueAdmin
from sqlaqueue.engines.waits import triggers_of
from sqlaqueue.exc import ConfigurationError, DatabaseNotReadyError, NotClaimableError, StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.testing import drain as drain_in_test
from sqlaqueue.testing import run_job
from tests.engines.conftest import REFUSED, Sessions, drain, on_mariadb, states
from tests.waits.models import make_batch, make_dependent, make_tree

pytestmark = pytest.mark.once


def test_a_batch_runs_once_when_its_members_have_ended(sessions: Sessions) -> None:
    batch, member = make_batch()
    with sessions(batch)() as session:
        session.add_all([batch(id=1, members=[member(id=n) for n in range(1, 6)]), batch(id=2, members=[member(id=9)])])
        session.commit()
        assert states(session, batch) == {1: "waiting", 2: "waiting"}
        assert session.scalars(claim(batch, 5)).all() == []
        assert sorted(drain(session, member, fails=(2,))) == [1, 2, 3, 4, 5, 9]
        assert drain(session, batch) == [1, 2]
        assert drain(session, batch) == []


def test_an_empty_batch_is_due_and_an_open_one_waits_until_it_is_closed(sessions: Sessions) -> None:
    batch, member = make_batch()
    with sessions(batch)() as session:
        session.add_all([batch(id=1), batch(id=2, is_open=True), batch(id=3, is_open=True, members=[member(id=1)])])
        session.commit()
        assert drain(session, batch, member) == [1, 1]
        assert states(session, batch) == {1: "completed", 2: "waiting", 3: "waiting"}
        session.execute(sa.update(batch).where(batch.id > 1).values(is_open=False))
        session.commit()
        assert drain(session, batch) == [2, 3]


@pytest.mark.parametrize("state", ["waiting", "pending", "processing", "completed", "failed", "cancelled"])
@pytest.mark.parametrize("how", ["insert", "move"])
def test_a_batch_that_has_begun_takes_no_member(sessions: Sessions, state: str, how: str) -> None:
    batch, member = make_batch()
    with sessions(batch)() as session:
        session.add_all([batch(id=1, status=state), batch(id=2, members=[member(id=7)])])
        session.add(member(id=8, batch_id=1, status="completed"))
        session.commit()
        add: Any = sa.insert(member).values(id=9, batch_id=1)
        if how == "move":
            add = sa.update(member).where(member.id == 7).values(batch_id=1)
        if state in {"waiting", "pending"}:
            session.execute(add)
            session.commit()
            assert session.scalars(claim(sa.select(batch).where(batch.id == 1), 1)).all() == []
            session.commit()
            assert states(session, batch)[1] == "waiting"
        else:
            with pytest.raises(REFUSED, match="Batch has started or ended: it takes no further Member"):
                session.execute(add)
            session.rollback()
            # A member that has ended, or comes back, is no new one.
            session.add(member(id=10, batch_id=1, status="failed"))
            session.execute(sa.update(member).where(member.id == 8).values(status="pending"))
            session.commit()


@pytest.mark.parametrize("on_failure", ["block", "cancel", "continue"])
def test_failures_of_a_parent(sessions: Sessions, on_failure: str) -> None:
    parent, child = make_dependent(on_failure=on_failure)
    with sessions(parent)() as session:
        session.add_all([parent(id=1), parent(id=2)])
        session.flush()
        session.add_all([child(id=1, a_id=1), child(id=2, a_id=1, b_id=2), child(id=3)])
        session.commit()
        assert drain(session, child) == [3]
        drain(session, parent, fails=(1,))
        left = drain(session, child)
        assert left == ([1, 2] if on_failure == "continue" else [])
        if on_failure == "continue":
            return
        expected = {"block": "waiting", "cancel": "cancelled"}[on_failure]
        assert states(session, child) == {1: expected, 2: expected, 3: "completed"}
        if on_failure == "cancel":
            error, cause = session.execute(sa.select(child.last_error, child.cancelled_for).where(child.id == 2)).one()
            assert (error, cause) == ("Parent 1 has failed or was cancelled", "a")
        session.execute(requeue(sa.select(parent).where(parent.id == 1)))
        session.commit()
        assert states(session, child) == {1: "waiting", 2: "waiting", 3: "completed"}
        assert drain(session, child) == []
        assert drain(session, parent, child) == [1, 1, 2]


def test_a_job_comes_back_only_if_nothing_else_has_failed(sessions: Sessions) -> None:
    parent, child = make_dependent(on_failure="cancel")
    with sessions(parent)() as session:
        session.add_all([parent(id=1), parent(id=2)])
        session.flush()
        session.add_all([child(id=1, a_id=1, b_id=2), child(id=2, a_id=2)])
        session.commit()
        drain(session, parent, fails=(1, 2))
        assert drain(session, child) == []
        # What an operator cancels stays cancelled.
        session.execute(sa.update(child).where(child.id == 2).values(cancelled_for=None))
        for key, expected in ((1, "cancelled"), (2, "waiting")):
            session.execute(requeue(sa.select(parent).where(parent.id == key)))
            session.commit()
            assert states(session, child) == {1: expected, 2: "cancelled"}


LEVELS = {1: None, 2: 1, 3: 2, 4: 2, 5: 4}


@pytest.mark.parametrize("on_failure", ["block", "continue", "cancel"])
@pytest.mark.parametrize("to_many", [False, True])
def test_trees(sessions: Sessions, on_failure: str, *, to_many: bool) -> None:
    """A failure at one end of several levels, and the way back."""
    node = make_tree(to_many=to_many, on_failure=on_failure)
    leaf = 5 if to_many else 1
    with sessions(node)() as session:
        for key, parent in LEVELS.items():
            session.add(node(id=key, parent_id=parent))
            session.flush()
        session.commit()
        session.execute(sa.update(node).where(node.id == leaf).values(status="failed"))
        session.commit()
        order = drain(session, node)
        assert leaf not in order
        waiting = [(4, 2, 1), (2, 3, 4, 5)][not to_many]
        if on_failure != "continue":
            expected = {"block": "waiting", "cancel": "cancelled"}[on_failure]
            found = states(session, node)
            assert {key: found[key] for key in waiting} == dict.fromkeys(waiting, expected)
        session.execute(requeue(sa.select(node).where(node.id == leaf)))
        session.commit()
        order += drain(session, node)
        assert sorted(order) == [1, 2, 3, 4, 5]
        if on_failure != "continue":
            edges = [(1, 2), (2, 3), (2, 4), (4, 5)]
            assert all((order.index(a) > order.index(b)) == to_many for a, b in edges)


@pytest.mark.parametrize("length", [30, pytest.param(1100, marks=pytest.mark.thorough)])
def test_a_long_chain_is_cancelled_and_comes_back_at_once(sessions: Sessions, length: int) -> None:
    """It may be longer than Python's stack."""
    node = make_tree(to_many=False, on_failure="cancel")
    with sessions(node)() as session:
        session.add(node(id=1))
        session.flush()
        session.execute(sa.insert(node), [{"id": n, "parent_id": n - 1} for n in range(2, length + 1)])
        session.execute(cancel(sa.select(node).where(node.id == 1)))
        session.commit()
        assert session.scalars(claim(node, 5)).all() == []
        session.commit()
        assert {*states(session, node).values()} == {"cancelled"}
        session.execute(requeue(sa.select(node).where(node.id == 1)))
        session.commit()
        assert list(states(session, node).values()) == ["pending", *["waiting"] * (length - 1)]


def test_cancel_of_a_batch_cancels_its_members_and_those_of_batches_among_them(sessions: Sessions) -> None:
    node = make_tree(to_many=True)
    with sessions(node)() as session:
        for key, parent in LEVELS.items():
            session.add(node(id=key, parent_id=parent))
            session.flush()
        session.commit()
        (running,) = session.scalars(claim(sa.select(node).where(node.id == 5), 1))
        session.commit()
        assert session.scalars(cancel(sa.select(node).where(node.id == 1))).all() == [1]
        session.commit()
        assert states(session, node) == {
            1: "cancelled",
            2: "cancelled",
            3: "cancelled",
            4: "cancelled",
            5: "processing",
        }
        assert QueueAdmin(session, node).explain(running).reasons
        control = sa.select(sa.func.count()).select_from(node.metadata.tables["sqlaqueue_control"])
        assert session.scalar(control) == 1


def test_a_job_whose_reference_is_removed_does_not_run(sessions: Sessions) -> None:
    """Unless the one that it waited for has completed, or the reference is to be continued without."""
    parent, child = make_dependent(on_failure="block")
    with sessions(parent)() as session:
        session.add_all([parent(id=1), parent(id=2, status="completed"), parent(id=3, status="failed")])
        session.flush()
        session.add_all([child(id=n, a_id=n) for n in (1, 2, 3)])
        session.add(child(id=4, a_id=1, status="completed"))
        session.commit()
        session.execute(sa.update(child).values(a_id=None))
        session.commit()
        assert states(session, child) == {1: "cancelled", 2: "waiting", 3: "cancelled", 4: "completed"}
        assert session.scalar(sa.select(child.last_error).where(child.id == 1)) is not None
        assert drain(session, child) == [2]


@pytest.mark.parametrize("ondelete", ["SET NULL", "SET DEFAULT"])
def test_a_reference_that_a_delete_removes_is_refused(engine: sa.Engine, ondelete: str) -> None:
    parent, _ = make_dependent(ondelete=ondelete)
    with pytest.raises(
        ConfigurationError, match=rf"Child\.a: the foreign key has ON DELETE {ondelete}.*leave ondelete"
    ):
        parent.metadata.create_all(engine)
    parent, _ = make_dependent(ondelete=ondelete, on_failure="continue")
    if ondelete == "SET NULL" or engine.dialect.name == "sqlite":
        parent.metadata.create_all(engine)


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_a_job_whose_parent_is_gone_is_cancelled(sessions: Sessions) -> None:
    """SQLite enforces no foreign keys by default."""
    parent, child = make_dependent()
    with sessions(parent)() as session:
        session.add_all([parent(id=1), child(id=1, a_id=1)])
        session.commit()
        session.execute(sa.text("DELETE FROM parent"))
        session.commit()
        assert drain(session, child) == []
        assert states(session, child) == {1: "cancelled"}


def test_explain_says_what_a_job_waits_for_and_that_nothing_is_left(sessions: Sessions) -> None:
    batch, member = make_batch()
    with sessions(batch)() as session:
        session.add(batch(id=1, members=[member(id=1)]))
        session.commit()
        admin = QueueAdmin(session, batch)
        (reason, *_) = admin.explain(1).reasons
        assert (reason.code, reason.text) == ("waits_for", "Batch 1 waits for 1 of 1 in members: Member 1 is pending.")
        drain(session, member)
        (reason, *_) = admin.explain(1).reasons
        assert reason.code == "waited"


def test_a_requeued_member_lets_its_batch_wait_again(sessions: Sessions) -> None:
    batch, member = make_batch()
    with sessions(batch)() as session:
        session.add(batch(id=1, members=[member(id=1), member(id=2)]))
        session.commit()
        drain(session, member, fails=(1,))
        session.scalars(reconcile(batch)).all()
        session.commit()
        assert states(session, batch) == {1: "pending"}
        session.execute(requeue(sa.select(member).where(member.id == 1)))
        session.commit()
        assert session.scalars(claim(batch, 1)).all() == []
        session.commit()
        assert states(session, batch) == {1: "waiting"}
        assert drain(session, member, batch) == [1, 1]


def test_a_member_that_is_deleted_or_in_a_state_of_its_own(sessions: Sessions) -> None:
    batch, member = make_batch()
    with sessions(batch)() as session:
        session.add_all([batch(id=n, members=[member(id=10 * n)]) for n in (1, 2, 3)])
        session.commit()
        session.execute(sa.delete(member).where(member.id == 10))
        # It has not ended, and no claim takes it. Those behind it are found all the same.
        session.execute(sa.update(member).where(member.id == 20).values(status="draft"))
        session.execute(sa.update(member).where(member.id == 30).values(status="completed"))
        session.commit()
        assert [job.id for job in session.scalars(claim(batch, 1))] == [1]
        assert [job.id for job in session.scalars(claim(batch, 1))] == [3]
        assert session.scalars(claim(batch, 1)).all() == []


def test_jobs_that_wait_are_passed_over_and_those_behind_them_found(sessions: Sessions) -> None:
    """A program may write pending into any row: a claim makes as many waiting again as it takes to find others."""
    batch, member = make_batch()
    with sessions(batch)() as session:
        session.add_all([batch(id=n, status="pending", members=[member(id=n)]) for n in range(1, 21)])
        session.add(batch(id=99, status="pending"))
        session.commit()
        assert [job.id for job in session.scalars(claim(batch, 3))] == [99]
        session.commit()
        assert {*list(states(session, batch).values())[:20]} == {"waiting"}


def test_a_claim_that_finds_enough_looks_as_well(sessions: Sessions) -> None:
    node = make_tree(to_many=False)
    with sessions(node)() as session:
        session.add_all([node(id=n, priority=1) for n in range(1, 51)])
        session.flush()
        session.add(node(id=100, parent_id=1))
        session.execute(sa.update(node).where(node.id == 1).values(status="completed"))
        session.commit()
        order = []
        for _ in range(30):
            order += [job.id for job in session.scalars(claim(node, 1))]
            session.commit()
            if 100 in order:
                break
        assert 100 in order
        assert len(order) < 30


def test_flow_control_and_order_of_the_claim(sessions: Sessions) -> None:
    batch, member = make_batch(config={"flow_control": [ConcurrencyLimit(2)]})
    with sessions(batch)() as session:
        session.add_all([batch(id=n, priority=-n, members=[member(id=n)]) for n in range(1, 6)])
        session.commit()
        drain(session, member)
        assert [job.id for job in session.scalars(claim(batch, 5))] == [5, 4]
        assert session.scalars(claim(batch, 5)).all() == []


def test_purge_keeps_what_is_waited_for(sessions: Sessions) -> None:
    parent, child = make_dependent()
    with sessions(parent)() as session:
        session.add_all([parent(id=1, status="completed"), parent(id=2), parent(id=3, status="completed")])
        session.flush()
        session.add(child(id=1, a_id=1, b_id=2))
        session.commit()
        session.execute(purge(parent))
        session.commit()
        assert {*states(session, parent)} == {1, 2}


def test_reconcile_looks_at_all_jobs(sessions: Sessions) -> None:
    batch, member = make_batch()
    with sessions(batch)() as session:
        session.add_all(
            [batch(id=1), batch(id=2, status="pending", members=[member(id=2)]), batch(id=3, members=[member()])]
        )
        session.commit()
        assert set(session.scalars(reconcile(batch))) == {1, 2}
        session.commit()
        assert states(session, batch) == {1: "pending", 2: "waiting", 3: "waiting"}


def test_reconcile_returns_what_it_has_cancelled_in_turn(sessions: Sessions) -> None:
    node = make_tree(to_many=False, on_failure="cancel")
    with sessions(node)() as session:
        for key, parent in LEVELS.items():
            session.add(node(id=key, parent_id=parent, status="waiting" if parent else "failed"))
            session.flush()
        session.commit()
        assert sorted(session.scalars(reconcile(node))) == [2, 3, 4, 5]
        session.commit()
        assert session.scalars(reconcile(node)).all() == []


def test_a_consumer_runs_batches_that_get_due_while_it_is_idle(sessions: Sessions) -> None:
    batch, member = make_batch()
    make = sessions(batch)
    with make() as session:
        session.add(batch(id=1, members=[member(id=n) for n in range(1, 21)]))
        session.commit()
    ran: list[int] = []
    batches: Consumer = Consumer(batch, lambda _, job: (ran.append(job.id), batches.stop(), rows.stop())[0], make)
    rows: Consumer = Consumer(member, lambda *_: None, make)
    Consumer.run_all(batches, rows)
    assert ran == [1]


@on_mariadb
def test_a_claim_needs_read_committed(sessions: Sessions, place: str) -> None:
    batch, _ = make_batch()
    with sessions(batch)() as session:
        session.add(batch(id=1))
        session.commit()
    engine = sqlaqueue.prepare(sa.create_engine(place, isolation_level="REPEATABLE READ"))
    with Session(engine) as session, pytest.raises(StatementError, match=r"Batch: a claim of jobs .* READ COMMITTED"):
        session.scalars(claim(batch, 1))
    engine.dispose()


def test_a_missing_trigger_is_refused(sessions: Sessions, engine: sa.Engine) -> None:
    batch, member = make_batch()
    make = sessions(batch)
    with engine.begin() as connection:
        first, _ = triggers_of(spec_of(member), connection, "''")
        connection.exec_driver_sql(f"DROP TRIGGER {first}")
    with pytest.raises(DatabaseNotReadyError, match=f"the database lacks what Batch needs: the trigger {first}"):
        Consumer(batch, lambda *_: None, make).drain()


def test_a_requeue_passes_over_a_job_whose_place_a_duplicate_has_taken(sessions: Sessions) -> None:
    parent, child = make_dependent(on_failure="cancel", config={"unique": Unique("b_id")})
    with sessions(parent)() as session:
        session.add_all([parent(id=1, status="failed"), parent(id=2)])
        session.flush()
        session.add_all([child(id=1, a_id=1, b_id=2), child(id=2, a_id=1)])
        session.commit()
        assert drain(session, child) == []
        session.add(child(id=3, b_id=2))
        session.commit()
        assert session.execute(requeue(sa.select(parent).where(parent.id == 1))).all() == [(1, True)]
        session.commit()
        assert states(session, child) == {1: "cancelled", 2: "waiting", 3: "waiting"}


def test_helpers_for_tests_run_jobs_that_wait_in_the_transaction_of_a_test(sessions: Sessions) -> None:
    batch, member = make_batch()
    with sessions(batch)() as session:
        job = batch(id=1, members=[member(id=1), member(id=2)])
        session.add(job)
        session.flush()
        with pytest.raises(NotClaimableError, match="Batch 1 waits for its members, so no worker claims it; run those"):
            run_job(session, job, lambda *_: None)
        assert drain_in_test(session, member, lambda *_: None) == 2
        assert run_job(session, job, lambda *_: None).state == "completed"
        session.rollback()
        assert states(session, batch) == {}


def test_schemas_are_translated(engine: sa.Engine, tmp_path: Path) -> None:
    batch, member = make_batch(table={"schema": "app"})
    other = "other"
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql(f"ATTACH '{tmp_path / 'other.db'}' AS other")
        else:
            other = str(connection.scalar(sa.func.database().select()))
        options: Any = {"schema_translate_map": {"app": other}}
        translated = connection.execution_options(**options)
        batch.metadata.create_all(translated)
        connection.commit()
        with Session(translated) as session:
            session.add_all([batch(id=1, members=[member(id=1)]), batch(id=2, status="failed")])
            session.commit()
            with pytest.raises(REFUSED, match="takes no further Member"):
                session.execute(sa.insert(member).values(id=9, batch_id=2))
            session.rollback()
            assert drain(session, member, batch) == [1, 1]


@on_mariadb
def test_a_status_with_a_backslash_is_refused(engine: sa.Engine) -> None:
    batch, _ = make_batch(config={"states": States(completed="do\\ne")})
    with pytest.raises(ConfigurationError, match=r"Batch: QueueConfig\(states=States\(completed='do.*a backslash"):
        batch.metadata.create_all(engine)


@on_mariadb
@pytest.mark.parametrize("strategy", ["update_status", "batch_select"])
def test_a_batch_that_is_inserted_as_pending_gets_its_members(sessions: Sessions, strategy: str) -> None:
    batch, member = make_batch(config={"strategy": strategy})
    with sessions(batch)() as session:
        session.add(batch(id=1, status="pending", members=[member(id=1)]))
        session.commit()
        assert drain(session, batch) == []
        assert drain(session, member, batch) == [1, 1]
