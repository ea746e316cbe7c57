"""Sphinx's settings for the site."""

from steptime import __version__

project = "steptime"
project_copyright = "The steptime authors, Apache License 2.0"
release = version = __version__
html_title = f"steptime {__version__}"
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["repository/**"]
root_doc = "index"
nitpicky = True
smartquotes = False  # what is between quotes is copied into configs and shells

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline", "attrs_block", "colon_fence", "deflist"]

html_theme = "furo"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_last_updated_fmt = None  # the same sources give the same pages
pygments_style = "default"
pygments_dark_style = "github-dark"
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
