"""`lm eval hf:FOLDER`: a model that runs in transformers with lm's attention is measured as the same model in lm."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import lm
from folders import curves_of
from test_import import LLAMA_SIZES, save

from lm.attention import catalogue as opt
from lm.attention.options import Options
from lm.config.data_config import TrainedTokenizer
from lm.config.load import to_yaml
from lm.data.tokenizer import train_tokenizer
from lm.evaluation.evaluate import evaluate_runs
from lm.huggingface.importing import import_model
from lm.model.swapped import with_normalizer
from lm.report.evaluation_tables import EvaluationResult
from lm.runs.loading import load, save_model

OVERRIDES = ["eval.sequences=3", "eval.long_context.sequences=2", "eval.diagnostics.sequences=2",
    "eval.needle.length_factors=[1]", "eval.needle.trials=2"]  # fmt: skip


@pytest.fixture
def folder(tiny, tmp_path: Path) -> Path:
    """A Llama of transformers with a tokenizer, and beside it a configuration of text."""
    text = "the quick brown fox jumps over the lazy dog 0123456789 and runs away from them all"
    torch.manual_seed(0)
    save(tmp_path / "hf", "llama", LLAMA_SIZES | {"max_position_embeddings": 160})
    train_tokenizer(iter([text] * 3), TrainedTokenizer(vocab_size=290)).save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "text.yaml").write_text(to_yaml(tiny("name=text")))
    return tmp_path


def means(results: list[EvaluationResult]) -> dict[tuple, np.ndarray]:
    return {  # models of transformers are measured as trained
        (series.kind, series.metric, series.setting, series.task, series.names): np.asarray(series.means)
        for result in results
        for series in curves_of(result.evaluation)
        if series.setting in ("", "as trained")
    }


@pytest.mark.parametrize(
    "options", [pytest.param(opt.Softmax(), marks=pytest.mark.slow), opt.SSMax()], ids=["softmax", "ssmax"]
)
def test_losses_needles_and_diagnostics_are_those_of_the_same_model_in_lm(folder: Path, options: Options):
    import_model(str(folder / "hf"), folder / "imported")
    imported = load(folder / "imported")
    ours = save_model(with_normalizer(imported.decoder, options), folder / "ours", folder / "hf" / "tokenizer.json")
    expected = means(evaluate_runs([ours, folder / "text.yaml"], overrides=OVERRIDES))
    path = Path(f"hf:{folder / 'hf'}")
    found = means(evaluate_runs([path, folder / "text.yaml"], overrides=OVERRIDES, normalizer=options.name))
    assert {kind for kind, *_ in found} >= {"validation", "long_context", "needle", "diagnostics"}
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-3, atol=1e-3, err_msg=str(name))


@pytest.mark.slow
def test_a_model_with_windows_is_measured_on_the_command_line(folder: Path):
    sizes = LLAMA_SIZES | {"max_position_embeddings": 160, "head_dim": 12, "attention_dropout": 0.0}
    config = transformers.Gemma3TextConfig(
        **sizes, sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    )
    transformers.Gemma3ForCausalLM(config).save_pretrained(folder / "hf")
    command = ["eval", f"hf:{folder / 'hf'}", str(folder / "text.yaml"), "--normalizer", "ssmax", "--json"]
    result = lm(*command, *OVERRIDES)
    assert result.returncode == 0, result.stderr
    assert {row["metric"] for row in json.loads(result.stdout)} >= {"val/loss"}


def test_what_is_not_measured_is_said_in_one_line(folder: Path):
    command = ["eval", f"hf:{folder / 'hf'}", str(folder / "text.yaml")]
    result = lm(*command, "--normalizer", "forget")
    assert (result.returncode != 0, result.stderr.count("error:")) == (True, 1), result.stderr
    assert "is no function of one layer's queries and keys" in result.stderr


def test_code_that_a_model_brings_is_refused_without_a_question(folder: Path, monkeypatch):
    map_of_code = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "hf" / "config.json").write_text(json.dumps({"model_type": "alien", "auto_map": map_of_code}))
    (folder / "hf" / "code.py").write_text(f"open({str(folder / 'executed')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda question="": "y")
    result = lm("eval", f"hf:{folder / 'hf'}", str(folder / "text.yaml"))
    assert (result.returncode, result.stdout, result.stderr.count("error:")) == (1, "", 1), result.stderr
    assert not (folder / "executed").exists()
