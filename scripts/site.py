"""Build the documentation site: the hook of mkdocs.yml.

The navigation follows docs/README.md. README, CHANGELOG and files of the clone that pages link to are copied into the
site.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
# names in the site of the pages in the clone's top folder
TOP_FOLDER_PAGES = {
    "README.md": "about.md",
    "CHANGELOG.md": "changes.md",
    "AGENTS.md": "agents.md",
    "CONTRIBUTING.md": "contributing.md",
}
PAGE_LINK = re.compile(r"\[([^\]]+)\]\(([\w./-]+\.md)\)")  # a page in a table of docs/README.md
PAGE_CSS = """
.md-grid { max-width: 80rem; }
.md-typeset table:not([class]) { font-size: .66rem; }
.md-typeset table:not([class]) :is(th, td) { min-width: 0; padding: .5em .9em; }
.md-typeset table:not([class]) td:last-child { min-width: 11rem; }
@media screen and (max-width: 600px) {
  .md-typeset p:has(> img) { overflow-x: auto; }
  .md-typeset p > img:not([src*="overview"]) { max-width: none; width: 640px; }
  .md-typeset table:not([class]) td { min-width: 5.5rem; }
  .md-typeset__table:has(th:nth-child(3)) { width: max-content; max-width: 32rem; }
}
@media print {
  .md-typeset__scrollwrap { margin: 0; overflow: visible; }
  .md-typeset__table { display: block; padding: 0; }
  .md-typeset table:not([class]) { display: table; width: 100%; overflow: visible; font-size: 7pt; }
  .md-typeset table:not([class]) :is(th, td) { padding: .3em .5em; }
  .md-typeset table:not([class]) code { overflow-wrap: anywhere; word-break: normal; }
  .md-typeset table:not([class]) td:last-child { min-width: 6rem; }
  .md-typeset table:not([class]) td:first-child { min-width: 5rem; }
  .md-typeset :is(tr, img, pre) { break-inside: avoid; }
  .md-typeset :is(h2, h3) { break-after: avoid; }
}
"""
OUTSIDE_LINK = re.compile(r"\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")  # a link from docs/ to a file outside


def on_config(config: MkDocsConfig) -> None:
    """Group the navigation as docs/README.md does, so that its tables are the only list of pages."""
    config.nav = [{"all pages": "README.md"}, {"about lm": "about.md"}]
    for table in (ROOT / "docs" / "README.md").read_text(encoding="utf-8").split("\n\n")[1:]:
        pages = [
            {title: TOP_FOLDER_PAGES.get(path.removeprefix("../"), path)} for title, path in PAGE_LINK.findall(table)
        ]
        config.nav.append({table.split("|")[1].strip(): pages})
    config.extra_css.append("site.css")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages link to."""
    for source, name in TOP_FOLDER_PAGES.items():
        files.append(File.generated(config, name, content=_as_docs_page((ROOT / source).read_text(encoding="utf-8"))))
    links = {match[1] for page in files.documentation_pages() for match in OUTSIDE_LINK.finditer(page.content_string)}
    for path in sorted(links - TOP_FOLDER_PAGES.keys()):
        if (ROOT / path).is_file():
            files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "site.css", content=PAGE_CSS))
    return files


def _as_docs_page(text: str) -> str:
    """Return a page of the top folder with links as they must be in docs/: `docs/` is cut off, and other paths get
    `../`.
    """
    text = re.sub(r"\]\((?!https?:|#|docs/)([^)]+)\)", r"](../\1)", text)
    return text.replace("](docs/", "](")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page whose links outside docs/ lead to the site's copies; links to folders lead to the list of pages."""

    def link(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        if path in TOP_FOLDER_PAGES:
            return f"]({TOP_FOLDER_PAGES[path]}{anchor})"
        return f"](files/{path})" if (ROOT / path).is_file() else "](README.md)"

    return OUTSIDE_LINK.sub(link, markdown)
