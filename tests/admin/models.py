"""What the tests about explanations put into the database: jobs, messages and Consumers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, claim
from sqlaqueue.admin import Explanation, QueueAdmin
from sqlaqueue.mapping.mixin import spec_of
from tests.models import execute
from tests.unique.models import create, make_job

HELD = ("batch_select", "delete_returning", "existing_messages", "rows_are_messages")


class Setup:
    """One queue with its tables, and what the tests do with it."""

    def __init__(self, engine: sa.Engine, model: Any) -> None:
        self.engine, self.model = engine, model
        create(engine, model)

    @classmethod
    def of(cls, engine: sa.Engine, kind: str, **options: Any) -> Setup:
        return cls(engine, make_job(kind, **options))

    def with_job(self, **values: Any) -> Setup:
        self.add(self.model(id=1, **values))
        return self

    def execute(self, statement: str, **parameters: Any) -> None:
        execute(self.engine, statement, **parameters)

    def add(self, *jobs: Any) -> None:
        """Insert jobs, and the messages that an application of existing messages inserts itself."""
        with Session(self.engine) as session:
            session.add_all(jobs)
            session.commit()
            if "message" in self.model.metadata.tables:
                message = self.model.metadata.tables["message"]
                session.execute(sa.insert(message), [{"job_id": job.id} for job in jobs])
                session.commit()

    def add_consumer(
        self, name: str = "web:1", *, listening: bool = True, running: Sequence[Sequence[str]] = (), claimed: int = 0
    ) -> None:
        self.execute(
            "INSERT INTO sqlaqueue_consumer (id, queue, name, host, pid, version, listening, running, claimed, "
            "heartbeat_at, expires_at) VALUES (:name, :queue, :name, 'web', 1, '1', :listening, "
            "CAST(:running AS jsonb), :claimed, now(), now() + interval '1 minute')",
            name=name,
            queue=spec_of(self.model).name,
            listening=listening,
            running=json.dumps([list(key) for key in running]),
            claimed=claimed,
        )

    def explain(self, key: Any = 1) -> Explanation:
        with Session(self.engine) as session:
            return QueueAdmin(session, self.model).explain(key)

    def codes(self, key: Any = 1) -> list[str]:
        return [reason.code for reason in self.explain(key).reasons]

    def text(self, code: str, key: Any = 1) -> str:
        """Return the text of a reason, which must be there."""
        explanation = self.explain(key)
        texts = [reason.text for reason in explanation.reasons if reason.code == code]
        assert texts, str(explanation)
        return texts[0]


def claimed(session: Session, model: Any, number: int = 1) -> Any:
    return session.scalars(claim(model, number)).all()


def make_animals() -> tuple[Any, Any]:
    class Base(DeclarativeBase):
        pass

    class Animal(QueueMixin, Base):
        __tablename__ = "animal"
        __queue__ = QueueConfig()
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str | None]
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "animal"}  # noqa: RUF012 - as SQLAlchemy has it

    class Dog(Animal):
        __mapper_args__ = {"polymorphic_identity": "dog"}  # noqa: RUF012 - as SQLAlchemy has it

    return Animal, Dog


def make_rows() -> Any:
    class Base(DeclarativeBase):
        pass

    class Row(QueueMixin, Base):
        __tablename__ = "row"
        __queue__ = QueueConfig(strategy="batch_select", columns={"created_at": None, "run_at": None})
        year: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
        name: Mapped[str] = mapped_column(primary_key=True)

    return Row
