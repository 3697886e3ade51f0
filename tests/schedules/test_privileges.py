"""A role with the privileges of docs/privileges.md fires schedules, and each missing one is named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import QueueMixin, Schedule, Scheduler, admin
from sqlaqueue.exc import DatabaseNotReadyError
from sqlaqueue.schedules.schedule import schedule_groups
from sqlaqueue.schedules.store import delete_old_ticks
from tests.schedules.models import HOUR, execute, fire_due, pass_time, start

if TYPE_CHECKING:
    from tests.servers import Database

pytestmark = pytest.mark.once

PAGE = Path(__file__).parents[2] / "docs" / "privileges.md"


class Base(DeclarativeBase):
    pass


class Email(QueueMixin, Base):
    __tablename__ = "email"
    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str]


REMINDER = Schedule("reminder", Email, every=HOUR, values={"to": "ada@example.com"}, skip_unfinished=True)


@pytest.fixture
def grants(engine: sa.Engine) -> Iterator[list[str]]:
    """Return the statements of the page for a role of this test."""
    Base.metadata.create_all(engine)
    section = PAGE.read_text().partition("\n## Schedules\n")[2].partition("\n## ")[0]
    found = [line.rstrip(";") for line in section.splitlines() if line.startswith("GRANT ")]
    role = f"scheduler_{engine.url.database}"
    execute(engine, f"CREATE ROLE {role}")
    yield [statement.replace("TO scheduler", f"TO {role}") for statement in found]
    execute(engine, f"DROP OWNED BY {role}")
    execute(engine, f"DROP ROLE {role}")


def as_role(shared: Database) -> sa.Engine:
    options = f"-c role=scheduler_{shared.name}"
    return sa.create_engine(shared.url(), connect_args={"options": options}, poolclass=sa.NullPool)


def test_the_privileges_of_the_page_are_enough(shared: Database, engine: sa.Engine, grants: list[str]) -> None:
    execute(engine, "; ".join([*grants, f"GRANT USAGE ON SCHEMA public TO scheduler_{shared.name}"]))
    role = as_role(shared)
    start(role, [REMINDER])
    for _ in range(2):
        pass_time(engine, HOUR)
        assert len(fire_due(role, [REMINDER])) == 1
    [group] = schedule_groups([REMINDER], "x")
    with Session(role) as session:
        delete_old_ticks(session, group)
        assert admin.schedule(session, Email, "reminder").last_tick is not None
    with Scheduler(sessionmaker(role), [REMINDER]):
        pass


def test_each_missing_privilege_is_named(shared: Database, engine: sa.Engine, grants: list[str]) -> None:
    execute(engine, "; ".join([*grants, f"GRANT USAGE ON SCHEMA public TO scheduler_{shared.name}"]))
    scheduler = Scheduler(sessionmaker(as_role(shared)), [REMINDER])
    missing = 0
    for statement in grants:
        rights, where, role = re.fullmatch(r"GRANT (.+) ON (.+) TO (\w+)", statement).groups()  # type: ignore[union-attr] # each one matches
        for right in [rights] if "(" in rights else rights.split(", "):
            execute(engine, f"REVOKE {right} ON {where} FROM {role}")
            with pytest.raises(DatabaseNotReadyError, match="lacks privileges that it needs to fire") as found:
                scheduler.run()
            said = re.findall(r"GRANT .*? TO \w+", str(found.value))
            execute(engine, "; ".join(said))
            missing += len(said)
            with scheduler:
                pass
    assert missing == 9
