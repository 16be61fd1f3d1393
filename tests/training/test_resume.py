"""Resuming is exact, bit for bit: the table of normalizers x scenarios, other splits, more steps, and going back.

python -m pytest tests/training/test_resume.py tests/training/test_stops.py -m "slow or not slow" -k bitwise
prints the whole table
"""

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from conftest import mark_others_slow
from folders import (
    EVERY_STEP_OPTIONS,
    best_checkpoint,
    curves_of,
    delete_checkpoints_after,
    last_checkpoint,
    logged_values,
    metric_lines,
    rewrite_checkpoint,
    run_differences,
    swap_override,
    training_losses,
)
from jobs import train_each
from processes import run_ranks

from lm.attention import catalogue
from lm.config.data_config import DataConfig
from lm.config.training_config import OPTIMIZERS
from lm.data.batches import TrainSequences
from lm.data.prepare import prepare
from lm.errors import RunError
from lm.runs.checkpoints import load_checkpoint
from lm.runs.evaluations import (
    Evaluation,
    evaluation_files,
    load_evaluation,
    model_selection_mask,
    selection_loss_and_sequence_hash,
)
from lm.runs.folder import checkpoint_paths
from lm.runs.loading import load
from lm.training.train import train

# options, and the steps that the run is killed after
SCENARIOS = {
    "plain": ([], (3,)),
    "accumulation": (["trainer.micro_batch=2"], (3,)),
    "dropout": (["model.dropout=0.2"], (3,)),
    "twice in a row": (["model.dropout=0.2", "trainer.micro_batch=2"], (3, 6)),
    "mixed lengths": (["data.lengths={name: mixed, weights: {8: 0.5, 32: 0.5}}", "trainer.micro_batch=2"], (3,)),
    "isolated documents": (["data.lengths={name: mixed, weights: {16: 0.5, 32: 0.5}}", "data.documents=isolate"], (3,)),
    "bf16": (["trainer.precision=bf16-mixed"], (3,)),
}
SWAPS = {
    "swap, before": (2,),
    "swap, at": (4,),
    "swap, after": (6,),
    "swap, at and after": (4, 6),
    "swap, all three": (2, 4, 6),
}


# By default those columns of the table that contain the others for one normalizer, and a rich one for kinds of
# parameters.
SOME, RICH, RICHEST = ("ssmax",), "swap, at and after", "swap, all three"
CONTAINED = ("plain", "accumulation", "dropout", "twice in a row", "swap, before", "swap, at", "swap, after", RICH)
KINDS = ("qassmax",)


def cells(scenarios: dict[str, object]) -> pytest.MarkDecorator:
    """Every normalizer x scenario, as the parameter `cell`."""
    quick = {(name, scenario) for name in SOME for scenario in scenarios if scenario not in CONTAINED} | {
        (name, RICH) for name in KINDS
    }
    return pytest.mark.parametrize(
        "cell", mark_others_slow(product(catalogue.OPTIONS_BY_NAME, scenarios), quick), ids="-".join
    )


def rows(names: object = SOME) -> pytest.MarkDecorator:
    """Every normalizer as the parameter `name`; those not in `names` are slow."""
    return pytest.mark.parametrize("name", mark_others_slow(catalogue.OPTIONS_BY_NAME, names))


@cells(SCENARIOS)
def test_a_resumed_run_is_bitwise_the_same(tiny, record_property, cell: tuple[str, str]):
    name, scenario = cell
    options, kills = SCENARIOS[scenario]
    check(tiny, record_property, name, scenario, [f"model.normalizer={name}", *options], kills)


OTHERS = [name for name in OPTIMIZERS if name != "adamw"]  # with which all other runs of the table are made
FOR_OPTIMIZERS = {name: (["model.normalizer=ssmax", *options], kills) for name, (options, kills) in SCENARIOS.items()}
FOR_OPTIMIZERS |= {
    name: ([swap_override("ssmax"), *SCENARIOS["twice in a row"][0]], kills) for name, kills in SWAPS.items()
}


@pytest.mark.parametrize("scenario", mark_others_slow(FOR_OPTIMIZERS, [RICHEST]))
@pytest.mark.parametrize("optimizer", OTHERS)
def test_a_run_of_another_optimizer_resumed_is_bitwise_the_same(tiny, record_property, optimizer: str, scenario: str):
    options, kills = FOR_OPTIMIZERS[scenario]
    check(tiny, record_property, optimizer, scenario, [f"optim.optimizer={optimizer}", *options], kills)


@cells(SWAPS)
def test_a_run_resumed_around_a_swap_is_bitwise_the_same(tiny, record_property, cell: tuple[str, str]):
    name, scenario = cell
    options = [swap_override(name), "model.dropout=0.2", "trainer.micro_batch=2"]
    parts = check(tiny, record_property, name, scenario, options, SWAPS[scenario])
    assert load_checkpoint(last_checkpoint(parts))["lm"]["phase"] == 1
    assert load(parts).decoder.config.normalizer.name == name


@rows()
def test_a_run_resumed_at_the_end_of_an_epoch_is_bitwise_the_same(tiny, record_property, name: str):
    options_of_data = ["data.val_fraction=0.9", f"model.normalizer={name}"]
    store = prepare(tiny(*options_of_data).data, progress=False)
    for seq_len in range(30, 60):
        count = TrainSequences(store, DataConfig(seq_len=seq_len), 1, 1).streams[0].sequences_per_epoch
        if count % 3 == 0:
            break
    else:
        pytest.fail("no length of rows gives epochs of three steps")
    options = [
        *options_of_data,
        f"data.seq_len={seq_len}",
        f"optim.batch_tokens={count // 3 * seq_len}",
        "trainer.max_steps=7",
    ]
    check(tiny, record_property, name, "an epoch's end", options, (3, 6))


def check(tiny, record_property, name: str, scenario: str, options: list[str], kills: tuple[int, ...]) -> Path:
    """Train in one go and with kills, compare, and enter the result in the table."""
    whole_run = tiny("name=whole", *EVERY_STEP_OPTIONS, *options)
    resumed_run = tiny("name=parts", *EVERY_STEP_OPTIONS, *options, "resume=auto")
    train(whole_run)
    shutil.copytree(whole_run.run_folder, resumed_run.run_folder)
    for step in kills:
        delete_checkpoints_after(resumed_run.run_folder, step)
        train(resumed_run)
    names = run_differences(whole_run.run_folder, resumed_run.run_folder)
    record_property("bitwise", [name, scenario, "equal" if not names else ", ".join(names)])
    assert not names
    return resumed_run.run_folder


SWAP = "swap"  # in place of the options for it
MASKED = ["model.dropout=0.2", "trainer.micro_batch=1"]
RANKS = {
    "2 ranks": ([], (4,)),
    "2 ranks, dropout, accumulation": (MASKED, (3, 6)),
    "2 ranks, swap": ([SWAP], (2, 4, 6)),
    "2 ranks, swap, dropout, accumulation": ([SWAP, *MASKED], (2, 6)),
}


@pytest.mark.parametrize(
    ("names", "scenarios", "optimizer"),
    [
        (SOME, [*RANKS], "adamw"),
        (tuple(name for name in catalogue.OPTIONS_BY_NAME if name not in SOME), [*RANKS], "adamw"),
        *((SOME, [*RANKS], optimizer) for optimizer in OTHERS),
    ],
    ids=["some", "others", *OTHERS],
)
@pytest.mark.slow
def test_two_ranks_resumed_are_bitwise_the_same(
    arguments: list[str], tmp_path: Path, record_property, names: tuple[str, ...], scenarios: list[str], optimizer: str
):
    """One group of ranks makes all the runs: in one go, in one go again and then back to earlier checkpoints."""
    jobs = []
    expected = []
    for name in names:
        for scenario in scenarios:
            options, backs = RANKS[scenario]
            folder = f"{name} {scenario}".replace(",", "").replace(" ", "-")
            model = [
                swap_override(name) if option == SWAP else option
                for option in (options if SWAP in options else [*options, f"model.normalizer={name}"])
            ]
            common = [*arguments, *EVERY_STEP_OPTIONS, "trainer.devices=2", f"optim.optimizer={optimizer}", *model]
            jobs += [[*common, f"name={folder}-a"], [*common, f"name={folder}-b"]]
            for step in backs:
                jobs.append(
                    [*common, f"name={folder}-b", f"resume={tmp_path}/runs/{folder}-b/checkpoints/step-{step:06d}.ckpt"]
                )
            expected.append((name, scenario, folder))
    run_ranks(2, train_each, jobs)
    failed = []
    for name, scenario, folder in expected:
        differing = run_differences(tmp_path / "runs" / f"{folder}-a", tmp_path / "runs" / f"{folder}-b")
        label = name if optimizer == "adamw" else optimizer
        record_property("bitwise", [label, scenario, "equal" if not differing else ", ".join(differing)])
        failed += differing
    assert not failed


# ---------------------------------------------------------------- other splits, more steps, going back


@pytest.mark.parametrize("split", mark_others_slow([(8, 2), (1, 8), (1, 2), (2, 1)], [(8, 2)]), ids=str)
def test_a_run_resumed_with_another_split_sees_the_same_tokens(tiny, split: tuple[int, int]):
    before, after = split
    options = ["trainer.checkpoint_every=3", "eval.every=8", "eval.long_context.length_factor=0"]
    train(tiny("name=whole", *options))
    train(tiny("name=parts", f"trainer.micro_batch={before}", *options))
    first = tiny("name=parts").run_folder / "checkpoints" / "step-000003.ckpt"
    train(tiny("name=parts", f"trainer.micro_batch={after}", f"resume={first}", *options))
    assert len(training_losses(tiny("name=parts").run_folder)) == 8
    assert training_losses(tiny("name=parts").run_folder) == pytest.approx(
        training_losses(tiny("name=whole").run_folder), abs=1e-4
    )


@pytest.mark.parametrize("cut", ["before", "while"])
def test_what_a_kill_after_the_last_step_kept_out_of_the_log_is_logged(tiny, cut: str):
    """Before the long-context evaluation was there, and while its line was written."""
    config = tiny("name=last")
    train(config)
    log = config.run_folder / "metrics.jsonl"
    evaluation = config.run_folder / "evaluations" / "long_context.step-000008.csv"
    lines, content = metric_lines(config.run_folder), evaluation.read_text()
    *log_lines, last = log.read_text().splitlines(keepends=True)
    assert "long/loss as trained" in last
    log.write_text("".join(log_lines) + (last[: len(last) // 2] if cut == "while" else ""))
    evaluation.unlink()
    train(tiny("name=last", "resume=auto"))
    assert evaluation.read_text() == content
    before, (*log_lines, made_up) = lines[-1], metric_lines(config.run_folder)
    assert log_lines == lines[:-1]
    assert made_up.keys() == before.keys() - {"peak_memory_bytes"}
    assert made_up == {name: before[name] for name in made_up}


def test_an_evaluation_lost_to_a_kill_is_made_up_for(tiny):
    """A long-context evaluation comes after its step's checkpoint; killed meanwhile, it is made when the run goes
    on.
    """
    options = ["eval.long_context.at=[0.5, 1.0]", "trainer.checkpoint_every=4"]
    for phases in ([], [swap_override("ssmax")]):
        name = f"name=lost{len(phases)}"
        config = tiny(name, *options, *phases)
        train(config)
        path = config.run_folder / "evaluations" / "long_context.step-000004.csv"
        before = path.read_text()
        delete_checkpoints_after(config.run_folder, 4)
        path.unlink()
        train(tiny(name, *options, *phases, "resume=auto"))
        assert path.read_text() == before


def test_more_steps_may_be_asked_for_when_resuming(tiny, capsys: pytest.CaptureFixture):
    train(tiny("name=more", "optim.schedule=constant"))
    assert train(tiny("name=more", "optim.schedule=constant", "trainer.max_steps=12", "resume=auto")) == 0
    train(tiny("name=once", "optim.schedule=constant", "trainer.max_steps=12"))
    assert not run_differences(tiny("name=more").run_folder, tiny("name=once").run_folder)
    train(tiny("name=longer"))
    last, _ = last_checkpoint(tiny("name=longer").run_folder), capsys.readouterr()
    train(tiny("name=longer", "trainer.max_steps=12", "resume=auto"))
    output = capsys.readouterr().out
    assert f"goes on from step 8 of 12: {last}\n" in output
    jump = "the learning rate jumps from 0.001603 to 0.004109 at step 9, by a factor of 2.56"
    assert f"note: {jump}\n" in output


def validations(folder: Path) -> dict[int, Evaluation]:
    """The validation of each step."""
    files = {step: path for (kind, step), path in evaluation_files(folder).items() if kind == "validation"}
    return {step: load_evaluation(path) for step, path in files.items()}


def selection_losses(folder: Path) -> dict[int, float]:
    """By step, the validation loss on the documents that choose the best checkpoint."""
    return {step: selection_loss_and_sequence_hash(validation)[0] for step, validation in validations(folder).items()}


# held-out documents of both parts
DIVIDED = ["data.val_fraction=0.5", "eval.sequences=64", "eval.long_context.length_factor=0"]


def test_the_best_checkpoint_is_chosen_on_the_documents_that_select(tiny):
    config = tiny("name=chosen", *DIVIDED, "eval.every=1")
    train(config)
    chosen_by, by_step = selection_losses(config.run_folder), validations(config.run_folder)
    best = load_checkpoint(best_checkpoint(config.run_folder))["lm"]["best"]
    assert best["step"] == min(chosen_by, key=chosen_by.get)
    assert best["loss"] == pytest.approx(chosen_by[best["step"]], abs=1e-6)
    validation = by_step[best["step"]]
    (units,) = curves_of(validation)[0].points
    selects = model_selection_mask(validation.data_fingerprint, units.groups.astype(int))
    assert 0 < selects.sum() < len(selects) == 64
    samples = validation.frame[validation.frame["sample"].notna()]  # beside them stands the mean of bits per byte
    assert selects.tolist() == (samples["part"] == "selects").tolist()
    frame = validation.frame.assign(value=validation.frame["value"] + (validation.frame["part"] == "reports"))
    assert selection_loss_and_sequence_hash(replace(validation, frame=frame)) == (
        pytest.approx(best["loss"], abs=1e-6), best["sequences_sha256"],
    )  # fmt: skip
    assert logged_values(config.run_folder, "val/loss") == [
        (step, pytest.approx(curves_of(validation)[0].means[0])) for step, validation in sorted(by_step.items())
    ]


def test_a_best_loss_on_other_sequences_is_not_compared(tiny):
    config = tiny("name=older", *DIVIDED)
    train(config)
    checkpoints = config.run_folder / "checkpoints"
    older = {"step": 4, "loss": 0.0, "sequences_sha256": "of others"}
    rewrite_checkpoint(checkpoints / "step-000004.ckpt", lambda content: content["lm"].update(best=older))
    train(tiny("name=older", *DIVIDED, f"resume={checkpoints / 'step-000004.ckpt'}"))
    assert load_checkpoint(best_checkpoint(config.run_folder))["lm"]["step"] == 8


def test_going_back_to_an_earlier_checkpoint_keeps_one_time_line(tiny, capsys: pytest.CaptureFixture):
    options = ["trainer.checkpoint_every=2", "trainer.keep_checkpoints=3"]
    config = tiny("name=back", *options)
    train(config)
    checkpoints = config.run_folder / "checkpoints"
    assert [path.name for path in checkpoint_paths(checkpoints)] == [
        "step-000004.ckpt",
        "step-000006.ckpt",
        "step-000008.ckpt",
    ]
    expected = training_losses(config.run_folder)
    with pytest.raises(
        RunError, match=r"leaves no step up to trainer\.max_steps, and the run has step-000008\.ckpt; raise"
    ):
        train(tiny("name=back", *options, f"resume={checkpoints / 'step-000004.ckpt'}", "trainer.max_steps=4"))
    assert training_losses(config.run_folder) == expected
    capsys.readouterr()
    train(
        tiny(
            "name=back",
            *options,
            f"resume={checkpoints / 'step-000004.ckpt'}",
            "trainer.max_steps=6",
            "optim.schedule=cosine",
        )
    )
    assert (
        "note: back to step 4; checkpoints, metrics and evaluations of later steps are deleted"
        in capsys.readouterr().out
    )
    assert [path.name for path in checkpoint_paths(checkpoints)] == ["step-000004.ckpt", "step-000006.ckpt"]
    assert load_checkpoint(last_checkpoint(checkpoints.parent))["lm"]["step"] == 6
    assert len(training_losses(config.run_folder)) == 6
    assert training_losses(config.run_folder)[:4] == expected[:4]
    assert not (config.run_folder / "evaluations" / "validation.step-000008.csv").exists()
    best = load_checkpoint(best_checkpoint(checkpoints.parent))["lm"]
    assert best["best"] == load_checkpoint(last_checkpoint(checkpoints.parent))["lm"]["best"]
    chosen_by = selection_losses(config.run_folder)
    assert best["step"] == min(chosen_by, key=chosen_by.get)


def test_going_back_where_the_best_weights_are_gone_finds_a_new_best(tiny):
    options = ["trainer.checkpoint_every=2", "trainer.keep_checkpoints=9", "eval.every=1"]
    config = tiny("name=gone", *options)
    train(config)
    checkpoints = config.run_folder / "checkpoints"
    back = load_checkpoint(checkpoints / "step-000006.ckpt")["lm"]
    assert back["best"]["step"] == 6
    better = {**back["best"], "step": 5, "loss": 0.0}  # as if the validation of step 5 had been the best
    rewrite_checkpoint(checkpoints / "step-000006.ckpt", lambda content: content["lm"].update(best=better))
    train(tiny("name=gone", *options, f"resume={checkpoints / 'step-000006.ckpt'}"))
    assert load_checkpoint(best_checkpoint(checkpoints.parent))["lm"]["step"] in (7, 8)


def test_the_last_the_best_and_the_ends_of_phases_are_kept(tiny):
    phases = "phases=[{until: 0.2, normalizer: softmax}, {until: 1, normalizer: ssmax}]"
    options = ["trainer.max_steps=20", "trainer.checkpoint_every=6", "trainer.keep_checkpoints=2", "eval.every=1"]
    config = tiny("name=kept", *options, phases)
    train(config)
    checkpoints = config.run_folder / "checkpoints"
    assert [path.name for path in checkpoint_paths(checkpoints)] == [
        "step-000004.ckpt",
        "step-000018.ckpt",
        "step-000020.ckpt",
    ]
    chosen_by = selection_losses(config.run_folder)
    best = load_checkpoint(best_checkpoint(checkpoints.parent))["lm"]
    assert best["best"]["loss"] == pytest.approx(min(chosen_by.values()), abs=1e-6)
    assert best["best"]["loss"] == pytest.approx(chosen_by[best["step"]], abs=1e-6)
    last = load_checkpoint(last_checkpoint(checkpoints.parent))["lm"]
    assert (last["step"], last["tokens"], last["phase"], last["best"]) == (20, 20 * 256, 1, best["best"])
    assert load(config.run_folder, "best").metadata["step"] == best["step"]
