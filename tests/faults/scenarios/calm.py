"""No process comes to harm."""

from __future__ import annotations

import sqlalchemy as sa

from sqlaqueue.mapping.mixin import spec_of
from tests.faults.scenarios.playing import attempts, enqueue_after_a_quick_one, scenario
from tests.faults.scene import Scene


@scenario
def calm(scene: Scene) -> None:
    """Nothing happens at all, and one Consumer does it all, in the right order."""
    scene.enqueue_some(8)
    scene.enqueue("flaky", "fails", limit=2)
    scene.worker(batch_size=scene.dice.randint(1, 6))
    scene.produce(12)
    assert attempts(scene, scene.finish()) <= {1, 2}, "only what fails once is tried twice"


@scenario
def handled_together(scene: Scene) -> None:
    """The handler takes batches; one that fails is tried job by job."""
    scene.enqueue_some(8)
    scene.enqueue("flaky", "fails", limit=2)
    scene.worker(batch_size=scene.dice.randint(2, 6), batch=True)
    scene.produce(12)
    assert attempts(scene, scene.finish()) <= {1, 2}, "only what fails once is tried twice"


@scenario
def requeued_by_plain_sql(scene: Scene) -> None:
    """A job that had no attempt left, and is made to wait again by somebody who knows nothing of us, runs once more."""
    [key] = scene.enqueue("fails", limit=2)
    worker = scene.worker()
    scene.await_done()
    scene.log.write("requeued", key)
    if scene.bench.has_status:
        scene.bench.execute("UPDATE job SET status = 'pending'")
    else:
        scene.bench.execute("""
            WITH letter AS (DELETE FROM sqlaqueue_dead_letter RETURNING row)
            INSERT INTO job SELECT job.* FROM letter, jsonb_populate_record(NULL::job, row) AS job
        """)
    scene.await_that(lambda: len(worker.said("failed")) == 2, "that it fails again")
    assert attempts(scene, scene.finish()) == {3}
    assert len(worker.said("start")) == 3


@scenario
def lost_its_messages(scene: Scene) -> None:
    """Somebody has deleted the messages of jobs that wait."""
    scene.enqueue("work", "quiet")
    scene.bench.execute(sa.delete(spec_of(scene.bench.Job).side_tables["messages"]))
    scene.worker()
    scene.finish()


@scenario
def is_done_before_others(scene: Scene) -> None:
    """A job is done, and the one that was claimed with it takes long: its end does not wait for that."""
    enqueue_after_a_quick_one(scene, "quiet", "gated", "gated")
    worker = scene.worker()
    scene.await_that(lambda: len(worker.said("completed")) == 2, "that what is done is settled")
    scene.open_gate()
    scene.finish()
