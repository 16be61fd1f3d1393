"""Write the generated texts of the repository, and say which changed.

python scripts/generate.py                write all
python scripts/generate.py --check        write nothing, exit with status 1 where a text differs
python scripts/generate.py --no-results   without tables and pictures of results/, which take half a minute

docs/config.md, docs/metrics.md, docs/normalizers.md are made from keys, metrics and normalizers, tests/inventory.yaml
from commands and keys, tables and pictures of docs/ from results/ (scripts/recompute.py). tests/house_size.json gets
today's sizes, unless a sum has risen. Training curves are pinned by scripts/curves.py alone.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import recompute
import typer
import yaml
from committed_results import ROOT

from lm.cli import app
from lm.config import normalizers as kinds
from lm.config.load import reference_markdown
from lm.config.tree import Config
from lm.evaluation import metrics
from lm.schema import reference

sys.path.insert(0, str(ROOT / "tests"))
from house_size import RATCHET, SUMS, house_sizes


def inventory() -> dict[str, list[str]]:
    """Arguments and options of each command with their defaults, and all configuration keys."""
    return dict(_commands(typer.main.get_command(app), "lm")) | {"keys": [path for path, *_ in reference(Config)]}


def _commands(command: object, path: str) -> Iterator[tuple[str, list[str]]]:
    own = [parameter for parameter in command.params if not parameter.name.endswith("_completion")]  # others: typer's
    yield path, [_words(parameter) for parameter in own]
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, f"{path} {name}")


def _words(parameter: object) -> str:
    names = parameter.opts if parameter.param_type_name == "option" else [parameter.metavar or parameter.name]
    default = "" if parameter.required else f" = {parameter.default!r}"
    return ", ".join((*names, *parameter.secondary_opts)) + default


def texts() -> dict[Path, bytes]:
    """Texts that are made from the code alone, in seconds."""
    made = {
        ROOT / "docs" / "config.md": reference_markdown(),
        ROOT / "docs" / "metrics.md": metrics.markdown(),
        ROOT / "docs" / "normalizers.md": kinds.markdown(),
        ROOT / "tests" / "inventory.yaml": yaml.safe_dump(inventory(), sort_keys=False, width=sys.maxsize),
    }
    return {path: text.encode() for path, text in made.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--no-results", action="store_true")
    options = parser.parse_args()
    made = texts() | ({} if options.no_results else recompute.files())
    sizes, limits = house_sizes(), json.loads(RATCHET.read_text())
    risen = [total for total in SUMS if sizes[total] > limits[total]]
    if not options.check and not risen:
        made[RATCHET] = (json.dumps(sizes, indent=2) + "\n").encode()
    equal = recompute.same if options.check else bytes.__eq__
    differing = [path for path, text in made.items() if not path.exists() or not equal(path.read_bytes(), text)]
    for path in differing:
        print(f"{path.relative_to(ROOT)}: {'differs from what it is made of' if options.check else 'written'}")
        if not options.check:
            path.write_bytes(made[path])
    for total in risen:
        more = sizes[total] - limits[total]
        print(f"{total}: {more:,} code tokens more than before: delete as much as was added", file=sys.stderr)
    return int(bool(risen or (options.check and differing)))


if __name__ == "__main__":
    sys.exit(main())
