"""Write the tables and pictures of docs/ from the committed results of all runs.

python scripts/recompute.py [--check]

All numbers come from results/NAME/seeds.csv, which scripts/collect.py writes. It holds each run's mean by metric,
inference setting and length; nothing is trained. A table stands in its page between `<!-- results: NAME -->` and `<!--
end of NAME -->`. `--check` changes nothing, and exits with status 1 if a page or a picture differs from its data.
"""

import argparse
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from committed_results import KEPT_DIAGNOSTICS, ROOT, markdown_table
from loss_results import LONG_CONTEXT_SETTINGS, LossResults, RowAndBaseline, TableColumn
from overview import Overview
from recall_results import RecallResults
from size_results import LossResultsBySize

ARM_LABELS = {
    "softmax": "softmax",
    "tau_half": "softmax, temperature 1/2",
    "tau_quarter": "softmax, temperature 1/4",
    "ssmax_fixed": "SSMax, n fixed at 64",
    "ssmax": "SSMax",
    "log_n": "log n",
}
BASIC_LABELS = {arm: ARM_LABELS[arm] for arm in ("softmax", "ssmax_fixed", "ssmax", "log_n")}
NORMALIZER_LABELS = BASIC_LABELS | {
    "ssmax_without_s": "SSMax without s",
    "ssmax_bias": "SSMax with b",
    "sqrt_log_n": "sqrt log n",
    "llama4": "Llama 4, f = 64",
    "yarn": "YaRN's factor",
    "infoscale": "InfoScale",
    "cosine": "cosine",
    "cosine_log_n": "cosine, log n",
    "qassmax": "QASSMax",
    "softmax1": "softmax1",
    "sink": "softmax, sink",
    "relu2": "relu^2",
    "relu2_sum": "relu^2, by its sum",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "sparsemax": "sparsemax",
    "entmax15": "1.5-entmax",
    "asentmax": "ASEntmax",
    "softpick": "softpick",
    "alibi": "ALiBi",
    "scale_invariant": "scale-invariant",
    "forget": "forgetting",
    "stick_breaking": "stick-breaking",
    "softmax_gate": "softmax, output gate",
    "linear": "linear",
}
FIXED_N_256_LABEL = {"ssmax_fixed": "SSMax, n fixed at 256"}
LABELS_AT_256 = NORMALIZER_LABELS | FIXED_N_256_LABEL | {"llama4": "Llama 4, f = 256"}
RECALL_AFTER_LABELS = BASIC_LABELS | {
    "after_half": "softmax, temperature 1/2 after training",
    "after_quarter": "softmax, temperature 1/4 after training",
}
QK_NORM_LABELS = FIXED_N_256_LABEL | {"softmax": "softmax", "ssmax": "SSMax", "log_n": "log n"}
SCORE_SCALE_LABELS = {
    "softmax": "softmax",
    "ssmax": "SSMax",
    "ssmax_b": "SSMax with b",
    "ssmax_without_s": "SSMax without s",
    "log_n": "log n",
}
TEXT_SWAP_LABELS = {
    "ssmax_fixed, n=fixed:753": "trained at n = 256 and tested at 753",
    "ssmax_fixed, n=fixed:2048": "trained at n = 256 and tested at 2,048",
    "ssmax_fixed, n=visible": "trained at n = 256 and tested with growth",
}


def baseline_pairs(baseline: str, row_names: Iterable[str]) -> tuple[RowAndBaseline, ...]:
    """Return a pair (row, baseline) for each other row, as in `LossResults.compared_pairs`."""
    return tuple((name, baseline) for name in row_names if name != baseline)


GROWTH_PAIRS = baseline_pairs("ssmax_fixed", ("softmax", "ssmax", "log_n"))
GROWTH_PAIRS_NO_QK_NORM = tuple((f"{arm}_no_qk_norm", f"{baseline}_no_qk_norm") for arm, baseline in GROWTH_PAIRS)
QK_NORM_ON_OFF_LABELS = QK_NORM_LABELS | {
    f"{arm}_no_qk_norm": f"{label}, no QK-norm" for arm, label in QK_NORM_LABELS.items()
}
# columns of tables of losses (`LossResults.columns`)
LOSS_AT_256_COLUMNS = {"at 256 tokens": TableColumn("", "val loss", "", 0)}
LOSS_AT_2048_COLUMNS = {words: TableColumn("", "mean loss", words, 2048) for words in LONG_CONTEXT_SETTINGS}
DIAGNOSTIC_COLUMNS = {metric: TableColumn("", metric, "as trained", 0) for metric in KEPT_DIAGNOSTICS}
GAU_LABELS = {
    "n-256": "relu^2, n = 256",
    "n-sample": "relu^2, n of the sample",
    "n-visible": "relu^2, visible n",
    "n-sum": "relu^2, by its sum",
    "softmax": "softmax",
    "attention": "softmax, a standard block",
    "mixed-n-256": "relu^2, n = 256, mixed lengths",
    "mixed-n-sample": "relu^2, n of the sample, mixed lengths",
}
NORMALIZER_2026_LABELS = {
    "softmax": "softmax",
    "ssmax": "SSMax",
    "sink": "softmax, sink",
    "log_n_squared": "(ln n)^2",
    "gate": "softmax, output gate",
    "exclusive": "XSA",
    "exclusive_ssmax": "XSA, SSMax",
    "exclusive_gate": "XSA, output gate",
    "differential_v2": "differential V2",
    "elastic": "Elastic-Softmax",
    "lssa": "LSSA, first stage",
    "threshold": "thresholds, one view",
}
LABELS_BY_SIZE = {arm: NORMALIZER_LABELS[arm] for arm in ("softmax", "ssmax", "log_n", "forget", "stick_breaking")}
SIZES = {"0.25M": ("sizes", 252_000), "0.41M": ("text-all", 411_000), "1.3M": ("sizes", 1_313_000)}
ROW_LABELS_BY_SIZE = {f"{arm} {size}": f"{label}, {size}" for size in SIZES for arm, label in LABELS_BY_SIZE.items()}
SEEDED_BUGS = {
    "no_bug": "no bug",
    "n_too_large": "n one too large",
    "mask_leaks": "the mask leaks the next token",
    "dropout": "no bug, dropout 0.1",
    "dropout_left_on": "dropout 0.1, left on in evaluation",
}
LAYER_VARIANT_LABELS = {
    "softmax": "softmax",
    "differential": "differential attention",
    "gate_by_head": "output gate, one factor a head",
    "softcap": "scores capped at 50",
    "last_layer_without_rope": "last layer without RoPE",
}
NEEDLE_AND_TEXT_LABELS = QK_NORM_LABELS | {
    "after_half": "softmax, temperature 1/2 after training",
    "after_ssmax": "softmax, SSMax after training",
}
ONE_MODEL_LABELS = {
    "softmax": "softmax",
    "after_ssmax": "SSMax",
    "after_log_n": "log n beyond 256",
    "after_five_quarters": "scores times 1.25",
    "after_three_halves": "scores times 1.5",
    "after_twice": "scores times 2",
}
NEEDLE_OTHERS_LABELS = {
    arm: NORMALIZER_LABELS[arm] for arm in ("ssmax", "softmax", "ssmax_without_s", "ssmax_bias")
} | {"late": "SSMax after 75 %"}
NEEDLE_SWAP_LABELS = {
    **FIXED_N_256_LABEL,
    "ssmax_fixed, n=fixed:1024": "trained at n = 256 and tested at 1,024",
    "ssmax_fixed, n=fixed:4096": "trained at n = 256 and tested at 4,096",
    "ssmax_fixed, n=visible": "trained at n = 256 and tested with growth",
    "ssmax": "SSMax",
    "ssmax, n=fixed:256": "SSMax tested at n = 256",
    "ssmax, n=fixed:1024": "SSMax tested at n = 1,024",
    "ssmax, n=fixed:4096": "SSMax tested at n = 4,096",
}
SWAP_TIME_LABELS = {"ssmax": "SSMax", "ssmax_b": "SSMax with b", "softmax": "softmax"}
SWAP_TIME_LABELS |= {
    f"at_{part}{b}": f"SSMax{words} after {part} %"
    for b, words in (("", ""), ("_b", " with b"))
    for part in (25, 50, 75, 90)
}
SWAP_TIME_LABELS |= {"after": "SSMax put in after training", "after_more": "the same, a fifth more training"}
SWAP_TIME_LABELS |= {
    "after_more_b": "the same with b, a fifth more training",
    "softmax_more": "softmax, a fifth more training",
}
SWAP_TIME_ARMS = {
    "SSMax": {"ssmax": 0, "at_25": 0.25, "at_50": 0.5, "at_75": 0.75, "at_90": 0.9, "after": 1},
    "SSMax with b": {"ssmax_b": 0, "at_25_b": 0.25, "at_50_b": 0.5, "at_75_b": 0.75, "at_90_b": 0.9},
}
EXTENSION_LABELS = {
    (arm + end).removeprefix("softmax_"): ARM_LABELS[arm] + words
    for end, words in {"": "", "_theta": ", base x 4", "_yarn": ", YaRN", "_nope": ", no positions"}.items()
    for arm in ("softmax", "ssmax", "log_n")
} | {"not_extended": "softmax, 256 tokens to the end"}
RECALL_ALL_RESULTS = RecallResults(
    "recall-all",
    "retrieval.md",
    NORMALIZER_LABELS,
    "softmax",
    (4096,),
    0.25,
    is_tuned=True,
    picture_kind="rows",
    ranks_arms=True,
)
TEXT_ALL_RESULTS = LossResults(
    "text-all",
    "text-normalizers.md",
    LABELS_AT_256,
    baseline_pairs("softmax", LABELS_AT_256),
    LOSS_AT_256_COLUMNS | LOSS_AT_2048_COLUMNS | DIAGNOSTIC_COLUMNS,
    matters=0.03,
    ranks_arms=True,
    extra_columns={"recall falls below 1/2 at": RECALL_ALL_RESULTS.half_accuracy_length},
)
ALL_RESULTS = (
    *(
        LossResults(
            "eight-times",
            "length.md",
            QK_NORM_ON_OFF_LABELS,
            (*GROWTH_PAIRS, *GROWTH_PAIRS_NO_QK_NORM, ("softmax_no_qk_norm", "softmax")),
            LOSS_AT_256_COLUMNS
            | {words: TableColumn("", "mean loss", words, 2048) for words in (*LONG_CONTEXT_SETTINGS, "yarn")},
            shown_size=corpus,
            picture_rows={"QK-norm": GROWTH_PAIRS, "no QK-norm": GROWTH_PAIRS_NO_QK_NORM},
        )
        for corpus in ("speeches", "code")
    ),
    *(
        LossResults(
            "twenty-times",
            "length.md",
            QK_NORM_ON_OFF_LABELS,
            (),
            {words: TableColumn("", "mean loss", words, 5120) for words in (*LONG_CONTEXT_SETTINGS, "yarn")},
            (),
            shown_size=corpus,
            picture_rows={"QK-norm": GROWTH_PAIRS, "no QK-norm": GROWTH_PAIRS_NO_QK_NORM}
            if corpus == "speeches"
            else {},
        )
        for corpus in ("speeches", "code")
    ),
    LossResults(
        "eight-times-after",
        "length.md",
        {**FIXED_N_256_LABEL, **TEXT_SWAP_LABELS, "ssmax": "SSMax"}
        | {f"ssmax, n=fixed:{n}": f"SSMax tested at n = {n:,}" for n in (256, 753, 2048)},
        (
            ("ssmax", "ssmax_fixed"),
            *baseline_pairs("ssmax_fixed", TEXT_SWAP_LABELS),
            *baseline_pairs("ssmax", TEXT_SWAP_LABELS),
            ("ssmax, n=fixed:256", "ssmax"),
        ),
        {"215 to 255": TableColumn("", "loss", "as trained", 215)} | LOSS_AT_2048_COLUMNS,
        picture_rows={"QK-norm": baseline_pairs("ssmax_fixed", ("ssmax", *TEXT_SWAP_LABELS))},
    ),
    LossResults(
        "gau-lengths",
        "gau.md",
        GAU_LABELS,
        baseline_pairs("n-256", ("n-sample", "n-visible", "n-sum", "softmax", "attention")),
        {"256": TableColumn("", "loss", "as trained", 256)}
        | {f"{length}": TableColumn(f"-at-{length}", "loss", "as trained", length) for length in (32, 64, 128, 512)}
        | {f"{length}, not fine-tuned": TableColumn("", "loss", "as trained", length) for length in (32, 512)},
        ("32", "64", "128", "512"),
        "256",
        0.01,
        change_from_tuning_columns=("32, not fine-tuned", "512, not fine-tuned", "32", "512"),
        draws_intervals=True,
    ),
    LossResults(
        "when-to-swap-text",
        "when-to-swap.md",
        SWAP_TIME_LABELS,
        baseline_pairs("ssmax", SWAP_TIME_LABELS),
        LOSS_AT_256_COLUMNS | LOSS_AT_2048_COLUMNS,
        training_fractions_by_trend=SWAP_TIME_ARMS,
    ),
    LossResults(
        "extend",
        "swapping.md",
        EXTENSION_LABELS,
        baseline_pairs("softmax", EXTENSION_LABELS),
        LOSS_AT_256_COLUMNS
        | {
            "861 to 1,023": TableColumn("", "loss", "as trained", 861),
            "mean of 4,096": TableColumn("", "mean loss", "as trained", 4096),
        },
        ("mean of 4,096",),
        "mean of 4,096",
        draws_intervals=True,
    ),
    TEXT_ALL_RESULTS,
    Overview(
        replace(TEXT_ALL_RESULTS, decisive_columns=tuple(LOSS_AT_256_COLUMNS)),
        TEXT_ALL_RESULTS,
        RECALL_ALL_RESULTS,
        LONG_CONTEXT_SETTINGS[1],
        TEXT_ALL_RESULTS.docs_page,
    ),
    LossResults(
        "text-2026",
        "text-normalizers.md",
        NORMALIZER_2026_LABELS,
        baseline_pairs("softmax", NORMALIZER_2026_LABELS),
        LOSS_AT_256_COLUMNS | LOSS_AT_2048_COLUMNS,
        matters=0.03,
        ranks_arms=True,
    ),
    LossResultsBySize(
        "sizes",
        "text-normalizers.md",
        ROW_LABELS_BY_SIZE,
        tuple((f"{arm} {size}", f"softmax {size}") for arm in [*LABELS_BY_SIZE][1:] for size in SIZES),
        LOSS_AT_256_COLUMNS | LOSS_AT_2048_COLUMNS,
        matters=0.05,
        draws_intervals=True,
        arm_labels=LABELS_BY_SIZE,
        sizes=SIZES,
    ),
    LossResults(
        "text-layers",
        "text-normalizers.md",
        LAYER_VARIANT_LABELS,
        baseline_pairs("softmax", LAYER_VARIANT_LABELS),
        LOSS_AT_256_COLUMNS | LOSS_AT_2048_COLUMNS | DIAGNOSTIC_COLUMNS,
        matters=0.03,
    ),
    *(
        LossResults(
            "training-length",
            "length.md",
            SCORE_SCALE_LABELS,
            baseline_pairs("softmax", SCORE_SCALE_LABELS),
            LOSS_AT_256_COLUMNS,
            tuple(LOSS_AT_256_COLUMNS),
            "at 256 tokens",
            0.005,
            corpus,
            shows_token_counts=True,
            draws_intervals=True,
        )
        for corpus in ("speeches", "code")
    ),
    RecallResults(
        "recall",
        "retrieval.md",
        {arm: ARM_LABELS[arm] for arm in ("softmax", "ssmax", "log_n")},
        "softmax",
        (2048,),
        0.1,
        picture_kind="curves",
    ),
    RecallResults(
        "recall-control", "retrieval.md", ARM_LABELS, "ssmax_fixed", (2048, 8192), 0.1, picture_kind="curves"
    ),
    RecallResults(
        "recall-tuned",
        "retrieval.md",
        ARM_LABELS,
        "ssmax_fixed",
        (16384,),
        0.25,
        is_tuned=True,
        picture_kind="rows",
        ranks_arms=True,
    ),
    RECALL_ALL_RESULTS,
    RecallResults(
        "recall-2026",
        "retrieval.md",
        NORMALIZER_2026_LABELS,
        "softmax",
        (4096,),
        0.25,
        is_tuned=True,
        picture_kind="rows",
        ranks_arms=True,
    ),
    RecallResults(
        "recall-blind", "retrieval.md", {arm: f"arm {arm}" for arm in "abcd"}, "a", (64,), 0.25, is_tuned=True
    ),
    LossResults(
        "seeded-bugs",
        "retrieval.md",
        {
            f"{arm} {bug}": f"{label}: {ARM_LABELS[arm]}"
            for bug, label in SEEDED_BUGS.items()
            for arm in ("softmax", "ssmax")
        },
        tuple((f"ssmax {bug}", f"softmax {bug}") for bug in SEEDED_BUGS),
        {f"{length:,}": TableColumn("", "mqar accuracy", "as trained", length) for length in (64, 2048)},
        ("2,048",),
        "2,048",
        0.5,
        is_accuracy=True,
    ),
    RecallResults(
        "recall-after",
        "retrieval.md",
        RECALL_AFTER_LABELS,
        "ssmax_fixed",
        (16384,),
        0.25,
        compared_column="size",
        picture_kind="curves",
    ),
    RecallResults(
        "when-to-swap",
        "when-to-swap.md",
        SWAP_TIME_LABELS,
        "ssmax",
        (16384,),
        0.25,
        training_fractions_by_trend=SWAP_TIME_ARMS,
        picture_kind="rows",
    ),
    RecallResults(
        "needle",
        "needle-in-text.md",
        ARM_LABELS | FIXED_N_256_LABEL,
        "ssmax_fixed",
        (4096,),
        0.25,
        is_tuned=True,
        task="needle",
    ),
    RecallResults(
        "needle-far",
        "needle-in-text.md",
        NEEDLE_AND_TEXT_LABELS,
        "ssmax_fixed",
        (65536,),
        0.25,
        is_tuned=True,
        picture_kind="rows",
        task="needle",
        ranks_arms=True,
    ),
    RecallResults(
        "needle-others",
        "needle-in-text.md",
        NEEDLE_OTHERS_LABELS,
        "ssmax",
        (65536,),
        0.25,
        is_tuned=True,
        task="needle",
        ranks_arms=True,
    ),
    RecallResults(
        "needle-and-text",
        "needle-in-text.md",
        NEEDLE_AND_TEXT_LABELS,
        "ssmax_fixed",
        (4096,),
        0.25,
        picture_kind="curves",
        task="needle",
    ),
    LossResults(
        "needle-and-text",
        "needle-in-text.md",
        NEEDLE_AND_TEXT_LABELS,
        baseline_pairs("ssmax_fixed", NEEDLE_AND_TEXT_LABELS),
        LOSS_AT_256_COLUMNS | LOSS_AT_2048_COLUMNS,
        (*LOSS_AT_256_COLUMNS, *LOSS_AT_2048_COLUMNS),
        "at 256 tokens",
        table_suffix="losses",
    ),
    RecallResults(
        "one-model",
        "needle-in-text.md",
        ONE_MODEL_LABELS,
        "after_ssmax",
        (4096,),
        0.25,
        task="needle",
        picture_kind="rows",
    ),
    LossResults(
        "one-model",
        "needle-in-text.md",
        ONE_MODEL_LABELS,
        baseline_pairs("softmax", ONE_MODEL_LABELS),
        LOSS_AT_256_COLUMNS | LOSS_AT_2048_COLUMNS,
        tuple(LOSS_AT_256_COLUMNS),
        "at 256 tokens",
        table_suffix="losses",
    ),
    LossResults(
        "needle-and-text-after",
        "needle-in-text.md",
        NEEDLE_SWAP_LABELS,
        (
            *(
                (name, baseline)
                for baseline in ("ssmax_fixed", "ssmax")
                for name in NEEDLE_SWAP_LABELS
                if name.startswith(f"{baseline}, ")
            ),
            *baseline_pairs("ssmax", ("ssmax_fixed, n=fixed:4096", "ssmax_fixed, n=visible")),
        ),
        {
            f"{length:,} tokens": TableColumn("", "needle accuracy", "as trained", length)
            for length in (256, 1024, 4096)
        },
        ("4,096 tokens",),
        "4,096 tokens",
        0.25,
        is_accuracy=True,
    ),
)

FIXED_N_ARM, (_, THETA_SETTING) = "ssmax_fixed", LONG_CONTEXT_SETTINGS
# rows of the table at the top of docs/results.md: what was measured, its page, the result's place, the verdict's key
HEADLINE_VERDICTS = (
    (
        "recall at 256 times, exploratory",
        "retrieval.md#the-control-at-tuned-rates",
        "recall-tuned",
        ("ssmax", 3e-3, 16384),
    ),
    ("", "", "recall-tuned", ("softmax", 6e-3, 16384)),
    ("recall at 128 times, exploratory", "retrieval.md#the-control", "recall-control", ("ssmax", 1e-3, 8192)),
    (
        "recall after 2,400 steps, exploratory",
        "retrieval.md#a-temperature-put-in-after-training",
        "recall-after",
        ("ssmax", 2400, 16384),
    ),
    ("", "", "recall-after", ("softmax", 2400, 16384)),
    ("", "", "recall-after", ("after_half", 2400, 16384)),
    ("recall after a swap, 600 steps", "when-to-swap.md", "when-to-swap", ("after", 3e-3, 16384)),
    ("", "", "when-to-swap", ("at_90_b", 3e-3, 16384)),
    ("needles at 16 times, exploratory", "needle-in-text.md", "needle", ("ssmax", 1e-3, 4096)),
    ("", "", "needle", ("softmax", 2e-3, 4096)),
    ("needles at 256 times", "needle-in-text.md#at-256-times-the-length", "needle-far", ("ssmax", 1e-3, 65536)),
    ("", "", "needle-far", ("softmax", 2e-3, 65536)),
    ("", "", "needle-far", ("after_half", 2e-3, 65536)),
    ("", "", "needle-others", ("late", 2e-3, 65536)),
    (
        "needles beside text at 16 times",
        "needle-in-text.md#beside-ordinary-text",
        "needle-and-text",
        ("ssmax", 2e-3, 4096),
    ),
    ("", "", "needle-and-text-after", ("ssmax, n=fixed:1024", "ssmax", "4,096 tokens")),
    (
        "needles at 16 times, put in after training",
        "needle-in-text.md#one-model-for-both-lengths",
        "one-model",
        ("softmax", 2e-3, 4096),
    ),
    ("", "", "one-model", ("after_twice", 2e-3, 4096)),
    (
        "loss at 256 tokens of the same models",
        "needle-in-text.md#one-model-for-both-lengths",
        "one-model-losses",
        ("after_twice", "softmax", "at 256 tokens"),
    ),
    ("loss of speeches at 8 times", "length.md", "eight-times-speeches", ("ssmax", FIXED_N_ARM, THETA_SETTING)),
    ("", "", "eight-times-speeches", ("ssmax_no_qk_norm", f"{FIXED_N_ARM}_no_qk_norm", THETA_SETTING)),
    ("", "", "eight-times-after", ("ssmax_fixed, n=fixed:753", "ssmax", THETA_SETTING)),
    ("loss of code at 8 times", "length.md#on-code", "eight-times-code", ("ssmax", FIXED_N_ARM, THETA_SETTING)),
    (
        "loss of speeches at 8 times, after a swap",
        "when-to-swap.md#on-text",
        "when-to-swap-text",
        ("after", "ssmax", THETA_SETTING),
    ),
    ("", "", "when-to-swap-text", ("softmax", "ssmax", THETA_SETTING)),
    (
        "loss of speeches at 8 times, by normalizer",
        "text-normalizers.md",
        "text-all",
        ("stick_breaking", "softmax", THETA_SETTING),
    ),
    ("", "", "text-all", ("forget", "softmax", THETA_SETTING)),
    ("", "", "text-all", ("ssmax", "softmax", THETA_SETTING)),
    (
        "loss of speeches at 8 times, other sizes",
        "text-normalizers.md#models-of-three-sizes",
        "sizes",
        ("stick_breaking 0.25M", "softmax 0.25M", THETA_SETTING),
    ),
    ("", "", "sizes", ("stick_breaking 1.3M", "softmax 1.3M", THETA_SETTING)),
    ("", "", "sizes", ("ssmax 1.3M", "softmax 1.3M", THETA_SETTING)),
    (
        "loss of speeches at the training length",
        "length.md#at-the-training-length",
        "training-length-speeches",
        ("ssmax", "softmax", "at 256 tokens"),
    ),
    (
        "loss of code at the training length",
        "length.md#at-the-training-length",
        "training-length-code",
        ("ssmax", "softmax", "at 256 tokens"),
    ),
    ("loss of GAU, fine-tuned on 64 tokens", "gau.md#at-other-lengths", "gau-lengths", ("n-sample", "n-256", "64")),
)


def headline_table() -> str:
    """Return a Markdown table of the verdicts in `HEADLINE_VERDICTS`: accuracies in points, losses in nats."""
    results = {result.table_name: result for result in ALL_RESULTS}
    lines = [["measured", "arm", "minus", "difference", "over"]]
    for measured, page, place, key in HEADLINE_VERDICTS:
        result, verdict = results[place], results[place].verdicts[key]
        pair = [result.labels[name] for name in result.arm_and_baseline_names(key)]
        lines.append(
            [
                f"[{measured}]({page})" if page else "",
                *pair,
                result.verdict_text(verdict),
                verdict.interval.noise_source,
            ]
        )
    return markdown_table(lines)


def insert_table(text: str, name: str, table: str) -> str:
    """Return a page's text with a table put at the place marked with `name`. Raises LookupError: it has no
    such place.
    """
    begin, end = f"<!-- results: {name} -->\n", f"<!-- end of {name} -->"
    before, begin, rest = text.partition(begin)
    _, end, after = rest.partition(end)
    if not end:
        raise LookupError(f"no place for the results of {name}")
    return f"{before}{begin}\n{table}\n{end}{after}"


def content_by_generated_path() -> dict[Path, bytes]:
    """Return the files that are made from results, by path: pages with their tables, and pictures."""
    pages: dict[Path, str] = {}
    pictures = {}
    for result in ALL_RESULTS:
        page = ROOT / "docs" / result.docs_page
        for place, table in result.tables().items():
            pages[page] = insert_table(pages.get(page) or page.read_text(encoding="utf-8"), place, table)
        if picture := result.draw_picture():
            pictures[ROOT / "docs" / f"{result.table_name}.svg"] = picture
    page = ROOT / "docs" / "results.md"
    pages[page] = insert_table(page.read_text(encoding="utf-8"), "overview", headline_table())
    return {page: text.encode() for page, text in pages.items()} | pictures


def is_current(committed: bytes, content: bytes) -> bool:
    """Return whether a committed file equals `content`. A picture that another release of matplotlib drew needs equal
    words only. Names of clip paths may differ: they are digests of coordinates, whose last digits depend on the
    machine.
    """
    committed, content = (re.sub(rb"\bp[0-9a-f]{10}\b", b"clip-path", file) for file in (committed, content))
    releases, words = (
        [re.findall(part, file) for file in (committed, content)]
        for part in (rb">(Matplotlib v.*?),", rb"<!-- (.*?) -->")
    )
    return words[0] == words[1] != [] if releases[0] != releases[1] else committed == content


def main() -> int:
    """Write or check the files; return 1 if a check finds a difference, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    equal = is_current if options.check else bytes.__eq__
    differing = {
        path: content
        for path, content in content_by_generated_path().items()
        if not path.exists() or not equal(path.read_bytes(), content)
    }
    for path, content in differing.items():
        print(f"{path.relative_to(ROOT)}: {'differs from results/' if options.check else 'written'}")
        if not options.check:
            path.write_bytes(content)
    return int(options.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
