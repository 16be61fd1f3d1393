"""The standard deviation of next-token logits: docs/extending.md."""

from dataclasses import dataclass

from lm.config.eval_config import EvaluationConfig
from lm.data.batches import Batch
from lm.evaluation.evaluation_kind import Measurement
from lm.evaluation.held_out import by_sequence, validation_sequences
from lm.schema import key


@dataclass
class Spread(EvaluationConfig):
    """The standard deviation of logits at a position."""

    kind = "spread"
    measurement = "mine.evaluation:Measured"
    position: int = key(8, "in the sequence", ge=0)

    def wanted(self, data):
        return True


class Measured(Measurement):
    kind = "spread"
    work_units = 1

    @property
    def options(self):
        return {"position": self.eval_config.position}

    def measure(self, decoder, device, progress):
        held_out = validation_sequences(self.store, self.config)

        def spread(part):
            hidden = decoder.hidden(Batch.of(held_out.sequences[part]).to(device.device))
            return decoder.head(hidden[:, [self.eval_config.position]]).std(-1)

        values = by_sequence([decoder], [held_out.length] * len(held_out.sequences), (1,), device, spread, progress)
        samples = (held_out.sample(values),)  # by sequence: what intervals and verdicts need
        return [self.series("spread", "nats", "higher", values.mean(0), samples=samples, logged=("spread/logits",))]
