"""Measure the length of README.md, CHANGELOG.md and the pages of docs/, and of their sentences.

python tests/prose.py [PAGE ...]

A word is what stands between spaces and has a letter or a digit. A page's prose is all but its tables and blocks of
code. Sentences are those of paragraphs, list items and cells of tables; code within a line counts as one word there.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ("config.md", "metrics.md", "normalizers.md")  # made from the keys and options themselves
PAGES = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in GENERATED]
MAX_PROSE_WORDS, MAX_PAGES = 15_000, 30  # words of docs/ without generated pages; pages with them
README_WORDS, README_LINES = 700, 70
MAX_SENTENCE_WORDS, MAX_CELL_SENTENCE_WORDS = 25, 30  # words of a sentence, of one in a table's cell
CODE_BLOCK = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
LANGUAGE_BLOCK = re.compile(
    r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)  # one at the margin: its language, its text
LIST_ITEM_START = re.compile(r"\s*(?:[-*]|\d+\.) ")


def code_blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of one language; for bash, indented blocks as well."""
    fenced = [block for name, block in LANGUAGE_BLOCK.findall(text) if name == language]
    if language == "bash":
        fenced += re.findall(r"(?:^    \S.*\n(?:      .*\n)*)+", LANGUAGE_BLOCK.sub("", text), re.MULTILINE)
    return fenced


def word_count(text: str) -> int:
    """Return the number of words of a text, without markup."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def prose_of_page(text: str) -> str:
    """Return a page without its tables, blocks of code and comments."""
    text = CODE_BLOCK.sub("", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))
    return "\n".join(line for line in text.splitlines() if not line.startswith("|"))


def passages(text: str) -> tuple[list[str], list[str]]:
    """Return the paragraphs and list items of a page, and the cells of its tables.

    Headings, comments, code and addresses of links are left out.
    """
    paragraphs: list[list[str]] = [[]]
    cells = []
    for line in CODE_BLOCK.sub("\n", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)).splitlines():
        if line.startswith("|"):
            cells += line.strip("| ").split("|")
        elif not line.strip() or line.startswith(("#", "    ")):
            paragraphs.append([])
        elif LIST_ITEM_START.match(line):
            paragraphs.append([LIST_ITEM_START.sub("", line, count=1)])
        else:
            paragraphs[-1].append(line)
    return [plain for lines in paragraphs if (plain := plain_text(" ".join(lines)))], [
        plain for cell in cells if (plain := plain_text(cell))
    ]


def plain_text(text: str) -> str:
    """Return a passage as one line, with code as one word and links as their words."""
    return " ".join(re.sub(r"!?\[([^\]]*)\]\([^)\s]*\)", r"\1", re.sub(r"`[^`]+`", "CODE", text)).split())


def sentences(passage: str) -> list[str]:
    """Return the sentences of a passage."""
    return re.split(r"(?<=[.?!])[*_)\"]*\s+(?=[\"*_(\[]*[A-Z0-9])", passage)


def long_sentences(text: str, longest: int = MAX_SENTENCE_WORDS) -> list[str]:
    """Return the sentences of a page that are too long, or that have more than one semicolon outside a table."""
    prose, cells = ([sentence for passage in part for sentence in sentences(passage)] for part in passages(text))
    return [sentence for sentence in prose if word_count(sentence) > longest or sentence.count(";") > 1] + [
        sentence for sentence in cells if word_count(sentence) > MAX_CELL_SENTENCE_WORDS
    ]


def main(paths: list[Path]) -> None:
    """Print the lengths of pages, and the sentences that are too long if pages are named."""
    for path in paths or [ROOT / "README.md", ROOT / "CHANGELOG.md", *PAGES]:
        text = path.read_text(encoding="utf-8")
        long = long_sentences(text)
        print(
            f"{word_count(text):6,} words {word_count(prose_of_page(text)):6,} of prose "
            f"{len(text.splitlines()):5} lines "
            f"{len(long):4} long sentences  {path.name}"
        )
        if paths and long:
            print(*(f"  {word_count(sentence)}: {sentence}" for sentence in long), sep="\n")
    if not paths:
        total = sum(word_count(prose_of_page(path.read_text(encoding="utf-8"))) for path in PAGES)
        print(f"{total:,} words of prose in docs/ without generated pages, of at most {MAX_PROSE_WORDS:,}")
        print(f"{len(PAGES) + len(GENERATED)} pages with them, of at most {MAX_PAGES}")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
