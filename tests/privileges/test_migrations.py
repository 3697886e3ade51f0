"""Migrations by the owner of the tables, who is no superuser."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy.orm import sessionmaker

from sqlaqueue import Consumer
from tests.migrations.project import Project, dump
from tests.privileges.conftest import Base, Roles
from tests.privileges.test_roles import enqueue

pytestmark = pytest.mark.once


@pytest.mark.parametrize("kind", ["delete_returning"])
def test_the_owner_migrates(roles: Roles, tmp_path: Path) -> None:
    made = dump(roles.database)
    Base.metadata.drop_all(roles.engine("owner"))
    project = Project(directory=tmp_path, database=roles.database, metadata=Base.metadata, user=roles.names["owner"])
    text = project.revise()
    assert "definer=True" in text
    project.upgrade()
    project.check()
    assert dump(roles.database) == made
    roles.grant_web()
    enqueue(roles, n=2)
    assert Consumer(roles.Job, lambda session, job: None, sessionmaker(roles.engine("owner"))).drain() == 2


@pytest.mark.parametrize("kind", ["delete_returning"])
def test_a_function_without_security_definer_is_replaced(roles: Roles, tmp_path: Path) -> None:
    """Functions of version 1 had none; a downgrade restores it."""
    function = "sqlaqueue_message_orders_sync"
    roles.grant_web()
    roles.execute(
        f'ALTER FUNCTION {function} SECURITY INVOKER SET search_path = "$user", public',
        f"GRANT EXECUTE ON FUNCTION {function} TO PUBLIC",
        f"COMMENT ON FUNCTION {function} IS 'sqlaqueue, version 1'",
    )
    before = dump(roles.database)
    project = Project(directory=tmp_path, database=roles.database, metadata=Base.metadata, user=roles.names["owner"])
    project.revise()
    project.upgrade()
    project.check()
    enqueue(roles)
    project.downgrade()
    assert dump(roles.database) == before
