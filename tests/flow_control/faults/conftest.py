"""One fork server serves all rounds of a session."""

from tests.faults.conftest import fork_server

__all__ = ["fork_server"]
