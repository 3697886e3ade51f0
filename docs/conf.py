"""The documentation as a site: ``nox -s docs`` builds it and treats warnings as errors."""

import sys
from pathlib import Path

import sqlaqueue

project = "sqlaqueue"
author = "sqlaqueue contributors"
version = release = sqlaqueue.__version__

sys.path.append(str(Path(__file__).parent / "_extensions"))
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinxcontrib.mermaid",
    "default_values",
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

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True

myst_heading_anchors = 4
myst_html_meta = {"description": str(sqlaqueue.__doc__).partition("\n")[0]}
# As on GitHub, which draws a block of this language too.
myst_fence_as_directive = ["mermaid"]
mermaid_height = "auto"
mermaid_fullscreen = False
