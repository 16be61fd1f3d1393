"""How runs were trained and measured, in words: lines for a table, and the methods paragraph of a paper."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from lm.attention import catalogue
from lm.config.model_config import ModelConfig
from lm.report.comparison import RunComparison, across, show
from lm.report.comparison_tables import covered
from lm.report.sections import Section, seeds_shown
from lm.report.tables import Column, Table
from lm.runs.record import RunRecord
from lm.schema import Plain, flatten, to_plain


def how_measured(comparison: RunComparison) -> list[tuple[str, str]]:
    """(what, value) lines beside those of the checks of fairness; a value that differs is given by arm."""

    def line(what: str, value: Callable[[RunRecord], object]) -> tuple[str, str]:
        return what, across(comparison.arms, value)[1]

    def steps(run: RunRecord) -> str:
        return f"{show(run.evaluations[0].step if run.evaluations else None)} / {show(run.flat.get('trainer.max_steps'))}"

    def parameters(run: RunRecord) -> str:
        return " / ".join(show(run.measured(f"parameters.{name}")) for name in ("total", "non_embedding", "normalizer"))

    def tasks(run: RunRecord) -> str | None:
        return "; ".join(_pairs(share) for share in run.config["data"].get("tasks") or []) or None

    settings = dict.fromkeys(line.setting for section in comparison.sections for line in section.lines if line.setting)
    on = {section.first.shown.measured_on: section for section in comparison.sections}
    lines = [
        *((f"normalizer: {arm.label}", _normalizer(arm.runs[0])) for arm in comparison.arms),
        line("training length (tokens)", lambda run: run.flat["data.seq_len"]),
        *(pair for name, each in on.items() for pair in (line(name, partial(_amount, each)), line(f"{name} (sha256)", each.sha256))),
        ("inference settings", ", ".join(settings) or "none"),
        line("data fingerprint", lambda run: run.measured("data_fingerprint")),
        line("data", corpus),
        *([line("tasks", tasks)] if any(map(tasks, comparison.runs)) else []),
        line("steps: evaluated / planned", steps),
        line("tokens seen", lambda run: run.tokens_seen),
        line("tokens in a step", lambda run: run.flat.get("optim.batch_tokens")),
        line("parameters: total / non-embedding / normalizer", parameters),
        line("seeds", lambda run: seeds_shown(run.seeds)),
        line("precision", lambda run: run.used("precision")),
        line("torch.compile", lambda run: run.used("compile")),
        line("device", lambda run: run.used("device")),
        line("code", lambda run: run.commits),
        line("versions", lambda run: _pairs(run.environment.get("versions"))),
    ]
    checked = {check.what for check in comparison.checks}
    return [each for each in lines if each[0] not in checked]


def facts_table(lines: Sequence[tuple[str, str, str]], same: str = "same in", title: str = "") -> Table:
    """A table of facts on runs: what it is, in which runs it is the `same`, and its value; without the second where no line has it."""
    columns = Column("what", kind="label"), Column(same, kind="label"), Column("value", kind="words")
    cells = ([line[place] for line in lines] for place in range(3))
    return Table(title, "", tuple((column, some) for column, some in zip(columns, cells, strict=True) if any(some)))


def configuration_table(comparison: RunComparison, lines: Sequence[tuple[str, tuple[str, ...]]]) -> Table:
    """A row for each configuration key, a column for each arm."""
    columns = [(Column("key", kind="label"), [key for key, _ in lines])]
    columns += [(Column(arm.label, kind="words"), [values[place] for _, values in lines]) for place, arm in enumerate(comparison.arms)]
    return Table("Configuration keys in which the arms differ", "", tuple(columns))


def _amount(section: Section, run: RunRecord) -> str | None:
    """How many and how long the sequences are that a run was measured on, task by task."""
    of = [(line.what, each.shown.amount) for (owner, line), each in section.series.items() if owner is run and each.shown.amount]
    return "; ".join(": ".join(filter(None, each)) for each in dict.fromkeys(of)) or None


def corpus(run: RunRecord) -> str | None:
    """Where the text or the tasks come from, and how much there is."""
    counts = {name: count for name, count in (run.environment.get("data") or {}).items() if name != "store"}  # a folder of one machine
    source = {} if run.symbolic else {"source": run.config["data"].get("source")}
    return _pairs({**source, **counts})


def _pairs(block: Plain) -> str | None:
    return ", ".join(f"{key} {show(value)}" for key, value in flatten(block).items()) if block else None


def _normalizer(run: RunRecord) -> str:
    """Formula, source, options and what n means for a run's normalizer, phase by phase."""
    phases = []
    for step, options in run.phases:
        entry, known, n = catalogue.ENTRIES.get(options["name"]), catalogue.read(options), str(options.get("n", ""))
        formula = (known.formula() if known else str(options["name"])) + (f" ({entry.source})" if entry else "")
        given = ", ".join(f"{key}={show(value)}" for key, value in options.items() if key not in ("name", "n"))
        meaning = {"visible": "keys the query sees (its position + 1)", "sample": "length of the sequence or document"}
        counted = f"n = {meaning.get(n, n.removeprefix('fixed:') + ' for every query')}" if n else ""
        phases.append((f"from step {step}: " if step else "") + "; ".join(filter(None, (formula, given, counted))))
    return "; then ".join(phases)


def methods(comparison: RunComparison) -> str:
    """A paragraph for a paper: what was trained, on what, and how it was measured."""
    several = len(comparison.arms) > 1
    named = ", ".join(arm.label for arm in comparison.arms)
    differ = f"that differ in the attention normalizer: {named}" if several else f"with the attention normalizer {named}"
    text = [f"We trained {models(comparison)} {differ}.", architecture(comparison), training_methods(comparison)]
    return " ".join(filter(None, [*text, comparison.warning, measuring_methods(comparison)]))


def models(comparison: RunComparison) -> str:
    """Layers, heads, width and parameters of what was trained, in words."""
    total, without = (_say(comparison, lambda run, name=name: run.measured(f"parameters.{name}")) for name in ("total", "non_embedding"))
    return (
        f"{'decoders' if len(comparison.arms) > 1 else 'a decoder'} of {_key(comparison, 'model.n_layer')} layers, "
        f"{_key(comparison, 'model.n_head')} heads and width {_key(comparison, 'model.n_embd')} ({total} parameters, {without} without "
        "embeddings)"
    )


def architecture(comparison: RunComparison) -> str:
    """A sentence on what the models consist of: MLP, norm, positions, and every other option that is not the default."""
    usual = flatten({"model": to_plain(ModelConfig())})
    said = ("model.n_layer", "model.n_head", "model.n_embd", "model.dropout", "model.normalizer.", "model.transfer.")  # elsewhere
    always = ["model.mlp", "model.norm", "model.position.name", "model.position.theta"]
    own = [path for run in comparison.runs for path, value in run.flat.items() if path.startswith("model.") and value != usual.get(path)]
    paths = [path for path in dict.fromkeys(always + own) if not path.startswith(said)]
    if all(run.flat.get("model.block.name") == "gau" for run in comparison.runs):
        paths.remove("model.mlp")
    return f"Architecture: {_options(comparison, paths, usual)}."


def training_methods(comparison: RunComparison) -> str:
    """A sentence on steps, optimizer, schedule, precision and seeds."""
    key, say = partial(_key, comparison), partial(_say, comparison)
    usual = {"lr_factor": 1.0, "weight_decay": None, "eps": None}  # what a group of parameters has unless it says otherwise
    options = dict.fromkeys(
        path
        for run in comparison.runs
        for path, value in run.flat.items()
        if (path.startswith("optim.optimizer.") and not path.endswith(".name"))
        or (path.startswith("optim.groups.") and value != usual[path.split(".")[-1]])
        or (path.startswith("model.transfer.") and value is not None)
        or path == "optim.z_loss"
    )
    paths = dict.fromkeys(path for run in comparison.runs for path in run.flat if path.startswith("optim.schedule."))
    schedule = _options(comparison, [path for path in paths if not path.endswith(".name")], {})
    return (
        f"Training used {key('trainer.max_steps')} steps of {key('optim.batch_tokens')} tokens in sequences of {key('data.seq_len')}, "
        f"{key('optim.optimizer.name')} (peak learning rate {key('optim.lr')}, {_options(comparison, options, {})}, gradients clipped at "
        f"norm {key('optim.grad_clip')}), {key('optim.warmup_steps')} steps of warm-up, "
        f"then the schedule {key('optim.schedule.name')}{f' ({schedule})' if schedule else ''}, dropout {key('model.dropout')}, precision "
        f"{say(lambda run: run.used('precision'))}, seeds: {say(lambda run: seeds_shown(run.seeds))}."
    )


def measuring_methods(comparison: RunComparison) -> str:
    """Sentences on what was measured, and how differences were made."""
    text = "".join(_method(comparison, section) for section in comparison.sections)
    if over_what := covered(difference.interval for difference in comparison.differences):
        seeds, alone = ([over for over in over_what if ("1 seed" in over) == single] for single in (False, True))
        paired = [f"paired by seed, with 95% Student t intervals over {' or '.join(seeds)}"] if seeds else []
        if alone:
            how = "95% Student t intervals over documents (CR2, Bell and McCaffrey), which say nothing about another seed"
            paired.append(f"paired by sequence, with {how}: over {' or '.join(alone)}")
        text += f"Differences are to {comparison.arms[0].label}, on the same tokens, {'; where seeds are too few, '.join(paired)}."
    return text.strip()


def _say(comparison: RunComparison, value: Callable[[RunRecord], object]) -> str:
    """A value of all runs, by arm where arms differ."""
    return across(comparison.arms, value)[1]


def _key(comparison: RunComparison, path: str) -> str:
    """The value of a configuration key, likewise."""
    return _say(comparison, lambda run: run.flat.get(path))


def _options(comparison: RunComparison, paths: Iterable[str], usual: Mapping[str, Plain]) -> str:
    """Options and their values in words, by arm where they differ; `usual`: the values of those that a configuration leaves out."""

    def said(path: str) -> str:
        words = path.removeprefix("model.").removeprefix("transfer.").removeprefix("optim.").removesuffix(".name")
        words = words.removeprefix("optimizer.").removeprefix("groups.").removeprefix("schedule.")
        value = _say(comparison, lambda run: "none" if (known := run.flat.get(path, usual.get(path))) is None else known)
        return f"{words.replace('.', ' ').replace('_', ' ')} {value}"

    return ", ".join(map(said, paths))


def _method(comparison: RunComparison, section: Section) -> str:
    """How a section was measured: its series' own sentence (by arm where they differ), where, and in which inference settings."""
    sentences = {run: each.shown.method for (run, _), each in section.series.items() if each.shown.method}
    if not sentences:
        return ""
    alike = len(set(sentences.values())) == 1
    said = next(iter(sentences.values())) if alike else across(comparison.arms, sentences.get)[1]
    axis, places = section.first.axis, list(section.places)
    over = f" {axis.before} {' to '.join(dict.fromkeys((places[0], places[-1])))} {axis.unit}" if section.shape == "points" else ""
    settings = f" ({'; '.join(section.of)})" if any(section.of) else ""
    how = f", with 95% intervals: {section.how}" if section.how else ""
    return f"{said}{over}{settings}{how}. "
