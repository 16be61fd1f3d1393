"""Users name Lightning's callbacks and loggers in `trainer.callbacks` and `log.to`; this module imports and makes
them.
"""

from importlib import import_module

from lm.errors import ConfigError, Problem, one_line


def make_user_objects(key: str, entries: list[str | dict], base: type, mixin: type | None = None) -> list[object]:
    """Import the classes that a configuration lists under `key`, and return an instance of each, made with its options.

    Args:
        entries: the list's items: `package.module:Class`, or a dict with this as `name` and options beside it.
        base: the class of which each must be a subclass.
        mixin: a class put before each class, as its first base class.

    Raises ConfigError: a class can't be imported or made, or is no subclass of `base`.
    """
    instances = []
    for index, entry in enumerate(entries):
        options = {**entry} if isinstance(entry, dict) else {"name": entry}
        name = options.pop("name")
        module, _, attribute = name.partition(":")
        try:
            imported = getattr(import_module(module), attribute)
            if not issubclass(imported, base):
                raise TypeError(f"is no {base.__name__} of lightning.pytorch")
            instances.append((type(attribute, (mixin, imported), {"label": name}) if mixin else imported)(**options))
        except Exception as error:  # any error that the module or the constructor raises
            reason = f"can't be imported and made: {type(error).__name__}: {one_line(error)}"
            remedy = f"name a {base.__name__} and its options; of a file in this folder: PYTHONPATH=. lm ..."
            raise ConfigError([Problem(f"{key}[{index}]", name, reason, remedy)]) from None
    return instances
