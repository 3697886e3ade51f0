"""``sqlaqueue worker --otel``: the application sets OpenTelemetry up when it is imported."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import MODELS, TASKS, Shop
from tests.cli.shop.models import Email
from tests.programs import wait_until

pytestmark = pytest.mark.once

APP = """
import json, os
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from tests.cli.shop.models import Email

class ToFile(SpanExporter):
    def export(self, spans):
        with open("spans", "a") as file:
            for span in spans:
                file.write(json.dumps([span.name, os.getpid()]) + "\\n")
        return SpanExportResult.SUCCESS

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ToFile()))
trace.set_tracer_provider(provider)
"""


@pytest.mark.parametrize("processes", [(), ("--processes", "1")], ids=["alone", "supervised"])
def test_a_worker_makes_spans(shop: Shop, processes: tuple[str, ...]) -> None:
    (shop.directory / "traced_app.py").write_text(APP)
    worker = shop.start("worker", f"traced_app:Email={TASKS}:send", "--otel", *processes)
    shop.add(Email())
    wait_until(lambda: shop.states("email") == {"completed": 1}, lambda: worker.output)
    worker.signal()
    assert worker.end() == 0, worker.output
    lines = [json.loads(line) for line in (shop.directory / "spans").read_text().splitlines()]
    assert sorted(name for name, _ in lines) == ["complete email", "process email", "receive email"]


def test_without_opentelemetry(shop: Shop) -> None:
    (shop.directory / "opentelemetry.py").write_text("raise ModuleNotFoundError('it is missing', name='opentelemetry')")
    worker = shop.start("worker", f"{MODELS}:Email={TASKS}:send", "--otel")
    assert worker.end() == 2
    assert "--otel: sqlaqueue.otel needs opentelemetry: pip install 'sqlaqueue[otel]'" in worker.output
