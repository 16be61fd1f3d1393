"""Problems that involve several keys of a configuration: missing values, contradictory pairs."""

import math
from dataclasses import replace
from pathlib import Path

from lm.config.eval_config import no_tokens
from lm.config.training_config import WSD
from lm.config.tree import Config
from lm.errors import Problem
from lm.schema import own_problems


def check(config: Config) -> list[Problem]:
    """Problems beyond those of single keys: missing values and contradictory pairs."""
    problems = own_problems(config)

    def problem(wrong: bool, path: str, value: object, reason: str, remedy: str = "") -> None:
        if wrong:
            problems.append(Problem(path, value, reason, remedy))

    data, model, optim, trainer = config.data, config.model, config.optim, config.trainer
    problem(
        Path(config.name).name != config.name or config.name in ("", "..") or not config.name.isprintable() or len(config.name) > 100,
        "name", config.name, "must be the name of a folder: printable, at most 100 characters, without a path",
        "set name, and runs for the folder that holds it",
    )  # fmt: skip

    problem(
        data.symbolic and data.documents == "isolate",
        "data.documents", data.documents, "each sequence of a task is a document of its own", "drop it",
    )  # fmt: skip
    problems += check_phases(config)
    problem(
        model.position.ends and data.lengths.shorter,
        "data.lengths", data.lengths.name, "short sequences train the first learned positions only", "set model.position=rope",
    )  # fmt: skip

    problems += check_tasks(config)
    problem(
        model.transfer is not None and optim.optimizer.width_exponent is None,
        "optim.optimizer", optim.optimizer.name, "has no rule for rates that transfer (model.transfer)", "drop model.transfer",
    )  # fmt: skip

    step_length = data.seq_len * config.world_size
    below, above = optim.batch_tokens // step_length * step_length, -(-optim.batch_tokens // step_length) * step_length
    problem(
        optim.batch_tokens % step_length != 0,
        "optim.batch_tokens", optim.batch_tokens,
        f"is not a multiple of data.seq_len x devices x num_nodes = {step_length}",
        "set it to " + " or ".join(str(fit) for fit in (below, above) if fit),
    )  # fmt: skip
    if trainer.micro_batch and optim.batch_tokens % step_length == 0:
        problem(
            config.rank_sequences % trainer.micro_batch != 0,
            "trainer.micro_batch", trainer.micro_batch, f"does not divide the {config.rank_sequences} sequences of a process in a step",
            f"e.g. {math.gcd(config.rank_sequences, trainer.micro_batch)}",
        )  # fmt: skip
    problem(
        trainer.max_steps is None and trainer.tokens_per_parameter is None,
        "trainer.max_steps", None, "is not given", "set it, or trainer.tokens_per_parameter",
    )  # fmt: skip
    problem(
        bool(trainer.max_steps and trainer.tokens_per_parameter),
        "trainer.tokens_per_parameter", trainer.tokens_per_parameter, f"trainer.max_steps = {trainer.max_steps} is given, too", "drop one",
    )  # fmt: skip
    problem(
        bool(config.train_only) and not config.init_from and model.out_init == "zero",
        "train_only", config.train_only, "with model.out_init = zero blocks of new weights add nothing: normalizers have no gradient",
        "name weights to go on from in init_from, or drop one",
    )  # fmt: skip
    if trainer.max_steps:
        problems += check_steps(config)
    problems += no_tokens("eval.swap_lengths", config.eval.swap_lengths, data)
    normalizers = [phase.normalizer for phase in config.plan]
    for kind, options in config.eval.kinds.items():
        found = options.misspelt(normalizers) + (options.conflicts(data, model) if options.wanted(data) else [])
        problems += [replace(one, path=f"eval.{kind}.{one.path}") for one in found]
    return problems


def check_steps(config: Config) -> list[Problem]:
    """What the number of steps, which is given or known by now, leaves no room for: lengths, warm-up, decay, phases, a profile, sources
    and tasks."""
    data, optim, steps, phases, ends = config.data, config.optim, config.trainer.max_steps, config.phases, config.phase_ends
    profile = config.trainer.profile
    problems = data.lengths.conflicts(data.seq_len, steps, one_source=len(data.sources) == 1 and not data.tasks)
    if optim.warmup_steps > steps:
        problems.append(Problem("optim.warmup_steps", optim.warmup_steps, f"is more than trainer.max_steps = {steps}", "lower it"))
    if isinstance(optim.schedule, WSD) and optim.warmup_steps + round(optim.schedule.decay_fraction * steps) > steps:
        reason = f"leaves less than optim.warmup_steps = {optim.warmup_steps} of {steps} steps for the warm-up"
        problems.append(Problem("optim.schedule.decay_fraction", optim.schedule.decay_fraction, reason, "lower one of them"))
    if profile and profile.first > steps:
        reason = f"is after the last step, trainer.max_steps = {steps}: nothing would be recorded"
        problems.append(Problem("trainer.profile.first", profile.first, reason, "lower it"))
    for index, phase in enumerate(phases):
        where, start = f"phases[{index}]", ends[index - 1] if index else 0
        if index and phase.until <= phases[index - 1].until:
            continue  # `check_phases` says so
        if ends[index] <= start:
            reason = f"leaves the phase no step of trainer.max_steps = {steps}"
            problems.append(Problem(f"{where}.until", phase.until, reason, "raise it, or train for more steps"))
        elif phase.warmup_steps > ends[index] - start:
            reason = f"is more than the {ends[index] - start} steps of the phase"
            problems.append(Problem(f"{where}.warmup_steps", phase.warmup_steps, reason, "lower it"))
    return problems + check_weights(config)


def check_phases(config: Config) -> list[Problem]:
    """What is wrong with `phases`: their order, their normalizers."""
    problems, phases = [], config.phases
    for index, phase in enumerate(phases):
        if index and phase.until <= phases[index - 1].until:
            reason = f"is not after phases[{index - 1}].until = {phases[index - 1].until}"
            problems.append(Problem(f"phases[{index}].until", phase.until, reason, "raise it"))
    if not phases:
        return problems
    if phases[-1].until != 1:
        problems.append(Problem(f"phases[{len(phases) - 1}].until", phases[-1].until, "the last phase must end at 1", "set it to 1"))
    if phases[0].warmup_steps:
        reason = "follows no swap, so there is nothing to warm up"
        problems.append(Problem("phases[0].warmup_steps", phases[0].warmup_steps, reason, "set optim.warmup_steps"))
    if config.model.normalizer != phases[0].normalizer:
        reason = f"phases[0].normalizer is {phases[0].normalizer.name}, which training starts with"
        problems.append(Problem("model.normalizer", config.model.normalizer.name, reason, "drop model.normalizer, or make them agree"))
    return problems


def check_weights(config: Config) -> list[Problem]:
    """Tasks and sources whose weights give less than one sequence of the run: they may never be drawn."""
    data, text = config.data, 1 - sum(weighted.weight for weighted in config.data.tasks)
    weights = {f"data.tasks[{index}].weight": (weighted.weight, weighted.weight) for index, weighted in enumerate(data.tasks)}
    if len(data.sources) > 1 and text > 1e-6:
        weights |= {f"data.source.of[{index}].weight": (source.weight, source.weight * text) for index, source in enumerate(data.sources)}
    sequences = config.trainer.max_steps * (config.optim.batch_tokens // data.seq_len)
    remedy = "raise it, train for more steps, or leave it out"
    return [
        Problem(path, weight, f"gives {fraction * sequences:.2g} of the {sequences:,} sequences of the run, and may never be drawn", remedy)
        for path, (weight, fraction) in weights.items()
        if weight > 0 and fraction * sequences < 1 - 1e-6
    ]


def check_tasks(config: Config) -> list[Problem]:
    """What is wrong with `data.tasks`: contradictory options, weights, symbols among text."""
    data, problems = config.data, []
    if not data.tasks:
        return []
    for index, weighted in enumerate(data.tasks):
        if data.symbolic and weighted.weight * config.eval.sequences < 1 - 1e-6:
            reason = f"gives less than one of eval.sequences = {config.eval.sequences} validation sequences: its loss would not be measured"
            problems.append(Problem(f"data.tasks[{index}].weight", weighted.weight, reason, "raise eval.sequences"))
        different = weighted.task.distinct(data.seq_len, "test")
        if data.symbolic and weighted.weight * config.eval.sequences > max(1, different):
            reason = f"can't all differ: {weighted.task.name} has about {different:,.0f} test sequences of {data.seq_len} tokens"
            problems.append(Problem("eval.sequences", config.eval.sequences, reason, "lower it, or give the task more symbols or length"))
    weights = sum(weighted.weight for weighted in data.tasks)
    if weights > 1 + 1e-6:
        problems.append(Problem("data.tasks", weights, "weights sum to more than 1", "lower them"))
    if any(weighted.task.vocab_size for weighted in data.tasks) and (not data.symbolic or weights < 1 - 1e-6):
        names = ", ".join(weighted.task.name for weighted in data.tasks if weighted.task.vocab_size)
        reason = "use a vocabulary of symbols, which text and tasks in text don't have"
        problems.append(Problem("data.tasks", names, reason, "give such tasks alone weights that sum to 1"))
    return problems
