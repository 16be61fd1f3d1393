"""These callbacks measure the loss in long sequences, and the accuracy on needles, during training in any Lightning
Trainer. The module that is trained must map tokens (B, T) to logits (B, T, V).

text = HeldOutText(["held-out.txt"], tokenizer="tokenizer.json", seq_len=256)
trainer = L.Trainer(callbacks=[LongContextLoss(text, every=500, length_factor=4)])
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import lightning as L

from lm.config.data_config import END_OF_TEXT
from lm.config.load import parse_config
from lm.data.prepare import prepare
from lm.evaluation.measurement import Measurement
from lm.evaluation.metrics import create_measurements
from lm.model.decoder import LogitsModel
from lm.model.device import Device
from lm.plain import Plain
from lm.runs.evaluations import logged_means

__all__ = ["HeldOutText", "LongContextLoss", "NeedleRetrieval"]


@dataclass(frozen=True)
class HeldOutText:
    """Text files that the model is not trained on, one document each.

    Args:
        tokenizer: a tokenizer.json of the `tokenizers` library, whose token `end_of_text` begins each document.
        seq_len: tokens in a training sequence of the model; lengths of evaluations are multiples of it.
        root: the folder in which the files' tokens are kept, to be used again.
    """

    paths: Sequence[str]
    tokenizer: str
    seq_len: int
    end_of_text: str = END_OF_TEXT
    root: str = "data"

    def measurement(self, kind: str, options: dict[str, Plain]) -> Measurement:
        """Return an object that measures models on this text. `kind` names the kind of evaluation, such as
        `long_context`; `options` are the keys of its block in `eval` (docs/config.md).

        Raises LMError: an option is wrong, or the text can't be read or is too short.
        """
        tokenizer = {"name": "file", "path": str(self.tokenizer), "end_of_text": self.end_of_text}
        source = {"name": "files", "paths": [*map(str, self.paths)]}
        data = {"source": source, "tokenizer": tokenizer, "seq_len": self.seq_len}
        config = parse_config(
            {
                "name": "held-out",
                "data": {**data, "root": self.root, "deduplicate": False},
                "optim": {"batch_tokens": self.seq_len},
                "eval": {"long_context": {"length_factor": 0}, kind: {**options, "inference": [{}]}},
            }
        )
        store = prepare(replace(config.data, val_fraction=1.0))  # all of it is held out, which a run can't ask for
        (measurement,) = create_measurements(config, store, [kind])
        return measurement


class TextEvaluation(L.Callback):
    """Measures the model on a text during training, and logs the mean of each metric by `self.log`, on all ranks. A
    subclass names the kind of evaluation.

    Args:
        text: the text to measure on.
        every: number of steps from one measurement to the next; None: measure at the last of `max_steps` alone.
        options: the keys of the evaluation's block in `eval`, such as `eval.needle`.
    """

    kind: ClassVar[str]  # the key of the evaluation's options in `eval`

    def __init__(self, text: HeldOutText, *, every: int | None = None, **options: Plain):
        self.measurement, self.every = text.measurement(self.kind, options), every

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Make the measurement if it is due after an optimizer step."""
        step, is_step = trainer.global_step, (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if is_step and (step == trainer.max_steps or (self.every and step % self.every == 0)):
            device = Device(module.device, "bf16" in str(trainer.precision), trainer.global_rank, trainer.world_size)
            result = self.measurement.evaluate(LogitsModel(module), device, step, 0)
            self.log_dict(logged_means(result), batch_size=1)


class LongContextLoss(TextEvaluation):
    """Measures the loss by position in sequences beyond the training length (`eval.long_context`)."""

    kind = "long_context"


class NeedleRetrieval(TextEvaluation):
    """Measures the accuracy on needles in a haystack, by length and depth (`eval.needle`)."""

    kind = "needle"
