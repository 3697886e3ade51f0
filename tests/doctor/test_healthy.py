"""A healthy queue has no finding."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer
from tests.doctor.conftest import Patient
from tests.doctor.models import MODELS, Delivery, Note


def handle(session: Session, job: Any) -> None:
    pass


def test_empty_queues(patient: Patient) -> None:
    assert patient.findings(deep=True) == []


@pytest.mark.parametrize("model", MODELS)
def test_a_queue_that_has_run_jobs(patient: Patient, model: Any) -> None:
    attributes = [name for name in ("customer_id", "document_id") if hasattr(model, name)]
    patient.add(*(model(id=number, **dict.fromkeys(attributes, number % 7)) for number in range(1, 301)))
    if model is Delivery:
        patient.add(*(Note(order_id=number) for number in range(1, 301)))
    patient.execute("ANALYZE")
    engine = sa.create_engine(patient.database.url())
    assert Consumer(model, handle, sessionmaker(engine)).drain() == 300
    with Consumer(model, handle, sessionmaker(engine)):
        assert patient.findings(deep=True) == []
    engine.dispose()
