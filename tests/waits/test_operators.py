"""What operators and tests of programs see of jobs that wait: explanations, numbers, findings, retention, drain()."""

import secrets
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import (
    Consumer,
    Unique,
    WaitTimeout,
    cancel,
    claim,
    complete,
    enqueue,
    fail,
    purge,
    reconcile,
    requeue,
    wait,
)
from sqlaqueue.admin import JobFilter, QueueAdmin, doctor
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.testing import async_drain, drain
from tests.servers import Database
from tests.waits.models import faults, make_batch, make_dependent, make_tree
from tests.web.conftest import ask

pytestmark = pytest.mark.once


def _states(session: Session, model: Any) -> list[Any]:
    rows = session.execute(sa.select(model.__table__.c.status).order_by(model.__table__.c.id)).scalars().all()
    session.rollback()
    return list(rows)


def _make(engine: sa.Engine, *models: Any) -> Any:
    models[0].metadata.create_all(engine)
    return models


def test_why_a_batch_waits(engine: sa.Engine) -> None:
    batch, member = _make(engine, *make_batch())
    with Session(engine) as session:
        session.add(batch(id=1, members=[member(id=number) for number in range(1, 6)], is_open=True))
        session.commit()
        session.execute(fail(session.scalars(claim(member, 1)).all(), error="no"))
        session.commit()
        text = str(QueueAdmin(session, batch).explain(1))
        waits = (
            "Batch 1 waits for 4 of 5, 1 have failed, in members: Member 2 is pending, Member 3 is pending, Member 4"
        )
        assert waits in text
        assert "and 1 more" in text
        assert "The batch is open: it waits until its is_open is False." in text
        assert QueueAdmin(session, batch).stats().states == {
            "waiting": 1,
            **dict.fromkeys(("pending", "processing", "completed", "failed", "cancelled"), 0),
        }


def test_why_a_chain_waits(engine: sa.Engine) -> None:
    (node,) = _make(engine, make_tree(to_many=False))
    with Session(engine) as session:
        session.add_all([node(id=1), node(id=2, parent_id=1), node(id=3, parent_id=2)])
        session.commit()
        session.execute(fail(session.scalars(claim(node, 1)).all(), error="no"))
        session.commit()
        reasons = [reason.text for reason in QueueAdmin(session, node).explain(3).reasons]
        assert reasons == [
            "Node 3 waits for 1 in parent: Node 2 is waiting.",
            (
                "Node 2 waits for 1 in parent: Node 1 is failed; requeue what has failed, and this job runs when "
                "that has completed."
            ),
        ]


def test_the_doctor_compares_the_counts(engine: sa.Engine) -> None:
    batch, member = _make(engine, *make_batch())
    with Session(engine) as session:
        session.add(batch(id=1, members=[member(id=1)]))
        session.commit()
        assert "miscounted_jobs" not in {each.code for each in doctor(session, batch, deep=True)}
        session.execute(sa.text("TRUNCATE member"))
        session.commit()
        (found,) = (each for each in doctor(session, batch, deep=True) if each.code == "miscounted_jobs")
        assert found.severity == "critical"
        assert found.facts == {"jobs": 1}
        assert [reason.code for reason in QueueAdmin(session, batch).explain(1).reasons] == ["miscounted"]
        assert QueueAdmin(session, batch).reconcile() == 1
        assert _states(session, batch) == ["pending"]
        session.execute(sa.text("ALTER TABLE member DISABLE TRIGGER ALL"))
        session.commit()
        assert "disabled_trigger" in {each.code for each in doctor(session, batch, member)}


def test_the_doctor_finds_jobs_behind_a_failed_one(engine: sa.Engine) -> None:
    (node,) = _make(engine, make_tree(to_many=False))
    with Session(engine) as session:
        session.add_all([node(id=1), node(id=2, parent_id=1), node(id=3, parent_id=2), node(id=4)])
        session.commit()
        assert "waits_for_failed" not in {each.code for each in doctor(session, node, deep=True)}
        session.execute(fail(session.scalars(claim(node, 1)).all(), error="no"))
        session.commit()
        (found,) = (each for each in doctor(session, node, deep=True) if each.code == "waits_for_failed")
        assert (found.severity, found.facts) == ("warning", {"jobs": 1, "relationship": "parent"})
        assert found.fixes[0].endswith("--state failed --state cancelled")
        session.execute(requeue(node))
        session.commit()
        assert "waits_for_failed" not in {each.code for each in doctor(session, node, deep=True)}


def test_the_doctor_asks_for_no_index_of_another_database(engine: sa.Engine) -> None:
    batch, member = make_batch()
    # Where the class has an index of its foreign key, only SQLite needs one with the state as well.
    sa.Index("mine", member.__table__.c.batch_id)
    _make(engine, batch, member)
    with Session(engine) as session:
        assert "missing_index" not in {each.code for each in doctor(session, batch, member)}


@pytest.mark.parametrize("ondelete", [None, "CASCADE", "SET NULL"])
def test_what_somebody_waits_for_is_kept(engine: sa.Engine, ondelete: str | None) -> None:
    parent, child = _make(engine, *make_dependent(ondelete=ondelete))
    with Session(engine) as session:
        session.add_all([parent(id=1), parent(id=2), parent(id=3), child(id=1, a_id=1, b_id=2)])
        session.commit()
        session.execute(sa.text("UPDATE parent SET status = 'completed' WHERE id <> 2"))
        session.commit()
        assert session.scalars(purge(parent)).all() == [3]
        session.commit()
        session.execute(sa.text("UPDATE parent SET status = 'completed'"))
        session.commit()
        session.execute(complete(session.scalars(claim(child, 1)).all()))
        session.commit()
        # A foreign key without ON DELETE keeps the row that it refers to; the statement raises no error.
        assert session.scalars(purge(parent)).all() == ([] if ondelete is None else [1, 2])
        session.commit()


def test_the_failed_job_for_which_another_was_cancelled_leaves_it_cancelled(engine: sa.Engine) -> None:
    """Retention deletes it, and nothing is left that could complete."""
    parent, child = _make(engine, *make_dependent(on_failure="cancel", ondelete="SET NULL"))
    with Session(engine) as session:
        session.add_all([parent(id=1), child(id=1, a_id=1)])
        session.commit()
        session.execute(fail(session.scalars(claim(parent, 1)).all(), error="no"))
        session.commit()
        assert _states(session, child) == ["cancelled"]
        assert session.scalars(purge(parent)).all() == [1]
        session.commit()
        reason = "Parent 1 has failed or was cancelled"
        assert session.execute(sa.select(child.status, child.last_error)).one() == ("cancelled", reason)
        assert not faults(session, child, returns=False)


def test_the_reason_of_a_cancellation_fits_into_its_column(engine: sa.Engine) -> None:
    own: dict[str, Any] = {
        "attributes": {"last_error": sa.orm.mapped_column(sa.String(20))},
        "config": {"columns": {"last_error": "last_error"}},
    }
    batch, member = _make(engine, *make_batch(on_failure="cancel", **own))
    with Session(engine) as session:
        session.add(batch(id=1, members=[member(id=1)]))
        session.commit()
        session.execute(fail(session.scalars(claim(member, 1)).all(), error="no"))
        session.commit()
        assert session.execute(sa.select(batch.status, batch.last_error)).one() == ("cancelled", "Member 1 has failed ")


def test_a_purge_with_a_job_that_the_database_keeps(engine: sa.Engine) -> None:
    """The others are deleted one by one in a transaction, and leave cancelled what was cancelled for them."""
    parent, child = _make(engine, *make_dependent(on_failure="cancel", ondelete="SET NULL"))
    with Session(engine) as session:
        session.execute(sa.text("CREATE TABLE other (id integer REFERENCES parent)"))
        session.add_all([parent(id=number) for number in (1, 2, 3)])
        session.flush()
        session.add_all([child(id=number, a_id=number) for number in (1, 2, 3)])
        session.execute(sa.text("INSERT INTO other VALUES (2)"))
        session.commit()
        session.execute(fail(session.scalars(claim(parent, 3)).all(), error="no"))
        session.commit()
        assert QueueAdmin(session, parent).purge(JobFilter(states=("failed",))) == 2
        assert _states(session, child) == ["cancelled"] * 3
        assert not session.scalars(claim(child, 3)).all()


@pytest.mark.parametrize("leaves", ["is purged", "is deleted", "is moved away"])
def test_a_batch_stays_cancelled_when_its_failed_member_leaves(engine: sa.Engine, leaves: str) -> None:
    """Only a failed member that comes back brings it back."""
    batch, member = _make(engine, *make_batch(on_failure="cancel", ondelete="SET NULL"))
    with Session(engine) as session:
        session.add(batch(id=1, members=[member(id=1), member(id=2), member(id=3)]))
        session.add(batch(id=2, members=[member(id=4)]))
        session.commit()
        session.execute(fail(session.scalars(claim(member, 2)).all(), error="no"))
        session.commit()
        assert _states(session, batch) == ["cancelled", "waiting"]
        for key in (1, 2):
            leaving: dict[str, Any] = {
                "is purged": purge(sa.select(member).where(member.id == key)),
                "is deleted": sa.delete(member).where(member.id == key),
                "is moved away": sa.update(member).where(member.id == key).values(batch_id=None),
            }
            session.execute(leaving[leaves])
            session.commit()
            assert _states(session, batch) == ["cancelled", "waiting"]
        session.execute(complete(session.scalars(claim(member, 2)).all()))
        session.commit()
        assert _states(session, batch) == ["cancelled", "pending"]
        assert not faults(session, batch, returns=False)
        session.execute(requeue(sa.select(batch).where(batch.id == 1)))
        session.commit()
        # It is not cancelled for a member any more: the end of one must not bring it back if it is cancelled next.
        assert session.execute(sa.select(batch.status, batch.cancelled_for).where(batch.id == 1)).one() == (
            "pending",
            None,
        )


def test_members_and_unfinished_batches_are_kept(engine: sa.Engine) -> None:
    batch, member = _make(engine, *make_batch(ondelete="CASCADE"))
    with Session(engine) as session:
        session.add(batch(id=1, members=[member(id=1), member(id=2)]))
        session.commit()
        session.execute(complete(session.scalars(claim(member, 1)).all()))
        session.commit()
        assert session.scalars(purge(member)).all() == []
        assert session.scalars(cancel(batch)).all() == [1]
        session.commit()
        assert _states(session, member) == ["completed", "cancelled"]
        session.execute(sa.text("UPDATE member SET status = 'pending' WHERE id = 2"))
        session.commit()
        # Its member would be deleted with it, and is to run.
        assert session.scalars(purge(batch)).all() == []


def test_a_unique_workflow(engine: sa.Engine) -> None:
    name = sa.orm.mapped_column(sa.String)
    batch, member = _make(engine, *make_batch(config={"unique": Unique("name")}, attributes={"name": name}))
    with Session(engine) as session:
        [(first, created)] = enqueue(session, batch(name="a", members=[member()]))
        session.commit()
        assert (created, first.status) == (True, "waiting")
        assert enqueue(session, batch(name="a", members=[member()])) == [(first, False)]
        session.commit()
        assert len(_states(session, member)) == 1


def test_wait_for_a_batch(engine: sa.Engine) -> None:
    batch, member = _make(engine, *make_batch())
    with Session(engine) as session:
        job = batch(members=[member()])
        session.add(job)
        session.commit()
        with pytest.raises(WaitTimeout):
            wait(sessionmaker(engine), job, timeout=0.2)
        session.execute(cancel(batch))
        session.commit()
        assert wait(sessionmaker(engine), job, timeout=5).state == "cancelled"


# -- in the transaction of a test --------------------------------------------------------------------------------------


def test_drain_in_a_transaction_that_is_rolled_back(engine: sa.Engine) -> None:
    batch, member = _make(engine, *make_batch())
    seen = []
    with Session(engine) as session:
        job = batch(members=[member(), member()])
        session.add(job)
        session.flush()

        def grow(own: Session, one: Any) -> None:
            if one.id == 1:
                own.add(member(batch_id=one.batch_id))

        assert drain(session, batch, lambda *_: None) == 0
        assert drain(session, member, grow) == 3
        assert job.status == "pending"
        assert drain(session, batch, lambda _, each: seen.append(len(each.members))) == 1
        assert seen == [3]
        session.rollback()
        assert not faults(session, batch)


async def test_async_drain_in_a_transaction(engine: sa.Engine) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine  # noqa: PLC0415 - it needs greenlet

    batch, member = _make(engine, *make_batch())

    async def do_nothing(*_: Any) -> None:
        """Handle a job by doing nothing."""

    own = create_async_engine(engine.url)
    async with AsyncSession(own) as session:
        job = batch(members=[member()])
        session.add(job)
        await session.flush()
        assert await async_drain(session, member, do_nothing) == 1
        assert await async_drain(session, batch, do_nothing) == 1
        await session.rollback()
    await own.dispose()


# -- roles -------------------------------------------------------------------------------------------------------------

SPY = """CREATE FUNCTION spy(varchar, varchar) RETURNS boolean LANGUAGE plpgsql
    AS 'BEGIN RAISE EXCEPTION ''spied as %%'', current_user; END'"""
OPERATORS = [
    f"CREATE OPERATOR public.{name} (LEFTARG = varchar, RIGHTARG = varchar, FUNCTION = spy)" for name in ("=", "<>")
]


@pytest.mark.parametrize("on_failure", ["block", "cancel", "continue"])
def test_a_role_needs_no_privilege_on_the_table_of_changes(database: Database, on_failure: str) -> None:
    """And no operator in the search path is called with the privileges of the owner."""
    batch, _ = make_batch(on_failure=on_failure, keys=(sa.String(10),))
    owner = sa.create_engine(database.url(), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    batch.metadata.create_all(owner)
    role = f"web_{secrets.token_hex(4)}"
    with owner.connect() as connection:
        for statement in (
            f"CREATE ROLE {role}",
            f"GRANT ALL ON batch, member, member_id_seq, sqlaqueue_control TO {role}",
            SPY,
            *OPERATORS,
        ):
            connection.exec_driver_sql(statement)
        with pytest.raises(sa.exc.DBAPIError, match="spied as postgres"):
            connection.exec_driver_sql("SELECT FROM pg_class WHERE 'a'::varchar = 'b'::varchar")
        connection.exec_driver_sql(f"SET ROLE {role}")
        for statement in (
            "INSERT INTO batch (id) VALUES ('a'), ('b')",
            "INSERT INTO member (batch_id) SELECT x FROM unnest(ARRAY['c', 'c', 'c', 'd']) AS x",
            "UPDATE member SET status = 'failed' WHERE id = 1",
            "UPDATE member SET status = 'pending' WHERE id = 1",
            "UPDATE member SET status = 'completed' WHERE id < 3",
            "UPDATE member SET batch_id = 'c' WHERE id = 4",
            "DELETE FROM member WHERE id = 3",
            "UPDATE batch SET status = 'cancelled' WHERE id LIKE 'c'",
            "UPDATE batch SET status = 'pending' WHERE id LIKE 'c'",
        ):
            if statement.startswith("INSERT INTO member"):
                connection.exec_driver_sql("INSERT INTO batch (id, is_open) VALUES ('c', true), ('d', true)")
            connection.exec_driver_sql(statement)
        connection.exec_driver_sql("RESET ROLE")
        found = connection.exec_driver_sql("SELECT id, status, waits_for_count FROM batch ORDER BY id").all()
        assert [tuple(row) for row in found] == [
            ("a", "pending", 0),
            ("b", "pending", 0),
            ("c", "cancelled" if on_failure == "cancel" else "waiting", 0 if on_failure == "continue" else 1),
            ("d", "waiting", 0),
        ]
        for statement in (f"DROP OWNED BY {role}", f"DROP ROLE {role}"):
            connection.exec_driver_sql(statement)
    owner.dispose()


def test_a_worker_needs_the_privileges_that_its_consumer_checks(database: Database) -> None:
    """They suffice for claims, settlements, retention and reconcile()."""
    keeps = {"retention": {"completed": 3600}}
    batch, member = make_batch(config=keeps, members=keeps)
    owner = sa.create_engine(database.url(), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    batch.metadata.create_all(owner)
    role = f"worker_{secrets.token_hex(4)}"
    with owner.connect() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {role}")
        for model in (batch, member):
            for each in spec_of(model).strategy.required_privileges(spec_of(model)):
                columns = "" if each.whole else f" ({', '.join(column.name for column in each.columns)})"
                connection.exec_driver_sql(f"GRANT {each.privilege}{columns} ON {each.table.name} TO {role}")
        connection.exec_driver_sql(f"GRANT DELETE ON member TO {role}")
        connection.exec_driver_sql("INSERT INTO batch (id) VALUES (1), (2)")
        connection.exec_driver_sql("INSERT INTO batch (id, is_open) VALUES (3, true)")
    worker = sa.create_engine(database.url(), connect_args={"options": f"-c role={role}"}, poolclass=sa.NullPool)
    sessions = sessionmaker(worker)
    assert Consumer(member, lambda *_: None, sessions).drain() == 0
    assert Consumer(batch, lambda *_: None, sessions).drain() == 2
    with owner.connect() as connection:
        connection.exec_driver_sql("UPDATE batch SET waits_for_count = 7 WHERE id = 3")
    with sessions() as session:
        assert session.scalars(reconcile(batch)).all() == [3]
        session.commit()
        assert session.scalars(purge(member)).all() == []
    with owner.connect() as connection:
        assert connection.exec_driver_sql("SELECT waits_for_count FROM batch WHERE id = 3").scalar() == 0
        for statement in (f"DROP OWNED BY {role}", f"DROP ROLE {role}"):
            connection.exec_driver_sql(statement)
    owner.dispose()
    worker.dispose()


async def test_the_dashboard_lists_waiting_jobs(engine: sa.Engine) -> None:
    batch, member = _make(engine, *make_batch())
    with Session(engine) as session:
        session.add(batch(id=1, members=[member(), member()]))
        session.commit()
    browser = ask(engine, batch, member)
    listed = await browser.get("/queues/batch/jobs?state=waiting")
    assert listed.status_code == 200
    assert "waiting" in listed.text
    job = await browser.get("/queues/batch/job?key=1")
    assert "It waits for 2 jobs in members." in job.text
    assert "Cancel" in job.text
    for path in ("/", "/queues/batch", "/queues/batch/jobs", "/health"):
        assert (await browser.get(path)).status_code == 200


def test_a_requeue_passes_over_a_job_whose_place_a_duplicate_has_taken(engine: sa.Engine) -> None:
    parent, child = make_dependent(on_failure="cancel", config={"unique": Unique("b_id")})
    parent.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([parent(id=1), parent(id=2)])
        session.flush()
        session.add_all([child(id=1, a_id=1, b_id=2), child(id=2, a_id=1)])
        session.commit()
        session.execute(sa.update(parent).where(parent.id == 1).values(status="failed"))
        session.commit()
        session.add(child(id=3, b_id=2))
        session.commit()
        assert session.execute(requeue(sa.select(parent).where(parent.id == 1))).all() == [(1, True)]
        session.commit()
        found = session.execute(sa.select(child.id, child.status).order_by(child.id)).all()
        assert found == [(1, "cancelled"), (2, "waiting"), (3, "waiting")]
