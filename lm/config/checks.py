"""What a configuration's single keys can't say: missing values, contradictory pairs."""

from dataclasses import replace
from pathlib import Path

from lm.config.training_config import WSD
from lm.config.tree import Config
from lm.errors import Problem
from lm.schema import own_problems


def check(config: Config) -> list[Problem]:
    """What single keys can't say: missing values and contradictory pairs."""
    problems = own_problems(config)

    def problem(wrong: bool, path: str, value: object, reason: str, remedy: str = "") -> None:
        if wrong:
            problems.append(Problem(path, value, reason, remedy))

    data, model, optim, trainer = config.data, config.model, config.optim, config.trainer
    problem(
        not config.name or Path(config.name).name != config.name or config.name in (".", ".."),
        "name", config.name, "must be the name of a folder, without a path", "set name, and runs for the folder that holds it",
    )  # fmt: skip

    problem(
        data.symbolic and data.documents == "isolate", "data.documents", "isolate", "rows of tasks are documents by themselves", "drop it"
    )
    problems += check_phases(config)

    problems += check_lengths(config)

    problems += check_tasks(config) + check_shares(config)

    step_row = data.seq_len * config.world_size
    below, above = optim.batch_tokens // step_row * step_row, -(-optim.batch_tokens // step_row) * step_row
    problem(
        optim.batch_tokens % step_row != 0,
        "optim.batch_tokens", optim.batch_tokens,
        f"is not a multiple of data.seq_len x devices x num_nodes = {step_row}",
        "set it to " + " or ".join(str(fit) for fit in (below, above) if fit),
    )  # fmt: skip
    if trainer.micro_batch and optim.batch_tokens % step_row == 0:
        problem(
            config.rank_rows % trainer.micro_batch != 0,
            "trainer.micro_batch", trainer.micro_batch, f"does not divide the {config.rank_rows} rows a process has in a step",
        )  # fmt: skip
    problem(
        optim.warmup_steps > trainer.max_steps,
        "optim.warmup_steps", optim.warmup_steps, f"is more than trainer.max_steps = {trainer.max_steps}",
    )  # fmt: skip
    if isinstance(optim.schedule, WSD):
        decay = round(optim.schedule.decay_fraction * trainer.max_steps)
        problem(
            optim.warmup_steps + decay > trainer.max_steps,
            "optim.schedule.decay_fraction", optim.schedule.decay_fraction,
            f"leaves less than optim.warmup_steps = {optim.warmup_steps} of {trainer.max_steps} steps for the warm-up",
        )  # fmt: skip
    normalizers = [phase.normalizer for phase in config.plan]
    for kind, options in config.eval.kinds.items():
        found = options.misspelt(normalizers) + (options.conflicts(data, model) if options.wanted(data) else [])
        problems += [replace(one, path=f"eval.{kind}.{one.path}") for one in found]
    return problems


def check_lengths(config: Config) -> list[Problem]:
    """What is wrong with `data.lengths`."""
    lengths, seq_len, steps = config.data.lengths, config.data.seq_len, config.trainer.max_steps
    reasons = []
    if lengths == "documents":
        if len(config.data.parts) > 1:
            reasons.append("takes documents as they come, whatever the weights of a mixture: give lengths")
        if seq_len < 16 or seq_len & (seq_len - 1):
            reasons.append(f"needs a data.seq_len that is a power of two of 16 or more, not {seq_len}")
        chosen = []
    elif isinstance(lengths, dict) and 0 in lengths:
        chosen, shares = list(lengths.values()), list(lengths)
        firsts = [round(share * steps) for share in sorted(shares)]
        if not all(0 <= share < 1 for share in shares):
            reasons.append("a length must begin at a share of the run from 0 on and below 1")
        elif len(set(firsts)) < len(firsts):
            reasons.append(f"leaves a length no step of trainer.max_steps = {steps}")
    elif isinstance(lengths, dict) and any(0 < name < 1 for name in lengths):
        chosen = []
        reasons.append("lengths that follow each other begin at 0.0, e.g. {0.0: 32, 0.5: 64}")
    elif isinstance(lengths, dict):
        chosen = list(lengths)
        if not all(share > 0 for share in lengths.values()) or abs(sum(lengths.values()) - 1) > 1e-6:
            reasons.append(f"shares must be above 0 and sum to 1, not to {sum(lengths.values()):g}")
        if not chosen:
            reasons.append("names no length")
        if rare := [length for length, share in lengths.items() if 0 < share * steps < 1 - 1e-6]:
            reasons.append(f"gives rows of {rare[0]} less than one step of trainer.max_steps = {steps}")
    else:
        chosen = [] if lengths is None else [lengths]
    wrong = [length for length in chosen if length != int(length) or length < 2 or seq_len % length]
    if wrong:
        reasons.append(f"{wrong[0]:g} does not divide data.seq_len = {seq_len} into rows of 2 tokens and more")
    if config.model.position.ends and lengths is not None:
        reasons.append("short rows train the first learned positions only: set model.position=rope")
    return [Problem("data.lengths", lengths, reason) for reason in reasons]


def check_phases(config: Config) -> list[Problem]:
    """What is wrong with `phases`: their order, their ends, their normalizers."""
    problems = []
    phases, ends = config.phases, config.phase_ends
    for index, phase in enumerate(phases):
        where = f"phases[{index}]"
        start = ends[index - 1] if index else 0
        if index and phase.until <= phases[index - 1].until:
            problems.append(Problem(f"{where}.until", phase.until, f"is not after phases[{index - 1}].until = {phases[index - 1].until}"))
        elif ends[index] <= start:
            problems.append(
                Problem(f"{where}.until", phase.until, f"leaves the phase no step of trainer.max_steps = {config.trainer.max_steps}")
            )
        elif phase.warmup_steps > ends[index] - start:
            reason = f"is more than the {ends[index] - start} steps of the phase"
            problems.append(Problem(f"{where}.warmup_steps", phase.warmup_steps, reason))
    if not phases:
        return problems
    if phases[-1].until != 1:
        problems.append(Problem(f"phases[{len(phases) - 1}].until", phases[-1].until, "the last phase must end at 1"))
    if phases[0].warmup_steps:
        problems.append(Problem("phases[0].warmup_steps", phases[0].warmup_steps, "warms up from no swap", "set optim.warmup_steps"))
    if config.model.normalizer != phases[0].normalizer:
        reason = f"phases[0].normalizer is {phases[0].normalizer.name}, which training starts with"
        problems.append(Problem("model.normalizer", config.model.normalizer.name, reason, "drop model.normalizer, or make them agree"))
    return problems


def check_shares(config: Config) -> list[Problem]:
    """Weights of which a run has less than one row: it would be drawn by luck, if at all."""
    data, text = config.data, 1 - sum(share.weight for share in config.data.tasks)
    weights = {f"data.tasks[{index}].weight": (share.weight, share.weight) for index, share in enumerate(data.tasks)}
    if len(data.parts) > 1 and text > 1e-6:
        weights |= {f"data.source.of[{index}].weight": (part.weight, part.weight * text) for index, part in enumerate(data.parts)}
    rows = config.trainer.max_steps * (config.optim.batch_tokens // data.seq_len)
    remedy = "raise it, train for more steps, or leave it out"
    return [
        Problem(path, weight, f"comes to {share * rows:.2g} of the {rows:,} rows of the run, and may never be drawn", remedy)
        for path, (weight, share) in weights.items()
        if weight > 0 and share * rows < 1 - 1e-6
    ]


def check_tasks(config: Config) -> list[Problem]:
    """What is wrong with `data.tasks`: contradictory options, weights, symbols among text."""
    data, problems = config.data, []
    if not data.tasks:
        return []
    for index, share in enumerate(data.tasks):
        if data.symbolic and share.weight * config.eval.rows < 1 - 1e-6:
            reason = f"comes to less than one of eval.rows = {config.eval.rows} validation rows: its loss would not be measured"
            problems.append(Problem(f"data.tasks[{index}].weight", share.weight, reason, "raise eval.rows"))
    weights = sum(share.weight for share in data.tasks)
    if weights > 1 + 1e-6:
        problems.append(Problem("data.tasks", weights, "weights sum to more than 1"))
    if any(share.task.vocab_size for share in data.tasks) and (not data.symbolic or weights < 1 - 1e-6):
        names = ", ".join(share.task.name for share in data.tasks if share.task.vocab_size)
        reason = "are over symbols of their own, which text and tasks in text don't share"
        problems.append(Problem("data.tasks", names, reason, "give such tasks alone weights that sum to 1"))
    if data.lengths == "documents":
        problems.append(Problem("data.lengths", data.lengths, "tasks have no documents", "give lengths, or drop data.tasks"))
    return problems
