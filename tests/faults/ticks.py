"""Schedules under faults: the schedules, the roles that fire them, and a database whose clock is set."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import AsyncScheduler, Consumer, QueueConfig, QueueMixin, Schedule, Scheduler, Tick, Unique
from sqlaqueue.consumer import pace
from sqlaqueue.postgresql.schedule_tables import SCHEDULE_CHANNEL
from tests.faults.processes import Actor
from tests.servers import Database

PROGRAMS = ("old", "new")
EDITS = ("*/2 * * * * *", "*/3 * * * * *")
"""The expressions that an administrator gives to the schedules ``edited ...`` in turn, and programs to others."""

# A lease is short, so that the jobs of a killed consumer do not wait; it is exceeded whenever the clock is set forward.
_OPTIONS: dict[str, Any] = {"lease": 2, "max_attempts": 10_000}


class Base(DeclarativeBase):
    type_annotation_map = {datetime: sa.DateTime(timezone=True)}  # noqa: RUF012 - SQLAlchemy reads it from the class


class Kept(QueueMixin, Base):
    __tablename__ = "kept"
    __queue__ = QueueConfig(strategy="update_status", **_OPTIONS)
    id: Mapped[int] = mapped_column(primary_key=True)
    schedule: Mapped[str]
    tick: Mapped[datetime | None]


class Deleted(QueueMixin, Base):
    __tablename__ = "deleted"
    __queue__ = QueueConfig(strategy="delete_returning", rows_are_messages=True, **_OPTIONS)
    id: Mapped[int] = mapped_column(primary_key=True)
    schedule: Mapped[str]
    tick: Mapped[datetime | None]


class Single(QueueMixin, Base):
    __tablename__ = "single"
    __queue__ = QueueConfig(strategy="delete_returning", unique=Unique("schedule"), **_OPTIONS)
    id: Mapped[int] = mapped_column(primary_key=True)
    schedule: Mapped[str]
    tick: Mapped[datetime | None]


MODELS: tuple[type[Any], ...] = (Kept, Deleted, Single)


def make_kept(tick: Tick) -> Kept:
    return Kept(schedule=tick.schedule, tick=tick.at)


def make_deleted(tick: Tick) -> Deleted:
    return Deleted(schedule=tick.schedule, tick=tick.at)


def make_single(tick: Tick) -> Single:
    return Single(schedule=tick.schedule, tick=tick.at)


MAKE = {Kept: make_kept, Deleted: make_deleted, Single: make_single}


def schedules(program: str) -> list[Schedule[Any]]:
    """Return the 39 schedules of a version of the program.

    The first word of a name tells what the test does to the schedule: nothing to those of which ``all``, the
    ``newest`` or ``some`` missed ticks are fired; ``alone`` may have one unfinished job, and is also run on request;
    ``edited``, ``paused`` and ``moved`` are changed by SQL, and ``version`` by the programs.
    """
    found: list[Schedule[Any]] = []

    def add(name: str, model: type[Any], *, make: bool = False, **options: Any) -> None:
        name = f"{name} {model.__tablename__}"
        jobs: dict[str, Any] = {"make": MAKE[model]} if make else {"values": {"schedule": name}}
        found.append(Schedule(name, model, **jobs, **options))

    for model in MODELS:
        add("all cron 1", model, cron="*/1 * * * * *", catch_up="all", misfire_grace=1)
        add("all cron 2", model, cron="*/2 * * * * *", catch_up="all", make=True)
        add("all every 1", model, every=1, catch_up="all", make=True)
        add("all every 3", model, every=3, catch_up="all", jitter=0.5, timezone="Europe/Berlin")
        add("newest cron 1", model, cron="*/1 * * * * *", catch_up="latest", misfire_grace=2)
        add("newest every 2", model, every=2, catch_up="latest", misfire_grace=1, make=True)
        add("some cron 1", model, cron="*/1 * * * * *", catch_up=7, misfire_grace=1, make=True)
        add("alone every 1", model, every=1, catch_up="all", skip_unfinished=True)
        add("alone cron 1", model, cron="*/1 * * * * *", skip_unfinished=True, misfire_grace=1, make=True)
        add("edited", model, cron=EDITS[0], catch_up="all")
        add("paused", model, every=1, catch_up=5, make=True)
        add("moved", model, cron="*/2 * * * * *", catch_up="all")
        add("version", model, cron=EDITS[PROGRAMS.index(program)], catch_up="all", make=program == "new")
    return found


# -- the roles: they fire the schedules, and a consumer runs their jobs as well, until they are killed -----------------


def schedule(actor: Actor, *, url: str, program: str) -> None:
    engine = sa.create_engine(url, connect_args={"application_name": actor.name})
    Scheduler(sessionmaker(engine), schedules(program)).run()


def schedule_async(actor: Actor, *, url: str, program: str) -> None:
    engine = create_async_engine(url, connect_args={"server_settings": {"application_name": actor.name}})
    asyncio.run(AsyncScheduler(async_sessionmaker(engine), schedules(program)).run())


def consume(actor: Actor, *, url: str, program: str) -> None:
    """Run a Consumer of each queue, one of which fires the schedules."""
    pace.RESCUE = 0.2
    rng, engine = actor.rng, sa.create_engine(url, connect_args={"application_name": actor.name}, pool_size=20)

    def handle(_: Session, job: Any) -> None:
        if job.schedule.startswith("alone"):
            # Longer than from one tick to the next, now and then.
            time.sleep(rng.choice([0, 0, 0.3, 1.2]))

    with contextlib.ExitStack() as stack:
        fires = rng.choice(MODELS)
        for model in MODELS:
            consumer = Consumer(
                model,
                handle,
                sessionmaker(engine),
                batch_size=rng.choice([20, 50]),
                concurrency=2,
                poll_interval=0.2,
                schedules=schedules(program) if model is fires else [],
            )
            stack.enter_context(consumer)
        while True:
            time.sleep(60)


# -- the database: its clock can be set, and it records what the checks need -------------------------------------------

# The functions are found before those of pg_catalog, by the search_path. As the originals do, the first one returns one
# time throughout a statement, and the second one throughout a transaction, unless the clock is set meanwhile.
_CLOCK = """
    CREATE TABLE clock AS SELECT interval '0' AS moved;
    CREATE FUNCTION public.statement_timestamp() RETURNS timestamptz STABLE LANGUAGE sql AS
    'SELECT pg_catalog.statement_timestamp() + moved FROM public.clock';
    CREATE FUNCTION public.now() RETURNS timestamptz STABLE LANGUAGE sql AS
    'SELECT pg_catalog.now() + moved FROM public.clock';
"""

# The jobs that were committed, as those of one queue are deleted when they are done. The count is of jobs that were
# unfinished at the moment of the insertion, the new one among them.
_RECORDS = """
    CREATE TABLE inserted_job (queue text, id bigint, schedule text, tick timestamptz, unfinished bigint);
    CREATE FUNCTION record_job() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE unfinished bigint;
    BEGIN
      IF NEW.schedule LIKE 'alone%' AND TG_TABLE_NAME = 'deleted' THEN
        SELECT count(*) INTO unfinished FROM deleted WHERE schedule = NEW.schedule;
      ELSIF NEW.schedule LIKE 'alone%' THEN
        EXECUTE format('SELECT count(*) FROM %I WHERE schedule = $1 AND status IN (''pending'', ''processing'')',
          TG_TABLE_NAME) INTO unfinished USING NEW.schedule;
      END IF;
      INSERT INTO inserted_job VALUES (TG_TABLE_NAME, NEW.id, NEW.schedule, NEW.tick, unfinished);
      RETURN NULL;
    END $$;
    ALTER TABLE sqlaqueue_tick ADD began timestamptz DEFAULT pg_catalog.now(),
      ADD written timestamptz DEFAULT clock_timestamp(), ADD transaction xid8 DEFAULT pg_current_xact_id();
"""

_NEVER = datetime.max.replace(tzinfo=UTC)
_FIRING = """
    SELECT application_name, pid FROM pg_stat_activity JOIN pg_locks USING (pid)
    WHERE application_name = ANY (%s) AND (relation = to_regclass('sqlaqueue_tick')
       OR relation = to_regclass('sqlaqueue_schedule') AND mode <> 'AccessShareLock')
    LIMIT 1
"""


@dataclass
class Setting:
    """How far the clock was set forward, for how long by the real clock."""

    moved: timedelta
    since: datetime
    until: datetime = _NEVER


@dataclass
class Clock:
    """How the clock was set; the first setting is that of the beginning."""

    settings: list[Setting]

    def latest(self, since: datetime, until: datetime) -> datetime:
        """Return the latest time that the clock has shown between two real times."""
        return max(min(each.until, until) + each.moved for each in self._shown(since, until))

    def earliest(self, since: datetime, until: datetime) -> datetime:
        """Return the earliest time that the clock has shown between two real times."""
        return min(max(each.since, since) + each.moved for each in self._shown(since, until))

    def _shown(self, since: datetime, until: datetime) -> list[Setting]:
        return [each for each in self.settings if each.since <= until and each.until >= since]

    @property
    def began(self) -> datetime:
        return self.settings[0].since


@dataclass
class TickDatabase:
    """The database, with an administrator's connection."""

    connection: psycopg.Connection[Any]
    rng: random.Random
    clock: Clock = field(default_factory=lambda: Clock([]))
    requested: set[tuple[str, datetime]] = field(default_factory=set)
    """The runs that were requested, by schedule and moment."""
    pauses: list[tuple[str, datetime, datetime]] = field(default_factory=list)
    """The schedules that were paused, from when until when by the real clock."""
    paused: dict[str, datetime] = field(default_factory=dict)

    @classmethod
    def create(cls, database: Database, connection: psycopg.Connection[Any], rng: random.Random) -> TickDatabase:
        """Create all tables; the processes are yet to write the schedules."""
        connection.execute(f"ALTER DATABASE {database.name} SET search_path = public, pg_catalog")
        connection.execute("SET search_path = public, pg_catalog")
        connection.execute(_CLOCK)
        schedules("old")
        engine = sa.create_engine(database.url())
        Base.metadata.create_all(engine)
        engine.dispose()
        connection.execute(_RECORDS)
        for model in MODELS:
            trigger = "FOR EACH ROW EXECUTE FUNCTION record_job()"
            connection.execute(f"CREATE TRIGGER record AFTER INSERT ON {model.__tablename__} {trigger}")
        found = cls(connection, rng)
        found.clock.settings.append(Setting(timedelta(), found.real_time()))
        return found

    def one(self, query: str, *parameters: Any) -> Any:
        return self.connection.execute(query, parameters).fetchone()

    def number(self, query: str, *parameters: Any) -> int:
        return int(self.one(query, *parameters)[0])

    def real_time(self) -> datetime:
        """Return the time by the server's own clock."""
        found: datetime = self.one("SELECT clock_timestamp()")[0]
        return found.astimezone(UTC)

    # -- the clock -------------------------------------------------------------------------------------------------

    @property
    def moved(self) -> timedelta:
        """How far the clock is ahead of the server's own."""
        return self.clock.settings[-1].moved

    def move_clock(self, seconds: float) -> None:
        since, moved = self.real_time(), self.moved + timedelta(seconds=seconds)
        self.connection.execute("UPDATE clock SET moved = %s", [moved])
        self.clock.settings[-1].until = self.real_time()
        self.clock.settings.append(Setting(moved, since))
        self.wake()

    def wake(self) -> None:
        """Let the processes look at the schedules, as after an edit: they have planned their sleep by the old clock."""
        self.connection.execute("SELECT pg_notify(%s, 'poll')", [SCHEDULE_CHANNEL])

    # -- the administrator -----------------------------------------------------------------------------------------

    def administrate(self) -> None:
        queue = self.rng.choice(MODELS).__tablename__
        changes = [self._edit, self._pause_or_resume, self._pause_or_resume, self._request, self._request, self._move]
        self.rng.choice(changes)(queue)

    def administrate_all(self) -> None:
        """Change schedules of each queue, while the clock is set back: none of them may fire what is in the past."""
        for model in MODELS:
            self._edit(model.__tablename__)
            self._pause_or_resume(model.__tablename__)
            self._request(model.__tablename__)
            self._move(model.__tablename__)

    def _edit(self, queue: str) -> None:
        name = f"edited {queue}"
        self._update("cron = CASE cron WHEN %s THEN %s ELSE %s END", name, EDITS[0], EDITS[1], EDITS[0])

    def _pause_or_resume(self, queue: str) -> None:
        name = f"paused {queue}"
        if name in self.paused:
            self._resume(name)
        else:
            # Behind the lock of a process that fires it.
            self._update("paused_at = statement_timestamp()", name)
            self.paused[name] = self.real_time()

    def _resume(self, name: str) -> None:
        resumed = self.real_time()
        self._update("paused_at = NULL, planned_for = 'paused'", name)
        self.pauses.append((name, self.paused.pop(name), resumed))

    def _request(self, queue: str) -> None:
        name = f"{self.rng.choice(['alone every 1', 'alone cron 1', 'edited', 'paused'])} {queue}"
        query = "UPDATE sqlaqueue_schedule SET run_requested_at = statement_timestamp() WHERE name = %s"
        row = self.one(f"{query} RETURNING run_requested_at", name)
        self.requested.add((name, row[0].astimezone(UTC)))

    def _move(self, queue: str) -> None:
        name = f"moved {queue}"
        if self.rng.random() < 0.3:
            # The next process that starts writes it anew.
            self.connection.execute("DELETE FROM sqlaqueue_schedule WHERE name = %s", [name])
        else:
            seconds = 2 * self.rng.randint(1, 10)
            self._update("next_tick = next_tick - %s", name, timedelta(seconds=seconds))

    def _update(self, values: str, name: str, *parameters: Any) -> None:
        self.connection.execute(f"UPDATE sqlaqueue_schedule SET {values} WHERE name = %s", [*parameters, name])

    # -- to wait ---------------------------------------------------------------------------------------------------

    def firing_backend(self, names: list[str]) -> tuple[str, int] | None:
        """Return which of the named processes is firing, and its backend; None if none is in a while."""
        until = time.monotonic() + 0.7
        while time.monotonic() < until:
            row = self.one(_FIRING, names)
            if row is not None:
                return row[0], row[1]
        return None

    def ticks(self) -> int:
        return self.number("SELECT count(*) FROM sqlaqueue_tick")

    def overdue(self) -> int:
        """Return how many schedules are late by more than the processes need to fire them."""
        late = "next_tick < statement_timestamp() - interval '3 s' OR next_tick IS NULL"
        return self.number(f"SELECT count(*) FROM sqlaqueue_schedule WHERE paused_at IS NULL AND ({late})")

    def behind(self) -> int:
        """Return how many of the edited schedules are due, or were edited since a process has looked at them."""
        behind = "next_tick <= statement_timestamp() OR NOT starts_with(planned_for, cron)"
        return self.number(f"SELECT count(*) FROM sqlaqueue_schedule WHERE starts_with(name, 'edited') AND ({behind})")

    def unfinished(self) -> int:
        kept, single = (f"SELECT count(*) FROM {each} WHERE finished_at IS NULL" for each in ("kept", "single"))
        return self.number(f"SELECT ({kept}) + ({single}) + (SELECT count(*) FROM deleted)")

    def resume_all(self) -> None:
        """Resume what is paused, and set the clock forward to the latest time that it has shown."""
        for name in list(self.paused):
            self._resume(name)
        now = self.real_time()
        behind = self.clock.latest(self.clock.began, now) - (now + self.moved)
        if behind > timedelta():
            self.move_clock(behind.total_seconds())

    def pause_all(self) -> None:
        """End the firing."""
        self.connection.execute("UPDATE sqlaqueue_schedule SET paused_at = statement_timestamp()")
