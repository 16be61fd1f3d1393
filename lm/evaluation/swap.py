"""`lm swap`: a copy of a trained model with another normalizer, and what that did to loss, next-token distributions and attention."""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lm.attention.catalogue import OPTIONS
from lm.config.eval_config import Timing
from lm.config.load import merge, overrides_in, parse, to_yaml
from lm.config.tree import Config
from lm.data.batches import Batch, long_starts, train_sequences
from lm.data.store import Store
from lm.errors import ConfigError, Problem, RunError
from lm.evaluation.evaluate import on_text, open_device, open_store, text_config
from lm.evaluation.evaluation_kind import Advance, Measurement, ignore, weights_sha256
from lm.evaluation.held_out import NATS, HeldOut, by_position, by_sequence, by_token, lengths_axis, validation_sequences
from lm.files import file_sha256, new_folder, write_text
from lm.model.attention_stream import in_lockstep
from lm.model.cross_entropy import token_kl, token_nll
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.model.spec import count_parameters
from lm.model.swapped import fit, score_factors, swapped
from lm.plugins import PLUGINS
from lm.runs.checkpoints import link_checkpoint, save_checkpoint
from lm.runs.evaluations import Axis, Evaluation, Series, Shown
from lm.runs.folder import CHECKPOINTS, CONFIG, ENVIRONMENT, LAST, TOKENIZER, command_line, step_path, write_json
from lm.runs.loading import TOKENIZER_SHA256, Loaded, load
from lm.runs.metadata import FORMAT
from lm.runs.record import arm
from lm.schema import Plain, Unavailable, suggest, to_plain

DRIFT_SEQUENCES = 4  # sequences of each length whose attention weights are compared


def swap_sequences(store: Store, config: Config) -> list[HeldOut]:
    """Held-out sequences of each of `eval.swap_lengths`, ascending: the validation sequences, and others within documents.

    Lengths that no held-out document has are left out, and those beyond the training length where positions are learned.
    """
    sequences = []
    for length in sorted({int(factor * config.data.seq_len) for factor in config.eval.swap_lengths}):
        if length == config.data.seq_len:
            sequences.append(validation_sequences(store, config))
        elif length < config.data.seq_len or not config.model.position.ends:
            starts = long_starts(store.val, length, config.eval.long_context.sequences)
            sequences += [HeldOut.take(store, starts, length)] if len(starts) else []
    return sequences


class SwapMeasurement(Measurement):
    """A decoder after a swap of its normalizer beside the one before it, on identical tokens, without a change to RoPE.

    For each length: loss before and after (nats per token) and KL(before || after) of the next-token distributions (nats), by
    position; the change of the loss with its interval over documents; and the attention drift of each layer.
    """

    kind = "swap"

    def __init__(self, config: Config, store: Store, before: Decoder):
        super().__init__(config, store)
        self.before, self.held_out = before, swap_sequences(store, config)

    @property
    def asked(self) -> Timing:
        return Timing()  # measured whenever a swap is made

    @property
    def options(self) -> dict[str, Plain]:
        return {
            "before": self.before.config.normalizer.label(),
            "weights_before_sha256": weights_sha256(self.before),
            "sequences_sha256": [held_out.sha256 for held_out in self.held_out],
        }

    @property
    def work(self) -> int:
        return sum(len(held_out.sequences) for held_out in self.held_out)

    def measure(self, decoder: Decoder, where: Device, progress: Advance) -> list[Series]:
        models = [self.before.to(where.device), decoder]
        compared_at = [compared(*models, held_out, where, progress) for held_out in self.held_out]
        series, fingerprint = [], {"data_fingerprint": self.fingerprint}
        for first, (held_out, values) in enumerate(zip(self.held_out, compared_at, strict=True)):
            what = f"sequences of {held_out.length:,}"
            for (metric, name), numbers in zip(_METRICS.items(), values, strict=True):
                fields = {"what": what, "logged": () if first else (f"swap/{name}",)} | fingerprint
                series.append(self._by_position(metric, numbers, held_out, **fields))
            drift = attention_drift(*models, held_out, where)
            layers = Axis("layer", "", "of layer", tuple(range(len(drift))), log=False)
            series.append(self.series("attention drift", "", "lower", drift, what=what, axis=layers, **fingerprint))
        if self.held_out:
            series.append(self._by_length("change of loss", [after - before for before, after, _ in compared_at]))
            series.append(self._by_length("KL divergence", [kl for _, _, kl in compared_at]))
        return series

    def _by_position(self, metric: str, values: np.ndarray, held_out: HeldOut, **fields: object) -> Series:
        """Means of `values` (sequences, length) in buckets of positions; one number where only answers count."""
        if held_out.answers is not None:
            return self.series(metric, NATS, "lower", values.mean(where=held_out.counts), **fields)
        return self.series(metric, NATS, "lower", **by_position(held_out, values, self.config.data.seq_len), **fields)

    def _by_length(self, metric: str, values: list[np.ndarray]) -> Series:
        """Means of `values`, (sequences, length) of each length, with intervals over documents; for reports."""
        means, samples = zip(*(held_out.means(numbers) for held_out, numbers in zip(self.held_out, values, strict=True)), strict=True)
        amount = "; ".join(f"{len(held_out.sequences):,} of {held_out.length:,} tokens" for held_out in self.held_out)
        title = f"{metric[0].upper()}{metric[1:]} at the swap of the normalizer"
        return self.series(
            metric, NATS, "lower", np.array(means), axis=lengths_axis(held_out.length for held_out in self.held_out),
            samples=samples, interval="documents", data_fingerprint=self.fingerprint,
            shown=Shown(title, "sequences around the swap", amount, f"{metric} at the swap, by sequence length"),
        )  # fmt: skip


_METRICS = {"loss before": "loss_before", "loss after": "loss_after", "KL divergence": "kl"}  # with their names in the metrics log


def compared(old: Decoder, new: Decoder, held_out: HeldOut, where: Device, progress: Advance = ignore) -> np.ndarray:
    """For every predicted token -log p under both models and KL(old || new): (3, N, length) float64, nats. Collective."""

    def measure(batch: Batch) -> Tensor:
        with where.autocast():
            hidden = [model.hidden(batch).flatten(0, 1) for model in (old, new)]
        losses = [token_nll(h, model.head, batch.targets.flatten()) for h, model in zip(hidden, (old, new), strict=True)]
        return torch.stack([*losses, token_kl(hidden[0], old.head, hidden[1], new.head)]).view(3, *batch.targets.shape)

    return by_token([old, new], held_out, where, measure, numbers=3, progress=progress).astype("f8")


def attention_drift(old: Decoder, new: Decoder, held_out: HeldOut, where: Device) -> np.ndarray:
    """Half the L1 distance between both models' attention weights, a mean over queries and heads: (layers,) float64.

    0 for equal attention, at most 1 for weights that sum to one; layers above the first see what the layers below have changed. On the
    first `DRIFT_SEQUENCES` sequences. Collective.
    """
    layers, count = old.config.n_layer, min(DRIFT_SEQUENCES, len(held_out.sequences))

    def measure(part: list[int]) -> Tensor:
        drift = torch.zeros(len(part), layers, dtype=torch.float64)
        for place, index in enumerate(part):  # one at a time: attention weights are large
            with where.autocast():
                for a, b in in_lockstep([old, new], held_out.batch([index]).to(where.device)):
                    distance = (a.weights - b.weights).abs().sum((0, 2, 3), dtype=torch.float64).mean()
                    drift[place, a.layer] += float(distance) / 2 / held_out.length
        return drift.float()

    return by_sequence([old, new], [held_out.length] * count, (layers,), where, measure).mean(0, dtype=np.float64)


# ---------------------------------------------------------------- lm swap


SHORT_LENGTHS = (16, 256)  # tokens, as of prompts, at which the factor on the scores is printed
FAR = 2.0  # a factor on the scores that is more than so many times the old one, or less than that part of it, is warned of
FIT_TOKENS, FIT_BATCHES = 2048, 8  # what `--init fit` reads


@dataclass(frozen=True, eq=False)
class SwapResult:
    """The evaluation of a swap, the file of its numbers, and words: lines about the models, those that follow its tables, a warning."""

    evaluation: Evaluation
    path: Path
    models: list[str]
    notes: list[str]
    warning: str


def swap_run(
    source: Path, checkpoint: str, to: str, init: str | None, out: Path, overrides: list[str], files: Sequence[Path] = ()
) -> SwapResult:
    """`lm swap`: a copy of a trained model with another normalizer, as a run folder `out` that holds weights alone.

    Measures both models on identical held-out tokens; the result is kept in `out`'s evaluations/ and returned.

    Args:
        source: a run folder, a checkpoint or an export.
        checkpoint: of a run folder: `last`, `best` or a step.
        to: name of the new normalizer.
        init: initial values of its parameters: `match`, `unit`, `fit` or a number; None: its default, or as `overrides` say.
        overrides: `key=value` of the new normalizer's options and of evaluation.
        files: configurations of the text to measure on, of a model without a training run.

    Raises LMError: nothing to load, a pair that can't be swapped, other data than it was trained on, `out` not empty.
    """
    with new_folder(out) as folder:
        loaded = load(source, checkpoint)
        if files:
            loaded = replace(loaded, config=_text_config(loaded, files, overrides))
        elif loaded.config is None:
            remedy = f"name a configuration of text, e.g. lm swap {source} configs/sotu.yaml --to {to} -o {out}"
            raise RunError(f"{source}: has no training run behind it, of whose text a swap could be measured; {remedy}")
        with PLUGINS.trusted():
            config = _swapped_config(loaded, to, init, out, overrides)
        old, new = loaded.decoder, swapped(loaded.decoder, config.model.normalizer)
        label = new.config.normalizer.label()
        if init == "fit" and not count_parameters(new)["normalizer"]:
            raise ConfigError([Problem("--init", init, f"{label} has no parameters to fit", "drop --init")])
        loaded, store = on_text(loaded, loaded.config) if files else (loaded, open_store(config, loaded))
        trained = {**loaded.environment, "data_fingerprint": loaded.metadata["data_fingerprint"]}  # an export has no environment
        swap, where = SwapMeasurement(config, store, old), open_device(config, trained)
        old.to(where.device), new.to(where.device)
        facts: dict[str, Plain] = {"from": str(loaded.path), "arm": arm(to_plain(loaded.config), trained)}
        facts["normalizer"] = old.config.normalizer.label()
        facts["init"] = "fit" if init == "fit" else getattr(config.model.normalizer, "init", None)
        if init == "fit":
            sequences = train_sequences(store, config, max(1, FIT_TOKENS // config.data.seq_len))
            batches = [sequences.batch(step).to(where.device) for step in range(FIT_BATCHES)]
            facts["fit_kl_before"], facts["fit_kl_after"] = fit(old, new, batches)
        evaluation = swap.evaluate(new, where, loaded.stamp["step"], loaded.stamp["tokens_seen"])
        path = out / swap.write(folder, evaluation).relative_to(folder)
        _write_run(folder, config, loaded, new.cpu(), {**trained, "command": command_line(), "swap": facts})
    factors, warning = _factors(old, new)
    models = [f"{facts['normalizer']} -> {label}, step {evaluation.step}", *_parameters(new), *factors]
    if not evaluation.series:
        models.append("nothing measured: eval.swap_lengths names no length that a held-out document has")
    notes = [f"{out}: weights alone; go on with: lm eval {out}, or lm train CONFIG init_from={out} name=..."]
    if init == "fit":
        notes.insert(0, f"fit: KL {facts['fit_kl_before']:.5f} -> {facts['fit_kl_after']:.5f} nats on training sequences")
    return SwapResult(evaluation, path, models, notes, warning)


def _parameters(decoder: Decoder) -> list[str]:
    """A line for each parameter of the normalizers that has a value a head: its mean over layers and heads, and its range."""
    values: dict[str, list[float]] = {}
    for normalizer in decoder.normalizers():
        for name, parameter in normalizer.named_parameters():
            if parameter.shape == (normalizer.layer.n_head,):
                values.setdefault(name, []).extend(parameter.tolist())
    return [f"{name} = {_over_heads(torch.tensor(by_head))}" for name, by_head in values.items()] or [""]


def _over_heads(values: Tensor) -> str:
    """A mean over layers and heads, with its range where they differ."""
    low, high = f"{values.min():.3g}", f"{values.max():.3g}"
    return f"{values.mean():.3g}" + f" ({low} to {high} over layers and heads)" * (low != high)


def _factors(old: Decoder, new: Decoder) -> tuple[list[str], str]:
    """The factor on the scores before and after, at short lengths and at the training length, and a warning where they are far apart.

    No lines if scores are no multiple of q.k / sqrt(D).
    """
    lengths = sorted({min(length, old.seq_len) for length in (*SHORT_LENGTHS, old.seq_len)})
    before, after = score_factors(old, lengths), score_factors(new, lengths)
    if before is None or after is None:
        return [], ""
    places = list(enumerate(lengths))
    lines = [
        f"factor on the scores at n = {length:,}: {_over_heads(before[place])} -> {_over_heads(after[place])}" for place, length in places
    ]
    ratios = (after.mean((1, 2)) / before.mean((1, 2))).tolist()
    far = [f"{ratios[place]:.2g} times the old one at n = {n:,}" for place, n in places if not 1 / FAR <= ratios[place] <= FAR]
    remedy = "measure them by eval.swap_lengths; docs/swapping.md says which options keep the factor"
    warning = f"warning: the factor on the scores is {', '.join(far)}: documents of such lengths may get much worse; {remedy}"
    return lines, warning if far else ""


def _text_config(loaded: Loaded, files: Sequence[Path], overrides: list[str]) -> Config:
    """Configurations of text for a model folder, with the overrides of their keys."""
    if (loaded.folder / CONFIG).is_file():
        raise RunError(f"{loaded.folder}: a run folder: a swap is measured on its own text, not on that of {files[0]}; leave that out")
    changes = {name: value for name, value in overrides_in("swap", overrides).items() if name != "model"}
    return parse(merge(to_plain(text_config(loaded, list(files))), changes))


def _swapped_config(loaded: Loaded, to: str, init: str | None, out: Path, overrides: list[str]) -> Config:
    """The configuration of the new run folder; what the user's words name is imported, what the loaded model names was allowed before."""
    changes = overrides_in("swap", overrides)
    try:
        options = OPTIONS[to]
    except Unavailable as error:
        raise ConfigError([Problem("--to", to, error.reason, error.remedy)]) from None
    except KeyError:
        remedy = "for a list: --to layers 'model.normalizer.of=[window, ssmax]'" if to.startswith("[") else suggest(to, OPTIONS)
        raise ConfigError([Problem("--to", to, "unknown normalizer", remedy)]) from None
    set_by_hand = changes.get("model", {}).get("normalizer", {})
    if not isinstance(set_by_hand, dict) or "name" in set_by_hand:
        raise ConfigError([Problem("model.normalizer", set_by_hand, f"the new normalizer is --to {to}", "set its options by their keys")])
    normalizer: dict[str, Plain] = {"name": to}
    first = options.first_init()
    if init is not None and first is None:
        raise ConfigError([Problem("--init", init, f"{to} has no parameters to start", "drop --init")])
    if init is not None and "init" in set_by_hand:
        raise ConfigError([Problem("model.normalizer.init", set_by_hand["init"], f"--init says {init}", "give one of them")])
    if first is not None:
        normalizer["init"] = first if init in (None, "fit") else init
        with suppress(ValueError):
            normalizer["init"] = float(normalizer["init"])
    plain = merge({**to_plain(loaded.config), "experiment": {}}, {"model": {"normalizer": to_plain(loaded.decoder.config.normalizer)}})
    plain = merge(merge(plain, {"model": {"normalizer": normalizer}}), changes)
    own = {"name": out.name, "runs": str(out.parent), "resume": "", "init_from": "", "train_only": None, "phases": []}
    return parse({**plain, **own})


def _write_run(folder: Path, config: Config, loaded: Loaded, decoder: Decoder, environment: dict[str, Plain]) -> None:
    """Write a run folder with one checkpoint of weights, from which nothing can be resumed."""
    own = {"format": FORMAT, "config": to_yaml(config), "phase": 0, "best": None, "plugins": PLUGINS.versions(config.normalizer_names)}
    path = step_path(folder / CHECKPOINTS, loaded.metadata["step"])
    save_checkpoint({"state_dict": decoder.state_dict(), "lm": {**loaded.metadata, **own}}, path)
    link_checkpoint(LAST, path)
    write_text(folder / CONFIG, to_yaml(config))
    if loaded.tokenizer:
        shutil.copyfile(loaded.folder / TOKENIZER, folder / TOKENIZER)
        environment = {**environment, TOKENIZER_SHA256: file_sha256(folder / TOKENIZER)}  # that of an export is empty
    write_json(folder / ENVIRONMENT, {**environment, "parameters": count_parameters(decoder)})
