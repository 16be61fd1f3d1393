"""Normalizers inside models of transformers: three lines give a Llama the loss and gradients of lm's decoder."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_import import LLAMA_SIZES, V, save
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import lm.huggingface
from lm.attention import catalogue as opt
from lm.attention.layout import AttentionLayout
from lm.data.batches import Batch
from lm.errors import ConfigError
from lm.huggingface.architectures import ARCHITECTURES
from lm.huggingface.attention_functions import NORMALIZER_ATTRIBUTE
from lm.huggingface.fields import ConfigFields
from lm.model.decoder import Decoder

T = 60
KINDS = {
    "lm_ssmax": opt.SSMax(), "lm_log_n": opt.LogN(), "lm_sink": opt.Sink(), "lm_qassmax": opt.QASSMax(),
    "lm_relu2": opt.Relu2(),
    "lm_entmax15": opt.Entmax15(), "lm_ssmax_b": opt.SSMax(bias=True, n="fixed:100"),
}  # fmt: skip
SMALL = {**LLAMA_SIZES, "attention_dropout": 0.0}


def tokens(length: int = T) -> torch.Tensor:
    return torch.randint(V, (2, length), generator=torch.Generator().manual_seed(1))


def llama(folder: Path, kind: str, start: str) -> PreTrainedModel:
    """A Llama with a normalizer by three lines, randomly initialised or read from a folder; its parameters moved off
    initial values.
    """
    lm.huggingface.register()
    lm.huggingface.register({"lm_ssmax_b": {"name": "ssmax", "bias": True, "n": "fixed:100"}})
    save(folder / "plain", "llama", SMALL)
    if start == "imported":
        model = LlamaForCausalLM.from_pretrained(folder / "plain", attn_implementation=kind)
    else:
        torch.manual_seed(5)
        model = LlamaForCausalLM._from_config(LlamaConfig(**SMALL), attn_implementation=kind)
    lm.huggingface.add_normalizer_parameters(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if NORMALIZER_ATTRIBUTE in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    return model


def ours(model: PreTrainedModel, kind: str, folder: Path) -> tuple[Decoder, dict[str, tuple[str, ...]]]:
    """lm's decoder with the same weights, and the names of the tensors in transformers that make up each of its
    parameters.
    """
    model.save_pretrained(folder / "saved")
    architecture = ARCHITECTURES["llama"]
    spec = architecture.read_model_spec(ConfigFields(LlamaConfig(**SMALL).to_dict() | {"architectures": None}, folder))
    decoder = Decoder(replace(spec.model, normalizer=KINDS[kind]), V, spec.seq_len)
    state, names = model.state_dict(), {}
    for part in architecture.mapped_parameters(spec, architecture.tensor_prefix):
        names[part.name] = tuple(name for name, _ in part.tensors)
    for name in decoder.state_dict():
        if ".normalizer." in name:
            layer, parameter = name.split(".")[1], name.partition(".normalizer.")[2]
            names[name] = (f"model.layers.{layer}.self_attn.{NORMALIZER_ATTRIBUTE}.{parameter}",)
    decoder.load_state_dict({name: torch.cat([state[part] for part in parts]) for name, parts in names.items()})
    return decoder, names


@pytest.mark.parametrize("start", ["random", "imported"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_of_a_llama_are_those_of_our_decoder(kind: str, start: str, tmp_path: Path):
    model = llama(tmp_path, kind, start)
    decoder, names = ours(model, kind, tmp_path)
    sample = tokens()
    loss = model(sample, labels=sample).loss
    expected = decoder.summed_loss(Batch.from_sequences(sample)) / (2 * (T - 1))
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
    loss.backward()
    expected.backward()
    parameters = dict(model.named_parameters())
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(
            torch.cat([parameters[part].grad for part in names[name]]), parameter.grad, rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_padding_packing_and_the_cache_keep_n(kind: str, tmp_path: Path):
    model = llama(tmp_path, kind, "random").eval()
    decoder, _ = ours(model, kind, tmp_path)
    sample, logits = tokens(), decoder.logits(tokens())

    def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)

    padding = torch.ones_like(sample)
    padding[0, :20] = 0
    unpadded = decoder.logits(sample[:1, 20:])[0]
    places = (padding.cumsum(-1) - 1).clamp(min=0)
    near(model(sample, attention_mask=padding, position_ids=places).logits[0, 20:], unpadded)
    if kind == "lm_qassmax":
        return  # scales dimensions of rotated queries, so that Llama's own positions, which count padding, change it
    near(model(sample, attention_mask=padding).logits[0, 20:], unpadded)
    near(model(sample, attention_mask=padding.flip(-1)).logits[0, :40], logits[0, :40])
    positions = torch.cat((torch.arange(25), torch.arange(T - 25))).expand(2, -1)
    packed = decoder.head(decoder(sample, AttentionLayout.from_positions(positions)))
    for use_cache in (True, False):
        near(model(sample, position_ids=positions, use_cache=use_cache).logits, packed)
    out = model(sample[:, :30], attention_mask=padding[:, :30], use_cache=True)
    parts = [out.logits]
    for end in (31, 32, 45, T):
        begin = sum(part.size(1) for part in parts)
        out = model(sample[:, begin:end], attention_mask=padding[:, :end], past_key_values=out.past_key_values)
        parts.append(out.logits)
    cached = torch.cat(parts, 1)
    near(cached[0, 20:], unpadded)
    near(cached[1], logits[1])


def test_what_is_learned_is_saved_and_read_again_by_the_same_lines(tmp_path: Path):
    model = llama(tmp_path, "lm_ssmax", "imported")
    first = dict(model.named_parameters())[f"model.layers.1.self_attn.{NORMALIZER_ATTRIBUTE}.s"]
    model.save_pretrained(tmp_path / "learned")
    reloaded = LlamaForCausalLM.from_pretrained(tmp_path / "learned", attn_implementation="lm_ssmax")
    with pytest.raises(
        ValueError, match=r"lm_ssmax has learned parameters: call lm.huggingface.add_normalizer_parameters"
    ):
        reloaded(tokens())
    lm.huggingface.add_normalizer_parameters(reloaded)
    with pytest.raises(ValueError, match="has these parameters already"):
        lm.huggingface.add_normalizer_parameters(reloaded)
    assert torch.equal(dict(reloaded.named_parameters())[f"model.layers.1.self_attn.{NORMALIZER_ATTRIBUTE}.s"], first)
    assert torch.equal(reloaded.eval()(tokens()).logits, model.eval()(tokens()).logits)
    weights = load_file(tmp_path / "learned" / "model.safetensors")
    rest = {name: value for name, value in weights.items() if "layers.1.self_attn.lm_normalizer" not in name}
    save_file(rest, tmp_path / "learned" / "model.safetensors", {"format": "pt"})
    damaged = LlamaForCausalLM.from_pretrained(tmp_path / "learned", attn_implementation="lm_ssmax")
    with pytest.raises(
        ValueError, match=r"and it has no tensor model\.layers\.1\.self_attn\.lm_normalizer\.s of shape"
    ):
        lm.huggingface.add_normalizer_parameters(damaged)
    other = LlamaForCausalLM.from_pretrained(tmp_path / "learned", attn_implementation="lm_log_n")
    with pytest.raises(
        ValueError, match=r"was saved with \{'name': 'ssmax'\}, attn_implementation lm_log_n is \{'name': 'log_n'\}"
    ):
        lm.huggingface.add_normalizer_parameters(other)


def test_a_models_own_scale_of_scores_is_kept_and_applied_in_fp32():
    lm.huggingface.register()
    q, k, v = (
        torch.randn(1, 2, 30, 16, generator=torch.Generator().manual_seed(n)).mul(4).bfloat16() for n in range(3)
    )
    module = SimpleNamespace(config=LlamaConfig(**SMALL))
    out, _ = ALL_ATTENTION_FUNCTIONS["lm_log_n"](module, q, k, v, None, scaling=0.7)
    wide = q.float() * 0.7 * 16**0.5, k.float(), v.float()
    normalizer = lm.functional.make_module("log_n", 2, 16, SMALL["max_position_embeddings"])
    expected = lm.functional.attention(normalizer, *wide).transpose(1, 2)
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-7)


UNREACHED = {  # kind of model: what it does with queries
    "OpenAIGPT": "computes attention by itself, or has none, whatever attn_implementation says",
    "CpmAnt": "computes attention by itself",
    "XLM": "computes attention by itself",
    "Bloom": "computes attention by itself",
    "Mamba": "computes attention by itself",
    "Ministral3": "multiplies queries by a function of position, and lm_relu would .*; set llama_4_scaling_beta to 0",
    "Mistral4": "multiplies queries by a function of position, and lm_relu would .*; set llama_4_scaling_beta to 0",
    "Beam": "multiplies queries by a function of position, and lm_relu would act on top; use another model",
    "Llama4Text": "multiplies queries by a function of position, and .*; set attn_temperature_tuning to 0",
}


@pytest.mark.parametrize("kind", UNREACHED)
def test_a_model_that_a_normalizer_would_not_reach_is_refused_when_made(kind: str):
    lm.huggingface.register()
    if (config_class := getattr(transformers, f"{kind}Config", None)) is None:
        pytest.skip(f"an older transformers, without {kind}")
    with torch.device("meta"), pytest.raises(ValueError, match=UNREACHED[kind]):
        transformers.AutoModel.from_config(config_class(), attn_implementation="lm_relu")
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config_class())
    if model._can_set_attn_implementation():
        with pytest.raises(ValueError, match=UNREACHED[kind]):
            model.set_attn_implementation("lm_relu")


LATENT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": V}
LATENT |= {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 12}
LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 10, "first_k_dense_replace": 2, "max_position_embeddings": 64}


@pytest.mark.parametrize("kind", ["cosine", "qassmax", "ssmax", "sink"])
def test_parameters_fit_the_heads_of_latent_attention(kind: str):
    lm.huggingface.register()
    model = transformers.DeepseekV3ForCausalLM._from_config(
        transformers.DeepseekV3Config(**LATENT), attn_implementation=f"lm_{kind}"
    )
    lm.huggingface.add_normalizer_parameters(model)
    # a head has 12 dimensions without rotation, and 8 with
    expected = dict(lm.functional.make_module(kind, 4, 20, 64).named_parameters())
    for layer in model.model.layers:
        added = getattr(layer.self_attn, NORMALIZER_ATTRIBUTE)
        shapes = {name: value.shape for name, value in added.named_parameters()}
        assert shapes == {name: value.shape for name, value in expected.items()}
        if kind == "cosine":
            torch.testing.assert_close(added.g, expected["g"])
    assert model(tokens()).logits.isfinite().all()
    added = getattr(model.model.layers[0].self_attn, NORMALIZER_ATTRIBUTE)
    added.layer = replace(added.layer, head_size=8)
    with pytest.raises(ValueError, match=r"q \(2, 4, 60, 20\) .* for 4 heads of 8 dimensions"):
        model(tokens())


@pytest.mark.parametrize("kind", ["qwen2", "gemma3_text"])
@torch.no_grad()
def test_layers_with_windows_stay_as_they_are(kind: str):
    """A normalizer that computes softmax changes nothing; another one changes full layers alone."""
    lm.huggingface.register({"lm_unit": {"name": "llama4", "attn_scale": 0.0}, "lm_ssmax": "ssmax"})
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    sizes = {**SMALL, "head_dim": 8, "layer_types": types, "sliding_window": 10, "use_sliding_window": True}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    padding = torch.ones_like(tokens())
    padding[0, :20] = 0
    expected = [model(tokens(), attention_mask=mask).logits for mask in (None, padding)]
    model.set_attn_implementation("lm_unit")
    cached = model(tokens()[:, :40], use_cache=True)
    last = model(tokens()[:, 40:], past_key_values=cached.past_key_values).logits
    results = [torch.cat((cached.logits, last), 1), model(tokens(), attention_mask=padding).logits]
    torch.testing.assert_close(results[0], expected[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(results[1][:, 20:], expected[1][:, 20:], rtol=0, atol=1e-4)
    model.set_attn_implementation("lm_ssmax")
    lm.huggingface.add_normalizer_parameters(model)
    assert {name.split(".")[2] for name, _ in model.named_parameters() if NORMALIZER_ATTRIBUTE in name} == {"0"}
    assert (model(tokens()).logits - expected[0]).abs().max() > 1e-4


def test_what_can_not_be_computed_is_refused(tmp_path: Path):
    lm.huggingface.register()
    sliding = Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=10, max_window_layers=0)
    dropped = LlamaConfig(**SMALL | {"attention_dropout": 0.1})
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": V}
    encoder = transformers.BertConfig(**sizes, intermediate_size=64, attention_probs_dropout_prob=0.0)
    for model, message in (
        (LlamaForCausalLM._from_config(dropped, attn_implementation="lm_log_n"), "set attention_dropout"),
        (
            transformers.BertModel._from_config(encoder, attn_implementation="lm_log_n"),
            "are causal, BertSelfAttention is not",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            model.train()(tokens())
    with pytest.raises(ValueError, match="Qwen2ForCausalLM has a sliding window in each layer, and lm_log_n acts on"):
        Qwen2ForCausalLM._from_config(sliding, attn_implementation="lm_log_n")
    model = LlamaForCausalLM._from_config(LlamaConfig(**SMALL), attn_implementation="lm_log_n")
    causal = torch.ones(1, 1, *[tokens().size(1)] * 2, dtype=torch.bool).tril()
    model(tokens()[:1], attention_mask=causal)
    distances = torch.where(causal, torch.arange(causal.size(-1)) / 100, torch.finfo(torch.float32).min)
    with pytest.raises(ValueError, match="add no bias to scores: this mask has one"):
        model(tokens()[:1], attention_mask=distances)
    prefix = causal.clone()
    prefix[..., :3, :3] = True
    for mask in (causal & ~causal.tril(-4), prefix):
        with pytest.raises(ValueError, match="this mask has a window, a prefix or gaps"):
            model(tokens()[:1], attention_mask=mask)
    with pytest.raises(ValueError, match=r"attn_implementation is sdpa: call lm\.huggingface\.register"):
        lm.huggingface.add_normalizer_parameters(LlamaForCausalLM(LlamaConfig(**SMALL)))
    padded = torch.arange(T).expand(2, -1) >= torch.tensor([[0], [9]])
    angles = llama(tmp_path, "lm_qassmax", "random").eval()
    with pytest.raises(
        ValueError, match="qassmax depends on positions: position_ids must count from each sequence's first token"
    ):
        angles(tokens(), attention_mask=padded.long())
    angles(tokens(), attention_mask=padded.long(), position_ids=padded.long().cumsum(-1).sub(1).clamp(min=0))
    with pytest.raises(ConfigError, match="did you mean 'ssmax'"):
        lm.huggingface.register({"lm_typo": "ssmaxx"})
    with pytest.raises(ConfigError, match="lm_p_n = 'p_n': is no function of one layer's queries and keys"):
        lm.huggingface.register({"lm_p_n": "p_n"})
