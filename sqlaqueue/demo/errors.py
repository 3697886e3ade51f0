"""What keeps the demo from beginning."""

from __future__ import annotations


class CannotRunError(Exception):
    """The demo cannot begin: the command line, the machine or the database has to be another."""
