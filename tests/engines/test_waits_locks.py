"""Jobs that wait for others on MariaDB: what several transactions at the same time do with them."""

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session
from sqlalchemy.pool import AssertionPool, SingletonThreadPool, StaticPool

import sqlaqueue
from sqlaqueue import RateLimit, cancel, claim, reconcile, requeue
from sqlaqueue.engines import waits
from tests.engines.conftest import REFUSED, Sessions, drain, on_mariadb, states
from tests.mariadb.server import blocked
from tests.waits.models import make_batch, make_dependent

pytestmark = pytest.mark.once


@on_mariadb
@pytest.mark.parametrize("strategy", ["update_status", "batch_select"])
def test_a_batch_with_an_open_transaction_that_adds_a_member(sessions: Sessions, strategy: str) -> None:
    """It is not claimed, settlements do not wait for it, and it waits for the member afterwards."""
    batch, member = make_batch(config={"strategy": strategy})
    make = sessions(batch)
    with make() as session, make() as adding, make() as claiming:
        session.add(batch(id=1, members=[member(id=1)]))
        session.commit()
        adding.add(member(id=2, batch_id=1))
        adding.flush()
        session.execute(sa.text("SET SESSION innodb_lock_wait_timeout = 1"))
        assert drain(session, member) == [1]
        assert claiming.scalars(claim(batch, 1)).all() == []
        claiming.commit()
        adding.commit()
        assert claiming.scalars(claim(batch, 1)).all() == []
        claiming.commit()
        assert drain(session, member) == [2]
        assert [job.id for job in claiming.scalars(claim(batch, 1))] == [1]


def add_member(session: Session, member: Any, how: str) -> None:
    """Let a member with the key 1 belong to the batch with the key 1."""
    add: Any = sa.insert(member).values(id=1, batch_id=1)
    if how == "insert from select":
        add = sa.insert(member).from_select(["id", "batch_id"], sa.select(sa.literal(1), sa.literal(1)))
    elif how == "move":
        add = sa.update(member).values(batch_id=1)
    session.execute(add)
    session.commit()


@pytest.mark.few(2)
@on_mariadb
@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("how", ["insert", "insert from select", "move"])
def test_a_member_that_is_added_while_its_batch_is_claimed(
    sessions: Sessions, engine: sa.Engine, how: str, *, commits: bool
) -> None:
    """It waits for the claim, and sees whether that was committed. The server locks nothing by itself for some ways."""
    batch, member = make_batch()
    make = sessions(batch)
    with make() as claiming, make() as adding:
        claiming.add_all([batch(id=1), *([member(id=1)] if how == "move" else [])])
        claiming.commit()
        assert [job.id for job in claiming.scalars(claim(batch, 1))] == [1]
        with blocked(engine, lambda: add_member(adding, member, how)) as added:
            claiming.commit() if commits else claiming.rollback()
        if commits:
            with pytest.raises(REFUSED, match="Batch has started or ended: it takes no further Member"):
                added.result()
        else:
            added.result()
            assert claiming.scalars(claim(batch, 1)).all() == []


def before_first_lock(engine: sa.Engine, step: Callable[[], None]) -> list[str]:
    """Execute a step once before the first statement of an engine that locks rows; return that statement in a list."""
    found: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def execute(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "FOR UPDATE" in statement and not found:
            found.append(statement)
            step()

    return found


@on_mariadb
@pytest.mark.every_combination
@pytest.mark.parametrize("strategy", ["update_status", "batch_select"])
def test_a_member_that_is_committed_before_a_claim_has_locked_its_batch(
    sessions: Sessions, engine: sa.Engine, strategy: str
) -> None:
    """The claim has seen the batch as one that does not wait, and leaves it out nevertheless."""
    batch, member = make_batch(config={"strategy": strategy})
    make = sessions(batch)
    with make() as claiming, make() as adding:
        claiming.add(batch(id=1, status="pending"))
        claiming.commit()
        added = before_first_lock(engine, lambda: add_member(adding, member, "insert"))
        assert claiming.scalars(claim(batch, 1)).all() == []
        assert len(added) == 1
        claiming.commit()
        assert states(claiming, batch) == {1: "pending"}
        assert drain(claiming, batch) == []
        assert states(claiming, batch) == {1: "waiting"}
        assert drain(claiming, member, batch) == [1, 1]


@on_mariadb
def test_a_look_reads_what_is_committed_though_the_engine_has_another_level(
    sessions: Sessions, engine: sa.Engine, place: str
) -> None:
    batch, member = make_batch()
    make = sessions(batch)
    strict = sqlaqueue.prepare(sa.create_engine(place, isolation_level="REPEATABLE READ"))
    with Session(strict) as claiming, make() as adding:
        adding.add(batch(id=1))
        adding.commit()
        claiming.connection(execution_options={"isolation_level": "READ COMMITTED"})
        added = before_first_lock(strict, lambda: add_member(adding, member, "insert"))
        assert claiming.scalars(claim(batch, 1)).all() == []
        assert len(added) == 1
        assert states(adding, batch) == {1: "waiting"}
    strict.dispose()


@on_mariadb
def test_what_a_claim_has_made_pending_is_free_for_others(sessions: Sessions) -> None:
    """Though the transaction of the claim lasts as long as a handler."""
    batch, _ = make_batch(config={"strategy": "batch_select"})
    make = sessions(batch)
    with make() as first, make() as second:
        first.add_all([batch(id=1, status="pending"), batch(id=2), batch(id=3)])
        first.commit()
        assert [job.id for job in first.scalars(claim(batch, 1))] == [1]
        assert [job.id for job in second.scalars(claim(batch, 1))] == [2]


@pytest.fixture
def looks_only_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """No claim looks that has found enough jobs."""
    monkeypatch.setattr(waits.Looks, "_is_due", lambda *_: False)


@on_mariadb
@pytest.mark.usefixtures("looks_only_for_more")
def test_a_claim_looks_if_another_one_holds_what_it_has_found(sessions: Sessions) -> None:
    batch, _ = make_batch(config={"strategy": "batch_select"})
    make = sessions(batch)
    with make() as running, make() as claiming, make() as third:
        running.add_all([batch(id=1, status="pending"), batch(id=2, status="pending"), batch(id=3)])
        running.commit()
        assert [job.id for job in running.scalars(claim(batch, 1))] == [1]
        # It finds another one, and does not look.
        assert [job.id for job in claiming.scalars(claim(batch, 1))] == [2]
        assert states(third, batch) == {1: "pending", 2: "pending", 3: "waiting"}
        assert [job.id for job in third.scalars(claim(batch, 1))] == [3]


@on_mariadb
@pytest.mark.usefixtures("looks_only_for_more")
def test_a_claim_asks_flow_control_once(sessions: Sessions) -> None:
    """What has been admitted counts as begun."""
    batch, _ = make_batch(config={"flow_control": [RateLimit(1, every=3600)]})
    with sessions(batch)() as session:
        session.add_all([batch(id=1, status="pending"), batch(id=2, status="pending"), batch(id=3)])
        session.commit()
        assert [job.id for job in session.scalars(claim(batch, 2))] == [1]


@pytest.mark.few(2)
@on_mariadb
@pytest.mark.parametrize(
    "pool",
    [
        {"poolclass": StaticPool},
        {"poolclass": SingletonThreadPool},
        {"poolclass": AssertionPool},
        {"pool_size": 1, "max_overflow": 0, "pool_timeout": 1},
    ],
    ids=["static", "one for each thread", "asserts", "full"],
)
def test_a_claim_does_not_commit_what_the_program_has_written(sessions: Sessions, place: str, pool: Any) -> None:
    """With a pool that has no other connection to give."""
    batch, member = make_batch()
    make = sessions(batch)
    engine = sqlaqueue.prepare(sa.create_engine(place, **pool))
    with make() as other, Session(engine) as session:
        session.add_all([batch(id=1), batch(id=2, members=[member(id=1)])])
        session.flush()
        assert [job.id for job in session.scalars(claim(batch, 1))] == [1]
        session.rollback()
        assert states(other, batch) == {}
    engine.dispose()


@on_mariadb
def test_a_requeue_waits_for_the_cancellation_of_what_waits_for_the_job(sessions: Sessions, engine: sa.Engine) -> None:
    """Without the lock, it would not see what is cancelled, and nothing would bring that back later."""
    parent, child = make_dependent(on_failure="cancel")
    make = sessions(parent)
    with make() as looking, make() as requeuing:
        add_a_failure(looking, parent, child)
        assert looking.scalars(reconcile(child)).all() == [1]
        with blocked(engine, lambda: requeuing.execute(requeue(parent)).all()) as requeued:
            looking.commit()
        assert requeued.result() == [(1, True)]
        requeuing.commit()
        assert states(looking, child) == {1: "waiting"}


@on_mariadb
@pytest.mark.parametrize("verb", [claim, reconcile])
def test_a_job_is_not_cancelled_for_one_that_is_being_requeued(sessions: Sessions, verb: Any) -> None:
    parent, child = make_dependent(on_failure="cancel")
    make = sessions(parent)
    with make() as looking, make() as requeuing:
        add_a_failure(looking, parent, child)
        requeuing.execute(requeue(parent))
        looking.execute(sa.text("SET SESSION innodb_lock_wait_timeout = 1"))
        assert looking.scalars(verb(child, *([1] if verb is claim else []))).all() == []
        looking.commit()
        requeuing.commit()
        assert states(looking, child) == {1: "waiting"}


@on_mariadb
def test_a_job_is_cancelled_while_another_one_that_waits_for_the_same_is_added(sessions: Sessions) -> None:
    """The foreign key has locked what has failed, and an open transaction may last."""
    parent, child = make_dependent(on_failure="cancel")
    make = sessions(parent)
    with make() as looking, make() as adding:
        add_a_failure(looking, parent, child)
        adding.execute(sa.insert(child).values(id=2, a_id=1))
        assert looking.scalars(claim(child, 1)).all() == []
        looking.commit()
        assert states(looking, child) == {1: "cancelled"}


@on_mariadb
def test_a_requeue_waits_for_who_has_locked_the_job_that_it_brings_back(sessions: Sessions, engine: sa.Engine) -> None:
    parent, child = make_dependent(on_failure="cancel")
    make = sessions(parent)
    with make() as writing, make() as requeuing:
        add_a_failure(writing, parent, child)
        assert drain(writing, child) == []
        writing.execute(sa.update(child).values(priority=7))
        with blocked(engine, lambda: requeuing.execute(requeue(parent)).all()):
            writing.commit()
        requeuing.commit()
        assert states(writing, child) == {1: "waiting"}


def add_a_failure(session: Session, parent: Any, child: Any) -> None:
    session.add(parent(id=1, status="failed"))
    session.flush()
    session.add(child(id=1, a_id=1))
    session.commit()


@on_mariadb
def test_cancel_of_a_batch_waits_for_who_adds_a_member(sessions: Sessions, engine: sa.Engine) -> None:
    """The member is cancelled as well."""
    batch, member = make_batch()
    make = sessions(batch)
    with make() as adding, make() as cancelling:
        adding.add(batch(id=1, members=[member(id=7)]))
        adding.commit()
        adding.execute(sa.insert(member).values(id=8, batch_id=1))
        with blocked(engine, lambda: cancelling.scalars(cancel(sa.select(batch))).all()) as cancelled:
            adding.commit()
        assert cancelled.result() == [1]
        cancelling.commit()
        assert states(cancelling, batch) == {1: "cancelled"}
        assert states(cancelling, member) == {7: "cancelled", 8: "cancelled"}


@on_mariadb
def test_cancel_of_a_batch_that_runs_requests_its_end(sessions: Sessions) -> None:
    batch, _ = make_batch(config={"strategy": "batch_select"})
    make = sessions(batch)
    with make() as running, make() as cancelling:
        running.add(batch(id=1))
        running.commit()
        assert [job.id for job in running.scalars(claim(batch, 1))] == [1]
        cancelling.execute(sa.text("SET SESSION innodb_lock_wait_timeout = 1"))
        assert cancelling.scalars(cancel(sa.select(batch))).all() == []
        control = sa.select(sa.func.count()).select_from(batch.metadata.tables["sqlaqueue_control"])
        assert cancelling.scalar(control) == 1
