"""Count the code tokens of the repository by room: python tests/house_size.py

A code token is what Python's tokenizer gives, without comments, docstrings, line ends and indents. Rooms are the
folders of lm/ (its own modules together are `lm`), scripts/ and tests/. tests/house_size.json holds the limits, which
scripts/generate.py writes. A room may take what another gives back; no sum may rise.
"""

import ast
import io
import json
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS_FILE = ROOT / "tests" / "house_size.json"
TOTALS = ("all of lm", "scripts", "tests")
UNCOUNTED_TOKENS = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def code_tokens(source: str) -> int:
    """Return the number of code tokens of a module's source."""
    scopes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(source)
    docstrings = sum(ast.get_docstring(node) is not None for node in ast.walk(tree) if isinstance(node, scopes))
    return (
        sum(token.type not in UNCOUNTED_TOKENS for token in tokenize.generate_tokens(io.StringIO(source).readline))
        - docstrings
    )


def house_sizes() -> dict[str, int]:
    """Return the code tokens of each room, and of all rooms of lm/ together as `all of lm`."""
    sizes: Counter[str] = Counter()
    for path in (path for folder in ("lm", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")):
        parts, size = path.relative_to(ROOT).parts, code_tokens(path.read_text(encoding="utf-8"))
        sizes["/".join(parts[:2]) if parts[0] == "lm" and len(parts) > 2 else parts[0]] += size
        sizes["all of lm"] += size if parts[0] == "lm" else 0
    return dict(sorted(sizes.items()))


if __name__ == "__main__":
    limits = json.loads(LIMITS_FILE.read_text())
    for room, size in house_sizes().items():
        print(f"{room:16}{size:9,}{size - limits.get(room, size):+8,}")
