"""Each role works with the privileges of docs/privileges.md, and a Consumer names a missing one."""

import re
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import (
    Consumer,
    QueueConfig,
    QueueMixin,
    Retry,
    Snooze,
    Unique,
    cancel,
    claim,
    consumers,
    is_paused,
    pause,
    purge,
    reconcile,
    requeue,
    resume,
)
from sqlaqueue import enqueue as enqueue_unique
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import spec_of
from tests.alembic.conftest import Project, disconnect, dump
from tests.privileges.conftest import Base, Roles, count, enqueue, of_page

pytestmark = pytest.mark.once


def test_enqueueing_needs_no_privilege_on_side_tables(roles: Roles) -> None:
    roles.grant_web()
    enqueue(roles, n=3)
    with Session(roles.engine("web")) as session, session.begin():
        session.execute(sa.insert(roles.table).values(tenant="b"))
    assert count(roles, roles.table.name) == 4
    with roles.engine("web").connect() as connection:
        for table in spec_of(roles.Job).side_tables.values():
            for privilege in ("SELECT", "INSERT", "UPDATE", "DELETE"):
                has = sa.func.has_table_privilege(table.name, privilege)
                assert connection.scalar(sa.select(has)) is False
    if "messages" in spec_of(roles.Job).side_tables:
        assert count(roles, "sqlaqueue_message_orders") == 4


def test_enqueueing_needs_each_of_its_privileges(roles: Roles) -> None:
    for grant in roles.grant_web():
        roles.execute(revoked(grant))
        with pytest.raises(ProgrammingError, match="permission denied"):
            enqueue(roles)
        roles.execute(grant)
    enqueue(roles)


SET_BY_THE_SERVER: dict[str, Any] = {
    "status": "processing",
    "priority": -1,
    "attempts": 1,
    "lease_token": uuid.uuid4(),
    "lease_expires_at": datetime.max.replace(tzinfo=UTC),
    "claimed_by": "nobody",
}


def test_a_role_that_enqueues_cannot_set_columns_of_the_queue(roles: Roles) -> None:
    """A row that is processing with a lease until infinity would occupy a place of its limit for good."""
    roles.grant_web()
    columns = [name for name in SET_BY_THE_SERVER if name in roles.table.c]
    assert len(columns) >= 2
    for number, name in enumerate(columns):
        with pytest.raises(ProgrammingError, match="permission denied"):
            enqueue(roles, **{name: SET_BY_THE_SERVER[name]})
        assert count(roles, roles.table.name) == number
        roles.execute(f"GRANT INSERT ({name}) ON {roles.table.name} TO web")
        enqueue(roles, **{name: SET_BY_THE_SERVER[name]})


@pytest.mark.parametrize("kind", ["update_status"])
def test_a_role_that_enqueues_unique_jobs(roles: Roles) -> None:
    class Own(DeclarativeBase):
        pass

    class Single(QueueMixin, Own):
        __tablename__ = "single"
        __queue__ = QueueConfig(unique=Unique("key"))
        id: Mapped[int] = mapped_column(primary_key=True)
        key: Mapped[str]

    Own.metadata.create_all(roles.engine("owner"))
    roles.execute(
        "GRANT SELECT, INSERT (key) ON single TO web",
        "GRANT USAGE ON SEQUENCE single_id_seq TO web",
    )
    with Session(roles.engine("web")) as session:
        for created in (True, False):
            result = enqueue_unique(session, [Single(key="a"), Single(key="b")])
            assert [each.created for each in result] == [created, created]
            session.commit()
        with pytest.raises(ProgrammingError, match="permission denied"):
            enqueue_unique(session, Single(key="c", status="processing"))


def revoked(grant: str) -> str:
    return grant.replace("GRANT", "REVOKE").replace(" TO ", " FROM ")


@pytest.mark.few(2)
def test_a_consumer_does_all_of_its_work(roles: Roles, caplog: pytest.LogCaptureFixture) -> None:
    roles.grant_web()
    roles.execute(*roles.grants_of_worker())
    enqueue(roles, n=5)
    told: list[str] = []
    seen: set[int] = set()

    def work(session: Session, job: Any) -> None:
        if job.id == 3 and job.id not in seen:
            seen.add(job.id)
            raise Snooze(0)
        if job.id == 2 and job.attempts == 1:
            raise Retry(0)
        if job.id == 4:
            raise ValueError

    engine = roles.engine("worker")
    consumer = Consumer(roles.Job, work, sessionmaker(engine))
    for name in ("completed", "failed", "retried", "released"):
        consumer.on(name, lambda event: told.append(event.name))  # type: ignore[arg-type] # one of these
    consumer.drain()
    assert {name: told.count(name) for name in told}["completed"] == 4
    assert {"failed", "retried", "released"} <= set(told)
    assert "permission denied" not in caplog.text
    # The maintenance tasks as well.
    with Session(engine) as session:
        session.execute(reconcile(roles.Job))
        session.execute(consumers(roles.Job))
        session.commit()


@pytest.mark.few(2)
def test_a_consumer_names_each_missing_privilege(roles: Roles) -> None:
    grants = roles.grants_of_worker()
    roles.execute(*grants)
    consumer = roles.consumer()
    assert consumer.drain() == 0
    for right, where in rights_in(grants):
        roles.execute(f"REVOKE {right} ON {where} FROM worker")
        with pytest.raises(ConfigurationError) as refused:
            consumer.drain()
        said = str(refused.value)
        assert f"the role of this Consumer of {roles.Job.__name__} lacks privileges that its queue needs" in said
        kind = where if where.startswith("SEQUENCE") else f"TABLE {where}"
        name = kind.removeprefix("SEQUENCE ")
        assert re.search(rf"GRANT {re.escape(right)} ON (SEQUENCE public\.)?{re.escape(name)} TO worker_", said), said
        # The statement in the error is the fix: the next one names no more than the next privilege.
        (fix,) = re.findall(r"GRANT .*? TO \w+", said)
        roles.execute(fix)
    assert consumer.drain() == 0


def rights_in(grants: list[str]) -> list[tuple[str, str]]:
    """Return each privilege in some statements, with its object."""
    found = []
    for grant in grants:
        matched = re.fullmatch(r"GRANT (.*) ON (.*) TO worker;", grant)
        assert matched is not None
        for right in re.split(r", (?![^(]*\))", matched[1]):
            privilege, _, columns = right.partition(" (")
            names = columns.rstrip(")").split(", ") if columns else [""]
            found += [(f"{privilege} ({name})" if name else privilege, matched[2]) for name in names]
    return found


@pytest.mark.parametrize("kind", ["delete_returning"])
def test_privileges_can_be_granted_by_column(roles: Roles) -> None:
    roles.execute(*roles.grants_of_worker(), "REVOKE SELECT ON orders FROM worker")
    columns = [column.name for column in roles.table.c]
    roles.execute(f"GRANT SELECT ({', '.join(columns[1:])}) ON orders TO worker")
    consumer = roles.consumer()
    with pytest.raises(ConfigurationError, match=r"execute: GRANT SELECT \(id\) ON TABLE orders TO worker_\w+$"):
        consumer.drain()
    roles.execute("GRANT SELECT (id) ON orders TO worker")
    assert consumer.drain() == 0


@pytest.mark.parametrize("kind", ["update_status"])
def test_a_schema_without_usage(roles: Roles) -> None:
    roles.execute(*roles.grants_of_worker(), "REVOKE USAGE ON SCHEMA public FROM PUBLIC")
    consumer = roles.consumer()
    with pytest.raises(ConfigurationError, match=r"email \(it is in the schema public, which the role may not use\)"):
        consumer.drain()
    consumer = roles.consumer(execution_options={"schema_translate_map": {None: "public"}})
    with pytest.raises(ConfigurationError, match=r"execute: GRANT USAGE ON SCHEMA public TO worker_\w+$"):
        consumer.drain()


@pytest.mark.parametrize("kind", ["update_status"])
def test_notify_without_execute(roles: Roles) -> None:
    roles.execute(*roles.grants_of_worker(), "REVOKE EXECUTE ON FUNCTION pg_notify FROM PUBLIC")
    consumer = roles.consumer()
    with pytest.raises(ConfigurationError, match=r"GRANT EXECUTE ON FUNCTION pg_notify\(text, text\) TO worker"):
        consumer.drain()


@pytest.mark.parametrize("kind", ["update_status"])
def test_the_role_that_pauses_and_cancels(roles: Roles) -> None:
    roles.execute(*of_page("For `pause()` and `resume()`:"))
    roles.grant_web()
    enqueue(roles)
    with Session(roles.engine("operator")) as session:
        for statement in (pause(roles.Job), resume(roles.Job)):
            session.execute(statement)
            session.commit()
        with pytest.raises(ProgrammingError, match="permission denied"):
            session.execute(cancel(roles.Job))
        session.rollback()
        roles.execute(*of_page("For `cancel()`, `requeue()` and `purge()`, grant in addition:"))
        assert session.scalars(cancel(roles.Job)).all() == [1]
        assert session.scalars(requeue(roles.Job)).all() == [1]
        assert session.scalars(cancel(roles.Job)).all() == [1]
        assert session.scalars(purge(roles.Job)).all() == [1]
        session.commit()


@pytest.mark.parametrize("kind", ["update_status"])
def test_the_role_that_only_reads(roles: Roles) -> None:
    roles.execute(*of_page("## Reading statistics"))
    with Session(roles.engine("reader")) as session:
        assert session.scalars(sa.select(roles.Job)).all() == []
        assert session.scalar(is_paused(roles.Job)) is False
        assert session.execute(consumers(roles.Job)).all() == []
        for statement in (claim(roles.Job, 1), pause(roles.Job), sa.insert(roles.table).values(tenant="a")):
            with pytest.raises(ProgrammingError, match="permission denied"):
                session.execute(statement)
            session.rollback()


# -- migrations by the owner of the tables, who is no superuser --------------------------------------------------------


@pytest.fixture
def project(roles: Roles, tmp_path: Path) -> Iterator[Project]:
    owner = roles.names["owner"]
    yield Project(directory=tmp_path, database=roles.database, metadata=Base.metadata, user=owner)
    disconnect()


@pytest.mark.parametrize("kind", ["delete_returning"])
def test_the_owner_migrates(roles: Roles, project: Project) -> None:
    made = dump(roles.database)
    Base.metadata.drop_all(roles.engine("owner"))
    text = project.revise()
    assert "definer=True" in text
    project.upgrade()
    project.check()
    assert dump(roles.database) == made
    roles.grant_web()
    enqueue(roles, n=2)
    assert roles.consumer(role="owner").drain() == 2


@pytest.mark.parametrize("kind", ["delete_returning"])
def test_a_function_without_security_definer_is_replaced(roles: Roles, project: Project) -> None:
    """Functions of version 1 had none; a downgrade restores it."""
    function = "sqlaqueue_message_orders_sync"
    roles.grant_web()
    roles.execute(
        f'ALTER FUNCTION {function} SECURITY INVOKER SET search_path = "$user", public',
        f"GRANT EXECUTE ON FUNCTION {function} TO PUBLIC",
        f"COMMENT ON FUNCTION {function} IS 'sqlaqueue, version 1'",
    )
    before = dump(roles.database)
    project.revise()
    project.upgrade()
    project.check()
    enqueue(roles)
    project.downgrade()
    assert dump(roles.database) == before
