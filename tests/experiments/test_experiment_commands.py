"""What is left to do of a run: weights swapped before training, measurements after it, and nothing twice."""

import shutil
from pathlib import Path

import pytest
from conftest import lm
from fabricated import finish_all_runs, finish_run
from trials import procedure_of

from lm.errors import ConfigError
from lm.experiments.definition import config_hash
from lm.experiments.procedure import Procedure, Run, remaining_commands
from lm.files import read_json
from lm.report.frame import results as lm_results
from lm.runs.evaluations import evaluation_path, load_evaluation
from lm.runs.folder import read_config

ARMS = {
    "softmax": {"model.normalizer": "softmax"},
    "as-it-is": {"from": "softmax", "swap": {"to": "ssmax"}, "train": False},
    "trained": {
        "from": "softmax",
        "swap": {"to": "ssmax", "init": "unit"},
        "model.normalizer.bias": True,
        "trainer.max_steps": 12,
    },
}


def experiment(folder: Path, *overrides: str, **changes: object) -> Procedure:
    """The untuned experiment of ARMS and one seed, or a changed one."""
    return procedure_of(folder, *overrides, **{"tune": None, "primary": None, "arms": ARMS, "seeds": [1], **changes})


def named(run: Run) -> list[str]:
    """The commands that are left."""
    return [command[0] for command in remaining_commands(run)]


def test_a_run_is_swapped_trained_and_measured_once(tmp_path, arguments):
    steps = [f"{key}=40" for key in ("trainer.max_steps", "trainer.checkpoint_every", "eval.every")]
    overrides = [
        *arguments[1:],
        *steps,
        "optim.batch_tokens=512",
        "eval.sequences=64",
        "eval.long_context.length_factor=0",
    ]
    by_length = {"eval.by_length": {"lengths": [16, 32], "sequences": 8}}
    procedure = experiment(tmp_path, *overrides, evaluate=by_length, primary={"metric": "by_length/loss 16"})
    softmax, as_it_is, trained = procedure.known_runs()
    assert (named(softmax), named(as_it_is), named(trained)) == (
        ["train", "eval"],
        ["swap", "eval"],
        ["swap", "train", "eval"],
    )
    for run in procedure.known_runs():
        for command in remaining_commands(run):
            result = lm(*command)
            assert result.returncode == 0, result.stderr
    assert [run.outcome.state for run in procedure.known_runs()] == ["finished"] * 3
    assert [remaining_commands(run) for run in procedure.known_runs()] == [[]] * 3
    assert read_config(as_it_is.config.run_folder).model == as_it_is.config.model
    places = lm_results(*(run.config.run_folder for run in procedure.known_runs()))[
        ["arm", "experiment"]
    ].drop_duplicates()
    assert places.to_numpy().tolist() == [[arm, "trial"] for arm in ARMS], (
        "not those of the runs that weights come from"
    )
    assert Path(trained.config.init_from).parent.name == "swapped"
    assert "started_from" in read_json(trained.config.run_folder / "environment.json")
    _, as_it_is_line, trained_line = procedure.judgement().summary_rows()
    assert as_it_is_line["mean"] != trained_line["mean"]

    other = {"eval.by_length": {"lengths": [8, 32], "sequences": 8}}
    procedure = experiment(tmp_path, *overrides, evaluate=other, primary={"metric": "by_length/loss 8"})
    assert [named(run) for run in procedure.known_runs()] == [["eval"]] * 3, "measured again, and nothing is trained"
    reopened = experiment(tmp_path, *overrides, primary={"metric": "val/loss"})
    assert [run.outcome.state for run in reopened.known_runs()] == ["finished"] * 3


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("ssmax", [{}, {"n": "fixed:64"}, {"bias": True}]),
        ("layers", [{"of": ["window", "softmax"]}, {"of": ["window", "ssmax"]}]),
    ],
)
def test_weights_that_were_swapped_with_other_options_are_not_taken(tmp_path, to, options):
    swapped = {}
    for normalizer in options:
        arms = {"softmax": {}, "more": {"from": "softmax", "swap": {"to": to}, "model.normalizer": normalizer}}
        swapped[str(normalizer)] = next(
            run.config.init_from for run in experiment(tmp_path, arms=arms).known_runs() if run.arm == "more"
        )
    assert len(set(swapped.values())) == len(options), swapped


def test_what_was_measured_otherwise_is_measured_again(tmp_path):
    procedure = experiment(tmp_path, evaluate={"eval.sequences": 4})
    softmax = procedure.known_runs()[0]
    finish_run(softmax, 5.0)
    assert named(procedure.known_runs()[0]) == ["eval"]
    assert remaining_commands(procedure.known_runs()[0])[0][2:] == ["eval={sequences: 4}"]
    path = evaluation_path(softmax.config.run_folder, "validation", softmax.outcome.last_step)
    assert load_evaluation(path).asked == {}
    finish_run(softmax, 5.0, asked={"sequences": 4})
    assert procedure.known_runs()[0].outcome.state == "unfinished", "long_context was not asked for as it is now"


STARTS = {
    "softmax": {"model.normalizer": "softmax"},
    "more": {"from": "softmax", "optim.lr": 2e-3},
    "swapped": {"from": "more", "swap": {"to": "ssmax"}},
    "as-it-is": {"from": "softmax", "swap": {"to": "ssmax"}, "train": False},
}


@pytest.mark.parametrize("sizes", [{}, {"1m": {}}], ids=["one size", "sizes"])
def test_a_moved_experiment_has_the_same_runs(tmp_path, sizes):
    before = finish_all_runs(experiment(tmp_path, arms=STARTS, sizes=sizes), lambda run: 5.0)
    shutil.move(tmp_path / "runs", tmp_path / "elsewhere")
    after = experiment(tmp_path, f"runs={tmp_path / 'elsewhere'}", arms=STARTS, sizes=sizes)
    assert [run.config.name for run in after.known_runs()] == [run.config.name for run in before.known_runs()]
    assert all(run.outcome.has_ended for run in after.known_runs())
    default = experiment(tmp_path, "runs=runs", arms=STARTS, sizes=sizes)
    assert all(run.config.name.endswith(config_hash(run.config)) for run in default.known_runs()), (
        "as earlier versions named them"
    )
    assert [run.config.name for run in default.known_runs()] == [run.config.name for run in before.known_runs()]


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        (
            {"from": "softmax", "swap": {"to": "ssmx"}},
            "arm b: model.normalizer.name = 'ssmx': unknown name; did you mean 'ssmax'",
        ),
        ({"from": "softmax", "train": False}, "arms.b.train = false: would be the arm it starts from"),
        (
            {"from": "softmax", "swap": {"to": "ssmax"}, "train": False, "optim.lr": 1},
            "arms.b.optim.lr = 1: has no effect on an arm",
        ),
        (
            {"from": "softmax", "swap": {"to": "ssmax", "init": "best"}},
            "arm b: model.normalizer.init = 'best': must be",
        ),
    ],
)
def test_a_wrong_swap_is_refused_in_words(tmp_path, arm, message):
    with pytest.raises(ConfigError, match=message):
        experiment(tmp_path, arms={"softmax": {}, "b": arm})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate": {"optim.lr": 1}}, "evaluate.optim = .*: can't be changed in lm eval"),
        ({"evaluate": {"eval.by_length.lengths": [3, 32]}}, "eval.by_length.lengths = 3: does not divide"),
        ({"evaluate": {}}, "arms.b = .*: measures val/loss on other sequences than the baseline"),
    ],
)
def test_arms_of_other_lengths_need_something_to_be_compared_on(tmp_path, changes, message):
    arms = {"softmax": {}, "b": {"data.seq_len": 16}}
    with pytest.raises(ConfigError, match=message):
        experiment(tmp_path, arms=arms, **changes)


@pytest.mark.parametrize(
    ("swap", "init"), [({"to": "sink"}, 0.0), ({"to": "sink", "init": -3.0}, -3.0), ({"to": "ssmax"}, "match")]
)
def test_swapped_normalizers_start_at_their_default_or_as_said(tmp_path, swap, init):
    arms = {"softmax": {}, "b": {"from": "softmax", "swap": swap}}
    assert experiment(tmp_path, arms=arms).known_runs()[-1].config.model.normalizer.init == init


def test_arms_of_other_lengths_may_be_compared_on_what_evaluate_measures(tmp_path):
    changes = {"evaluate": {"eval.by_length.lengths": [16, 32]}, "primary": {"metric": "by_length/loss 32"}}
    assert experiment(tmp_path, arms={"softmax": {}, "b": {"data.seq_len": 16}}, **changes).known_runs()


def test_everything_that_is_wrong_is_said_at_once_with_the_file(tmp_path):
    arms = {"softmax": {}, "b": {"optim.lr": -1}, "c": {"optim.lr": -1}, "d": {"model.n_layers": 3}}
    with pytest.raises(ConfigError) as error:
        experiment(tmp_path, "eval.every=0", arms=arms, seeds=[1, 2])
    text = str(error.value)
    assert text.startswith(f"{tmp_path / 'trial.yaml'}: 3 problems in the configuration:")
    assert "\n  eval.every = 0: must be >= 1" in text
    assert "\n  arm b; arm c: optim.lr = -1: must be > 0" in text
    assert "\n  arm d: model.n_layers = 3: unknown key; did you mean 'n_layer'?" in text
