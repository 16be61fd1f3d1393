"""Every entry and each of its options at two values, against definitions written anew: plain Python, one weight at a
time.

Nothing here uses lm/attention but to ask it for what is compared: dense weights, the fast path, and decoding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch

from lm.attention import catalogue
from lm.attention import catalogue as opt
from lm.attention.catalogue import make_normalizer
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import LayerSpec, Normalizer

HEADS, SIZE, WIDTH, TRAIN, LENGTH = 3, 6, 5, 11, 23
Vector = list[float]


@dataclass(frozen=True)
class Query:
    """One query of one head and all keys that it sees, its own the last; parameters as arrays by name."""

    options: object
    p: dict[str, np.ndarray]
    h: int
    q: np.ndarray  # (SIZE,)
    k: np.ndarray  # (n, SIZE)
    x: np.ndarray  # (n, WIDTH), the layer's input at each key

    @property
    def position(self) -> int:
        return len(self.k) - 1

    @property
    def n(self) -> float:
        policy = self.options.n
        return {"visible": len(self.k), "sample": LENGTH}.get(policy) or float(policy.partition(":")[2])

    @property
    def z(self) -> Vector:
        return [sum(a * b for a, b in zip(self.q, key, strict=True)) / math.sqrt(SIZE) for key in self.k]

    @property
    def back(self) -> list[int]:
        """How many tokens back each key is."""
        return [self.position - j for j in range(len(self.k))]

    @property
    def base(self) -> float:
        return TRAIN if self.options.base == "train" else self.options.base


def softmax(z: Vector, extra: float | None = None) -> Vector:
    """e^z over its sum, to which e^extra is added."""
    top = max([*z, *([] if extra is None else [extra])])
    total = sum(math.exp(x - top) for x in z) + (0 if extra is None else math.exp(extra - top))
    return [math.exp(x - top) / total for x in z]


def scaled(c: Callable[[Query], float]) -> Callable[[Query], Vector]:
    return lambda query: softmax([c(query) * z for z in query.z])


def ssmax(query: Query) -> float:
    s = query.p["s"][query.h] if query.options.scale == "learned" else 1.0
    return s * math.log(query.n) + (query.p["b"][query.h] if query.options.bias else 0.0)


def log_n(query: Query) -> float:
    c = math.log(query.n) / math.log(query.base)
    return (max(1.0, c) if query.options.clip else c) ** query.options.power


def yarn(query: Query) -> float:
    return (0.1 * math.log(query.n / query.base) + 1) ** 2 if query.n > query.base else 1.0


def llama4(query: Query) -> float:
    return 1 + query.options.attn_scale * math.log(
        1 + math.floor((query.position + query.options.offset) / query.options.floor_scale)
    )


def infoscale(query: Query) -> float:
    return math.sqrt(1 - query.n ** (-2 / SIZE)) / math.sqrt(1 - query.base ** (-2 / SIZE))


def cosine(query: Query) -> Vector:
    gain = query.p["g"][query.h] * (math.log(query.n) if query.options.log_n else 1.0)
    return softmax(
        [gain * float(query.q @ key) / math.sqrt(float(query.q @ query.q) * float(key @ key)) for key in query.k]
    )


def p_n(query: Query) -> float:
    values = query.p["p"]
    return query.p["s"][query.h] * values[min(query.position, len(values) - 1)] + query.p["b"][query.h]


def qassmax(query: Query) -> Vector:
    def mlp(name: str, x: np.ndarray) -> np.ndarray:
        hidden = query.p[f"{name}.hidden.weight"] @ x + query.p[f"{name}.hidden.bias"]
        gelu = np.array([x * 0.5 * (1 + math.erf(x / math.sqrt(2))) for x in hidden])
        return query.p[f"{name}.out.weight"] @ gelu + query.p[f"{name}.out.bias"]

    base = mlp("base", np.array([math.log(query.n)]))[query.h * SIZE : (query.h + 1) * SIZE]
    q = query.q * base * (1 + np.tanh(mlp("gate", query.q)))
    return softmax([float(q @ key) / math.sqrt(SIZE) for key in query.k])


def relu2(query: Query) -> Vector:
    if query.options.n == "sum":
        squares = [max(z, 0.0) ** 2 for z in query.z]
        return [a / sum(squares) if sum(squares) else 0.0 for a in squares]
    if query.options.form == "1/n^2":
        return [max(z * math.sqrt(SIZE) / query.n, 0.0) ** 2 for z in query.z]
    return [max(z, 0.0) ** 2 / query.n for z in query.z]


def sigmoid(query: Query) -> Vector:
    b = query.p["b"][query.h] if query.options.bias else 0.0
    return [1 / (1 + math.exp(-(z - math.log(query.n) + b))) for z in query.z]


def over_sum(values: Vector) -> Vector:
    return [value / sum(values) if any(values) else 0.0 for value in values]


def threshold(query: Query) -> Vector:
    bar = query.p["beta"][query.h] * math.sqrt(2 * math.log(query.n))
    excess = [max(z - bar, 0.0) ** query.options.power for z in query.z]
    return over_sum(excess) if query.options.divided else excess


def lssa(query: Query) -> Vector:
    scale = math.sqrt(SIZE) / math.log(SIZE) if query.options.base == "head_size" else math.log(query.base)
    weights = over_sum([math.log(1 + math.exp(math.log(query.n) / scale * z)) for z in query.z])
    if not query.options.sharpening:
        return weights
    n = len(weights)
    return over_sum([max(n * w - (n > 3), 0.0) ** query.options.sharpening for w in weights])


def elastic(query: Query) -> Vector:
    return [max(weight + query.p["tau"][query.h] / query.n, 0.0) for weight in softmax(query.z)]


def entropy_temperature(query: Query) -> Vector:
    h = -sum(weight * math.log(weight) for weight in softmax(query.z))
    b = -0.037 * h**4 + 0.481 * h**3 - 2.3 * h**2 + 4.917 * h - 1.791
    return softmax([max(b, 1.0) * z if h > 0.5 else z for z in query.z])


def bisected(z: Vector, alpha: float) -> Vector:
    """alpha-entmax: relu((alpha - 1) z - tau)^(1 / (alpha - 1)), tau found by halving."""
    z = [(alpha - 1) * x for x in z]
    low, high = max(z) - 1, max(z)
    for _ in range(200):
        tau = (low + high) / 2
        low, high = (tau, high) if sum(max(x - tau, 0.0) ** (1 / (alpha - 1)) for x in z) > 1 else (low, tau)
    return [max(x - low, 0.0) ** (1 / (alpha - 1)) for x in z]


def asentmax(query: Query) -> Vector:
    b = math.log1p(math.exp(float(query.p["w_b"][query.h] @ query.x[-1])))
    g = 2 * math.tanh(float(query.p["w_g"][query.h] @ query.x[-1]))
    scale = 1 + b * max(math.log(query.n), math.log(2)) ** g
    return bisected([scale * z for z in query.z], 1.5)


def softpick(query: Query) -> Vector:
    total = sum(abs(math.expm1(z)) for z in query.z)
    return [max(math.expm1(z), 0.0) / total for z in query.z]


def alibi(query: Query) -> Vector:
    slope = 2 ** (-8 * (query.h + 1) / HEADS)
    return softmax([z - slope * t for z, t in zip(query.z, query.back, strict=True)])


def window(query: Query) -> Vector:
    near = softmax(query.z[-query.options.size :])
    return [0.0] * (len(query.k) - len(near)) + near


def scale_invariant(query: Query) -> Vector:
    scores = []
    for z, t in zip(query.z, query.back, strict=True):
        square = 2 * (math.log(t / query.options.tau + 1) - 0.5 + 1)
        scores.append(math.sqrt(square) * z - square + 1)
    return softmax(scores)


def forget(query: Query) -> Vector:
    gates = [1 / (1 + math.exp(-(float(query.p["w"][query.h] @ x) + query.p["b"][query.h]))) for x in query.x]
    return softmax([z + sum(math.log(f) for f in gates[j + 1 :]) for j, z in enumerate(query.z)])


def stick_breaking(query: Query) -> Vector:
    weights, rest = [0.0], 1.0  # the query's own token has none
    for z in reversed(query.z[:-1]):
        beta = 1 / (1 + math.exp(-z))
        weights, rest = [rest * beta, *weights], rest * (1 - beta)
    return weights


def linear(query: Query) -> Vector:
    phi = {
        "elu": lambda x: x + 1 if x > 0 else math.exp(x),
        "relu": lambda x: max(x, 0.0),
        "exp": math.exp,
        "identity": lambda x: x,
    }[query.options.features]
    g = 1 - 2 ** (-5 - query.h) if query.options.decay else 1.0
    root = SIZE**0.25
    weights = [sum(phi(a / root) * phi(b / root) for a, b in zip(query.q, key, strict=True)) for key in query.k]
    weights = [a * g**t for a, t in zip(weights, query.back, strict=True)]
    total = sum(weights) if query.options.n == "sum" else query.n
    return [a / total if total else 0.0 for a in weights]


DEFINITIONS: dict[str, Callable[[Query], Vector]] = {
    "softmax": scaled(lambda query: 1 / query.options.temperature),
    "ssmax": scaled(ssmax),
    "log_n": scaled(log_n),
    "sqrt_log_n": scaled(lambda query: query.p["c"][query.h] * math.sqrt(2 * math.log(query.n))),
    "llama4": scaled(llama4),
    "yarn": scaled(yarn),
    "infoscale": scaled(infoscale),
    "cosine": cosine,
    "p_n": scaled(p_n),
    "qassmax": qassmax,
    "softmax1": lambda query: softmax(query.z, 0.0),
    "sink": lambda query: softmax(query.z, query.p["b"][query.h]),
    "relu2": relu2,
    "relu": lambda query: [max(z, 0.0) / query.n for z in query.z],
    "sigmoid": sigmoid,
    "threshold": threshold,
    "lssa": lssa,
    "elastic": elastic,
    "entropy_temperature": entropy_temperature,
    "sparsemax": lambda query: bisected(query.z, 2.0),
    "entmax15": lambda query: bisected(query.z, 1.5),
    "asentmax": asentmax,
    "softpick": softpick,
    "alibi": alibi,
    "window": window,
    "scale_invariant": scale_invariant,
    "forget": forget,
    "softcap": lambda query: softmax([query.options.cap * math.tanh(z / query.options.cap) for z in query.z]),
    "stick_breaking": stick_breaking,
    "linear": linear,
}

LENGTHS = ("visible", "sample", "fixed:7")
CASES = [
    *(opt.Softmax(temperature=temperature) for temperature in (1.0, 0.3)),
    *(opt.SSMax(n=n) for n in LENGTHS),
    *(opt.SSMax(scale="none", bias=bias) for bias in (False, True)),
    *(opt.SSMax(bias=True, init=init) for init in ("match", "unit", 0.43)),
    *(opt.LogN(n=n) for n in LENGTHS),
    *(opt.LogN(base=5.0, clip=clip) for clip in (False, True)),
    *(opt.LogN(power=power) for power in (0.5, 2.0)),
    *(opt.SqrtLogN(n=n) for n in LENGTHS),
    *(opt.Llama4(floor_scale=f, attn_scale=a) for f, a in ((4.0, 0.1), (4.0, 0.3), (7.0, 0.3))),
    opt.Llama4(floor_scale=4.0, attn_scale=0.3, offset=0),
    *(opt.YaRN(n=n) for n in LENGTHS),
    opt.YaRN(base=5.0, n="visible"),
    *(opt.InfoScale(n=n) for n in LENGTHS),
    opt.InfoScale(base=5.0),
    *(opt.Cosine(log_n=is_scaled, n=n) for is_scaled, n in ((False, "visible"), (True, "visible"), (True, "sample"))),
    opt.PN(),
    *(opt.QASSMax(n=n) for n in LENGTHS),
    opt.Softmax1(),
    *(opt.Sink(init=init) for init in (0.0, 1.5)),
    *(opt.Relu2(n=n) for n in (*LENGTHS, "sum")),
    *(opt.Relu2(n=n, form="1/n^2") for n in LENGTHS),
    *(opt.Relu(n=n) for n in LENGTHS),
    *(opt.Sigmoid(n=n) for n in LENGTHS),
    opt.Sigmoid(bias=True),
    *(opt.Threshold(n=n) for n in LENGTHS),
    opt.Threshold(power=1, init=0.1),
    opt.Threshold(divided=False),
    *(opt.SoftplusAttention(n=n) for n in LENGTHS),
    opt.SoftplusAttention(base=5.0),
    *(opt.SoftplusAttention(base="head_size", sharpening=p, n=n) for p, n in ((3, "visible"), (15, "fixed:7"))),
    *(opt.Elastic(n=n) for n in LENGTHS),
    opt.Elastic(init=0.5),
    opt.EntropyTemperature(),
    opt.Sparsemax(),
    opt.Entmax15(),
    *(opt.ASEntmax(n=n) for n in LENGTHS),
    opt.Softpick(),
    opt.ALiBi(),
    *(opt.Window(size=size) for size in (1, 4, 9, 200)),
    *(opt.ScaleInvariant(tau=tau) for tau in (10.0, 3.0)),
    opt.Forget(),
    *(opt.SoftCap(cap=cap) for cap in (50.0, 0.4)),
    opt.StickBreaking(),
    *(opt.Linear(features=f, decay=d) for f in ("elu", "relu") for d in (False, True)),
    *(opt.Linear(features="identity", decay=True, n=n) for n in LENGTHS),
]
every_case = pytest.mark.parametrize("options", CASES, ids=str)

# Initial values, of each head alike; of parameters not named: 0.
FIRST = {
    "ssmax": lambda o: {"s": {"match": 1 / mean_over(o.n, math.log), "unit": 1.0}.get(o.init, o.init)},
    "sqrt_log_n": lambda o: {"c": 1 / mean_over(o.n, lambda n: math.sqrt(2 * math.log(n)))},
    "cosine": lambda o: {"g": math.sqrt(SIZE) / (mean_over(o.n, math.log) if o.log_n else 1.0)},
    "p_n": lambda o: {"p": 1.0, "s": 1.0},
    "sink": lambda o: {"b": o.init},
    "forget": lambda o: {"b": 5.0},
    "threshold": lambda o: {"beta": o.init},
    "elastic": lambda o: {"tau": o.init},
    "qassmax": lambda o: {"base.out.bias": 1.0},
}


def mean_over(policy: str, value: Callable[[float], float]) -> float:
    """Over the positions of a sequence of the training length."""
    fixed = {"visible": None, "sample": TRAIN}.get(policy, float(policy.partition(":")[2] or 0))
    return sum(value(fixed or i + 1) for i in range(TRAIN)) / TRAIN


def random_normalizer(options: object) -> Normalizer:
    """The normalizer with random parameters, float64."""
    normalizer = make_normalizer(options, LayerSpec(HEADS, SIZE, WIDTH, TRAIN)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in normalizer.parameters():
            change = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(change if parameter.dim() == 2 else parameter + change)  # matrices are drawn by the decoder
    return normalizer


def inputs(
    normalizer: Normalizer, length: int = LENGTH
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k with their features, v, and the layer's input that those are computed from."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, HEADS, length, SIZE, generator=generator, dtype=torch.float64) for _ in range(3))
    x = torch.randn(1, length, WIDTH, generator=generator, dtype=torch.float64)
    pairs = (q, normalizer.query_features(x)), (k, normalizer.key_features(x))
    q, k = (heads if features is None else torch.cat((heads, features.detach()), -1) for heads, features in pairs)
    return q, k, v, x


def expected(normalizer: Normalizer, q: torch.Tensor, k: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The weights, (1, HEADS, LENGTH, LENGTH), by the definitions above."""
    parameters = {name: value.detach().numpy() for name, value in normalizer.named_parameters()}
    weights = torch.zeros(1, HEADS, q.size(2), q.size(2), dtype=torch.float64)
    qs, ks, xs = q[0, :, :, :SIZE].numpy(), k[0, :, :, :SIZE].numpy(), x[0].numpy()
    for h in range(HEADS):
        for i in range(q.size(2)):
            query = Query(normalizer.options, parameters, h, qs[h, i], ks[h, : i + 1], xs[: i + 1])
            weights[0, h, i, : i + 1] = torch.tensor(DEFINITIONS[normalizer.options.name](query))
    return weights


def test_every_entry_and_each_of_its_options_at_two_values_is_tested():
    assert DEFINITIONS.keys() == catalogue.OPTIONS_BY_NAME.keys()
    for name, entry in catalogue.OPTIONS_BY_NAME.items():
        cases = [options for options in CASES if options.name == name]
        for option in fields(entry):
            assert len({getattr(options, option.name) for options in cases}) >= 2, f"{name}.{option.name}"


@every_case
def test_first_values_are_as_documented(options: object):
    first = FIRST.get(options.name, lambda o: {})(options)
    for name, value in make_normalizer(options, LayerSpec(HEADS, SIZE, WIDTH, TRAIN)).named_parameters():
        if not name.endswith("hidden.weight"):  # drawn by the decoder
            assert value.flatten().tolist() == pytest.approx([first.get(name, 0.0)] * value.numel(), rel=1e-5), name


@every_case
def test_weights_and_the_fast_path_are_the_definition(options: object):
    normalizer = random_normalizer(options)
    q, k, v, x = inputs(normalizer)
    exact, layout = expected(normalizer, q, k, x), AttentionLayout.full(LENGTH)
    torch.testing.assert_close(normalizer.weights(q, k, layout), exact, rtol=0, atol=2e-6)  # ln n is in fp32
    torch.testing.assert_close(normalizer(q, k, v, layout), exact @ v, rtol=0, atol=1e-5)


@every_case
def test_decoding_is_the_definition(options: object):
    """Token by token and in pieces."""
    normalizer = random_normalizer(options)
    q, k, v, x = inputs(normalizer)
    exact, state, n_seen = expected(normalizer, q, k, x) @ v, None, 0
    for new in (1, 1, 4, 1, 8, 1, 7):
        part = slice(n_seen, n_seen + new)
        out, state = normalizer.decode(
            q[:, :, part], k[:, :, part], v[:, :, part], AttentionLayout.continuation(n_seen, new, LENGTH), state
        )
        torch.testing.assert_close(out, exact[:, :, part], rtol=0, atol=1e-5)
        n_seen += new
