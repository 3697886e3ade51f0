"""Edit the arguments of one job: the form, the values, the transaction that writes it, and violated constraints."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, TypeVar, get_args

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, StatementError
from sqlalchemy.orm import Mapper, Session, attributes, defer, lazyload

from sqlaqueue import admin
from sqlaqueue.consumer.core.errors import is_connection_lost, is_lock_or_timeout, is_twin
from sqlaqueue.queue.names import DEAD_LETTER
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.sql.errors import sqlstate, violated_column, violated_constraint, violated_table
from sqlaqueue.sql.types import NEUTRAL
from sqlaqueue.strategies.delete_row import letters, stored_columns
from sqlaqueue.web.data.job import ShownValue, StoredJob, has_key, letter_of, read_job
from sqlaqueue.web.data.job_columns import JobColumn, JobColumns, indented, parse_exact
from sqlaqueue.web.data.reader import ParameterError

# -- constraint errors -------------------------------------------------------------------------------------------------
# To which columns a violated constraint belongs, by the mapped table, and what it says about their values.
#
# The database's own text is not used: it repeats values, which may be redacted.


Element = sa.Constraint | sa.Index


@dataclass(frozen=True)
class Violation:
    columns: Sequence[sa.Column[Any]]
    text: str


def violation_of(error: DBAPIError, spec: QueueSpec) -> Violation | None:
    """Return the constraint of the queue's table that a statement has violated; None if it is none that is mapped."""
    if violated_table(error) != spec.table.name:
        return None
    column = violated_column(error)
    if column is not None:
        return Violation([each for each in spec.table.c if each.name == column], "A value is required.")
    name = violated_constraint(error) or ""
    if is_twin(error, spec) and spec.config.unique is not None:
        names = spec.config.unique.attributes
        columns = [spec.mapper.columns[each] for each in names if each in spec.mapper.columns]
        return Violation(columns, "It would have a twin: another job has the same values of the unique columns.")
    indexes = [index for index in spec.table.indexes if index.unique]
    elements: list[Element] = [*spec.table.constraints, *indexes]
    found = next((each for each in elements if name in _names(each, spec.table)), None)
    return None if found is None else Violation(_columns(found, spec.table), _text(found, name))


def _columns(element: Element, table: sa.Table) -> list[sa.Column[Any]]:
    if isinstance(element, sa.CheckConstraint):
        return _in_check(element, table)
    if isinstance(element, sa.Index | sa.UniqueConstraint | sa.PrimaryKeyConstraint | sa.ForeignKeyConstraint):
        return [table.c[each.key] for each in element.columns if each.key in table.c]
    return []


def _in_check(check: sa.CheckConstraint, table: sa.Table) -> list[sa.Column[Any]]:
    """Return the columns of a check, which may be written as a text."""
    known = [*check.columns]
    words = {*re.findall(r"\w+", re.sub(r"'[^']*'", "", str(check.sqltext)))}
    return known or [column for column in table.c if column.name in words]


def _names(element: Element, table: sa.Table) -> Iterable[str]:
    """Return the name of a constraint; for one without a name, those that the database may have given it."""
    if isinstance(element.name, str):
        return [str(element.name)]
    columns = [column.name for column in _columns(element, table)]
    joined = "_".join([table.name, *columns])
    if isinstance(element, sa.ForeignKeyConstraint):
        return [f"{joined}_fkey"]
    if isinstance(element, sa.UniqueConstraint):
        return [f"{joined}_key"]
    if isinstance(element, sa.CheckConstraint):
        return [f"{joined}_check"] if len(columns) == 1 else [f"{table.name}_check"]
    return [f"{table.name}_pkey"]


def _text(element: Element, name: str) -> str:
    if isinstance(element, sa.ForeignKeyConstraint):
        return f"No row of {element.referred_table.name} has this value ({name})."
    if isinstance(element, sa.CheckConstraint):
        return f"The check {name} does not allow this value."
    several = len(list(element.columns)) > 1 if isinstance(element, sa.Index | sa.UniqueConstraint) else False
    return f"Another row has {'these values together' if several else 'this value'} already ({name})."


# -- edit fields -------------------------------------------------------------------------------------------------------

FieldKind = Literal["text", "integer", "number", "boolean", "moment", "naive_moment", "date", "enum", "uuid", "json"]

EDITABLE_ROLES = ("priority", "run_at", "max_attempts")
"""The roles that an operator may change; the others tell what has happened."""

_PYTHON: dict[FieldKind, tuple[type[Any], ...]] = {
    "text": (str,),
    "integer": (int,),
    "number": (Decimal, float),
    "boolean": (bool,),
    "moment": (datetime,),
    "naive_moment": (datetime,),
    "date": (date,),
    "uuid": (uuid.UUID, str),
    "json": (dict, list, str, int, float, bool),
}
"""The types of the values of each kind."""

_HINTS: dict[FieldKind, str] = {
    "moment": "with its zone, such as 2030-12-31T08:00:00+01:00 or 2030-12-31T08:00Z",
    "naive_moment": "without a zone, such as 2030-12-31T08:00:00",
    "date": "such as 2030-12-31",
    "number": "such as 12.50",
    "uuid": "32 hexadecimal digits",
    "json": "JSON",
}

T = TypeVar("T")

_INTEGER = re.compile(r"[+-]?\d{1,30}", re.ASCII)


class WrongValue(ValueError):
    """A text that is no value of its field; the message says what to write."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Field:
    column: JobColumn
    attribute: str
    kind: FieldKind
    is_nullable: bool

    @property
    def name(self) -> str:
        return self.column.name

    @property
    def hint(self) -> str:
        return _HINTS.get(self.kind, "")

    @property
    def is_long(self) -> bool:
        stored = self.column.stored_type
        return self.kind == "json" or (self.kind == "text" and getattr(stored, "length", None) is None)


def fields_of(columns: JobColumns, mapper: Mapper[Any]) -> list[Field]:
    spec = columns.spec
    fixed = {mapper.version_id_col, mapper.polymorphic_on}
    found: list[Field] = []
    for each in columns.values():
        column, kind = each.column, _kind(each)
        is_own = each.role is None or each.role in EDITABLE_ROLES
        if each.is_key or each.is_redacted or not is_own or kind is None or column in fixed:
            continue
        made_by_server = column.computed is not None or column.identity is not None or column.server_onupdate
        if made_by_server or not mapper.columns.contains_column(column):
            continue
        attribute = mapper.get_property_by_column(column).key
        nullable = bool(column.nullable)
        found.append(Field(column=each, attribute=attribute, kind=kind, is_nullable=nullable))
    return sorted(
        found, key=lambda field: (field.column.role is not None, list(spec.table.c).index(field.column.column))
    )


def _kind(column: JobColumn) -> FieldKind | None:
    if isinstance(column.stored_type, sa.JSON):
        return "json"
    kinds: dict[str, FieldKind] = {kind: kind for kind in get_args(FieldKind)}
    return kinds.get(column.kind)


def field_text(field: Field, value: ShownValue) -> str | None:
    """Return a stored value as the text of a form; None for NULL.

    :raises WrongValue: if it cannot be edited: it is too large, or its type converts it to another kind of value.
    """
    if value.size:
        raise WrongValue("It is too large to be edited here.")
    if value.text is None:
        return None
    text = value.text
    if field.kind == "json":
        text = indented(text)
    elif field.kind == "moment":
        if value.moment is None:
            raise WrongValue("It is no moment that can be edited here.")
        text = value.moment.isoformat()
    converted = field.column.column.type
    if not isinstance(converted, sa.types.TypeDecorator) or field.kind == "enum":
        return text
    shown = _converted(converted.process_result_value, _stored_value(field, text))
    if type(shown) not in _PYTHON[field.kind]:
        raise WrongValue("Its type makes another kind of value of it; change it in a program.")
    return shown if isinstance(shown, str) and field.kind == "text" else text


def field_value(field: Field, text: str | None) -> Any:
    """Return the text of a form as the value of its attribute.

    :raises WrongValue: if it is no such value.
    """
    type_ = field.column.column.type
    if text is None:
        if not field.is_nullable:
            raise WrongValue("It must have a value.")
        # As None an attribute of JSON would be the null of JSON.
        return sa.null() if field.kind == "json" else None
    value = _stored_value(field, text)
    if value is None:
        return sa.JSON.NULL  # the null of JSON
    if not isinstance(type_, sa.types.TypeDecorator) or field.kind == "enum":
        return value
    stored = _converted(type_.process_bind_param, value)
    if _converted(type_.process_result_value, stored) != value:
        raise WrongValue("Its type does not store this value as it is.")
    return value


def _converted(convert: Callable[[Any, Any], Any], value: Any) -> Any:
    try:
        return convert(value, NEUTRAL)
    except NotImplementedError:
        return value  # the type converts in one direction only
    except Exception as error:
        raise WrongValue(f"Its type refuses it: {error}") from error


def _stored_value(field: Field, text: str) -> Any:
    stored = field.column.stored_type
    if field.kind == "text":
        length = getattr(stored, "length", None)
        if length is not None and len(text) > length:
            raise WrongValue(f"Use at most {length} characters.")
        return text
    if field.kind == "json":
        try:
            return parse_exact(text)
        except (ValueError, RecursionError) as error:
            raise WrongValue(f"This is no JSON that can be stored: {error}.") from None
    return _READERS[field.kind](stored, text.strip())


def _integer(type_: Any, text: str) -> int:
    bits = 16 if isinstance(type_, sa.SmallInteger) else 64 if isinstance(type_, sa.BigInteger) else 32
    number = int(text) if _INTEGER.fullmatch(text) else None
    if number is None or not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise WrongValue(f"Write an integer from {-(2 ** (bits - 1))} to {2 ** (bits - 1) - 1}.")
    return number


def _number(type_: Any, text: str) -> Decimal | float:
    try:
        number = Decimal(text)
    except InvalidOperation:
        number = Decimal("NaN")
    if not number.is_finite() or "_" in text or len(text) > 1000:  # noqa: PLR2004 - more digits than a form needs
        raise WrongValue("Write a number, such as 12.50.")
    if isinstance(type_, sa.Float) or not type_.asdecimal:
        return float(number)
    decimals = -int(number.normalize().as_tuple().exponent)
    if type_.precision is not None:
        scale = type_.scale or 0
        if decimals > scale:
            raise WrongValue(f"Use at most {scale} decimals.")
        if number and number.adjusted() >= type_.precision - scale:
            raise WrongValue(f"Use at most {type_.precision - scale} digits before the point.")
    return number


def _boolean(_: Any, text: str) -> bool:
    if text not in {"true", "false"}:
        raise WrongValue("Choose true or false.")
    return text == "true"


def _moment(_: Any, text: str) -> datetime:
    moment = _parsed(datetime.fromisoformat, text, "Write a date and a time with its zone, such as 2030-12-31T08:00Z.")
    if moment.tzinfo is None:
        raise WrongValue("Add the zone, such as Z for UTC or +01:00.")
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise WrongValue("This year is too far away.") from None


def _naive_moment(_: Any, text: str) -> datetime:
    moment = _parsed(datetime.fromisoformat, text, "Write a date and a time, such as 2030-12-31T08:00.")
    if moment.tzinfo is not None:
        raise WrongValue("Leave out the zone: the column has none.")
    return moment


def _date(_: Any, text: str) -> date:
    return _parsed(date.fromisoformat, text, "Write a date, such as 2030-12-31.")


def _uuid(type_: Any, text: str) -> uuid.UUID | str:
    value = _parsed(uuid.UUID, text, "Write a UUID.")
    return value if getattr(type_, "as_uuid", True) else str(value)


def _enum(type_: Any, text: str) -> Any:
    if text not in type_.enums:
        raise WrongValue("Choose one of the values.")
    dialect = NEUTRAL
    convert = type_.dialect_impl(dialect).result_processor(dialect, None)
    return text if convert is None else convert(text)


def _parsed(parse: Callable[[str], T], text: str, otherwise: str) -> T:
    try:
        return parse(text)
    except ValueError:
        raise WrongValue(otherwise) from None


_READERS: dict[FieldKind, Callable[[Any, str], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "moment": _moment,
    "naive_moment": _naive_moment,
    "date": _date,
    "uuid": _uuid,
    "enum": _enum,
}


# -- editing -----------------------------------------------------------------------------------------------------------
# Edit the arguments of one job: the form, and the transaction that writes it.
#
# The row is locked and not waited for, so that an edit never stands against a worker: a job that a worker has claimed
# is refused. A claim that comes later passes over the locked row, or sees what was written.


_RAISED = "P0001"
"""The SQLSTATE of RAISE EXCEPTION, by which a trigger of the application refuses a row."""

_BUSY = (
    "Another transaction has locked this job: a worker is running it, or a program is changing it. Try again when that "
    "has ended."
)

_ONLY_REQUEUED = "It is a dead letter, which is a copy of a deleted row: it can only be changed and requeued together."


@dataclass(frozen=True)
class EditField:
    field: Field
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
    """The result of an edit."""

    outcome: Outcome
    """``wrong``: a value was refused; ``changed``: the job was written since the form was shown; ``refused``: it runs,
    or is locked; ``missing``: it does not exist any more."""
    form: EditForm | None = None
    """What was typed, with the errors; unless the edit was successful."""
    columns: Sequence[str] = ()
    """The names of the columns that were changed."""


@dataclass
class _Attempt:
    """What was typed, on its way into the row."""

    job: StoredJob
    given: Mapping[str, str | None]
    errors: dict[str, str] = field(default_factory=dict)
    values: dict[Field, Any] = field(default_factory=dict)
    problem: str = ""


def read_form(session: Session, columns: JobColumns, key: str) -> EditForm | None:
    """Return the form of a job with its present values; None if there is no such job.

    :raises ParameterError: if the key cannot be one of this queue.
    """
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


def _locked(session: Session, columns: JobColumns, key: str, given: Mapping[str, str | None]) -> StoredJob | Edited:
    """Return the job, locked and not running; or why it cannot be edited."""
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
        instance = _letter_instance(session, columns, key) if job.is_dead_letter else _instance(session, columns, job)
        fields = fields_of(columns, sa.inspect(instance).mapper)
        _parse(attempt, fields)
        if not attempt.errors:
            _assign(attempt, instance)
    if attempt.errors:
        return _wrong(columns, attempt)
    if job.is_dead_letter and not requeue:
        return Edited("refused", _typed(columns, job, attempt.given, refused=_ONLY_REQUEUED))
    back = requeue and job.state in FINISHED
    if not attempt.values and not back:
        return Edited("unchanged", _form(columns, job))
    with _refusals(spec, attempt, fields):
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
        return "Its status is none that the queue uses."
    return ""


def _lock(session: Session, columns: JobColumns, key: str, job: StoredJob) -> bool:
    """Lock a job, and return False if another transaction has locked it or it is gone; this waits for none."""
    spec = columns.spec
    bind = {"mapper": spec.mapper}
    if job.is_dead_letter:
        dead = spec.side_tables[DEAD_LETTER]
        letter = sa.select(dead.c.queue).where(letter_of(columns, key)).with_for_update(of=dead, skip_locked=True)
        return session.execute(letter, bind_arguments=bind).first() is not None
    row = spec.strategy.lock(spec, sa.select(*spec.keys).where(has_key(columns, key)))
    return session.execute(row, bind_arguments=bind).first() is not None


def _instance(session: Session, columns: JobColumns, job: StoredJob) -> Any:
    """Return the instance of a locked row, without its large columns, and without its relationships."""
    spec = columns.spec
    large = {value.column.column for value in job.values.values() if value.size}
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
    kind = spec.mapper.polymorphic_on
    mapper = spec.mapper
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


def _parse(attempt: _Attempt, fields: Sequence[Field]) -> None:
    """Parse the texts that differ from the stored values.

    :raises ParameterError: for a column that cannot be edited.
    """
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
            attempt.values[each] = field_value(each, _as_stored(typed, stored))
        except WrongValue as error:
            attempt.errors[each.name] = str(error)


def _same(typed: str | None, stored: str | None) -> bool:
    """Return whether a text is the same but for line breaks, which browsers send in their own way."""
    if typed is None or stored is None:
        return typed is stored
    return _with_line_feeds(typed) == _with_line_feeds(stored)


def _as_stored(typed: str | None, stored: str | None) -> str | None:
    """Return what was typed with line feeds, unless the stored text has the line breaks of browsers itself."""
    if typed is None or "\r\n" in (stored or ""):
        return typed
    return _with_line_feeds(typed)


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
    done = admin.requeue_some(session, spec.model, admin.JobFilter(), [key])
    if done.twins:
        twin = next(iter(done.twins.values()))
        attempt.problem = f"It has a twin, job {twin}, so it cannot be pending again. Nothing was changed."
    elif not done:
        attempt.problem = "It could not be requeued: a twin is being enqueued. Nothing was changed; try again."
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
    fresh = {"attempts": 0, "run_at": clock()}
    for role, value in fresh.items():
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
def _refusals(spec: QueueSpec, attempt: _Attempt, fields: Sequence[Field]) -> Iterator[None]:
    """Turn an error of the database, or of the application's events, into a problem of the form or of its fields."""
    try:
        yield
    except DBAPIError as error:
        if is_connection_lost(error):
            raise
        violation = violation_of(error, spec)
        of_fields = (
            [] if violation is None else [each.name for each in fields if each.column.column in violation.columns]
        )
        if violation is not None and of_fields:
            attempt.errors |= dict.fromkeys(of_fields, violation.text)
        else:
            attempt.problem = _refusal(error, spec)
    except Exception as error:  # noqa: BLE001 - an event listener of the application may raise any error
        cause = error.orig if isinstance(error, StatementError) and error.orig is not None else error
        attempt.problem = f"It was refused: {type(cause).__name__}: {cause}"


def _refusal(error: DBAPIError, spec: QueueSpec) -> str:
    """Return why the database refused a row, without its own text: that repeats values, which may be redacted."""
    if is_twin(error, spec):
        return "It would have a twin: another job has the same values of the unique columns."
    constraint = violated_constraint(error)
    if constraint:
        return f"The database refused the values: they violate {constraint}."
    state = sqlstate(error)
    if state == _RAISED:
        return f"A trigger refused the values: {str(error.orig).splitlines()[0]}"
    if is_lock_or_timeout(error):
        return "It took too long to write the values, since another transaction has locked something. Try again."
    return f"The database refused the values (SQLSTATE {state})."


def _form(columns: JobColumns, job: StoredJob) -> EditForm:
    return EditForm(job, [_field(each, job) for each in _fields(columns, job)], _why_not(job))


def _fields(columns: JobColumns, job: StoredJob) -> list[Field]:
    """Return the fields of the class of a job, which its row names."""
    mapper = columns.spec.mapper
    kind = mapper.polymorphic_on
    if isinstance(kind, sa.Column):
        name = columns.stored_as(kind.name)
        text = None if name is None else job.values[name.name].text
        mapper = next((each for value, each in mapper.polymorphic_map.items() if str(value) == text), mapper)
    return fields_of(columns, mapper)


def _field(each: Field, job: StoredJob) -> EditField:
    try:
        return EditField(each, field_text(each, job.values[each.name]))
    except WrongValue as error:
        return EditField(each, job.values[each.name].text, str(error), is_fixed=True)


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
