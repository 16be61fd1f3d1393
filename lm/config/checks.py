"""What a configuration's single keys can't say: missing values, contradictory pairs."""

from pathlib import Path

from lm.config.inference_config import InferenceSetting
from lm.config.task_config import Task
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
    long = config.eval.long_context
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
    problem(
        0 < long.length_factor < 1,
        "eval.long_context.length_factor", long.length_factor, "is shorter than a training row", "set it to 1 or more, or 0 for off",
    )  # fmt: skip
    problem(
        model.position.ends and long.length_factor > 1,
        "eval.long_context.length_factor", long.length_factor,
        "learned positions end at the training length", "set it to 1 or 0, or model.position=rope",
    )  # fmt: skip
    if long.length_factor:
        problems += check_settings(config, "eval.long_context.settings", long.settings)
    return problems + check_needle(config) + check_recall(config)


def check_needle(config: Config) -> list[Problem]:
    """What is wrong with `eval.needle`."""
    needle, where = config.eval.needle, "eval.needle.length_factors"
    if not needle.length_factors:
        return [Problem("eval.needle.heads_at", needle.heads_at, f"{where} is []", f"set {where}")] if needle.heads_at else []
    problems = check_settings(config, "eval.needle.settings", needle.settings)
    if config.data.symbolic:
        problems.append(Problem(where, needle.length_factors, "needs a model of text", "set it to []"))
    if config.model.position.ends and max(*needle.length_factors, needle.heads_at or 0) > 1:
        problems.append(Problem(where, needle.length_factors, "learned positions end at the training length", "set it to [1]"))
    return problems


def check_recall(config: Config) -> list[Problem]:
    """What is wrong with `eval.recall`."""
    recall, data = config.eval.recall, config.data
    if not recall.length_factors or not (data.tasks or recall.tasks):
        return []
    problems = check_settings(config, "eval.recall.settings", recall.settings)
    for index, task in enumerate(recall.tasks):
        if not isinstance(task, Task):
            continue  # it has its problem already
        where = f"eval.recall.tasks[{index}]"
        if task.vocab_size and not data.symbolic:
            reason = "is over symbols that this model was not trained on"
            problems.append(Problem(where, task.name, reason, "name a task in text, needle or passkey"))
        elif data.symbolic and not task.vocab_size:
            problems.append(Problem(where, task.name, "is in text, and this model knows none", "name one of data.tasks"))
        elif task.vocab_size and task.vocab_size > (known := max(share.task.vocab_size for share in data.tasks)):
            problems.append(
                Problem(where, task.name, f"has {task.vocab_size} symbols, the model {known}", "set its options as in data.tasks")
            )
    longest = max(recall.length_factors)
    if config.model.position.ends and longest > 1:
        reason = "learned positions end at the training length"
        problems.append(Problem("eval.recall.length_factors", longest, reason, "leave longer rows out, or set model.position=rope"))
    return problems


def check_settings(config: Config, where: str, settings: list[InferenceSetting]) -> list[Problem]:
    """What is wrong with the inference settings at `where`."""
    position, problems = config.model.position, []
    if not settings or any(setting in settings[:index] for index, setting in enumerate(settings)):
        problems.append(Problem(where, [s.label for s in settings], "must be a list of different settings", "set it to [{}]"))
    for index, setting in enumerate(settings):
        if setting.rope.name != "as_trained" and not position.rotates:
            reason = f"model.position = {position.name} has no RoPE to scale"
            problems.append(Problem(f"{where}[{index}].rope", setting.rope.name, reason, f"set {where}=[{{}}]"))
        problems += setting.normalizers([phase.normalizer for phase in config.plan], f"{where}[{index}].normalizer")[1]
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
    long = config.eval.long_context.length_factor
    if data.symbolic and long:
        reason = "there is no text to read beyond the training length"
        problems.append(Problem("eval.long_context.length_factor", long, reason, "set it to 0; eval.recall has longer rows of the tasks"))
    return problems
