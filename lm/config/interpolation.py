"""`${...}` in a user's configuration: the values of other keys and of environment variables, resolved by OmegaConf."""

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lm.config.yaml_text import MAX_NODES
from lm.errors import ConfigError, abbreviated, one_line
from lm.schema import Plain

MAX_INTERPOLATIONS = 16  # in a configuration; OmegaConf expands each again wherever it is named: at most some 3^(16 / 3) times


def interpolated(plain: dict[str, Plain]) -> dict[str, Plain]:
    """The user's own keys, with their interpolations `${...}` resolved.

    Configurations of checkpoints and exports are data, and are never interpolated: they could read the user's environment.

    Raises:
        ConfigError: an interpolation can't be resolved, or there are so many that expanding them could take for ever.
    """
    texts = [text for text in _texts(plain) if "${" in text]
    if not texts:
        return plain
    if sum(text.count("${") for text in texts) > MAX_INTERPOLATIONS:
        raise ConfigError(f"the configuration has more than {MAX_INTERPOLATIONS} interpolations ${{...}}: write some of the values out")
    try:
        found = OmegaConf.to_container(OmegaConf.create(plain), resolve=True)
    except RecursionError:
        raise ConfigError(f"{abbreviated(texts[0], 80)}: an interpolation refers to itself") from None
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(one_line(error)) from None
    if sum(1 for _ in _texts(found, every=True)) > MAX_NODES:
        raise ConfigError(f"the configuration has more than {MAX_NODES:,} values once its interpolations are resolved")
    return found


def _texts(value: Plain, every: bool = False):
    """The texts among the values of nested data; `every`: all values."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item, every)
    elif every or isinstance(value, str):
        yield value
