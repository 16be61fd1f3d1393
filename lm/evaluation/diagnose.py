"""`lm diagnose`: statistics of attention weights of runs, checkpoints and exports."""

from pathlib import Path

from lm.config.load import merge, overrides_in, parse
from lm.data.prepare import check_sequences
from lm.errors import ConfigError, RunError
from lm.evaluation.evaluate import evaluate, open_device, open_store
from lm.evaluation.measurement import measurements
from lm.evaluation.numbers import Evaluated, print_results, write_table
from lm.evaluation.results import measured
from lm.progress import Progress
from lm.runs.folder import CONFIG, read_config
from lm.runs.loading import Loaded, find_checkpoint, load
from lm.schema import Plain, to_plain

KINDS = ["diagnostics"]


def diagnose(sources: list[Path], checkpoint: str = "last", overrides: list[str] | None = None, out: Path | None = None) -> list[Evaluated]:
    """Diagnostics of models, printed and returned; those of run folders are kept in their evaluations/, as `lm eval` does.

    Args:
        sources: run folders, checkpoints, or exports of runs.
        checkpoint: of run folders: `last`, `best` or a step.
        overrides: `key=value` of keys that act in `lm diagnose`, such as eval.diagnostics.sequences=32.
        out: a .csv or .json file for all numbers.

    Raises:
        LMError: no model there, no training behind it whose text could be read, other data than it was trained on.
    """
    if out and out.suffix not in (".csv", ".json"):
        raise ConfigError(f"{out}: can't write results of this kind; name a .csv or .json file")
    changes = merge({"eval": {"diagnostics": {}}}, overrides_in("diagnose", overrides or []))
    found: list[Evaluated] = []
    for source in sources:
        folder = source if source.is_dir() else source.resolve().parent.parent
        if (folder / CONFIG).is_file():
            config = parse(merge(to_plain(read_config(folder)), changes))
            path = find_checkpoint(folder, checkpoint) if source.is_dir() else source
            found += evaluate(config, folder, path, KINDS)
        else:
            found.append(_of_model(load(source, checkpoint), changes))
    print_results(found)
    if out:
        write_table(found, out)
    return found


def _of_model(loaded: Loaded, changes: dict[str, Plain]) -> Evaluated:
    """Of an export, on the held-out text of the run that it is of; kept nowhere."""
    if loaded.config is None:
        raise RunError(f"{loaded.path}: has no training run behind it, of whose held-out text attention could be described")
    config = parse(merge(to_plain(loaded.config), changes))
    store = open_store(config, loaded)
    check_sequences(store, config)
    (asked,) = measurements(config, store, KINDS)
    where = open_device(config, loaded.environment)
    decoder = loaded.decoder.to(where.device)
    with Progress().bar(f"{loaded.folder.name}: {asked.kind}", asked.work) as advance:
        evaluation = measured(asked, decoder, where, loaded.stamp["step"], loaded.stamp["tokens_seen"], advance)
    return Evaluated(loaded.folder, evaluation, cached=False)
