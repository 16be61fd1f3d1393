"""How long README.md, the pages of docs/ and CHANGELOG.md are, and their sentences: python tests/prose.py [PAGE ...]

A word is what stands between spaces and has a letter or a digit, in code and tables too, but for tables that
scripts/recompute.py writes. Sentences are those of paragraphs, list items and cells of tables; code is no prose, and
counts as one word within a line.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ("config.md", "metrics.md", "normalizers.md")  # made from the keys and options themselves
PAGES = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in GENERATED]
LONGEST = 25  # words of a sentence
FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)  # one at the margin: its language, its text
WRITTEN = re.compile(r"<!-- results: .*?<!-- end of ", re.DOTALL)
LISTED = re.compile(r"\s*(?:[-*]|\d+\.) ")


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language; of bash, indented blocks as well."""
    fenced = [block for name, block in BLOCK.findall(text) if name == language]
    if language == "bash":
        fenced += re.findall(r"(?:^    \S.*\n(?:      .*\n)*)+", BLOCK.sub("", text), re.MULTILINE)
    return fenced


def words(text: str) -> int:
    """The number of words of a text, markup left out."""
    return sum(bool(re.search(r"\w", word)) for word in WRITTEN.sub("", text).split())


def passages(text: str) -> tuple[list[str], list[str]]:
    """The paragraphs and list items of a page, and the cells of its tables; without headings, comments, code and
    addresses of links.
    """
    paragraphs: list[list[str]] = [[]]
    cells = []
    for line in FENCED.sub("\n", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)).splitlines():
        if line.startswith("|"):
            cells += line.strip("| ").split("|")
        elif not line.strip() or line.startswith(("#", "    ")):
            paragraphs.append([])
        elif LISTED.match(line):
            paragraphs.append([LISTED.sub("", line, count=1)])
        else:
            paragraphs[-1].append(line)
    return [plain for lines in paragraphs if (plain := unmarked(" ".join(lines)))], [
        plain for cell in cells if (plain := unmarked(cell))
    ]


def unmarked(text: str) -> str:
    """A passage in one line, with code as one word and links as their words."""
    return " ".join(re.sub(r"!?\[([^\]]*)\]\([^)\s]*\)", r"\1", re.sub(r"`[^`]+`", "CODE", text)).split())


def sentences(passage: str) -> list[str]:
    """The sentences of a passage."""
    return re.split(r"(?<=[.?!])[*_)\"]*\s+(?=[\"*_(\[]*[A-Z0-9])", passage)


def wrong_sentences(text: str) -> list[str]:
    """Sentences of a page that are too long, or that hold more than one semicolon and are no list in a cell."""
    prose, cells = ([sentence for passage in part for sentence in sentences(passage)] for part in passages(text))
    return [sentence for sentence in prose if words(sentence) > LONGEST or sentence.count(";") > 1] + [
        sentence for sentence in cells if words(sentence) > LONGEST
    ]


def main(paths: list[Path]) -> None:
    for path in paths or [ROOT / "README.md", ROOT / "CHANGELOG.md", *PAGES]:
        text = path.read_text(encoding="utf-8")
        long = wrong_sentences(text)
        print(f"{words(text):6,} words {len(text.splitlines()):5} lines {len(long):4} sentences to mend  {path.name}")
        if paths:
            print(*(f"  {words(sentence)}: {sentence}" for sentence in long), sep="\n")
    if not paths:
        print(
            f"{sum(words(path.read_text(encoding='utf-8')) for path in PAGES):6,} words in docs/, without "
            f"{' and '.join(GENERATED)}"
        )


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
