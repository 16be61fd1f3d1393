"""The picture of heads against theory: each head is where its numbers are, beside the curves it is compared with."""

import numpy as np
import pytest
import torch
from fabricated import evaluation_of
from test_diagnostics import LENGTH, VOCAB, make_decoder

from lm.attention import catalogue as opt
from lm.attention.options import Options
from lm.config.eval_config import DiagnosticsConfig
from lm.diagnostics.attention_rows import HEAD
from lm.evaluation.diagnostic_pictures import diagnostics_picture, sparsity_panels
from lm.evaluation.diagnostics import diagnostic_blocks
from lm.evaluation.held_out import HeldOut
from lm.model.device import Device
from lm.report.pictures import Panel
from lm.runs.evaluations import joined


def panels(options: Options) -> tuple[list[Panel], dict[str, np.ndarray]]:
    """The panels, row by row, and of the trained model each statistic by head of all layers."""
    held_out = HeldOut(np.random.default_rng(0).integers(1, VOCAB, (2, LENGTH + 1)), np.ones(VOCAB, np.float32))
    config = DiagnosticsConfig(sequences=2, queries=6, statistics=["concentration", "sparsity"])
    blocks = diagnostic_blocks(make_decoder(options), held_out, config, Device(torch.device("cpu"), bf16=False), 1, "")
    curves = evaluation_of(joined(blocks)).series
    heads: dict[str, list[np.ndarray]] = {}
    for curve in curves:
        if curve.axis and curve.axis.name == HEAD and curve.setting == "as trained":
            heads.setdefault(curve.metric, []).append(curve.means)
    theory_panels = [
        panel for row in sparsity_panels(curves, [*dict.fromkeys(curve.setting for curve in curves)]) for panel in row
    ]
    picture = diagnostics_picture(curves)
    assert picture.png.startswith(b"\x89PNG")
    assert sum(isinstance(panel, Panel) and panel.title.endswith(", by head") for panel in picture.panels) == len(
        theory_panels
    )
    return theory_panels, {name: np.concatenate(parts) for name, parts in heads.items()}


def points(panel: Panel, label: str) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of the heads of one model."""
    (trace,) = [trace for trace in panel.traces if trace.label == label and trace.kind == "dots"]
    return trace.x, trace.y


@pytest.mark.parametrize(
    ("options", "panel", "x"),
    [
        pytest.param(opt.Softmax(), 0, lambda heads: heads["score standard deviation"], marks=pytest.mark.slow),
        (opt.Relu2(), 0, lambda heads: heads["score mean"] / heads["score standard deviation"]),
        (opt.SSMax(), 1, lambda heads: heads["S, closed form"]),
    ],
)
def test_heads_are_drawn_at_their_statistics(options: Options, panel: int, x):
    axes, heads = panels(options)
    for row, ending in ((0, ""), (1, ", no first")):
        statistics = {name.removesuffix(ending): values for name, values in heads.items() if name.endswith(ending)}
        positions = points(axes[2 * row + panel], "as trained")
        np.testing.assert_allclose(positions, [x(statistics), statistics["S"]], rtol=1e-4)
        assert {"untrained weights", "shuffled scores"} <= {trace.label for trace in axes[2 * row + panel].traces}


def test_a_model_has_the_panels_of_its_own_maps_alone():
    for options, titles in (
        (opt.Softmax(), ["logit scale", "closed form"]),
        (opt.Relu2(), ["mean of scores", "closed form"]),
    ):
        axes, _ = panels(options)
        assert len(axes) == 2 * len(titles)
        for title, panel_axes in zip(titles * 2, axes, strict=True):
            assert title in panel_axes.x_label
