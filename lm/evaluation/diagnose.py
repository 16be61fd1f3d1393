"""`lm diagnose`: statistics of attention weights of runs, checkpoints and exports."""

from dataclasses import replace
from pathlib import Path

from lm.config.eval_config import DiagnosticsConfig, EvalConfig, LongContextConfig
from lm.config.load import merge, overrides_in, parse
from lm.config.tree import Config
from lm.data.prepare import check_sequences
from lm.errors import ConfigError, RunError
from lm.evaluation.diagnostic_series import KIND
from lm.evaluation.diagnostics import describe, diagnostic_sequences, recorded, sequence_length, sequences_of_text
from lm.evaluation.evaluate import evaluate, evaluate_model, open_device, open_store
from lm.evaluation.measurement import weights_sha256
from lm.evaluation.on_text import split_configurations, text_config
from lm.progress import Progress
from lm.report.evaluation_tables import Evaluated, print_results, write_table
from lm.runs.evaluations import Evaluation
from lm.runs.folder import CHECKPOINTS, CONFIG, read_config, require_run
from lm.runs.loading import DESCRIPTION, Loaded, find_checkpoint, load
from lm.schema import Plain, to_plain


def diagnose(sources: list[Path], checkpoint: str = "last", overrides: list[str] | None = None, out: Path | None = None) -> list[Evaluated]:
    """Diagnostics of models, printed and returned; those of run folders are kept in their evaluations/, as `lm eval` does.

    Args:
        sources: run folders, checkpoints, exports and other model folders, and configurations of the text that model folders are
            measured on; one without a training run needs them, or eval.diagnostics.text.
        checkpoint: of run folders: `last`, `best` or a step.
        overrides: `key=value` of keys that act in `lm diagnose`, such as eval.diagnostics.sequences=32.
        out: a .csv or .json file for all numbers.

    Raises:
        LMError: no model there, no text that could be read, other data than it was trained on.
    """
    if out and out.suffix not in (".csv", ".json"):
        raise ConfigError(f"{out}: can't write results of this kind; name a .csv or .json file")
    sources, files = split_configurations(sources)
    for source in sources or files:
        check_source(source)
    changes = merge({"eval": {"diagnostics": {}}}, overrides_in("diagnose", overrides or []))
    found: list[Evaluated] = []
    for source in sources:
        folder = source if source.is_dir() else source.resolve().parent.parent
        if (folder / DESCRIPTION).is_file() and files:
            loaded = load(source)
            text = text_config(loaded, files)
            text.eval = _alone(text.eval.diagnostics)
            found += evaluate_model(parse(merge(to_plain(text), changes)), loaded, [KIND])
        elif files:
            raise RunError(f"{source}: of a run: it is measured on the text of that, not on that of {files[0]}; leave {files[0]} out")
        elif (folder / CONFIG).is_file():
            config = parse(merge(to_plain(read_config(folder)), changes))
            path = find_checkpoint(folder, checkpoint) if source.is_dir() else source
            found += evaluate(config, folder, path, [KIND])
        else:
            found.append(_of_model(load(source, checkpoint), changes))
    print_results(found, out)
    if out:
        write_table(found, out)
    return found


def check_source(source: Path) -> None:
    """Raises RunError if there is nothing at `source`, or what is no model."""
    if not source.exists():
        raise RunError(f"{source}: no such run folder, checkpoint or export")
    if source.is_dir() and not any((source / name).exists() for name in (CONFIG, DESCRIPTION, CHECKPOINTS)):
        require_run(source, CONFIG)
    if source.suffix in (".yaml", ".yml"):
        raise RunError(f"{source}: a configuration, not a model: train it (lm train {source}), and name its run folder")


def _of_model(loaded: Loaded, changes: dict[str, Plain]) -> Evaluated:
    """Of a model folder, kept nowhere: on the held-out text of the run that it is of, or on a text."""
    config = config_of(loaded, changes)
    asked, seed, fingerprint = config.eval.diagnostics, config.seed, ""
    if asked.text:
        held_out = sequences_of_text(*loaded.tokenizer_and_start(), asked, sequence_length(asked, loaded.spec.seq_len))
    elif loaded.config is None:
        remedy = "set eval.diagnostics.text=FILE, or name a configuration of text"
        raise RunError(f"{loaded.path}: has no training run behind it, whose held-out text could be read; {remedy}")
    else:
        store = open_store(config, loaded)
        check_sequences(store, config)
        held_out, fingerprint = diagnostic_sequences(store, config, asked), store.fingerprint
    where = replace(open_device(config, loaded.environment), bf16=False)
    weights, decoder = weights_sha256(loaded.decoder), loaded.decoder.to(where.device)
    with Progress().bar(f"{loaded.folder.name}: {KIND}", len(held_out.sequences) * len(asked.inference)) as advance:
        series = describe(decoder, held_out, asked, where, seed, fingerprint, advance)
    facts = loaded.stamp | {"data_fingerprint": fingerprint, "options": recorded(asked, held_out, loaded.spec.seq_len, seed)}
    evaluation = Evaluation(kind=KIND, precision=where.precision, weights_sha256=weights, series=tuple(series), **facts)
    return Evaluated(loaded.folder, evaluation, cached=False)


def config_of(loaded: Loaded, changes: dict[str, Plain]) -> Config:
    """The configuration a model was trained with, or one that fits it, with changes."""
    return parse(merge(to_plain(loaded.config or _untrained(loaded)), changes))


def _untrained(loaded: Loaded) -> Config:
    """A configuration of the model, whose keys of training mean nothing."""
    config = Config(name=loaded.folder.name, model=loaded.spec.model, eval=_alone())
    config.data.seq_len, config.optim.batch_tokens = loaded.spec.seq_len, loaded.spec.seq_len
    return config


def _alone(diagnostics: DiagnosticsConfig | None = None) -> EvalConfig:
    """Asks for nothing else, which the model may not be capable of."""
    return EvalConfig(long_context=LongContextConfig(length_factor=0), diagnostics=diagnostics)
