"""Privileges and row-level security policies that the role of the session lacks for running jobs."""

from __future__ import annotations

from collections.abc import Iterator

from sqlaqueue.admin.diagnosis.examination import Examination
from sqlaqueue.admin.diagnosis.finding import Finding
from sqlaqueue.postgresql.privileges import missing_grants, missing_schema_grants, row_security

_OF_WORKERS = "If workers use another role, examine the queue with theirs."


def check_schemas(examination: Examination) -> Iterator[Finding]:
    """Find schemas that the role may not use."""
    for spec in examination.specs:
        for grant in missing_schema_grants(examination.connection, spec):
            yield Finding(
                severity="critical",
                code="missing_schema_grant",
                queue=spec.name,
                summary=f"The role of this session may not use the schema of {spec.table.fullname}.",
                consequence=f"A Consumer with this role does not start. {_OF_WORKERS}",
                fixes=(f"{grant};",),
            )


def check_privileges(examination: Examination) -> Iterator[Finding]:
    """Find privileges and policies that a Consumer needs and the role lacks."""
    for spec in examination.specs:
        for grant in missing_grants(examination.connection, spec):
            yield Finding(
                severity="critical",
                code="missing_grant",
                queue=spec.name,
                summary=f"The role of this session lacks privileges: {grant.removeprefix('GRANT ')}.",
                consequence=f"A Consumer with this role does not start. {_OF_WORKERS}",
                fixes=(f"{grant};",),
            )
        policies, hidden = row_security(examination.connection, spec)
        if hidden is not None:
            yield Finding(
                severity="warning",
                code="hidden_rows",
                queue=spec.name,
                summary=f"{hidden[0].upper()}{hidden[1:].partition(';')[0]}.",
                consequence=f"A Consumer with this role is idle. {_OF_WORKERS}",
                fixes=("Correct the condition of its policy, or what that reads, such as a setting of the session.",),
            )
        for policy in policies:
            yield Finding(
                severity="critical",
                code="missing_policy",
                queue=spec.name,
                summary=(
                    f"Row-level security hides rows of {spec.name} from the role of this session; it lacks the "
                    f"{policy.removeprefix('CREATE ')}."
                ),
                consequence=f"A Consumer with this role does not start. {_OF_WORKERS}",
                fixes=(f"{policy};",),
            )
