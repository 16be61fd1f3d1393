"""Needles in a haystack: what is scored, the control, and the heads."""

import numpy as np
import pytest
import torch
from folders import measure_curves

from lm.config import normalizers as kinds
from lm.config.data_config import Needle
from lm.config.eval_config import NTK, InferenceSetting
from lm.config.model_config import ModelConfig
from lm.data.batches import Batch
from lm.data.prepare import prepare
from lm.data.store import Store
from lm.data.tasks import FillerText
from lm.evaluation import answers as needles
from lm.evaluation.answers import TRIAL_METRICS, NeedleMeasurement, attention_to_needle, needle_trials, trial_scores
from lm.evaluation.generation import Sampling, generate
from lm.model.attention_stream import attention_blocks
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.model.swapped import with_inference_setting
from lm.report.comparison import run_interval

CPU = Device(torch.device("cpu"), bf16=False)
LENGTH = 220  # tokens: the tests' vocabulary is small


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    from lm.config.data_config import DataConfig, FileSource, TrainedTokenizer

    folder = tmp_path_factory.mktemp("needles")
    for number in range(30):
        (folder / f"{number:02d}.txt").write_text(" ".join(f"word{(number * k) % 89}" for k in range(300)))
    return prepare(
        DataConfig(
            FileSource(paths=[str(folder)]), TrainedTokenizer(300), val_fraction=0.3, root=str(folder / "stores")
        )
    )


def made(store: Store, name: str = "softmax", **model: object) -> Decoder:
    config = ModelConfig(
        n_layer=2, n_head=2, n_embd=32, normalizer=kinds.NORMALIZER_OPTIONS[name](), init_std=0.3, **model
    )
    return Decoder(config, store.vocab_size, 64).double().eval()


@torch.no_grad()
@pytest.mark.parametrize("name", ["softmax", "ssmax", "relu2", "linear", "forget"])
def test_scores_are_those_of_whole_forward_passes(store: Store, name: str):
    """The prompt is read once, and its cache serves the answer and greedy decoding."""
    decoder, text = made(store, name), FillerText(store)
    questions = needle_trials(Needle(distractors=2), 300, 12, text)
    size = len(questions[0].prompt)
    questions = [question for question in questions if len(question.prompt) == size][:3]
    scores = trial_scores(decoder, questions, 300, text)
    for question, (whole, nll) in zip(questions, scores.tolist(), strict=True):
        tokens = torch.from_numpy(np.concatenate((question.prompt, question.answer)))[None]
        log_p = decoder.logits(tokens[:, :-1])[0, size - 1 :].float().log_softmax(-1)
        assert nll == pytest.approx(-float(log_p.gather(1, tokens[0, size:, None]).mean()), abs=1e-4)
        answer = text.decode(
            np.array(
                list(generate(decoder, question.prompt.tolist(), len(question.answer) + 2, Sampling(temperature=0)))
            )
        ).strip()
        assert whole == answer.startswith(question.correct_number)


@torch.no_grad()
def test_an_answer_begins_with_the_whole_number_and_ends_at_the_end_of_text_token(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    """The loss on answers teaches no model to stop after the last digit; generation ends at the token."""
    decoder, text = made(store), FillerText(store)
    question = needle_trials(Needle(), LENGTH, 1, text)[0]
    number, end = question.correct_number, np.array([store.end_of_text_id])
    whole = text.encode(f" {number}")
    cases = [
        (exact, text.encode(words))
        for exact, words in ((1, f" {number}95"), (0, f" {number[:6]}."), (0, f" 1{number}"))
    ]
    cases += [(0, end, end, whole), (0, whole[:-1], end, whole[-1:]), (1, whole, end)]
    for exact, *parts in cases:
        output = torch.from_numpy(np.concatenate(parts))[None]
        monkeypatch.setattr(needles, "_greedy_tokens", lambda *_, output=output: output)
        assert trial_scores(decoder, [question], LENGTH, text)[0, 0] == exact


def test_a_span_is_that_of_the_number(store: Store):
    text = FillerText(store)
    for question in needle_trials(Needle(), LENGTH, 5, text):
        assert text.decode(question.prompt).count(question.correct_number) == 1
        assert text.decode(question.prompt[slice(*question.number_span)]).strip() == question.correct_number


@torch.no_grad()
@pytest.mark.parametrize("name", ["softmax", "ssmax", "sigmoid", "forget"])
def test_head_scores_are_sums_of_weights_with_the_rotations_of_the_whole_sequence(store: Store, name: str):
    """A prompt ends before its sequence does, by which a setting rescales."""
    model = with_inference_setting(made(store, name).float(), InferenceSetting(NTK()))
    question = needle_trials(Needle(depth=0.5), LENGTH, 1, FillerText(store))[0]
    tokens = torch.from_numpy(np.concatenate((question.prompt, question.answer[:-1]))[None])
    blocks = attention_blocks(model, Batch(tokens, tokens, None), [len(question.prompt) - 1])
    expected = torch.stack([block.weights[0, :, 0, slice(*question.number_span)].sum(-1) for block in blocks])
    assert tokens.size(1) == LENGTH
    assert torch.allclose(attention_to_needle(model, question, LENGTH), expected, atol=1e-5)
    assert not torch.allclose(attention_to_needle(model, question, 2 * LENGTH), expected, atol=1e-3)


NEEDLES = [
    "eval.needle.length_factors=[6, 8]",
    "eval.needle.depths=[0, 1]",
    "eval.needle.trials=3",
    "eval.needle.heads_at=8",
    "eval.long_context.length_factor=0",
]


def test_cells_have_their_control_and_ranks_share_them(tiny, monkeypatch: pytest.MonkeyPatch):
    config = tiny(*NEEDLES)
    store = prepare(config.data)
    decoder = Decoder(config.model, store.vocab_size, config.data.seq_len)
    needle = NeedleMeasurement(config, store)
    with monkeypatch.context() as patch:  # a model that finds needles in the first half of the text alone

        def found(decoder: Decoder, questions: list, *_: object) -> torch.Tensor:
            is_early = [float(0 < trial.number_span[1] < len(trial.prompt) // 2) for trial in questions]
            return torch.tensor(is_early)[:, None].repeat(1, len(TRIAL_METRICS))

        patch.setattr(needles, "trial_scores", found)
        result = measure_curves(needle, decoder, CPU)
    accuracies = [series.means.tolist() for series in result if series.metric == "accuracy"]
    assert accuracies == [[0.5, 0.5], [0, 0]], "the mean over depths"
    result = measure_curves(needle, decoder, CPU)
    assert decoder.training
    right = [series for series in result if series.metric == "accuracy"]
    exact = [series for series in result if series.metric == "exact"]
    assert [series.task for series in exact] == ["depth 0%", "depth 100%", "no needle"]
    assert [series.about.control for series in right] == [False, True]
    by_depth = np.stack([series.points[0].values for series in exact[:2]])
    assert right[0].points[0].values == pytest.approx(by_depth.mean(0)), (
        "a trial asks the same at each depth: it counts once"
    )
    assert [name for series in result for name in series.logged_means] == [
        f"needle/{kind} {n} as trained" for kind in ("exact", "control") for n in (192, 256)
    ]
    heads = [series for series in result if series.metric == "attention to the number"]
    assert [(series.task, len(series.points[0].values)) for series in heads] == [("layer 0", 3), ("layer 1", 3)]
    asked = needle_trials(Needle(depth=0.5), 256, 3, FillerText(store))  # of the keys that the last token sees
    part = np.mean([(trial.number_span[1] - trial.number_span[0]) / len(trial.prompt) for trial in asked])
    assert all(series.references == {"uniform attention": pytest.approx(part)} for series in heads)


def test_questions_of_one_sequence_are_one_group(tiny):
    config = tiny(
        *NEEDLES,
        "eval.needle.needles=3",
        "eval.needle.trials=7",
        "eval.needle.length_factors=[12]",
        "eval.needle.heads_at=null",
    )
    needle = NeedleMeasurement(config, store := prepare(config.data))
    result = measure_curves(needle, Decoder(config.model, store.vocab_size, config.data.seq_len), CPU)
    by_length = [series for series in result if series.axis and series.axis.name == "sequence length"]
    assert {series.metric for series in by_length} == {"accuracy", *(metric.quantity for metric in TRIAL_METRICS)}
    assert {tuple(units.groups) for series in by_length for units in series.points} == {(0, 0, 0, 1, 1, 1, 2)}
    accuracy = next(series for series in by_length if series.metric == "accuracy")
    assert accuracy.references == {"chance": pytest.approx((3 / 3 + 2 / 2 + 2) / 7)}, (
        "the third sequence is asked one question of three"
    )
    assert run_interval(accuracy.points[0].rows, accuracy.means[0]).noise_source == "sequences, 1 seed"


def test_numbers_beside_the_needle_make_a_chance(tiny):
    config = tiny(*NEEDLES, "eval.needle.distractors=3", "eval.needle.length_factors=[8]", "eval.needle.heads_at=null")
    needle = NeedleMeasurement(config, store := prepare(config.data))
    result = measure_curves(needle, Decoder(config.model, store.vocab_size, config.data.seq_len), CPU)
    levels = [series.references for series in result if series.metric in ("accuracy", "exact")]
    chance = {"chance": 1 / 4}
    assert levels == [chance, {}, chance, chance, {}], "the control shows none that is right"


def test_needles_are_asked_for_under_each_setting(tiny):
    settings = "eval.needle.inference=[{}, {rope: ntk}]"
    config = tiny(*NEEDLES, "eval.needle.length_factors=[8]", "eval.needle.depths=[0]", settings)
    needle = NeedleMeasurement(config, store := prepare(config.data))
    result = measure_curves(needle, Decoder(config.model, store.vocab_size, config.data.seq_len), CPU)
    names = {name for series in result for name in series.logged_means}
    assert names == {metric.name for metric in needle.metrics(config)}
    assert len({series.setting for series in result}) == 2
