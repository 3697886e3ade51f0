"""The version of the package, for all its parts: the package itself imports these, and could not be asked."""

__version__ = "0.1.0"
