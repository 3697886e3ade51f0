"""A standby with feedback, which keeps dead rows of its primary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests import replication

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from tests.servers import Server


def standby_of(primary: Server) -> AbstractContextManager[Server]:
    """Start a standby with hot_standby_feedback and without a slot."""
    return replication.standby_of(primary, "hot_standby_feedback = on")
