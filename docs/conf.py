"""The documentation as a site: ``nox -s docs`` builds it and treats warnings as errors."""

import sys
from pathlib import Path

import sqlaqueue

project = "sqlaqueue"
author = "sqlaqueue contributors"
version = release = sqlaqueue.__version__

sys.path.append(str(Path(__file__).parent / "_extensions"))
import other_projects  # noqa: E402 - it is found there

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "default_values",
    "llms",
    "reference_pages",
    "source_pages",
]
exclude_patterns = ["_build", "_api"]
default_role = "code"
nitpicky = True
nitpick_ignore_regex = [
    # Names that other projects document.
    ("py:.*", r"(?!sqlaqueue\.).*"),
    # What Consumer and AsyncConsumer inherit from; the reference documents them with all that they inherit.
    ("py:class", r"sqlaqueue\.consumer\.base\.ConsumerBase"),
    # Type variables that stand for the job's class, for an engine of either kind, and for the parts of a function.
    ("py:.*", r"sqlaqueue\.(.*\.(Engine)?T|functions\.[JPRS])"),
]

html_theme = "furo"
html_title = f"sqlaqueue {release}"
html_copy_source = False
html_static_path = ["_static"]
html_theme_options = {
    "source_repository": "https://github.com/sqlaqueue/sqlaqueue/",
    "source_branch": "main",
    "source_directory": "docs/",
}
intersphinx_mapping = other_projects.mapping()

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True

myst_heading_anchors = 4
myst_html_meta = {"description": str(sqlaqueue.__doc__).partition("\n")[0]}
