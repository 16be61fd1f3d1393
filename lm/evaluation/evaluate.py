"""`lm eval`: measure checkpoints of runs on their held-out text, and models without a training run on the text of a
configuration.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch

from lm.config.data_config import DataConfig, TokenizerFile
from lm.config.eval_config import SUITES
from lm.config.load import load_config, merge, overrides_in, parse, read_yaml
from lm.config.training_config import OptimConfig, TrainerConfig
from lm.config.tree import Config
from lm.config.yaml_text import resolve_interpolations
from lm.data.prepare import check_sequences, prepare, store_with_fingerprint
from lm.data.store import Store
from lm.errors import ConfigError, DataError, Problem, RunError
from lm.evaluation.evaluation_kind import measurement_types, measurements
from lm.machine import threads_per_process
from lm.model.device import Device, resolve_device, resolve_precision
from lm.progress import Progress
from lm.report.evaluation_tables import EvaluationResult
from lm.runs.checkpoints import weights_sha256
from lm.runs.folder import CONFIG, DESCRIPTION, TOKENIZER, read_config, read_environment, require_run
from lm.runs.loading import LoadedModel, find_checkpoint, load
from lm.schema import Plain, effect, to_plain

FOREIGN = "hf:"  # before the folder of a model that runs in transformers


def evaluate_runs(
    folders: list[Path],
    checkpoint: str = "last",
    suite: str = "",
    overrides: Sequence[str] = (),
    normalizer: str = "softmax",
    length: int | None = None,
) -> list[EvaluationResult]:
    """Evaluate one checkpoint of each run, keep the results in its evaluations/, and return them.

    A result that was measured before, with the same weights, data, precision and options, is not measured again.

    Args:
        folders: run folders; or model folders together with configurations (YAML files) of the text to measure them on.
        checkpoint: `last`, `best` or a step; for a single run also a path.
        suite: `quick`, `full` or a YAML file with the section `eval`; empty: `eval` as in the run's configuration.
        overrides: changes `key=value` of keys that `lm eval` reads, made after the suite's.
        normalizer: the normalizer of models `hf:FOLDER`, which run in transformers; length: their training length.

    Raises LMError: not a run, no such checkpoint, other data than the model was trained on, no such suite, a
    missing package.
    """
    changes = overrides_in("eval", [*overrides])
    folders, files = split_configurations(folders)
    if not folders:
        raise ConfigError(
            f"{files[0]}: a configuration, not a model: name the run folders or model folders to measure, too"
        )
    models = {folder: load(folder, checkpoint) for folder in folders if (folder / DESCRIPTION).is_file()}
    if foreign := [folder for folder in folders if str(folder).startswith(FOREIGN)]:
        from lm.huggingface.measured_model import load_measured  # imports transformers

        models |= {path: load_measured(Path(str(path).removeprefix(FOREIGN)), normalizer, length) for path in foreign}
    if files and (runs := [folder for folder in folders if folder not in models]):
        require_run(runs[0], CONFIG)
        raise RunError(
            f"{runs[0]}: a run folder: it is measured on its own held-out text, not on that of {files[0]}; leave that "
            "out"
        )
    if models and not files:
        remedy = (
            f"name a configuration, e.g. lm eval {folders[0]} configs/sotu.yaml, or the run folder it was exported from"
        )
        raise RunError(
            f"{next(iter(models))}: a model folder: of which text its loss is to be measured is not known; {remedy}"
        )
    base_configs = [
        text_config(models[folder], files) if folder in models else read_config(folder) for folder in folders
    ]
    configs = [parse(merge(merge(to_plain(config), suite_changes(suite, config)), changes)) for config in base_configs]
    paths = [folder if folder in models else find_checkpoint(folder, checkpoint) for folder in folders]
    for config in configs:
        measurement_types(config)  # a missing package is reported before data are prepared
    results: list[EvaluationResult] = []
    for config, folder, path in zip(configs, folders, paths, strict=True):
        results += evaluate_model(config, models.pop(folder)) if folder in models else evaluate(config, folder, path)
    return results


def suite_changes(name: str, config: Config) -> dict[str, Plain]:
    """Changes that the suite `name` (as in `evaluate_runs`) makes to a configuration. Raises ConfigError: no such
    suite, or a suite file with more than an `eval` block."""
    if not name or name in SUITES:
        models = [config.model_in(phase) for phase in range(len(config.plan))]  # the checkpoint may be of any phase
        model = next((model for model in models if not model.scales_with_q), models[0])
        return {"eval": config.eval.suite(name, config.data, model)} if name else {}
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--suite {name}: choose {', '.join(SUITES)} or name a YAML file with an `eval` block")
    plain = resolve_interpolations(read_yaml(path))
    if list(plain) != ["eval"]:
        raise ConfigError(
            f"{path}: a suite holds an `eval` block and nothing else, this one: {', '.join(plain) or 'nothing'}"
        )
    return plain


def evaluate(config: Config, folder: Path, path: Path, kinds: list[str] | None = None) -> list[EvaluationResult]:
    """Evaluate the checkpoint `path` of the run `folder` by `config`, as `evaluate_runs` does; `kinds` names
    evaluations, if not all.
    """
    model = load(path)
    device = open_device(config, read_environment(folder))
    return _measure(config, folder, model, open_store(config, model), device, kinds)


def evaluate_model(config: Config, model: LoadedModel, kinds: list[str] | None = None) -> list[EvaluationResult]:
    """Evaluate a model folder by `config`, which `text_config` made, as `evaluate_runs` does; `kinds` names
    evaluations, if not all.
    """
    return _measure(config, model.folder, *model_on_text(model, config), open_device(config, {}), kinds)


def _measure(
    config: Config, folder: Path, model: LoadedModel, store: Store, device: Device, kinds: list[str] | None
) -> list[EvaluationResult]:
    """The results of a model on `store`: measured, or read from `folder` if they were measured before."""
    decoder, metadata = model.decoder, model.metadata
    check_sequences(store, config)
    kind_measurements = measurements(config, store, kinds)
    weights, stamp, results = weights_sha256(decoder.state_dict()), (metadata["step"], metadata["tokens"]), []
    decoder.to(device.device)
    for measurement in kind_measurements:
        evaluation = measurement.cached(folder, weights, device, *stamp)
        cached = evaluation is not None
        if not cached:
            with Progress().bar(f"{folder.resolve().name}: {measurement.kind}", measurement.work_units) as advance:
                evaluation = measurement.evaluate(decoder, device, *stamp, advance)
            measurement.cache(folder, evaluation, device)
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


def text_config(model: LoadedModel, files: list[Path]) -> Config:
    """A configuration with the model's shape, tokenizer and training length, and otherwise the text, seed and `eval` of
    `files`.

    Of their `trainer` it has the keys that `lm eval` reads, of their `data` no tasks. It is not checked against the
    model's limits, such as learned positions: overrides may still change it, and `parse` then checks the result.

    Raises ConfigError: a configuration is wrong, or has no text; RunError: the model has no tokenizer.
    """
    model.tokenizer_and_start()
    base, spec = load_config([str(path) for path in files]), model.spec
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
    check_sequences(store, config, fixing_model=str(model.path))
    metadata = {"step": 0, "tokens": 0, "phase": 0, "vocab_size": model.spec.vocab_size, "plugins": model.spec.plugins}
    return replace(
        model, config=config, metadata={**metadata, "data_fingerprint": store.fingerprint}, environment={}
    ), store
