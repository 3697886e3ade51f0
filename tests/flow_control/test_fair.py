"""Turns: among the jobs of one priority, keys take turns."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import Fair, Limit, QueueConfig, QueueMixin
from tests.flow_control.models import claim_and_commit, create, customers, insert, make_job, of_customers


def turns(engine: sa.Engine, job: Any, number: int, n: int = 1) -> list[Any]:
    """Claim several times, and return the customers in the order of the claims."""
    return [customer for _ in range(number) for customer in customers(claim_and_commit(engine, job, n))]


def test_keys_take_turns_whatever_the_number_of_their_jobs(engine: sa.Engine) -> None:
    job = make_job(fair=Fair("customer_id"))
    create(engine, job)
    insert(engine, job, of_customers(*[1] * 1000, *[2] * 3, 3, None))
    order = turns(engine, job, 10)
    assert sorted(order[:4], key=str) == [1, 2, 3, None]
    assert sorted(order[4:6]) == [1, 2]
    assert sorted(order[6:8]) == [1, 2]
    assert order[8:] == [1, 1]


def test_a_key_that_arrives_waits_for_one_turn_of_each_other_at_most(engine: sa.Engine) -> None:
    job = make_job(fair=Fair("customer_id"))
    create(engine, job)
    insert(engine, job, of_customers(*[customer for customer in range(20) for _ in range(30)]))
    turns(engine, job, 7)
    insert(engine, job, of_customers(99))
    assert 99 in turns(engine, job, 21)


def test_a_claim_of_several_gives_each_key_a_turn_and_the_rest_to_those_that_have_more(engine: sa.Engine) -> None:
    job = make_job(fair=Fair("customer_id"))
    create(engine, job)
    insert(engine, job, of_customers(*[1] * 50, *[2] * 50, 3))
    first = customers(claim_and_commit(engine, job, 10))
    assert sorted(first[:3]) == [1, 2, 3]
    assert len(first) == 10
    second = turns(engine, job, 4, 10)
    # What is left over goes to another key each time.
    assert min(second.count(1), second.count(2)) >= 12


def test_a_turn_has_as_many_jobs_as_the_weight(engine: sa.Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(fair=Fair("customer_id", weight="weight"))
        id: Mapped[int] = mapped_column(primary_key=True)
        customer_id: Mapped[int]
        weight: Mapped[int]

    create(engine, Job)
    insert(engine, Job, [{"customer_id": customer, "weight": customer} for customer in (1, 2, 3) for _ in range(60)])
    for n in (1, 2, 5):
        found = turns(engine, Job, 30 // n, n)
        assert [found.count(customer) for customer in (1, 2, 3)] == [5, 10, 15], (n, found)


def test_priorities_come_before_turns(engine: sa.Engine) -> None:
    job = make_job(fair=Fair("customer_id"))
    create(engine, job)
    insert(engine, job, of_customers(*[1] * 20, *[2] * 20, priority=5))
    insert(engine, job, of_customers(1, 1, 1))
    assert turns(engine, job, 3) == [1, 1, 1]
    assert turns(engine, job, 2) in ([1, 2], [2, 1])
    # The turns of one priority go on where they were, whatever another one has had meanwhile.
    for _ in range(5):
        insert(engine, job, of_customers(3))
        assert turns(engine, job, 1) == [3]
        assert sorted(turns(engine, job, 2)) == [1, 2]


def test_a_key_at_its_limit_is_passed_over(engine: sa.Engine) -> None:
    job = make_job(fair=Fair("customer_id"), limits=[Limit(2, per="customer_id")])
    create(engine, job)
    insert(engine, job, of_customers(*[1] * 50, *[2] * 50, *[3] * 50))
    assert sorted(turns(engine, job, 6)) == [1, 1, 2, 2, 3, 3]
    assert claim_and_commit(engine, job) == []


def test_a_turn_reaches_behind_jobs_that_are_held_back(engine: sa.Engine) -> None:
    job = make_job(fair=Fair("customer_id"), limits=[Limit(1, per="kind")])
    create(engine, job)
    insert(engine, job, of_customers(*[1] * 500, kind="a"))
    insert(engine, job, [*of_customers(1, kind="b"), *of_customers(2, 2, kind="c")])
    with Session(engine) as session:
        found = claim_and_commit(engine, job, 10)
        assert sorted((each.customer_id, each.kind) for each in found) == [(1, "a"), (1, "b"), (2, "c")]
        session.rollback()


def test_ten_thousand_keys_cost_a_claim_a_bounded_number_of_buffers(engine: sa.Engine) -> None:
    job = make_job(fair=Fair("customer_id"))
    create(engine, job)
    insert(engine, job, of_customers(*range(10_000), *range(10_000)))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("VACUUM ANALYZE job")
    statements: list[tuple[str, Any]] = []

    def keep(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        statements.append((statement, parameters))

    claim_and_commit(engine, job, 1)
    sa.event.listen(engine, "before_cursor_execute", keep)
    claim_and_commit(engine, job, 1)
    sa.event.remove(engine, "before_cursor_execute", keep)
    statement, parameters = next(each for each in statements if "sqlaqueue_group" in each[0])
    with engine.connect() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters).scalar()
        connection.rollback()
    assert plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"] < 150
