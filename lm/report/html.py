"""One self-contained HTML page of comparisons or experiments, and every file of a report."""

import base64
import hashlib
import re
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Literal

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from lm.config.yaml_text import dump_yaml
from lm.files import write_together
from lm.report.comparison import RunComparison, compare, printable, show
from lm.report.comparison_tables import comparison_tables, differing, in_unit, notes
from lm.report.descriptions import configuration_table, facts_table, how_measured, methods
from lm.report.layer_curves import by_layer
from lm.report.overview import overview
from lm.report.pictures import COLOURS, DARK, GREY, GRID, INK, PAPER, Picture, dark_style
from lm.report.tables import Column, Table, to_csv, to_latex, to_markdown
from lm.runs.record import read_run

BETTER = {"lower": " (below zero: better)", "higher": " (above zero: better)", "none": ""}  # words after the unit of a difference
SAME = {True: "yes", False: "NO", None: "unknown"}  # words for a check of fairness

Kind = Literal["text", "note", "warning", "list", "table", "picture", "code", "details"]


# ---------------------------------------------------------------- the page


@dataclass(frozen=True)
class Block:
    """A piece of a section: words, lines, a table or a picture; `name` is that of its files, if it has any."""

    kind: Kind
    content: str | list[str] | Table | Picture | tuple[str, str]
    name: str = ""


@dataclass
class PageSection:
    """A heading and what stands under it."""

    title: str
    blocks: list[Block] = field(default_factory=list)

    def add(self, kind: Kind, content: str | list[str] | Table | Picture | tuple[str, str] | None, name: str = "") -> None:
        """Append a block; nothing if there is no content."""
        if content:
            self.blocks.append(Block(kind, content, name))


@dataclass(frozen=True)
class Effect:
    """An effect with its interval in words; `place`: mean, ends, zero and ends of the margin on a line of 200 units, None without ends."""

    what: str
    value: str
    ends: str
    over: str
    place: tuple[float, ...] | None


@dataclass(frozen=True)
class Answer:
    """The verdict on an arm (and size), and what it rests on."""

    arm: str
    verdict: str
    because: str
    tone: Literal["good", "bad", ""] = ""
    effect: Effect | None = None


@dataclass(frozen=True)
class Part:
    """A comparison or an experiment on the page: name, question, answers, what is shaded in their pictures, and sections."""

    name: str
    sections: list[PageSection]
    question: str = ""
    answers: list[Answer] = field(default_factory=list)
    margin: str = ""


def page(parts: list[Part]) -> str:
    """The page as text: nothing is loaded from outside, all text is escaped, and no script runs but the one that sorts tables."""
    template, script = (files("lm.report").joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "sort.js"))
    loader = FunctionLoader(lambda _: template)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    names = {"ink": INK, "paper": PAPER, "grey": GREY, "grid": GRID} | {f"arm-{number}": colour for number, colour in enumerate(COLOURS)}
    light, dark = ("; ".join(f"--{name}: {of(colour)}" for name, colour in names.items()) for of in (str, DARK.get))
    return environment.get_template("page.html").render(
        parts=parts,
        inline=inline,
        script=script,
        script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        light=light,
        dark=dark,
        arms="\n".join(f".arm-{number} {{ color: var(--arm-{number}); }}" for number in range(len(COLOURS))),
        pictures=dark_style(),
    )


def inline(picture: Picture) -> Markup:
    """The SVG of a picture as a part of a page, without the head of a file and the colours that the page has."""
    return Markup(re.sub(r"^.*?(?=<svg )|<style>@media.*?</style>", "", picture.svg, flags=re.DOTALL))


# ---------------------------------------------------------------- reports of runs


@dataclass(frozen=True)
class ReportFiles:
    """Paths of a report's files."""

    html: Path
    png: Path
    svg: Path
    numbers: Path  # of the picture
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


def write_comparison(comparison: RunComparison, out: Path) -> ReportFiles:
    """Write the report of a comparison into the folder `out`. Raises RunError if that can't be written."""
    picture, tables = overview(comparison), comparison_tables(comparison)
    layers = by_layer(comparison.runs[0]) if len(comparison.runs) == 1 else None
    out = Path(out)
    names = ("report.html", "overview.png", "overview.svg", "overview.csv", "table.md", "table.csv", "table.tex")
    paths = ReportFiles(*(out / name for name in names))
    contents = {path: picture.file(path.suffix) for path in (paths.png, paths.svg, paths.numbers)} | {
        paths.markdown: to_markdown(tables, notes(comparison)).encode(),
        paths.csv: to_csv(tables).encode(),
        paths.latex: to_latex(tables).encode(),
        paths.html: page([_part(comparison, picture, tables, layers)]).encode(),
    }
    if layers:
        contents |= {out / f"by-layer{suffix}": layers.file(suffix) for suffix in (".svg", ".csv")}
    write_together(contents, "the report")
    return paths


def _part(comparison: RunComparison, picture: Picture, tables: tuple[Table, ...], layers: Picture | None) -> Part:
    first, results, fair, measured = (
        PageSection(title) for title in ("Overview", "Results", "Is the comparison fair?", "How it was measured")
    )
    if comparison.warning:
        first.add("warning", [f"{comparison.warning} A difference below can't be put down to the normalizer alone."])
    first.add("picture", picture, "overview")
    for table in tables:
        results.add("table", table, "table" if table is tables[-1] else "")
    if comparison.differences:
        better = [f"{metric}{in_unit(unit)}{BETTER[better]}" for metric, unit, better in differing(comparison)]
        results.add("table", _differences(comparison, "; ".join(better)))
    if comparison.checks:
        fair.add("table", facts_table([(check.what, SAME[check.ok], check.detail) for check in comparison.checks], "same in all runs"))
        fair.add("table", configuration_table(comparison, comparison.config_diff))
    measured.add("table", facts_table([(what, "", value) for what, value in how_measured(comparison)]))
    runs = PageSection("Runs")
    for arm in comparison.arms:
        for run in arm.runs:
            runs.add("details", (f"{printable(run.name)} ({arm.label}): {show(run.measured('command'))}", dump_yaml(run.config)))
    missing, by_layers = PageSection("Missing"), PageSection("By layer, while training")
    missing.add("list", list(comparison.missing))
    by_layers.add("picture", layers, "by-layer")
    words = PageSection("Methods paragraph", [Block("text", methods(comparison))])
    return Part(comparison.title, [part for part in (first, results, missing, fair, by_layers, measured, words, runs) if part.blocks])


def _differences(comparison: RunComparison, better: str) -> Table:
    """The differences to the baseline and what their intervals cover; `better`: metrics and which way is better."""
    every = comparison.differences
    columns = {
        Column("arm", kind="label"): [each.arm for each in every],
        Column("of", kind="label"): [each.what for each in every],
        Column("difference", "95% interval", "difference"): [each.interval or "no difference given" for each in every],
        Column("what the interval covers", kind="words"): [each.note for each in every],
    }
    return Table(f"Differences to {comparison.arms[0].label}: {better}", "", tuple(columns.items()))
