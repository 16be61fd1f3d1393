"""Evaluations as callbacks of any Lightning Trainer, for modules that map tokens (B, T) to logits (B, T, V).

text = HeldOutText(["held-out.txt"], tokenizer="tokenizer.json", seq_len=256)
trainer = L.Trainer(callbacks=[LongContextLoss(text, every=500, length_factor=4)])
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import lightning  # noqa: F401 (before lm.training, which would import it without what `self.log` needs)

from lm.config.data_config import END_OF_TEXT
from lm.config.load import parse
from lm.data.prepare import prepare
from lm.evaluation.evaluation_kind import Measurement, measurements
from lm.schema import Plain
from lm.training.evaluation_callbacks import LongContextLoss, NeedleRetrieval

__all__ = ["HeldOutText", "LongContextLoss", "NeedleRetrieval"]


@dataclass(frozen=True)
class HeldOutText:
    """Text files that the model is not trained on, one document each.

    Args:
        tokenizer: a tokenizer.json of the `tokenizers` library, whose token `end_of_text` begins each document.
        seq_len: tokens in a training sequence of the model; lengths of evaluations are factors of it.
        root: the folder in which the files' tokens are kept, to be used again.
    """

    paths: Sequence[str]
    tokenizer: str
    seq_len: int
    end_of_text: str = END_OF_TEXT
    root: str = "data"

    def measurement(self, kind: str, options: dict[str, Plain]) -> Measurement:
        """Return a measurement on this text; `options` are those of `eval.KIND` in docs/config.md.

        Raises LMError: an option is wrong, or the text can't be read or is too short.
        """
        tokenizer = {"name": "file", "path": str(self.tokenizer), "end_of_text": self.end_of_text}
        source = {"name": "files", "paths": [*map(str, self.paths)]}
        data = {"source": source, "tokenizer": tokenizer, "seq_len": self.seq_len}
        config = parse(
            {
                "name": "held-out",
                "data": {**data, "root": self.root, "deduplicate": False},
                "optim": {"batch_tokens": self.seq_len},
                "eval": {"long_context": {"length_factor": 0}, kind: {**options, "inference": [{}]}},
            }
        )
        store = prepare(replace(config.data, val_fraction=1.0))  # all of it is held out, which a run can't ask for
        (measurement,) = measurements(config, store, [kind])
        return measurement
