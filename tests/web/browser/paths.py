"""The pages of the dashboard, with keys of the example's jobs."""

from __future__ import annotations

from sqlaqueue.web.dashboard import GET

RUNNING, FAILED = 953, 905
"""E-mails of the example."""

_ALL = {
    "overview": "",
    "queue": "queues/email",
    "jobs": "queues/email/jobs",
    "jobs:due": "queues/email/jobs?state=due",
    "jobs:expired": "queues/email/jobs?state=expired",
    "job": f"queues/email/job?key={FAILED}",
    "edit": f"queues/email/edit?key={FAILED}",
    "confirm": f"queues/email/confirm?action=requeue&key={FAILED}",
    "claim": "queues/email/claim",
    "schedules": "schedules",
    "health": "health",
}

PAGES = {name: path for name, path in _ALL.items() if name.partition(":")[0] in GET}
"""Their paths by name."""
