"""A module that imports a missing package."""

import a_package_that_nobody_has  # type: ignore[import-not-found] # noqa: F401 - it must fail
