"""What runs used and where their weights come from: recorded at every start; reports pool and pair runs by it."""

from pathlib import Path

from manifests import edit_json
from reported import build_run, compare_folders

from lm.files import read_json
from lm.report.comparison import compare_runs
from lm.report.comparison_tables import run_properties
from lm.runs import record
from lm.runs.record import read_run
from lm.training.train import train


def rewrite(folder: Path, **changes: object) -> Path:
    """A run folder whose environment.json says something else."""
    edit_json(folder / "environment.json", lambda content: content.update(changes))
    return folder


def start(step: int, precision: str = "32", compiled: bool = False, **facts: object) -> dict[str, object]:
    return {"step": step, "time": "2026-01-01T00:00:00Z", "precision": precision, "compile": compiled, **facts}


def arms(*folders: Path) -> list[list[str]]:
    return [
        [run.name for run in runs]
        for runs in compare_runs([read_run(folder) for folder in folders]).runs_by_arm.values()
    ]


# ---------------------------------------------------------------- what was used


def test_every_start_says_what_it_used(tiny, tmp_path):
    assert train(tiny("name=a", "trainer.precision=32", "trainer.max_steps=4", "trainer.compile=false")) == 0
    assert train(tiny("name=a", "trainer.precision=bf16-mixed", "trainer.compile=false", "resume=auto")) == 0
    elapsed = [line["elapsed_s"] for line in read_run(tmp_path / "runs" / "a").log_lines if "elapsed_s" in line]
    assert elapsed == sorted(elapsed), "the time of a run goes on"
    environment = read_json(tmp_path / "runs" / "a" / "environment.json")
    first, second = environment["starts"]
    assert [start_record["step"] for start_record in (first, second)] == [0, 4]
    assert [start_record["precision"] for start_record in (first, second)] == ["32", "bf16-mixed"]
    keys = {
        "lm",
        "git_commit",
        "git_dirty",
        "versions",
        "device",
        "precision",
        "compile",
        "threads",
        "world_size",
        "max_steps",
        "command",
    }
    assert first.keys() == second.keys() == keys | {"step", "time"}
    assert {key: environment[key] for key in keys} == {key: second[key] for key in keys}
    assert record.recorded_setting(environment, "precision") == "32, from step 4 bf16-mixed"
    assert record.recorded_setting(environment, "max_steps") == "4, from step 4 8"


def test_what_was_dropped_by_going_back_does_not_count():
    environment = {"starts": [start(0), start(6, "bf16-mixed"), start(4), start(4, compiled=True)]}
    assert [start_record["step"] for start_record in record.run_starts(environment)] == [0, 4]
    assert record.recorded_setting(environment, "precision") == "32"
    assert record.recorded_setting(environment, "compile") == "false, from step 4 true"


def test_runs_are_pooled_by_what_was_used_not_by_what_was_asked_for(tmp_path):
    pair = [
        build_run(tmp_path, f"asked-{precision}", seed=seed, trainer={"precision": precision})
        for seed, precision in ((1, "auto"), (2, 32))
    ]
    assert arms(*pair) == [["asked-auto", "asked-32"]]
    other = rewrite(build_run(tmp_path, "bf16", seed=3, trainer={"precision": "auto"}), starts=[start(0, "bf16-mixed")])
    assert arms(*pair, other) == [["asked-auto", "asked-32"], ["bf16"]]
    comparison, _ = compare_folders(*pair, other)
    assert comparison.fairness_warning == "The arms differ in more than the normalizer: trainer.precision."
    assert [*comparison.runs_by_arm] == ["softmax, precision=32", "softmax, precision=bf16-mixed"]


def test_unlike_histories_are_not_compared_as_like(tmp_path):
    whole, resumed = build_run(tmp_path, "whole"), build_run(tmp_path, "resumed", seed=2)
    rewrite(resumed, starts=[start(0), start(100, "bf16-mixed")])
    assert arms(whole, resumed) == [["whole"], ["resumed"]]
    comparison, _ = compare_folders(whole, resumed)
    assert dict(comparison.config_diff)["trainer.precision"] == ("32", "32, from step 100 bf16-mixed")
    checks = {fact.name: fact for fact in run_properties(comparison)}
    assert checks["precision"].runs_agree is False


def test_a_pattern_of_normalizers_is_shown_by_names_and_options(tmp_path):
    pattern = {"name": "layers", "of": [{"name": "window", "size": 2}, {"name": "ssmax", "bias": False}]}
    comparison, _ = compare_folders(build_run(tmp_path, "both", normalizer=pattern))
    (value,) = (fact.value for fact in run_properties(comparison) if fact.name.startswith("normalizer: "))
    assert value.endswith("layers (window (size=2), ssmax)")


def test_a_run_that_was_made_longer_is_another_arm_than_one_of_that_length(tmp_path):
    whole, longer = build_run(tmp_path, "whole"), build_run(tmp_path, "longer", seed=2)
    rewrite(longer, starts=[start(0, max_steps=100), start(100, max_steps=200)])
    assert arms(whole, longer) == [["whole"], ["longer"]], "the learning rate had its schedule twice"
    assert read_run(longer).arm_definition["trainer.max_steps"] == "100, from step 100 200"


# ---------------------------------------------------------------- where weights come from


def test_a_swap_from_other_weights_or_with_other_first_values_is_another_arm():
    config = {"seed": 1, "model": {"normalizer": {"name": "ssmax"}}}
    histories = [
        {"swap": {"normalizer": "softmax", "init": init, "arm": label}}
        for init, label in (("match", "a"), ("unit", "a"), ("match", "b"))
    ]
    assert len({record.arm_hash(config, environment) for environment in histories}) == 3
    assert record.arm_hash(config, histories[0]) == record.arm_hash(config | {"seed": 2, "name": "other"}, histories[0])


def test_runs_of_one_seed_and_several_of_their_data_are_told_apart_as_seeds():
    config = {"seed": 1, "data": {"seq_len": 8}}
    assert (
        record.training_seeds(config, {})
        == record.training_seeds({"seed": 1, "data": {"seq_len": 8, "seed": 1}}, {})
        == (1,)
    )
    assert record.training_seeds({"seed": 1, "data": {"seed": 2}}, {}) == (1, 2)
    assert record.arm_hash(config, {}) == record.arm_hash({"seed": 1, "data": {"seq_len": 8, "seed": 2}}, {})


def started_from(root: Path, name: str, seed: int, source: int, arm: str = "abc") -> Path:
    """A run that began from the weights of a run with seed `source`."""
    folder = build_run(root, name, seed=seed, init_from=f"runs/{arm}-{source}")
    return rewrite(
        folder,
        started_from={"path": "p", "step": 2, "tokens": 9, "normalizer": "softmax", "arm": arm, "seeds": [source]},
    )


def test_seeds_are_those_of_the_weights_and_of_what_followed(tmp_path):
    a_runs = [started_from(tmp_path, f"a{source}", 7, source) for source in (1, 2, 3)]
    assert arms(*a_runs) == [["a1", "a2", "a3"]]
    assert [read_run(folder).seeds for folder in a_runs] == [(1, 7), (2, 7), (3, 7)]
    assert read_run(started_from(tmp_path, "same", 1, 1)).seeds == (1,)
    b_runs = [started_from(tmp_path, f"b{source}", 7, source, "other") for source in (2, 3, 4)]
    comparison, differences = compare_folders(*a_runs, *b_runs)
    assert differences[()].interval.noise_source == "2 seeds"
    (seeds,) = [fact for fact in run_properties(comparison) if fact.name == "seeds"]
    assert "7 after 1, 7 after 2, 7 after 3" in seeds.value
    assert [*comparison.runs_by_arm] == ["softmax, init_from=abc-1", "softmax, init_from=other-2"]
    assert arms(*a_runs, started_from(tmp_path, "again", 7, 1)) == [["a1", "a2", "a3"], ["again"]]
