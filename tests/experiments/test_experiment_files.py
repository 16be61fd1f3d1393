"""Files of experiments: those of the repository and of the documentation, and wrong ones."""

from pathlib import Path

import pytest
from conftest import ROOT
from trials import write_experiment

from lm.errors import ConfigError
from lm.experiments.definition import read_experiment


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "experiments").glob("*.yaml")), ids=lambda file: file.stem)
def test_an_experiment_is_valid(file: Path):
    assert read_experiment(file, []).name == file.stem


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": {"softmax": {}}}, "arms = .*needs a baseline and at least one other arm"),
        ({"arms": {"a": {}, "b": {}}}, "arms.b = {}: is the same as a"),
        ({"arms": {"a": {"from": "a"}, "b": {}}}, "arms.a.from = 'a': is no earlier arm"),
        ({"arms": {"a": {}, "b": {"seed": 3}}}, "arms.b.seed = 3: is set by the experiment"),
        (
            {"arms": {"a": {}, "b": {"data.val_fraction": 0.3}}},
            "arms.b = .*than the baseline .data.val_fraction",
        ),
        ({"arms": {"a": {}, "b/c": {}}}, "arms.b/c = 'b/c': must be a name of at most 40 letters"),
        (
            {"primary": {"metric": "train/loss"}},
            "primary.metric = 'train/loss': is not measured by sequence at the last step; did you mean 'val/loss'?",
        ),
        ({"sizes": {"workers": {}}}, "sizes.workers = 'workers': must be a name"),
        (
            {"tune": {"key": "log.every", "grid": [8, 16]}},
            "tune.key = 'log.every': is nothing that training depends on",
        ),
        ({"seeds": [1, 1]}, "seeds = .*must be different seeds"),
        ({"seeds": [101, 1]}, "tune.seeds = .*are also final seeds"),
        ({"tune": {"grid": [1e-3]}}, "tune.grid = .*at least 2 different values"),
        ({"tune": {"grid": [1e-3, 2e-3], "seeds": [7]}}, "tune.seeds = .*tuning needs at least 2 seeds"),
        (
            {"arms": {"a": {}, True: {}}},
            "arms.True = true: must be a name of .*, or put it in quotes",
        ),
        (
            {
                "base": {"base": str(ROOT / "configs/recall.yaml"), "data.source.name": "files"},
                "primary": {"metric": "recall/mqar 64", "better": "higher", "matters": 0.1},
                "arms": {"a": {}, "b": {"data.tasks": [{"task": {"name": "mqar", "keys": 32}}]}},
            },
            r"on other sequences than the baseline \(tasks\); name a metric",
        ),
        (
            {"sizes": {"a": {}, "big": {"model.n_embd": 33}}},
            "yaml: arm softmax, size big; arm ssmax, size big: ",
        ),
        (
            {"arms": {"a": {}, "b": {"base": str(ROOT / "configs/recipes/ssmax-paper.yaml")}}},
            "arms.b.trainer.tokens_per_parameter = 20: the arms of a size train equally long",
        ),
        ({"colour": "red"}, "colour = 'red': unknown key; choose from: base, arms, sizes, seeds"),
    ],
)
def test_a_wrong_experiment_is_refused_in_words(tmp_path, arguments, changes, message):
    with pytest.raises(ConfigError, match=message):
        read_experiment(write_experiment(tmp_path, **changes), arguments[1:])


def test_an_arm_and_a_size_may_be_laid_on_files(tmp_path, arguments):
    """Their own keys count more than the files', a later file more than an earlier one; the tuned rate of a file does
    not count.
    """
    for name, text in {
        "a": "optim: {lr: 1.0, grad_clip: 2.0}\nmodel: {n_mlp: 96, init_std: 0.1}",
        "b": "model: {n_mlp: 64}",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    arms = {"softmax": {}, "other": {"base": ["a.yaml", "b.yaml"], "model.init_std": 0.03}}
    sizes = {"small": {}, "large": {"base": "a.yaml", "model.init_std": 0.04, "model.mlp": "relu2"}}
    base = {"base": str(ROOT / "tests" / "tiny.yaml"), "model.init_std": 0.06}
    experiment = read_experiment(
        write_experiment(tmp_path, base=base, arms=arms, sizes=sizes), [*arguments[1:], "model.init_std=0.05"]
    )

    def settings(size: str, arm: int) -> tuple:
        config = experiment.config(size, experiment.arms[arm], 1, 2e-2, {"name": "x"})
        return config.model.n_mlp, config.model.init_std, config.model.mlp, config.optim.grad_clip, config.optim.lr

    assert settings("small", 1) == (64, 0.03, "swiglu", 2.0, 2e-2)
    assert settings("large", 0) == (96, 0.04, "relu2", 2.0, 2e-2)
    assert settings("large", 1) == (64, 0.03, "relu2", 2.0, 2e-2)


def test_the_experiment_in_the_documentation_is_valid(tmp_path):
    block = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    path = tmp_path / "documented.yaml"
    path.write_text(block.replace("../sotu.yaml", "configs/sotu.yaml"), encoding="utf-8")
    assert [arm.name for arm in read_experiment(path, []).arms][-2:] == ["swapped", "as-it-is"]


@pytest.mark.parametrize(
    "override",
    [
        "optim.lr=1",
        "optim={lr: 1}",
        "seed=5",
        "model.normalizer=relu",
        "model.n_layer=1",
    ],
)
def test_an_override_without_effect_is_refused(tmp_path: Path, arguments: list[str], override: str):
    """Training nothing, `lm compare FILE optim.lr=1 --report-only` made all verdicts of tuned runs exploratory."""
    file = write_experiment(
        tmp_path, sizes={"small": {"model.n_layer": 2}, "large": {"model": {"n_layer": 3, "n_mlp": 64}}}
    )
    with pytest.raises(ConfigError, match=r"is set by the experiment, so this has no effect; change it in trial.yaml"):
        read_experiment(file, [override])
    kept = [*arguments[1:], "model.n_mlp=32", "optim.grad_clip=2", "init_from=runs/other"]
    assert read_experiment(file, kept).overrides == tuple(kept)


@pytest.mark.parametrize("changes", [{"more_seeds": [4]}, {"primary": {"learned": 0.9}}])
def test_a_key_that_an_earlier_version_had_is_refused(tmp_path: Path, arguments: list[str], changes):
    with pytest.raises(ConfigError, match=r"is no key of lm any more; see CHANGELOG\.md"):
        read_experiment(write_experiment(tmp_path, **changes), arguments[1:])
