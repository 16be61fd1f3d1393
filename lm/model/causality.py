"""Check that normalizers from outside lm let no token see later ones, before a run is trained with them."""

from lm.attention.contract import later_tokens_changes, randomized
from lm.config.tree import Config
from lm.errors import ConfigError, Problem

MAX_LENGTH = 512  # most tokens of the two sequences that are compared; they differ in the second half
TOLERANCE = 1e-9  # of outputs of size 1 in fp64


def check_causality(config: Config) -> None:
    """Check that no normalizer from outside gives an output that depends on later tokens, at the training length up to
    `MAX_LENGTH`.

    Raises ConfigError that names the normalizer.
    """
    length = min(MAX_LENGTH, config.data.seq_len)
    layers = [options for phase in config.plan for options in phase.normalizer.layer_options()]
    for options in layers:
        if ":" not in options.name:
            continue
        normalizer = randomized(options, train_length=length)
        if (later_tokens_changes(normalizer, length, length // 2) > TOLERANCE).any():
            reason = "gives a token weights that depend on later tokens, as if it forgot the mask"
            remedy = f"mask by layout.visible(); lm check-normalizer {options.name} tests it"
            raise ConfigError([Problem("model.normalizer", options.name, reason, remedy)])
