"""The version of the package, in a module of its own: importing it from ``sqlaqueue`` would be a circular import."""

__version__ = "0.2.0.dev0"
