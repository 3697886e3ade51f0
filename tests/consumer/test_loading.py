"""Instances are made of what a claim has returned once it is committed, and what happens if they cannot be made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import selectinload

from tests.consumer.bench import Bench, wait_until

N, CLAIM = 12, 4


@contextlib.contextmanager
def loading(bench: Bench, noted: Callable[[Any], None]) -> Iterator[None]:
    """Call something for each instance that is made."""

    def loaded(job: Any, _: Any) -> None:
        noted(job)

    event.listen(bench.Job, "load", loaded)
    try:
        yield
    finally:
        event.remove(bench.Job, "load", loaded)


def test_a_claim_is_committed_before_instances_are_made(leased: Bench) -> None:
    """Else the next one would meet locked rows for as long as that takes."""
    leased.enqueue(N)
    seen: list[str] = []

    def look(job: Any) -> None:
        seen.append(leased.row(job.id).status)

    with loading(leased, look):
        assert leased.consumer(batch_size=CLAIM).drain() == N
    assert seen == ["processing"] * N


@pytest.mark.parametrize("failing", [0, CLAIM + 1, N - 1])
def test_what_cannot_be_loaded_is_claimed_again(bench: Bench, failing: int) -> None:
    """The whole of its claim is, uncounted; and what has ended before has ended once."""
    keys = bench.enqueue(N)
    failures: list[int] = []

    def fail_once(job: Any) -> None:
        if job.id == keys[failing] and not failures:
            failures.append(job.id)
            raise RuntimeError

    server = bench.consumer(batch_size=CLAIM)
    with loading(bench, fail_once):
        assert server.drain() == N
    assert failures == [keys[failing]]
    assert server.told()["completed"] == N
    assert not server.told("lease_lost", "rescued", "retried")
    assert set(bench.attempts().values()) == {1}
    bench.assert_tidy()


def test_what_can_never_be_loaded_waits(leased: Bench) -> None:
    """For whoever can, such as the version of the program that was there before; nothing is held against it."""
    leased.enqueue(N)
    failures: list[int] = []

    def fail(job: Any) -> None:
        failures.append(job.id)
        raise RuntimeError

    with loading(leased, fail), leased.consumer(batch_size=CLAIM).running():
        wait_until(lambda: len(failures) > 2)
    assert leased.states() == {"pending": N}
    assert {row.lease_token for row in leased.rows().values()} == {None}
    assert leased.consumer(batch_size=CLAIM).drain() == N
    assert set(leased.attempts().values()) == {1}


def test_a_class_that_does_not_fit_its_table_is_an_error(leased: Bench) -> None:
    """A Consumer that has never served a job ends with it."""
    leased.enqueue(N)

    def fail(job: Any) -> None:
        msg = f"no payload in {job.id}"
        raise ValueError(msg)

    with loading(leased, fail), pytest.raises(ValueError, match="no payload"):
        leased.consumer(batch_size=CLAIM).drain()
    assert leased.states() == {"pending": N}


def test_what_was_loaded_eagerly_leaves_no_transaction(leased: Bench) -> None:
    """It would look as if each handler had used its session."""
    with leased.sessions() as session:
        session.add_all([leased.Job(owner=leased.Owner(name=str(number))) for number in range(N)])
        session.commit()
    seen: list[tuple[str, bool]] = []

    async def look(hands: Any, jobs: Any) -> None:
        seen.extend((job.owner.name, hands.session.in_transaction()) for job in jobs)

    chosen = sa.select(leased.Job).options(selectinload(leased.Job.owner))
    assert leased.consumer(look, model=chosen, batch=True, batch_size=CLAIM).drain() == N
    assert seen == [(str(number), False) for number in range(N)]


def test_an_instance_that_somebody_keeps_is_not_handed_out_again(bench: Bench) -> None:
    """What it shows belongs to a run that is over."""
    bench.enqueue(N)
    kept: list[tuple[Any, int]] = []

    async def fail_first(hands: Any, job: Any) -> None:
        kept.append((job, job.attempts))
        if job.attempts == 1:
            raise ValueError

    assert bench.consumer(fail_first, batch_size=CLAIM).drain() == 2 * N
    assert len({id(job) for job, _ in kept}) == 2 * N
    assert sorted(attempt for _, attempt in kept) == [1] * N + [2] * N
