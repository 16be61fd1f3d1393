"""The catalogue of normalizers: their classes by their classes of options, and the function that makes a layer's
normalizer from its options.

A normalizer is two classes in one module: a dataclass of options, with formula, source and published figures, and a
subclass of `Normalizer` whose `schema` is that dataclass. A new normalizer goes into `NORMALIZERS`.
`lm.config.normalizers` adds those of plugins that are imported.
"""

from lm.attention.distance import (
    ALiBi,
    ALiBiNormalizer,
    Forget,
    ForgetNormalizer,
    ScaleInvariant,
    ScaleInvariantNormalizer,
    SoftCap,
    SoftCapNormalizer,
    StickBreaking,
    StickBreakingNormalizer,
    Window,
    WindowNormalizer,
)
from lm.attention.elementwise import (
    Relu,
    Relu2,
    Relu2Normalizer,
    ReluNormalizer,
    Sigmoid,
    SigmoidNormalizer,
    SoftplusAttention,
    SoftplusNormalizer,
    Threshold,
    ThresholdNormalizer,
)
from lm.attention.linear import Linear, LinearNormalizer
from lm.attention.normalizer import LayerSpec, Normalizer
from lm.attention.options import Options
from lm.attention.query_scale import (
    PN,
    Cosine,
    CosineNormalizer,
    InfoScale,
    InfoScaleNormalizer,
    Llama4,
    Llama4Normalizer,
    LogN,
    LogNNormalizer,
    PNNormalizer,
    QASSMax,
    QASSMaxNormalizer,
    Softmax,
    SoftmaxWithTemperature,
    SqrtLogN,
    SqrtLogNNormalizer,
    SSMax,
    SSMaxNormalizer,
    YaRN,
    YaRNNormalizer,
)
from lm.attention.reweighted import (
    Elastic,
    ElasticNormalizer,
    EntropyTemperature,
    EntropyTemperatureNormalizer,
)
from lm.attention.sinks import Sink, SinkNormalizer, Softmax1, Softmax1Normalizer
from lm.attention.sparse import (
    ASEntmax,
    ASEntmaxNormalizer,
    Entmax15,
    Entmax15Normalizer,
    Softpick,
    SoftpickNormalizer,
    Sparsemax,
    SparsemaxNormalizer,
)

NORMALIZERS: dict[type[Options], type[Normalizer]] = {
    Softmax: SoftmaxWithTemperature,
    SSMax: SSMaxNormalizer,
    LogN: LogNNormalizer,
    SqrtLogN: SqrtLogNNormalizer,
    Llama4: Llama4Normalizer,
    YaRN: YaRNNormalizer,
    InfoScale: InfoScaleNormalizer,
    Cosine: CosineNormalizer,
    PN: PNNormalizer,
    QASSMax: QASSMaxNormalizer,
    Softmax1: Softmax1Normalizer,
    Sink: SinkNormalizer,
    Relu2: Relu2Normalizer,
    Relu: ReluNormalizer,
    Sigmoid: SigmoidNormalizer,
    Threshold: ThresholdNormalizer,
    SoftplusAttention: SoftplusNormalizer,
    Elastic: ElasticNormalizer,
    EntropyTemperature: EntropyTemperatureNormalizer,
    Sparsemax: SparsemaxNormalizer,
    Entmax15: Entmax15Normalizer,
    ASEntmax: ASEntmaxNormalizer,
    Softpick: SoftpickNormalizer,
    ALiBi: ALiBiNormalizer,
    Window: WindowNormalizer,
    ScaleInvariant: ScaleInvariantNormalizer,
    Forget: ForgetNormalizer,
    SoftCap: SoftCapNormalizer,
    StickBreaking: StickBreakingNormalizer,
    Linear: LinearNormalizer,
}
ENTRIES: dict[str, type[Options]] = {options.name: options for options in NORMALIZERS}


def make_normalizer(options: Options, layer: LayerSpec) -> Normalizer:
    """The normalizer that `options` describe, for a layer."""
    return NORMALIZERS[type(options)](options, layer)


def implementation(name: str) -> type[Normalizer]:
    """The class of the normalizer whose options have the name `name`, from lm or from an imported plugin."""
    return next(normalizer for options, normalizer in NORMALIZERS.items() if options.name == name)
