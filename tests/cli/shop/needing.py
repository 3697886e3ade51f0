"""A module that needs what is not there."""

import a_package_that_nobody_has  # type: ignore[import-not-found] # noqa: F401 - it is meant to fail
