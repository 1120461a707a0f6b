"""Settings of Sphinx, which builds the manual from README.md, docs/ and notebooks/. CONTRIBUTING.md has the command.

The navigation is `index.md`: its headings and its lists of links. A comment `generated: NAME` in a page is replaced by the text
of `NAME` in `generated.py`, a comment `table: NAME` in benchmarks/README.md by a table of measurements. The page of error
messages is made from the source.
"""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / "benchmarks")]

project = "jaxdp"
copyright = "The jaxdp developers"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "docs/*.md", "notebooks/*.ipynb"]
exclude_patterns = ["**/.*", ".*", "bench", "configs", "dist", "jaxdp", "notebooks/runs", "runs", "site", "tests"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!jaxdp).*")]  # names of other packages, whose manuals are not read
nitpick_ignore = [  # types of parameters that a user rarely gives
    ("py:class", "jaxdp.distributed.signal_handler.SignalHandler"),
    ("py:class", "jaxdp.loggers.console.Screen"),
    ("py:class", "jaxdp.checkpoint.manager.CheckpointManager"),
    ("py:class", "jaxdp.data.datasets.Datasets"),
    ("py:class", "jaxdp.training.step_compiler.StepCompiler"),
]
smartquotes = False  # they would change the dashes of flags
default_role = "code"  # docstrings use Markdown's backticks

myst_enable_extensions = ["colon_fence", "html_image"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_merge_streams = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "jaxdp"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = html_copy_source = False
html_show_sphinx = False


def write_errors(app: object, config: object) -> None:
    """Write the page of error messages, which git ignores; unchanged, it is not built again."""
    import messages

    page, text = DOCS / "errors.md", messages.errors()
    if not page.exists() or page.read_text() != text:
        page.write_text(text)


def navigation(index: str) -> dict[str, list[tuple[str, str]]]:
    """{heading: [(title, path relative to docs/), ...]} of the text of index.md."""
    parts = re.split(r"^## (.*)\n", index, flags=re.MULTILINE)[1:]
    links = (re.findall(r"^- \[(.*?)\]\((.*?)\)", text, re.MULTILINE) for text in parts[1::2])
    return dict(zip(parts[::2], links, strict=True))


def complete(app: object, docname: str, source: list[str]) -> None:
    """Add the navigation to the index, and their text to generated pages."""
    import generated

    if docname == root_doc:
        for caption, pages in navigation(source[0]).items():
            if caption == "Reference":
                pages = [*pages, ("Error messages", "errors")]
            entries = "\n".join(f"{title} <{path.removesuffix('.md').removesuffix('.ipynb')}>" for title, path in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"
    if docname == "benchmarks/README":
        import tables

        source[0] = re.sub(r"<!-- table: (\w+) -->", lambda found: tables.MEASUREMENTS[found[1]](), source[0])
    if docname.startswith("docs/"):
        source[0] = re.sub(r"<!-- generated: (\w+) -->", lambda found: getattr(generated, found[1])(), source[0])
    source[0] = re.sub(r"\]\(((?:\.\./)?)configs(?:/(\w+)\.py)?\)", generated.link_to_recipe, source[0])


def outdated(app: object, env: object, *changed: set[str]) -> list[str]:
    """The pages with generated parts, which any change of the code or of results can change."""
    return [name for name in env.found_docs if re.search(r"<!-- (generated|table):", Path(env.doc2path(name)).read_text())]


def redirect(app: object, error: Exception | None) -> None:
    """Write the index.html at the top of the site, which leads to the manual's first page."""
    if error is None and app.builder.name == "html":
        target = f"{root_doc}.html"
        text = f'<!doctype html><meta charset="utf-8"><title>jaxdp</title><meta http-equiv="refresh" content="0; url={target}">'
        (Path(app.outdir) / "index.html").write_text(f'{text}<a href="{target}">The jaxdp manual</a>\n')


def setup(app: object) -> None:
    import generated

    app.connect("config-inited", write_errors)
    app.connect("env-get-outdated", outdated)
    app.connect("source-read", complete)
    app.connect("build-finished", redirect)
    app.connect("missing-reference", generated.link_to_section)
    app.connect("autodoc-process-docstring", generated.list_parameters)
