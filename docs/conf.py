# SPDX-License-Identifier: Apache-2.0
"""How Sphinx makes a site of these pages (`make docs`). Nothing of the package is imported."""

import re

project = "Sparse-RL"
html_title = project
extensions = ["myst_parser"]
html_theme = "furo"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
myst_heading_anchors = 3  # [text](page.md#a-heading) leads to a heading, as on a code host
highlight_language = "none"  # blocks that name no language are commands, formulas and output


def files_outside(app, name, source):
    """Markdown of other folders is a file to download, as other files are, and no page of the site."""
    source[0] = re.sub(r"\]\((\.\./[^)#]+\.md)", r"](path:\1", source[0])


def setup(app):
    app.connect("source-read", files_outside)
