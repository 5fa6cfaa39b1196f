"""Sphinx: Markdown through MyST, the reference from docstrings, the furo theme. Reads nothing from the network."""

import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

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

log = getLogger(__name__)

# What readers search for in other words than headings have: search shows this section first.
SEARCHED = {
    "EMA": ("functions", "averages-of-weights-and-hooks-around-the-optimizer"),
    "GAN": ("functions", "steps-that-are-not-one-loss-and-one-optimizer"),
    "TensorBoard": ("getting-started", "what-the-report-says"),
    "checkpoint": ("getting-started", "checkpoints-and-evaluation"),
    "resume": ("getting-started", "checkpoints-and-evaluation"),
}


def add_searched(app: Sphinx, doctree: nodes.document) -> None:
    """Enter into the index of a page the words by which its sections are searched for."""
    for word, (page, section) in SEARCHED.items():
        if page == app.env.docname:
            if section not in doctree.ids:
                log.warning("docs/conf.py, SEARCHED[%r]: there is no section %r here", word, section, location=doctree)
            doctree.insert(0, addnodes.index(entries=[("single", word, section, "main", None)]))


def link_terms(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Let each link to the words of cuda-graphs.md lead to the term of its text, as from "replayed" to "replay"."""
    objects = app.env.domains.standard_domain.get_objects()
    anchors = {name.lower(): anchor for name, _, kind, _, anchor, _ in objects if kind == "term"}
    for link in doctree.findall(nodes.reference):
        page, _, section = link.get("refuri", "").partition("#")
        if section == "words":
            text = " ".join(link.astext().lower().split())
            found = [term for term in anchors if text.startswith(term.rstrip("e")) or term.startswith(text)]
            if not found:
                log.warning("%r is none of the words of cuda-graphs.md", text, location=link)
            link["refuri"] = f"{page}#{anchors[found[0]] if found else section}"


def setup(app: Sphinx) -> None:
    """Add what a build does beyond its extensions."""
    app.connect("doctree-read", add_searched)
    app.connect("doctree-resolved", link_terms)
