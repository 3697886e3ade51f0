"""SIGTERM in every phase of a worker's work."""

from __future__ import annotations

import sqlalchemy as sa

from tests.faults.proxy import Proxy
from tests.faults.scenarios.playing import attempts, await_handlers, enqueue_after_a_quick_one, scenario
from tests.faults.scene import Process, Scene


def in_peace(scene: Scene, *left: Process) -> None:
    """Check that workers that were told to stop have done so, and let another one do the rest: nothing was counted."""
    for worker in left:
        assert worker.await_end() == 0
        assert worker.said("stopped")
    scene.open_gate()
    scene.worker()
    assert attempts(scene, scene.finish()) <= {1}, "a shutdown has burnt an attempt"


@scenario
def stopped_while_idle(scene: Scene) -> None:
    """The worker has nothing to do, and would look again in an hour."""
    scene.enqueue("work")
    worker = scene.worker(poll_interval=3600, lease=30)
    scene.await_that(lambda: worker.said("completed") and worker.said("idle"), "that the worker rests")
    worker.terminate()
    # Before there is something new, which would wake it as well.
    assert worker.await_end() == 0
    scene.enqueue("work", "quiet")
    in_peace(scene, worker)


@scenario
def stopped_while_claiming(scene: Scene) -> None:
    """The claim has reached the server, and what it finds is given back."""
    scene.enqueue("work", "quiet", "work")
    with scene.bench.engine.begin() as connection:
        connection.execute(sa.text("LOCK TABLE job IN ACCESS EXCLUSIVE MODE"))
        worker = scene.worker(lease=30)
        waiting = """
            SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
            AND wait_event_type = 'Lock' AND query LIKE 'WITH %'
        """
        scene.await_that(lambda: scene.bench.execute(waiting), "that the claim waits")
        worker.terminate()
    in_peace(scene, worker)
    assert not worker.said("start")


@scenario
def stopped_in_a_handler(scene: Scene) -> None:
    """What has begun is finished, everything else goes back."""
    enqueue_after_a_quick_one(scene, *["gated"] * 6)
    worker = scene.worker(lease=30)
    await_handlers(scene, worker)
    worker.terminate()
    scene.open_gate()
    in_peace(scene, worker)
    assert len(worker.said("start")) == len(worker.said("completed")) == 2


@scenario
def stopped_beyond_its_grace(scene: Scene) -> None:
    """What is not finished in time is given back as well, and what it wrote is gone."""
    scene.enqueue(*["gated"] * 3)
    # A death of this one would be blamed on the job: it runs alone.
    worker = scene.worker(lease=30, grace=0.2, batch_size=1)
    await_handlers(scene, worker)
    worker.terminate()
    in_peace(scene, worker)
    assert not worker.said("completed")


@scenario
def stopped_while_settling(scene: Scene) -> None:
    """The COMMIT is on its way."""
    with Proxy(scene.bench.database) as proxy:
        held = proxy.once("settle", "hold")
        scene.enqueue("work", "work", "quiet", "work")
        worker = scene.worker(url=proxy.url, lease=30)
        scene.await_that(held.met.is_set, "that the worker commits")
        worker.terminate()
        held.go_on.set()
        worker.await_end()
    assert worker.said("completed")
    in_peace(scene, worker)
