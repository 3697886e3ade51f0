"""Workers that are stopped beyond their lease, and go on; and one that is alive, and slow."""

from __future__ import annotations

import signal

from tests.faults.history import of
from tests.faults.proxy import Kind, Proxy
from tests.faults.scenarios.playing import attempts, await_handlers, enqueue_after_a_quick_one, scenario
from tests.faults.scene import Process, Scene


def zombie_of(scene: Scene) -> Process:
    """Return a worker that is stopped in a handler."""
    enqueue_after_a_quick_one(scene, "gated", "quiet gated", "work")
    zombie = scene.worker()
    await_handlers(scene, zombie)
    zombie.signal(signal.SIGSTOP)
    if not scene.held:
        await_expiry(scene)
    return zombie


def await_expiry(scene: Scene) -> None:
    """Wait until all leases are over."""
    alive = "SELECT count(*) FROM job WHERE lease_expires_at > clock_timestamp()"
    scene.await_that(lambda: not scene.bench.execute(alive), "that the leases expire")


@scenario
def stopped_beyond_its_lease(scene: Scene) -> None:
    """It goes on when others have done its jobs; or, where a transaction holds them, finds them untouched."""
    zombie = zombie_of(scene)
    [quick] = [line.key for line in zombie.said("completed")] or [None]
    scene.open_gate()
    other = scene.worker()
    [later] = scene.enqueue("work")
    if scene.held:
        scene.await_that(lambda: any(line.key == later for line in other.said("completed")), "that others work")
    else:
        scene.await_done()
    zombie.signal(signal.SIGCONT)
    if scene.held:
        assert attempts(scene, scene.finish()) <= {1}
        assert not zombie.said("lease_lost")
    else:
        scene.await_that(lambda: zombie.said("lease_lost"), "that the zombie learns of it")
        scene.finish()
        assert not [line for line in zombie.said("completed") if line.key not in {quick, later}]


@scenario
def replaced_while_stopped(scene: Scene) -> None:
    """Another worker is at work on its job when it goes on: its result is refused, and the other's counts."""
    zombie = zombie_of(scene)
    if scene.held:
        scene.end_connections()
    other = scene.worker(lease=30)
    await_handlers(scene, other)
    scene.open_gate(zombie)
    zombie.signal(signal.SIGCONT)
    if scene.held:
        scene.await_that(lambda: len(zombie.said("end")) > len(zombie.said("completed")), "that the zombie goes on")
    else:
        scene.await_that(lambda: zombie.said("lease_lost"), "that the zombie learns of it")
    at_work = other.said("waits")[0].key
    assert at_work not in {line.key for line in scene.lines() if line.what == "completed"}, "its run was ended"
    scene.open_gate()
    scene.finish()
    assert not other.said("lease_lost")


@scenario
def taken_back_from_a_zombie(scene: Scene) -> None:
    """Its jobs are taken back and nobody else has them yet when it goes on: its results are refused all the same."""
    zombie = zombie_of(scene)
    if scene.held:
        scene.end_connections()
    else:
        scene.rescue()
    scene.open_gate()
    zombie.signal(signal.SIGCONT)
    scene.finish()


@scenario
def robbed_while_stopped(scene: Scene) -> None:
    """Its connections are ended meanwhile, and others do what it held."""
    zombie = zombie_of(scene)
    scene.end_connections()
    scene.open_gate()
    scene.worker()
    scene.await_done()
    zombie.signal(signal.SIGCONT)
    scene.finish()


@scenario
def works_longer_than_its_lease(scene: Scene) -> None:
    """A worker that is alive keeps its jobs: those at work, and those that wait for their turn."""
    enqueue_after_a_quick_one(scene, *["gated"] * 3)
    worker = scene.worker(lease=1.5)
    await_handlers(scene, worker)
    other = scene.worker(lease=1.5)
    if not scene.held:
        end = scene.bench.execute("SELECT max(lease_expires_at) + interval '1.5 s' FROM job")
        scene.await_that(lambda: scene.bench.execute("SELECT clock_timestamp() > :end", end=end), "that time passes")
    scene.open_gate()
    assert attempts(scene, scene.finish()) <= {1}
    assert not of(scene.lines(), "rescued", "lease_lost")
    assert len(worker.said("start")) + len(other.said("start")) == 4


@scenario
def frozen_in_its_heartbeat(scene: Scene) -> None:
    """A worker is stopped between the extension of its leases and the COMMIT: the rows do not stay locked with it."""
    scene.enqueue("gated")
    freeze(scene, "extend")


@scenario
def frozen_in_its_rescue(scene: Scene) -> None:
    """The same with jobs of another worker that it is just taking back."""
    scene.enqueue("gated")
    dead = scene.worker()
    await_handlers(scene, dead)
    dead.signal(signal.SIGKILL)
    await_expiry(scene)
    freeze(scene, "rescue")


def freeze(scene: Scene, kind: Kind) -> None:
    with Proxy(scene.bench.database) as proxy:
        commit = proxy.once(kind, "hold")
        worker = scene.worker(url=proxy.url)
        scene.await_that(commit.met.is_set, "the COMMIT")
        worker.signal(signal.SIGSTOP)
        scene.open_gate()
        scene.worker()
        scene.await_done()
        commit.go_on.set()
        worker.signal(signal.SIGCONT)
        scene.finish()
