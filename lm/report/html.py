"""One self-contained HTML page, and every file of a report."""

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from lm.config.yaml_text import dump_yaml
from lm.files import write_together
from lm.report.comparison import Comparison, compare, printable, show
from lm.report.comparison_tables import comparison_tables, differing, in_unit, notes
from lm.report.descriptions import how_measured, methods
from lm.report.layer_curves import by_layer
from lm.report.overview import Overview, overview
from lm.report.pictures import Picture
from lm.report.tables import DIFFERENCE, Table, to_csv, to_latex, to_markdown
from lm.runs.record import read_run

BETTER = {"lower": " (below zero: better)", "higher": " (above zero: better)", "none": ""}  # words after the unit of a difference


@dataclass(frozen=True)
class ReportFiles:
    """Where a report's files are."""

    html: Path
    png: Path
    svg: Path
    markdown: Path
    csv: Path
    latex: Path


def write_report(folders: list[Path], out: Path, baseline: str | None = None) -> ReportFiles:
    """Compare the runs (or describe one run) and write the report into the folder `out`.

    Args:
        folders: run folders; runs that differ in their seed only are one arm.
        baseline: an arm's label, its normalizer's name or a run's name; None: the first folder's arm.

    Raises:
        RunError: a folder that is no run, a corrupt file, no such baseline, or `out` can't be written.
    """
    return write_comparison(compare([read_run(folder) for folder in folders], baseline), out)


def write_comparison(comparison: Comparison, out: Path) -> ReportFiles:
    """Write the report of a comparison into the folder `out`. Raises RunError if that can't be written."""
    picture, tables = overview(comparison), comparison_tables(comparison)
    layers = by_layer(comparison.runs[0]) if len(comparison.runs) == 1 else None
    out = Path(out)
    paths = ReportFiles(*(out / name for name in ("report.html", "overview.png", "overview.svg", "table.md", "table.csv", "table.tex")))
    contents = {
        paths.png: picture.png,
        paths.svg: picture.svg.encode(),
        paths.markdown: to_markdown(tables, notes(comparison)).encode(),
        paths.csv: to_csv(tables).encode(),
        paths.latex: to_latex(tables).encode(),
        paths.html: render(comparison, picture, tables, layers).encode(),
    }
    if layers:
        contents |= {out / "by-layer.svg": layers.svg.encode(), out / "by-layer.csv": layers.csv.encode()}
    write_together(contents, "the report")
    return paths


def render(comparison: Comparison, picture: Overview, tables: tuple[Table, ...], layers: Picture | None = None) -> str:
    """The page as text: no scripts, nothing loaded from outside. `layers`: what was logged by layer, of a single run."""
    runs = [
        (arm.label, printable(run.name), show(run.measured("command")), dump_yaml(run.config))
        for arm in comparison.arms
        for run in arm.runs
    ]
    return rendered(
        "report.html",
        comparison=comparison,
        picture=inline(picture.svg),
        caption=picture.caption,
        tables=tables,
        layers=layers,
        inline=inline,
        signed=DIFFERENCE,
        differing=[f"{metric}{in_unit(unit)}{BETTER[better]}" for metric, unit, better in differing(comparison)],
        measured=how_measured(comparison),
        methods=methods(comparison),
        runs=runs,
    )


def rendered(template: str, **values: object) -> str:
    """A page from one of the templates beside this file; all text is escaped."""
    loader = FunctionLoader(lambda name: files("lm.report").joinpath(name).read_text(encoding="utf-8"))
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(template).render(**values)


def inline(svg: str) -> Markup:
    """An SVG file as a part of a page: without the XML head."""
    return Markup(re.sub(r"^.*?(?=<svg )", "", svg, flags=re.DOTALL))
