"""Workers die: by SIGKILL, or at the hands of a job."""

from __future__ import annotations

import signal
from typing import Any

from tests.faults.scenarios.playing import attempts, await_handlers, scenario
from tests.faults.scene import Scene
from tests.faults.worker import DEADLY


@scenario
def killed(scene: Scene) -> None:
    """Workers are killed at any moment, and a producer while it commits."""
    scene.enqueue_some(10)
    for _ in range(2):
        worker = scene.worker(concurrency=scene.dice.randint(1, 3))
        producer = scene.produce(6)
        scene.some_lines_later(25)
        worker.signal(signal.SIGKILL)
        if scene.dice.random() < 0.5:
            producer.signal(signal.SIGKILL)
    scene.worker(concurrency=2)
    scene.finish()


@scenario
def killed_at_work(scene: Scene) -> None:
    """A worker dies with several claimed jobs: nobody knows whose doing it was, and no attempt is counted."""
    scene.enqueue(*["gated"] * 4)
    worker = scene.worker(concurrency=2, batch_size=2)
    await_handlers(scene, worker, 2)
    worker.signal(signal.SIGKILL)
    scene.open_gate()
    scene.worker()
    assert attempts(scene, scene.finish()) <= {1}
    scene.bench.assert_tidy()


@scenario
def killed_with_several_claims(scene: Scene) -> None:
    """The same, where each of the jobs that it had at work was claimed by itself."""
    scene.enqueue(*["gated"] * 3)
    worker = scene.worker(concurrency=3, batch_size=1)
    await_handlers(scene, worker, 3)
    worker.signal(signal.SIGKILL)
    scene.open_gate()
    scene.worker()
    assert attempts(scene, scene.finish()) <= {1}
    scene.bench.assert_tidy()


@scenario
def kills_its_worker(scene: Scene) -> None:
    """A killer among nine innocents is retired after its attempts, and none of these comes to harm."""
    retire(scene, "exit")


@scenario
def kills_its_worker_of_three(scene: Scene) -> None:
    """The same where three handlers are at work at once."""
    retire(scene, "exit", concurrency=3, batch_size=2)


@scenario
def cuts_its_connection(scene: Scene) -> None:
    """A job whose handler ends the session of its worker's connection is retired as well, and alone."""
    retire(scene, "cut")


def retire(scene: Scene, payload: str, **options: Any) -> None:
    innocents = scene.enqueue(*["work"] * 5, priority=0)
    [killer] = scene.enqueue(payload, limit=2, priority=0)
    innocents += scene.enqueue(*["quiet"] * 4, priority=0)
    worker = scene.worker(**options)
    deaths = 0

    def is_over() -> bool:
        nonlocal worker, deaths
        if worker.has_ended:
            assert worker.await_end() == DEADLY
            scene.log.write("died", worker=worker.name)
            deaths += 1
            assert deaths <= 3, "the killer is not retired"
            worker = scene.worker(**options)
        return scene.is_done()

    scene.await_that(is_over, "that all is done")
    tables = scene.finish()
    assert tables.rows[killer].state == "failed"
    assert tables.rows[killer].attempts == 2
    assert {tables.rows[key].attempts for key in innocents if key in tables.rows} <= {1}, "an innocent was blamed"
