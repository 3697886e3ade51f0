"""Declarations of the queue attributes for type checkers; :mod:`sqlaqueue.mapping.columns` adds them at run time."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlaqueue._typing import Role

    _default: Any = None

    # A dataclass, so that generated constructors of dataclasses and SQLModels accept the attributes.
    @dataclass(init=False, repr=False, eq=False, kw_only=True)
    class QueueAttributes:
        """The attributes that :class:`~sqlaqueue.QueueMixin` adds to a class."""

        status: Role[str] = _default
        """The state of the job, as one of the values of ``QueueConfig.states``."""
        priority: Role[int] = _default
        """Jobs with lower values run first; 0 by default."""
        run_at: Role[datetime] = _default
        """The time from which the job can be claimed; ``now()`` of the database by default."""
        attempts: Role[int] = _default
        """The number of started runs, without those that were released."""
        max_attempts: Role[int | None] = _default
        """The limit of attempts of this job; None for that of the queue."""
        last_error: Role[str | None] = _default
        """The text of the last error."""
        created_at: Role[datetime] = _default
        """The time at which the job was enqueued."""
        finished_at: Role[datetime | None] = _default
        """The time at which the job was completed, failed or cancelled."""
        lease_token: Role[uuid.UUID | None] = _default
        """The token of the current claim; after a rescue, of the last one."""
        lease_expires_at: Role[datetime | None] = _default
        """The time from which the job can be rescued."""
        claimed_by: Role[str | None] = _default
        """The name of the worker that claimed the job."""

else:
    QueueAttributes = object
