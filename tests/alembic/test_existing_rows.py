"""A table with rows becomes a queue, or a queue gets another strategy: what becomes of its rows."""

import re
import threading
from datetime import timedelta
from itertools import permutations
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.util import CommandError
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session, mapped_column

from sqlaqueue import QueueConfig, States, claim, complete, purge, reconcile
from tests.alembic.conftest import Project, dump, enqueue, execute, order, run_all, statuses, wanted
from tests.models import STRATEGIES
from tests.servers import Database

BY_ROW = """sa.text("CASE WHEN sent THEN 'completed' ELSE 'failed' END")"""
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
live_or_not = pytest.mark.parametrize("live", [False, True], ids=["in one transaction", "live"])


def plain() -> type[Any]:
    return order(None, sent=mapped_column(sa.Boolean, server_default=sa.false(), nullable=False))


def queue(config: QueueConfig, **attributes: Any) -> type[Any]:
    return order(config, sent=mapped_column(sa.Boolean, server_default=sa.false(), nullable=False), **attributes)


@pytest.fixture
def project(make: Any, engine: sa.Engine) -> Project:
    """A project whose table ``orders`` has four rows, two of them sent, and is not a queue."""
    project: Project = make(plain())
    with engine.begin() as connection:
        connection.execute(
            sa.text("INSERT INTO orders (article, sent) SELECT n, n > 2 FROM generate_series(1, 4) AS n")
        )
    return project


def adopt(project: Project, model: type[Any], *, live: bool = False) -> str:
    project.metadata = model.metadata
    return project.revise("adopt", **({"live": "orders"} if live else {}))


@live_or_not
@every_strategy
def test_the_migration_asks_for_the_status_of_existing_rows(
    project: Project, engine: sa.Engine, strategy: str, *, live: bool
) -> None:
    model = queue(QueueConfig(strategy=strategy))
    before = dump(project.database)
    adopt(project, model, live=live)
    with pytest.raises(CommandError, match=r"op\.add_queue_columns\('orders'\): the table may have rows"):
        project.upgrade()
    project.edit("existing_rows=...", "existing_rows='completed'")
    project.upgrade()
    project.check()
    assert set(statuses(engine).values()) == {"completed"}
    assert run_all(engine, model) == []
    execute(engine, "INSERT INTO orders (article) VALUES ('new')")
    assert run_all(engine, model) == ["new"]
    project.downgrade()
    assert dump(project.database) == before


@live_or_not
@every_strategy
def test_an_expression_gives_the_status_of_each_row(
    project: Project, engine: sa.Engine, strategy: str, *, live: bool
) -> None:
    model = queue(QueueConfig(strategy=strategy))
    adopt(project, model, live=live)
    project.edit("existing_rows=...", f"existing_rows={BY_ROW.replace('failed', 'pending')}")
    project.upgrade()
    project.check()
    assert statuses(engine) == {"1": "pending", "2": "pending", "3": "completed", "4": "completed"}
    with Session(engine) as session:
        assert session.scalars(reconcile(model)).all() == []
    assert run_all(engine, model) == ["1", "2"]


@live_or_not
def test_a_migrated_table_equals_a_created_one(project: Project, *, live: bool) -> None:
    """Apart from the order of the columns."""
    model = queue(QueueConfig(strategy="delete_returning"))
    adopt(project, model, live=live)
    project.edit("existing_rows=...", "existing_rows='completed'")
    project.upgrade()
    schemas = dump(project.database), wanted(model, project.database)
    found, expected = (sorted(line.rstrip(",") for line in schema.splitlines()) for schema in schemas)
    assert found == expected


@live_or_not
def test_an_enum_for_the_status_is_created_and_dropped(project: Project, engine: sa.Engine, *, live: bool) -> None:
    states_ = sa.Enum("pending", "processing", "completed", "failed", "cancelled", name="order_state")
    config = QueueConfig(columns={"status": "state"})
    model = queue(config, state=mapped_column(states_, nullable=False, server_default="pending"))
    before = dump(project.database)
    text = adopt(project, model, live=live)
    assert "op.create_queue_enum('order_state'" in text
    # The column belongs to the application, so its migration decides about existing rows.
    project.edit("server_default='pending'", "server_default='completed'")
    project.upgrade()
    assert run_all(engine, model) == []
    project.downgrade()
    assert dump(project.database) == before


def test_without_a_status_all_existing_rows_run(project: Project, engine: sa.Engine) -> None:
    model = queue(QueueConfig(strategy="delete_returning", rows_are_messages=True))
    adopt(project, model)
    with pytest.raises(CommandError, match="each row of the table is a job"):
        project.upgrade()
    project.edit("existing_rows=...", "existing_rows='completed'")
    with pytest.raises(CommandError, match="a queue without a status cannot store one"):
        project.upgrade()
    project.edit("existing_rows='completed'", "existing_rows='pending'")
    project.upgrade()
    project.check()
    assert run_all(engine, model) == ["1", "2", "3", "4"]


def test_a_status_that_the_column_cannot_store_is_refused(project: Project) -> None:
    adopt(project, queue(QueueConfig(states=States(pending=0, processing=1, completed=2, failed=3, cancelled=4))))
    project.edit("existing_rows=...", "existing_rows='completed'")
    with pytest.raises(CommandError, match="the column status cannot store this value"):
        project.upgrade()
    project.edit("existing_rows='completed'", "existing_rows=2")
    project.upgrade()


@pytest.mark.parametrize("type_", [sa.Text(), sa.String(20), sa.Integer()], ids=repr)
def test_an_existing_status_column_is_not_adopted_by_accident(project: Project, engine: sa.Engine, type_: Any) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text(f"ALTER TABLE orders ADD COLUMN status {type_.compile(engine.dialect)}"))
    with pytest.raises(CommandError) as refused:
        adopt(project, queue(QueueConfig()))
    message = str(refused.value)
    assert "Order.status: the table orders has a column status of type" in message
    assert "QueueConfig(columns={'status': 'status'})" in message
    assert "QueueConfig(columns={'status': 'queue_status'})" in message


def test_an_existing_column_of_another_type_is_not_adopted_by_accident(project: Project, engine: sa.Engine) -> None:
    execute(engine, "ALTER TABLE orders ADD COLUMN priority text")
    with pytest.raises(CommandError, match=r"Order\.priority: the table orders has a column priority of type TEXT"):
        adopt(project, queue(QueueConfig()))


@every_strategy
def test_a_table_keeps_its_own_status_values(project: Project, engine: sa.Engine, strategy: str) -> None:
    """For an adopted status column the migration asks nothing: the configuration says which value is pending."""
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE orders ADD COLUMN state text NOT NULL DEFAULT 'draft'"))
        connection.execute(sa.text("UPDATE orders SET state = 'paid' WHERE article = '2'"))
    config = QueueConfig(strategy=strategy, columns={"status": "state"}, states=States(pending="paid"))
    model = queue(config, state=mapped_column(sa.Text, nullable=False, server_default="draft"))
    adopt(project, model)
    project.upgrade()
    project.check()
    assert run_all(engine, model) == ["2"]


def test_existing_rows_are_purged_only_after_finished_at_is_set(project: Project, engine: sa.Engine) -> None:
    """The error that asks for the status names the statement that sets it."""
    model = queue(QueueConfig())
    adopt(project, model)
    with pytest.raises(CommandError, match="have no finished_at") as refused:
        project.upgrade()
    statement = re.search(r'op\.execute\("([^"]+)"\)', str(refused.value))
    assert statement is not None
    project.edit("existing_rows=...", "existing_rows='completed'")
    project.upgrade()

    def purged() -> int:
        with Session(engine) as session, session.begin():
            return len(session.scalars(purge(model, older_than=timedelta(0))).all())

    assert purged() == 0
    with engine.begin() as connection:
        connection.exec_driver_sql(statement[1])
    assert purged() == 4


# -- a queue gets another strategy by a migration; pending and running jobs remain jobs --------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Strategies with leases are the difficult ones.
        pytest.param(*pair, marks=() if "update_status" in pair else pytest.mark.thorough)
        for pair in permutations(STRATEGIES, 2)
    ],
)
def test_pending_jobs_stay_pending_in_both_directions(
    database: Database, engine: sa.Engine, make: Any, old: str, new: str
) -> None:
    before, after = order(QueueConfig(strategy=old)), order(QueueConfig(strategy=new))
    project = make(before)
    enqueue(engine, before, "done", priority=-1)
    enqueue(engine, before, "1", "2")
    with Session(engine) as session:
        session.execute(complete(session.scalars(claim(before, 1)).all()))
        session.commit()
    schema = dump(database)
    project.migrate(after)
    enqueue(engine, after, "3")
    with Session(engine) as session:
        assert session.scalars(reconcile(after)).all() == []
    with Session(engine) as session:
        assert [job.article for job in session.scalars(claim(after, 2))] == ["1", "2"]
        session.rollback()
    project.downgrade()
    assert dump(database) == schema
    with Session(engine) as session:
        assert session.scalars(reconcile(before)).all() == []
    assert run_all(engine, before) == ["1", "2", "3"]
    assert statuses(engine) == dict.fromkeys(["1", "2", "3", "done"], "completed")


@pytest.mark.parametrize("new", ["delete_returning", "batch_select"])
def test_a_leased_job_is_released(engine: sa.Engine, make: Any, new: str) -> None:
    before, after = order(QueueConfig()), order(QueueConfig(strategy=new))
    project = make(before)
    enqueue(engine, before, "1")
    enqueue(engine, before, "of the application", status="processing")
    with Session(engine, expire_on_commit=False) as session:
        jobs = session.scalars(claim(before, 1)).all()
        session.commit()
        text = project.revise("switch", after)
        assert "op.release_queue_jobs(" in text
        project.upgrade()
        # A processing row without a lease belongs to the application and is left alone.
        assert statuses(engine) == {"1": "pending", "of the application": "processing"}
        # The old consumer can no longer settle the job, so its writes are rolled back.
        with pytest.raises(ProgrammingError, match="lease_token"):
            session.execute(complete(jobs))
    with Session(engine) as session:
        (job,) = session.scalars(claim(after, 1)).all()
        assert (job.article, job.attempts) == ("1", 1)
        session.execute(complete([job]))
        session.commit()
    assert statuses(engine) == {"1": "completed", "of the application": "processing"}


@pytest.mark.parametrize("old", ["delete_returning", pytest.param("batch_select", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("without", [None, "lease_expires_at"])
def test_a_downgrade_to_a_strategy_without_leases_releases_jobs(
    engine: sa.Engine, make: Any, old: str, without: str | None
) -> None:
    leases = QueueConfig(columns={without: None} if without else {})
    before, after = order(QueueConfig(strategy=old)), order(leases)
    project = make(before)
    project.revise("switch", after)
    project.upgrade()
    enqueue(engine, after, "1")
    enqueue(engine, after, "of the application", status="processing")
    with Session(engine) as session:
        session.scalars(claim(after, 1)).all()
        session.commit()
    project.downgrade()
    assert statuses(engine) == {"1": "pending", "of the application": "processing"}
    assert run_all(engine, before) == ["1"]
    # The same by a new migration, also if the queue has no lease_expires_at.
    project.upgrade()
    with Session(engine) as session:
        session.execute(sa.update(after).where(after.article == "1").values(status="pending"))
        session.scalars(claim(after, 1)).all()
        session.commit()
    project.migrate(before)
    assert statuses(engine) == {"1": "pending", "of the application": "processing"}


@pytest.mark.parametrize("old", ["delete_returning", "batch_select"])
def test_the_migration_waits_for_open_batches(engine: sa.Engine, make: Any, old: str) -> None:
    before, after = order(QueueConfig(strategy=old)), order(QueueConfig())
    project = make(before)
    enqueue(engine, before, "1", "2")
    project.revise("switch", after)
    with Session(engine) as session:
        jobs = session.scalars(claim(before, 1)).all()
        migration = threading.Thread(target=project.upgrade)
        migration.start()
        # It tries again and again to lock the table, so other sessions can write meanwhile.
        enqueue(engine, before, "3")
        session.execute(complete(jobs))
        session.commit()
    migration.join(60)
    assert not migration.is_alive()
    assert statuses(engine) == {"1": "completed", "2": "pending", "3": "pending"}
    assert run_all(engine, after) == ["2", "3"]


def test_a_removed_queue_keeps_its_rows(database: Database, engine: sa.Engine, make: Any) -> None:
    before, after = order(QueueConfig(strategy="delete_returning")), order(None)
    project = make(before)
    enqueue(engine, before, "1", "2")
    project.migrate(after)
    assert "sqlaqueue" not in dump(database)
    with pytest.raises(Exception, match="existing_rows"):
        project.downgrade()
    project.edit("existing_rows=...", "existing_rows='completed'")
    project.downgrade()
    assert statuses(engine) == {"1": "completed", "2": "completed"}
    assert run_all(engine, before) == []
    enqueue(engine, before, "3")
    assert run_all(engine, before) == ["3"]


def test_dropping_the_status_asks_about_existing_rows(engine: sa.Engine, make: Any) -> None:
    before = order(QueueConfig())
    after = order(QueueConfig(strategy="delete_returning", rows_are_messages=True))
    project = make(before)
    enqueue(engine, before, "1")
    assert run_all(engine, before) == ["1"]
    project.revise("own messages", after)
    with pytest.raises(Exception, match="each row of the table is a job"):
        project.upgrade()
    execute(engine, "DELETE FROM orders WHERE status = 'completed'")
    enqueue(engine, before, "2")
    project.edit("existing_rows=...", "existing_rows='pending'")
    project.upgrade()
    project.check()
    assert run_all(engine, after) == ["2"]
