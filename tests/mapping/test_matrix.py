"""Every kind of model supports all verbs under each strategy and driver; see ``Life``."""

import enum
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue import QueueConfig, cancel, claim, complete, fail, purge, release, requeue, retry
from tests.mapping.conftest import DRIVERS, AwaitableEngine, Built, TidyDatabase, awaitable_engine
from tests.mapping.kinds import KINDS

JOBS = range(6)
PRIORITIES = (1, 0, 2, 0, 1, 0)


def cells() -> Iterator[Any]:
    """Yield combinations of kind, strategy and driver.

    By default each kind is tested with one strategy and one driver, in turn, and with all in `full`.
    """
    for row, (name, kind) in enumerate(KINDS.items()):
        for place, strategy in enumerate(kind.strategies):
            for column, driver in enumerate(DRIVERS):
                in_turn = place == row % len(kind.strategies) and column == row % len(DRIVERS)
                marks = () if in_turn else (pytest.mark.thorough,)
                yield pytest.param(name, strategy, driver, id=f"{name}-{strategy}-{driver}", marks=marks)


@pytest.mark.few(18)
@pytest.mark.parametrize(("name", "strategy", "driver"), [*cells()])
async def test_every_kind_of_model_supports_all_verbs(
    tidy: TidyDatabase, name: str, strategy: str, driver: str
) -> None:
    built = KINDS[name].build(partial(QueueConfig, strategy=strategy))
    with tidy.schemas(*built.schemas):
        before = tidy.objects()
        async with awaitable_engine(tidy.database, driver, built.options) as engine:
            await engine.ddl(built.metadata.create_all)
            created = tidy.objects()
            await engine.ddl(built.metadata.create_all)
            assert before < tidy.objects() == created
            await Life(built, engine).lived()
            await engine.ddl(built.metadata.drop_all)
        assert tidy.objects() == before


class Life:
    """All verbs on a queue with six jobs, which are identified by number."""

    def __init__(self, built: Built, engine: AwaitableEngine) -> None:
        self.built, self.engine, self.model = built, engine, built.model
        self.keys: dict[int, Any] = {}
        self.expected: dict[int, str] = {}

    async def lived(self) -> None:
        await self.enqueue()
        await self.claim_some_and_settle_each_otherwise()
        await self.claim_the_rest_and_complete()
        await self.cancel()
        await self.requeue()
        await self.claim_and_roll_back()
        await self.fail_and_purge()

    async def enqueue(self) -> None:
        async with self.engine.session() as session:
            session.add_all([self.built.job(number, priority=PRIORITIES[number]) for number in JOBS[:4]])
            await session.flush()
            for number in JOBS[4:]:
                values = self.built.job_values(number, priority=PRIORITIES[number])
                await session.execute(sa.insert(self.built.class_of(number)), [values])
            await session.commit()
        self.keys = {number: key for number, (key, _) in (await self.rows()).items()}
        await self.expect(dict.fromkeys(JOBS, "pending"))

    async def claim_some_and_settle_each_otherwise(self) -> None:
        async with self.engine.session() as session:
            jobs = (await session.execute(claim(self.model, 4))).scalars().all()
            done, again, failed, released = self.check_claimed(session, jobs, self.waiting()[:4])
            delay = 60 if self.built.attribute("run_at") else None
            for number, verb in (
                (done, complete(jobs[0])),
                (again, retry(jobs[1], delay=delay, error="once more")),
                (failed, fail([jobs[2]], error=ValueError("bad"))),
                (released, release(jobs[3:])),
            ):
                assert (await session.scalars(verb)).all() == [self.keys[number]]
            await session.commit()
        await self.expect({done: "completed", again: "delayed" if delay else "pending", failed: "failed"})
        await self.check("attempts", dict.fromkeys((done, again, failed), 1), default=0)
        await self.check("last_error", {again: "once more", failed: "ValueError: bad"}, default=None)

    async def claim_the_rest_and_complete(self) -> None:
        async with self.engine.session() as session:
            jobs = (await session.execute(claim(self.model, 10))).scalars().all()
            rest = self.check_claimed(session, jobs, self.waiting())
            await session.execute(complete(jobs))
            await session.commit()
        await self.expect(dict.fromkeys(rest, "completed"))

    async def cancel(self) -> None:
        delayed = [number for number, state in self.expected.items() if state == "delayed"]
        async with self.engine.session() as session:
            keys = await session.scalars(cancel(self.model))
            assert keys.all() == [self.keys[number] for number in delayed]
            await session.commit()
        await self.expect(dict.fromkeys(delayed, "cancelled"))

    async def requeue(self) -> None:
        async with self.engine.session() as session:
            keys = await session.scalars(requeue(self.model))
            assert sorted(keys.all()) == sorted(self.keys[number] for number in self.expected)
            await session.commit()
        await self.expect(dict.fromkeys(self.expected, "pending"))

    async def claim_and_roll_back(self) -> None:
        async with self.engine.session() as session:
            jobs = (await session.execute(claim(self.model, 10))).scalars().all()
            self.check_claimed(session, jobs, self.waiting())
            await session.rollback()
        await self.expect({})

    async def fail_and_purge(self) -> None:
        async with self.engine.session() as session:
            jobs = (await session.execute(claim(self.model, 10))).scalars().all()
            await session.execute(fail(jobs))
            await session.commit()
            await self.expect(dict.fromkeys(self.expected, "failed"))
            keys = await session.scalars(purge(self.model))
            assert sorted(keys.all()) == sorted(self.keys[number] for number in self.expected)
            await session.commit()
        assert await self.rows() == {}

    def waiting(self) -> list[int]:
        """Return the numbers of the due jobs in claim order."""
        priorities = PRIORITIES if self.built.attribute("priority") else [0] * len(JOBS)
        due = [number for number, state in self.expected.items() if state == "pending"]
        return sorted(due, key=lambda number: (priorities[number], self.keys[number]))

    def check_claimed(self, session: Any, jobs: Sequence[Any], expected: Iterable[int]) -> list[int]:
        """Check the instances that a claim returned, and return their numbers."""
        numbers = [_number(job.payload) for job in jobs]
        assert numbers == list(expected)
        for number, job in zip(numbers, jobs, strict=True):
            state = sa.inspect(job)
            assert type(job) is self.built.class_of(number)
            assert state.detached if self.built.is_own_message else job in session
            columns = [*state.mapper.columns.items()]
            here = {name for name, column in columns if column.table is self.built.table}
            assert not state.unloaded & here
            status = self.built.attribute("status")
            assert status is None or self.built.status_values.get("processing", "processing") in status_texts(
                getattr(job, status)
            )
            attempts = self.built.attribute("attempts")
            assert attempts is None or getattr(job, attempts) >= 1
        return numbers

    async def expect(self, changes: dict[int, str]) -> None:
        """Check these changes of states, and that all other states are unchanged.

        A completed job whose claim deletes its row has no row.
        """
        self.expected |= changes
        if self.built.is_own_message:
            self.expected = {n: state for n, state in self.expected.items() if state != "completed"}
        states = {number: state for number, (_, state) in (await self.rows()).items()}
        in_database = {"delayed": "pending"}
        assert states == {n: in_database.get(state, state) for n, state in self.expected.items()}

    async def rows(self) -> dict[int, tuple[Any, str]]:
        """Return key and state of each job in the database."""
        names = {value: state for state, value in self.built.status_values.items()}
        keys, status = sa.inspect(self.model).primary_key, self.built.attribute("status")
        state = sa.literal("pending") if status is None else self.built.column(status)
        found = {}
        for number, (*key, value) in (await self.select(*keys, sa.cast(state, sa.Text))).items():
            found[number] = key[0] if len(key) == 1 else tuple(key), names.get(value, value)
        return found | await self.dead_letters()

    async def dead_letters(self) -> dict[int, tuple[Any, str]]:
        if not self.built.is_own_message:
            return {}
        (table,) = (t for t in self.built.metadata.tables.values() if t.name == "sqlaqueue_dead_letter")
        payload = table.c.row[self.built.column("payload").key].astext
        async with self.engine.session() as session:
            letters = await session.execute(sa.select(payload, table.c.state))
            numbers = {_number(text): state for text, state in letters}
        return {number: (self.keys[number], state) for number, state in numbers.items()}

    async def check(self, role: str, values: dict[int, Any], default: Any) -> None:
        """Check the values of the column of a role, if there is one."""
        attribute = self.built.attribute(role)
        if attribute is not None:
            found = await self.select(self.built.column(attribute))
            assert found == {number: (values.get(number, default),) for number in found}

    async def select(self, *columns: sa.ColumnElement[Any]) -> dict[int, tuple[Any, ...]]:
        async with self.engine.session() as session:
            rows = await session.execute(sa.select(self.built.column("payload"), *columns))
            return {_number(payload): tuple(values) for payload, *values in rows}


def status_texts(value: Any) -> set[str]:
    return {value.name, value.value} if isinstance(value, enum.Enum) else {str(value)}


def _number(payload: str) -> int:
    return int(payload.removeprefix("job "))
