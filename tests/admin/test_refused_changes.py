"""One job that the database refuses to change keeps no other from being changed, and is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import Unique, admin
from tests.models import make_job

if TYPE_CHECKING:
    from collections.abc import Iterator

N, BAD = 20, 7
CHECK = "ALTER TABLE job ADD CONSTRAINT good CHECK (id <> 7) NOT VALID"
DEFERRED = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$;
CREATE CONSTRAINT TRIGGER refuse AFTER UPDATE OR DELETE ON job DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW WHEN (OLD.id = 7) EXECUTE FUNCTION refuse()
"""
REFERENCE = "CREATE TABLE child (job_id integer REFERENCES job (id)); INSERT INTO child VALUES (7)"


Job, Once = make_job(), make_job(unique=Unique("payload"))


@pytest.fixture
def session(sessions: Any, model: type[Any]) -> Iterator[Session]:
    with sessions(model)() as session:
        session.add_all([model(payload=str(n)) for n in range(N)])
        session.commit()
        yield session


CHANGES = {
    "requeue": ("status = 'failed'", CHECK, admin.requeue),
    "cancel": ("status = 'pending'", CHECK, lambda *arguments: len(admin.cancel(*arguments).cancelled)),
    "purge": ("status = 'completed', finished_at = now()", REFERENCE, admin.purge),
    "rescue": ("status = 'processing', lease_expires_at = now() - interval '1 hour'", CHECK, admin.rescue),
}


@pytest.mark.parametrize("model", [Job, Once], ids=["Job", "Once"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("deferred", [False, True])
def test_the_others_are_changed(
    session: Session, model: type[Any], change: str, caplog: Any, *, deferred: bool
) -> None:
    """A deferred constraint is checked at the commit, which would undo the changes of all."""
    state, refusal, function = CHANGES[change]
    session.execute(sa.text(f"UPDATE job SET {state}"))
    session.execute(sa.text(DEFERRED if deferred else refusal))
    session.commit()
    before = session.scalar(sa.text(f"SELECT status FROM job WHERE id = {BAD}"))
    assert function(session, model) == N - 1
    assert session.scalar(sa.text(f"SELECT status FROM job WHERE id = {BAD}")) == before
    left = sa.text("SELECT count(*) FROM job WHERE status = :status")
    assert session.scalar(left, {"status": before}) == 1
    named = [record.job_key for record in caplog.records if getattr(record, "event", None) == "change_refused"]
    assert named == [BAD]


@pytest.mark.parametrize("model", [Job], ids=["Job"])
def test_a_batch_of_one_is_one_of_many(session: Session, caplog: Any) -> None:
    """Whether the refused job is alone in its batch is a matter of chance."""
    state, refusal, function = CHANGES["purge"]
    session.execute(sa.text(f"UPDATE job SET {state}"))
    session.execute(sa.text(refusal))
    session.commit()
    assert function(session, Job, batch_size=1) == N - 1
    assert [record.job_key for record in caplog.records if getattr(record, "event", None) == "change_refused"] == [BAD]


@pytest.mark.parametrize("model", [Job], ids=["Job"])
def test_a_job_that_is_changed_by_itself_raises_the_error(session: Session) -> None:
    session.execute(sa.text("UPDATE job SET status = 'failed'"))
    session.execute(sa.text(CHECK))
    session.commit()
    with pytest.raises(sa.exc.IntegrityError, match="good"):
        admin.requeue(session, session.get(Job, BAD))
