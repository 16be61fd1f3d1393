"""A run that branches from a step of another one: exact where nothing changes, refused where more than length and
schedule does.
"""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from conftest import lm
from fabricated import finish_run
from folders import EVERY_STEP_OPTIONS, checkpoint_weights, equal_tensors, last_checkpoint, logged_values, metric_lines
from trials import write_experiment

from lm.errors import ConfigError, RunError
from lm.experiments.compare import start_experiment
from lm.experiments.definition import read_experiment
from lm.files import read_json
from lm.report.comparison import compare_runs
from lm.runs.checkpoints import load_checkpoint
from lm.runs.loading import export
from lm.runs.record import read_run
from lm.training.module import LanguageModel
from lm.training.optimizers import saved_optimizer_state
from lm.training.train import train

LOGGED = ("train/loss", "train/grad_norm", "lr", "val/loss")
CONSTANT = ["optim.schedule=constant", *EVERY_STEP_OPTIONS]


def after(folder: Path, step: int) -> dict[str, list[tuple[int, float]]]:
    """What a run logged after a step."""
    return {name: [point for point in logged_values(folder, name) if point[0] > step] for name in LOGGED}


@pytest.fixture(scope="module")
def trained(tiny_below, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps at a constant rate with all of its checkpoints, dropout included."""
    config = tiny_below(
        tmp_path_factory.mktemp("trained"), "name=trunk", *CONSTANT, "model.dropout=0.2", "model.normalizer=ssmax"
    )
    train(config)
    return config.run_folder


@pytest.fixture
def trunk(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run, among the runs of a test."""
    return Path(shutil.copytree(trained, tmp_path / "runs" / "trunk", symlinks=True))


def test_a_branch_that_was_killed_before_its_first_checkpoint_goes_on(
    tiny, trunk: Path, monkeypatch: pytest.MonkeyPatch
):
    config = branched(tiny, trunk, 4, "trainer.checkpoint_every=4", "trainer.max_steps=12", "resume=auto")
    training_step = LanguageModel.training_step

    def killed(self: LanguageModel, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == 6:
            raise ZeroDivisionError
        return training_step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModel, "training_step", killed)
        with pytest.raises(ZeroDivisionError):
            train(config)
    assert metric_lines(config.run_folder)[-1]["step"] == 6
    assert train(config) == 0


def branched(tiny, trunk: Path, step: int, *changes: str):
    """The configuration of a branch of `trunk`."""
    start = f"branch_from={trunk}/checkpoints/step-{step:06d}.ckpt"
    return tiny("name=branch", *CONSTANT, "model.dropout=0.2", "model.normalizer=ssmax", start, *changes)


def test_a_branch_that_changes_nothing_is_the_uninterrupted_run_bit_for_bit(tiny, trunk: Path):
    config = branched(tiny, trunk, 3, "resume=auto")
    train(config)
    assert after(config.run_folder, 0) == after(trunk, 3)
    assert equal_tensors(checkpoint_weights(config.run_folder), checkpoint_weights(trunk))
    trunk_state, branch_state = (
        saved_optimizer_state(load_checkpoint(last_checkpoint(folder))) for folder in (trunk, config.run_folder)
    )
    assert trunk_state.keys() == branch_state.keys()
    assert all(equal_tensors(trunk_state[name], branch_state[name]) for name in trunk_state)


def test_a_cooldown_reads_on_at_another_rate_and_leaves_the_trunk_as_it_was(
    tiny, trunk: Path, capsys: pytest.CaptureFixture
):
    before = sorted((path.name, path.stat().st_mtime_ns) for path in trunk.rglob("*"))
    config = branched(tiny, trunk, 6, "optim.schedule={name: wsd, decay_fraction: 0.4}", "trainer.max_steps=10")
    train(config)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in trunk.rglob("*")) == before
    assert [rate for _, rate in logged_values(config.run_folder, "lr")] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])
    assert [line["tokens"] for line in metric_lines(config.run_folder) if "lr" in line] == [
        256 * step for step in range(7, 11)
    ]
    assert logged_values(config.run_folder)[0] == logged_values(trunk)[6]  # the first step is at the rate of the trunk
    assert "branches from" in (out := capsys.readouterr().out)
    assert "jumps" not in out.rpartition("branches from")[2]


def test_a_rate_that_jumps_is_said(tiny, trunk: Path, capsys: pytest.CaptureFixture):
    cooled = branched(tiny, trunk, 6, "optim.lr=1e-3", "optim.schedule=wsd")
    train(cooled)
    assert "note: the learning rate jumps from 0.01 to 0.001 at step 7, by a factor of 0.1" in capsys.readouterr().out
    at_its_end = f"branch_from={cooled.run_folder}", "trainer.max_steps=9", "name=again"
    train(branched(tiny, trunk, 6, *at_its_end, "optim.lr=1e-2"))
    assert "note: the learning rate jumps from 0.0005 to 0.01 at step 9, by a factor of 20" in capsys.readouterr().out


def test_a_branch_that_was_killed_goes_on_in_its_own_folder(tiny, trunk: Path):
    longer = "trainer.max_steps=10"
    config = branched(tiny, trunk, 3, longer, "resume=auto")
    train(config)
    content = after(config.run_folder, 0)
    for path in (config.run_folder / "checkpoints").glob("step-*"):
        if path.stem > "step-000005":
            path.unlink()
    train(config)
    assert after(config.run_folder, 0) == content
    assert read_json(config.run_folder / "environment.json")["branched_from"]["step"] == 3


def test_branches_of_two_seeds_are_one_arm_and_not_that_of_the_trunk(tiny, trunk: Path):
    other = tiny("name=other", "seed=2", *CONSTANT, "model.dropout=0.2", "model.normalizer=ssmax")
    train(other)
    train(branched(tiny, trunk, 6, "trainer.max_steps=9"))
    train(branched(tiny, other.run_folder, 6, "trainer.max_steps=9", "seed=2", "name=second"))
    first, second, trunk_run = (
        read_run(folder) for folder in (trunk.parent / "branch", trunk.parent / "second", trunk)
    )
    assert first.arm_definition == second.arm_definition != trunk_run.arm_definition
    assert (first.seeds, second.seeds) == ((1,), (2,))
    assert first.tokens_before_run == 0
    labels = [*compare_runs([trunk_run, first]).runs_by_arm]
    assert labels == ["ssmax, max_steps=8", "ssmax, max_steps=9, branch_from=step-000006.ckpt"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["model.differential=true"],
            r"model\.differential = true: the checkpoint was trained with false; branch with that",
        ),
        (["model.n_embd=64"], r"model\.n_embd = 64: the checkpoint was trained with 32; branch with that"),
        (["seed=5"], r"seed = 5: the checkpoint was trained with 1; branch with that"),
        (
            ["optim.batch_tokens=512"],
            r"optim\.batch_tokens = 512: the checkpoint was trained with 256; branch with that",
        ),
        (["model.normalizer=softmax"], r"model\.normalizer = 'softmax': the checkpoint was trained with ssmax"),
        (
            ["trainer.max_steps=3"],
            r"trainer\.max_steps = 3: leaves no step after step 3 of .*; raise it; it counts all steps",
        ),
    ],
)
def test_more_than_length_and_schedule_is_refused(tiny, trunk: Path, changes: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        train(branched(tiny, trunk, 3, *changes))
    assert not (trunk.parent / "branch").exists()


def test_a_step_that_is_not_saved_is_named_with_those_that_are(tiny, trunk: Path):
    with pytest.raises(
        RunError, match=r"step-000030\.ckpt: no such checkpoint \(branch_from\); the run has: step-000001\.ckpt, "
    ):
        train(branched(tiny, trunk, 30))
    export(trunk, "last", trunk.parent / "weights")
    with pytest.raises(
        RunError, match=r"weights: no such checkpoint \(branch_from\); .*weights alone takes init_from=\.\.\.$"
    ):
        train(branched(tiny, trunk, 3, f"branch_from={trunk.parent / 'weights'}"))


# ---------------------------------------------------------------- arms


HORIZONS = {
    "long": {"optim.schedule": "constant", "trainer.checkpoint_every": 2},
    "cool": {
        "from": "long",
        "step": 6,
        "optim.schedule": {"name": "wsd", "decay_fraction": 0.4},
        "trainer.max_steps": 10,
    },
    "on": {"from": "long", "step": 6},
}


@pytest.mark.usefixtures("runs_in_process")
def test_arms_branch_seed_by_seed_from_a_step_of_an_earlier_arm(arguments: list[str], tmp_path: Path):
    file = write_experiment(
        tmp_path, arms=HORIZONS, tune={"grid": [1e-2, 2e-2, 4e-2], "seeds": [101, 102]}, seeds=[1, 2]
    )
    overrides = [*arguments[1:], "eval.long_context.length_factor=0"]
    procedure = start_experiment(read_experiment(file, overrides))
    for run in procedure.known_runs():
        finish_run(run, 5 + abs(run.rate - 2e-2))  # what is known so far is the tuning
    result = lm("compare", str(file), *overrides)
    assert result.returncode == 0, result.stderr
    assert {run.arm for run in procedure.known_runs() if run.stage == "tune"} == {"long"}, "the others have its rate"
    runs = {
        (run.arm, run.seed): run.config.run_folder
        for run in procedure.known_runs()
        if (run.stage, run.rate) == ("final", 2e-2)
    }
    for seed in (1, 2):
        long, continued, cool = (runs[arm, seed] for arm in ("long", "on", "cool"))
        assert equal_tensors(checkpoint_weights(continued), checkpoint_weights(long))
        assert logged_values(cool)[0] == logged_values(long)[6]
        assert yaml.safe_load((cool / "config.yaml").read_text())["branch_from"].endswith(
            f"{long.name}/checkpoints/step-000006.ckpt"
        )


@pytest.mark.parametrize(
    ("cool", "message"),
    [
        (
            {"from": "long", "step": 5},
            r"arms\.cool\.step = 5: is no step that long keeps a checkpoint of \(2, 4, 6, 8\)",
        ),
        ({"step": 6}, r"arms\.cool\.step = 6: goes on with the optimizer state of another arm; name the arm: `from`"),
        ({"from": "long", "step": "six"}, r"arms\.cool\.step = 'six': must be an integer or null"),
    ],
)
def test_arms_that_can_not_branch_are_refused_before_any_run(arguments, tmp_path: Path, cool: dict, message: str):
    file = write_experiment(tmp_path, **{"arms": {**HORIZONS, "cool": cool}, "tune": None})
    with pytest.raises(ConfigError, match=message):
        read_experiment(file, arguments[1:])


# ---------------------------------------------------------------- a run from overrides alone
