"""How long a run is where its tokens are given by the size of the model, and the presets that say so."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT
from folders import delete_checkpoints_after, run_differences

from lm.config.load import load_config
from lm.config.tree import Config
from lm.errors import ConfigError
from lm.experiments.compare import costs_by_arm
from lm.experiments.definition import config_hash, read_experiment
from lm.experiments.procedure import Procedure
from lm.model.decoder import Decoder
from lm.model.spec import count_parameters, steps_of_token_budget
from lm.training.train import train

FEW = "trainer.tokens_per_parameter=0.05"  # with a vocabulary of 400: 12 steps


def counted(config: Config, vocab_size: int) -> dict[str, int]:
    with torch.device("meta"):
        return count_parameters(Decoder(config.model, vocab_size, config.data.seq_len, seed=None))


def recorded(config: Config) -> dict[str, object]:
    return yaml.safe_load((config.run_folder / "config.yaml").read_text())["trainer"]


def test_the_steps_are_those_of_the_vocabulary_and_do_not_depend_on_the_normalizer(tiny):
    soft, qassmax = tiny(FEW, "model.normalizer=softmax"), tiny(FEW, "model.normalizer=qassmax")
    assert counted(soft, 400)["total"] < counted(qassmax, 400)["total"] - 20 * 256, "parameters of a step and more"
    soft_steps = steps_of_token_budget(soft, 400)
    assert soft_steps == steps_of_token_budget(qassmax, 400) == -(-counted(soft, 400)["total"] // (20 * 256))
    assert steps_of_token_budget(soft, 40000) > soft_steps


def test_the_run_folder_records_the_steps_and_a_resumed_run_has_the_same(tiny, capsys: pytest.CaptureFixture):
    options = [FEW, "model.dropout=0.1", "phases=[{until: 0.5, normalizer: softmax}, {until: 1, normalizer: ssmax}]"]
    whole_run, resumed = tiny(*options, "name=whole"), tiny(*options, "name=resumed", "resume=auto")
    assert train(whole_run) == 0
    shutil.copytree(whole_run.run_folder, resumed.run_folder)
    steps = steps_of_token_budget(whole_run, 400)
    assert recorded(whole_run) | {"max_steps": steps, "tokens_per_parameter": None} == recorded(whole_run)
    delete_checkpoints_after(resumed.run_folder, 8)
    assert train(resumed) == 0
    assert run_differences(whole_run.run_folder, resumed.run_folder) == []
    capsys.readouterr()
    assert train(resumed) == 0
    assert f"complete at step {steps}; raise trainer.max_steps" in capsys.readouterr().out


def test_of_steps_and_tokens_a_parameter_the_later_counts(tiny, tmp_path: Path):
    assert tiny(FEW).trainer.max_steps is None  # over the file's 8
    assert tiny(FEW, "trainer.max_steps=3").trainer.max_steps == 3
    assert tiny(FEW, "trainer.max_steps=3").trainer.tokens_per_parameter is None
    file = tmp_path / "both.yaml"
    file.write_text("trainer: {max_steps: 3, tokens_per_parameter: 20}\n")
    with pytest.raises(
        ConfigError, match=r"trainer\.tokens_per_parameter = 20\.0: trainer\.max_steps = 3 is given, too; drop one"
    ):
        load_config([str(file)])
    with pytest.raises(
        ConfigError, match=r"trainer\.max_steps = null: is not given; set it, or trainer\.tokens_per_parameter"
    ):
        load_config([str(file), "trainer.max_steps=null", "trainer.tokens_per_parameter=null"])


# ---------------------------------------------------------------- experiments


def experiment(folder: Path, **changes: object) -> Path:
    file = {
        "base": str(ROOT / "tests" / "tiny.yaml"),
        "arms": {"softmax": {}, "wide": {"model.n_mlp": 512}},
        "seeds": [1],
        "primary": {"metric": "val/loss"},
    }
    path = folder / "trial.yaml"
    path.write_text(yaml.safe_dump(file | changes, sort_keys=False))
    return path


def test_arms_of_a_size_train_as_long_as_its_baseline(arguments: list[str], tmp_path: Path):
    sizes = {"short": {FEW.split("=")[0]: 0.05}, "long": {FEW.split("=")[0]: 0.1}, "given": {"trainer.max_steps": 5}}
    settings = read_experiment(experiment(tmp_path, sizes=sizes), arguments[1:])
    steps = {
        size: [settings.config(size, arm, 1, None, {"name": "x"}).trainer.max_steps for arm in settings.arms]
        for size in sizes
    }
    assert steps == {"short": [12, 12], "long": [23, 23], "given": [5, 5]}
    assert [cost.n_tokens for cost in costs_by_arm(Procedure(settings)).values()] == [
        256 * n_steps for size in sizes for n_steps in steps[size]
    ]


def test_experiments_made_before_keep_the_names_of_their_runs():
    settings = read_experiment(ROOT / "configs" / "experiments" / "ssmax.yaml", [])
    assert config_hash(settings.config("", settings.arms[0], 1, 2e-3, {"name": "any"})) == "c16b309b"
