"""Sphinx configuration. Nothing is fetched from the network while building."""

from __future__ import annotations

import re

import riskfield

project = "riskfield"
author = "The riskfield developers"
copyright = "the riskfield developers"
release = riskfield.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence"]
myst_heading_anchors = 3
nitpicky = False

html_theme = "furo"
html_title = "riskfield"
html_show_sourcelink = False
html_show_sphinx = False

default_role = "code"  # docstrings quote names in single backticks, as Markdown does
napoleon_google_docstring = True
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 100
add_module_names = False
autodoc_type_aliases = {"npt.ArrayLike": "ArrayLike", "IntArray": "IntArray"}

_QUOTED = re.compile(r"(`[^`]*`|\*\w+\*)")  # `code` and *emphasis*


def plain_characters(app, what, name, obj, options, lines):
    """Keep `(*batch, state)` and |g| in docstrings from reading as markup."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            pieces = _QUOTED.split(line)
            lines[number] = "".join(
                p if _QUOTED.fullmatch(p) else p.replace("*", r"\*").replace("|", r"\|") for p in pieces
            )


def short_aliases(app, what, name, obj, options, signature, returns):
    """Print the alias of a type, not the object that stands for it inside a union."""
    short = [text and re.sub(r"TypeAliasForwardRef\('(?:\w+\.)*(\w+)'\)", r"\1", text) for text in (signature, returns)]
    return short[0], short[1]


def setup(app):
    app.connect("autodoc-process-signature", short_aliases)
    app.connect("autodoc-process-docstring", plain_characters, priority=400)
