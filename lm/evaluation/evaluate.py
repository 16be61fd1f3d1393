"""`lm eval` and `lm diagnose`: measure checkpoints of runs on their held-out text, and models without a training run on
the text of a configuration.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch

from lm.config.data_config import DataConfig, TokenizerFile
from lm.config.eval_config import EvalConfig, LongContextConfig
from lm.config.load import load_config, merge, overrides_in, parse
from lm.config.training_config import OptimConfig, TrainerConfig
from lm.config.tree import Config
from lm.data.prepare import check_sequences, prepare, store_with_fingerprint
from lm.data.store import Store
from lm.errors import ConfigError, DataError, Problem, RunError
from lm.evaluation.evaluation_kind import Measurement
from lm.evaluation.metrics import measurements
from lm.machine import threads_per_process
from lm.model.device import Device, resolve_device, resolve_precision
from lm.plain import Plain, to_plain
from lm.progress import Progress
from lm.report.evaluation_tables import EvaluationResult
from lm.runs.checkpoints import weights_sha256
from lm.runs.folder import CONFIG, DESCRIPTION, ENVIRONMENT, TOKENIZER, read_config, read_environment
from lm.runs.loading import LoadedModel, load
from lm.schema import effect

FOREIGN = "hf:"  # before the folder of a model that runs in transformers


def evaluate_runs(
    folders: list[Path],
    checkpoint: str = "last",
    overrides: Sequence[str] = (),
    normalizer: str = "softmax",
    length: int | None = None,
) -> list[EvaluationResult]:
    """Evaluate one checkpoint of each run, keep the results in its evaluations/, and return them.

    A result that was measured before, with the same weights, data, precision and options, is not measured again.

    Args:
        folders: run folders and model folders; and configurations (YAML files) of a text to measure model folders on.
        checkpoint: `last`, `best` or a step.
        overrides: changes `key=value` of keys that `lm eval` reads.
        normalizer: the normalizer of models `hf:FOLDER`, which run in transformers; length: their training length.

    Raises LMError: not a run, no such checkpoint, other data than the model was trained on, a missing package.
    """
    changes, models = overrides_in("eval", [*overrides]), {}
    if foreign := [folder for folder in folders if str(folder).startswith(FOREIGN)]:
        from lm.huggingface.measured_model import load_measured  # imports transformers

        models = {path: load_measured(Path(str(path).removeprefix(FOREIGN)), normalizer, length) for path in foreign}

    return evaluate_sources(folders, checkpoint, lambda config: parse(merge(to_plain(config), changes)), models)


def evaluate_sources(
    sources: list[Path],
    checkpoint: str,
    changed: Callable[[Config], Config],
    models: dict[Path, LoadedModel] | None = None,
    kinds: list[str] | None = None,
) -> list[EvaluationResult]:
    """Evaluate models, each by its configuration (`measured_config`) as `changed` returns it.

    sources: run folders, checkpoints, model folders, and configurations of text; models: those that were loaded before;
    kinds: the evaluations to make, if not all.
    """
    sources, files = split_configurations(sources)
    if not sources:
        raise ConfigError(
            f"{files[0]}: a configuration, not a model: name the run folders or model folders to measure, too"
        )
    models = (models or {}) | {
        source: load(source, checkpoint) for source in sources if (source / DESCRIPTION).is_file()
    }
    configs = {source: changed(measured_config(source, models.get(source), files)) for source in sources}
    results: list[EvaluationResult] = []
    for source, config in configs.items():
        model = models.pop(source, None) or load(source, checkpoint)  # of runs one at a time
        model, store = model_on_text(model, config) if files else (model, open_store(config, model))
        check_sequences(store, config)
        folder = source if source.is_dir() else model.folder
        environment = read_environment(folder) if (folder / ENVIRONMENT).is_file() else {}
        device = open_device(config, environment)
        results += evaluate_model(folder, model, measurements(config, store, kinds), device)
    return results


def diagnose(sources: list[Path], checkpoint: str = "last", overrides: Sequence[str] = ()) -> list[EvaluationResult]:
    """Measure diagnostics of models, keep the results in evaluations/ as `lm eval` does, and return them.

    Args:
        sources: run folders, checkpoints, exports and other model folders, and configurations of the text that model
            folders are measured on. A model folder without a training run needs such a configuration.
        checkpoint: the checkpoint of run folders: `last`, `best` or a step.
        overrides: `key=value` of keys that act in `lm diagnose`, such as eval.diagnostics.sequences=32.

    Raises LMError: no model at a source, other data than the model was trained on.
    """
    changes = overrides_in("diagnose", [*overrides])
    return evaluate_sources(sources, checkpoint, partial(changed_config, changes), kinds=["diagnostics"])


def changed_config(changes: dict[str, Plain], config: Config) -> Config:
    """A configuration with `changes`, of whose `eval` only the validation and the diagnostics are left, as others may
    not be for the model.
    """
    alone = EvalConfig(
        sequences=config.eval.sequences,
        long_context=LongContextConfig(length_factor=0),
        diagnostics=config.eval.diagnostics,
    )
    changed = merge(to_plain(replace(config, eval=alone)), changes)
    return parse(merge(changed, {"eval": {"diagnostics": {}}}))


def measured_config(source: Path, model: LoadedModel | None, files: Sequence[Path]) -> Config:
    """The configuration that a model is measured by: its run's, or that of the text of `files` if it has no run folder.

    model: the model at `source`; None: `source` is a run folder or one of its checkpoints, and not loaded yet.

    Raises RunError: a run that is to be measured on another text, or a model without a run or text.
    """
    folder = source.resolve().parent.parent if source.is_file() else source
    config = model.config if model else read_config(folder)
    if not files and config is None:
        remedy = "name a configuration of text beside it, such as configs/sotu.yaml"
        raise RunError(f"{source}: has no training run behind it, on whose text it could be measured; {remedy}")
    if files and (folder / CONFIG).is_file():
        reason = f"it is measured on its own held-out text, not on that of {files[0]}; leave that out"
        raise RunError(f"{source}: of a run: {reason}")
    return text_config(model, files) if files else config


def evaluate_model(
    folder: Path, model: LoadedModel, measurements: list[Measurement], device: Device
) -> list[EvaluationResult]:
    """The results of measurements of a model: measured and written to `folder`, or read from it if they were measured
    before.
    """
    decoder, stamp, results = model.decoder, model.stamp, []
    weights = weights_sha256(decoder.state_dict())
    decoder.to(device.device)
    for measurement in measurements:
        # of a model of transformers, no file says which normalizer it was given
        evaluation = measurement.cached(folder, weights, device, stamp["step"]) if decoder.takes_settings else None
        if not (cached := evaluation is not None):
            with Progress().bar(f"{folder.resolve().name}: {measurement.kind}", measurement.work_units) as bar:
                evaluation = measurement.evaluate(decoder, device, stamp["step"], stamp["tokens_seen"], bar.update)
            measurement.write(folder, evaluation)
        results.append(EvaluationResult(folder, evaluation, cached))
    return results


def open_store(config: Config, model: LoadedModel) -> Store:
    """The token store that a model was trained on, found by its fingerprint, or built again from the sources if it is
    gone.

    Raises RunError: no store has these tokens, and the sources are gone or give other tokens.
    """
    fingerprint = model.metadata["data_fingerprint"]
    absence = (
        f"{model.path}: was trained on tokens {fingerprint[:16]}, of which there is no store in "
        f"{config.data.folder.resolve()}"
    )
    remedy = "set data.root to where the store is, start where the run was trained, or bring the sources back"
    try:
        store = prepare(config.data, progress=True, store_fingerprint=fingerprint)
    except DataError as error:
        if store_with_fingerprint(config.data, fingerprint):  # raises its own error if the store is damaged
            raise
        raise RunError(f"{absence}, and none can be made ({error}): {remedy}") from None
    if store.fingerprint != fingerprint:
        raise RunError(f"{absence}; its sources now give {store.fingerprint[:16]} ({store.path}): {remedy}")
    return store


def open_device(config: Config, environment: dict[str, Plain]) -> Device:
    """The device to measure on, in the precision that `config` sets, else in that of training, from `environment`
    (environment.json). Also sets torch's number of CPU threads."""
    # one device, however many the run was trained on
    config = replace(config, trainer=replace(config.trainer, devices=1, num_nodes=1))
    accelerator, _ = resolve_device(config)
    precision = resolve_precision(config, accelerator, environment)
    torch.set_num_threads(config.trainer.threads or threads_per_process(1))
    return Device(torch.device("cuda" if accelerator == "gpu" else "cpu"), precision.value == "bf16-mixed")


def split_configurations(paths: list[Path]) -> tuple[list[Path], list[Path]]:
    """`paths` split into paths of models, each once, and paths of configurations (YAML files)."""
    files = [path for path in paths if path.suffix in (".yaml", ".yml")]
    return [path for path in dict.fromkeys(paths) if path not in files], files


def text_config(model: LoadedModel, files: Sequence[Path]) -> Config:
    """A configuration with the model's shape, tokenizer and training length, and otherwise the text, seed and `eval` of
    `files`, or defaults without any.

    Of their `trainer` it has the keys that `lm eval` reads, of their `data` no tasks. It is not checked against the
    model's limits, such as learned positions: overrides may still change it, and `parse` then checks the result.

    Raises ConfigError: a configuration is wrong, or has no text; RunError: the model has no tokenizer.
    """
    model.tokenizer_and_start()
    base, spec = load_config([str(path) for path in files]) if files else Config(), model.spec
    if base.data.symbolic:
        reason = f"its sequences are symbols, which {model.path} does not know"
        raise ConfigError([Problem("data.tasks", str(files[-1]), reason, "name a configuration of text")])
    tokenizer = TokenizerFile(
        path=str(model.folder / TOKENIZER), end_of_text=spec.end_of_text, end_tokens=spec.end_tokens
    )
    data = replace(base.data, seq_len=spec.seq_len, tokenizer=tokenizer, tasks=[], lengths=DataConfig().lengths)
    trainer_keys = [
        field.name for field in fields(TrainerConfig) if "eval" in effect(Config, f"trainer.{field.name}").acts_in
    ]
    folder = model.folder.resolve()
    return Config(
        name=folder.name, runs=str(folder.parent), seed=base.seed, data=data, model=spec.model, eval=base.eval,
        optim=OptimConfig(batch_tokens=spec.seq_len), trainer=TrainerConfig(**{name: getattr(base.trainer,
            name) for name in trainer_keys}),
    )  # fmt: skip


def model_on_text(model: LoadedModel, config: Config) -> tuple[LoadedModel, Store]:
    """The model, with metadata of a training of 0 steps on the text of `config` (from `text_config`), and the store of
    this text.

    Raises LMError: the text can't be prepared, or is shorter than the sequences that the model was trained on.
    """
    store = prepare(config.data, progress=True)
    check_sequences(store, config)
    metadata = {"step": 0, "tokens": 0, "phase": 0, "vocab_size": model.spec.vocab_size, "plugins": model.spec.plugins}
    return replace(
        model, config=config, metadata={**metadata, "data_fingerprint": store.fingerprint}, environment={}
    ), store
