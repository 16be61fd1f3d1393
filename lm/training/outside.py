"""Lightning's callbacks and loggers from outside, which `trainer.callbacks` and `log.to` name."""

from importlib import import_module

from lm.errors import ConfigError, Problem, one_line


def outside_objects(key: str, entries: list[str | dict], base: type, mixin: type | None = None) -> list[object]:
    """Import the classes that `entries` of the list `key` name; return an instance of each, made with its options.

    base: the class of which each must be a subclass. mixin: a class put before each class, as its first base class.

    Raises ConfigError: a class can't be imported or made, or is of another kind.
    """
    instances = []
    for index, entry in enumerate(entries):
        options = {**entry} if isinstance(entry, dict) else {"name": entry}
        name = options.pop("name")

        def problem(reason: str, remedy: str, path: str = f"{key}[{index}]", name: str = name) -> ConfigError:
            return ConfigError([Problem(path, name, reason, remedy)])

        module, _, attribute = name.partition(":")
        try:
            imported = getattr(import_module(module), attribute)
        except Exception as error:  # any error that the module raises
            remedy = "install its package, or mend the name or its code; of a file in this folder: PYTHONPATH=. lm ..."
            raise problem(f"can't be imported: {type(error).__name__}: {one_line(error)}", remedy) from None
        if not (isinstance(imported, type) and issubclass(imported, base)):
            raise problem(f"is no {base.__name__} of lightning.pytorch", f"name a subclass of {base.__name__}")
        try:
            instances.append((type(attribute, (mixin, imported), {"label": name}) if mixin else imported)(**options))
        except Exception as error:  # any error that its constructor raises
            raise problem(f"can't be made: {type(error).__name__}: {one_line(error)}", "mend its options") from None
    return instances
