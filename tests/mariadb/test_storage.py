"""Tables of old servers: in another character set than that of the statements, or of another storage engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import sqlaqueue.mariadb
from sqlaqueue import Consumer, QueueConfig, QueueMixin, Unique, claim, complete, enqueue
from sqlaqueue.exc import DatabaseNotReadyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.mariadb.server import MariaDBServer

pytestmark = pytest.mark.once


class Base(DeclarativeBase):
    pass


class Order(QueueMixin, Base):
    __tablename__ = "orders"
    __queue__ = QueueConfig(unique=Unique("customer"))

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str] = mapped_column(sa.String(50))


class File(QueueMixin, Base):
    __tablename__ = "file"
    __queue__ = QueueConfig(strategy="update_status")

    path: Mapped[str] = mapped_column(sa.String(50), primary_key=True)


@pytest.fixture(params=["latin1", "utf8mb3"])
def engine(request: pytest.FixtureRequest, mariadb: MariaDBServer) -> Iterator[sa.Engine]:
    with mariadb.database() as name:
        engine = sa.create_engine(mariadb.url(name))
        sqlaqueue.mariadb.prepare(engine)
        with engine.begin() as connection:
            connection.execute(sa.text(f"ALTER DATABASE {name} CHARACTER SET {request.param}"))
        Base.metadata.create_all(engine)
        yield engine
        engine.dispose()


def test_texts_are_compared_as_elsewhere(engine: sa.Engine) -> None:
    with Session(engine) as session:
        assert [enqueue(session, Order(customer=name))[0].created for name in ("é", "É", "é", "e")] == [
            True,
            True,
            False,
            True,
        ]
        session.commit()
        jobs = session.scalars(claim(Order, 5)).all()
        assert [job.customer for job in jobs] == ["é", "É", "e"]
        session.execute(complete(jobs))
        session.commit()


def test_a_key_of_another_character_set_is_refused(engine: sa.Engine) -> None:
    consumer = Consumer(File, lambda *_: None, sessionmaker(engine))
    with pytest.raises(DatabaseNotReadyError, match=r"File\.path: .*ALTER TABLE file CONVERT TO CHARACTER SET utf8mb4"):
        consumer.drain()
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE file CONVERT TO CHARACTER SET utf8mb4"))
    with Session(engine) as session:
        session.add(File(path="\N{SNOWMAN}"))
        session.commit()
    assert consumer.drain() == 1


def test_a_table_without_transactions_is_refused(engine: sa.Engine) -> None:
    """A claim locks no row there, and a rollback undoes nothing."""
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE file ENGINE = Aria TRANSACTIONAL = 0"))
    with pytest.raises(DatabaseNotReadyError, match=r"File: .*table file is Aria.*ALTER TABLE file ENGINE = InnoDB"):
        Consumer(File, lambda *_: None, sessionmaker(engine)).drain()
