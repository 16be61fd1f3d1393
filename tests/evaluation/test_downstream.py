"""Downstream tasks: lm-eval's own adapter on the exported model, as an evaluation."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from conftest import lm as command
from folders import metric_lines, stored_curves, training_losses
from processes import run_command as rank_command
from processes import run_ranks

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")

import lm
from lm.errors import ConfigError, RunError
from lm.evaluation.evaluate import evaluate_runs
from lm.experiments.run_outcome import Outcome
from lm.runs.evaluations import weighted_mean
from lm.runs.loading import LoadedModel
from lm.training.train import train

CHOICES = [("the cat sat", [" on", " under"]), ("it is", [" a", " cd"]), ("a bad cab " * 9, ["dab", "no"])]
TEXTS = ["a dab of a fad. " * 12, "bad", "a cab "]
TASKS = {
    "choice": (
        [{"text": text, "choices": choices, "answer": 1} for text, choices in CHOICES],
        {
            "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer", "target_delimiter": "",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
    ),
    "rolling": (
        [{"text": text} for text in TEXTS],
        {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [
                {"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}
            ],
        },
    ),
    "write": (
        [{"text": "a bad", "answer": "?"}],
        {
            "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
    ),
}  # fmt: skip


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch) -> dict[str, str]:
    """Task files by name, and nothing of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, (documents, task) in TASKS.items():
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"task": f"our_{name}", **source, **task}))
    return {name: str(tmp_path / f"{name}.yaml") for name in TASKS}


def log_p(model: LoadedModel, text: str, continuation: str) -> float:
    """The definition: log p of the continuation in one sequence, whose left is cut to the training length."""
    tokenizer, start = model.tokenizer_and_start_id()
    stem = text.rstrip()
    ids, n_context = tokenizer.encode(text + continuation).ids, len(tokenizer.encode(stem).ids)
    tokens = [start, *ids][-model.spec.seq_len - 1 :]
    with torch.no_grad():
        log_probabilities = model.decoder.logits(torch.tensor([tokens[:-1]]))[0].double().log_softmax(-1)
    scored = len(ids) - n_context
    return float(log_probabilities[-scored:].gather(1, torch.tensor(tokens[-scored:])[:, None]).sum())


@pytest.mark.parametrize("normalizer", ["softmax", "[{name: window, size: 8}, ssmax]"])  # as a Llama; with lm's code
def test_tasks_are_an_evaluation_of_the_exported_model_with_a_value_for_each_document(tiny, tasks, normalizer):
    changes = (f"model.normalizer={normalizer}", "model.mlp=swiglu", "model.dropout=0.2")
    config = tiny("name=run", f"eval.tasks=[{', '.join(tasks.values())}]", *changes)
    train(config)
    plain = tiny("name=plain", *changes)
    train(plain)
    assert training_losses(config.run_folder) == training_losses(
        plain.run_folder
    )  # the random state of training stays as it is
    logged = next(line for line in reversed(metric_lines(config.run_folder)) if "tasks/our_choice/acc" in line)
    curves = {curve.task: curve for curve in stored_curves(config.run_folder, "tasks", 8)}
    (sample,) = curves["our_choice"].points
    assert (curves["our_choice"].unit, curves["our_choice"].about.better) == ("fraction", "higher")
    assert not curves["our_rolling"].points  # no mean over documents
    assert curves["our_choice"].about.amount == "3 of our_choice, 2 requests lost tokens on the left"

    model = lm.load(config.run_folder)
    scores = [[log_p(model, text, choice) for choice in choices] for text, choices in CHOICES]
    assert sample.values.tolist() == [float(second > first) for first, second in scores]
    outcome = Outcome(config.run_folder, 8, "tasks/our_choice/acc")
    assert weighted_mean(outcome.metric_values("tasks/our_choice/acc")) == pytest.approx(logged["tasks/our_choice/acc"])
    result = command("eval", str(plain.run_folder), f"eval.tasks=[{', '.join(tasks.values())}]", "--json")
    assert result.returncode == 0, result.stderr
    values = {line["where"]: line["value"] for line in json.loads(result.stdout) if line["kind"] == "tasks"}
    assert values == pytest.approx({task: logged[curve.names[0]] for task, curve in curves.items()})


def test_two_processes_measure_as_one(tiny, tasks, arguments: list[str]):
    config = tiny("name=two", f"eval.tasks=[{tasks['choice']}]", "trainer.devices=2")
    run_ranks(2, rank_command, "train", *arguments, "name=two", f"eval.tasks=[{tasks['choice']}]", "trainer.devices=2")
    (two,) = stored_curves(config.run_folder, "tasks", 8)
    (result,) = evaluate_runs([config.run_folder], overrides=["eval.sequences=1", "eval.long_context.length_factor=0"])[
        1:
    ]
    assert two.points[0].values.tolist() == result.evaluation.frame["value"].tolist()


def test_what_cannot_be_measured_is_told_in_one_line_before_training_or_without_a_result(tiny, tasks):
    config = tiny("name=refused", "eval.tasks=[nowhere.yaml]")
    with pytest.raises(
        ConfigError, match=r"eval\.tasks = 'nowhere\.yaml': no such task; `lm-eval ls tasks` lists them"
    ):
        train(config)
    assert not config.run_folder.exists()
    config = tiny("name=broken", "trainer.max_steps=4")
    train(config)
    Path(tasks["choice"]).with_suffix(".jsonl").unlink()
    with pytest.raises(RunError, match=r"choice\.yaml: lm-eval failed: FileNotFoundError") as error:
        evaluate_runs([config.run_folder], overrides=[f"eval.tasks=[{tasks['choice']}]"])
    assert "\n" not in str(error.value)
    assert not (config.run_folder / "evaluations" / "tasks.step-000004.csv").exists()
