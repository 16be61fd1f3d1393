"""Measure trained models (`lm eval` and `lm diagnose`).

Checkpoints of runs are measured on their run's held-out text, models without a training run on a configuration's text.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from lm.config.data_config import DataConfig, TokenizerFile
from lm.config.eval_config import EvalConfig, LongContextConfig
from lm.config.load import command_overrides, load_config, merge, parse_config
from lm.config.training_config import OptimConfig, TrainerConfig
from lm.config.tree import Config
from lm.data.prepare import check_text_lengths, find_store, prepare
from lm.data.store import Store
from lm.errors import ConfigError, DataError, Problem, RunError
from lm.evaluation.measurement import Measurement
from lm.evaluation.metrics import create_measurements
from lm.machine import threads_per_process
from lm.model.device import Device, resolve_device, resolve_precision
from lm.plain import Plain, to_plain
from lm.report.evaluation_tables import EvaluationResult
from lm.runs.checkpoints import weights_sha256
from lm.runs.folder import CONFIG_FILE, TOKENIZER_FILE, read_config, require_run
from lm.runs.loading import LoadedModel, load

TRANSFORMERS_FOLDER_PREFIX = "hf:"  # before the folder of a model that runs in transformers


def evaluate_runs(
    sources: list[Path],
    checkpoint: str = "last",
    overrides: Sequence[str] = (),
    command: Literal["eval", "diagnose"] = "eval",
    normalizer: str = "softmax",
    train_length: int | None = None,
) -> list[EvaluationResult]:
    """Measure models, write the results to evaluations/ in their folders, and return them.

    A result that was measured before with the same weights, data, precision and options is read, not measured again.

    Args:
        sources: run folders, checkpoints and model folders. Configurations (YAML files) among them give the text for
            model folders without a training run.
        checkpoint: the checkpoint of run folders: `last`, `best` or a step.
        overrides: changes `key=value` of configuration keys that the command reads.
        command: `diagnose` measures only the diagnostics.
        normalizer: the normalizer of models `hf:FOLDER`, which run in transformers.
        train_length: training length, in tokens, of models `hf:FOLDER`; None: as their configuration says.

    Raises LMError: a source is no run or has no such checkpoint, its data differ from the training data, or a package
    is missing.
    """
    changes = command_overrides(command, [*overrides])
    # paths of configurations, and of models, each once
    text_configs = [path for path in sources if path.suffix in (".yaml", ".yml")]
    sources = [path for path in dict.fromkeys(sources) if path not in text_configs]
    if not sources:
        raise ConfigError(
            f"{text_configs[0]}: a configuration, not a model: name the run folders or model folders to measure, too"
        )
    results: list[EvaluationResult] = []
    for source in sources:
        if str(source).startswith(TRANSFORMERS_FOLDER_PREFIX):
            from lm.huggingface.transformers_decoder import load_transformers_decoder  # imports transformers

            model = load_transformers_decoder(
                Path(str(source).removeprefix(TRANSFORMERS_FOLDER_PREFIX)), normalizer, train_length
            )
        else:
            if not source.exists():
                require_run(source)  # raises, and names the run that may be meant
            model = load(source, checkpoint)
        config = config_for_command(changes, run_or_text_config(model, text_configs), command)
        model, store = open_store(model, config, text_configs)
        kinds = ["diagnostics"] if command == "diagnose" else None
        folder = source if source.is_dir() else model.folder
        device = open_device(config, model.environment)
        results += evaluate_model(folder, model, create_measurements(config, store, kinds), device)
    return results


def config_for_command(changes: dict[str, Plain], config: Config, command: Literal["eval", "diagnose"]) -> Config:
    """Return a configuration with `changes`. For `diagnose` its `eval` keeps only the validation and the diagnostics.

    Options of other evaluations may not suit the model.
    """
    if command == "eval":
        return parse_config(merge(to_plain(config), changes))
    diagnose_eval = EvalConfig(
        sequences=config.eval.sequences,
        long_context=LongContextConfig(length_factor=0),
        diagnostics=config.eval.diagnostics,
    )
    changed = merge(to_plain(replace(config, eval=diagnose_eval)), changes)
    return parse_config(merge(changed, {"eval": {"diagnostics": {}}}))


def run_or_text_config(model: LoadedModel, text_configs: Sequence[Path]) -> Config:
    """Return the configuration by which a model is measured: the configuration of its run or, for a model without a run
    folder, one with the text in `text_configs`.

    Raises RunError: a run is to be measured on another text, or a model has neither a run nor a text.
    """
    is_run = (model.folder / CONFIG_FILE).is_file()
    if text_configs and is_run:
        reason = f"it is measured on its own held-out text, not on that of {text_configs[0]}; leave that out"
        raise RunError(f"{model.folder}: of a run: {reason}")
    if not text_configs and model.config is None:
        remedy = "name a configuration of text beside it, such as configs/sotu.yaml"
        raise RunError(f"{model.path}: has no training run behind it, on whose text it could be measured; {remedy}")
    return (
        config_with_text(model, text_configs) if text_configs else read_config(model.folder) if is_run else model.config
    )


def evaluate_model(
    folder: Path, model: LoadedModel, measurements: list[Measurement], device: Device
) -> list[EvaluationResult]:
    """Return the results of a model's measurements: read from `folder` if they were measured before, else measured and
    written.
    """
    decoder, step, results = model.decoder, model.metadata.get("step", 0), []
    weights = weights_sha256(decoder.state_dict())
    decoder.to(device.device)
    for measurement in measurements:
        # of a model of transformers, no file says which normalizer it was given
        evaluation = (
            measurement.cached_result(folder, weights, device, step) if decoder.takes_inference_settings else None
        )
        was_cached = evaluation is not None
        if not was_cached:
            labelled_device = replace(device, progress_label=f"{folder.resolve().name}: {measurement.kind}")
            evaluation = measurement.evaluate(decoder, labelled_device, step, model.metadata.get("tokens", 0))
            measurement.write(folder, evaluation)
        results.append(EvaluationResult(folder, evaluation, was_cached))
    return results


def open_store(model: LoadedModel, config: Config, text_configs: Sequence[Path]) -> tuple[LoadedModel, Store]:
    """Return the model and the token store to measure it on.

    The store is the one that the model was trained on: it is found by its fingerprint, or rebuilt from the sources if
    its files are gone. With `text_configs`, the store holds the text of `config` (from `config_with_text`), and the
    returned model has 0 steps and 0 tokens of training in its metadata, as it was not trained on this text.

    Raises RunError: no store has these tokens, and the sources are gone or give other tokens. Raises other LMErrors:
    the text can't be prepared, or is shorter than the model's training sequences.
    """
    if text_configs:
        store = prepare(config.data, progress=True)
        check_text_lengths(store, config)
        spec = model.spec
        metadata = {"step": 0, "tokens": 0, "phase": 0, "vocab_size": spec.vocab_size, "plugins": spec.plugins}
        metadata["data_fingerprint"] = store.fingerprint
        return replace(model, config=config, metadata=metadata, environment={}), store
    fingerprint = model.metadata["data_fingerprint"]
    absence = (
        f"{model.path}: was trained on tokens {fingerprint[:16]}, of which there is no store in "
        f"{config.data.token_stores_folder.resolve()}"
    )
    remedy = "set data.root to where the store is, start where the run was trained, or bring the sources back"
    try:
        store = prepare(config.data, progress=True, preferred_fingerprint=fingerprint)
    except DataError as error:
        if find_store(config.data, fingerprint):  # raises its own error if the store is damaged
            raise
        raise RunError(f"{absence}, and none can be made ({error}): {remedy}") from None
    if store.fingerprint != fingerprint:
        raise RunError(f"{absence}; its sources now give {store.fingerprint[:16]} ({store.path}): {remedy}")
    return model, store


def open_device(config: Config, training_environment: dict[str, Plain]) -> Device:
    """Return the device to measure on, and set torch's number of CPU threads.

    The precision is the one that `config` sets, else the precision of training, read from
    `training_environment` (environment.json).
    """
    # one device, however many the run was trained on
    config = replace(config, trainer=replace(config.trainer, devices=1, num_nodes=1))
    accelerator, _ = resolve_device(config)
    precision = resolve_precision(config, accelerator, training_environment)
    torch.set_num_threads(config.trainer.threads or threads_per_process(1))
    return Device(torch.device("cuda" if accelerator == "gpu" else "cpu"), precision.value == "bf16-mixed")


def config_with_text(model: LoadedModel, text_configs: Sequence[Path]) -> Config:
    """Return a configuration with the model's shape, tokenizer and training length, and with the text of
    `text_configs`.

    Seed, `eval` and the keys of `trainer` that `lm eval` reads have their values in `text_configs`; tasks are left out.
    The configuration is not checked against the model's limits, such as learned positions. Overrides may still change
    it, and `parse_config` then checks the result.

    Raises ConfigError: a configuration is wrong or has no text. Raises RunError: the model has no tokenizer.
    """
    model.tokenizer_and_start_id()
    base, spec = load_config([str(path) for path in text_configs]), model.spec
    if base.data.symbolic:
        reason = f"its sequences are symbols, which {model.path} does not know"
        raise ConfigError([Problem("data.tasks", str(text_configs[-1]), reason, "name a configuration of text")])
    tokenizer = TokenizerFile(
        path=str(model.folder / TOKENIZER_FILE), end_of_text=spec.end_of_text, end_tokens=spec.end_tokens
    )
    data = replace(base.data, seq_len=spec.seq_len, tokenizer=tokenizer, tasks=[], lengths=DataConfig().lengths)
    trainer = TrainerConfig(
        accelerator=base.trainer.accelerator, precision=base.trainer.precision, threads=base.trainer.threads
    )
    folder = model.folder.resolve()
    return Config(
        name=folder.name, runs=str(folder.parent), seed=base.seed, data=data, model=spec.model, eval=base.eval,
        optim=OptimConfig(batch_tokens=spec.seq_len), trainer=trainer,
    )  # fmt: skip
