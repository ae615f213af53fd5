"""The site of these pages, written by `make docs`."""

project = "OptPipe"
extensions = ["myst_parser"]
exclude_patterns = ["site"]
myst_heading_anchors = 3  # links to headings are checked
html_theme = "furo"
html_title = "OptPipe"
html_copy_source = False
