"""The former name of :mod:`tests.consumer.listening`, until its importers outside of this folder have the new one."""

from __future__ import annotations

from tests.consumer.listening import LATER

__all__ = ["LATER"]
