"""Classes of jobs that wait for others, and what must hold for their rows in every committed state."""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, mapped_column, relationship

from sqlaqueue import QueueConfig, QueueMixin, WaitFor
from sqlaqueue.mapping.mixin import spec_of
from tests.models import new_base

STRATEGIES = ("update_status", "batch_select", "delete_returning")
TWO = "INSERT INTO batch (id) VALUES (1), (2)"
THREE_MEMBERS = "INSERT INTO member (id, batch_id) VALUES (1, 1), (2, 1), (3, 2)"
LEVELS = "INSERT INTO node (id, parent_id) VALUES (1, NULL), (2, 1), (3, 2), (4, 2), (5, 4)"


def job_class(base: Any, name: str, attributes: Mapping[str, Any], table: Any = None, **config: Any) -> Any:
    """Return a class of jobs; its table has the name of the class in lower case."""
    body: dict[str, Any] = {"__module__": __name__, "__tablename__": name.lower(), "__queue__": QueueConfig(**config)}
    if table:
        body["__table_args__"] = table
    return type(name, (QueueMixin, base), body | dict(attributes))


def make_batch(
    *,
    on_failure: str | None = None,
    ondelete: str | None = None,
    onupdate: str | None = None,
    config: Mapping[str, Any] | None = None,
    members: Mapping[str, Any] | None = None,
    keys: Sequence[Any] = (sa.Integer,),
    table: Any = None,
    base: Any = None,
    attributes: Mapping[str, Any] | None = None,
) -> tuple[Any, Any]:
    """Return the classes ``Batch`` and ``Member``, whose attribute ``batch`` leads to the batch.

    :param config: the options of the queue of batches; ``members`` are those of the queue of members.
    :param keys: the types of the parts of the key of a batch: ``id``, ``id_2`` and so on.
    """
    base = base or new_base()
    names = [f"id_{number}" if number else "id" for number in range(len(keys))]
    schema = dict(table or {}).get("schema")
    prefix = f"{schema}." if schema else ""
    mine = {name: mapped_column(key, primary_key=True) for name, key in zip(names, keys, strict=True)}
    waits = WaitFor("members", on_failure=on_failure)  # type: ignore[arg-type]  # parametrized tests give any text
    options = {"extra_columns": ("is_open",), "waits_for": waits} | dict(config or {})
    link = {"members": relationship("Member", back_populates="batch", passive_deletes=True)}
    batch = job_class(base, "Batch", mine | link | dict(attributes or {}), dict(table or {}), **options)
    theirs = {f"batch_{name}": mapped_column(key) for name, key in zip(names, keys, strict=True)}
    to = sa.ForeignKeyConstraint(
        list(theirs), [f"{prefix}batch.{name}" for name in names], ondelete=ondelete, onupdate=onupdate
    )
    of_member = {"id": mapped_column(sa.Integer, primary_key=True), **theirs}
    back = {"batch": relationship("Batch", back_populates="members")}
    return batch, job_class(base, "Member", of_member | back, (to, dict(table or {})), **dict(members or {}))


def make_dependent(
    *,
    on_failure: str | None = None,
    ondelete: str | None = None,
    config: Mapping[str, Any] | None = None,
    parents: Mapping[str, Any] | None = None,
    base: Any = None,
) -> tuple[Any, Any]:
    """Return the classes ``Parent`` and ``Child``, which waits for ``a`` and for ``b``."""
    base = base or new_base()
    key = {"id": mapped_column(sa.Integer, primary_key=True)}
    parent = job_class(base, "Parent", key, **dict(parents or {}))
    columns = {
        f"{name}_id": mapped_column(sa.ForeignKey("parent.id", ondelete=ondelete, onupdate="CASCADE")) for name in "ab"
    }
    links = {name: relationship("Parent", foreign_keys=[columns[f"{name}_id"]]) for name in "ab"}
    waits = [WaitFor(name, on_failure=on_failure) for name in "ab"]  # type: ignore[arg-type]  # as above
    child = job_class(
        base,
        "Child",
        {"id": mapped_column(sa.Integer, primary_key=True), **columns, **links},
        **{"waits_for": waits} | dict(config or {}),
    )
    return parent, child


def make_tree(*, to_many: bool, on_failure: str | None = None, **config: Any) -> Any:
    """Return a class whose jobs wait for their parent, or for their children."""
    base = new_base()
    identity = mapped_column(sa.Integer, primary_key=True)
    parent_id = mapped_column(sa.ForeignKey("node.id"))
    waits = WaitFor("children" if to_many else "parent", on_failure=on_failure)  # type: ignore[arg-type]  # as above
    attributes = {
        "id": identity,
        "parent_id": parent_id,
        "parent": relationship("Node", back_populates="children", remote_side=[identity]),
        "children": relationship("Node", back_populates="parent"),
    }
    return job_class(base, "Node", attributes, waits_for=waits, **config)


def set_status(table: str, status: str, *keys: int) -> str:
    return f"UPDATE {table} SET status = '{status}' WHERE id IN ({', '.join(map(str, keys))})"


def execute(engine: sa.Engine, *statements: str) -> Any:
    """Execute statements in a transaction; return the rows of the last one."""
    with Session(engine) as session:
        for each in statements:
            result: Any = session.execute(sa.text(each))
        rows = [tuple(row) for row in result] if result.returns_rows else None
        session.commit()
        return rows


def create(engine: sa.Engine, *models: Any, rows: str = "SELECT 1") -> Any:
    """Create the tables of models, and insert rows; return the first model."""
    models[0].metadata.create_all(engine)
    execute(engine, rows)
    return models[0]


def faults(session: Session | sa.Connection, *models: Any, returns: bool = True, grows: bool = True) -> list[str]:
    """Return what is wrong with the rows of waiting queues when no transaction is open.

    The count of a job that has not begun is that of the states, no job is pending too early, none waits for nothing,
    and nothing is left in the table of changes.

    :param returns: whether a job that was cancelled for another one must be back as soon as none is failed; one whose
        failed job was deleted or left it need not.
    :param grows: whether jobs may have been requeued after the begin of what waits for them.
    """
    found = []
    for model in models:
        spec = spec_of(model)
        if not spec.waits:
            continue
        for job in session.execute(_truth(spec)):
            found += _faults_of(spec, job, returns=returns, grows=grows)
        if left := session.execute(sa.select(sa.func.count()).select_from(spec.side_tables["waits"])).scalar():
            found.append(f"{model.__name__}: {left} rows of changes are left")
    return found


def _truth(spec: Any) -> Any:
    """Select the jobs of a queue, with how many they wait for as the states of those say, and how many have failed."""
    w = spec.table.alias("w")
    level: Any = sa.literal(0)
    failed: Any = sa.literal(0)
    for wait in spec.waits:
        t = wait.awaited.table.alias()
        status = sa.func.coalesce(sa.cast(t.c[wait.awaited.columns["status"].name], sa.Text), "")
        values = {name: _text(wait.awaited, name) for name in ("completed", "failed", "cancelled")}
        ended = ["completed", *(["failed", "cancelled"] if wait.on_failure == "continue" else [])]
        same = [w.c[here.name] == t.c[there.name] for here, there in wait.pairs]
        rows = sa.select(sa.func.count()).select_from(t).where(*same)
        level += rows.where(status.not_in([values[each] for each in ended])).scalar_subquery()
        if wait.on_failure == "cancel":
            failed += rows.where(status.in_([values["failed"], values["cancelled"]])).scalar_subquery()
    roles: dict[str, Any] = {
        "status": sa.Text(),
        "waits_for_count": sa.Integer(),
        "is_open": sa.Boolean(),
        "cancelled_for": sa.Text(),
    }
    columns: list[Any] = [
        sa.cast(w.c[spec.columns[role].name] if spec.has(role) else sa.null(), type_).label(role)
        for role, type_ in roles.items()
    ]
    key = sa.func.concat_ws(" ", *(w.c[each.name] for each in spec.keys)).label("key")
    return sa.select(*columns, level.label("truth"), failed.label("failed"), key)


def _faults_of(spec: Any, job: Any, *, returns: bool, grows: bool) -> list[str]:
    # A pending job may be running where a transaction holds it: its count is not kept.
    kept = ["waiting"] if spec.strategy.holds_transaction else ["waiting", "pending"]
    state = {_text(spec, name): name for name in ("pending", "waiting", "processing", "completed", "cancelled")}.get(
        job.status
    )
    held_back = bool(job.waits_for_count or job.is_open)
    rules = {
        "wrong count": state in kept and job.waits_for_count not in {None, job.truth},
        "pending too early": state == "pending" and held_back,
        "waits for nothing": state == "waiting" and not held_back,
        "has begun too early": not grows and state in {"processing", "completed"} and job.truth > 0,
        "should be cancelled": state == "waiting" and job.failed > 0,
        "should be back": returns and state == "cancelled" and job.cancelled_for is not None and not job.failed,
    }
    what = f"{spec.model.__name__} [{job.key}] {job.status} count={job.waits_for_count} truth={job.truth}"
    return [f"{what}: {rule}" for rule, is_broken in rules.items() if is_broken]


def _text(spec: Any, state: str) -> str:
    value = getattr(spec.config.states, state)
    return str(getattr(value, "name", value))
