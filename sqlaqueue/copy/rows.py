"""The rows of a COPY as the driver reads them, and the errors of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy.orm import Mapper
from sqlalchemy.sql import ClauseElement

from sqlaqueue.copy.column_plan import ColumnPlan, Context, check_mapping
from sqlaqueue.exc import StatementError


class RowStream:
    """Iterates once over rows, and keeps only the current one."""

    def __init__(self, plan: ColumnPlan, mapper: Mapper[Any], rows: Iterable[Any]) -> None:
        self.plan = plan
        self.number = 0
        """The number of the current row, from 1; 0 before the first and after the last."""
        self.error: Exception | None = None
        """The error that ended the iteration; drivers raise another one instead."""
        self._mapper = mapper
        self._rows = rows
        self._row: Any = {}

    def __iter__(self) -> Iterator[Sequence[Any]]:
        """Iterate over the values of each row, in the order of the columns."""
        plan = self.plan
        take, given, constants, calls = plan.take, plan.given, plan.constants, plan.calls
        processors, context = plan.processors, Context(plan)
        must_convert = bool(calls or processors)
        try:
            for self.number, self._row in enumerate(self._rows, 1):  # noqa: B020 - explain() reads it
                row = self._row
                values: Any = take(row)
                # Afterwards, because take() adds missing keys to a defaultdict.
                if len(row) != given:
                    raise KeyError  # noqa: TRY301 - as for a missing key
                if not must_convert:
                    yield values + constants
                    continue
                values = [*values, *constants]
                if calls:
                    context.row = row
                    values += [call(context) for call in calls]
                for place, process in processors:
                    values[place] = process(values[place])
                yield values
            self.number = 0
        except Exception as error:
            self.error = error
            raise

    def explain(self) -> None:
        """Raise an error if the current row is invalid.

        :raises StatementError: with the class, the row and the attribute.
        """
        if not self.number:
            return
        plan, row = self.plan, self._row
        try:
            check_mapping(plan.what, self._mapper, row, self.number)
        except StatementError as error:
            raise StatementError(f"{error}. {UNDO}") from None
        self._check_keys(row)
        context = Context(plan)
        context.row = row
        values = [*plan.take(row), *plan.constants]
        for key, call in zip(plan.attributes[len(values) :], plan.calls, strict=True):
            try:
                values.append(call(context))
            except Exception as error:
                raise self._refusal(key, call, f"the default raised {error!r}") from error
        for place, process in plan.processors:
            try:
                values[place] = process(values[place])
            except Exception as error:
                raise self._refusal(plan.attributes[place], values[place], str(error)) from error
        for key, value in zip(plan.attributes, values, strict=True):
            if isinstance(value, ClauseElement) or hasattr(value, "__clause_element__"):
                why = "COPY does not evaluate SQL; use session.execute(insert(...), rows)"
                raise self._refusal(key, value, why)

    def refused(self, error: Exception) -> StatementError:
        """Return the error for a row that the driver refuses."""
        return StatementError(f"{self.plan.what}: the driver refused row {self.number}: {error}. {UNDO}")

    def busy(self) -> StatementError:
        """Return the error for a generator of rows that uses the connection of the COPY."""
        msg = (
            f"{self.plan.what}: the generator of row {self.number + 1} uses the session, whose connection is busy with "
            "the COPY; make a list of the rows first, or read in another session"
        )
        return StatementError(f"{msg}. {UNDO}")

    def _check_keys(self, row: Mapping[str, Any]) -> None:
        first = set(self.plan.attributes[: self.plan.given])
        for differing, verb, other in ((first - set(row), "lacks", "has"), (set(row) - first, "has", "lacks")):
            if differing:
                names = ", ".join(sorted(map(str, differing)))
                msg = (
                    f"{self.plan.what}: row {self.number} {verb} {names}, which the first row {other}; use the same "
                    "keys in each row"
                )
                raise StatementError(f"{msg}. {UNDO}")

    def _refusal(self, key: str, value: Any, why: str) -> StatementError:
        name = self._mapper.class_.__name__
        return StatementError(f"{self.plan.what}: {name}.{key} = {value!r} in row {self.number}: {why}. {UNDO}")


UNDO = "No row is enqueued; roll back the transaction, or the savepoint around the call"
"""The fix after an aborted COPY, which also aborts the transaction."""
