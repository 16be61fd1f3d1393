"""Read an experiment's file, and check its arms, the comparison of the arms, and its tuning table."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path

import torch

from lm.attention.catalogue import make_normalizer
from lm.attention.normalizer import LayerSpec
from lm.config import presets
from lm.config.eval_config import Quantity, ValidationTiming, lengths_from_factors
from lm.config.load import merge, merge_bases, nest_keys, overrides_in, read_overrides, refuse_unused_temperatures
from lm.config.normalizers import OPTIONS
from lm.config.task_config import task_names
from lm.config.tree import Config, ExperimentConfig, differences, distinguishes_arms, effect_of
from lm.config.yaml_text import MAX_BYTES, parse_yaml
from lm.data.prepare import vocab_size_of
from lm.errors import ConfigError, DataError, Problem, as_written
from lm.evaluation.metrics import evaluation_names
from lm.experiments.experiment import (
    Arm,
    Experiment,
    PrimaryMetric,
    Swap,
    Tune,
    check_table,
    config_hash,
    kind_of_metric,
    read_tuning_table,
)
from lm.model.spec import count_steps
from lm.plugins import PLUGINS
from lm.removed_keys import removed_key
from lm.runs.folder import CONFIG, RESOLVED_FILE, SWAPPED
from lm.schema import Plain, Unavailable, build, cross_key_problems, flatten, is_block, key, section, suggest, to_plain


@dataclass
class _FileKeys:
    """The keys of an experiment file except `base`, `arms`, `sizes` and `evaluate`, which hold configuration keys."""

    seeds: list[int] = key([1, 2, 3], "seeds of the final runs", ge=0, lt=2**31)
    tune: Tune = section(Tune, "the learning rate of each arm")
    primary: PrimaryMetric = section(PrimaryMetric, "what decides")


TOKENS_KEY = "trainer.tokens_per_parameter"
_RESERVED_FILES = ("compare.lock", RESOLVED_FILE, "tuning.csv", "verdicts.csv", "verdicts.json")
# reserved names, which no arm or size may have: a size's folder lies beside these files and folders
RESERVED = {"arms": (".", ".."), "sizes": (".", "..", "logs", "report", SWAPPED, "workers", *_RESERVED_FILES)}
_CHARSET = "letters, digits, '-', '_' and '.'"
_TOP_KEYS = ("base", "arms", "sizes", *(spec.name for spec in fields(_FileKeys)), "evaluate")


def read_experiment(file: Path, overrides: list[str]) -> Experiment:
    """Read the experiment that a YAML file describes.

    overrides: `key=value` texts, which change the base configuration of all arms.

    Raises ConfigError: the file or an arm's configuration is wrong; one message lists the problems.
    Raises DataError: `trainer.tokens_per_parameter` is set, and the size of the vocabulary is not known yet.
    """
    file = presets.find(file, "experiments")
    try:
        experiment = _with_steps(_experiment(file, overrides))
        check_experiment(experiment)
    except ConfigError as error:
        raise error if str(error).startswith(f"{file}: ") else ConfigError(f"{file}: {error}") from None
    return experiment


def _experiment(file: Path, overrides: list[str]) -> Experiment:
    """Read the experiment that a file describes, without building the configurations of its arms."""
    plain = _read_yaml(file)
    problems: list[Problem] = []
    arms = read_arms(plain.pop("arms", None), problems)
    size_blocks = read_blocks("sizes", plain.pop("sizes", None) or {}, problems)
    sizes = {name: nest_keys(changes, path=f"sizes.{name}.") for name, changes in size_blocks.items()}
    base, evaluation_keys = plain.pop("base", None), plain.pop("evaluate", None) or {}
    if base == []:
        raise ConfigError([Problem("base", base, "names no file", "name one, or a list of files")])
    base = (
        merge_bases(nest_keys(base), file, "base.base") if isinstance(base, dict) else merge_bases({"base": base}, file)
    )
    if not isinstance(evaluation_keys, dict):
        problems.append(Problem("evaluate", evaluation_keys, "must be a block of configuration keys"))
        evaluation_keys = {}
    for name in sorted((name for name in plain.keys() - _TOP_KEYS if not removed_key("", "", name)), key=str):
        problems.append(Problem(str(name), plain.pop(name), "unknown key", suggest(str(name), _TOP_KEYS)))
    settings = build(_FileKeys, plain, "", problems)
    problems += cross_key_problems(settings)
    if len(set(settings.seeds)) < len(settings.seeds) or not settings.seeds:
        problems.append(Problem("seeds", settings.seeds, "must be different seeds, at least one"))
    if settings.tune.grid and (shared_seeds := sorted({*settings.seeds} & {*settings.tune.seeds})):
        problems.append(
            Problem("tune.seeds", shared_seeds, "are also final seeds", "the runs that choose a rate must not judge it")
        )
    fixed_keys = {"seed", "data.seed", "name", "runs", "resume", "init_from", "branch_from"}
    fixed_keys |= {*(f"experiment.{spec.name}" for spec in fields(ExperimentConfig))}
    for tuned_key in settings.tune.keys:
        if tuned_key in fixed_keys or not distinguishes_arms(tuned_key):
            reason = "is set by the experiment" if tuned_key in fixed_keys else "is nothing that training depends on"
            problems.append(Problem("tune.key", tuned_key, reason, "name a key of the optimizer, such as optim.lr"))
    fixed_keys |= {*settings.tune.keys} if settings.tune.grid or settings.tune.table else set()
    blocks = {f"arms.{arm.name}": arm.changes for arm in arms} | {
        f"sizes.{name}": changes for name, changes in sizes.items()
    }
    for prefix, changes in blocks.items():
        for path in sorted(fixed_keys & set(flatten(changes))):
            problems.append(Problem(f"{prefix}.{path}", flatten(changes)[path], "is set by the experiment", "drop it"))
    # Only a block's own keys are checked above: files that its `base` names may hold a key that the experiment sets,
    # such as optim.lr.
    full_arms: dict[str, Arm] = {}
    for arm in arms:
        changes = merge_bases(arm.changes, file, f"arms.{arm.name}.base")
        # its changes are laid over its source's
        if arm.source in full_arms and (arm.branch_step is not None or not arm.trained):
            changes = merge(merge(full_arms[arm.source].changes, {} if arm.trained else {"phases": []}), changes)
        if (tokens := flatten(changes).get(TOKENS_KEY)) is not None:
            reason = "the arms of a size train equally long"
            problems.append(Problem(f"arms.{arm.name}.{TOKENS_KEY}", tokens, reason, "give it in base or sizes"))
        full_arms[arm.name] = replace(arm, changes=changes)
    arms = tuple(full_arms.values())
    sizes = {name: merge_bases(changes, file, f"sizes.{name}.base") for name, changes in sizes.items()}
    override_values = read_overrides(overrides)
    reason = "is a key of the experiment; overrides change its base configuration"
    problems += [
        Problem(name, override_values[name], reason, f"change it in {file.name}")
        for name in _TOP_KEYS
        if name in override_values
    ]
    problems += _ineffective_overrides(file, settings, full_arms, sizes, override_values)
    if problems:
        raise ConfigError(problems)
    base = merge(base, override_values)
    sizes, seeds = sizes or {"": {}}, tuple(settings.seeds)
    table = (
        read_tuning_table(file.parent / settings.tune.table, settings.primary.quantity_name)
        if settings.tune.table
        else ()
    )
    if wrong_keys := {run.key for run in table} - {settings.tune.heading}:
        reason = f"the table {settings.tune.table} is of {', '.join(sorted(wrong_keys))}"
        raise ConfigError([Problem("tune.key", settings.tune.heading, reason)])
    return Experiment(
        file.stem, base, arms, sizes, seeds, settings.tune, settings.primary, file, tuple(overrides), table,
        nest_keys(evaluation_keys),
    )  # fmt: skip


def _ineffective_overrides(
    file: Path,
    settings: _FileKeys,
    arms: dict[str, Arm],
    sizes: dict[str, dict[str, Plain]],
    override_values: dict[str, Plain],
) -> Iterator[Problem]:
    """Yield a problem for each override of a key that seeds, tuning, all arms or all sizes set, as their values win."""
    tuned_keys = settings.tune.keys if settings.tune.grid or settings.tune.table else ()
    groups = {
        "`seeds`": [{"seed"}],
        "the experiment": [{"name", "experiment"}],
        "`tune`": [{*tuned_keys}],
        "all arms": [{*flatten(arm.changes)} for arm in arms.values()],
        "all sizes": [{*flatten(changes)} for changes in sizes.values()],
    }
    for path, value in flatten(override_values).items():
        parts = path.removesuffix(".name").split(".")
        names = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        names |= {f"{name}.name" for name in names}
        for owner, blocks in groups.items() if path not in _TOP_KEYS else ():
            if blocks and all(names & keys for keys in blocks):
                yield Problem(path, value, f"is set by {owner}, so this has no effect", f"change it in {file.name}")


def read_arms(arm_blocks: Plain, problems: list[Problem]) -> tuple[Arm, ...]:
    arms: dict[str, Arm] = {}
    for name, block in read_blocks("arms", arm_blocks, problems).items():
        prefix, keys = f"arms.{name}", dict(block)
        source = keys.pop("from", None)
        swap_block = keys.pop("swap", None)
        trained = keys.pop("train", True)
        step = keys.pop("step", None)
        source_name = None if source is None else str(source)
        changes = nest_keys(keys, path=f"{prefix}.")
        if source_name is not None and source_name not in arms:
            remedy = (
                suggest(source_name, arms)
                if arms
                else "the first arm is the baseline, which starts from random weights"
            )
            problems.append(Problem(f"{prefix}.from", source, "is no earlier arm", remedy))
        if swap_block is not None and source_name is None:
            problems.append(
                Problem(f"{prefix}.swap", swap_block, "there are no weights to swap", "say of which arm: `from`")
            )
        if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 1):
            problems.append(Problem(f"{prefix}.step", step, "must be a step of the arm it starts from, at least 1"))
        elif step is not None and (source_name is None or swap_block is not None or trained is not True):
            reason = "goes on with the optimizer state of another arm"
            problems.append(
                Problem(f"{prefix}.step", step, reason, "name the arm: `from`, and drop `swap` and `train`")
            )
        if not isinstance(trained, bool):
            problems.append(Problem(f"{prefix}.train", trained, "must be true or false"))
        elif not trained and swap_block is None:
            problems.append(
                Problem(f"{prefix}.train", trained, "would be the arm it starts from", "give a `swap`, or train it")
            )
        problem_count = len(problems)
        if is_list := is_block(swap_block) and isinstance(swap_block.get("to"), list):
            remedy = "several, one a layer, are swap: {to: layers} and model.normalizer: {of: [...]}"
            problems.append(Problem(f"{prefix}.swap.to", swap_block["to"], "is one normalizer's name", remedy))
        swap = None if swap_block is None or is_list else build(Swap, swap_block, f"{prefix}.swap", problems)
        if swap and len(problems) == problem_count:
            changes = _with_normalizer(changes, swap, prefix, problems)
        if trained is False and source_name in arms:
            arm_keys = flatten(nest_keys(keys)) if keys else {}
            for path in (path for path in arm_keys if not path.startswith("model.normalizer")):
                reason = "has no effect on an arm that is not trained"
                problems.append(Problem(f"{prefix}.{path}", arm_keys[path], reason, "drop it, or train the arm"))
        arms[name] = Arm(name, changes, source_name or "", swap, bool(trained), branch_step=step)
    if len(arms) < 2 and not problems:
        problems.append(Problem("arms", list(arms), "needs a baseline and at least one other arm"))
    return tuple(arms.values())


def _with_normalizer(changes: dict[str, Plain], swap: Swap, prefix: str, problems: list[Problem]) -> dict[str, Plain]:
    """Return an arm's changes with the normalizer of `swap` added to them. Problems with this normalizer are added to
    `problems`.
    """
    try:
        with PLUGINS.trusted():
            options = OPTIONS[swap.to]
    except Unavailable as error:
        problems.append(Problem(f"{prefix}.swap.to", swap.to, error.reason, error.remedy))
        return changes
    except KeyError:
        problems.append(Problem(f"{prefix}.swap.to", swap.to, "unknown normalizer", suggest(swap.to, OPTIONS)))
        return changes
    normalizer = changes.get("model", {}).get("normalizer", {}) if is_block(changes.get("model", {})) else {}
    if not is_block(normalizer) or normalizer.get("name", swap.to) != swap.to or "init" in normalizer:
        reason = f"the weights are swapped to {swap.to}"
        problems.append(
            Problem(
                f"{prefix}.model.normalizer", normalizer, reason, "give its options by their keys, and init in `swap`"
            )
        )
    first_init = options.first_init()
    if swap.init is not None and first_init is None:
        problems.append(Problem(f"{prefix}.swap.init", swap.init, f"{swap.to} has no parameters to start", "drop it"))
    elif swap.init not in (None, "fit"):
        init_problems: list[Problem] = []
        build(options, {"init": swap.init}, "", init_problems)
        for problem in init_problems:
            reason = f"must be fit, or {problem.reason.removeprefix('must be ')}"
            problems.append(Problem(f"{prefix}.swap.init", swap.init, reason, problem.remedy))
    init = {} if first_init is None else {"init": first_init if swap.init in (None, "fit") else swap.init}
    return merge(changes, {"model": {"normalizer": {"name": swap.to, **init}}})


def read_blocks(key: str, value: Plain, problems: list[Problem]) -> dict[str, dict[str, Plain]]:
    """Return the configuration keys that each arm or size changes, by its name; an arm or size without changes (null)
    has {}. `key`: the key in the file, `arms` or `sizes`. `value`: the content of this key. Problems with it are added
    to `problems`.
    """
    if not isinstance(value, dict):
        problems.append(Problem(key, value, "must be a map from names to what they change"))
        return {}
    blocks = {}
    for name, changes in value.items():
        if isinstance(name, bool | None):
            problems.append(
                Problem(key, name, "is no text: YAML reads on, yes and null as values", "put the name in quotes")
            )
            continue
        is_reserved = str(name) in RESERVED[key]
        if (
            is_reserved
            or not all(letter.isalnum() or letter in "-_." for letter in str(name))
            or not 0 < len(str(name)) <= 40
        ):
            problems.append(
                Problem(
                    f"{key}.{name}", name, f"must be a name of at most 40 {_CHARSET}, not {', '.join(RESERVED[key])}"
                )
            )
        elif str(name) in blocks:
            problems.append(Problem(f"{key}.{name}", name, "is there twice"))
        elif isinstance(changes, dict | None):
            blocks[str(name)] = dict(changes or {})
        else:
            problems.append(Problem(f"{key}.{name}", changes, "must be a block of configuration keys"))
    return blocks


def _with_steps(experiment: Experiment) -> Experiment:
    """Set `trainer.max_steps` to the baseline's number of steps, in each size for which `trainer.tokens_per_parameter`
    is set. Returns the new experiment. Raises DataError: the size of the vocabulary is not known yet."""
    sizes = dict(experiment.sizes)
    for size, changes in experiment.sizes.items():
        has_tokens = flatten(merge(experiment.base, changes)).get(TOKENS_KEY) is not None
        # The baseline comes last: its number of steps replaces another arm's, unless its configuration is wrong or sets
        # max_steps.
        for arm in reversed(experiment.arms) if has_tokens else ():
            with suppress(ConfigError):  # `check_experiment` reports the error with size and arm
                config = experiment.example_config(size, arm)
                if config.trainer.max_steps is None:
                    if not (vocabulary_size := vocab_size_of(config.data)):
                        reason = "needs the vocabulary, which is not known before the text is there"
                        remedy = "lm prepare makes it; or set trainer.max_steps"
                        raise DataError(f"{TOKENS_KEY} = {config.trainer.tokens_per_parameter:g}: {reason}: {remedy}")
                    sizes[size] = merge(changes, nest_keys({"trainer.max_steps": count_steps(config, vocabulary_size)}))
    return replace(experiment, sizes=sizes)


def _read_yaml(path: Path) -> dict[str, Plain]:
    try:
        with path.open("rb") as file:
            plain = parse_yaml(file.read(MAX_BYTES + 1), str(path))
    except IsADirectoryError:
        description = "a run folder, whose report lm report writes" if (path / CONFIG).is_file() else "a folder"
        raise ConfigError(f"{path}: {description}; name an experiment's YAML file") from None
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


# Keys of `data` that decide what the token store holds.
_STORE_KEYS = (
    "source",
    "tokenizer",
    "val_fraction",
    "deduplicate",
    "min_document_bytes",
    "max_document_bytes",
    "on_error",
)
# Evaluation kinds whose lengths are multiples of the training length, so that arms of other training lengths get other
# sequences.
_LENGTH_KINDS = ("validation", "long_context", "texts")


def check_experiment(experiment: Experiment) -> None:
    """Check the configurations of all arms in all sizes, and the tuning table. Raises ConfigError, which lists all
    problems.
    """
    problems = [*check_table(experiment), *_check_evaluate(experiment)]
    size_arms_by_problem: dict[str, list[tuple[str, str]]] = {}
    configs: dict[tuple[str, str], Config] = {}
    for size, arm in experiment.size_arms:
        try:
            config = experiment.example_config(size, arm)
            configs[size, arm.name] = config
            evaluated_config = experiment.measurement_config(config)
            for checked_config in (config, evaluated_config):
                refuse_unused_temperatures(checked_config)
            if experiment.is_tuned:
                _check_tuned_groups(experiment.tune, config)
            if not problems:
                _check_metric(experiment, evaluated_config)
        except ConfigError as error:
            for problem in error.problems or [str(error)]:
                size_arms_by_problem.setdefault(str(problem), []).append((size, arm.name))
    problems += [f"{_size_arm_words(experiment, size_arms)}{text}" for text, size_arms in size_arms_by_problem.items()]
    for size in experiment.sizes:
        problems += _check_arms(
            experiment, [(arm, configs[size, arm.name]) for arm in experiment.arms if (size, arm.name) in configs]
        )
    problems += _check_sizes(experiment, configs)
    if problems:
        raise ConfigError(list(dict.fromkeys(map(str, problems))))


def _size_arm_words(experiment: Experiment, size_arms: list[tuple[str, str]]) -> str:
    """Name the sizes and arms that an error is about, for the beginning of its message. Return an empty text if it is
    about all of them, but always name a single size that has a name."""
    if len(size_arms) == len(experiment.sizes) * len(experiment.arms) and (
        len(experiment.sizes) > 1 or "" in experiment.sizes
    ):
        return ""
    words = []
    for size in experiment.sizes:
        arms = [arm for arm_size, arm in size_arms if arm_size == size]
        size_words = f"size {size}" if size else ""
        arm_words = [", ".join(filter(None, (f"arm {arm}", size_words))) for arm in arms]
        words += [size_words] if len(arms) == len(experiment.arms) else arm_words
    return "; ".join(words) + ": "


def _check_sizes(experiment: Experiment, configs: dict[tuple[str, str], Config]) -> Iterator[Problem]:
    size_by_hashes = {}
    for size, changes in experiment.sizes.items() if len(experiment.sizes) > 1 else ():
        hashes = tuple(config_hash(configs[size, arm.name]) for arm in experiment.arms if (size, arm.name) in configs)
        if hashes in size_by_hashes and len(hashes) == len(experiment.arms):
            yield Problem(f"sizes.{size}", changes, f"is the same as {size_by_hashes[hashes]}", "change it, or drop it")
        size_by_hashes.setdefault(hashes, size)


def _check_arms(experiment: Experiment, arms: list[tuple[Arm, Config]]) -> Iterator[Problem]:
    """Check that the arms of a size differ, read the same data, are measured on the same sequences, and fit the arms
    they start from.
    """
    name_by_identity, configs = {}, {}
    for arm, config in arms:
        baseline = arms[0][1]
        identity = f"{arm.source} {arm.branch_step} {arm.swap} {arm.trained} {config_hash(config)}"
        if identity in name_by_identity:
            yield Problem(
                f"arms.{arm.name}", arm.changes, f"is the same as {name_by_identity[identity]}", "change it, or drop it"
            )
        name_by_identity[identity], configs[arm.name] = arm.name, config
        if arm.branch_step is not None and arm.source in configs and config.trainer.max_steps:
            yield from _check_branch(arm, config, configs[arm.source])
        elif arm.source in configs:
            yield from _check_start(arm, config, configs[arm.source])
        other_keys = [
            f"data.{name}" for name in _STORE_KEYS if getattr(baseline.data, name) != getattr(config.data, name)
        ]
        if other_keys:
            reason, remedy = "reads other data than the baseline", f"give all arms one value of {', '.join(other_keys)}"
            yield Problem(f"arms.{arm.name}", arm.changes, reason, remedy)
        if (baseline.data.seq_len, baseline.eval) != (config.data.seq_len, config.eval):
            yield from _check_compared(experiment, arm, baseline, config)
        if _measured_tasks(experiment, config) != _measured_tasks(experiment, baseline):
            reason = f"measures {experiment.primary.metric} on other tasks than the baseline"
            remedy = "give all arms the same tasks, or name those of recall/... in `evaluate`: eval.recall.tasks"
            yield Problem(f"arms.{arm.name}", arm.changes, reason, remedy)


def _check_branch(arm: Arm, config: Config, source: Config) -> Iterator[Problem]:
    """Check an arm that continues another arm's run (`source`) from a step. The source must keep a checkpoint of this
    step, and steps must remain after it. The two may differ only in settings that may change during a run."""
    interval, steps = source.checkpoint_every, source.trainer.max_steps
    regular_steps = [step for step in range(1, steps + 1) if step % interval == 0 or step == steps]
    kept_steps = {*regular_steps[-source.trainer.keep_checkpoints :], *source.phase_ends[:-1]}
    if arm.branch_step not in kept_steps:
        reason = f"is no step that {arm.source} keeps a checkpoint of ({', '.join(map(str, sorted(kept_steps)))})"
        remedy = "set trainer.checkpoint_every to a divisor of it, and raise trainer.keep_checkpoints"
        yield Problem(f"arms.{arm.name}.step", arm.branch_step, reason, remedy)
    if config.trainer.max_steps <= arm.branch_step:
        reason = f"leaves no step after step {arm.branch_step} of {arm.source}"
        remedy = "raise it: it counts all steps from the first"
        yield Problem(f"arms.{arm.name}.trainer.max_steps", config.trainer.max_steps, reason, remedy)
    for path, (branch_value, source_value) in differences(
        to_plain(config, whole=True), to_plain(source, whole=True)
    ).items():
        if effect_of(path).on_resume == "same":
            reason = f"is {as_written(source_value)} in {arm.source}, which it branches from"
            yield Problem(
                f"arms.{arm.name}.{path}", branch_value, reason, "drop it: length, rate and schedule alone may differ"
            )


def _check_start(arm: Arm, config: Config, source: Config) -> Iterator[Problem]:
    """Check that an arm has the model of the arm whose weights it starts from, with the same normalizer unless `swap`
    replaces it.
    """
    if not arm.swap and config.plan[0].normalizer != source.plan[-1].normalizer:
        reason = f"has another normalizer than {arm.source}, whose weights it starts from"
        remedy = "swap it: `swap: {to: ...}`, or in during training: `phases`"
        yield Problem(f"arms.{arm.name}.from", arm.source, reason, remedy)
    for path, (value, source_value) in differences(
        *({"model": to_plain(side.model, whole=True)} for side in (config, source))
    ).items():
        if effect_of(path).affects == "model" and not path.startswith("model.normalizer"):
            reason = f"is {as_written(source_value)} in {arm.source}, whose weights it starts from"
            yield Problem(f"arms.{arm.name}.{path}", value, reason, "set it to that")
    if config.model.position.has_last_position and config.data.seq_len != source.data.seq_len:
        reason = f"is {source.data.seq_len} in {arm.source}, whose learned positions it starts from"
        yield Problem(f"arms.{arm.name}.data.seq_len", config.data.seq_len, reason, "set it to that")


def _check_compared(experiment: Experiment, arm: Arm, baseline: Config, config: Config) -> Iterator[Problem]:
    """Check that an arm is measured on the same sequences as the baseline, from which it differs in training length or
    evaluations.
    """
    metric = experiment.primary.metric
    if not experiment.evaluate:
        reason = "is measured on other sequences than the baseline"
        remedy = "give all arms one data.seq_len and one eval block, or say in `evaluate` what they are compared on"
        yield Problem(f"arms.{arm.name}", arm.changes, reason, remedy)
        return
    kind = kind_of_metric(metric)
    options = [
        experiment.measurement_config(arm_config).eval.measured_options(kind) for arm_config in (baseline, config)
    ]
    if options[0] != options[1] or (kind in _LENGTH_KINDS and baseline.data.seq_len != config.data.seq_len):
        reason = f"measures {metric} on other sequences than the baseline"
        remedy = "name a metric that `evaluate` measures alike in all arms, such as by_length/loss"
        yield Problem(f"arms.{arm.name}", arm.changes, reason, remedy)


def _measured_tasks(experiment: Experiment, config: Config) -> list[Plain]:
    """The recall tasks of the primary metric, or the training tasks if it is a validation loss on symbolic data; [] for
    other metrics.
    """
    metric, data, recall = experiment.primary.metric, config.data, experiment.measurement_config(config).eval.recall
    if kind_of_metric(metric) == "validation" and data.symbolic:
        return [to_plain(weighted_task) for weighted_task in data.tasks]
    tasks = [to_plain(task) for task in recall.asked_tasks(data)]
    conditions = [*product(lengths_from_factors(recall.length_factors, data), recall.inference)]
    named_tasks = zip(task_names(tasks), tasks, strict=True)
    return [
        task
        for name, task in named_tasks
        if metric in {recall.metric(name, length, setting.label) for length, setting in conditions}
    ]


def _check_tuned_groups(tune: Tune, config: Config) -> None:
    """Check that normalizers have parameters if `optim.groups.normalizer.*` is tuned. Raises ConfigError."""
    keys = [tuned_key for tuned_key in tune.keys if tuned_key.startswith("optim.groups.normalizer.")]
    options = [layer for phase in config.plan for layer in phase.normalizer.layer_options()] if keys else []
    with torch.device("meta"):
        has_parameters = any([*make_normalizer(option, LayerSpec(1, 2, 2, 2)).parameters()] for option in options)
    if keys and not has_parameters:
        reason = f"{config.model.normalizer.label()} has no parameters"
        raise ConfigError([Problem("tune.key", keys[0], reason, "tune it in a file of the arms that have some")])


def _check_metric(experiment: Experiment, config: Config) -> None:
    """Check that a run's evaluations log the primary metric by sequence, and that the other keys of `primary` fit this
    metric. With `primary.reach`, a level of the metric, it must be measured more than once, and all arms must be
    trained. Raises ConfigError.
    """
    metric, kinds = experiment.primary.metric, config.eval.measurement_classes(config.data)
    kind, steps = kind_of_metric(metric), config.trainer.max_steps
    names = {name: evaluation_names(config, name) for name in kinds}
    if kind not in kinds or (names[kind] is not None and metric not in names[kind]):
        known_names = [name for kind_names in names.values() for name in kind_names or ()]
        remedy = suggest(metric, known_names)
        if kind not in kinds and not remedy.startswith("did you mean"):
            remedy += "; or ask for the evaluation in the base's `eval` or in `evaluate`"
        raise ConfigError([Problem("primary.metric", metric, "is not measured by sequence at the last step", remedy)])
    _check_primary(experiment.primary, config.eval.quantity(kind))
    timing = ValidationTiming(every=config.validation_every) if kind == "validation" else config.eval.kinds.get(kind)
    if (
        experiment.primary.reach is not None
        and timing
        and sum(timing.is_due(step, steps) for step in range(1, steps + 1)) < 2
    ):
        key = "eval.every" if kind == "validation" else f"eval.{kind}.at"
        reason, remedy = f"{metric} is measured once, at the last step", f"measure it on the way: {key}"
        raise ConfigError([Problem("primary.reach", experiment.primary.reach, reason, remedy)])
    if experiment.primary.reach is not None and (
        untrained_arms := [arm.name for arm in experiment.arms if not arm.trained]
    ):
        reason = f"{untrained_arms[0]} is not trained"
        raise ConfigError([Problem("primary.reach", experiment.primary.reach, reason, "drop the arm, or train it")])


def _check_primary(primary: PrimaryMetric, quantity: Quantity | None) -> None:
    """Check that `better` is lower for a loss, higher for an accuracy, and that no accuracy in `primary` exceeds 1.
    Raises ConfigError.
    """
    problems, better = [], {"loss": "lower", "accuracy": "higher"}.get(quantity, primary.better)
    if primary.better != better:
        problems.append(
            Problem(
                "primary.better",
                primary.better,
                f"of {primary.metric}, {better} is better",
                f"write `better: {better}`",
            )
        )
    levels = {"matters": primary.matters} if primary.reach is None else {"reach": primary.reach}
    for name, level in levels.items() if quantity == "accuracy" else ():
        if level > 1:
            problems.append(
                Problem(
                    f"primary.{name}", level, f"{primary.metric} lies between 0 and 1", "give a fraction, such as 0.25"
                )
            )
    if problems:
        raise ConfigError(problems)


def _check_evaluate(experiment: Experiment) -> Iterator[Problem]:
    evaluation_keys = flatten(experiment.evaluate) if experiment.evaluate else {}
    if other_paths := [path for path in evaluation_keys if not path.startswith("eval.")]:
        for path in other_paths:
            yield Problem(
                f"evaluate.{path}", evaluation_keys[path], "is no key of an evaluation", "name keys of `eval`"
            )
        return
    try:
        overrides_in("eval", experiment.evaluate_overrides)
    except ConfigError as error:
        yield from (replace(problem, path=f"evaluate.{problem.path}") for problem in error.problems)
