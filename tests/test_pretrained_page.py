"""docs/smollm2.md as scripts/pretrained.py makes it, from a small random model."""

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from scipy.special import stdtrit

from lm.config.data_config import TrainedTokenizer
from lm.config.model_config import ModelConfig
from lm.data.tokenizer import train_tokenizer
from lm.errors import RunError
from lm.model.decoder import Decoder
from lm.runs.evaluations import Axis, Evaluation, Sample, Series
from lm.runs.loading import save_model

LENGTH = 1024


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """A function: name -> module of scripts/."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module


@pytest.fixture(scope="module")
def model(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without a training run."""
    folder = tmp_path_factory.mktemp("models")
    texts = [path.read_text() for path in sorted(corpus.iterdir())][:2]
    train_tokenizer(iter(texts), TrainedTokenizer(vocab_size=290)).save(str(folder / "tokenizer.json"))
    return save_model(
        Decoder(ModelConfig(n_layer=2, n_head=2, n_embd=16), 290, LENGTH), folder / "model", folder / "tokenizer.json"
    )


def by_factor(results, best, shape: float) -> list[Series]:
    """Loss by position of three documents, a parabola in ln c around a best factor that grows with position, for each
    factor.
    """
    edges = np.array([0, 128, 256, 512, 1024])
    middles = np.log(np.sqrt(np.maximum(edges[:-1], 1) * edges[1:]))
    curves = []
    for factor in results.SCALES:
        distances = np.log(factor) - np.log(best * np.exp(shape * (middles - middles.mean())))
        values = 3 + np.array([[0.0], [0.1], [0.3]]) + distances**2
        sample = Sample("", values, np.ones(3), np.arange(3))
        axis = Axis("position in the sequence", "tokens", "at positions", tuple(edges.tolist()), bins=True)
        curves.append(
            Series(
                "long_context",
                "loss",
                "nats",
                "lower",
                1024,
                values.mean(0),
                axis=axis,
                samples=(sample,),
                curve=np.zeros(1024),
            )
        )
    return curves


def test_the_best_factor_is_found_and_its_growth_with_n(script):
    results = script("pretrained_results")
    flat, growing = by_factor(results, 1.05, 0.0), by_factor(results, 1.05, 0.1)
    scales = results.Scales(np.array(results.SCALES), flat, growing)
    assert scales.best(flat).mean == pytest.approx(1.05)
    assert scales.best(flat).low == pytest.approx(scales.best(flat).high)  # the documents agree
    assert scales.slope(128).mean == pytest.approx(0, abs=1e-6)
    assert results.Scales(scales.factors, growing, flat).slope(128).mean == pytest.approx(0.105, abs=0.01)
    assert scales.by_shape().mean > 0  # what varies over positions has no single best factor
    assert results.octaves(flat[0], 128) == [(128, 256), (256, 512), (512, 1024)]


def test_the_jackknife_of_a_mean_is_its_t_interval(script):
    values = np.array([1.0, 2.0, 4.0, 7.0])
    interval = script("pretrained_results").jackknifed(lambda documents: float(values[documents].mean()), 4)
    half = stdtrit(3, 0.975) * values.std(ddof=1) / 2
    assert (interval.mean, interval.low, interval.high) == pytest.approx((3.5, 3.5 - half, 3.5 + half))


@pytest.mark.slow
def test_a_result_of_another_model_text_size_or_of_other_options_is_refused(script, model, base, tmp_path, capsys):
    parts = script("pretrained_parts")
    sizes, overrides = parts.Sizes(positions=(2, 1)), ["trainer.threads=1"]

    def bench(**other):
        return parts.Workbench(
            **({"model": model, "text": base, "out": tmp_path / "out", "overrides": overrides, "sizes": sizes} | other)
        )

    first = bench()
    first.run("positions")
    assert first.result("positions").fingerprint["sizes"] == {"positions": [2, 1]}
    capsys.readouterr()
    bench().run("positions")
    assert capsys.readouterr().out.endswith("\npositions: is there\n")
    with pytest.raises(RunError, match=r"positions\.json: was measured with other sizes: choose another --out"):
        bench(sizes=parts.Sizes(positions=(2, 2))).run("positions")
    with pytest.raises(RunError, match="other overrides:"):
        bench(overrides=["trainer.threads=2"]).result("positions")
    decoder = Decoder(ModelConfig(n_layer=2, n_head=2, n_embd=16), 290, LENGTH, seed=7)
    with pytest.raises(RunError, match="other weights:"):
        bench(model=save_model(decoder, tmp_path / "other", model / "tokenizer.json")).run("positions")
    file = tmp_path / "more.yaml"
    file.write_text(f"{base.read_text()}eval: {{sequences: 3}}\n")
    assert bench(text=file).result("positions")  # the same tokens
    file.write_text(base.read_text().replace("source:", "val_fraction: 0.5, source:"))
    with pytest.raises(RunError, match="other data:"):
        bench(text=file).result("positions")
    changes = {
        part: bench(sizes=replace(sizes, train=1 / 8)).fingerprint(part) != first.fingerprint(part)
        for part in first.parts
    }
    assert {part for part, differs in changes.items() if differs} == {part for part in first.parts if "train" in part}
    with pytest.raises(RunError, match="within_s_trained: needs train_s, which is not measured"):
        first.run("within_s_trained")


def test_the_page_counts_the_sequences_that_were_measured(script):
    results = script("pretrained_results")
    curve = by_factor(results, 1.05, 0.0)[0]
    evaluation = Evaluation("long_context", 0, 0, "", {}, "32", "", (curve,))
    results_of_two = results.Results(
        {"positions": results.Result(1, 1, {"softmax": evaluation}, {}, {}), "beyond_softmax": None}
    )
    assert results_of_two.sequences("positions", (2048, 9)) == (1024, 3)
    assert results_of_two.sequences("beyond_softmax", (2048, 9)) == (2048, 9)


@pytest.mark.slow
def test_every_part_is_measured_once_and_the_page_written(script, model, base, tmp_path, capsys):
    parts, page = script("pretrained_parts"), tmp_path / "page.md"
    small = parts.Needles((0.5,), (0.5,), 1)
    sizes = parts.Sizes(
        positions=(2, 2), beyond=(1.25, 3), within=(1, 3), swaps=(0.125, 0.25), swap_sequences=3,
        needles={"needles": parts.Needles((0.5,), (0.0, 0.5), 1, heads_at=0.5), "needles_whole": small}, asked=small,
        diagnostics=(0.125, 2, 8), fit=(0.125, 1), train=0.0625, steps=dict.fromkeys(parts.Sizes().steps, 2),
    )  # fmt: skip
    page.write_text(f"# Models\n\nAbove.\n\n{script('pretrained').HEADING}\nold\n")
    arguments = ["--model", str(model), "--text", str(base), "--out", str(tmp_path / "out"), "--page", str(page)]
    script("pretrained").main([*arguments, "--only"], sizes)
    empty = page.read_text()
    assert "Not measured yet; the same command goes on with it: positions, diagnostics," in empty
    script("pretrained").main(arguments, sizes)
    content = page.read_text()
    assert content.startswith("# Models\n\nAbove.\n\n# A pretrained model")
    assert not [word for word in ("old\n", "{{", "{%", "nan", "ot measured") if word in content]
    assert {path.name for path in tmp_path.glob("pretrained*")} == {
        "pretrained-attention.svg", "pretrained-loss.svg", "pretrained-scale.svg", "pretrained-statements.csv",
        "pretrained.csv",
    }  # fmt: skip
    stopped = [tmp_path / "out" / "results" / f"{part}.json" for part in ("swap_ssmax", "train_s")]
    before = [parts.Result.read(path) for path in stopped]
    for path in stopped:
        path.unlink()
    with pytest.raises(RunError, match="ssmax: a swap of another model, or measured on other sequences"):
        script("pretrained").main([*arguments, "--only", "swap_ssmax"], replace(sizes, swaps=(0.25,)))
    script("pretrained").main([*arguments, "--only", "swap_ssmax", "train_s"], sizes)
    assert [parts.Result.read(path).facts for path in stopped] == [result.facts for result in before]
    script("pretrained").main([*arguments, "--only"], sizes)
    content = page.read_text()
    capsys.readouterr()
    script("pretrained").main(arguments, sizes)
    assert capsys.readouterr().out.count("is there") == len(list((tmp_path / "out" / "results").iterdir()))
    assert page.read_text() == content
