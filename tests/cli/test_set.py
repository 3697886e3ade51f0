"""``job --set``: columns of one job, changed as the page of the dashboard does it."""

import enum
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, claim, prepare
from sqlaqueue.cli import main
from tests.cli.conftest import environment
from tests.servers import Server


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Base(DeclarativeBase):
    pass


class Order(QueueMixin, Base):
    __tablename__ = "order_to_set"
    __queue__ = QueueConfig(strategy="update_status")

    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str] = mapped_column(sa.String(50), default="nobody")
    note: Mapped[str | None] = mapped_column(sa.String(50))
    number: Mapped[int | None]
    price: Mapped[Decimal | None] = mapped_column(sa.Numeric(10, 2))
    paid: Mapped[bool | None]
    at: Mapped[datetime | None] = mapped_column(sa.DateTime(timezone=True))
    color: Mapped[Color | None]
    token: Mapped[uuid.UUID | None]
    data: Mapped[Any] = mapped_column(sa.JSON, nullable=True)
    raw: Mapped[bytes | None]

    __table_args__ = (sa.CheckConstraint("number > 0", name="number_is_positive"),)


class HeldBase(DeclarativeBase):
    pass


class Held(QueueMixin, HeldBase):
    __tablename__ = "held_to_set"
    __queue__ = QueueConfig(strategy="batch_select")

    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str] = mapped_column(sa.String(50), default="nobody")


ORDER, HELD = f"{__name__}:Order", f"{__name__}:Held"

pytestmark = pytest.mark.once


class Place:
    """A database with an order that has failed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = prepare(sa.create_engine(url))
        Base.metadata.create_all(self.engine)
        self.add(Order(status="failed", note="call"))

    def add(self, job: Any) -> None:
        with Session(self.engine) as session:
            session.add(job)
            session.commit()

    def order(self) -> Order:
        with Session(self.engine) as session:
            return session.scalars(sa.select(Order)).one()

    def invoke(self, *arguments: str, answer: str | None = None) -> Result:
        environment = {"SQLAQUEUE_URL": self.url, "COLUMNS": "200"}
        return CliRunner().invoke(main, ["job", *arguments], input=answer, env=environment)

    def ok(self, *arguments: str) -> str:
        result = self.invoke(ORDER, "1", *arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    def refused(self, *arguments: str, code: int = 2) -> str:
        result = self.invoke(ORDER, "1", *arguments, "--yes")
        assert result.exit_code == code, result.output
        assert result.stdout == ""
        return result.stderr


@pytest.fixture(params=["postgresql", "sqlite", "mariadb"])
def place(request: pytest.FixtureRequest, server: Server, tmp_path: Path) -> Iterator[Place]:
    if request.param == "postgresql":
        with server.database() as database:
            place = Place(database.url())
            yield place
            place.engine.dispose()
    elif request.param == "sqlite":
        place = Place(f"sqlite:///{tmp_path}/jobs.db")
        yield place
        place.engine.dispose()
    else:
        mariadb = request.getfixturevalue("mariadb")
        with mariadb.database() as name:
            place = Place(mariadb.url(name))
            yield place
            place.engine.dispose()


def test_values_are_parsed_by_the_types_of_the_columns(place: Place) -> None:
    token = uuid.uuid4()
    given = {
        "to": "ada=admin@example.com",
        "note": "",
        "number": "12",
        "price": "12.50",
        "paid": "true",
        "at": "2030-12-31T08:00:00+01:00",
        "color": "BLUE",
        "token": str(token),
        "data": '{"a": [1, null]}',
        "priority": "7",
    }
    options = [text for name, value in given.items() for text in ("--set", f"{name}={value}")]
    said = place.ok(*options, "--yes")
    assert said.startswith("order_to_set 1: to from 'nobody' to 'ada=admin@example.com', note from 'call' to '', ")
    order = place.order()
    assert (order.to, order.note, order.number, order.price) == ("ada=admin@example.com", "", 12, Decimal("12.50"))
    assert order.at is not None
    at = order.at if order.at.tzinfo is not None else order.at.replace(tzinfo=UTC)  # two databases have no zones
    assert (order.paid, at) == (True, datetime(2030, 12, 31, 7, tzinfo=UTC))
    assert (order.color, order.token, order.data) == (Color.BLUE, token, {"a": [1, None]})
    assert (order.priority, order.status) == (7, "failed")  # type: ignore[attr-defined] # they are the queue's
    # An empty value is NULL, and only a text can be empty.
    assert "number from 12 to nothing changed" in place.ok("--set", "number=", "--yes")
    assert place.order().number is None
    assert place.ok("--set", "to=ada=admin@example.com") == "order_to_set 1: nothing to change\n"


def test_it_asks_and_shows_what_would_be_changed(place: Place) -> None:
    change = (ORDER, "1", "--set", "to=ada")
    dry = place.invoke(*change, "--dry-run")
    assert (dry.exit_code, dry.stdout) == (0, "order_to_set 1: to from 'nobody' to 'ada' would be changed\n")
    no = place.invoke(*change, answer="n\n")
    assert no.exit_code == 1
    assert "to from 'nobody' to 'ada' will be changed. Continue?" in no.stderr
    assert place.order().to == "nobody"
    assert json.loads(place.ok("--set", "to=ada", "--json", "--dry-run"))["changed"] == {}
    assert json.loads(place.ok("--set", "to=ada", "--yes", "--json")) == {
        "queue": "order_to_set",
        "key": "1",
        "changed": {"to": "ada"},
    }
    assert place.order().to == "ada"


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("to", "--set to: write COLUMN=VALUE"),
        ("too=x", "order_to_set.too does not exist; those that can be changed are to, note, number, price, "),
        ("id=2", "order_to_set.id is the key of the job; those that can be changed are to, "),
        ("status=pending", "is written by the queue; `sqlaqueue requeue` and `sqlaqueue cancel` change it"),
        ("attempts=0", "is written by the queue; `sqlaqueue requeue` sets it to 0"),
        ("claimed_by=me", "is written by the queue; `sqlaqueue rescue` ends the claims of dead workers"),
        ("last_error=none", "order_to_set.last_error says what has happened; those that can be changed are to, "),
        ("raw=x", "order_to_set.raw cannot be changed by a text; those that can be changed are to, "),
        ("number=many", "--set number=many: Write an integer from -2147483648 to 2147483647"),
        ("color=GREEN", "--set color=GREEN: Choose one of the values (RED, BLUE)"),
        ("at=2030-12-31T08:00", "Add the zone, such as Z for UTC or +01:00"),
        ("data={", "--set data={: This is no JSON that can be stored"),
        ("paid=yes", "--set paid=yes: Choose true or false"),
        (f"to={'a' * 51}", "Use at most 50 characters"),
    ],
)
def test_wrong_values_and_columns(place: Place, given: str, said: str) -> None:
    assert said in place.refused("--set", given)
    assert place.order().to == "nobody"


def test_what_the_database_refuses(place: Place) -> None:
    said = place.refused("--set", "number=-1", "--set", "to=ada")
    assert "number_is_positive" in said
    assert place.order().to == "nobody"
    assert "--set to=b: it is given twice" in place.refused("--set", "to=a", "--set", "to=b")


def test_a_job_that_is_running_stays(place: Place) -> None:
    place.add(Order(id=2))
    with Session(place.engine) as session:
        session.execute(claim(Order, 1)).scalars().all()
        session.commit()
    running = place.invoke(ORDER, "2", "--set", "to=ada", "--yes")
    assert (running.exit_code, running.stdout) == (1, "")
    assert "order_to_set 2: it is running; wait for its end, or cancel it first" in running.stderr
    missing = place.invoke(ORDER, "3", "--set", "to=ada", "--yes")
    assert (missing.exit_code, "there is no job 3" in missing.stderr) == (1, True)
    wrong = place.invoke(ORDER, "x", "--set", "to=ada", "--yes")
    assert wrong.exit_code == 2
    for option in ("--yes", "--dry-run"):
        assert f"{option}: nothing is to be changed; give --set COLUMN=VALUE" in place.invoke(ORDER, "1", option).stderr


def test_a_job_that_a_transaction_has_claimed_stays(sessions: Any) -> None:
    make = sessions(HeldBase)
    with make() as session, make() as other:
        other.add(Held(id=1))
        other.commit()
        session.execute(claim(Held, 1)).scalars().all()
        # Without the lock that is not waited for, the edit would wait until the claim ends.
        url = session.get_bind().url.update_query_dict({"options": "-c lock_timeout=5s"})
        url = url.render_as_string(hide_password=False)
        said = CliRunner().invoke(main, ["job", HELD, "1", "--set", "to=ada", "--yes"], env={"SQLAQUEUE_URL": url})
    assert said.exit_code == 1
    assert "held_to_set 1: it is locked: a worker runs it, or a program changes it; try again" in said.stderr


def test_it_needs_no_extra_of_the_dashboard(tmp_path: Path) -> None:
    place = Place(f"sqlite:///{tmp_path}/jobs.db")
    place.engine.dispose()
    program = (
        "import sys; sys.modules['jinja2'] = sys.modules['starlette'] = None; from sqlaqueue.cli import main; main()"
    )
    arguments = ["job", ORDER, "1", "--set", "to=ada", "--yes"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env=environment(SQLAQUEUE_URL=place.url),
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "order_to_set 1: to from 'nobody' to 'ada' changed\n"), done.stderr
