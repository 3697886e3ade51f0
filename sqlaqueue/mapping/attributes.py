"""The queue attributes as type checkers see them; :mod:`sqlaqueue.mapping.columns` makes them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlaqueue._typing import Role

    _default: Any = None

    # A dataclass, so that the constructors of dataclasses and SQLModels take the attributes as well.
    @dataclass(init=False, repr=False, eq=False, kw_only=True)
    class QueueAttributes:
        """What :class:`~sqlaqueue.QueueMixin` adds to a class."""

        status: Role[str] = _default
        """Where the job is in its life: one of the values of ``QueueConfig.states``."""
        priority: Role[int] = _default
        """Lower runs first; 0 by default."""
        run_at: Role[datetime] = _default
        """When the job is due; the database's ``now()`` by default."""
        attempts: Role[int] = _default
        """How many runs have been started and not given back."""
        max_attempts: Role[int | None] = _default
        """This job's own limit of attempts; None for the queue's."""
        last_error: Role[str | None] = _default
        """The text of the last error."""
        created_at: Role[datetime] = _default
        """When the job was enqueued."""
        finished_at: Role[datetime | None] = _default
        """When the job was completed, failed or cancelled."""
        lease_token: Role[uuid.UUID | None] = _default
        """The token of the claim that holds the job, or that held it last when its worker died."""
        lease_expires_at: Role[datetime | None] = _default
        """When the job may be taken from its worker."""
        claimed_by: Role[str | None] = _default
        """The worker that holds the job."""

else:
    QueueAttributes = object
