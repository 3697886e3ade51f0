"""The endpoint of a worker, ``sqlaqueue worker --http``, and the command ``sqlaqueue health``."""

import contextlib
import http.server
import json
import logging
import os
import re
import shutil
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sqlaqueue.cli import http as endpoints
from sqlaqueue.consumer.context import Health
from tests.cli.conftest import EMAIL, QUEUES, WORKER, Shop
from tests.cli.shop.models import Email
from tests.cli.test_worker import pids
from tests.programs import Program, wait_until

pytestmark = pytest.mark.once


def endpoint(process: Program) -> str:
    """Return the URL that a worker logs."""
    process.wait_for("/live, /ready and /metrics")
    found = re.search(r"serving (http://\S+?)/live", process.output)
    return found[1]


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - a worker of the test
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


def value(metrics: str, name: str, **labels: str) -> float:
    """Return the value of a metric, 0 without one."""
    for line in metrics.splitlines():
        if line.startswith(f"{name}{{") and all(f'{label}="{text}"' in line for label, text in labels.items()):
            return float(line.rpartition(" ")[2])
    return 0.0


def completed(url: str) -> float:
    """Return how many e-mails a worker has completed."""
    return value(get(f"{url}/metrics")[1], "sqlaqueue_worker_jobs_total", queue="email", outcome="completed")


def test_the_endpoint_of_a_worker(shop: Shop) -> None:
    worker = shop.start(*WORKER, "--http", "0")
    url = endpoint(worker)
    assert url.startswith("http://127.0.0.1:"), "the loopback interface"
    wait_until(lambda: get(f"{url}/ready")[0] == 200, lambda: get(f"{url}/ready")[1])
    assert json.loads(get(f"{url}/live")[1])["queues"] == {"email": {"alive": True, "ready": True, "problems": []}}
    shop.add(Email(), Email())
    wait_until(lambda: shop.states("email") == {"completed": 2}, lambda: worker.output)
    wait_until(lambda: completed(url) == 2, lambda: get(f"{url}/metrics")[1])
    metrics = get(f"{url}/metrics")[1]
    assert value(metrics, "sqlaqueue_worker_job_duration_seconds_count", queue="email") == 2
    assert value(metrics, "sqlaqueue_worker_job_wait_seconds_count", queue="email") == 2
    assert 'sqlaqueue_worker_jobs_total{outcome="failed",queue="email"} 0.0' in metrics
    assert get(f"{url}/elsewhere")[0] == 404
    for arguments in ((url,), (url.removeprefix("http://"), "--live"), (url.rpartition(":")[2],)):
        assert shop.ok("health", *arguments).endswith("alive\n" if "--live" in arguments else "ready\n")
    worker.signal()
    assert worker.end() == 0, worker.output
    result = shop.invoke("health", url)
    assert result.exit_code == 1
    assert "no worker answers" in result.output


def test_the_endpoint_of_several_processes(shop: Shop) -> None:
    """Their metrics are added up, and they are ready when each of them is."""
    supervisor = shop.start(*WORKER, "--processes", "2", "--http", "127.0.0.1:0")
    url = endpoint(supervisor)
    wait_until(lambda: get(f"{url}/ready")[0] == 200, lambda: supervisor.output)
    assert shop.ok("health", url).count("ready") == 2
    shop.add(*(Email() for _ in range(20)))
    wait_until(lambda: shop.states("email") == {"completed": 20}, lambda: supervisor.output)

    wait_until(lambda: completed(url) == 20, lambda: get(f"{url}/metrics")[1])
    os.kill(pids(supervisor)[2], signal.SIGKILL)
    wait_until(lambda: get(f"{url}/ready")[0] == 503, lambda: supervisor.output)
    assert get(f"{url}/live")[0] == 200, "it is restarted"
    assert completed(url) == 20, "the counters of a dead process stay"
    wait_until(lambda: get(f"{url}/ready")[0] == 200, lambda: supervisor.output)
    supervisor.signal()
    assert supervisor.end() == 0, supervisor.output


def test_the_metrics_of_dead_processes_are_added_up(shop: Shop, tmp_path: Path) -> None:
    """Each start would leave more files otherwise. After a second signal the directory is removed as well."""
    supervisor = shop.start(*WORKER, "--processes", "1", "--http", "127.0.0.1:0", TMPDIR=str(tmp_path))
    url, killed = endpoint(supervisor), list[int]()

    def is_ready() -> bool:
        return pids(supervisor).get(1) not in {None, *killed} and get(f"{url}/ready")[0] == 200

    for _ in range(3):
        wait_until(is_ready, lambda: supervisor.output)
        shop.add(Email())
        wait_until(lambda: completed(url) == len(killed) + 1, lambda: get(f"{url}/metrics")[1])
        killed.append(pids(supervisor)[1])
        os.kill(killed[-1], signal.SIGKILL)
    wait_until(is_ready, lambda: supervisor.output)
    assert completed(url) == 3
    (directory,) = tmp_path.glob("sqlaqueue-metrics-*")
    live = pids(supervisor)[1]
    files = {path.name for path in directory.iterdir()}
    assert files <= {f"{kind}_{pid}.db" for kind in ("counter", "histogram", "gauge_livesum") for pid in (0, live)}
    assert "counter_0.db" in files
    supervisor.signal(signal.SIGSTOP)
    supervisor.signal(signal.SIGTERM)
    supervisor.signal(signal.SIGINT)
    supervisor.signal(signal.SIGCONT)
    assert supervisor.end() in {-signal.SIGINT, -signal.SIGTERM}
    assert not directory.exists()


def test_a_removed_directory_of_metrics_is_made_again(shop: Shop, tmp_path: Path) -> None:
    """As by a program that cleans temporary directories: without it no worker could start."""
    supervisor = shop.start(*WORKER, "--processes", "1", "--http", "127.0.0.1:0", TMPDIR=str(tmp_path))
    url = endpoint(supervisor)
    wait_until(lambda: get(f"{url}/ready")[0] == 200, lambda: supervisor.output)
    (directory,) = tmp_path.glob("sqlaqueue-metrics-*")
    shutil.rmtree(directory)
    assert get(f"{url}/metrics")[0] == 500
    first = pids(supervisor)[1]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: pids(supervisor)[1] != first and get(f"{url}/ready")[0] == 200, lambda: supervisor.output)
    assert get(f"{url}/metrics")[0] == 200


def test_a_worker_without_its_database_does_not_start(shop: Shop) -> None:
    """The port is free again, and the error is the one of the database."""
    worker = shop.start(*WORKER, "--http", "0", SQLAQUEUE_URL="postgresql+psycopg://127.0.0.1:1/nowhere")
    assert worker.end() == 3
    assert "the database does not answer" in worker.output


def test_queues_are_ready_if_they_are_served(shop: Shop) -> None:
    result = shop.invoke("health", EMAIL)
    assert (result.exit_code, result.output) == (1, "email: not ready: no Consumer is alive\n")
    worker = shop.start(*WORKER)
    wait_until(lambda: shop.invoke("health", EMAIL).exit_code == 0, lambda: worker.output)
    assert shop.json("health", EMAIL) == [{"name": "email", "ok": True, "problems": [], "consumers": 1}]
    shop.execute("ALTER TABLE email RENAME TO other")
    result = shop.invoke("health", EMAIL)
    assert result.exit_code == 1
    assert result.output.startswith("email: not ready: the database lacks what Email needs: the table email")
    result = shop.invoke("health", EMAIL, SQLAQUEUE_URL="postgresql+psycopg://127.0.0.1:1/nowhere")
    assert result.exit_code == 1
    assert result.output.startswith("email: not ready: the database does not answer")


def test_a_role_that_may_read_heartbeats_only(shop: Shop) -> None:
    role = f"probe_{uuid.uuid4().hex[:8]}"
    url = shop.database.url().replace("postgres@", f"{role}@")
    shop.execute(f"CREATE ROLE {role} LOGIN")
    try:
        result = shop.invoke("health", EMAIL, SQLAQUEUE_URL=url)
        assert result.exit_code == 1
        assert "not ready: permission denied for table sqlaqueue_consumer" in result.output
        shop.execute(f"GRANT SELECT ON sqlaqueue_consumer TO {role}")
        result = shop.invoke("health", EMAIL, SQLAQUEUE_URL=url)
        assert (result.exit_code, result.output) == (1, "email: not ready: no Consumer is alive\n")
    finally:
        shop.execute(f"DROP OWNED BY {role}")
        shop.execute(f"DROP ROLE {role}")


def test_processes_give_their_reasons(shop: Shop) -> None:
    supervisor = shop.start(*WORKER, "--processes", "1", "--http", "0")
    url = endpoint(supervisor)
    wait_until(lambda: get(f"{url}/ready")[0] == 200, lambda: supervisor.output)
    shop.execute("ALTER TABLE email RENAME TO other")

    def problems() -> list[str]:
        found: list[str] = json.loads(get(f"{url}/ready")[1])["queues"]["worker 1"]["problems"]
        return found

    wait_until(lambda: any("the last " in each for each in problems()), lambda: str(problems()))
    shop.execute("ALTER TABLE other RENAME TO email")
    supervisor.signal()
    supervisor.end()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("worker", f"{QUEUES}:emails", "--http", "much"), "--http much: give a port, or an address and a port"),
        (("worker", f"{QUEUES}:emails", "--http", "127.0.0.1:99999"), "give a port, or an address and a port"),
        (("health", EMAIL, "--live"), "is a queue; give the address of a worker"),
        (("health",), "Missing argument"),
        (("health", "999999"), "Error: 999999: give a port, or an address and a port"),
    ],
)
def test_wrong_input(shop: Shop, arguments: tuple[str, ...], message: str) -> None:
    result = shop.invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_port_in_use(shop: Shop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        worker = shop.start(*WORKER, "--http", str(port))
        assert worker.end() == 2
        assert f"--http {port}: Address already in use" in worker.output
        result = shop.invoke("health", str(port), "--timeout", "200ms")
        assert (result.exit_code, "no worker answers" in result.output) == (1, True)


def test_another_server_is_no_worker(shop: Shop) -> None:
    """Such as a proxy that answers for anything."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[]")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = shop.invoke("health", f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()
    assert result.exit_code == 1
    assert "is not the endpoint of a worker" in result.output


# -- what clients can do to the process, and metrics that cannot be read ------------------------------------------

Address = tuple[str, int]


def healths() -> dict[str, Health]:
    return {"email": Health(alive=True, ready=True)}


@contextlib.contextmanager
def served(
    log: pytest.LogCaptureFixture, metrics: Callable[[], tuple[str, bytes]] = lambda: ("text/plain", b"1")
) -> Iterator[Address]:
    log.set_level(logging.DEBUG, "sqlaqueue")
    with endpoints.serving_http("0", healths, metrics):
        found = re.search(r"http://127\.0\.0\.1:(\d+)", log.text)
        yield "127.0.0.1", int(found[1])


def connections() -> int:
    """Return how many connections have a thread."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_slow_clients_do_not_take_all_file_descriptors(caplog: pytest.LogCaptureFixture) -> None:
    with served(caplog) as address, contextlib.ExitStack() as clients:
        for _ in range(40):
            clients.enter_context(socket.create_connection(address)).sendall(b"GET /live")
        wait_until(lambda: connections() >= endpoints.MOST_CONNECTIONS, lambda: str(connections()))
        assert connections() == endpoints.MOST_CONNECTIONS
    wait_until(lambda: not connections(), lambda: str(connections()))


def test_a_probe_is_answered_beside_many_slow_clients(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "DEADLINE", 600)
    with served(caplog) as address, contextlib.ExitStack() as clients:
        for _ in range(60):
            clients.enter_context(socket.create_connection(address, timeout=20)).sendall(b"GET /live")
        status, _ = get(f"http://{address[0]}:{address[1]}/live")
        assert status == 200


@pytest.mark.parametrize(
    ("host", "status"), [("localhost", 200), ("127.0.0.1:80", 200), ("[::1]:9", 200), ("evil.example", 421)]
)
def test_a_name_that_leads_to_the_loopback_interface_is_refused(
    caplog: pytest.LogCaptureFixture, host: str, status: int
) -> None:
    """A page in a browser could read the metrics by such a name."""
    with served(caplog) as address, socket.create_connection(address, timeout=20) as client:
        client.sendall(f"GET /metrics HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.split()[1] == str(status).encode()


def test_the_exporter_has_the_same_limits() -> None:
    with (
        endpoints.serving_metrics("127.0.0.1", 0, lambda: ("text/plain", b"1")) as url,
        contextlib.ExitStack() as clients,
    ):
        host, port = re.findall(r"//([^:]+):(\d+)/metrics", url)[0]
        for _ in range(40):
            clients.enter_context(socket.create_connection((host, int(port)), timeout=20)).sendall(b"GET /metrics")
        assert get(url)[0] == 200
        assert connections() <= endpoints.MOST_CONNECTIONS
        assert get(url.replace("/metrics", "/other"))[0] == 404


def test_a_client_that_sends_byte_by_byte_is_ended(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "DEADLINE", 0.5)
    with served(caplog) as address, socket.create_connection(address) as client:
        client.settimeout(0.05)
        received: bytes | None = None
        ended_by = time.monotonic() + 60
        while received is None:
            assert time.monotonic() < ended_by
            try:
                client.sendall(b"G")
                received = client.recv(100)
            except TimeoutError:
                continue
            except OSError:
                received = b""
        assert received == b""
        assert get(f"http://{address[0]}:{address[1]}/live")[0] == 200, "others are served"


def test_metrics_that_cannot_be_read_are_answered(caplog: pytest.LogCaptureFixture) -> None:
    def metrics() -> tuple[str, bytes]:
        raise ValueError("a secret of a collector")

    with served(caplog, metrics) as (host, port):
        assert get(f"http://{host}:{port}/metrics") == (500, "this failed; the log of the worker has the error\n")
        assert get(f"http://{host}:{port}/ready")[0] == 200
    assert "ValueError: a secret of a collector" in caplog.text


def test_control_characters_of_a_request_do_not_reach_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with served(caplog) as address, socket.create_connection(address) as client:
        client.sendall(b"GET /\x1b[31m\x07 HTTP/1.0\r\n\r\n")
        while client.recv(1000):
            pass
    (record,) = [each for each in caplog.records if getattr(each, "event", None) == "http_request"]
    assert record.getMessage().startswith('http: "GET /\\x1b[31m\\x07 HTTP/1.0" 404')
