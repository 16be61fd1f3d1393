"""What scripts/pretrained.py measures of a pretrained model, part by part, each kept in a file."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from lm.attention.catalogue import LogN, Softmax, SSMax
from lm.attention.options import Options
from lm.config.load import load_config, merge, overrides_in, parse
from lm.config.tree import Config
from lm.data.batches import Batch
from lm.data.prepare import prepare
from lm.errors import RunError
from lm.evaluation.evaluate import open_device, text_config
from lm.evaluation.evaluation_kind import Measurement, measurements
from lm.evaluation.swap import SwapMeasurement, swap_run
from lm.files import read_json, write_json
from lm.model.decoder import Decoder
from lm.model.swapped import fit_normalizers, with_normalizer
from lm.runs.checkpoints import weights_sha256
from lm.runs.evaluations import Evaluation, evaluation_path
from lm.runs.folder import with_shape_of
from lm.runs.loading import load
from lm.schema import Plain, to_plain
from lm.training.train import train

SCALES = (0.8, 0.9, 1.0, 1.1, 1.25)  # factors on the logits that are compared, means over a sequence
SWAPS: dict[str, list[str]] = {"ssmax": ["ssmax"], "bias": ["ssmax", "model.normalizer.bias=true"], "log_n": ["log_n"]}
NORMALIZERS: dict[str, Options] = {"softmax": Softmax(), "ssmax": SSMax(), "bias": SSMax(bias=True), "log_n": LogN()}
TRAINED = {  # arm -> its normalizer, and the training that its weights are from
    "s trained": ("ssmax", "train_s"),
    "ssmax trained": ("ssmax", "train_ssmax"),
    "softmax trained": ("softmax", "train_softmax"),
    "ssmax trained, under softmax": ("softmax", "train_ssmax"),
    "softmax trained, under ssmax": ("ssmax", "train_softmax"),
}
REMEDY = "choose another --out, or remove that one"
OWN = tuple(
    arm for arm in TRAINED if "under" not in arm
)  # trained weights under the normalizer that they were trained with


@dataclass(frozen=True)
class Needles:
    """A grid of needles: lengths in training lengths, depths, trials a cell."""

    lengths: tuple[float, ...]
    depths: tuple[float, ...]
    trials: int
    heads_at: float | None = None


@dataclass(frozen=True)
class Sizes:
    """Lengths, in training lengths of the model (8,192 tokens), and how many sequences, trials and steps.

    Attributes:
        positions, beyond, within: length and number of sequences of the loss by position: of the model alone, of all
            arms beyond its context, and of all arms and scales within it.
        swaps: lengths at which swaps are measured, on `swap_sequences` sequences each.
        needles: by the name of the part.
        asked: needles that every arm is asked for.
        fit: length and number of the training sequences that SSMax is fitted on.
        train: length of the training sequences, one a step.
        steps: of each training.
        rates: peak learning rate of each.
    """

    positions: tuple[float, int] = (2, 2)
    beyond: tuple[float, int] = (1.5, 3)
    within: tuple[float, int] = (1 / 4, 6)
    swaps: tuple[float, ...] = (1 / 16, 1 / 4)
    swap_sequences: int = 3
    needles: dict[str, Needles] = field(
        default_factory=lambda: {
            "needles": Needles((1 / 16, 1 / 4), (0.0, 0.5, 1.0), 4, heads_at=1 / 4),
            "needles_half": Needles((1 / 2,), (0.0, 0.5, 1.0), 3),
            "needles_whole": Needles((1.0,), (0.5,), 2),
            "needles_beyond": Needles((1.5,), (0.5,), 2),
        }
    )
    asked: Needles = Needles((1 / 4,), (0.5,), 4)
    diagnostics: tuple[float, int, int] = (1 / 8, 4, 64)  # length, sequences, queries
    fit: tuple[float, int] = (1 / 8, 2)
    train: float = 1 / 16
    steps: dict[str, int] = field(default_factory=lambda: {"train_s": 100, "train_ssmax": 100, "train_softmax": 100})
    rates: dict[str, float] = field(
        default_factory=lambda: {"train_s": 5e-3, "train_ssmax": 5e-5, "train_softmax": 5e-5}
    )


@dataclass(frozen=True)
class Result:
    """What a part gave.

    Attributes:
        seconds, cpu_seconds: what it took, on the clock and of the processor.
        evaluations: by arm.
        facts: other numbers.
        fingerprint: what it was measured of and with (`Workbench.fingerprint`).
    """

    seconds: float
    cpu_seconds: float
    evaluations: dict[str, Evaluation]
    facts: dict[str, Plain]
    fingerprint: dict[str, Plain]

    @classmethod
    def read(cls, path: Path) -> "Result":
        """As `write` has written it. Raises RunError: it can't be read."""
        content = read_json(path)
        evaluations = {arm: Evaluation.from_plain(evaluation) for arm, evaluation in content["evaluations"].items()}
        return cls(
            content["seconds"], content["cpu_seconds"], evaluations, content["facts"], content.get("fingerprint", {})
        )

    def write(self, path: Path) -> None:
        write_json(
            path,
            vars(self) | {"evaluations": {arm: evaluation.plain() for arm, evaluation in self.evaluations.items()}},
        )


Made = dict[str, Evaluation] | tuple[dict[str, Evaluation], dict[str, Plain]]


@dataclass(frozen=True)
class Part:
    """Something that is measured, or a training.

    Attributes:
        measure: gives its numbers.
        asked: what of `Sizes` it is measured with.
        needs: the parts that make the weights that it starts from.
    """

    measure: Callable[[], Made]
    asked: object
    needs: tuple[str, ...] = ()


class Workbench:
    """A pretrained model, a text, and a folder for what comes out.

    Args:
        model: a model folder, as `lm import` writes it.
        text: configuration of the text.
        out: folder of results and of swapped and trained models.
        overrides: `key=value` of the configuration of the text, such as `trainer.threads=1`.
    """

    def __init__(self, model: Path, text: Path, out: Path, overrides: list[str], sizes: Sizes):
        self.model, self.text, self.out, self.overrides, self.sizes = model, text, out, overrides, sizes
        self.loaded = load(model)
        self.config = self._config()
        self.store = prepare(self.config.data, progress=True)
        self.weights = weights_sha256(self.loaded.decoder.state_dict())

    def _config(self, *overrides: str) -> Config:
        changes = overrides_in("eval", [*self.overrides, *overrides])
        return parse(merge(to_plain(text_config(self.loaded, [self.text])), changes))

    def _measured(self, measurement: Measurement, decoder: Decoder) -> Evaluation:
        return measurement.evaluate(decoder, open_device(self.config, {}), 0, 0)

    def measure(self, kind: str, decoder: Decoder, *overrides: str) -> Evaluation:
        """One kind of evaluation of a decoder, with changes of its options."""
        (measurement,) = measurements(self._config(*overrides), self.store, [kind])
        return self._measured(measurement, decoder)

    def decoder(self, arm: str) -> Decoder:
        """The model with another normalizer, or with trained weights."""
        if arm in NORMALIZERS:
            return with_normalizer(self.loaded.decoder, NORMALIZERS[arm])
        if arm == "fit":
            decoder = with_normalizer(self.loaded.decoder, NORMALIZERS["ssmax"])
            for module, s in zip(decoder.normalizers(), self.result("swap_fit").facts["s"], strict=True):
                module.s.data = torch.tensor(s)
            return decoder
        normalizer, training = TRAINED[arm]
        decoder = with_normalizer(self.loaded.decoder, NORMALIZERS[normalizer])
        weights = load(self.out / training).decoder.state_dict()
        decoder.load_state_dict(
            {name: value for name, value in weights.items() if name in decoder.state_dict()}, strict=False
        )
        return decoder

    def loss(self, arm: str, size: tuple[float, int], decoder: Decoder | None = None) -> dict[str, Evaluation]:
        """Loss by position of sequences within one document each, so long and so many."""
        override = f"eval.long_context={{length_factor: {size[0]}, sequences: {size[1]}, inference: [{{}}]}}"
        return {arm: self.measure("long_context", decoder or self.decoder(arm), override)}

    def needle(self, arm: str, size: Needles) -> dict[str, Evaluation]:
        """Needles by length and depth, and the control without them."""
        options = f"length_factors: {list(size.lengths)}, depths: {list(size.depths)}, trials: {size.trials}"
        heads = "" if size.heads_at is None else f", heads_at: {size.heads_at}"
        return {arm: self.measure("needle", self.decoder(arm), f"eval.needle={{{options}{heads}}}")}

    def scaled(self, name: str, scale: float) -> dict[str, Evaluation]:
        """Loss within the context where the logits have the factor `scale`: everywhere, or as a mean over the sequence,
        growing as ln n.
        """
        length = int(self.sizes.within[0] * self.loaded.spec.seq_len)
        mean = torch.arange(1, length + 1, dtype=torch.float64).log().mean().item()
        normalizer = Softmax(temperature=1 / scale) if name == "softmax" else SSMax(init=scale / mean)
        return self.loss(f"{name} x {scale:g}", self.sizes.within, with_normalizer(self.loaded.decoder, normalizer))

    def swap(self, name: str) -> Made:
        """`lm swap`: a run folder, and how far its outputs are from the model's."""
        target, *options = SWAPS[name]
        if (self.out / name).is_dir():  # stopped before the part's result was written
            evaluation = Evaluation.from_plain(read_json(evaluation_path(self.out / name, SwapMeasurement.kind, 0)))
            if (evaluation.options, evaluation.data_fingerprint) != (
                self._continuity().options,
                self.store.fingerprint,
            ):
                raise RunError(f"{self.out / name}: a swap of another model, or measured on other sequences: {REMEDY}")
            return {name: evaluation}
        result = swap_run(
            self.model, "last", target, None, self.out / name, [*self._swap_options(), *options], [self.text]
        )
        return {name: result.evaluation}

    def _continuity(self) -> SwapMeasurement:
        return SwapMeasurement(self._config(*self._swap_options()), self.store, self.loaded.decoder)

    def _swap_options(self) -> list[str]:
        lengths, count = list(self.sizes.swaps), self.sizes.swap_sequences
        return [*self.overrides, f"eval.swap_lengths={lengths}", f"eval.long_context.sequences={count}"]

    def fitted(self) -> Made:
        """SSMax whose s is chosen for the least KL divergence from the model, on a few training sequences."""
        length, count = int(self.sizes.fit[0] * self.loaded.spec.seq_len), self.sizes.fit[1]
        old, new = self.loaded.decoder, self.decoder("ssmax")
        open_device(self.config, {})  # sets the number of threads
        starts = np.arange(count) * ((self.store.train.n_tokens - length - 1) // count)
        before, after = fit_normalizers(
            old, new, [Batch.of(sequence[None]) for sequence in self.store.train.take(starts, length + 1)]
        )
        return {"fit": self._measured(self._continuity(), new)}, {"before": before, "after": after, "s": scales(new)}

    def train(self, name: str) -> Made:
        """A run folder, trained from the model or from its swap to SSMax."""
        length, steps = int(self.sizes.train * self.loaded.spec.seq_len), self.sizes.steps[name]
        source = [str(self.text), f"init_from={self.model}"]
        if name != "train_softmax":
            source = [str(self.out / "ssmax" / "config.yaml"), f"init_from={self.out / 'ssmax'}"]
        extra_options = {
            "train_s": ["train_only=normalizer"],
            "train_ssmax": ["optim.groups.normalizer.lr_factor=100"],
        }.get(name, [])
        options = [
            *self.overrides,
            f"name={name}",
            f"runs={self.out}",
            "resume=auto",
            f"data.seq_len={length}",
            f"optim={{lr: {self.sizes.rates[name]}, batch_tokens: {length}, warmup_steps: {steps // 10}}}",
            f"trainer={{max_steps: {steps}, checkpoint_every: {steps}, compile: false}}",
            f"eval={{every: {steps}, sequences: 16, long_context: {{length_factor: 0}}}}",
        ]
        status = train(load_config([*source, *options, *extra_options], with_shape_of))
        if status:
            raise RunError(
                f"{self.out / name}: training was stopped; the same command goes on from its last checkpoint"
            )
        decoder = load(self.out / name).decoder
        return {}, {"s": scales(decoder)}

    @cached_property
    def parts(self) -> dict[str, Part]:
        """All parts by name, those that others need first."""
        sizes, parts = self.sizes, {}
        length, sequences, queries = sizes.diagnostics
        override = (
            f"eval.diagnostics={{statistics: [concentration, sparsity, limits], length_factor: {length}, "
            f"sequences: {sequences}"
        )
        override += f", queries: {queries}}}"
        swaps = {"lengths": sizes.swaps, "sequences": sizes.swap_sequences}
        parts["positions"] = Part(lambda: self.loss("softmax", sizes.positions), sizes.positions)
        parts["diagnostics"] = Part(
            lambda: {"softmax": self.measure("diagnostics", self.decoder("softmax"), override)}, sizes.diagnostics
        )
        parts["needles"] = self._needles("softmax", sizes.needles["needles"])
        parts["swap_ssmax"] = Part(lambda: self.swap("ssmax"), swaps)
        for name in ("softmax", "ssmax"):
            for scale in SCALES:
                parts[f"scale_{name}_{scale:g}"] = Part(
                    lambda name=name, scale=scale: self.scaled(name, scale), sizes.within
                )
        for name, steps in sizes.steps.items():
            training = {"length": sizes.train, "steps": steps, "rate": sizes.rates[name]}
            parts[name] = Part(
                lambda name=name: self.train(name), training, () if name == "train_softmax" else ("swap_ssmax",)
            )
        parts |= {f"within_{slug(arm)}": self._loss(arm, sizes.within) for arm in (*TRAINED, "ssmax", "log_n")}
        parts |= {f"asked_{slug(arm)}": self._needles(arm, sizes.asked) for arm in ("ssmax", *OWN)}
        parts |= {f"swap_{name}": Part(lambda name=name: self.swap(name), swaps) for name in ("log_n", "bias")}
        parts["swap_fit"] = Part(self.fitted, {"fit": sizes.fit, **swaps})
        parts |= {
            f"beyond_{slug(arm)}": self._loss(arm, sizes.beyond) for arm in ("softmax", "ssmax", *OWN, "log_n", "fit")
        }
        parts |= {name: self._needles("softmax", size) for name, size in sizes.needles.items() if name != "needles"}
        return parts

    def _loss(self, arm: str, size: tuple[float, int]) -> Part:
        return Part(lambda: self.loss(arm, size), size, _needed(arm))

    def _needles(self, arm: str, size: Needles) -> Part:
        return Part(lambda: self.needle(arm, size), asdict(size), _needed(arm))

    def fingerprint(self, part: str) -> dict[str, Plain]:
        """All that decides a part's numbers beside the code: the model, the text, options, and the sizes of the part
        and those it needs.
        """
        needed = [part]
        for name in needed:
            needed += self.parts[name].needs
        sizes = json.loads(
            json.dumps({name: self.parts[name].asked for name in needed})
        )  # as it is read back: without tuples
        return {"weights": self.weights, "data": self.store.fingerprint, "overrides": self.overrides, "sizes": sizes}

    def result(self, part: str) -> Result | None:
        """The result of a part; None: it is not there. Raises RunError: it can't be read, or has another
        fingerprint.
        """
        path = self.path(part)
        if not path.is_file():
            return None
        result = Result.read(path)
        if differing := [
            name for name, value in self.fingerprint(part).items() if result.fingerprint.get(name) != value
        ]:
            raise RunError(f"{path}: was measured with other {', '.join(differing)}: {REMEDY}")
        return result

    def path(self, part: str) -> Path:
        return self.out / "results" / f"{part}.json"

    def run(self, part: str) -> None:
        """Measure a part, unless its result is there. Raises RunError: a part that it needs is not."""
        if self.result(part):
            print(f"{part}: is there", flush=True)
            return
        if missing_parts := [name for name in self.parts[part].needs if not self.result(name)]:
            raise RunError(
                f"{part}: needs {', '.join(missing_parts)}, which is not measured: name it before in --only, or leave "
                "--only out"
            )
        print(f"{part} ...", flush=True)
        seconds, cpu_seconds = time.perf_counter(), time.process_time()
        result = self.parts[part].measure()
        evaluations, facts = result if isinstance(result, tuple) else (result, {})
        seconds, cpu_seconds = time.perf_counter() - seconds, time.process_time() - cpu_seconds
        Result(seconds, cpu_seconds, evaluations, facts, self.fingerprint(part)).write(self.path(part))
        print(f"{part}: {seconds:.0f} s, {cpu_seconds:.0f} s of the processor", flush=True)


def _needed(arm: str) -> tuple[str, ...]:
    """The parts that make the weights of an arm."""
    return (TRAINED[arm][1],) if arm in TRAINED else ("swap_fit",) if arm == "fit" else ()


def slug(arm: str) -> str:
    """The name of an arm in those of its parts."""
    return arm.replace(",", "").replace(" ", "_")


def scales(decoder: Decoder) -> list[list[float]]:
    """s of each layer and head of a decoder with SSMax; [] of another."""
    return [module.s.tolist() for module in decoder.normalizers() if hasattr(module, "s")]
