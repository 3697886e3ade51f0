"""What all other engines give in the same way, and how they refuse what they cannot carry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import sqlalchemy as sa

from sqlaqueue.engines import checks
from sqlaqueue.engines.notifications import subscribe
from sqlaqueue.exc import ConfigurationError


class SharedEngine:
    """The base of an :class:`~sqlaqueue.sql.engine.OtherEngine` that carries the strategy ``update_status`` only."""

    title: str
    """The name for people."""
    inserts_all_or_none = False
    """Whether an INSERT of several jobs, one of which has a twin, inserts none of them."""
    no_strategy: ClassVar[str]
    """Why no other strategy is available, as it follows the name of the database."""
    no_option: ClassVar[Mapping[str, str]]
    """The options of a queue that are not available, each with the reason, which may be empty."""

    needs_indexes: ClassVar[bool] = False
    """Whether a claim names its index, and so raises an error without it."""
    migrating: str = "migrate with `alembic revision --autogenerate` and `alembic upgrade head`"
    """How an existing table gets what it lacks, as an advice to people."""

    @property
    def checks(self) -> Any:
        """The tables, columns and indexes that are missing."""
        return checks

    def subscribe(self, engine: sa.Engine, deliver: Callable[[str, str], None]) -> Callable[[], None]:
        """Call ``deliver(channel, text)`` for notifications that are sent in this process."""
        return subscribe(engine, deliver)

    def check_supported(self, spec: Any) -> None:
        """Refuse a queue with options that the database cannot carry.

        :raises ConfigurationError: naming the class, the option and what to use instead.
        """
        name, config = spec.model.__name__, spec.config
        if spec.strategy.name != "update_status":
            msg = (
                f'{name}: strategy "{config.strategy}" is not available on {self.title}, {self.no_strategy}; use '
                'QueueConfig(strategy="update_status")'
            )
            raise ConfigurationError(msg)
        for option, reason in self.no_option.items():
            if getattr(config, option):
                because = f", {reason}" if reason else ""
                msg = (
                    f"{name}: QueueConfig({option}=...) is not available on {self.title}{because}; leave it out, or "
                    "use PostgreSQL"
                )
                raise ConfigurationError(msg)
        for key in spec.keys:
            if isinstance(getattr(key.type, "impl_instance", key.type), sa.LargeBinary):
                msg = (
                    f"{name}.{key.key}: a key of bytes is not available on {self.title}, where keys are given to "
                    "statements as JSON; use a number, a text or a UUID"
                )
                raise ConfigurationError(msg)

    def check_storage(self, connection: sa.Connection, spec: Any) -> None:
        """Accept the tables as they are."""
