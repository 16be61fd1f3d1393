"""The contract notices: of normalizers that each break one promise, the check of that promise says so, and `lm
check-normalizer` fails.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import lm
from torch import Tensor, nn

from lm.attention import contract
from lm.attention.catalogue import Softmax
from lm.attention.contract import CHECKS, check_promises
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import LayerSpec, Normalizer, SoftmaxNormalizer
from lm.attention.options import Options
from lm.attention.query_scale import QueryScale
from lm.plugins import PLUGINS


class Drawn(SoftmaxNormalizer):
    def initialise(self) -> None:
        self.b = nn.Parameter(torch.randn(self.layer.n_head))

    def define_scores(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        return super().define_scores(q, k, layout) * self.b.to(q.dtype).view(-1, 1, 1)


class OtherForward(QueryScale):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        return super().forward(1.01 * q, k, v, layout)


class NoGradient(QueryScale):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        return super().forward(q.detach(), k, v, layout)


class DividedAlongKeys(SoftmaxNormalizer):
    def normalize(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        return super().normalize(scores, layout) / layout.n("visible").unsqueeze(-2)


class ScaledAlongKeys(SoftmaxNormalizer):
    def define_scores(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        z = super().define_scores(q, k, layout)
        return z * layout.n("sample").unsqueeze(-2) if q.size(2) == k.size(2) else z


class Acausal(SoftmaxNormalizer):
    def normalize(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        return scores.softmax(-1)


class HalfSums(SoftmaxNormalizer):
    def normalize(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        return super().normalize(scores, layout) / 2


class LooksAtOtherRows(SoftmaxNormalizer):
    def normalize(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        return super().normalize(scores * (1 + scores.mean(-2, keepdim=True)), layout)


class NamesAnotherMap(SoftmaxNormalizer):
    score_map = "relu2"


class NamesAnotherScale(SoftmaxNormalizer):
    def scale_by_position(self) -> Tensor:
        return torch.full((self.layer.n_head, self.layer.train_length), 2.0, dtype=torch.float64)


class NFromWidth(SoftmaxNormalizer):
    def define_scores(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        return super().define_scores(q, k, layout) * k.size(2)


class ForgetsAKey(SoftmaxNormalizer):
    def decode(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, state: object) -> tuple[Tensor, object]:
        out, (k, v) = super().decode(q, k, v, layout, state)
        return out, (torch.cat((0 * k[:, :, :1], k[:, :, 1:]), 2), v)


class ForgetsTheGroups(SoftmaxNormalizer):
    def decode(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, state: object) -> tuple[Tensor, object]:
        if state is not None:
            k, v = torch.cat((state[0], k), 2), torch.cat((state[1], v), 2)
        return self(q, k, v, layout), (k, v)


class StaysBehind(SoftmaxNormalizer):
    def initialise(self) -> None:
        self.table = torch.ones(1)

    def define_scores(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        return super().define_scores(q, k, layout) * self.table.expand(q.size(2), 1)


class Overflows(SoftmaxNormalizer):
    def normalize(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        a = scores.exp().masked_fill(~layout.visible(), 0.0)
        return a / a.sum(-1, keepdim=True)


class HalfPrecision(SoftmaxNormalizer):
    def weights(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        return self.normalize(self.define_scores(q, k, layout), layout)


class Coarse(QueryScale):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        return super().forward(q, k, v.to(torch.float8_e4m3fn).bfloat16() if v.dtype == torch.bfloat16 else v, layout)


BROKEN = {
    Drawn: {"check_initial_values"},
    DividedAlongKeys: {"check_n_per_query", "check_decoding"},
    ScaledAlongKeys: {"check_n_per_query"},
    OtherForward: {"check_fast_path"},
    NoGradient: {"check_fast_path", "check_finite_differences"},
    Acausal: {"check_declared_sums", "check_causality"},
    HalfSums: {"check_declared_sums"},
    LooksAtOtherRows: {"check_query_independence", "check_packed_documents"},
    NamesAnotherMap: {"check_score_map"},
    NamesAnotherScale: {"check_scale_by_position"},
    NFromWidth: {"check_decoding", "check_packed_documents"},
    ForgetsAKey: {"check_decoding"},
    ForgetsTheGroups: {"check_decoding"},
    StaysBehind: {"check_one_device"},
    Overflows: {"check_extreme_scores"},
    HalfPrecision: {"check_autocast_weights"},
    Coarse: {"check_autocast_errors"},
}


@dataclass
class OfBroken(Softmax):
    """Options of the classes above, some of which are softmax's."""


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_each_broken_promise_fails_its_check(broken: type[Normalizer], monkeypatch: pytest.MonkeyPatch):
    make_normalizer = contract.make_normalizer

    def make(options: Options, layer: LayerSpec) -> Normalizer:
        return broken(options, layer) if isinstance(options, OfBroken) else make_normalizer(options, layer)

    monkeypatch.setattr(contract, "make_normalizer", make)
    problems = {
        check.__name__: problem
        for check, (_, problem) in zip(
            CHECKS, check_promises(OfBroken(), PLUGINS.failure_and_check_command), strict=True
        )
    }
    assert {name for name, problem in problems.items() if problem} >= BROKEN[broken], problems
    for name in BROKEN[broken]:  # a sentence that names what fails, where numbers are compared an entry, and what to do
        problem, _, hint = problems[name].partition("; hint: ")
        assert re.fullmatch(".+", hint), name
        assert not re.search("Error|Tensor-likes|torch", problem) or problem.startswith("stopped by RuntimeError: "), (
            problem
        )
        assert not re.search(", not -?[0-9]", problem) or re.search(r"at entry \[[0-9]", problem), problem


def test_a_normalizer_that_can_not_be_used_is_said_so_once_without_a_hint(monkeypatch: pytest.MonkeyPatch):
    class Pair(SoftmaxNormalizer):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> tuple[Tensor, None]:
            return v, None

    monkeypatch.setattr(contract, "make_normalizer", Pair)
    ((_, problem),) = check_promises(OfBroken(), PLUGINS.failure_and_check_command)
    assert problem == "stopped by TypeError: `forward` gives tuple, not a tensor"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda x: x.transpose(1, 2), r"gives shape \(2, 5, 4, \d+\); wanted is \(2, 4, 5, \d+\)"),
        (lambda x: x / 0, "gives numbers that are not finite; a row without weight"),
    ],
    ids=["shape", "not finite"],
)
@pytest.mark.parametrize("method", ["forward", "normalize"])
def test_a_wrong_shape_and_what_is_not_finite_are_named_before_what_follows(
    method: str, change: Callable[[Tensor], Tensor], problem: str, monkeypatch: pytest.MonkeyPatch
):
    class Changed(SoftmaxNormalizer):
        pass

    setattr(Changed, method, lambda *given: change(getattr(super(Changed, given[0]), method)(*given[1:])))
    monkeypatch.setattr(contract, "make_normalizer", Changed)
    ((_, found),) = check_promises(OfBroken(), PLUGINS.failure_and_check_command)
    name = {"forward": "`forward`", "normalize": "`(forward|weights)`"}[method]
    assert re.search(f"stopped by ValueError: {name} {problem}", found), found


def test_a_number_that_is_not_finite_is_said_to_be_so():
    numbers = torch.ones(1, 1, 2, 2)
    for pair, words in (((numbers * math.nan, numbers), "nan, not 1"), ((numbers, numbers * math.inf), "1, not inf")):
        with pytest.raises(AssertionError, match=f"^the output is {words}, at "):
            contract.assert_close(*pair, "output")


def test_check_normalizer_says_what_is_broken_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in vars(type(PLUGINS)()).items():  # what is imported here is forgotten
        monkeypatch.setattr(PLUGINS, name, value)
    (tmp_path / "broken.py").write_text(
        "from dataclasses import dataclass\n"
        "from lm.attention.normalizer import Normalizer\n"
        "from lm.attention.options import Options\n"
        "@dataclass\n"
        "class Nothing(Options):\n    full_formula = 'softmax(z) over all keys'\n"
        "class Acausal(Normalizer):\n    schema = Nothing\n    def normalize(self, scores, layout):\n        return "
        "scores.softmax(-1)\n"
    )
    result = lm("check-normalizer", "broken:Acausal")
    assert result.returncode == 1
    assert (
        "broken:Acausal: BROKEN: later tokens change no earlier output, to the bit: other tokens from 25 on change an "
        "earlier output" in result.stdout
    )
    assert "broken:Acausal: kept: the normalizer gives an output, and its parameters start at" in result.stdout


def test_check_normalizer_accepts_built_in_normalizers_with_options_and_refuses_unknown_ones(
    recwarn: pytest.WarningsRecorder,
):
    result = lm("check-normalizer", "ssmax", "bias=true")
    assert result.returncode == 0, result.stdout
    assert not recwarn.list
    assert result.stdout.count("ssmax (bias=true): kept: ") == len(CHECKS)
    refusal = lm("check-normalizer", "ssmax", "n=many")
    assert refusal.returncode == 2
    assert "model.normalizer.n = 'many': unknown row length" in refusal.stderr
