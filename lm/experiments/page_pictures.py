"""The pictures of an experiment's page, from its runs: every seed is in them."""

import math
from itertools import product

import numpy as np

from lm.experiments.experiment import Experiment
from lm.experiments.page_tables import SizeResults
from lm.experiments.procedure import Procedure, Run
from lm.experiments.run_outcome import SELECTION
from lm.experiments.summary import differences_by_rate
from lm.report.layer_curves import PARAMETERS, POINTS, LayerCurve, layer_curves, order, panel
from lm.report.pictures import (
    FIRST_POSITION,
    MOST_LINES,
    Panel,
    Picture,
    Trace,
    doublings,
    fraction_map,
    plain_ticks,
    smooth,
    token_unit,
)  # fmt: skip
from lm.report.sections import AlongAxis, Section, differences_along, values_along
from lm.report.tables import with_unit
from lm.runs.folder import METRICS, Curve, curve, read_metrics
from lm.runs.series import Series
from lm.schema import Plain


def curves(results: SizeResults) -> Picture | None:
    """Training and validation loss, and the primary metric if it was measured while training, by tokens seen; None: nothing is logged."""
    logs = {run.config.run_folder: read_metrics(run.config.run_folder / METRICS)[0] for run, _ in results.begun}
    primary = results.experiment.primary.metric
    titles = {"train/loss": "Training loss", SELECTION: "Validation loss"} | ({} if primary == SELECTION else {primary: primary})
    panels, once = [], []
    for name, title in titles.items():
        by_run = [(run, curve(logs[run.config.run_folder], name)) for run, _ in results.begun]
        if name == "train/loss" or any(len(each.tokens) > 1 for _, each in by_run):
            panels.append(_curves_panel(results, title, name, by_run))
        elif any(len(each.tokens) for _, each in by_run):
            once.append(title)
    if not any(panel.traces for panel in panels):
        return None
    caption = "Thin: single seeds"
    caption += "; training loss as a centred moving mean. " if panels[0].traces else ". "
    caption += "Thick: mean over the seeds of an arm that have finished. All of the held-out text, the part that selects included."
    if any(trace.kind == "diverged" for panel in panels for trace in panel.traces):
        caption += " Crosses at the top: where a run diverged."
    caption += f" Without a curve, because it was measured once: {', '.join(once)}." if once else ""
    return Picture(panels, results.arm_names, caption)


def _curves_panel(results: SizeResults, title: str, name: str, by_run: list[tuple[Run, Curve]]) -> Panel:
    last = max((each.tokens[-1] for _, each in by_run if len(each.tokens)), default=1)
    unit, x_label = token_unit(last)
    traces, settled = [], []
    for run, each in by_run:
        if not len(each.tokens):
            continue
        window = max(1, len(each.tokens) // 50) // 2 * 2 + 1 if name == "train/loss" else 1
        every, y = max(1, len(each.tokens) // POINTS), smooth(each.loss, window)
        traces.append(Trace(results.colour(run.arm), _of_seed(run), each.tokens[::every] / unit, y[::every], "seed"))
        settled += y[(each.tokens > 0.1 * last) & np.isfinite(y)].tolist()
        if run.outcome.state == "diverged":
            traces.append(Trace(results.colour(run.arm), _of_seed(run), each.tokens[-1:] / unit, each.loss[-1:], "diverged"))
    if name != "train/loss":
        for arm in results.arm_names:
            same = [each for run, each in by_run if run.arm == arm and run.outcome.state == "finished" and len(each.tokens)]
            if len({each.tokens.tobytes() for each in same}) == 1:
                mean = np.mean([each.loss for each in same], axis=0)
                traces.append(Trace(results.colour(arm), f"{arm}, mean of {len(same)} seeds", same[0].tokens / unit, mean, "mean"))
    low, high = (min(settled), max(settled)) if settled else (0, 1)
    pad = 0.06 * (high - low) or 0.1
    label = "nats per token" if name in ("train/loss", SELECTION) else name
    return Panel(title, x_label, label, traces, y_range=(low - pad, high + pad))


def _of_seed(run: Run) -> str:
    return f"{run.arm}, seed {run.seed}"


def rates(procedure: Procedure, size: str) -> Picture | None:
    """Selection loss of each tuning run by rate, and the differences with both arms at the same rate; None without tuning."""
    experiment, tried = procedure.experiment, procedure.tried(size)
    names = [arm.name for arm in experiment.arms]
    if not any(experiment.choosing(each) is not None for each in tried):
        return None
    chosen = {arm: tried[0] for arm, tried in procedure.choice(size).final.items()}
    ticks = {rate: f"{rate:g}" for rate in sorted({each.rate for each in tried})}
    losses = experiment.costs_of(tried, size)
    traces, rings = [], []
    for number, arm in enumerate(names):
        values = [(each.rate, experiment.choosing(each)) for each in tried if each.arm == arm]
        traces += _tried(number, arm, [(rate, value) for rate, value in values if value is not None])
        mean = {
            rate: experiment.cost(float(np.mean(some)))
            for rate, some in sorted(losses.get(arm, {}).items())
            if all(map(math.isfinite, some))
        }
        traces.append(Trace(number, f"{arm}, mean", np.array([*mean]), np.array([*mean.values()]), "mean"))
        rings += [(chosen[arm], mean[chosen[arm]], number)] if chosen.get(arm) in mean else []
    first = Panel("Tuning runs", experiment.tune.key, f"{experiment.chosen_by}, selection text", traces, ticks, log=10, rings=rings)
    primary, apart = experiment.primary, []
    for number, arm in enumerate(experiment.arms[1:], 1):
        by_rate = {rate: [each for each in some if math.isfinite(each)] for rate, some in differences_by_rate(procedure, size, arm).items()}
        if primary.reach is not None:
            by_rate = {rate: np.expm1(some).tolist() for rate, some in by_rate.items()}
        by_rate = {rate: some for rate, some in by_rate.items() if some}
        flat = [(rate, value) for rate, some in by_rate.items() for value in some]
        apart.append(Trace(number, f"{arm.name} - {names[0]}, single seeds", *np.array(flat).reshape(-1, 2).T, "dots"))
        means = np.array([np.mean(some) for some in by_rate.values()])
        apart.append(Trace(number, f"{arm.name} - {names[0]}, mean", np.array([*by_rate]), means, "mean"))
    measured = _difference(experiment) if primary.learned is None else "fraction of runs that have learned"
    small = primary.matters if primary.learned is None else 0.0
    title = f"Difference to {names[0]}, both at the same rate"
    second = Panel(title, experiment.tune.key, f"{measured}, selection text", apart, ticks, log=10, zero=True, small=small)
    caption = "Left: dots are single tuning seeds, lines their means, rings the rates that were chosen."
    if any(trace.kind == "diverged" for trace in traces):
        caption += " Crosses at the top: a seed diverged there, and the rate is not chosen."
    caption += " Right: of the tuning seeds, once every tuning run has ended."
    caption += f" Shaded: differences below {small:g}." if small else ""
    return Picture([first, *([second] if any(len(each.x) for each in apart) else [])], names, caption)


def _difference(experiment: Experiment) -> str:
    """The quantity that differences are of, as beside an axis."""
    primary = experiment.primary
    return primary.metric if primary.reach is None else f"relative difference of {primary.quantity}"


def _tried(number: int, arm: str, values: list[tuple[float, float]]) -> list[Trace]:
    """The tuning runs of an arm, each by its rate and the value that chooses rates."""
    finished = np.array([pair for pair in values if math.isfinite(pair[1])]).reshape(-1, 2)
    traces = [Trace(number, f"{arm}, single seeds", *finished.T, "dots")]
    if len(finished) < len(values):
        at = np.array([rate for rate, value in values if not math.isfinite(value)])
        traces.append(Trace(number, f"{arm}, diverged", at, np.full(len(at), np.nan), "diverged"))
    return traces


def differences(procedure: Procedure, sizes: list[SizeResults]) -> Picture | None:
    """Differences to the baseline with their intervals: of each arm, or where there are several sizes by size."""
    experiment, several = procedure.experiment, len(sizes) > 1
    base, *others = experiment.arms
    names = [arm.name for arm in experiment.arms]
    places = [results.size for results in sizes] if several else names[1:]
    traces = []
    for results, (number, arm) in product(sizes, enumerate(others, 1)):
        single, interval = np.array(results.judged.comparisons[results.size, arm.name].differences), results.verdicts[arm.name].interval
        ends = interval and np.array(interval.listed())
        if experiment.primary.reach is not None:
            single, ends = np.expm1(single), interval and ends - 1
        x = places.index(results.size if several else arm.name) + (0.16 * (number - len(names) / 2) if several else 0.0)
        label = ", ".join(filter(None, (results.size, arm.name)))
        if len(single):
            traces.append(Trace(number, f"{label}, single seeds", np.full(len(single), x), single, "dots"))
        if interval and interval.bounded:
            traces.append(_bar(number, label, x + 0.06, ends.tolist()))
    if not traces:
        return None
    small = experiment.primary.matters
    panel = Panel(
        f"Difference to {base.name}" + (" by size" if several else ""), "", f"{_difference(experiment)}, report text", traces,
        dict(enumerate(places)), zero=True, small=small,
    )  # fmt: skip
    rates = " and rates" if any(procedure.choice(results.size).crossed for results in sizes) else ""
    caption = f"Dots: single seeds. Bars: mean with its Student t interval over seeds{rates}; all of them hold together with 95%."
    caption += f" Shaded: differences below {small:g}."
    return Picture([panel], names, caption)


def _bar(number: int, label: str, x: float, interval: list[float]) -> Trace:
    y, low, high = (np.array([value]) for value in interval)
    return Trace(number, label, np.array([x]), y, "interval", low, high)


def learned(sizes: list[SizeResults], lines: list[dict[str, Plain]]) -> Picture | None:
    """The primary metric of every final run with the level at which it has learned, and the fractions that have; None before any."""
    experiment, places = sizes[0].experiment, {}
    single, fractions = [], []
    for results, (number, arm) in product(sizes, enumerate(sizes[0].arm_names)):
        x, label = float(len(places)), " ".join(filter(None, (arm, results.size)))
        places[x] = label
        values = [results.value(run) for run in results.final if run.arm == arm]
        values = np.array([value for value in values if value is not None])
        if len(values):
            single.append(Trace(number, f"{label}, single seeds", np.full(len(values), x), values, "dots"))
        (line,) = (line for line in lines if (line["size"], line["arm"]) == (results.size, arm))
        if line["ended"]:
            fractions.append(_bar(number, label, x, line["fraction_learned"]))
    if not single:
        return None
    primary = experiment.primary
    level = {primary.learned: "has learned"}
    panels = [
        Panel("Every seed", "", f"{primary.metric}, at the end", single, places, levels=level),
        Panel("Fraction of runs that have learned", "", "fraction", fractions, places, y_range=(-0.03, 1.03)),
    ]
    caption = "Left: dots are single seeds. Right: bars are 95% Clopper-Pearson intervals; a run that diverged has not learned."
    return Picture(panels, sizes[0].arm_names, caption)


def along_axis(results: SizeResults, section: Section) -> Picture | None:
    """A section over an axis: values, and paired differences to the baseline, a row for each thing that was measured in a setting."""
    first, panels, overs = section.first, [], []
    base, *others = results.comparison.arms
    for line in section.lines:
        series = {arm.label: {run.seeds[-1]: section.series[run, line] for run in arm.runs if (run, line) in section.series}
                  for arm in (base, *others)}  # fmt: skip
        every = [each for by_seed in series.values() for each in by_seed.values()]
        title = ", ".join(filter(None, (line.metric, *line.of)))
        values = {arm: (list(by_seed), values_along(list(by_seed.values()))) for arm, by_seed in series.items()}
        levels = {level: f"{name} {level:.3g}" for each in every for name, level in each.references.items()}
        panels.append(_axis_panel(results, section, title, values, with_unit(line.metric, first.unit), levels))
        apart = {}
        for arm in (arm.label for arm in others if base.label == results.arm_names[0] and not every[0].control):
            shared = [seed for seed in series[arm] if seed in series[base.label]]
            apart[arm] = shared, differences_along([(series[arm][seed], series[base.label][seed]) for seed in shared])
        if any(each for _, each in apart.values()):
            overs += [each.over for _, each in apart.values() if each and each.over]
            title = f"{title}: paired difference to {base.label}"
            panels.append(_axis_panel(results, section, title, apart, with_unit("difference", first.unit), None))
        else:
            panels.append(None)
    caption = f"{first.shown.caption[:1].upper()}{first.shown.caption[1:]}. Thin: single seeds; thick: their mean."
    if overs:
        caption += f" Bands of the differences: 95% intervals over {' or '.join(dict.fromkeys(overs))}, point by point, not adjusted."
    caption += f" From position {FIRST_POSITION}." if first.bins else ""
    caption += " On the documents that are reported on." if first.data_fingerprint else ""
    return Picture(panels, results.arm_names, caption)


_Along = dict[str, tuple[list[int], AlongAxis | None]]  # by arm: the seeds, and their values; None: there are none


def _axis_panel(results: SizeResults, section: Section, title: str, along: _Along, label: str, levels: dict[float, str] | None) -> Panel:
    """`levels`: reference levels of values; None: they are differences."""
    traces = [trace for arm, (seeds, each) in along.items() if each for trace in _along_traces(results.colour(arm), arm, seeds, each)]
    axis, x = section.first.axis, np.concatenate([each.x for each in traces] or [np.ones(1)])
    ticks = doublings(x.min(), x.max()) if section.shape == "bins" else plain_ticks(sorted(set(x.tolist())))
    marks = {float(length): f"training length {length:,}" for length in section.seq_lens}
    return Panel(
        title, axis.label, label, traces, ticks, log=2 if axis.log else 0, zero=levels is None, marks=marks, levels=levels or {},
        y_range=(-0.03, 1.03) if section.first.unit == "fraction" and levels is not None else None,
    )  # fmt: skip


def _along_traces(number: int, arm: str, seeds: list[int], each: AlongAxis) -> list[Trace]:
    traces = [Trace(number, f"{arm}, seed {seed}", each.x, row, "seed") for seed, row in zip(seeds, each.seeds, strict=True)]
    ends = (each.low, each.high) if each.over else (None, None)
    return [*traces, Trace(number, f"{arm}, mean of {len(seeds)} seeds", each.x, each.mean, "mean", *ends)]


def maps(results: SizeResults) -> list[Picture]:
    """Fractions that are measured in many places at once, such as needles by depth and length: a map an arm, of the mean over seeds."""
    groups: dict[tuple[str, str, str], dict[str, dict[str, list[Series]]]] = {}
    for arm in results.comparison.arms:
        for run in arm.runs:
            for each in (
                each
                for evaluation in run.evaluations
                for each in evaluation.series
                if each.shape == "points" and each.unit == "fraction" and not each.shown and not each.control
            ):
                groups.setdefault((each.kind, each.metric, each.setting), {}).setdefault(arm.label, {}).setdefault(each.what, []).append(
                    each
                )
    pictures = []
    for (kind, metric, setting), by_arm in groups.items():
        if max(map(len, by_arm.values())) > MOST_LINES:
            panels = [
                fraction_map(arm, rows)
                for arm, rows in by_arm.items()
                if len({each.axis.values for some in rows.values() for each in some}) == 1
            ]
            caption = f"{kind}: {', '.join(filter(None, (metric, setting)))}. Mean over the seeds of an arm."
            pictures += [Picture(panels, results.arm_names, caption, columns=3)] if panels else []
    return pictures


def normalizer_parameters(results: SizeResults) -> Picture | None:
    """The normalizers' parameters by tokens seen; None: none are logged."""
    return _by_layer(results, "Parameters of the normalizers. A line for each seed, layer and head.", parameters=True)


def dynamics(results: SizeResults) -> Picture | None:
    """The quantities that `log.dynamics` names, by tokens seen; None: nothing is logged."""
    caption = "A line for each seed and layer; of what is logged by head the median over heads, of the largest score the largest."
    return _by_layer(results, caption, parameters=False)


def _by_layer(results: SizeResults, caption: str, parameters: bool) -> Picture | None:
    """A panel for each quantity that is logged by layer, of the normalizers' parameters or of all others."""
    by_quantity: dict[str, list[Trace]] = {}
    logged = [(run, layer_curves(read_metrics(record.folder / METRICS)[0])) for run, record in results.begun]
    ends = [curve.tokens[-1] for _, quantities in logged for layers in quantities.values() for curve in layers.values()]
    unit, label = token_unit(max(ends, default=1))
    for run, quantities in logged:
        for quantity, layers in quantities.items():
            if quantity.startswith(PARAMETERS) == parameters:
                for layer, curve in layers.items():
                    traces = _layer_traces(results.colour(run.arm), f"{_of_seed(run)}, layer{layer}", quantity, curve, unit)
                    by_quantity.setdefault(quantity, []).extend(traces)
    panels = [panel(quantity, label, by_quantity[quantity]) for quantity in sorted(by_quantity, key=order)]
    return Picture(panels, results.arm_names, caption) if panels else None


def _layer_traces(number: int, label: str, quantity: str, curve: LayerCurve, unit: float) -> list[Trace]:
    every = max(1, len(curve.tokens) // POINTS)
    lines = dict(zip(curve.columns, curve.values.T, strict=True))
    if not quantity.startswith(PARAMETERS):
        lines = {"": (np.max if quantity == "largest_score" else np.median)(curve.values, axis=1)}
    return [
        Trace(number, "/".join(filter(None, (label, head))), curve.tokens[::every] / unit, y[::every], "seed") for head, y in lines.items()
    ]
