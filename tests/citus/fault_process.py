"""The processes of the fault tests on Citus: those of ``tests.faults`` with the models of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

from sqlaqueue import Consumer, Distribution
from sqlaqueue.consumer import pace
from tests.citus.models import TENANTS, models_for
from tests.consumer.models import for_sync
from tests.faults.history import Recorder
from tests.faults.mutants import MUTANTS
from tests.faults.process_roles import FileGate, PayloadHandler, _record_events


def run(parameters: Any) -> None:
    """Run a Consumer until a signal stops it."""
    directory, name = Path(parameters["directory"]), parameters["name"]
    recorder = Recorder(directory, name)
    pace.RESCUE = 0.2
    if parameters["mutant"]:
        MUTANTS[parameters["mutant"]]()
    engine = sa.create_engine(parameters["url"], pool_size=parameters["pool_size"])
    handler = for_sync(PayloadHandler(recorder, FileGate(directory, name)))
    options = dict(parameters["options"])
    if parameters["placement"] == "distributed":
        options["distribution"] = Distribution("tenant", range(TENANTS))
    consumer = Consumer(models_for(parameters["placement"]).job, handler, sessionmaker(engine), **options)
    _record_events(consumer, parameters, recorder)
    consumer.run()
    engine.dispose()
    recorder.record("stopped")
