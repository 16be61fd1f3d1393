"""This module writes the page of a comparison or an experiment, one self-contained HTML file, and all other files of a
report."""

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Literal

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from lm.config.yaml_text import dump_yaml
from lm.files import write_together
from lm.plain import Plain
from lm.report.comparison import ArmComparison
from lm.report.comparison_pictures import (
    LOSS_TITLES,
    DrawnRun,
    curves_picture,
    drawn_runs,
    parameter_picture,
    section_pictures,
    task_heat_maps,
)
from lm.report.comparison_tables import (
    ONE_SEED_NOTE,
    comparison_notes,
    comparison_tables,
    configuration_table,
    cost_table,
    data_text,
    properties_table,
)
from lm.report.pictures import COLOURS, DARK_COLOURS, GREY, GRID, INK, PAPER, Picture, dark_css
from lm.report.tables import Table, four_digit_text, printable_text, recorded_value_text, to_csv
from lm.runs.record import RunRecord

COST_NOTE = (
    "Means over runs. Training time is that of the steps, without evaluations. Speeds can be compared only on one "
    "device with the same load: runs that are under way at once share it. FLOPs are computed, not measured."
)
SELECTION_TEXT_NOTE = (
    "Held-out documents, or a task's sequences, are divided by a hash: about a third, the selection text, chooses "
    "learning rates and checkpoints. The others, the report text or reporting documents, give the numbers by which "
    "arms are compared."
)
PAGE_FILE = "report.html"
BlockKind = Literal["note", "warning", "list", "table", "picture", "code", "details"]
BlockContent = str | list[str] | Table | Picture | tuple[str, str]


# ---------------------------------------------------------------- the page


@dataclass(frozen=True)
class PageBlock:
    """Holds a part of a page section; `kind` says how its content is shown. `name` is the name of the block's files
    without suffix; empty if it has no files."""

    kind: BlockKind
    content: BlockContent
    name: str = ""


@dataclass
class PageSection:
    """Holds a heading and the blocks under it; without blocks, the page leaves it out."""

    title: str
    blocks: list[PageBlock] = field(default_factory=list)

    def add_block(self, kind: BlockKind, content: BlockContent | None, name: str = "") -> None:
        """Append a block, if there is content."""
        if content:
            self.blocks.append(PageBlock(kind, content, name))


@dataclass(frozen=True)
class VerdictCard:
    """Holds the content of a card on the page: the verdict on an arm, or on an arm at one model size."""

    arm: str
    verdict: str
    reason: str
    tone: Literal["good", "bad", ""] = ""
    # the name of the effect, its value, and its interval, in words; empty: unknown
    effect_name: str = ""
    effect_text: str = ""
    interval_text: str = ""
    noise_source: str = ""  # the noise that the interval covers; empty if the verdict names it
    # where mean, ends of the interval, zero and ends of the margin are drawn, in per cent of the drawing's width; None:
    # the effect has no interval
    mean_ends_and_margin_percents: tuple[float, ...] | None = None
    margin_labels: tuple[str, ...] = ()  # labels written under zero and under the ends of the margin


@dataclass(frozen=True)
class Page:
    """Holds a page on a comparison or an experiment. `margin_note`: a note that explains the shaded region in the
    drawings of its verdicts."""

    name: str
    sections: list[PageSection]
    introduction: list[str]  # what was trained, and on which text numbers are
    question: str = ""
    verdict_cards: list[VerdictCard] = field(default_factory=list)
    margin_note: str = ""


def page_html(page: Page) -> str:
    """Return the HTML text of a page. The page loads no other files, all its text is escaped, and its only script sorts
    tables."""
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
        page=page,
        inline_svg=inline_svg,
        zip=zip,
        script=script,
        script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        light=light,
        dark=dark,
        arms="\n".join(f".arm-{number} {{ color: var(--arm-{number}); }}" for number in range(len(COLOURS))),
        pictures=dark_css(),
    )


def inline_svg(picture: Picture) -> Markup:
    """Return the SVG of a picture for embedding in the page, without the file header, and without the colour rules,
    which the page has once."""
    return Markup(re.sub(r"^.*?(?=<svg )|<style>@media.*?</style>", "", picture.svg, flags=re.DOTALL))


# ---------------------------------------------------------------- runs on the page


def training_summary(runs: Sequence[RunRecord]) -> str:
    """Return a sentence on how runs were trained: parameters, steps, tokens and text; empty without runs."""

    def listed(values: Iterable[Plain]) -> str:
        return " or ".join(dict.fromkeys(map(recorded_value_text, values)))

    def millions(counts: Iterable[int | None]) -> str:
        return listed(count and four_digit_text(count / 1e6) for count in counts)

    if not runs:
        return ""
    steps, sizes, lengths = (
        listed(run.flat_config.get(key) for run in runs)
        for key in ("trainer.max_steps", "optim.batch_tokens", "data.seq_len")
    )
    return (
        f"Trained: {millions(run.environment_entry('parameters.total') for run in runs)} million parameters, on "
        f"{millions(run.tokens_seen for run in runs)} million tokens in {steps} steps of {sizes}, in sequences of "
        f"{lengths}. Data: {listed(map(data_text, runs))}."
    )


def introduction(runs_by_size: Sequence[Sequence[RunRecord]]) -> list[str]:
    """Return paragraphs that say how the runs of each model size were trained. If runs were evaluated on held-out text,
    a further one explains report text and selection text (`SELECTION_TEXT_NOTE`)."""
    has_text = any(
        (evaluation.frame["part"] != "").any()
        for size_runs in runs_by_size
        for run in size_runs
        for evaluation in run.evaluations
    )
    return [*filter(None, map(training_summary, runs_by_size)), *[SELECTION_TEXT_NOTE] * has_text]


def run_sections(
    arm_labels: Sequence[str],
    runs: Sequence[DrawnRun],
    finished_comparison: ArmComparison | None,
    model_size: str = "",
    metric_titles: Mapping[str, tuple[str, str]] = LOSS_TITLES,
    tuning_section: PageSection | None = None,
    is_omitted: Callable[[str], bool] = lambda key: False,
) -> list[PageSection]:
    """Return the page's sections on runs: while training, measurements, costs, and what the runs share or differ in.

    Args:
        arm_labels: labels of all arms, whose order decides their colours.
        runs: the runs that have begun.
        finished_comparison: the comparison of finished runs; None: there are none.
        model_size: prefix of the names of the sections' files, and end of the titles; empty if all runs have one size.
        metric_titles: as in `curves_picture`.
        tuning_section: a section that follows the first.
        is_omitted: whether to leave out a configuration key that arms differ in.
    """
    prefix, suffix = (f"{model_size}-", f", {model_size}") if model_size else ("", "")
    training = PageSection(f"While training{suffix}")
    training.add_block(
        "picture", curves_picture(arm_labels, runs, metric_titles, finished_comparison), f"{prefix}curves"
    )
    training.add_block("picture", parameter_picture(arm_labels, runs), f"{prefix}normalizer-parameters")
    sections = [training] if tuning_section is None else [training, tuning_section]
    if finished_comparison is None:
        return sections
    headings = ("Measured at the end", "Cost", "What differs, and what does not")
    measured_section, cost_section, shared_section = (PageSection(f"{heading}{suffix}") for heading in headings)
    tables, pictures = comparison_tables(finished_comparison), section_pictures(finished_comparison)
    for number, (table, picture) in enumerate(zip(tables, pictures, strict=False), 1):
        measured_section.add_block("picture", picture, f"{prefix}measured-{number}-picture")
        measured_section.add_block("table", table, f"{prefix}measured-{number}")
    for number, picture in enumerate(task_heat_maps(finished_comparison), 1):
        measured_section.add_block("picture", picture, f"{prefix}map-{number}")
    for table in tables[len(pictures) :]:
        measured_section.add_block("table", table, f"{prefix}measured-differences")
    measured_section.add_block("list", finished_comparison.divergence_notes)
    cost_section.add_block(
        "table", cost_table(finished_comparison.runs_by_arm, f"What a run took{suffix}"), f"{prefix}cost"
    )
    cost_section.add_block("note", COST_NOTE)
    if finished_comparison.config_diff:
        shared_section.add_block(
            "table", configuration_table(finished_comparison, is_omitted), f"{prefix}configuration"
        )
    shared_section.add_block("table", properties_table(finished_comparison), f"{prefix}environment")
    return [*sections, measured_section, cost_section, shared_section]


def run_details(run: DrawnRun) -> tuple[str, str]:
    """Return two texts: a run's label with the command that started the run, and the run's configuration as YAML."""
    return f"{run.label}: {recorded_value_text(run.record.environment_entry('command'))}", dump_yaml(run.record.config)


def page_files(page: Page, folder: Path) -> dict[Path, bytes]:
    """Return the contents of the report's files, by path in `folder`: the page `report.html`, and files of each table
    and picture that has a name.

    Tables are written as CSV, pictures as SVG.
    """
    contents: dict[Path, bytes] = {}
    for block in (block for section in page.sections for block in section.blocks if block.name):
        is_table = isinstance(block.content, Table)
        suffix, text = ("csv", to_csv((block.content,))) if is_table else ("svg", block.content.svg)
        contents[folder / f"{block.name}.{suffix}"] = text.encode()
    return contents | {folder / PAGE_FILE: page_html(page).encode()}


def write_comparison(comparison: ArmComparison, folder: Path) -> Path:
    """Write the report of a comparison, or of a single run, into `folder`: the page, its tables and pictures, and
    `table.csv` with all measurements. Returns the path of the page.

    Raises RunError: the report can't be written.
    """
    runs = drawn_runs(comparison)
    summary, commands = PageSection("Summary"), PageSection("Runs")
    notes = comparison_notes(comparison)
    warnings = [note for note in notes if note == ONE_SEED_NOTE]
    if comparison.fairness_warning:
        warnings.append(f"{comparison.fairness_warning} A difference below can't be put down to the normalizer alone.")
    summary.add_block("warning", warnings + comparison.divergence_notes)
    summary.add_block("list", [note for note in notes if note != ONE_SEED_NOTE])
    for run in runs:
        commands.add_block("details", run_details(run))
    sections = [summary, *run_sections(comparison.arm_labels, runs, comparison), commands]
    run_names = (
        f": {', '.join(printable_text(run.name) for run in comparison.runs)}"
        if len(comparison.runs_by_arm) == 1
        else ""
    )
    page = Page(" vs ".join(comparison.runs_by_arm) + run_names, sections, introduction([comparison.runs]))
    table = to_csv(comparison_tables(comparison)).encode()
    write_together(page_files(page, folder) | {folder / "table.csv": table}, "the report")
    return folder / PAGE_FILE
