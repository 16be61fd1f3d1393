"""The plan of an experiment, printed before anything is done: its runs, what each costs, and how many seeds a difference takes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from lm.config.tree import Config
from lm.data.prepare import vocabulary
from lm.experiments.experiment import SHARED, Experiment, Primary
from lm.experiments.procedure import Procedure
from lm.model.decoder import Decoder, group_of, is_normalizer
from lm.model.spec import count_parameters, flops_per_token
from lm.statistics.intervals import ALPHA
from lm.statistics.learned import fewest_seeds
from lm.statistics.verdicts import POWER, seeds_needed

_TOKENIZER_BYTES, _VALUE_BYTES = 65, 70  # of an entry of tokenizer.json, and of a validation loss of one sequence in JSON


@dataclass(frozen=True)
class Cost:
    """The resources that one run takes.

    Attributes:
        parameters: of the model.
        tokens: trained on.
        flops: of training.
        disk: bytes of its run folder at the end, if the last checkpoint is the best one: checkpoints, tokenizer, validation losses.
    """

    parameters: int
    tokens: int
    flops: int
    disk: int


def cost(config: Config, vocab_size: int) -> Cost:
    """The resources that a run of this configuration and vocabulary takes."""
    decoder, trainer = _on_meta(config, vocab_size), config.trainer
    parameters, tokens = count_parameters(decoder), config.optim.batch_tokens * trainer.max_steps
    trained = {name: p for name, p in decoder.named_parameters() if not config.train_only or is_normalizer(name)}
    state = sum(config.optim.optimizer.kept(group_of(name, p)) * p.numel() for name, p in trained.items())
    checkpoint = 4 * (parameters["total"] + state)  # fp32
    kept = min(trainer.keep_checkpoints, -(-trainer.max_steps // config.checkpoint_every)) + len(config.phase_ends) - 1
    validations = -(-trainer.max_steps // config.validation_every) * config.eval.sequences * _VALUE_BYTES
    disk = kept * checkpoint + vocab_size * _TOKENIZER_BYTES + 2 * validations  # each is kept a second time, for `lm eval`
    return Cost(parameters["total"], tokens, flops_per_token(decoder) * tokens, disk)


def _on_meta(config: Config, vocab_size: int) -> Decoder:
    with torch.device("meta"):
        return Decoder(config.model_in(0), vocab_size, config.data.seq_len, seed=None)


Costs = dict[tuple[str, str], Cost]  # of a run, by size and arm


def costs(procedure: Procedure) -> Costs | None:
    """The resources that a run of each size and arm takes; None where the size of the vocabulary can't be known before the text is
    prepared."""
    experiment = procedure.experiment
    known = vocabulary(experiment.first_config.data)
    if known is None:
        return None
    seed, rate = experiment.seeds[0], experiment.first_rate
    found = {}
    for size in experiment.sizes:
        for arm in experiment.arms:
            config = experiment.config(size, arm, seed, rate, {"name": "any"})
            taken = cost(config, known)
            found[size, arm.name] = taken if arm.trained else replace(taken, tokens=0, flops=0)
            if arm.step is not None:  # those before it are the other arm's
                left = 1 - arm.step / config.trainer.max_steps
                found[size, arm.name] = replace(taken, tokens=round(taken.tokens * left), flops=round(taken.flops * left))
    return found


def plan(procedure: Procedure, taken: Costs | None, time: str, where: str = "") -> Iterator[str]:
    """Lines: the runs, their tokens, FLOPs and disk (`taken`, by `costs`) and `time`, what they share, how many seeds a difference of
    interest takes, and `where` the runs compute."""
    experiment = procedure.experiment
    tune, primary, sizes = experiment.tune, experiment.primary, list(experiment.sizes)
    yield f"experiment {experiment.name} in {experiment.folder}: " + ", ".join(arm.name for arm in experiment.arms)
    for (size, arm), each in (taken or {}).items():
        name = " ".join(filter(None, (size, arm)))
        yield f"  {name}: {each.parameters / 1e6:.2f} M parameters, {each.tokens / 1e6:.2f} M tokens, {_bytes(each.disk)} on disk a run"
    tuned = f"tuning {tune.key} over {', '.join(f'{rate:g}' for rate in tune.grid)} with seeds {', '.join(map(str, tune.seeds))}"
    tuned = tuned if tune.grid else f"{tune.key} as chosen from {tune.table}" if tune.table else "no tuning"
    yield f"{tuned}; final seeds {', '.join(map(str, experiment.seeds))}"
    counts = {(size, arm): number for size in sizes for arm, number in procedure.n_runs(size, len(experiment.seeds)).items()}
    number, more = (
        sum(counts.values()),
        "; the grid may grow twice, and final seeds are trained at each chosen rate: two are counted" if tune.grid else "",
    )
    untrained = sum(counts[size, arm.name] for size in sizes for arm in experiment.arms if not arm.trained)
    runs = f"{number} runs" + (f" ({untrained} of them are measured without training)" if untrained else "")
    if taken:
        totals = (sum(counts[place] * getattr(each, name) for place, each in taken.items()) for name in ("tokens", "flops", "disk"))
        tokens, flops, disk = totals
        yield f"{runs}, {tokens / 1e6:.1f} M tokens, {flops:.2e} FLOPs, about {_bytes(disk)} on disk{more}"
    else:
        why = "the vocabulary is not known before the text is there: lm prepare makes it"
        yield f"{runs}{more}; tokens, FLOPs and disk: {why}"
    yield f"time: {time}"
    known = procedure.known()
    yield f"done: {sum(one.outcome.ended for one in known)} of the {len(known)} runs known so far"
    yield f"primary metric {primary.metric}, {primary.better} is better; {_seeds(primary, ALPHA / experiment.intervals)}"
    more = () if experiment.limited else experiment.more_seeds
    yield from procedure.judged().power(len({*experiment.seeds, *more}))
    yield from procedure.notes()
    yield f"runs compute with {_settings(experiment)}" + (f"; {where}" if where else "")


def _settings(experiment: Experiment) -> str:
    """Precision, compilation and threads of the runs; where sizes or arms differ in one, which have what."""
    seed, rate, found = experiment.seeds[0], experiment.first_rate, {name: {} for name in SHARED}
    for size in experiment.sizes:
        for arm in experiment.arms:
            trainer = experiment.config(size, arm, seed, rate, {"name": "any"}).trainer
            for name, having in found.items():
                having.setdefault(getattr(trainer, name), []).append(" ".join(filter(None, (size, arm.name))))
    values = {name: ", ".join(f"{one} ({', '.join(places)})" for one, places in having.items()) for name, having in found.items()}
    return "; ".join(f"{name} {values[name] if len(having) > 1 else next(iter(having))}" for name, having in found.items())


def _seeds(primary: Primary, alpha: float) -> str:
    """How many seeds a difference takes."""
    if primary.learned is not None:
        return f"a run has learned if it reaches {primary.learned:g}; a difference can be shown from {fewest_seeds(alpha)} seeds on"
    runs = "single runs" if primary.reach is None else "the logarithms of single runs"
    margin, what = primary.matters, f"a difference of {primary.matters:g}"
    if primary.reach is not None:
        margin, what = math.log1p(primary.matters), f"a factor of {1 + primary.matters:g} in {primary.quantity}"
    needed = ", ".join(f"{seeds_needed(each, margin, alpha)} at {each:.3g}" for each in (margin / 2, margin, 2 * margin))
    return f"seeds to find {what} with probability {POWER:g}, by the standard deviation of differences between {runs}: {needed}"


def _bytes(number: float) -> str:
    """An amount of disk in words."""
    for unit in ("kB", "MB", "GB"):
        number /= 1000
        if number < 1000:
            return f"{number:.3g} {unit}"
    return f"{number / 1000:.3g} TB"
