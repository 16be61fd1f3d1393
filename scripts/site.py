"""The hook of mkdocs.yml: pages link to files of the clone, which the site then holds, too; README and CHANGELOG become pages."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "about.md", "CHANGELOG.md": "changes.md"}  # of the clone's top folder, by their names in the site
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")  # a link from docs/ to a file outside


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages link to."""
    linked = {found[1] for page in files.documentation_pages() for found in OUTSIDE.finditer(page.content_string)}
    for path in sorted(linked - PAGES.keys()):
        if (ROOT / path).is_file():
            files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=_within_docs((ROOT / source).read_text(encoding="utf-8"))))
    return files


def _within_docs(text: str) -> str:
    """A page of the top folder as one of docs/: links and pictures that begin with `docs/` lose it, others lead out of it."""
    text = re.sub(r"\]\((?!https?:|#|docs/)([^)]+)\)", r"](../\1)", text)
    return text.replace("](docs/", "](")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links outside docs/ to the site's copies; a folder's name stays without its link."""

    def link(found: re.Match[str]) -> str:
        path, anchor = found[1], found[2] or ""
        if path in PAGES:
            return f"]({PAGES[path]}{anchor})"
        return f"](files/{path})" if (ROOT / path).is_file() else "](README.md)"

    return OUTSIDE.sub(link, markdown)
