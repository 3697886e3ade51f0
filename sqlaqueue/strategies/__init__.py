"""The claim strategies, one in each module; ``parts`` contains what they are built from.

A name is looked up among the built-in strategies, then among the entry points of the group ``sqlaqueue.strategies``. So
another package adds a strategy with a class and a line in its ``pyproject.toml``::

    [project.entry-points."sqlaqueue.strategies"]
    my_strategy = "my_package:MyStrategy"
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from sqlaqueue.exc import UnknownStrategyError
from sqlaqueue.queue.strategy_protocol import ClaimedJobs, ClaimRequest, KeyRange, ScanRange, Settlement, Strategy, Verb
from sqlaqueue.strategies.base import ClaimStrategy
from sqlaqueue.texts import did_you_mean

__all__ = [
    "ClaimRequest",
    "ClaimStrategy",
    "ClaimedJobs",
    "KeyRange",
    "ScanRange",
    "Settlement",
    "Verb",
    "find_strategy",
    "strategy_names",
]

GROUP = "sqlaqueue.strategies"

_BUILT_IN = {
    "update_status": "sqlaqueue.strategies.update_status:UpdateStatus",
    "delete_returning": "sqlaqueue.strategies.delete_returning:DeleteReturning",
    "batch_select": "sqlaqueue.strategies.batch_select:BatchSelect",
}


def strategy_names() -> list[str]:
    """Return the names of the built-in strategies, then those of other packages."""
    return [*_BUILT_IN, *sorted({point.name for point in entry_points(group=GROUP)} - set(_BUILT_IN))]


def find_strategy(wanted: str | Strategy, model: str = "") -> ClaimStrategy:
    """Return the strategy of this name, or ``wanted`` itself if it is one.

    :param model: the name of the class that wants it, for errors.
    :raises UnknownStrategyError: for an unknown name, listing the known ones.
    """
    if isinstance(wanted, ClaimStrategy):
        return wanted
    what = f"{model and f'{model}: '}QueueConfig(strategy={wanted!r})"
    if isinstance(wanted, str) and wanted in _BUILT_IN:
        module, _, attribute = _BUILT_IN[wanted].partition(":")
        factory = getattr(import_module(module), attribute)
    else:
        found = [point for point in entry_points(group=GROUP) if point.name == wanted]
        if not found:
            known = strategy_names()
            msg = f"{what}: there is no such strategy; there are {', '.join(map(repr, known))}"
            raise UnknownStrategyError(msg + did_you_mean(str(wanted), known))
        factory = found[0].load()
    strategy = factory()
    if not isinstance(strategy, ClaimStrategy):
        msg = f"{what}: {factory!r} does not derive from sqlaqueue.strategies.ClaimStrategy"
        raise UnknownStrategyError(msg)
    return strategy
