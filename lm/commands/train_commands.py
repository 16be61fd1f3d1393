"""Defines the commands that are used before and during training: configurations, normalizers, token stores and runs."""

import json
from pathlib import Path
from shutil import get_terminal_size
from textwrap import shorten
from typing import Annotated

import typer

from lm.commands.arguments import AllowPlugin

ConfigArguments = Annotated[
    list[str],
    typer.Argument(metavar="CONFIG|KEY=VALUE", help="YAML files and overrides, e.g. optim.lr=3e-4; later ones win"),
]
PrintReference = Annotated[
    bool,
    typer.Option("--reference", help="print every key with type, default and description instead (docs/config.md)"),
]
PrintJsonSchema = Annotated[
    bool, typer.Option("--schema", help="print the JSON Schema of configurations instead, for editors")
]


def train(arguments: ConfigArguments, allow_plugin: AllowPlugin = None) -> None:
    """Train a model.

    Everything about the run is written to its run folder, runs/NAME, where NAME is the name of the first YAML file
    (`run` if there is none) unless name=NAME is given. resume=auto continues a run from its last checkpoint.
    """
    from lm.config.load import load_config
    from lm.training.train import refuse_moved_run_folder, train

    configuration = load_config(arguments)
    if not any(argument.startswith("name=") for argument in arguments):
        refuse_moved_run_folder(configuration, arguments)
    raise typer.Exit(train(configuration))


def prepare(arguments: ConfigArguments) -> None:
    """Read text or token ids into a token store.

    `lm train` does this by itself if the store does not exist (docs/data.md).

    \b
      lm prepare softmax 'data.source={name: files, paths: [texts]}'
      lm prepare softmax 'data.source={name: tokens, format: nanogpt, paths: [train.bin]}' \\
          'data.tokenizer={name: pretrained, model: openai-community/gpt2}'
    """
    from lm.config.load import load_config

    configuration = load_config(arguments)
    from lm.data.prepare import prepare

    prepare(configuration.data, progress=True)


def config(arguments: ConfigArguments = [], reference: PrintReference = False, schema: PrintJsonSchema = False) -> None:  # noqa: B006
    """Print the resolved configuration.

    If something is wrong with it, print every problem instead and exit with status 2.
    """
    from lm.config.load import load_config, to_yaml
    from lm.config.reference import reference_markdown

    if schema:
        from lm.config.reference import configuration_schema

        print(json.dumps(configuration_schema(), indent=1))
        return
    print(reference_markdown() if reference else to_yaml(load_config(arguments)), end="")


def metrics(arguments: Annotated[list[str] | None, ConfigArguments.__metadata__[0]] = None) -> None:
    """List the metrics that a configuration logs.

    Prints name, unit, better direction and meaning of each, and whether it can be an experiment's primary.metric.
    Without a configuration, prints the table of all metrics (docs/metrics.md).
    """
    from lm.evaluation.metrics import metrics_of, metrics_page

    if not arguments:
        print(metrics_page(), end="")
        return
    from lm.config.load import load_config
    from lm.report.tables import Column, Table, print_tables

    logged_metrics = metrics_of(load_config(arguments))
    rows = (
        (each.name_without_braces, each.unit, each.better, "yes" * each.can_decide, each.meaning)
        for each in logged_metrics
    )
    names = ("metric", "unit", "better", "can decide", "meaning")
    cells = zip(names, zip(*rows, strict=True), strict=True)
    print_tables(Table("", "", tuple((Column(name, kind="label"), [*texts]) for name, texts in cells)))


def configs(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="print this preset's file")] = None,
) -> None:
    """List the presets: configurations, recipes and experiments, or print one.

    Each can be named in place of a file: lm train softmax, lm compare recall.
    """
    from lm.config import presets
    from lm.errors import ConfigError

    if name:
        file = presets.find(name)
        file = file if file.is_file() else presets.find(name, "experiments")
        if not file.is_file():
            raise ConfigError(f"{name}: no such preset{presets.suggestion(Path(name))}")
        print(f"# {file}\n{file.read_text(encoding='utf-8')}", end="")
        return
    rows = list(presets.list_presets())
    width = max(len(name) for name, _ in rows)
    room = max(20, get_terminal_size((1000, 0)).columns - width - 2)  # a pipe gets whole descriptions
    for name, description in rows:
        print(f"{name:{width}}  {shorten(description, room, placeholder=' ...')}".rstrip())


def normalizers(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="print everything about this normalizer")] = None,
) -> None:
    """List the attention normalizers with their formulas, or print formula, parameters, source and options of one.

    The whole table is docs/normalizers.md.
    """
    from lm.attention.catalogue import OPTIONS_BY_NAME
    from lm.config.reference import normalizer_lines
    from lm.errors import ConfigError, suggestion_or_all_names

    if name and name not in OPTIONS_BY_NAME:
        raise ConfigError(f"{name}: no normalizer of lm's; {suggestion_or_all_names(name, OPTIONS_BY_NAME)}")
    width = max(map(len, OPTIONS_BY_NAME))
    formulas = [f"{entry:{width}}  {OPTIONS_BY_NAME[entry].full_formula}" for entry in OPTIONS_BY_NAME]
    print("\n".join(normalizer_lines(name) if name else formulas))


def check_normalizer(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="a normalizer, e.g. ssmax; one of your own: package.module:Class")
    ],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="OPTION=VALUE", help="its options, e.g. bias=true")
    ] = None,
) -> None:
    """Test a normalizer against its contract.

    The contract consists of promises that lm relies on. Prints one line for each promise; the exit status is 1 if a
    promise is broken (docs/normalizers-own.md).
    """
    from lm.config.load import load_normalizer

    normalizer = load_normalizer(name, options or [])
    from lm.attention.contract import check_promises
    from lm.plugins import PLUGINS

    results = [
        (part.label(), *result)
        for part in normalizer.layer_options()
        for result in check_promises(part, PLUGINS.failure_and_check_command)
    ]
    for label, promise, breach in results:
        print(f"{label}: {'BROKEN' if breach else 'kept'}: {promise}" + (f": {breach}" if breach else ""))
    broken_count = sum(bool(breach) for *_, breach in results)
    broken = f", {broken_count} broken" * bool(broken_count)
    print(f"{len(results) - broken_count} of {len(results)} promises are kept{broken}")
    if broken_count:
        raise typer.Exit(1)
