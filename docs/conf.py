"""Sphinx: Markdown through MyST, the reference from docstrings, the furo theme. Reads nothing from the network."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the tree itself, also where ampkit is not installed

import ampkit

project = "ampkit"
copyright = "2026, the ampkit authors"
version = release = ampkit.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_design"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["ampkit.css"]
html_title = f"ampkit {release}"

default_role = "code"  # single backticks in docstrings
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # those of torch refer to torch's own pages
autodoc_typehints_format = "short"
napoleon_use_ivar = True  # "Attributes:" as one list; else a NamedTuple has its fields twice
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
