"""`lm swap`: a copy of a trained model with another normalizer, and what that did to loss, next-token distributions and attention."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lm.attention.catalogue import OPTIONS
from lm.attention.plugins import PLUGINS
from lm.config.eval_config import Timing
from lm.config.load import merge, overrides_in, parse, to_yaml
from lm.config.tree import Config
from lm.data.batches import Batch, long_starts, train_sequences
from lm.data.store import Store
from lm.errors import ConfigError, Problem, RunError
from lm.evaluation.evaluate import on_text, open_device, open_store, text_config
from lm.evaluation.evaluation_kind import Advance, Measurement, measured, weights_sha256, write_evaluation
from lm.evaluation.held_out import HeldOut, bucket_edges, bucket_means, by_sequence, by_token, validation_sequences
from lm.files import file_sha256, new_folder, write_text
from lm.model.attention_stream import in_lockstep
from lm.model.counts import count_parameters
from lm.model.cross_entropy import token_kl, token_nll
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.model.swapped import fit, score_factors, swapped
from lm.report.evaluation_tables import Evaluated, print_results
from lm.runs.checkpoints import link_checkpoint, save_checkpoint
from lm.runs.evaluations import Evaluation
from lm.runs.folder import CHECKPOINTS, CONFIG, ENVIRONMENT, LAST, TOKENIZER, command_line, step_path, write_json
from lm.runs.identity import arm
from lm.runs.loading import Loaded, load
from lm.runs.metadata import FORMAT
from lm.runs.model_folder import TOKENIZER_SHA256
from lm.runs.series import Axis, Sample, Series, Shown
from lm.schema import Plain, Unavailable, suggest, to_plain

DRIFT_SEQUENCES = 4  # sequences of each length whose attention weights are compared
_NATS = "nats per token"


def swap_sequences(store: Store, config: Config) -> list[HeldOut]:
    """Held-out sequences of each of `eval.swap_lengths`, ascending: the validation sequences, and others within documents.

    Lengths that no held-out document has are left out, and those beyond the training length where positions are learned.
    """
    found = []
    for length in sorted({int(factor * config.data.seq_len) for factor in config.eval.swap_lengths}):
        if length == config.data.seq_len:
            found.append(validation_sequences(store, config))
        elif length < config.data.seq_len or not config.model.position.ends:
            starts = long_starts(store.val, length, config.eval.long_context.sequences)
            found += [HeldOut.take(store, starts, length)] if len(starts) else []
    return found


class Swap(Measurement):
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
            "sequences_sha256": [one.sha256 for one in self.held_out],
        }

    @property
    def work(self) -> int:
        return sum(len(one.sequences) for one in self.held_out)

    def measure(self, decoder: Decoder, where: Device, progress: Advance) -> list[Series]:
        models = [self.before.to(where.device), decoder]
        measured = [compared(*models, one, where, progress) for one in self.held_out]
        found = []
        for first, (held_out, values) in enumerate(zip(self.held_out, measured, strict=True)):
            for (metric, name), numbers in zip(_METRICS.items(), values, strict=True):
                found.append(self._by_position(metric, numbers, held_out, () if first else (f"swap/{name}",)))
            drift = attention_drift(*models, held_out, where)
            layers = Axis("layer", "", "of layer", tuple(range(len(drift))), log=False)
            found.append(self._series("attention drift", "", drift, what=_of(held_out), axis=layers))
        if self.held_out:
            found.append(self._by_length("change of loss", [after - before for before, after, _ in measured]))
            found.append(self._by_length("KL divergence", [kl for _, _, kl in measured]))
        return found

    def _by_position(self, metric: str, values: np.ndarray, held_out: HeldOut, logged: tuple[str, ...]) -> Series:
        """Means of `values` (sequences, length) in buckets of positions; one number where only answers count."""
        given = {"what": _of(held_out), "logged": logged}
        if held_out.answers is not None:
            return self._series(metric, _NATS, np.array([values.mean(where=held_out.counts)]), **given)
        edges = bucket_edges(self.config.data.seq_len, held_out.length)
        by_bucket = bucket_means(values, edges)
        sample = Sample(held_out.sha256, by_bucket, np.ones(len(values)), held_out.document_labels)
        axis = Axis("position in the sequence", "tokens", "at positions", tuple(edges.tolist()), bins=True)
        return self._series(metric, _NATS, by_bucket.mean(0), axis=axis, samples=(sample,), curve=values.mean(0), **given)

    def _by_length(self, metric: str, values: list[np.ndarray]) -> Series:
        """Means of `values`, (sequences, length) of each length, with intervals over documents; for reports."""
        samples, means = [], []
        for held_out, numbers in zip(self.held_out, values, strict=True):
            counts = held_out.counts
            mean = numbers.mean(1, where=counts)[:, None]
            samples.append(Sample(held_out.sha256, mean, counts.sum(1), held_out.document_labels))
            means.append(numbers.mean(where=counts))
        axis = Axis("sequence length", "tokens", "in sequences of", tuple(one.length for one in self.held_out))
        amount = "; ".join(f"{len(one.sequences):,} of {one.length:,} tokens" for one in self.held_out)
        title = f"{metric[0].upper()}{metric[1:]} at the swap of the normalizer"
        shown = Shown(title, "sequences around the swap", amount, f"{metric} at the swap, by sequence length")
        return self._series(metric, _NATS, np.array(means), axis=axis, samples=tuple(samples), interval="documents", shown=shown)

    def _series(self, metric: str, unit: str, means: np.ndarray, **given: object) -> Series:
        fingerprint = self.store.fingerprint
        return Series(self.kind, metric, unit, "lower", self.config.data.seq_len, means, data_fingerprint=fingerprint, **given)


_METRICS = {"loss before": "loss_before", "loss after": "loss_after", "KL divergence": "kl"}  # with their names in the metrics log


def _of(held_out: HeldOut) -> str:
    return f"sequences of {held_out.length:,}"


def compared(old: Decoder, new: Decoder, held_out: HeldOut, where: Device, progress: Advance = lambda done: None) -> np.ndarray:
    """For every predicted token -log p under both models and KL(old || new): (3, N, length) float64, nats. Collective."""

    def measure(batch: Batch) -> Tensor:
        with where.autocast():
            hidden = [model.hidden(batch).flatten(0, 1) for model in (old, new)]
        targets = batch.targets.flatten()
        heads = old.head, new.head
        losses = [token_nll(h, head, targets) for h, head in zip(hidden, heads, strict=True)]
        return torch.stack([*losses, token_kl(hidden[0], heads[0], hidden[1], heads[1])]).view(3, *batch.targets.shape)

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
                    apart = (a.weights - b.weights).abs().sum((0, 2, 3), dtype=torch.float64).mean()
                    drift[place, a.layer] += float(apart) / 2 / held_out.length
        return drift.float()

    return by_sequence([old, new], [held_out.length] * count, (layers,), where, measure).mean(0, dtype=np.float64)


SHORT_LENGTHS = (16, 256)  # tokens, as of prompts, at which the factor on the scores is printed
FAR = 2.0  # a factor on the scores that is more than so many times the old one, or less than that part of it, is warned of
FIT_TOKENS, FIT_BATCHES = 2048, 8  # what `--init fit` reads


def swap_run(
    source: Path, checkpoint: str, to: str, init: str | None, out: Path, overrides: list[str], files: Sequence[Path] = ()
) -> Evaluation:
    """`lm swap`: a copy of a trained model with another normalizer, as a run folder `out` that holds weights alone.

    Measures both models on identical held-out tokens; the result is printed, kept in `out`'s evaluations/ and returned.

    Args:
        source: a run folder, a checkpoint or an export.
        checkpoint: of a run folder: `last`, `best` or a step.
        to: name of the new normalizer.
        init: initial values of its parameters: `match`, `unit`, `fit` or a number; None: its default, or as `overrides` say.
        overrides: `key=value` of the new normalizer's options and of evaluation.
        files: configurations of the text to measure on, of a model without a training run.

    Raises:
        LMError: nothing to load, a pair that can't be swapped, other data than it was trained on, `out` not empty.
    """
    with new_folder(out) as made:
        loaded = load(source, checkpoint)
        if files:
            loaded = replace(loaded, config=_text_config(loaded, files, overrides))
        elif loaded.config is None:
            remedy = f"name a configuration of text, e.g. lm swap {source} configs/sotu.yaml --to {to} -o {out}"
            raise RunError(f"{source}: has no training run behind it, of whose text a swap could be measured; {remedy}")
        with PLUGINS.trusted():
            config = _swapped_config(loaded, to, init, out, overrides)
        old, new = loaded.decoder, swapped(loaded.decoder, config.model.normalizer)
        if init == "fit" and not count_parameters(new)["normalizer"]:
            label = new.config.normalizer.label()
            raise ConfigError([Problem("--init", init, f"{label} has no parameters to fit", "drop --init")])
        loaded, store = on_text(loaded, loaded.config) if files else (loaded, open_store(config, loaded))
        trained = {**loaded.environment, "data_fingerprint": loaded.metadata["data_fingerprint"]}  # an export has no environment
        swap, where = Swap(config, store, old), open_device(config, trained)
        old.to(where.device), new.to(where.device)
        facts: dict[str, Plain] = {"from": str(loaded.path), "arm": arm(to_plain(loaded.config), trained)}
        facts["normalizer"] = old.config.normalizer.label()
        facts["init"] = "fit" if init == "fit" else getattr(config.model.normalizer, "init", None)
        if init == "fit":
            facts["fit_kl_before"], facts["fit_kl_after"] = fit(old, new, [batch.to(where.device) for batch in _fit_batches(store, config)])
        evaluation = measured(swap, new, where, loaded.stamp["step"], loaded.stamp["tokens_seen"])
        numbers = out / write_evaluation(made, swap, evaluation).relative_to(made)
        _write_run(made, config, loaded, new.cpu(), {**trained, "command": command_line(), "swap": facts})
    print(f"{facts['normalizer']} -> {new.config.normalizer.label()}, step {evaluation.step}")
    print(*_parameters(new), sep="\n")
    warning = _print_factors(old, new)
    if not evaluation.series:
        print("nothing measured: eval.swap_lengths names no length that a held-out document has")
    print_results([Evaluated(out, evaluation, cached=False)], numbers)
    if init == "fit":
        print(f"fit: KL {facts['fit_kl_before']:.5f} -> {facts['fit_kl_after']:.5f} nats on training sequences")
    print(f"{out}: weights alone; go on with: lm eval {out}, or lm train CONFIG init_from={out} name=...")
    if warning:
        print(warning, file=sys.stderr)
    return evaluation


def _parameters(decoder: Decoder) -> list[str]:
    """A line for each parameter of the normalizers that has a value a head: its mean over layers and heads, and its range."""
    values: dict[str, list[float]] = {}
    for normalizer in decoder.normalizers():
        for name, parameter in normalizer.named_parameters():
            if parameter.shape == (normalizer.layer.n_head,):
                values.setdefault(name, []).extend(parameter.tolist())
    return [f"{name} = {_over_heads(torch.tensor(found))}" for name, found in values.items()]


def _over_heads(values: Tensor) -> str:
    """A mean over layers and heads, with its range where they differ."""
    low, high = f"{values.min():.3g}", f"{values.max():.3g}"
    return f"{values.mean():.3g}" + f" ({low} to {high} over layers and heads)" * (low != high)


def _print_factors(old: Decoder, new: Decoder) -> str:
    """Print the factor on the scores before and after, at short lengths and at the training length; a warning where they are far apart.

    Nothing of scores that are no multiple of q.k / sqrt(D).
    """
    lengths = sorted({min(length, old.seq_len) for length in (*SHORT_LENGTHS, old.seq_len)})
    before, after = score_factors(old, lengths), score_factors(new, lengths)
    if before is None or after is None:
        return ""
    for place, length in enumerate(lengths):
        print(f"factor on the scores at n = {length:,}: {_over_heads(before[place])} -> {_over_heads(after[place])}")
    far = [
        f"{ratio:.2g} times the old one at n = {length:,}"
        for length, ratio in zip(lengths, (after.mean((1, 2)) / before.mean((1, 2))).tolist(), strict=True)
        if not 1 / FAR <= ratio <= FAR
    ]
    remedy = "measure them by eval.swap_lengths; docs/swapping.md says which options keep the factor"
    return f"warning: the factor on the scores is {', '.join(far)}: documents of such lengths may get much worse; {remedy}" if far else ""


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
        normalizer["init"] = first if init in (None, "fit") else _number(init)
    plain = merge(to_plain(loaded.config), {"model": {"normalizer": to_plain(loaded.decoder.config.normalizer)}})
    plain = merge(merge(plain, {"model": {"normalizer": normalizer}}), changes)
    own = {"name": out.name, "runs": str(out.parent), "resume": "", "init_from": "", "train_only": None, "phases": []}
    return parse({**plain, **own})


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _fit_batches(store: Store, config: Config) -> list[Batch]:
    """Training batches to fit on."""
    sequences = train_sequences(store, config, max(1, FIT_TOKENS // config.data.seq_len))
    return [sequences.batch(step) for step in range(FIT_BATCHES)]


def _write_run(folder: Path, config: Config, loaded: Loaded, decoder: Decoder, environment: dict[str, Plain]) -> None:
    """A run folder with one checkpoint of weights."""
    own = {"format": FORMAT, "config": to_yaml(config), "phase": 0, "best": None, "plugins": PLUGINS.versions(config.normalizer_names)}
    path = step_path(folder / CHECKPOINTS, loaded.metadata["step"])
    save_checkpoint({"state_dict": decoder.state_dict(), "lm": {**loaded.metadata, **own}}, path)
    link_checkpoint(LAST, path)
    write_text(folder / CONFIG, to_yaml(config))
    if loaded.tokenizer:
        shutil.copyfile(loaded.folder / TOKENIZER, folder / TOKENIZER)
        environment = {**environment, TOKENIZER_SHA256: file_sha256(folder / TOKENIZER)}  # that of an export is empty
    write_json(folder / ENVIRONMENT, {**environment, "parameters": count_parameters(decoder)})
