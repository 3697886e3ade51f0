"""The privileges of an exporter's role, as the page names them."""

from __future__ import annotations

import uuid

import sqlalchemy as sa

from tests.admin.models import Setup
from tests.prometheus.values import collect

MESSAGES = ("sqlaqueue_message_job", "message")


def test_a_role_that_may_only_read(setup: Setup) -> None:
    """It reads the jobs or their messages, and the tables of pauses and Consumers."""
    setup.add(setup.model())
    role = f"reader_{uuid.uuid4().hex}"
    tables = ["job", "sqlaqueue_control", "sqlaqueue_consumer"]
    tables += [name for name in MESSAGES if name in setup.model.metadata.tables]
    engine = sa.create_engine(setup.engine.url, connect_args={"options": f"-c role={role}"}, poolclass=sa.NullPool)
    setup.execute(f"CREATE ROLE {role}")
    try:
        setup.execute(f"GRANT USAGE ON SCHEMA public TO {role}")
        setup.execute(f"GRANT SELECT ON {', '.join(tables)} TO {role}")
        found = collect(engine, setup.model)
        assert (found["scrape_success", "job"], found["jobs", "job", "pending"]) == (1, 1)
        for table in tables[1:]:
            setup.execute(f"REVOKE SELECT ON {table} FROM {role}")
            assert collect(engine, setup.model)["scrape_success", "job"] == 0
            setup.execute(f"GRANT SELECT ON {table} TO {role}")
    finally:
        setup.execute(f"DROP OWNED BY {role}")
        setup.execute(f"DROP ROLE {role}")
