"""One page of one or several experiments: question and verdict first, then all that they rest on."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lm.config.yaml_text import dump_yaml
from lm.experiments import page_pictures, page_tables, page_words
from lm.experiments.judging import judge
from lm.experiments.page_tables import SizeResults
from lm.experiments.procedure import Procedure
from lm.experiments.summary import summary
from lm.files import write_together
from lm.report.comparison import show
from lm.report.comparison_tables import comparison_tables
from lm.report.html import inline, rendered
from lm.report.pictures import Picture
from lm.report.tables import Table, to_csv, to_latex
from lm.schema import Plain

PAGE = "report.html"

Kind = Literal["text", "note", "warning", "list", "table", "picture", "code", "details"]


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
class PageExperiment:
    """An experiment on the page: its name, the question, the answers, and its sections."""

    name: str
    question: str
    answers: list[page_words.Answer]
    sections: list[PageSection]


def write_page(procedures: list[Procedure], out: Path) -> Path:
    """Write `page_files` into the folder `out`, all of them or none. Returns the page.

    Raises:
        LMError: run folders that can't be read or compared, or `out` can't be written.
    """
    write_together(page_files(procedures, out), "the report")
    return out / PAGE


def page_files(procedures: list[Procedure], out: Path) -> dict[Path, bytes]:
    """`report.html`, and each table and picture of it as files of its own, to be written into the folder `out`.

    Tables are CSV and LaTeX, pictures SVG and the CSV of their numbers; their names begin with the experiment's where there are several.

    Raises:
        LMError: run folders that can't be read or compared.
    """
    experiments = [_experiment(one, f"{one.experiment.name}-" if len(procedures) > 1 else "") for one in procedures]
    contents: dict[Path, bytes] = {}
    for block in (block for one in experiments for section in one.sections for block in section.blocks):
        if isinstance(block.content, Table):
            contents[out / f"{block.name}.csv"] = to_csv((block.content,)).encode()
            contents[out / f"{block.name}.tex"] = to_latex((block.content,)).encode()
        elif isinstance(block.content, Picture):
            contents[out / f"{block.name}.csv"] = block.content.csv.encode()
            contents[out / f"{block.name}.svg"] = block.content.svg.encode()
    contents[out / PAGE] = rendered("experiment.html", experiments=experiments, inline=inline).encode()
    return contents


def _experiment(procedure: Procedure, prefix: str) -> PageExperiment:
    experiment, lines, verdicts = procedure.experiment, summary(procedure), judge(procedure)
    sizes = [SizeResults(procedure, size, verdicts) for size in experiment.sizes]
    sections = [_verdict(procedure, sizes, lines, prefix)]
    for one in sizes:
        sections += _of_size(procedure, one, f"{prefix}{one.size}-" if one.size else prefix)
    sections.append(_commands(procedure, sizes))
    return PageExperiment(
        experiment.name, page_words.question(experiment), page_words.answers(sizes), [one for one in sections if one.blocks]
    )


def _verdict(procedure: Procedure, sizes: list[SizeResults], lines: list[dict[str, Plain]], prefix: str) -> PageSection:
    experiment, section = procedure.experiment, PageSection("Summary")
    section.add("note", page_words.family(experiment))
    section.add("warning", page_words.lost(procedure, sizes))
    section.add("table", page_tables.summary_table(sizes, lines), f"{prefix}summary")
    section.add("note", page_words.BASIS if any(line["runs"] for line in lines) else None)
    if experiment.primary.learned is None:
        section.add("picture", page_pictures.differences(procedure, sizes), f"{prefix}differences")
    else:
        section.add("picture", page_pictures.learned(sizes, lines), f"{prefix}learned")
    for one in sizes:
        section.add("table", page_tables.seeds_table(one) if one.final else None, f"{prefix}{one.size}{'-' * bool(one.size)}seeds")
    return section


def _of_size(procedure: Procedure, found: SizeResults, prefix: str) -> list[PageSection]:
    of = f", {found.size}" if found.size else ""
    training, tuning = PageSection(f"While training{of}"), PageSection(f"Learning rates{of}")
    training.add("picture", page_pictures.curves(found), f"{prefix}curves")
    training.add("picture", page_pictures.normalizer_parameters(found), f"{prefix}normalizer-parameters")
    training.add("picture", page_pictures.dynamics(found), f"{prefix}dynamics")
    tuning.add("picture", page_pictures.rates(procedure, found.size), f"{prefix}rates")
    tuning.add("table", page_tables.crossed_table(procedure, found.size), f"{prefix}final-rates")
    tuning.add("note", page_words.CROSSED if procedure.choice(found.size).crossed else None)
    if found.comparison is None:
        return [training, tuning]
    measured, cost, runs = (PageSection(f"{title}{of}") for title in ("Measured at the end", "Cost", "What differs, and what does not"))
    for number, (section, table) in enumerate(zip(found.comparison.sections, comparison_tables(found.comparison), strict=True), 1):
        name = f"{prefix}measured-{number}"
        measured.add("picture", page_pictures.along_axis(found, section) if section.shape != "number" else None, f"{name}-picture")
        measured.add("table", table, name)
    for number, one in enumerate(page_pictures.maps(found), 1):
        measured.add("picture", one, f"{prefix}map-{number}")
    measured.add("list", list(found.comparison.missing))
    cost.add("table", page_tables.cost_table(found), f"{prefix}cost")
    cost.add("note", page_words.COST)
    runs.add("table", page_tables.configuration_table(found.comparison), f"{prefix}configuration")
    runs.add("table", page_tables.environment_table(found.comparison), f"{prefix}environment")
    methods = PageSection(f"Methods paragraph{of}", [Block("text", page_words.methods(procedure, found))])
    return [training, tuning, measured, cost, runs, methods]


def _commands(procedure: Procedure, sizes: list[SizeResults]) -> PageSection:
    section = PageSection("Commands", [Block("code", procedure.experiment.command)])
    for run, record in (one for found in sizes for one in found.begun):
        section.add("details", (f"{run.label} ({run.outcome.state}): {show(record.measured('command'))}", dump_yaml(record.config)))
    return section
