"""The database goes away: some connections, the server, or the one COMMIT that matters."""

from __future__ import annotations

from tests.faults.proxy import Action, Kind, Proxy
from tests.faults.scenarios.playing import attempts, scenario
from tests.faults.scene import Scene


@scenario
def loses_connections(scene: Scene) -> None:
    """An administrator ends some of them, again and again."""
    scene.enqueue_some(8)
    for _ in range(2):
        scene.worker(concurrency=scene.dice.randint(1, 3))
    scene.produce(12)
    for _ in range(5):
        scene.some_lines_later(12)
        scene.end_connections(share=0.5)
    scene.finish()


@scenario
def restarted(scene: Scene) -> None:
    """The server crashes in the middle of the work, and comes back."""
    scene.enqueue_some(10)
    workers = [scene.worker(concurrency=scene.dice.randint(1, 2)) for _ in range(2)]
    server = scene.bench.database.server
    scene.some_lines_later(25)
    scene.log.write("fault", kind="restart")
    server.stop("immediate")
    try:
        # The lanes miss it, and where there are leases to tend, so does the keeper.
        for complaint in ("next try in", *([] if scene.held else ["maintenance:"])):
            scene.await_that(lambda: all(complaint in scene.output(one) for one in workers), complaint)  # noqa: B023 - called at once
    finally:
        server.start()
    scene.enqueue_some(4)
    scene.finish()


@scenario
def loses_the_commit(scene: Scene) -> None:
    """Each kind of COMMIT does not reach the server, once."""
    lose(scene, "lose before")


@scenario
def loses_the_answer_to_the_commit(scene: Scene) -> None:
    """Each kind of COMMIT is done, once, without its worker hearing of it."""
    lose(scene, "lose after")


def lose(scene: Scene, action: Action) -> None:
    with Proxy(scene.bench.database) as proxy:
        kinds: list[Kind] = ["settle", "ledger"] if scene.held else ["settle", "claim", "bulk"]
        rules = [proxy.once(kind, action) for kind in kinds]
        for _ in rules:
            scene.log.write("fault", kind="cut")
        scene.enqueue(*scene.dice.sample(["work"] * 4 + ["quiet"] * 4, 8))
        # A death of this one would be blamed on the job that it runs: it lives, so none is. A second settlement that is
        # lost would be that of the same job, which runs alone by then and pays for it.
        worker = scene.worker(url=proxy.url, batch_size=1, lease=2)
        tables = scene.finish()
        assert all(rule.met.is_set() for rule in rules)
    assert not worker.said("lease_lost", "failed")
    if scene.held:
        assert attempts(scene, tables) <= {1}, "a job was blamed for a connection that was lost after it"
