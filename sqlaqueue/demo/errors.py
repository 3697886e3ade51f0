"""The error that keeps the demo from starting."""

from __future__ import annotations


class CannotRunError(Exception):
    """The demo cannot start with these options, on this machine, or with this database."""
