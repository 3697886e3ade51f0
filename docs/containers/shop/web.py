"""The web application, which enqueues jobs: an order and its invoice are one transaction."""

from fastapi import FastAPI, Request

from shop.queues import Invoice, sessions
from sqlaqueue.web import Access

app = FastAPI()


@app.post("/orders")
def order(customer: str) -> dict[str, int]:
    with sessions.begin() as session:
        invoice = Invoice(customer=customer)
        session.add(invoice)
        session.flush()
        return {"invoice": invoice.id}


@app.get("/invoices/{key}")
def read_invoice(key: int) -> dict[str, str | None]:
    with sessions() as session:
        invoice = session.get_one(Invoice, key)
        return {"status": invoice.status, "number": invoice.number}


def access(_request: Request) -> Access:
    """Let everybody read the dashboard who reaches its port, which Compose publishes on this machine only.

    Return ``Access(read=True, act=True, user=...)`` for requests of users who may change jobs.
    """
    return Access(read=True)
