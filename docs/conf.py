"""The documentation as a site: ``nox -s docs`` builds it, and takes every warning for an error."""

import sqlaqueue

project = "sqlaqueue"
author = "sqlaqueue contributors"
version = release = sqlaqueue.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
default_role = "code"
nitpicky = True
nitpick_ignore_regex = [
    # What other projects document.
    ("py:.*", r"(?!sqlaqueue\.).*"),
    # Type variables, which stand for the job's class.
    ("py:.*", r"sqlaqueue\..*\.T"),
]

html_theme = "furo"
html_title = f"sqlaqueue {release}"
html_copy_source = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True

myst_heading_anchors = 3
