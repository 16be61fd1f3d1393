"""One page of one or several experiments: question and verdict first, then all that they rest on."""

from pathlib import Path

from lm.config.yaml_text import dump_yaml
from lm.experiments import page_pictures, page_tables, page_words
from lm.experiments.judging import Judged
from lm.experiments.page_tables import SizeResults
from lm.experiments.procedure import Procedure
from lm.experiments.summary import summary
from lm.files import write_together
from lm.report.comparison import show
from lm.report.comparison_tables import comparison_tables
from lm.report.html import Block, PageSection, Part, page
from lm.report.pictures import Picture
from lm.report.tables import Table, to_csv, to_latex
from lm.schema import Plain

PAGE = "report.html"


def write_page(procedures: list[Procedure], out: Path) -> Path:
    """Write `page_files` into the folder `out`, all of them or none. Returns the page.

    Raises:
        LMError: run folders that can't be read or compared, or `out` can't be written.
    """
    write_together(page_files(procedures, out), "the report")
    return out / PAGE


def page_files(procedures: list[Procedure], out: Path, judged: Judged | None = None) -> dict[Path, bytes]:
    """`report.html`, and each table and picture of it as files of its own, to be written into the folder `out`.

    Tables are CSV and LaTeX, pictures SVG and the CSV of their numbers; their names begin with the experiment's where there are several.
    `judged`: the verdicts on the one procedure, if they are known already.

    Raises:
        LMError: run folders that can't be read or compared.
    """
    parts = [_part(each, f"{each.experiment.name}-" if len(procedures) > 1 else "", judged) for each in procedures]
    contents: dict[Path, bytes] = {}
    for block in (block for part in parts for section in part.sections for block in section.blocks):
        if isinstance(block.content, Table):
            contents[out / f"{block.name}.csv"] = to_csv((block.content,)).encode()
            contents[out / f"{block.name}.tex"] = to_latex((block.content,)).encode()
        elif isinstance(block.content, Picture):
            contents |= {out / f"{block.name}{suffix}": block.content.file(suffix) for suffix in (".svg", ".csv")}
    contents[out / PAGE] = page(parts).encode()
    return contents


def _part(procedure: Procedure, prefix: str, judged: Judged | None) -> Part:
    experiment, judged = procedure.experiment, judged or procedure.judged()
    lines, sizes = summary(procedure, judged), [SizeResults(procedure, size, judged) for size in experiment.sizes]
    sections = [_verdict(procedure, sizes, lines, prefix)]
    for each in sizes:
        sections += _of_size(procedure, each, f"{prefix}{each.size}-" if each.size else prefix)
    sections.append(_commands(procedure, sizes))
    answers, margin = page_words.answers(sizes), page_words.margin(experiment)
    return Part(experiment.name, [section for section in sections if section.blocks], page_words.question(experiment), answers, margin)


def _verdict(procedure: Procedure, sizes: list[SizeResults], lines: list[dict[str, Plain]], prefix: str) -> PageSection:
    experiment, section = procedure.experiment, PageSection("Summary")
    section.add("note", page_words.family(experiment))
    section.add("warning", page_words.lost(procedure, sizes))
    section.add("table", page_tables.summary_table(sizes[0].judged, lines), f"{prefix}summary")
    section.add("note", page_words.BASIS if any(line["runs"] for line in lines) else None)
    if experiment.primary.learned is None:
        section.add("picture", page_pictures.differences(procedure, sizes), f"{prefix}differences")
    else:
        section.add("picture", page_pictures.learned(sizes, lines), f"{prefix}learned")
    for each in sizes:
        section.add("table", page_tables.seeds_table(each) if each.final else None, f"{prefix}{each.size}{'-' * bool(each.size)}seeds")
    return section


def _of_size(procedure: Procedure, results: SizeResults, prefix: str) -> list[PageSection]:
    of = f", {results.size}" if results.size else ""
    training, tuning = PageSection(f"While training{of}"), PageSection(f"Learning rates{of}")
    training.add("picture", page_pictures.curves(results), f"{prefix}curves")
    training.add("picture", page_pictures.normalizer_parameters(results), f"{prefix}normalizer-parameters")
    training.add("picture", page_pictures.dynamics(results), f"{prefix}dynamics")
    tuning.add("picture", page_pictures.rates(procedure, results.size), f"{prefix}rates")
    tuning.add("table", page_tables.crossed_table(procedure, results.size), f"{prefix}final-rates")
    tuning.add("note", page_words.CROSSED if procedure.choice(results.size).crossed else None)
    if results.comparison is None:
        return [training, tuning]
    measured, cost, runs = (PageSection(f"{title}{of}") for title in ("Measured at the end", "Cost", "What differs, and what does not"))
    for number, (section, table) in enumerate(zip(results.comparison.sections, comparison_tables(results.comparison), strict=True), 1):
        name = f"{prefix}measured-{number}"
        measured.add("picture", page_pictures.along_axis(results, section) if section.shape != "number" else None, f"{name}-picture")
        measured.add("table", table, name)
    for number, each in enumerate(page_pictures.maps(results), 1):
        measured.add("picture", each, f"{prefix}map-{number}")
    measured.add("list", list(results.comparison.missing))
    cost.add("table", page_tables.cost_table(results), f"{prefix}cost")
    cost.add("note", page_words.COST)
    runs.add("table", page_tables.arms_differ(results.comparison), f"{prefix}configuration")
    runs.add("table", page_tables.environment_table(results.comparison), f"{prefix}environment")
    methods = PageSection(f"Methods paragraph{of}", [Block("text", page_words.methods(procedure, results))])
    return [training, tuning, measured, cost, runs, methods]


def _commands(procedure: Procedure, sizes: list[SizeResults]) -> PageSection:
    section = PageSection("Commands", [Block("code", procedure.experiment.command)])
    for run, record in (each for results in sizes for each in results.begun):
        section.add("details", (f"{run.label} ({run.outcome.state}): {show(record.measured('command'))}", dump_yaml(record.config)))
    return section
