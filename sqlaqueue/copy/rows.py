"""The rows of a COPY, one by one as the driver asks for them, and what is wrong with one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy.orm import Mapper
from sqlalchemy.sql import ClauseElement

from sqlaqueue.copy.column_plan import Context, Plan, check_mapping
from sqlaqueue.exc import StatementError


class Feed:
    """Iterates once over rows, of which it keeps the one at hand only."""

    def __init__(self, plan: Plan, mapper: Mapper[Any], rows: Iterable[Any]) -> None:
        self.plan = plan
        self.number = 0
        """Of the row at hand, from 1; 0 before the first and after the last."""
        self.error: Exception | None = None
        """What ended the iteration early: drivers replace it by an error of their own, or of the server."""
        self._mapper = mapper
        self._rows = rows
        self._row: Any = {}

    def __iter__(self) -> Iterator[Sequence[Any]]:
        """Iterate over the values of rows, in the order of the plan's columns."""
        plan = self.plan
        take, given, constants, calls = plan.take, plan.given, plan.constants, plan.calls
        processors, context = plan.processors, Context(plan)
        is_made = bool(calls or processors)
        try:
            for self.number, self._row in enumerate(self._rows, 1):  # noqa: B020 - what explain() looks at
                row = self._row
                values: Any = take(row)
                # After that, since a defaultdict makes up what it lacks.
                if len(row) != given:
                    raise KeyError  # noqa: TRY301 - as for a key that is missing
                if not is_made:
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
        """Raise an error that says what is wrong with the row at hand, if anything is.

        :raises StatementError: naming the class, the row and the attribute.
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
                raise self._refusal(key, call, f"this default raises {error!r}") from error
        for place, process in plan.processors:
            try:
                values[place] = process(values[place])
            except Exception as error:
                raise self._refusal(plan.attributes[place], values[place], str(error)) from error
        for key, value in zip(plan.attributes, values, strict=True):
            if isinstance(value, ClauseElement) or hasattr(value, "__clause_element__"):
                why = "it is SQL, which COPY does not evaluate; use session.execute(insert(...), rows)"
                raise self._refusal(key, value, why)

    def refused(self, error: Exception) -> StatementError:
        """Return the error for a row that the driver cannot write."""
        return StatementError(f"{self.plan.what}: the driver refuses row {self.number}: {error}. {UNDO}")

    def busy(self) -> StatementError:
        """Return the error for rows that need the connection on which they are being copied."""
        msg = (
            f"{self.plan.what}: what makes row {self.number + 1} uses the session, whose connection is busy with "
            "the COPY; make a list of the rows before, or read in another session"
        )
        return StatementError(f"{msg}. {UNDO}")

    def _check_keys(self, row: Mapping[str, Any]) -> None:
        first = set(self.plan.attributes[: self.plan.given])
        for differing, words in ((first - set(row), "lacks"), (set(row) - first, "has")):
            if differing:
                names = ", ".join(sorted(map(str, differing)))
                than = "the first row gives" if words == "lacks" else "the first row does not give"
                msg = (
                    f"{self.plan.what}: row {self.number} {words} {names}, which {than}; give the same keys in each row"
                )
                raise StatementError(f"{msg}. {UNDO}")

    def _refusal(self, key: str, value: Any, why: str) -> StatementError:
        name = self._mapper.class_.__name__
        return StatementError(f"{self.plan.what}: {name}.{key} = {value!r} in row {self.number}: {why}. {UNDO}")


UNDO = "None of the rows is enqueued; roll the transaction, or the savepoint around the call, back"
"""What is left to the caller when the server has been told to give a COPY up: its transaction is aborted."""
