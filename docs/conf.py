"""Sphinx configuration. Nothing is fetched from the network while building."""

from __future__ import annotations

import re

from sphinx_gallery.sorting import ExplicitOrder

import riskfield

THEMES = ("images", "sequences", "inference", "learning", "extending")

project = "riskfield"
author = "The riskfield developers"
copyright = "the riskfield developers"
version = release = riskfield.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # a copy of MathJax, so that pages need no network
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
_GENERATED = ("gallery/**/*.ipynb", "gallery/**/*.py", "gallery/**/*.md5", "sg_execution_times.rst")
exclude_patterns = ["_build", "_templates", *_GENERATED]
myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence"]
myst_heading_anchors = 3
nitpicky = False

html_theme = "furo"
html_title = f"riskfield {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["versions.js"]
templates_path = ["_templates"]
_SIDEBAR = ("brand", "search", "versions", "scroll-start", "navigation", "scroll-end")  # Furo's, and a list of versions
html_sidebars = {"**": [f"sidebar/{part}.html" for part in _SIDEBAR]}
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7db3f0", "color-brand-content": "#7db3f0"},
}
pygments_dark_style = "github-dark"  # Furo's own underlines names as if they were links
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
html_show_sourcelink = False
html_show_sphinx = False

sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery",
    "filename_pattern": r"/plot_",
    "subsection_order": ExplicitOrder([f"../examples/gallery/{name}" for name in THEMES]),
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "capture_repr": (),  # only what a script prints or draws is shown
    "download_all_examples": False,
    "plot_gallery": True,
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "matplotlib_animations": False,
}

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
