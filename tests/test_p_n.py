"""The fit of p_n: what it recovers of made-up tables, and what it writes."""

import csv
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

from lm.errors import ConfigError
from lm.model.decoder import Decoder
from lm.runs.loading import save_model

sys.path.insert(0, str(ROOT / "scripts"))
from fit_p_n import by_head, fits, main

N = np.arange(1, 257, dtype=float)


@pytest.mark.parametrize(("a", "b"), [(0.17, 0.02), (-0.4, 2.0), (1.0, 0.0)])
def test_a_line_in_ln_n_is_recovered_with_its_noise(a: float, b: float):
    noise = np.random.default_rng(0).normal(0, 0.05 * abs(a), len(N))
    fitted = fits(a * np.log(N) + b + noise)
    assert fitted["logarithm"].parameters == pytest.approx({"a": a, "b": b}, abs=0.02 * abs(a) + 1e-3)
    variance = (a * np.log(N) + b + noise)[1:].var()
    assert fitted["logarithm"].r2 == pytest.approx(1 - noise[1:].var() / variance, abs=1e-3)
    assert fitted["logarithm"].rms == pytest.approx(math.sqrt(noise[1:].var() / variance), rel=0.02)
    assert fitted["power"].parameters["k"] == pytest.approx(0, abs=0.05)
    assert fitted["constant"].r2 == 0


@pytest.mark.parametrize("k", [-1.0, 0.5, 1.0, 2.0])
def test_other_powers_are_told_from_the_logarithm_and_its_p_1_counts_for_nothing(k: float):
    p = 3.0 * (N**k - 1) / k - 7.0
    p[0] = 1e6
    fitted = fits(p)
    assert fitted["power"].parameters == pytest.approx({"a": 3.0, "b": -7.0, "k": k}, abs=1e-3)
    assert fitted["power"].r2 == pytest.approx(1, abs=1e-9)
    assert fitted["logarithm"].r2 < 0.99


def test_r2_and_the_power_do_not_depend_on_factor_and_offset_and_the_factors_of_heads_neither():
    p = np.log(N) + 0.3 * np.sin(N / 9)
    plain, scaled = fits(p), fits(-5 * p + 3)
    for name in ("logarithm", "power"):
        assert plain[name].r2 == pytest.approx(scaled[name].r2, abs=1e-6)
    assert plain["power"].parameters["k"] == pytest.approx(scaled["power"].parameters["k"], abs=1e-4)
    s, b = np.array([[0.2, -0.1], [0.5, 1.0]]), np.array([[0.0, 1.0], [2.0, 3.0]])
    heads = by_head(s, b, plain["logarithm"]), by_head(s / -5, b + 3 * s / 5, scaled["logarithm"])
    for line, scaled_line in zip(*heads, strict=True):
        assert (line["slope"], line["intercept"]) == pytest.approx(
            (scaled_line["slope"], scaled_line["intercept"]), abs=1e-9
        )
    assert [(head["layer"], head["head"]) for head in heads[0]] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_table_that_was_not_trained_has_no_r2():
    fitted = fits(np.ones(64))
    assert all(math.isnan(fit.r2) for fit in fitted.values())
    assert fitted["constant"].parameters == {"b": 1.0}


@pytest.mark.usefixtures("painted")
def test_table_summary_and_picture_are_of_the_models_table(tiny, tmp_path: Path, capsys: pytest.CaptureFixture):
    model = Decoder(tiny("model.normalizer=p_n").model, 400, 64, seed=1)
    with torch.no_grad():
        model.normalizers()[0].p.copy_(2.0 * torch.arange(1, 65).log() + 4.0)
        for layer, normalizer in enumerate(model.normalizers()):
            normalizer.s.copy_(torch.tensor([0.1, -0.3]) * (layer + 1))
            normalizer.b.fill_(0.5)
    save_model(model, tmp_path / "model")
    main([str(tmp_path / "model"), str(tmp_path)])
    summary = json.loads((tmp_path / "p_n.json").read_text())
    assert summary["train_length"] == 64
    assert summary["fits"]["logarithm"]["r2"] == pytest.approx(1, abs=1e-6)
    assert summary["fits"]["logarithm"]["parameters"]["b"] / summary["fits"]["logarithm"]["parameters"][
        "a"
    ] == pytest.approx(2, abs=1e-4)
    for head, s in zip(summary["heads"], (0.1, -0.3, 0.2, -0.6), strict=True):
        assert (head["slope"], head["intercept"]) == pytest.approx((2 * s, 4 * s + 0.5), abs=1e-4)
    rows = list(csv.DictReader((tmp_path / "p_n.csv").open()))
    assert (len(rows), rows[0]["logarithm"]) == (64, "")
    assert float(rows[9]["p_n"]) == pytest.approx(float(rows[9]["logarithm"]), abs=1e-5)
    assert (tmp_path / "p_n.png").read_bytes().startswith(b"\x89PNG")
    assert "R^2 = 1.0000" in capsys.readouterr().out
    save_model(Decoder(tiny().model, 400, 64, seed=1), tmp_path / "softmax")
    with pytest.raises(
        ConfigError, match=r"softmax: model\.normalizer is not p_n in every layer; train configs/p_n\.yaml$"
    ):
        main([str(tmp_path / "softmax")])
