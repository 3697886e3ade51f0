"""Edit the arguments of one job: the form, and the transaction that writes it.

The row is locked and not waited for, so that an edit never stands against a worker: a job that a worker has claimed is
refused. A claim that comes later passes over the locked row, or sees what was written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, InvalidRequestError, StatementError
from sqlalchemy.orm import Mapper, Session, attributes, defer, lazyload

from sqlaqueue.admin.changes import requeue_some
from sqlaqueue.admin.jobs import JobFilter
from sqlaqueue.consumer.core.errors import is_connection_lost, is_duplicate, is_lock_or_timeout
from sqlaqueue.log import fields as log_fields
from sqlaqueue.log import logger
from sqlaqueue.queue.names import DEAD_LETTER
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.run import key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import sqlstate, violated_constraint
from sqlaqueue.sql.portable import clock
from sqlaqueue.strategies.delete_row import letters, stored_columns
from sqlaqueue.strategies.existing_messages import ExistingMessages
from sqlaqueue.texts import printable
from sqlaqueue.web.data.edit_fields import EditableField, WrongValue, field_text, field_value, fields_of, violation_of
from sqlaqueue.web.data.job import StoredJob, has_key, letter_of, read_job
from sqlaqueue.web.data.job_columns import JobColumn, JobColumns
from sqlaqueue.web.data.reader import ParameterError

_RAISED = "P0001"
"""The SQLSTATE of RAISE EXCEPTION, by which a trigger of the application refuses a row."""

_BUSY = (
    "Another transaction has locked this job: a worker is running it, or a program is changing it. Try again when that "
    "has ended."
)


_UNLOADABLE = (LookupError, ValueError, TypeError, ArithmeticError, AssertionError, InvalidRequestError)
"""What types of columns and polymorphic classes raise for a value that this program does not know."""


@dataclass(frozen=True)
class EditField:
    field: EditableField
    text: str | None
    """The value; None for NULL."""
    error: str = ""
    """Why the value was refused."""
    stored: str | None = None
    """The value in the database, if another one was typed and the job was changed meanwhile."""
    is_changed: bool = False
    """Whether :attr:`stored` is another value than the typed one."""
    is_fixed: bool = False
    """Whether it cannot be edited here; the error says why."""


@dataclass(frozen=True)
class EditForm:
    job: StoredJob
    fields: Sequence[EditField]
    refused: str = ""
    """Why the job cannot be edited at the moment."""
    problem: str = ""
    """Why what was typed could not be written."""

    @property
    def is_finished(self) -> bool:
        return self.job.state in FINISHED


Outcome = Literal["saved", "requeued", "unchanged", "wrong", "changed", "refused", "missing"]


@dataclass(frozen=True)
class Edited:
    outcome: Outcome
    """``wrong``: a value was refused; ``changed``: the job was written since the form was shown; ``refused``: it runs,
    or is locked; ``missing``: it does not exist any more."""
    form: EditForm | None = None
    """What was typed, with the errors; unless the edit was successful."""
    columns: Sequence[str] = ()
    """The names of the columns that were changed."""
    key: str = ""
    """That of a job that was enqueued."""


@dataclass
class _Attempt:
    """What was typed, on its way into the row."""

    job: StoredJob
    given: Mapping[str, str | None]
    errors: dict[str, str] = field(default_factory=dict)
    values: dict[EditableField, Any] = field(default_factory=dict)
    problem: str = ""


def read_form(session: Session, columns: JobColumns, key: str) -> EditForm | None:
    job = read_job(session, columns, key)
    return None if job is None else _form(columns, job)


def save(
    session: Session, columns: JobColumns, key: str, version: str, given: Mapping[str, str | None], *, requeue: bool
) -> Edited:
    """Write what was typed into the row of a job by the ORM, requeue the job if that is wanted, and commit.

    :param version: that of the job when the form was shown.
    :param given: texts by the names of columns, None for NULL; columns that are left out keep their values.
    :param requeue: whether a finished job is requeued. A dead letter is only changed with that.
    :raises ParameterError: if the key cannot be one of this queue.
    """
    try:
        job = _locked(session, columns, key, given)
        if isinstance(job, StoredJob) and job.version != version:
            edited = Edited("changed", _typed(columns, job, given, compared=True))
        else:
            edited = job if isinstance(job, Edited) else _write(session, columns, key, _Attempt(job, given), requeue)
    except BaseException:
        session.rollback()
        raise
    if edited.outcome not in {"saved", "requeued"}:
        session.rollback()
    return edited


def read_copy(session: Session, columns: JobColumns, key: str) -> EditForm | None:
    """Return the form of a job like another one: with its values, and due at once."""
    form = read_form(session, columns, key)
    if form is None:
        return None
    fields = [replace(each, text=None) if each.field.column.role == "run_at" else each for each in form.fields]
    return replace(form, fields=fields, refused=_why_no_copy(columns, form.job))


def save_copy(session: Session, columns: JobColumns, key: str, given: Mapping[str, str | None]) -> Edited:
    """Insert a job like another one by the ORM, with what was typed instead of its values, and commit.

    Columns that cannot be edited, such as redacted ones, have the other job's values. A time in ``run_at`` that was
    left empty is the default: now.

    :raises ParameterError: if the key cannot be one of this queue.
    """
    job = read_job(session, columns, key)
    if job is None:
        return Edited("missing")
    run_at = columns.by_role.get("run_at")
    typed = {name: text for name, text in given.items() if run_at is None or name != run_at.name or text is not None}
    refused = _why_no_copy(columns, job)
    try:
        edited = (
            Edited("refused", _typed(columns, job, given, refused=refused))
            if refused
            else _insert_copy(session, columns, key, _Attempt(job, typed))
        )
    except BaseException:
        session.rollback()
        raise
    if edited.form is not None:
        session.rollback()
    return edited


def _why_no_copy(columns: JobColumns, job: StoredJob) -> str:
    spec = columns.spec
    if any(key.default is None and key.server_default is None and not _is_counted(key) for key in spec.keys):
        return "Its key is made by the program, so that a job can be enqueued only there."
    if any(len(mapper.tables) > 1 for mapper in spec.mapper.self_and_descendants):
        return "Its class has columns in another table, so that a job can be enqueued only by a program."
    if isinstance(spec.strategy, ExistingMessages):
        return "The application fills the table of messages itself, so that a job can be enqueued only there."
    if any(value.size for value in job.values.values()):
        return "One of its values is too large to be copied here."
    return ""


def _is_counted(key: sa.Column[Any]) -> bool:
    table: Any = key.table
    return key.identity is not None or table.autoincrement_column is key


def _insert_copy(session: Session, columns: JobColumns, key: str, attempt: _Attempt) -> Edited:
    spec, job = columns.spec, attempt.job
    with session.no_autoflush:
        source = _letter_instance(session, columns, key) if job.is_dead_letter else _instance(session, columns, job)
        mapper = sa.inspect(source).mapper
        fields = fields_of(columns, mapper)
        _parse(attempt, fields)
        copied = mapper.class_manager.new_instance()
        for each in columns.values():
            if _is_copied(each, mapper, attempt.given):
                attribute = mapper.get_property_by_column(each.column).key
                value = getattr(source, attribute)
                # None would be replaced by the default.
                attributes.set_committed_value(copied, attribute, sa.null() if value is None else value)
        # What was loaded must not be written.
        session.expunge_all()
        if not attempt.errors:
            _assign(attempt, copied)
    if attempt.errors:
        return _wrong(columns, attempt)
    new_key = ""
    with _refusals(columns, attempt, fields):
        session.add(copied)
        session.flush()
        new_key = key_text([getattr(copied, mapper.get_property_by_column(each).key) for each in spec.keys])
        session.commit()
    if attempt.problem or attempt.errors:
        return _wrong(columns, attempt)
    return Edited("saved", key=new_key)


def _is_copied(each: JobColumn, mapper: Mapper[Any], given: Collection[str]) -> bool:
    column, role = each.column, each.role
    if each.is_key or column.computed is not None or column.identity is not None or column.server_onupdate is not None:
        return False
    if column is mapper.version_id_col or not mapper.columns.contains_column(column):
        return False
    return role in {None, "priority", "max_attempts"} or (role == "run_at" and each.name in given)


def _locked(session: Session, columns: JobColumns, key: str, given: Mapping[str, str | None]) -> StoredJob | Edited:
    job = read_job(session, columns, key)
    is_locked = job is not None and _lock(session, columns, key, job)
    # Between the two statements another transaction may have written it.
    job = read_job(session, columns, key)
    if job is None:
        return Edited("missing")
    refused = _why_not(job) if is_locked else _BUSY
    return Edited("refused", _typed(columns, job, given, refused=refused)) if refused else job


def _write(
    session: Session,
    columns: JobColumns,
    key: str,
    attempt: _Attempt,
    requeue: bool,  # noqa: FBT001 - the function above names it
) -> Edited:
    spec, job = columns.spec, attempt.job
    with session.no_autoflush:
        try:
            instance = _loaded(session, columns, key, attempt)
        except _UNLOADABLE as error:
            # Without the text of the error, which may repeat a redacted value.
            text = f"This program cannot load its row ({type(error).__name__}). Correct the value that it cannot load."
            return Edited("refused", _typed(columns, job, attempt.given, refused=text))
        fields = fields_of(columns, sa.inspect(instance).mapper)
        _parse(attempt, fields)
        if not attempt.errors:
            _assign(attempt, instance)
    if attempt.errors:
        return _wrong(columns, attempt)
    if job.is_dead_letter and not requeue:
        refused = "It is a dead letter, which is a copy of a deleted row: it can only be changed and requeued together."
        return Edited("refused", _typed(columns, job, attempt.given, refused=refused))
    back = requeue and job.state in FINISHED
    if not attempt.values and not back:
        return Edited("unchanged", _form(columns, job))
    with _refusals(columns, attempt, fields):
        if job.is_dead_letter:
            _insert_again(session, spec, instance, attempt, letter_of(columns, key))
        else:
            session.flush()
            if back:
                _requeue(session, columns, attempt)
        if not attempt.problem:
            session.commit()
    if attempt.problem or attempt.errors:
        return _wrong(columns, attempt)
    return Edited("requeued" if back else "saved", columns=[each.name for each in attempt.values])


def _why_not(job: StoredJob) -> str:
    if job.state == "processing":
        return "It is processing. Wait for its end, or cancel it first."
    if job.state not in {"pending", *FINISHED}:
        return "Its status is not one that the queue uses."
    return ""


def _lock(session: Session, columns: JobColumns, key: str, job: StoredJob) -> bool:
    """Lock a job, and return False if another transaction has locked it or it is gone; this waits for none."""
    spec = columns.spec
    if job.is_dead_letter:
        dead = spec.side_tables[DEAD_LETTER]
        row = sa.select(dead.c.queue).where(letter_of(columns, key)).with_for_update(of=dead, skip_locked=True)
    else:
        row = spec.strategy.lock(spec, sa.select(*spec.keys).where(has_key(columns, key)))
    return session.execute(row, bind_arguments={"mapper": spec.mapper}).first() is not None


def _loaded(session: Session, columns: JobColumns, key: str, attempt: _Attempt) -> Any:
    """Return the instance of a locked row; without the values that are replaced if one cannot be loaded.

    Only then: a validator of the application may read them.
    """
    job = attempt.job
    if job.is_dead_letter:
        return _letter_instance(session, columns, key)
    try:
        return _instance(session, columns, job)
    except _UNLOADABLE:
        typed = {name: text for name, text in attempt.given.items() if name in job.values}
        replaced = [name for name, text in typed.items() if not _same(text, job.values[name].text)]
        if not replaced:
            raise
        return _instance(session, columns, job, without=replaced)


def _instance(session: Session, columns: JobColumns, job: StoredJob, without: Collection[str] = ()) -> Any:
    """Return the instance of a locked row, without its large columns, some others, and its relationships."""
    spec = columns.spec
    large = {value.column.column for name, value in job.values.items() if value.size or name in without}
    deferred = [
        defer(getattr(spec.model, attribute.key))
        for attribute in spec.mapper.column_attrs
        if any(column in large for column in attribute.columns)
    ]
    found = sa.select(spec.model).where(spec.key_in(spec.keys, [job.key])).options(lazyload("*"), *deferred)
    return session.scalars(found, bind_arguments={"mapper": spec.mapper}).one()


def _letter_instance(session: Session, columns: JobColumns, key: str) -> Any:
    """Return a dead letter as an instance that is to be inserted, as a claim has returned it once."""
    spec = columns.spec
    found = letters(spec, sa.select(spec.model), "edit").where(letter_of(columns, key))
    row = session.execute(found, bind_arguments={"mapper": spec.mapper}).mappings().one()
    mapper, kind = spec.mapper, spec.mapper.polymorphic_on
    if isinstance(kind, sa.Column) and kind in stored_columns(spec):
        mapper = spec.mapper.polymorphic_map.get(row[kind.key], spec.mapper)
    instance = mapper.class_manager.new_instance()
    for column in stored_columns(spec):
        if not mapper.columns.contains_column(column):
            continue
        value = row[column.key]
        if value is None and (column.default is not None or column.server_default is not None):
            value = sa.null()  # None would be replaced by the default
        attributes.set_committed_value(instance, mapper.get_property_by_column(column).key, value)
    return instance


def _parse(attempt: _Attempt, fields: Sequence[EditableField]) -> None:
    unknown = min(attempt.given.keys() - {each.name for each in fields}, default=None)
    if unknown is not None:
        raise ParameterError(unknown[:100], "it cannot be edited")
    for each in fields:
        if each.name not in attempt.given:
            continue
        typed = attempt.given[each.name]
        try:
            stored = field_text(each, attempt.job.values[each.name])
        except WrongValue:
            raise ParameterError(each.name, "its value cannot be edited") from None
        if _same(typed, stored):
            continue
        try:
            # With line feeds, unless the stored text has the line breaks of browsers itself.
            has_breaks = typed is None or "\r\n" in (stored or "")
            attempt.values[each] = field_value(each, typed if typed is None or has_breaks else _with_line_feeds(typed))
        except WrongValue as error:
            attempt.errors[each.name] = str(error)


def _same(typed: str | None, stored: str | None) -> bool:
    """Return whether two texts differ in no more than line breaks, which browsers send in their own way."""
    if typed is None or stored is None:
        return typed is stored
    return _with_line_feeds(typed) == _with_line_feeds(stored)


def _with_line_feeds(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _assign(attempt: _Attempt, instance: Any) -> None:
    for each, value in attempt.values.items():
        try:
            setattr(instance, each.attribute, value)
        except Exception as error:  # noqa: BLE001 - a validator of the application may raise any error
            attempt.errors[each.name] = f"{error}" or type(error).__name__


def _requeue(session: Session, columns: JobColumns, attempt: _Attempt) -> None:
    spec, key = columns.spec, attempt.job.key
    done = requeue_some(session, spec.model, JobFilter(), [key])
    if done.duplicates:
        duplicate = next(iter(done.duplicates.values()))
        attempt.problem = f"It has a duplicate, job {duplicate}, so it cannot be pending again. Nothing was changed."
    elif not done:
        attempt.problem = "It could not be requeued: a duplicate is being enqueued. Nothing was changed; try again."
    typed = [value for each, value in attempt.values.items() if each.column.role == "run_at"]
    if typed and not attempt.problem:
        # To be requeued means to be due at once.
        update = sa.update(spec.table).where(spec.key_in(spec.keys, [key])).values({spec.columns["run_at"]: typed[0]})
        session.execute(update, bind_arguments={"mapper": spec.mapper})


def _insert_again(
    session: Session, spec: QueueSpec, instance: Any, attempt: _Attempt, letter: sa.ColumnElement[bool]
) -> None:
    """Insert the row of a dead letter again by the ORM, with no attempt counted, and delete the dead letter."""
    edited = {each.column.role for each in attempt.values}
    for role, value in (("attempts", 0), ("run_at", clock())):
        if spec.has(role) and role not in edited:
            setattr(instance, spec.attributes[role], value)
    session.add(instance)
    session.flush()
    dead = spec.side_tables[DEAD_LETTER]
    session.execute(
        sa.delete(dead).where(letter),
        execution_options={"synchronize_session": False},
        bind_arguments={"mapper": spec.mapper},
    )


@contextmanager
def _refusals(columns: JobColumns, attempt: _Attempt, fields: Sequence[EditableField]) -> Iterator[None]:
    """Turn an error of the database, or of the application's events, into a problem of the form or of its fields."""
    spec = columns.spec
    try:
        yield
    except DBAPIError as error:
        if is_connection_lost(error):
            raise
        of_constraint, text = violation_of(error, spec) or ((), "")
        of_fields = [each.name for each in fields if each.column.column in of_constraint]
        attempt.errors |= dict.fromkeys(of_fields, text)
        if not of_fields:
            attempt.problem = _refusal(error, columns)
    except Exception as error:  # noqa: BLE001 - an event listener of the application may raise any error
        cause = error.orig if isinstance(error, StatementError) and error.orig is not None else error
        attempt.problem = _own_words(columns, f"It was refused: {type(cause).__name__}", str(cause))


def _own_words(columns: JobColumns, what: str, text: str) -> str:
    """Return what the application says about a row; without its text, which may repeat any value, if one is hidden."""
    if not any(each.is_redacted for each in columns.values()):
        return f"{what}: {text}"
    logger.warning(
        "the dashboard has hidden why a row of the queue %s was refused, as it has redacted columns: %s",
        columns.spec.name,
        printable(text),
        extra=log_fields("dashboard_error", queue=columns.spec.name),
    )
    return f"{what}. Its text is hidden, as it may repeat a redacted value; the log of the server has it."


def _refusal(error: DBAPIError, columns: JobColumns) -> str:
    """Return why the database refused a row, without its own text: that repeats values, which may be redacted."""
    spec = columns.spec
    if is_duplicate(error, spec):
        return "It would have a duplicate: another job has the same values of the unique columns."
    constraint = violated_constraint(error)
    if constraint:
        return f"The database refused the values: they violate {constraint}."
    state = sqlstate(error)
    if state == _RAISED:
        return _own_words(columns, "A trigger refused the values", str(error.orig).splitlines()[0])
    if is_lock_or_timeout(error):
        return "It took too long to write the values, since another transaction has locked something. Try again."
    return f"The database refused the values (SQLSTATE {state})."


def _form(columns: JobColumns, job: StoredJob) -> EditForm:
    mapper = columns.spec.mapper
    kind = mapper.polymorphic_on
    if isinstance(kind, sa.Column):
        name = columns.stored_as(kind.name)
        text = None if name is None else job.values[name.name].text
        mapper = next((each for value, each in mapper.polymorphic_map.items() if str(value) == text), mapper)
    fields = []
    for each in fields_of(columns, mapper):
        value = job.values[each.name]
        try:
            fields.append(EditField(each, field_text(each, value)))
        except WrongValue as error:
            fields.append(EditField(each, value.text, str(error), is_fixed=True))
    return EditForm(job, fields, _why_not(job))


def _typed(
    columns: JobColumns, job: StoredJob, given: Mapping[str, str | None], *, refused: str = "", compared: bool = False
) -> EditForm:
    """Return the form with what was typed, so that nothing of it is lost."""
    form = _form(columns, job)
    fields = []
    for each in form.fields:
        if each.is_fixed or each.field.name not in given:
            fields.append(each)
            continue
        typed = given[each.field.name]
        differs = compared and not _same(typed, each.text)
        fields.append(replace(each, text=typed, stored=each.text, is_changed=differs))
    return replace(form, fields=fields, refused=refused or form.refused)


def _wrong(columns: JobColumns, attempt: _Attempt) -> Edited:
    form = _typed(columns, attempt.job, attempt.given)
    fields = [replace(each, error=attempt.errors.get(each.field.name, each.error)) for each in form.fields]
    return Edited("wrong", replace(form, fields=fields, problem=attempt.problem))
