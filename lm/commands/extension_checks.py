"""`lm check-extension`: the promises of optimizers, sources of text, synthetic tasks and evaluations from outside lm,
each as a check.

The first line of a check's docstring is the promise, the rest a hint for the author, as in `lm.attention.contract`.
"""

import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import torch

from lm.attention.contract import checked_promises, require
from lm.config.data_config import SOURCES, OutsideSource
from lm.config.eval_config import EVALUATIONS, EvaluationConfig
from lm.config.load import parse, read_overrides
from lm.config.model_config import ModelConfig
from lm.config.task_config import TASKS, Task
from lm.config.training_config import OPTIMIZERS, OptimConfig, Optimizer
from lm.config.tree import Config
from lm.data.batches import Batch
from lm.data.prepare import prepare
from lm.data.store import Store
from lm.data.tasks import Text, example
from lm.errors import ConfigError, Problem
from lm.evaluation.evaluation_kind import measurements
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.plugins import PLUGINS, Registry
from lm.schema import Plain, build_named, to_plain
from lm.training.optimizers import load_named_state, make_optimizer, named_state, optimizer_mismatch

VOCABULARY, LENGTH = 60, 32
MAX_DOCUMENTS = 1000  # most documents that the checks read from a source
STEPS_PER_START = 23  # steps before an optimizer's state is saved, and steps after; a prime, which no period divides


def _decoder(device: str = "cpu", vocabulary: int = VOCABULARY) -> Decoder:
    with torch.random.fork_rng([]), torch.device(device):
        return Decoder(ModelConfig(2, n_head=2, n_embd=16), vocabulary, LENGTH, seed=0 if device == "cpu" else None)


def _optimizer(options: Optimizer, decoder: Decoder) -> torch.optim.Optimizer:
    return make_optimizer(decoder, OptimConfig(optimizer=options))


def _step(optimizer: torch.optim.Optimizer, decoder: Decoder, rate: float) -> float:
    """Make one optimizer step at the learning rate `rate` on a fixed batch; return the loss before the step, in nats
    per token.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    tokens = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = decoder.loss(Batch.of(tokens)) / (4 * LENGTH)
        loss.backward()
        losses.append(loss.item())
        return loss

    optimizer.step(closure)
    if len(losses) != 1:
        raise RuntimeError(f"`step` calls its closure, which computes the gradients, {len(losses)} times")
    return losses[0]


def lower_loss(options: Optimizer) -> None:
    """twenty steps at a rate of 0.001 lower the loss of the batch that they are made on

    `make` gives a torch optimizer of `groups`; the rate of a group is its `lr`, which lm sets before each step
    """
    decoder = _decoder()
    optimizer = _optimizer(options, decoder)
    losses = [_step(optimizer, decoder, 1e-3) for _ in range(21)]
    require(losses[-1] < losses[0], f"the loss goes from {losses[0]:.4f} to {losses[-1]:.4f}")


def rate_of_zero(options: Optimizer) -> None:
    """at a rate of 0 no parameter changes

    read `group["lr"]` at each step, and multiply weight decay by it, too
    """
    decoder, initial_parameters = _decoder(), dict(_decoder().named_parameters())
    _step(_optimizer(options, decoder), decoder, 0.0)
    changed_names = [
        name for name, parameter in decoder.named_parameters() if not torch.equal(parameter, initial_parameters[name])
    ]
    require(not changed_names, f"{len(changed_names)} parameters change, {', '.join(changed_names[:2])} among them")


def resumed_state(options: Optimizer) -> None:
    """training resumed from the optimizer's state, which is saved by parameter name, goes on to the bit as if it had
    not stopped

    keep what a step needs from earlier steps in `self.state[parameter]`, as tensors or numbers
    """
    decoders = _decoder(), _decoder()
    optimizers = [_optimizer(options, decoder) for decoder in decoders]
    for _ in range(STEPS_PER_START):
        _step(optimizers[0], decoders[0], 1e-2)
    decoders[1].load_state_dict(decoders[0].state_dict())
    load_named_state(optimizers[1], named_state(optimizers[0]))
    for optimizer, decoder in zip(optimizers, decoders, strict=True):
        for _ in range(STEPS_PER_START):
            _step(optimizer, decoder, 1e-2)
    for (name, a), b in zip(decoders[0].named_parameters(), decoders[1].parameters(), strict=True):
        require(torch.equal(a, b), f"{name} differs after {STEPS_PER_START} steps from the saved state")


def meta_device_state(options: Optimizer) -> None:
    """a step on torch's meta device makes optimizer state of the same names and shapes as a real step; lm checks
    checkpoints by this

    create state by `torch.zeros_like(parameter)`, and read no number of a tensor on the host
    """
    decoder = _decoder()
    optimizer = _optimizer(options, decoder)
    _step(optimizer, decoder, 1e-2)
    mismatch = optimizer_mismatch(
        _decoder("meta"), Config(optim=OptimConfig(optimizer=options)), named_state(optimizer)
    )
    require(not mismatch, mismatch)


def same_documents(source: OutsideSource) -> None:
    """`documents` gives the same texts at every call, and at least one of them is not blank

    read from files or a fixed seed, in a fixed order
    """
    documents, repeated_documents = (list(islice(source.documents(), MAX_DOCUMENTS)) for _ in range(2))
    require(all(isinstance(text, str) for text in documents), "a document is no text")
    require(any(text.strip() for text in documents), "all documents are blank")
    require(documents == repeated_documents, "the second call gives other documents")


def plain_identity(source: OutsideSource) -> None:
    """`identity` is plain data, the same each time, and label and licence are texts

    plain data are numbers, texts, lists and maps, e.g. the sha256 of the files that are read
    """
    require(
        json.loads(json.dumps(source.identity())) == source.identity(), "`identity` differs, or is not what JSON holds"
    )
    require(isinstance(source.label, str) and isinstance(source.licence(), str), "label or licence is no text")


def pure_sequences(task: Task) -> None:
    """a sequence is a function of seed, subset and index alone, and has length + 1 tokens of the vocabulary

    take all random numbers from `draw`
    """
    with _task_text(task) as text:
        for subset in ("train", "test"):
            for index in range(20):
                sample, repeated_sample = (example(task, 1, index, 256, subset, text) for _ in range(2))
                require(
                    bool((sample.tokens == repeated_sample.tokens).all()),
                    f"{subset} sequence {index} differs the second time",
                )


def answers_in_place(task: Task) -> None:
    """questions lie in the sequence, and evidence, where there is any, shows the answer

    spans are [start, stop) in `tokens`; evidence of (0, 0) says that the sequence does not show it
    """
    with _task_text(task) as text:
        samples = [example(task, 1, index, 256, text=text) for index in range(20)]
    for sample in samples:
        for (start, stop), (first, last) in zip(sample.questions, sample.evidence, strict=True):
            can_be_answer = last - first != stop - start or bool(
                (sample.tokens[first:last] == sample.tokens[start:stop]).all()
            )
            require(can_be_answer, f"the evidence [{first}, {last}) is not the answer [{start}, {stop})")


def different_sequences(task: Task) -> None:
    """all sequences, training and test, differ from one another

    `entropy` is at most the entropy of a sequence, in nats
    """
    with _task_text(task) as text:
        sequences = [
            example(task, 1, index, 256, subset, text).tokens.tobytes()
            for subset in ("train", "test")
            for index in range(20)
        ]
    require(
        len(set(sequences)) == len(sequences) or task.n_distinct(256, "test") < len(sequences),
        "two of 40 sequences are the same",
    )


@contextlib.contextmanager
def _task_text(task: Task) -> Iterator[Text | None]:
    """Yield made-up `Text` for a task in text, or None for a task over symbols, which needs no text."""
    if task.vocab_size is not None:
        yield None
        return
    with _made_up_text([]) as (_, store):
        yield Text(store)


@contextlib.contextmanager
def _made_up_text(evaluations: list[EvaluationConfig]) -> Iterator[tuple[Config, Store]]:
    """Yield a configuration with a corpus of made-up text and the plugins `evaluations`, and the token store of that
    corpus.
    """
    words = ["a short text", "of words that are made up", "for an evaluation", "to be measured on"]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(12):
            text = " ".join(words[(number + word_index) % 4] + f" {word_index % 7}." for word_index in range(120))
            Path(folder, f"{number}.txt").write_text(text, encoding="utf-8")
        config = parse(
            {
                "name": "check", "eval": {"others": [to_plain(options) for options in evaluations]},
                "data": {
                    "source": {"name": "files", "paths": [folder]}, "root": str(Path(folder, "stores")),
                    "seq_len": LENGTH,
                    "tokenizer": {"name": "train", "vocab_size": 280}, "val_fraction": 0.3,
                },
            }
        )  # fmt: skip
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            store = prepare(config.data)
        yield config, store


def _measure_twice(options: EvaluationConfig) -> Iterator[tuple[Decoder, list[Plain]]]:
    """Run the evaluation twice on one decoder and made-up text; after each run, yield the decoder and the measured
    series.
    """
    with _made_up_text([options]) as (config, store):
        decoder = _decoder(vocabulary=store.vocab_size).eval()
        (measurement,) = measurements(config, store, [options.kind])
        for seed in range(2):
            with torch.random.fork_rng([]):
                torch.manual_seed(seed)
                evaluation = measurement.evaluate(decoder, Device(torch.device("cpu"), bf16=False), 0, 0)
            yield decoder, json.loads(json.dumps([series.plain() for series in evaluation.series]))


def same_numbers(options: EvaluationConfig) -> None:
    """the evaluation gives the same series each time, which JSON can hold, and `wanted` is true with these options

    give the options that switch it on; draw from a generator of a fixed seed
    """
    require(options.wanted(Config().data), "with these options it is not wanted")
    (_, series), (_, repeated_series) = _measure_twice(options)
    require(len(series) > 0, "it gives no series")
    require(series == repeated_series, "the second time it gives other numbers")


def leaves_model(options: EvaluationConfig) -> None:
    """the decoder's weights and its evaluation mode stay as they are

    train a copy, if you train; lm restores the state of random numbers
    """
    for decoder, _ in _measure_twice(options):
        parameters = zip(decoder.parameters(), _decoder(vocabulary=decoder.vocab_size).parameters(), strict=True)
        require(all(torch.equal(a, b) for a, b in parameters), "weights have changed")
        require(not decoder.training, "the decoder is left in training mode")


KINDS: dict[str, tuple[Registry, tuple[Callable[..., None], ...]]] = {  # by kind: its table of classes, and its checks
    "optimizer": (OPTIMIZERS, (lower_loss, rate_of_zero, resumed_state, meta_device_state)),
    "source": (SOURCES, (same_documents, plain_identity)),
    "task": (TASKS, (pure_sequences, answers_in_place, different_sequences)),
    "evaluation": (EVALUATIONS, (same_numbers, leaves_model)),
}


def check_extension(kind: str, name: str, overrides: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (promise, breach) for each promise of an extension, both in words; the breach is empty if the promise is
    kept.

    Args:
        kind: a key of `KINDS`, such as `optimizer`.
        name: `package.module:Class`, or an entry point's name.
        overrides: `option=value`, options of the class.

    Raises ConfigError: the class can't be imported, is of another kind or lm's own, or has no such options.
    """
    table, checks = KINDS[kind]
    with PLUGINS.trusted():
        options = build_named(table, {"name": name, **read_overrides(overrides)}, kind)
    if not isinstance(options, table.kind.base):
        raise ConfigError(
            [Problem(kind, name, "is lm's own, and promises nothing to others", "name yours: package.module:Class")]
        )
    return checked_promises(options, checks)
