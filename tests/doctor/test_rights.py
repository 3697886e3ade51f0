"""Rights of the session's role."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import admin
from tests.doctor.conftest import Patient
from tests.doctor.models import MODELS, Email, Letter


@pytest.fixture
def role(patient: Patient) -> Iterator[str]:
    # Roles are those of the whole server.
    name = f"night shift {patient.database.name}"
    patient.execute(f'CREATE ROLE "{name}"')
    yield name
    patient.execute(f'DROP OWNED BY "{name}"', f'DROP ROLE "{name}"')


@pytest.fixture
def as_role(patient: Patient, role: str) -> sa.Engine:
    """Return an engine whose sessions have the role of a worker, with all rights."""
    patient.execute(
        f'GRANT ALL ON ALL TABLES IN SCHEMA public TO "{role}"',
        f'GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO "{role}"',
    )
    engine = sa.create_engine(patient.database.url(), poolclass=sa.NullPool)

    @sa.event.listens_for(engine, "connect")
    def _(connection: Any, _: Any) -> None:
        connection.execute(f'SET ROLE "{role}"')
        connection.commit()

    return engine


def findings(engine: sa.Engine, *models: Any) -> list[admin.Finding]:
    with Session(engine) as session:
        found = admin.doctor(session, *models)
    # The role may not see the sessions of others.
    return [each for each in found if each.code != "hidden_sessions"]


def test_a_role_with_all_rights(as_role: sa.Engine) -> None:
    assert findings(as_role, *MODELS) == []


def test_missing_grants(patient: Patient, role: str, as_role: sa.Engine) -> None:
    patient.execute(f'REVOKE ALL ON email, sqlaqueue_consumer FROM "{role}"')
    found = findings(as_role, Email, Letter)
    grants = [each for each in found if each.code == "missing_grant"]
    assert {each.queue for each in grants} == {"email", "letter"}
    assert "email" in " ".join(each.summary for each in grants)
    # What cannot be read is not said to be healthy.
    failed = [each for each in found if each.code == "check_failed"]
    assert failed
    assert all(each.facts["sqlstate"] == "42501" for each in failed)
    for finding in grants:
        patient.repair(finding.fixes[0])
    assert findings(as_role, *MODELS) == []


def test_a_schema_that_the_role_may_not_use(patient: Patient, role: str, as_role: sa.Engine) -> None:
    patient.execute("CREATE SCHEMA vault")
    engine = as_role.execution_options(schema_translate_map={None: "vault"})
    Email.metadata.create_all(patient.engine.execution_options(schema_translate_map={None: "vault"}))
    (finding,) = findings(engine, Email)
    assert (finding.code, finding.severity) == ("missing_schema_grant", "critical")
    assert finding.fixes == (f'GRANT USAGE ON SCHEMA vault TO "{role}";',)
    patient.repair(finding.fixes[0])
    patient.execute(f'GRANT ALL ON ALL TABLES IN SCHEMA vault TO "{role}"')
    patient.execute(f'GRANT ALL ON ALL SEQUENCES IN SCHEMA vault TO "{role}"')
    assert findings(engine, Email) == []


def test_missing_policies(patient: Patient, as_role: sa.Engine) -> None:
    patient.execute("ALTER TABLE email ENABLE ROW LEVEL SECURITY")
    found = findings(as_role, Email)
    assert {each.code for each in found} == {"missing_policy"}
    assert all("email" in each.summary for each in found)
    quoted = [each.fixes[0] for each in found]
    for fix in quoted:
        patient.repair(fix)
    assert findings(as_role, Email) == []
