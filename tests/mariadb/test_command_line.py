"""The command line with a server of MariaDB."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue.cli import main
from tests.mariadb.models import Job

if TYPE_CHECKING:
    from collections.abc import Callable

QUEUE = "tests.mariadb.models:Job"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, [*arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("driver", ["mariadb", "mysql+pymysql", "mariadb+asyncmy"])
def test_what_commands_show_and_change(
    url: Callable[[str], str], engine: sa.Engine, sessions: sessionmaker[Session], driver: str
) -> None:
    with sessions() as session:
        session.add_all([Job(id=n) for n in range(1, 5)])
        session.commit()
    address = ["--url", url(driver)]
    (shown,) = json.loads(run("stats", QUEUE, "--json", *address))
    assert shown["due"] == 4
    assert "pending" in run("jobs", QUEUE, *address)
    assert "pending" in run("why", QUEUE, "2", *address)
    run("cancel", QUEUE, "--key", "2", "--yes", *address)
    with sessions() as session:
        assert session.get_one(Job, 2).status == "cancelled"


def test_an_unknown_driver_is_refused() -> None:
    result = CliRunner().invoke(main, ["stats", QUEUE, "--url", "mysql+mysqldb://localhost/shop"])
    assert "the driver 'mysqldb' is not supported; write it as mariadb+pymysql://" in result.output
