"""What is left to do of a run, as `lm` commands: swap the weights it starts from, train, measure."""

import json
from pathlib import Path

from lm.config.load import to_yaml
from lm.experiments.failures import log_path
from lm.experiments.procedure import Run
from lm.files import write_text
from lm.runs.folder import CONFIG
from lm.schema import to_plain


def commands(run: Run, experiment: Path) -> list[list[str]]:
    """The arguments of `lm` that do what is missing of a run, in their order; [] of one that has ended. Writes the configuration that
    training reads to the folder `experiment`. Each command can be stopped and started again."""
    if run.outcome.ended:
        return []
    config, folder = run.config, run.config.run_folder
    found, plugins = [], [f"--allow-plugin={name.partition('.')[0]}" for name in sorted(config.normalizer_names) if ":" in name]
    swapped = Path(config.init_from) if run.trained else folder
    if run.swap and not (swapped / CONFIG).exists():
        found.append(["swap", str(run.before), f"--to={run.swap.to}", f"--out={swapped}", *_init(run), *_options(run), *plugins])
    outcome = run.outcome
    if run.trained and (not outcome.trained or not outcome.complete or outcome.measured):  # it measures what a kill left unmeasured
        file = log_path(experiment, run, "yaml")
        write_text(file, to_yaml(config))
        found.append(["train", str(file), "resume=auto", "log.progress=none"])
    if not run.trained or not outcome.measured:
        found.append(["eval", str(folder), *run.evaluate, *plugins])
    return found


def _init(run: Run) -> list[str]:
    return [] if run.swap.init is None else [f"--init={run.swap.init}"]


def _options(run: Run) -> list[str]:
    """The new normalizer's options, but for its initial values, which `--init` gives."""
    options = to_plain(run.config.model.normalizer)
    return [f"model.normalizer.{name}={json.dumps(value)}" for name, value in options.items() if name not in ("name", "init")]
