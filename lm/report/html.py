"""One self-contained HTML page of comparisons or experiments, and every file of a report."""

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Literal

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from lm.config.yaml_text import dump_yaml
from lm.files import write_together
from lm.report.comparison import Comparison
from lm.report.comparison_pictures import DrawnRun, axis_pictures, drawn_runs, heat_maps, layer_pictures, overview
from lm.report.comparison_tables import (
    comparison_notes,
    comparison_tables,
    configuration_table,
    cost_table,
    facts_table,
)
from lm.report.pictures import COLOURS, DARK_COLOURS, GREY, GRID, INK, PAPER, Picture, dark_style
from lm.report.tables import Table, plain_text, printable, to_csv, to_latex, to_markdown
from lm.runs.record import RunRecord

COST_NOTE = (
    "Means over runs. Training time is that of the steps, without evaluations. Speeds can be compared only on one "
    "device and with as many concurrent runs: how many of the runs on this page were under way at a time is known from "
    "their starts, what else the machine did is not. FLOPs are computed, not measured."
)
PAGE, PICTURE = "report.html", "overview.png"
BlockKind = Literal["note", "warning", "list", "table", "picture", "code", "details"]


# ---------------------------------------------------------------- the page


@dataclass(frozen=True)
class PageBlock:
    """A part of a page section; `kind` says how its content is shown. `name` is its files' name without suffix, empty
    if it has none.
    """

    kind: BlockKind
    content: str | list[str] | Table | Picture | tuple[str, str]
    name: str = ""


@dataclass
class PageSection:
    """A heading and the blocks under it."""

    title: str
    prefix: str | None = ""  # beginning of the names of its files; None: it has no files
    blocks: list[PageBlock] = field(default_factory=list)

    def add(
        self, kind: BlockKind, content: str | list[str] | Table | Picture | tuple[str, str] | None, name: str = ""
    ) -> None:
        """Append a block, if there is content."""
        if content:
            self.blocks.append(
                PageBlock(kind, content, f"{self.prefix}{name}" if name and self.prefix is not None else "")
            )


@dataclass(frozen=True)
class Answer:
    """The content of a card on the page: the verdict on an arm, or on an arm at one model size."""

    arm: str
    verdict: str
    reason: str
    tone: Literal["good", "bad", ""] = ""
    # effect, value, ends: the name of the effect, its value, and its interval, in words; empty: unknown
    effect: str = ""
    value: str = ""
    ends: str = ""
    noise_source: str = ""  # the noise that the interval covers; empty if the verdict names it
    # where mean, ends, zero and ends of the margin are drawn, in per cent of the drawing's width; None: the effect has
    # no ends
    drawn_positions: tuple[float, ...] | None = None
    marks: tuple[str, ...] = ()  # labels written under zero and under the ends of the margin


@dataclass(frozen=True)
class PagePart:
    """A comparison or an experiment on the page. `margin_note`: a note that explains the shaded region in the drawings
    of its answers.
    """

    name: str
    sections: list[PageSection]
    question: str = ""
    answers: list[Answer] = field(default_factory=list)
    margin_note: str = ""


def page(parts: list[PagePart]) -> str:
    """The HTML text of the page. The page loads no other files, all its text is escaped, and its only script sorts
    tables.
    """
    template, script = (
        files("lm.report").joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "sort.js")
    )
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    colours = {"ink": INK, "paper": PAPER, "grey": GREY, "grid": GRID} | {
        f"arm-{number}": colour for number, colour in enumerate(COLOURS)
    }
    light, dark = (
        "; ".join(f"--{name}: {theme(colour)}" for name, colour in colours.items()) for theme in (str, DARK_COLOURS.get)
    )
    return environment.from_string(template).render(
        parts=parts,
        inline=inline,
        zip=zip,
        script=script,
        script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        light=light,
        dark=dark,
        arms="\n".join(f".arm-{number} {{ color: var(--arm-{number}); }}" for number in range(len(COLOURS))),
        pictures=dark_style(),
    )


def inline(picture: Picture) -> Markup:
    """The SVG of a picture for embedding in the page, without the file header, and without the colour rules, which the
    page has once.
    """
    return Markup(re.sub(r"^.*?(?=<svg )|<style>@media.*?</style>", "", picture.svg, flags=re.DOTALL))


# ---------------------------------------------------------------- runs on the page


def run_sections(
    comparison: Comparison,
    concurrent_runs: Sequence[RunRecord],
    prefix: str | None = None,
    suffix: str = "",
    is_omitted: Callable[[str], bool] = lambda key: False,
) -> list[PageSection]:
    """The page's sections on compared runs: measurements, costs, and what the runs share or differ in.

    Args:
        concurrent_runs: all runs that may have been under way at the same time.
        prefix: beginning of the names of the sections' files; None: no files, and no pictures of series along an axis.
        suffix: text appended to each section's title.
        is_omitted: whether to leave out a configuration key that arms differ in.
    """
    titles = ("Measured at the end", "Cost", "What differs, and what does not")
    measured_section, cost_section, shared_section = (PageSection(f"{title}{suffix}", prefix) for title in titles)
    tables, sections = comparison_tables(comparison), comparison.sections
    pictures = [None] * len(sections) if prefix is None else axis_pictures(comparison)
    for number, (table, picture) in enumerate(zip(tables, pictures, strict=False), 1):
        measured_section.add("picture", picture, f"measured-{number}-picture")
        measured_section.add("table", table, f"measured-{number}")
    for number, picture in enumerate(heat_maps(comparison), 1):
        measured_section.add("picture", picture, f"map-{number}")
    for table in tables[len(sections) :]:
        measured_section.add("table", table, "measured-differences")
    measured_section.add("list", comparison_notes(comparison) if prefix is None else list(comparison.missing_notes))
    cost_section.add("table", cost_table(comparison.arms, concurrent_runs, f"What a run took{suffix}"), "cost")
    cost_section.add("note", COST_NOTE)
    shared_section.add(
        "table", configuration_table(comparison, is_omitted) if comparison.config_diff else None, "configuration"
    )
    shared_section.add("table", facts_table(comparison), "environment")
    return [measured_section, cost_section, shared_section]


def run_details(run: DrawnRun) -> tuple[str, str]:
    """Two texts: a run's label with the command that started the run, and the run's configuration as YAML."""
    return f"{run.label}: {plain_text(run.record.environment_entry('command'))}", dump_yaml(run.record.config)


def page_files(parts: list[PagePart], folder: Path) -> dict[Path, bytes]:
    """Contents of the report's files, by path in `folder`: the page `report.html`, and files of each table and picture
    that has a name.

    Tables are written as CSV and as LaTeX, pictures as SVG and, with their numbers, as CSV.
    """
    contents: dict[Path, bytes] = {}
    for block in (block for part in parts for section in part.sections for block in section.blocks if block.name):
        if isinstance(block.content, Table):
            contents[folder / f"{block.name}.csv"] = to_csv((block.content,)).encode()
            contents[folder / f"{block.name}.tex"] = to_latex((block.content,)).encode()
        elif isinstance(block.content, Picture):
            contents |= {folder / f"{block.name}{suffix}": block.content.file(suffix) for suffix in (".svg", ".csv")}
    return contents | {folder / PAGE: page(parts).encode()}


def write_comparison(comparison: Comparison, folder: Path) -> Path:
    """Write the report of a comparison, or of a single run, into `folder`: pictures, tables and the page. Returns the
    path of the page.

    Raises RunError: the report can't be written.
    """
    picture, tables, runs = overview(comparison), comparison_tables(comparison), drawn_runs(comparison)
    training_section, layer_section, run_section = (
        PageSection(title) for title in ("Overview", "By layer, while training", "Runs")
    )
    warnings = (
        [f"{comparison.warning} A difference below can't be put down to the normalizer alone."]
        if comparison.warning
        else []
    )
    if any(
        difference.interval and difference.interval.noise_source.endswith(", 1 seed")
        for difference in comparison.differences
    ):
        warnings.insert(
            0,
            "One seed: intervals cover the choice of text alone. Another seed can move a difference several times as "
            "far.",
        )
    warnings += [note for note in comparison.missing_notes if ": diverged: " in note]
    training_section.add("warning", warnings)
    training_section.add("picture", picture, "overview")
    for name, layer_picture in layer_pictures(comparison.names, runs).items():
        layer_section.add("picture", layer_picture, name)
    for run in runs:
        run_section.add("details", run_details(run))
    sections = [training_section, layer_section, *run_sections(comparison, comparison.runs), run_section]
    run_names = f": {', '.join(printable(run.name) for run in comparison.runs)}" if len(comparison.arms) == 1 else ""
    title = " vs ".join(comparison.arms) + run_names
    contents = page_files([PagePart(title, [section for section in sections if section.blocks])], folder) | {
        folder / PICTURE: picture.file(".png"),
        folder / "table.md": to_markdown(tables, comparison_notes(comparison)).encode(),
        folder / "table.csv": to_csv(tables).encode(),
        folder / "table.tex": to_latex(tables).encode(),
    }
    write_together(contents, "the report")
    return folder / PAGE
