"""Reading the file of an experiment, and what is wrong with it beyond single keys: its arms, what they are compared on, its table."""

import csv
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path

from lm.attention.catalogue import OPTIONS
from lm.config import presets
from lm.config.load import merge, overrides_in, read_overrides, read_yaml
from lm.config.task_config import task_names
from lm.config.tree import Config, ExperimentConfig, differences, effect_of, is_learned
from lm.config.yaml_text import MAX_BYTES, parse_yaml
from lm.data.prepare import vocabulary
from lm.data.sources import labels
from lm.errors import ConfigError, DataError, Problem, shown
from lm.experiments.experiment import NOT_REACHED, Arm, Experiment, Primary, Swap, Tried, Tune, config_hash, nested
from lm.experiments.run_outcome import SELECTION
from lm.runs.folder import CONFIG, DIVERGED, SWAPPED
from lm.schema import Plain, Unavailable, build, flatten, is_block, key, own_problems, section, suggest, to_plain
from lm.statistics.tuning import FEWEST_TUNING_SEEDS, Rate, coordinates, rate_words, read_rate


@dataclass
class _File:
    """The keys of an experiment file but for `base`, `arms`, `sizes` and `evaluate`, which hold keys of configurations."""

    seeds: list[int] = key([1, 2, 3], "seeds of the final runs", ge=0, lt=2**31)
    more_seeds: list[int] = key([], "seeds of a second look, trained if the first leaves a comparison undecided", ge=0, lt=2**31)
    tune: Tune = section(Tune, "the learning rate of each arm")
    primary: Primary = section(Primary, "what decides")


TOKENS = "trainer.tokens_per_parameter"
_REMEDY = "tuning.csv, which `lm compare` writes, has the form"
TAKEN = {"arms": (".", ".."), "sizes": (".", "..", "logs", "report", SWAPPED, "workers")}  # sizes are folders beside these
_NAME = "letters, digits, '-', '_' and '.'"
_KEYS = ("base", "arms", "sizes", *(spec.name for spec in fields(_File)), "evaluate")


def read_experiment(file: Path, overrides: list[str]) -> Experiment:
    """The experiment of a YAML file; `key=value` texts change the base configuration of all arms.

    Raises:
        ConfigError: everything that is wrong with it, in one message, also with the configuration of any arm.
    """
    file = presets.find(file, "experiments")
    try:
        experiment = _with_steps(_experiment(file, overrides))
        check_experiment(experiment)
    except ConfigError as error:
        raise error if str(error).startswith(f"{file}: ") else ConfigError(f"{file}: {error}") from None
    return experiment


def _experiment(file: Path, overrides: list[str]) -> Experiment:
    """The experiment that the file describes, its arms' configurations not yet made."""
    plain = _read(file)
    problems: list[Problem] = []
    arms = read_arms(plain.pop("arms", None), problems)
    sizes = {name: nested(changes) for name, changes in read_blocks("sizes", plain.pop("sizes", None) or {}, problems).items()}
    base, evaluate = _base(file, plain.pop("base", None)), plain.pop("evaluate", None) or {}
    if not isinstance(evaluate, dict):
        problems.append(Problem("evaluate", evaluate, "must be a block of configuration keys"))
        evaluate = {}
    for name in sorted(plain.keys() - _KEYS, key=str):
        problems.append(Problem(str(name), plain.pop(name), "unknown key", suggest(str(name), _KEYS)))
    keys = build(_File, plain, "", problems)
    problems += own_problems(keys)
    if len(set(keys.seeds)) < len(keys.seeds) or not keys.seeds:
        problems.append(Problem("seeds", keys.seeds, "must be different seeds, at least one"))
    if len({*keys.seeds, *keys.more_seeds}) < len({*keys.seeds}) + len(keys.more_seeds):
        problems.append(Problem("more_seeds", keys.more_seeds, "must be different seeds, and none of `seeds`"))
    if keys.more_seeds and (keys.tune.grid or keys.tune.table) and any(arm.start for arm in arms):
        reason = "a second look may choose another rate for the arms that others start from"
        problems.append(Problem("more_seeds", keys.more_seeds, reason, "give all seeds in `seeds`, or tune nothing"))
    if keys.tune.grid and (both := sorted({*keys.seeds, *keys.more_seeds} & {*keys.tune.seeds})):
        problems.append(Problem("tune.seeds", both, "are also final seeds", "the runs that choose a rate must not judge it"))
    fixed = {"seed", "data.seed", "name", "runs", "resume", "init_from", "branch_from"}
    fixed |= {*(f"experiment.{spec.name}" for spec in fields(ExperimentConfig))}
    for tuned_key in keys.tune.keys:
        if tuned_key in fixed or not is_learned(tuned_key):
            reason = "is set by the experiment" if tuned_key in fixed else "is nothing that training depends on"
            problems.append(Problem("tune.key", tuned_key, reason, "name a key of the optimizer, such as optim.lr"))
    fixed |= {*keys.tune.keys} if keys.tune.grid or keys.tune.table else set()
    blocks = {f"arms.{arm.name}": arm.changes for arm in arms} | {f"sizes.{name}": changes for name, changes in sizes.items()}
    for where, changes in blocks.items():
        for path in sorted(fixed & set(flatten(changes))):
            problems.append(Problem(f"{where}.{path}", flatten(changes)[path], "is set by the experiment", "drop it"))
    arms = tuple(replace(arm, changes=_with_files(file, f"arms.{arm.name}", arm.changes)) for arm in arms)
    sizes = {name: _with_files(file, f"sizes.{name}", changes) for name, changes in sizes.items()}
    for arm in arms:
        if (given := flatten(arm.changes).get(TOKENS)) is not None:
            problems.append(
                Problem(f"arms.{arm.name}.{TOKENS}", given, "the arms of a size train equally long", "give it in base or sizes")
            )
    overridden = read_overrides(overrides)
    reason = "is a key of the experiment; overrides change its base configuration"
    problems += [Problem(name, overridden[name], reason, f"change it in {file.name}") for name in _KEYS if name in overridden]
    if problems:
        raise ConfigError(problems)
    base = merge(base, overridden)
    sizes, seeds = sizes or {"": {}}, tuple(keys.seeds)
    table = read_table(file.parent / keys.tune.table, keys.primary.quantity) if keys.tune.table else ()
    if wrong := {run.key for run in table} - {keys.tune.heading}:
        raise ConfigError([Problem("tune.key", keys.tune.heading, f"the table {keys.tune.table} is of {', '.join(sorted(wrong))}")])
    return Experiment(
        file.stem,
        base,
        arms,
        sizes,
        seeds,
        keys.tune,
        keys.primary,
        file,
        tuple(overrides),
        table,
        nested(evaluate),
        more_seeds=tuple(keys.more_seeds),
    )


def read_arms(given: Plain, problems: list[Problem]) -> tuple[Arm, ...]:
    """The arms that an experiment's file gives; what is wrong is appended to `problems`."""
    arms: dict[str, Arm] = {}
    for name, block in read_blocks("arms", given, problems).items():
        where, own = f"arms.{name}", dict(block)
        source, swap, trained, step = own.pop("from", None), own.pop("swap", None), own.pop("train", True), own.pop("step", None)
        start = None if source is None else str(source)
        changes = nested(own)
        if start is not None and start not in arms:
            remedy = suggest(start, arms) if arms else "the first arm is the baseline, which starts from random weights"
            problems.append(Problem(f"{where}.from", source, "is no earlier arm", remedy))
        if swap is not None and start is None:
            problems.append(Problem(f"{where}.swap", swap, "there are no weights to swap", "say of which arm: `from`"))
        if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 1):
            problems.append(Problem(f"{where}.step", step, "must be a step of the arm it starts from, at least 1"))
        elif step is not None and (start is None or swap is not None or trained is not True):
            reason = "goes on with the optimizer state of another arm"
            problems.append(Problem(f"{where}.step", step, reason, "name the arm: `from`, and drop `swap` and `train`"))
        if not isinstance(trained, bool):
            problems.append(Problem(f"{where}.train", trained, "must be true or false"))
        elif not trained and swap is None:
            problems.append(Problem(f"{where}.train", trained, "would be the arm it starts from", "give a `swap`, or train it"))
        before = len(problems)
        swapped = None if swap is None else build(Swap, swap, f"{where}.swap", problems)
        if swapped and len(problems) == before:
            changes = _with_normalizer(changes, swapped, where, problems)
        if trained is False and start in arms:
            given = flatten(nested(own)) if own else {}
            for path in (path for path in given if not path.startswith("model.normalizer")):
                reason = "has no effect on an arm that is not trained"
                problems.append(Problem(f"{where}.{path}", given[path], reason, "drop it, or train the arm"))
            changes = merge(merge(arms[start].changes, {"phases": []}), changes)
        if step is not None and start in arms:
            changes = merge(arms[start].changes, changes)
        arms[name] = Arm(name, changes, start or "", swapped, bool(trained), step=step)
    if len(arms) < 2 and not problems:
        problems.append(Problem("arms", list(arms), "needs a baseline and at least one other arm"))
    return tuple(arms.values())


def _with_normalizer(changes: dict[str, Plain], swap: Swap, where: str, problems: list[Problem]) -> dict[str, Plain]:
    """The changes of an arm with the normalizer that its weights are swapped to."""
    try:
        options = OPTIONS[swap.to]
    except Unavailable as error:
        problems.append(Problem(f"{where}.swap.to", swap.to, error.reason, error.remedy))
        return changes
    except KeyError:
        problems.append(Problem(f"{where}.swap.to", swap.to, "unknown normalizer", suggest(swap.to, OPTIONS)))
        return changes
    given = changes.get("model", {}).get("normalizer", {}) if is_block(changes.get("model", {})) else {}
    if not is_block(given) or given.get("name", swap.to) != swap.to or "init" in given:
        reason = f"the weights are swapped to {swap.to}"
        problems.append(Problem(f"{where}.model.normalizer", given, reason, "give its options by their keys, and init in `swap`"))
    first = options.first_init()
    if swap.init is not None and first is None:
        problems.append(Problem(f"{where}.swap.init", swap.init, f"{swap.to} has no parameters to start", "drop it"))
    elif swap.init not in (None, "fit"):
        wrong: list[Problem] = []
        build(options, {"init": swap.init}, "", wrong)
        for problem in wrong:
            reason = f"must be fit, or {problem.reason.removeprefix('must be ')}"
            problems.append(Problem(f"{where}.swap.init", swap.init, reason, problem.remedy))
    init = {} if first is None else {"init": first if swap.init in (None, "fit") else swap.init}
    return merge(changes, {"model": {"normalizer": {"name": swap.to, **init}}})


def read_blocks(where: str, given: Plain, problems: list[Problem]) -> dict[str, dict[str, Plain]]:
    """A map from names to blocks of keys; an empty block may be left out."""
    if not isinstance(given, dict):
        problems.append(Problem(where, given, "must be a map from names to what they change"))
        return {}
    blocks = {}
    for name, changes in given.items():
        taken = str(name) in TAKEN[where]
        if taken or not all(letter.isalnum() or letter in "-_." for letter in str(name)) or not 0 < len(str(name)) <= 40:
            problems.append(Problem(f"{where}.{name}", name, f"must be a name of at most 40 {_NAME}, not {', '.join(TAKEN[where])}"))
        elif str(name) in blocks:
            problems.append(Problem(f"{where}.{name}", name, "is there twice"))
        elif isinstance(changes, dict | None):
            blocks[str(name)] = dict(changes or {})
        else:
            problems.append(Problem(f"{where}.{name}", changes, "must be a block of configuration keys"))
    return blocks


def read_table(path: Path, metric: str) -> tuple[Tried, ...]:
    """The lines of a tuning table; `metric`: the primary one, None in all of them if the table has no column of it.

    Raises:
        ConfigError: there is no such file, or it is no tuning table.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            missing = [
                name for name in ("size", "arm", "key", "rate", "seed", SELECTION, "configuration") if name not in (reader.fieldnames or ())
            ]
            if missing:
                raise ConfigError(f"{path}: not a tuning table: it has no column {', '.join(missing)}; {_REMEDY}")
            runs = []
            for line in reader:
                try:
                    selection = _number(line[SELECTION]) if line[SELECTION] else None
                    primary = _number(line[metric]) if metric in line and selection is not None else None
                    rate, seed = read_rate(line["rate"]), int(line["seed"])
                    values, keys = coordinates(rate), line["key"].split(" / ")
                    if not all(0 < value < math.inf for value in values) or len(values) != len(keys):
                        raise ValueError
                    runs.append(Tried(line["size"], line["arm"], line["key"], rate, seed, selection, primary, line["configuration"] or ""))
                except (ValueError, TypeError, AttributeError):
                    reason = f"needs a rate above 0, a seed, and a {SELECTION} that is a number or `{DIVERGED}`"
                    raise ConfigError(f"{path}: line {reader.line_num} {reason}; {_REMEDY}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror} (tune.table)") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a tuning table: {error}; {_REMEDY}") from None
    if len({(run.size, run.arm, run.rate, run.seed) for run in runs}) < len(runs):
        raise ConfigError(f"{path}: has a run twice: the same size, arm, rate and seed; {_REMEDY}")
    return tuple(runs)


def _number(text: str) -> float:
    value = math.inf if text in (DIVERGED, NOT_REACHED) else float(text)
    if math.isnan(value):
        raise ValueError
    return value


def _with_steps(experiment: Experiment) -> Experiment:
    """The experiment with the steps of each size that gives tokens by the number of parameters: those of the baseline, for all arms."""
    sizes = dict(experiment.sizes)
    for size, changes in experiment.sizes.items():
        given = flatten(merge(experiment.base, changes)).get(TOKENS) is not None
        for arm in reversed(experiment.arms) if given else ():  # the baseline last; the others only if it is wrong, or has steps of its own
            with suppress(ConfigError):  # which `check_experiment` says, with its place
                config = experiment.config_of(size, arm)
                if config.trainer.max_steps is None:
                    from lm.model.spec import steps_of  # torch takes seconds to import

                    if not (entries := vocabulary(config.data)):
                        reason = "needs the vocabulary, which is not known before the text is there"
                        remedy = "lm prepare makes it; or set trainer.max_steps"
                        raise DataError(f"{TOKENS} = {config.trainer.tokens_per_parameter:g}: {reason}: {remedy}")
                    sizes[size] = merge(changes, nested({"trainer.max_steps": steps_of(config, entries)}))
    return replace(experiment, sizes=sizes)


def _read(path: Path) -> dict[str, Plain]:
    try:
        with path.open("rb") as file:
            plain = parse_yaml(file.read(MAX_BYTES + 1), str(path))
    except IsADirectoryError:
        what = "a run folder, whose report lm report writes" if (path / CONFIG).is_file() else "a folder"
        raise ConfigError(f"{path}: {what}; name an experiment's YAML file") from None
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such experiment file{presets.suggestion(path)}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if not isinstance(plain, dict):
        raise ConfigError(f"{path}: must hold the keys base, arms, seeds, tune, primary")
    if "arms" not in plain and (keys := sorted(plain.keys() & {spec.name for spec in fields(Config)})):
        reason = f"the configuration of one run (it has {', '.join(keys)} and no arms), not an experiment"
        raise ConfigError(f"{path}: {reason}; train it with lm train {path}, or name it as an experiment's base")
    return plain


def _base(path: Path, given: Plain) -> dict[str, Plain]:
    """The base configuration: a file or a list of files beside the experiment's, or a block of keys, which may have a `base` of its own."""
    if isinstance(given, dict):
        return _with_files(path, "base", nested(given))
    return _files(path, "base", given, ", a list of them, or a block of keys")


def _with_files(path: Path, where: str, changes: dict[str, Plain]) -> dict[str, Plain]:
    """The keys of a block, laid on the configuration files that its `base` names. Of an arm or a size its own keys alone were checked: a
    file may hold what the experiment sets, such as a learning rate."""
    own = {name: value for name, value in changes.items() if name != "base"}
    return merge(_files(path, f"{where}.base", changes["base"], " or a list of them"), own) if "base" in changes else own


def _files(path: Path, where: str, given: Plain, forms: str) -> dict[str, Plain]:
    """Configuration files by their paths relative to the experiment's, or names of presets, the later over the earlier."""
    names = given if isinstance(given, list) else [given]
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError([Problem(where, given, f"must be a configuration file{forms}")])
    merged: dict[str, Plain] = {}
    for name in names:
        merged = merge(merged, read_yaml(presets.base(path, name)))
    return merged


# Kinds that are measured in training lengths: arms of different ones read different text.
_OF_TRAINING_LENGTH = ("validation", "long_context", "texts")
_KINDS = {"val": "validation", "long": "long_context", "text": "texts"}  # of a metric by what its name begins with; else the kind itself


def check_experiment(experiment: Experiment) -> None:
    """Raises ConfigError: everything that is wrong with the configurations of all arms in all sizes, or with the tuning table."""
    problems = [*_check_table(experiment), *_check_evaluate(experiment)]
    wrong: dict[str, list[tuple[str, str]]] = {}
    configs: dict[tuple[str, str], Config] = {}
    for size, arm in experiment.places:
        try:
            config = experiment.config_of(size, arm)
            configs[size, arm.name] = config
            if not problems:
                _check_metric(experiment, experiment.evaluated(config))
        except ConfigError as error:
            for problem in error.problems or [str(error)]:
                wrong.setdefault(str(problem), []).append((size, arm.name))
    for text, where in wrong.items():
        problems.append(f"{_places(experiment, where)}{text}")
    for size in experiment.sizes:
        problems += _check_arms(experiment, [(arm, configs[size, arm.name]) for arm in experiment.arms if (size, arm.name) in configs])
    problems += _check_sizes(experiment, configs)
    if problems:
        raise ConfigError(list(dict.fromkeys(map(str, problems))))


def _places(experiment: Experiment, where: list[tuple[str, str]]) -> str:
    """Sizes and arms as the beginning of a message; nothing if they are all there are of several."""
    if len(where) == len(experiment.sizes) * len(experiment.arms) and (len(experiment.sizes) > 1 or "" in experiment.sizes):
        return ""
    words = []
    for size in experiment.sizes:
        arms = [arm for at, arm in where if at == size]
        of_size = f"size {size}" if size else ""
        words += [of_size] if len(arms) == len(experiment.arms) else [", ".join(filter(None, (f"arm {arm}", of_size))) for arm in arms]
    return "; ".join(words) + ": "


def _check_sizes(experiment: Experiment, configs: dict[tuple[str, str], Config]) -> Iterator[Problem]:
    """Check that no two sizes are the same."""
    seen = {}
    for size, changes in experiment.sizes.items() if len(experiment.sizes) > 1 else ():
        runs = tuple(config_hash(configs[size, arm.name]) for arm in experiment.arms if (size, arm.name) in configs)
        if runs in seen and len(runs) == len(experiment.arms):
            yield Problem(f"sizes.{size}", changes, f"is the same as {seen[runs]}", "change it, or drop it")
        seen.setdefault(runs, size)


def _check_arms(experiment: Experiment, arms: list[tuple[Arm, Config]]) -> Iterator[Problem]:
    """Check that no two arms of a size are the same, all read the same data, and what is compared is measured alike."""
    seen, plans = {}, {}
    for arm, config in arms:
        first = arms[0][1]
        same = f"{arm.start} {arm.step} {arm.swap} {arm.trained} {config_hash(config)}"
        if same in seen:
            yield Problem(f"arms.{arm.name}", arm.changes, f"is the same as {seen[same]}", "change it, or drop it")
        seen[same], plans[arm.name] = arm.name, config
        if arm.step is not None and arm.start in plans and config.trainer.max_steps:
            yield from _check_branch(arm, config, plans[arm.start])
        elif arm.start in plans and not arm.swap and config.plan[0].normalizer != plans[arm.start].plan[-1].normalizer:
            reason = f"has another normalizer than {arm.start}, whose weights it starts from"
            remedy = "swap it: `swap: {to: ...}`, or in during training: `phases`"
            yield Problem(f"arms.{arm.name}.from", arm.start, reason, remedy)
        texts = [repr((each.data.source, each.data.tokenizer, each.data.val_fraction)) for each in (first, config)]
        if texts[0] != texts[1]:
            reason, remedy = "reads other data than the baseline", "give all arms one data.source, tokenizer and val_fraction"
            yield Problem(f"arms.{arm.name}", arm.changes, reason, remedy)
        if (first.data.seq_len, first.eval) != (config.data.seq_len, config.eval):
            yield from _check_compared(experiment, arm, first, config)


def _check_branch(arm: Arm, config: Config, source: Config) -> Iterator[Problem]:
    """Check that the arm that another one branches from keeps the checkpoint of that step, and that a step is left."""
    every, steps = source.checkpoint_every, source.trainer.max_steps
    regular = [step for step in range(1, steps + 1) if step % every == 0 or step == steps]
    kept = {*regular[-source.trainer.keep_checkpoints :], *source.phase_ends[:-1]}
    if arm.step not in kept:
        reason = f"is no step that {arm.start} keeps a checkpoint of ({', '.join(map(str, sorted(kept)))})"
        remedy = "set trainer.checkpoint_every to a divisor of it, and raise trainer.keep_checkpoints"
        yield Problem(f"arms.{arm.name}.step", arm.step, reason, remedy)
    if config.trainer.max_steps <= arm.step:
        reason, remedy = f"leaves no step after step {arm.step} of {arm.start}", "raise it: it counts all steps from the first"
        yield Problem(f"arms.{arm.name}.trainer.max_steps", config.trainer.max_steps, reason, remedy)
    for path, (ours, theirs) in differences(to_plain(config), to_plain(source)).items():
        if effect_of(path).on_resume == "same":
            reason = f"is {shown(theirs)} in {arm.start}, which it branches from"
            yield Problem(f"arms.{arm.name}.{path}", ours, reason, "drop it: length, rate and schedule alone may differ")


def _check_compared(experiment: Experiment, arm: Arm, first: Config, config: Config) -> Iterator[Problem]:
    """Check that an arm of another training length or other evaluations than the baseline is compared on the same sequences."""
    metric = experiment.primary.metric
    if not experiment.evaluate:
        reason = "is measured on other sequences than the baseline"
        remedy = "give all arms one data.seq_len and one eval block, or say in `evaluate` what they are compared on"
        yield Problem(f"arms.{arm.name}", arm.changes, reason, remedy)
        return
    kind = kind_of_metric(metric)
    options = [experiment.evaluated(each).eval.asked(kind) for each in (first, config)]
    if options[0] != options[1] or (kind in _OF_TRAINING_LENGTH and first.data.seq_len != config.data.seq_len):
        reason = f"measures {metric} on other sequences than the baseline"
        remedy = "name a metric that `evaluate` measures alike in all arms, such as by_length/loss"
        yield Problem(f"arms.{arm.name}", arm.changes, reason, remedy)


def kind_of_metric(metric: str) -> str:
    """The kind of evaluation that logs a metric of this name."""
    first = metric.partition("/")[0]
    return _KINDS.get(first, first)


def _check_metric(experiment: Experiment, config: Config) -> None:
    """Raises ConfigError if no evaluation that a run is measured with logs the primary metric, as far as its name shows it, or if it is
    not measured often enough to be reached."""
    metric, wanted = experiment.primary.metric, config.eval.wanted(config.data)
    if kind_of_metric(metric) not in wanted:
        prefixes = {kind: prefix for prefix, kind in _KINDS.items()}
        measured = ", ".join(f"{prefixes.get(kind, kind)}/..." for kind in wanted)
        remedy = "name one of these, or ask for the evaluation in the base's `eval` or in `evaluate`"
        raise ConfigError([Problem("primary.metric", metric, f"is not measured: at the last step runs have {measured}", remedy)])
    names = {kind: _names(config, kind) for kind in wanted}
    if (known := names[kind_of_metric(metric)]) is not None and metric not in known:
        every = [name for some in names.values() for name in some or ()]
        raise ConfigError([Problem("primary.metric", metric, "is not measured by sequence", suggest(metric, every))])
    when = config.eval.kinds.get(kind_of_metric(metric))
    steps = config.trainer.max_steps
    if experiment.primary.reach is not None and when and sum(when.is_due(step, steps) for step in range(1, steps + 1)) < 2:
        reason, remedy = f"{metric} is measured once, at the last step", f"measure it on the way: eval.{kind_of_metric(metric)}.every"
        raise ConfigError([Problem("primary.reach", experiment.primary.reach, reason, remedy)])
    if experiment.primary.reach is not None and (still := [arm.name for arm in experiment.arms if not arm.trained]):
        raise ConfigError([Problem("primary.reach", experiment.primary.reach, f"{still[0]} is not trained", "drop the arm, or train it")])


def _names(config: Config, kind: str) -> list[str] | None:
    """The metrics that a kind of evaluation measures by unit; None if that is not known before it has."""
    if kind != "validation":
        return config.eval.kinds[kind].metrics(config.data)
    data = config.data
    parts = task_names([to_plain(weighted.task) for weighted in data.tasks]) if data.symbolic else labels(data)
    return [SELECTION, *(f"{SELECTION} {part}" for part in parts if len(parts) > 1)]


def _check_evaluate(experiment: Experiment) -> Iterator[Problem]:
    """Check that `evaluate` names keys of evaluations."""
    given = flatten(experiment.evaluate) if experiment.evaluate else {}
    if others := [path for path in given if not path.startswith("eval.")]:
        yield from (Problem(f"evaluate.{path}", given[path], "is no key of an evaluation", "name keys of `eval`") for path in others)
        return
    try:
        overrides_in("eval", experiment.evaluate_overrides)
    except ConfigError as error:
        yield from (replace(problem, path=f"evaluate.{problem.path}") for problem in error.problems)


def _check_table(experiment: Experiment) -> Iterator[Problem]:
    """Check that a tuning table has a finished run of every arm and size, at several rates, with several seeds that are the same of all
    arms and none of them final."""
    where = experiment.tune.table
    if both := sorted({*experiment.all_seeds} & {run.seed for run in experiment.table}):
        yield Problem("tune.table", both, "are final seeds", "the runs that choose a rate must not judge it")
    remedy, base = "make it again by `lm compare` with a grid: it writes tuning.csv", experiment.arms[0].name
    tried: dict[tuple[str, str], dict[Rate, set[int]]] = {}  # seeds of each arm and size at each rate
    for run in experiment.table:
        tried.setdefault((run.size, run.arm), {}).setdefault(run.rate, set()).add(run.seed)
    for size, arm in product(experiment.sizes if where else (), (arm for arm in experiment.arms if arm.tuned)):
        ours, theirs = tried.get((size, arm.name), {}), tried.get((size, base), {})
        name = " ".join(filter(None, (size, arm.name)))
        by_rate = experiment.costs_of(experiment.table, size).get(arm.name, {})
        mine = [run for run in experiment.table if (run.size, run.arm) == (size, arm.name)]
        if not mine:
            yield Problem("tune.table", where, f"has no {name}", remedy)
        elif any(experiment.choosing(run) is None for run in mine):
            yield Problem("tune.table", where, f"has runs of {name} that have not ended", remedy)
        elif len(by_rate) < 2 or min(map(len, by_rate.values())) < FEWEST_TUNING_SEEDS:
            reason = f"has fewer than 2 rates of {name}, or fewer than {FEWEST_TUNING_SEEDS} seeds at one"
            yield Problem("tune.table", where, reason, remedy)
        elif apart := sorted(rate for rate in ours.keys() & theirs.keys() if ours[rate] != theirs[rate]):
            reason = f"has other seeds of {name} than of {base} at {', '.join(map(rate_words, apart))}"
            yield Problem("tune.table", where, reason, "give all arms the same seeds at a rate")
