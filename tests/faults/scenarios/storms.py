"""The scenario in which anything happens, in any order."""

from __future__ import annotations

import signal
from collections.abc import Callable

from tests.faults.proxy import Action, Kind, Proxy
from tests.faults.scenarios.playing import scenario
from tests.faults.scene import Process, Scene


@scenario
def storm(scene: Scene) -> None:
    """Anything, in any order."""
    scene.enqueue_some(6)
    with Proxy(scene.bench.database) as proxy:

        def another() -> Process:
            dice = scene.dice
            return scene.worker(
                url=proxy.url,
                concurrency=dice.randint(1, 3),
                batch_size=dice.randint(1, 5),
                batch=dice.random() < 0.3,
            )

        workers = [another(), another()]
        scene.produce(15)
        for fault in scene.dice.choices(list(STROKES), k=4):
            scene.some_lines_later(12)
            STROKES[fault](scene, proxy, workers)
            if workers[0].code is not None:
                workers[0] = another()
            scene.dice.shuffle(workers)
        for worker in workers:
            worker.signal(signal.SIGCONT)
        scene.finish()


def _kill(scene: Scene, _: Proxy, workers: list[Process]) -> None:
    workers[0].signal(signal.SIGKILL)
    workers[0].await_end()


def _terminate(_: Scene, __: Proxy, workers: list[Process]) -> None:
    workers[0].signal(signal.SIGCONT)
    workers[0].signal(signal.SIGTERM)
    assert workers[0].await_end() == 0


def _stop(_: Scene, __: Proxy, workers: list[Process]) -> None:
    workers[0].signal(signal.SIGSTOP)


def _go_on(_: Scene, __: Proxy, workers: list[Process]) -> None:
    for worker in workers:
        worker.signal(signal.SIGCONT)


def _end_connections(scene: Scene, _: Proxy, __: list[Process]) -> None:
    scene.end_connections(share=0.5)


def _lose_commit(scene: Scene, proxy: Proxy, _: list[Process]) -> None:
    scene.log.write("fault", kind="cut")
    kinds: list[Kind] = (
        ["settle", "ledger", "strike"] if scene.held else ["settle", "bulk", "claim", "extend", "rescue"]
    )
    ways: list[Action] = ["lose before", "lose after"]
    proxy.once(scene.dice.choice(kinds), scene.dice.choice(ways))


STROKES: dict[str, Callable[[Scene, Proxy, list[Process]], None]] = {
    "SIGKILL": _kill,
    "SIGTERM": _terminate,
    "SIGSTOP": _stop,
    "SIGCONT": _go_on,
    "terminate": _end_connections,
    "cut": _lose_commit,
}
