"""What waits for what in the searches, and what may happen to it."""

from tests.waits.programs import (
    Program,
    cancel,
    close,
    complete,
    delete,
    fail,
    insert,
    link,
    reconcile,
    reopen,
    requeue,
    retry,
    run,
    together,
)
from tests.waits.scope import ABSENT, OnFailure, Relation, Row, Scope

NONE, NONES = (-1,), (-1, -1)


def _two_parents(on_failure: OnFailure) -> tuple[Relation, Relation]:
    """Return the relations by which row 2 waits for row 0 and for row 1."""
    return Relation("to-one", (2,), (0,), on_failure), Relation("to-one", (2,), (1,), on_failure)


def _two_members(on_failure: OnFailure) -> tuple[Relation]:
    """Return the relation by which row 0 waits for rows 1 and 2."""
    return (Relation("to-many", (0,), (1, 2), on_failure),)


def dependents(on_failure: OnFailure = "block", *programs: Program) -> Scope:
    """Return a scope in which rows 1 and 2 wait for row 0."""
    return Scope(
        relations=(Relation("to-one", (1, 2), (0,), on_failure),),
        rows=(Row("pending", NONE), ABSENT, ABSENT),
        claimed=(1,),
        programs=programs
        or (
            insert(1, 0),
            insert(2, 0),
            together(*complete(0), insert(1, 0)),
            together(insert(0, -1), insert(1, 0)),
            *complete(0, 1),
            *fail(0, 1),
            *retry(1),
            *requeue(0, 1),
            *cancel(0, 1),
            *delete(0),
            *reconcile(1),
        ),
    )


def two_parents(on_failure: OnFailure = "block", *programs: Program, claimed: tuple[int, ...] = (2,)) -> Scope:
    """Return a scope in which row 2 waits for rows 0 and 1, of which one is completed."""
    return Scope(
        relations=_two_parents(on_failure),
        rows=(Row("pending", NONES), Row("completed", NONES), ABSENT),
        claimed=claimed,
        programs=programs
        or (
            insert(2, 0, 1),
            together(*complete(0, 1), insert(2, 0, 1)),
            *complete(0, 1, 2),
            *fail(0, 1),
            *retry(2),
            *requeue(0, 1, 2),
            *cancel(2),
            *delete(0),
            *reconcile(2),
        ),
    )


def batch(on_failure: OnFailure = "block", *programs: Program) -> Scope:
    """Return a scope in which row 0 waits for its members, 1 and 2."""
    return Scope(
        relations=_two_members(on_failure),
        rows=(ABSENT, ABSENT, ABSENT),
        claimed=(0, 1),
        programs=programs
        or (
            together(insert(0, -1), insert(1, 0)),
            together(insert(0, -1, is_open=True), insert(1, 0)),
            insert(2, 0),
            close(0),
            *complete(0, 1, 2),
            *fail(1),
            *retry(0),
            *requeue(0, 1),
            *cancel(0, 1),
            *delete(1),
            *reconcile(0),
        ),
    )


def two_batches(on_failure: OnFailure = "block", *programs: Program) -> Scope:
    """Return a scope in which rows 0 and 1 wait for their members, 2 and 3, which are moved between them."""
    return Scope(
        relations=(Relation("to-many", (0, 1), (2, 3), on_failure),),
        rows=(Row("waiting", NONE, 2), Row("pending", NONE), Row("pending", (0,)), Row("pending", (0,))),
        claimed=(0, 1),
        programs=programs
        or (
            link(2, 0, 1),
            link(2, 0, 0),
            *complete(0, 2, 3),
            *fail(2),
            *retry(0),
            *requeue(2),
            *cancel(1),
            *reconcile(0),
        ),
    )


def batch_of_batch(on_failure: OnFailure = "block", *programs: Program) -> Scope:
    """Return a scope in which row 0 waits for its member 1, and that for its member 2."""
    return Scope(
        relations=(Relation("to-many", (0, 1), (1, 2), on_failure),),
        rows=(Row("waiting", NONE, 1), Row("waiting", (0,), 1), Row("pending", (1,))),
        claimed=(0, 1),
        programs=programs
        or (
            insert(2, 1),
            *delete(2),
            *complete(0, 1, 2),
            *fail(1, 2),
            *retry(1),
            *requeue(1, 2),
            *cancel(0, 1, 2),
            *reconcile(0, 1),
        ),
    )


def chain(on_failure: OnFailure = "block", *programs: Program) -> Scope:
    """Return a scope in which row 2 waits for row 1, and that for row 0."""
    return Scope(
        relations=(Relation("to-one", (1, 2), (0, 1), on_failure),),
        rows=(Row("pending", NONE), ABSENT, ABSENT),
        claimed=(1,),
        programs=programs
        or (
            insert(1, 0),
            insert(2, 1),
            together(insert(1, 0), insert(2, 1)),
            *complete(0, 1),
            *fail(0, 1),
            *retry(1),
            *requeue(0, 1),
            *cancel(1, 2),
            *delete(0),
            *reconcile(2),
        ),
    )


def mixed(on_failure: OnFailure = "block", *programs: Program) -> Scope:
    """Return a scope in which row 1 waits for its parent, 0 or 3, and for its member 2."""
    return Scope(
        relations=(Relation("to-one", (1,), (0, 3), on_failure), Relation("to-many", (1,), (2,), on_failure)),
        rows=(Row("pending", NONES), Row("waiting", (0, -1), 1), ABSENT, Row("completed", NONES)),
        claimed=(1,),
        programs=programs
        or (
            insert(2, -1, 1),
            link(1, 0, 3),
            link(1, 0, 0),
            together(insert(2, -1, 1), link(1, 0, 3)),
            *complete(0, 1, 2, 3),
            *fail(2),
            *retry(1),
            *requeue(0, 1, 3),
            *delete(2),
            *reconcile(1),
        ),
    )


def held(on_failure: OnFailure = "block", *programs: Program) -> Scope:
    """Return a scope in which row 2 waits for rows 0 and 1, and its handler runs in the transaction of its claim."""
    return Scope(
        relations=_two_parents(on_failure),
        rows=(Row("pending", NONES), Row("completed", NONES), Row("waiting", (0, -1), 1)),
        held=True,
        programs=programs
        or (
            *run(2),
            link(2, 1, 1),
            link(2, 0, 0),
            *complete(0, 1),
            *fail(0),
            *requeue(0, 1, 2),
            *cancel(2),
            *delete(0),
            *reconcile(2),
        ),
    )


def held_batch(on_failure: OnFailure = "block", *programs: Program) -> Scope:
    """Return a scope in which row 0 waits for its members, 1 and 2, and its handler runs in its claim's transaction."""
    return Scope(
        relations=_two_members(on_failure),
        rows=(Row("waiting", NONE, 1), Row("pending", (0,)), ABSENT),
        held=True,
        programs=programs
        or (
            *run(0),
            insert(2, 0),
            reopen(0),
            close(0),
            *complete(1, 2),
            *fail(1),
            *requeue(0, 1),
            *cancel(0, 1),
            *delete(1),
            *reconcile(0),
        ),
    )


def lost(*programs: Program) -> Scope:
    """Return a scope in which row 1 loses its parent 0, and row 2 waits for row 1 and row 3."""
    return Scope(
        relations=(
            Relation("to-one", (1,), (0,), "block"),
            Relation("to-one", (2,), (1,), "continue"),
            Relation("to-one", (2,), (3,), "continue"),
        ),
        rows=(
            Row("pending", (-1, -1, -1)),
            Row("waiting", (0, -1, -1), 1),
            ABSENT,
            Row("pending", (-1, -1, -1)),
        ),
        programs=programs
        or (
            together(insert(2, -1, 1, 3), *delete(0)),
            together(link(1, 0, -1), link(1, 0, 0)),
            insert(2, -1, 1, 3),
            *complete(0, 1, 3),
        ),
    )
