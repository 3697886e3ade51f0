"""The arguments of a dashboard, and what an access allows."""

from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy.orm import Mapped, mapped_column

from sqlaqueue import QueueConfig, QueueMixin
from sqlaqueue.exc import ConfigurationError, NotAQueueError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.web import Access, Dashboard
from sqlaqueue.web.data.job_columns import columns_of
from sqlaqueue.web.settings import Settings
from tests.web.conftest import everything
from tests.web.models import Queues, new_base

QUEUES = Queues()


def settings(**given: Any) -> Settings:
    defaults: dict[str, Any] = {"redact": (), "links": {}, "origins": ()}
    return Settings.of(QUEUES.all, **{**defaults, **given})


def is_redacted(given: Any, model: Any, column: str) -> bool:
    return settings(redact=given).is_redacted(spec_of(model), column)


def test_columns_are_redacted_by_attribute_text_and_name() -> None:
    for given in (["Email.subject"], [QUEUES.Email.subject], ["subject"], ["email.subject"]):
        assert is_redacted(given, QUEUES.Email, "subject")
        assert not is_redacted(given, QUEUES.Email, "recipient")


def test_a_name_is_redacted_in_all_queues_and_roles_are_too() -> None:
    for model in QUEUES.all:
        if "last_error" in spec_of(model).columns:
            assert is_redacted(["last_error"], model, "last_error")


@pytest.mark.parametrize(
    ("given", "redacted"),
    [
        (["Letter.secret"], {"letter_secret"}),
        (["Parcel.secret"], {"parcel_secret"}),
        (["secret"], {"letter_secret", "parcel_secret"}),
        (["parcel_secret"], {"parcel_secret"}),
    ],
)
def test_subclasses_may_have_different_columns_under_one_name(given: list[str], redacted: set[str]) -> None:
    class Item(QueueMixin, new_base()):
        __tablename__ = "item"
        __queue__ = QueueConfig(strategy="update_status")
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "item"}  # noqa: RUF012 - as SQLAlchemy wants it

    class Letter(Item):
        secret: Mapped[str | None] = mapped_column("letter_secret")
        __mapper_args__ = {"polymorphic_identity": "letter"}  # noqa: RUF012 - as SQLAlchemy wants it

    class Parcel(Item):
        secret: Mapped[str | None] = mapped_column("parcel_secret")
        __mapper_args__ = {"polymorphic_identity": "parcel"}  # noqa: RUF012 - as SQLAlchemy wants it

    made = Settings.of([Item], given, {}, ())
    columns = columns_of(spec_of(Item), made.is_redacted).values()
    assert {each.column.name for each in columns if each.is_redacted} == redacted
    # A schedule names the attribute, and one of several classes.
    assert made.is_attribute_redacted(spec_of(Item), "secret")
    assert not made.is_attribute_redacted(spec_of(Item), "kind")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"redact": ["Email.subjct"]}, "no queue class Email has a column 'subjct'"),
        ({"redact": ["nothing"]}, "no queue has a column 'nothing'"),
        ({"redact": "subject"}, r"give a list, as in redact=\['subject'\]"),
        ({"redact": [5]}, "5 is not a column"),
        ({"redact": [QUEUES.Email.id]}, "'id' is in the primary key of Email"),
        ({"redact": ["Picture.name"]}, "'name' is in the primary key of Picture"),
        ({"links": {"Email.customer_id": "javascript:alert({value})"}}, "give a URL as in"),
        ({"links": {"Email.customer_id": "https://shop.example/"}}, "{value}"),
        ({"links": {"Email.customer_id": "//shop.example/{value}"}}, "give a URL as in"),
        ({"links": ["x"]}, "give a dictionary"),
        ({"origins": ["ops.example.com"]}, "give the scheme and host"),
        ({"origins": ["https://ops.example.com/path"]}, "give the scheme and host"),
        ({"origins": "https://ops.example.com"}, "give a list"),
    ],
)
def test_wrong_arguments_name_the_fix(given: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        settings(**given)


def test_models_must_be_queues(sessions: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Dashboard\(Email\): give a list"):
        Dashboard(QUEUES.Email, sessions, access=everything)  # the mistake that is tested
    with pytest.raises(ConfigurationError, match="at least one queue class"):
        Dashboard([], sessions, access=everything)
    with pytest.raises(NotAQueueError):
        Dashboard([QUEUES.Customer], sessions, access=everything)
    with pytest.raises(ConfigurationError, match="sessionmaker"):
        Dashboard(QUEUES.all, "postgresql://", access=everything)  # type: ignore[arg-type]  # as above


def test_links_are_safe_and_quoted() -> None:
    def by_value(value: Any) -> str:
        return str(value)

    spec = spec_of(QUEUES.Email)
    made = settings(links={"Email.customer_id": "https://shop.example/c/{value}", QUEUES.Email.subject: by_value})
    assert made.link(spec, "customer_id", "a/b?c") == "https://shop.example/c/a%2Fb%3Fc"
    assert made.link(spec, "recipient", 1) is None
    for bad in (
        "javascript:alert(1)",
        "JaVaScRiPt:alert(1)",
        " javascript:x",
        "java\tscript:x",
        "data:text/html,x",
        "\x01javascript:x",
        "vbscript:x",
        "//evil.example/x",
        "/\\evil.example",
        "\\/evil.example",
        "\\\\evil.example",
        "///evil.example",
    ):
        assert made.link(spec, "subject", bad) is None
    for good in ("https://a.example", "https://a.example//x", "/local?x=1", "/local//x", "relative"):
        assert made.link(spec, "subject", good) == good


def test_queues_of_one_name_are_refused() -> None:
    other = Queues()
    with pytest.raises(ConfigurationError, match="both named 'email'"):
        Settings.of([QUEUES.Email, other.Email], (), {}, ())


@pytest.mark.parametrize("name", ["a/b", "..", ".", "ü", "a b", "~x", "a%2fb"])
def test_names_of_queues_are_single_segments_in_urls(name: str) -> None:
    class Odd(QueueMixin, new_base()):
        __tablename__ = "odd"
        __queue__ = QueueConfig(name=name)
        id: Mapped[int] = mapped_column(primary_key=True)

    made = Settings.of([Odd], (), {}, ())
    slug = made.queues[name].slug
    assert quote(slug, safe="~") == slug
    assert slug not in {".", ".."}
    assert made.by_slug(slug) is made.queues[name]


@pytest.mark.parametrize(
    ("access", "readable", "allowed"),
    [
        (Access(read=False, act=True), set(), set()),
        (Access(read=True), {"email", "invoice"}, set()),
        (Access(read=["email"], act=True), {"email"}, {("email", "purge"), ("email", "requeue")}),
        (
            Access(read=True, act={QUEUES.Email: ["requeue"], "invoice": True}),
            {"email", "invoice"},
            {("email", "requeue"), ("invoice", "requeue"), ("invoice", "purge")},
        ),
        (Access(read=True, act=[QUEUES.Invoice]), {"email", "invoice"}, {("invoice", "requeue"), ("invoice", "purge")}),
        (Access(read=["invoice"], act=["email"]), {"invoice"}, set()),
    ],
)
def test_access_by_queue_and_action(access: Access, readable: set[str], allowed: set[tuple[str, str]]) -> None:
    names = ("email", "invoice")
    assert {name for name in names if access.reads(name)} == readable
    actions: Any = ("purge", "requeue")
    assert {(name, action) for name in names for action in actions if access.may(action, name)} == allowed


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"read": "email"}, r"Access\(read='email'\): give True, False, or a list"),
        ({"read": None}, "read=None"),
        ({"read": True, "act": {"email": ["retry"]}}, "there is no action 'retry'; the actions are enqueue"),
        ({"read": True, "act": {"email": "requeue"}}, "give a list of actions"),
        ({"read": True, "user": 5}, "as a text"),
    ],
)
def test_wrong_access_names_the_fix(given: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Access(**given)


@pytest.mark.parametrize("link", [lambda value: value["id"], lambda _: 5 / 0])
def test_a_link_function_that_fails_gives_no_link(link: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = settings(links={"Email.recipient": link})
    assert made.link(spec_of(QUEUES.Email), "recipient", "ada") is None
    assert "links of recipient of the queue email" in caplog.text
