"""Pretrained models in: each architecture with every field at a value of its own computes what transformers
computes.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import lm
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import (
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Ministral3Config,
    Olmo2Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.models.gpt2 import GPT2LMHeadModel
from transformers.models.gpt_neox import GPTNeoXForCausalLM
from transformers.models.llama import LlamaForCausalLM
from transformers.models.ministral3 import Ministral3ForCausalLM
from transformers.models.olmo2 import Olmo2ForCausalLM
from transformers.models.qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3 import Qwen3ForCausalLM
from transformers.models.smollm3 import SmolLM3ForCausalLM

from lm.config.data_config import TrainedTokenizer
from lm.config.tree import model_function_options
from lm.data.tokenizer import train_tokenizer
from lm.evaluation.generation import Sampling, generate, generate_text
from lm.huggingface.architectures import ARCHITECTURES
from lm.huggingface.fields import IRRELEVANT_FIELDS, REQUIRED_VALUES, ConfigFields
from lm.runs.loading import LoadedModel, load

V, T = 300, 512  # vocabulary, and tokens of the sequences that are compared

# Every field that affects the logits, at a value other than its default; fields that are irrelevant have others, too.
COMMON = {"initializer_range": 0.3, "use_cache": False, "bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 7}
LLAMA_SIZES = {
    "vocab_size": V, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 700, "rms_norm_eps": 1e-3, "attention_dropout": 0.3,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 3e4,
    "factor": 3.0,
    "original_max_position_embeddings": 200,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WINDOWS = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}
MODELS: dict[str, tuple[type[PreTrainedModel], type[PreTrainedConfig], dict]] = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, {
        "vocab_size": V, "n_positions": 600, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_inner": 80,
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-3, "reorder_and_upcast_attn": True,
        "tie_word_embeddings": False, "resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3, "summary_type": "last",
        "summary_use_proj": False, "summary_activation": "tanh", "summary_proj_to_labels": False,
        "summary_first_dropout": 0.3,
    }),
    "llama": (LlamaForCausalLM, LlamaConfig, LLAMA_SIZES | {
        "head_dim": 20, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "pretraining_tp": 2,
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 200},
    }),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, LLAMA_SIZES | WINDOWS | {"tie_word_embeddings": True,
        "rope_parameters": YARN}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, LLAMA_SIZES | WINDOWS | {
        "head_dim": 20, "attention_bias": True, "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "linear", "rope_theta": 2e4, "factor": 3.0},
    }),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config, LLAMA_SIZES | {
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "no_rope_layers": [1, 0, 1],
        "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 100,
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 200},
    }),
    "ministral3": (Ministral3ForCausalLM, Ministral3Config, LLAMA_SIZES | {
        "head_dim": 20, "tie_word_embeddings": True, "rope_parameters": YARN | {
            "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0, "max_position_embeddings": 700},
    }),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, LLAMA_SIZES | {
        "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default",
            "rope_theta": 2e4}}),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, {
        "vocab_size": V, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": 700, "layer_norm_eps": 1e-3, "hidden_act": "gelu_new", "tie_word_embeddings": True,
        "use_parallel_residual": False, "attention_dropout": 0.3, "hidden_dropout": 0.3, "classifier_dropout": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.5},
    }),
}  # fmt: skip
# Further shapes: fields at their defaults, and other ways to write them.
OTHERS: dict[str, tuple[str, dict]] = {
    "gpt2 as released": ("gpt2", {"vocab_size": V, "n_positions": 600, "n_embd": 48, "n_layer": 2, "n_head": 4}),
    "smollm2": ("llama", LLAMA_SIZES | {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default",
        "rope_theta": 1e5}}),
    "tinyllama": ("llama", LLAMA_SIZES | {"num_key_value_heads": None}),
    "biases of attention alone": ("llama", LLAMA_SIZES | {"attention_bias": True,
        "rope_parameters": YARN | {"attention_factor": 1.2}}),
    "biases of the mlp alone": ("llama", LLAMA_SIZES | {"mlp_bias": True}),
    "fields that change no logits": ("llama", LLAMA_SIZES | {"unsloth_fixed": True, "unsloth_version": "2026.11",
        "use_flash_attn": False, "rope_traditional": False, "logit_scale": None}),
    "yarn as deepseek writes it": ("llama", LLAMA_SIZES | {
        "rope_parameters": YARN | {"factor": None, "mscale": 1.0, "mscale_all_dim": 1.0, "finetuned": True}}),
    "two scales of yarn": ("llama", LLAMA_SIZES | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    "one scale of yarn": ("llama", LLAMA_SIZES | {"rope_parameters": YARN | {"mscale": 0.7}}),
    "qwen2.5": ("qwen2", LLAMA_SIZES),
    "qwen2.5, heads of its own": ("qwen2", LLAMA_SIZES | {"num_key_value_heads": None}),
    "qwen3": ("qwen3", LLAMA_SIZES | {"head_dim": 16}),
    "smollm3 as released": ("smollm3", LLAMA_SIZES | {"num_hidden_layers": 4}),
    "olmo2 as released": ("olmo2", LLAMA_SIZES | {"num_key_value_heads": None}),
    "pythia": ("gpt_neox", {"vocab_size": V, "hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4}),
}  # fmt: skip
CASES = {name: (name, fields) for name, (_, _, fields) in MODELS.items()} | OTHERS


def save(folder: Path, kind: str, fields: dict, **options: object) -> PreTrainedModel:
    """A model of transformers with random weights, biases and gains among them, saved to `folder`."""
    model_class, config, _ = MODELS[kind]
    torch.manual_seed(0)
    model = model_class(config(**COMMON | fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                torch.randn(parameter.shape) * (0.12 if parameter.dim() > 1 else 0.2)
                + (parameter.dim() == 1 and "norm" in name)
            )
    model.save_pretrained(folder, **options)
    return model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    text = "the quick brown fox jumps over the lazy dog and runs away from them all"
    return train_tokenizer(iter([text] * 3), TrainedTokenizer(vocab_size=290))


def imported(source: Path, out: Path, *options: str) -> LoadedModel:
    result = lm("import", str(source), "-o", str(out), *options)
    assert result.returncode == 0, result.stderr
    return load(out)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_and_cached_generation_are_those_of_transformers(case: str, tmp_path: Path):
    original = save(tmp_path / "hf", *CASES[case])
    model = imported(tmp_path / "hf", tmp_path / "out")
    tokens = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model.decoder.logits(tokens), original(tokens).logits, rtol=0, atol=1e-4)
    prompt = tokens[:1, :150]
    continuation = original.generate(
        prompt, max_new_tokens=20, do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0
    )
    assert (
        list(generate(model.decoder, prompt[0].tolist(), 20, Sampling(temperature=0))) == continuation[0, 150:].tolist()
    )
    assert model.spec.seq_len == original.config.max_position_embeddings
    assert (model.tokenizer, model.origin["architecture"]) == (None, CASES[case][0])


@pytest.mark.parametrize("kind", MODELS)
def test_every_field_is_read_fixed_or_known_to_be_irrelevant(kind: str, tmp_path: Path):
    """Of those that the configuration class knows; and a case of `MODELS` has each that is read at a value other than
    its default.
    """
    _, config, values = MODELS[kind]
    default = config().to_dict()
    fields = ConfigFields({**config(**COMMON | values).to_dict(), "architectures": None}, tmp_path)
    ARCHITECTURES[kind].read_model_spec(fields)
    names = fields._used_names | IRRELEVANT_FIELDS | REQUIRED_VALUES.keys()
    assert default.keys() - names == set()
    names_read = fields._used_names - REQUIRED_VALUES.keys() - {"architectures", "head_dim"}
    fixed = {"hidden_act", "rope_theta", "rope_scaling", "partial_rotary_factor", "n_ctx", "add_cross_attention"}
    fixed |= {"scale_attn_weights", "scale_attn_by_inverse_layer_idx"}
    fixed |= {"ministral3": {"sliding_window"}, "gpt_neox": {"attention_bias"}}.get(kind, set())
    at_default = {
        name for name in names_read & default.keys() - fixed if name not in values or values[name] == default[name]
    }
    assert at_default - {"layer_types"} == set()


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in ("ministral3", "smollm3")])
def test_an_absent_field_has_the_default_of_transformers(kind: str, tmp_path: Path):
    description = ARCHITECTURES[kind].read_model_spec(ConfigFields({}, tmp_path))
    full_description = ARCHITECTURES[kind].read_model_spec(
        ConfigFields({**MODELS[kind][1]().to_dict(), "architectures": None}, tmp_path)
    )
    assert model_function_options(description.model) == model_function_options(full_description.model)
    assert (description.vocab_size, description.seq_len) == (full_description.vocab_size, full_description.seq_len)


def test_shards_and_older_names_are_read(tmp_path: Path):
    original = save(tmp_path / "one", "llama", OTHERS["smollm2"][1])
    original.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    config = json.loads((tmp_path / "shards" / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None,
        "torch_dtype": "float32",
        "is_llama_config": True,
        "rope_interleaved": False,
    }
    (tmp_path / "shards" / "config.json").write_text(json.dumps(config))
    whole, sharded = (imported(tmp_path / name, tmp_path / f"out-{name}") for name in ("one", "shards"))
    assert whole.spec == sharded.spec
    assert all(torch.equal(a, sharded.decoder.state_dict()[name]) for name, a in whole.decoder.state_dict().items())


def test_files_of_the_released_gpt2_have_no_prefix_and_hold_masks(tmp_path: Path):
    save(tmp_path / "hf", *OTHERS["gpt2 as released"])
    weights = {
        name.removeprefix("transformer."): value
        for name, value in load_file(tmp_path / "hf" / "model.safetensors").items()
    }
    weights |= {
        f"h.{n}.attn.bias": torch.ones(1, 1, 600, 600, dtype=kind).tril()
        for n, kind in enumerate((torch.float32, torch.bool))
    }
    first = imported(tmp_path / "hf", tmp_path / "one")
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config |= {"n_ctx": 600, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    second = imported(tmp_path / "hf", tmp_path / "two")
    assert all(torch.equal(a, second.decoder.state_dict()[name]) for name, a in first.decoder.state_dict().items())
    result = lm("import", str(tmp_path / "hf"), "-o", str(tmp_path / "three"), "--length", "300")
    assert (result.returncode, result.stderr) == (
        2,
        f"error: --length = 300: {tmp_path / 'hf'} has learned positions for 600; drop it\n",
    )


def test_half_precision_is_widened_and_the_length_can_be_chosen(tmp_path: Path):
    original = save(tmp_path / "hf", *OTHERS["smollm2"])
    original.to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    model = imported(tmp_path / "hf", tmp_path / "out", "--length", "256")
    assert (model.spec.seq_len, model.origin["max_position_embeddings"]) == (256, 700)
    assert torch.equal(model.decoder.embedding.weight, original.model.embed_tokens.weight.float())


def test_the_tokenizer_comes_along_and_documents_start_with_its_token(tokenizer: Tokenizer, tmp_path: Path):
    save(tmp_path / "hf", *OTHERS["smollm2"])
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    model = imported(tmp_path / "hf", tmp_path / "out")
    assert model.tokenizer.encode("the lazy dog").ids == tokenizer.encode("the lazy dog").ids
    assert model.tokenizer_and_start_id()[1] == tokenizer.token_to_id("<|endoftext|>")
    assert lm("generate", str(tmp_path / "out"), "--prompt", "the", "--max-new-tokens", "3").returncode == 0
    padded = Tokenizer.from_str(tokenizer.to_str())
    padded.add_tokens([f"word{n}" for n in range(V - 1 - padded.get_vocab_size())])
    padded.add_special_tokens(["<|last|>", "<pad>"])  # the model has room for one of the two
    padded.save(str(tmp_path / "padded.json"))
    fitted = imported(tmp_path / "hf", tmp_path / "fitted", "--tokenizer", str(tmp_path / "padded.json")).tokenizer
    assert (fitted.token_to_id("<|last|>"), fitted.token_to_id("<pad>")) == (V - 1, None)
    assert fitted.encode("the lazy dog word1").ids == padded.encode("the lazy dog word1").ids
    tokenizer.save(str(tmp_path / "other.json"))
    other = Tokenizer.from_file(str(tmp_path / "other.json"))
    other.add_tokens([f"word{n}" for n in range(30)])
    other.save(str(tmp_path / "other.json"))
    result = lm(
        "import", str(tmp_path / "hf"), "-o", str(tmp_path / "none"), "--tokenizer", str(tmp_path / "other.json")
    )
    expected = (
        f"error: {tmp_path / 'other.json'}: the tokenizer has ids up to 319, the model's vocab_size is 300: of "
        "another model?\n"
    )
    assert (result.returncode, result.stderr) == (1, expected)


@pytest.mark.parametrize(
    ("file", "settings", "end_tokens"),
    [
        ("tokenizer_config.json", {"eos_token": {"content": "</s>"}}, ["</s>"]),
        ("config.json", {"eos_token_id": 290}, ["</s>"]),
        ("generation_config.json", {"eos_token_id": [291, 290, 6, 300]}, ["<end>", "</s>"]),
        ("generation_config.json", {"eos_token_id": 256}, []),
    ],
)
def test_text_ends_at_the_tokens_that_the_model_ends_it_with(
    file: str,
    settings: dict,
    end_tokens: list[str],
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    save(tmp_path / "hf", *OTHERS["smollm2"])
    with_ends = Tokenizer.from_str(tokenizer.to_str())
    with_ends.add_special_tokens(["</s>", "<end>"])
    with_ends.save(str(tmp_path / "hf" / "tokenizer.json"))
    path = tmp_path / "hf" / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **settings}))
    model = imported(tmp_path / "hf", tmp_path / "out")
    assert model.spec.end_tokens == end_tokens
    for token in end_tokens or ["<|endoftext|>"]:
        ids = [*with_ends.encode("fox").ids, with_ends.token_to_id(token), *with_ends.encode("dog").ids]
        monkeypatch.setattr("lm.evaluation.generation.generate", lambda *arguments, ids=ids: iter(ids))
        assert "".join(generate_text(tmp_path / "out", "last", "the ", 9, Sampling())) == "the fox"


def test_options_that_a_source_has_no_use_for_are_refused(tmp_path: Path):
    save(tmp_path / "hf", *OTHERS["smollm2"])
    (tmp_path / "empty").mkdir()
    result = lm("import", str(tmp_path / "hf"), "-o", str(tmp_path / "out"), "--tokenizer", str(tmp_path / "empty"))
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(
        f"error: {tmp_path / 'empty'}: has no tokenizer.json; from older files transformers writes one: "
    )
    for options, reason in (
        (("--end-of-text", "x"), f"--end-of-text = 'x': {tmp_path / 'hf'} has no tokenizer; name one with --tokenizer"),
        (("--revision", "main"), f"--revision = 'main': {tmp_path / 'hf'} is on this machine, not on the hub; drop it"),
    ):
        result = lm("import", str(tmp_path / "hf"), "-o", str(tmp_path / "out"), *options)
        assert (result.returncode, result.stderr) == (2, f"error: {reason}\n")
    assert not (tmp_path / "out").exists()
    result = lm("import", "no/model", "-o", str(tmp_path / "hf"))
    assert (result.returncode, result.stderr) == (1, f"error: {tmp_path / 'hf'}: exists already; choose another\n")


def _config(**changes: object):
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def _rope(**parameters: object):
    return _config(rope_parameters=parameters)


def _weights(alter):
    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        alter(weights)
        save_file(weights, folder / "model.safetensors")

    return change


def _sharded(folder: Path) -> dict:
    """The folder's weights in two shards; their index."""
    weights, names = load_file(folder / "model.safetensors"), {}
    for number, part in enumerate((list(weights)[::2], list(weights)[1::2])):
        save_file({name: weights[name] for name in part}, folder / f"{number}.safetensors")
        names |= {name: f"{number}.safetensors" for name in part}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return names


def _missing_shard(folder: Path) -> None:
    _sharded(folder)
    (folder / "1.safetensors").unlink()


def _cut(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def _tokenizer_json(added: list):
    def change(folder: Path) -> None:
        (folder / "tokenizer.json").write_text(
            json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": added})
        )

    return change


PLAIN_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
EMBEDDING, NORM, Q = "model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
MALFORMED = {
    "missing shard": (_missing_shard, r"1\.safetensors: no such file, which model\.safetensors\.index\.json lists"),
    "cut short": (_cut, r"model\.safetensors: not a readable safetensors file: "),
    "pickle": (_pickled, r"pytorch_model\.bin: a pickle, which may run code when it is read; convert it"),
    "code": (_config(auto_map={"AutoModel": "code.Model"}),
        r"auto_map = .*: names code in the folder, which is never executed"),
    "quantised": (_config(quantization_config={"bits": 4}),
        r"quantization_config = .*: quantised weights are not read"),
    "unknown model": (_config(model_type="mamba"), r"model_type = 'mamba': only gpt2, llama, .*gpt_neox are read"),
    "our code": (_config(model_type="lm_decoder"), r"code of its own: export the run without --format hf; only gpt2"),
    "unknown field": (_config(logit_scale=2.0), r"logit_scale = 2\.0: a field that is not known here: the model may"),
    "activation": (_config(hidden_act="gelu"), r"hidden_act = 'gelu': only silu is read"),
    "dynamic rope": (_rope(rope_type="dynamic", factor=2.0), r"rope_type = 'dynamic': its frequencies depend on the"),
    "another width": (_config(vocab_size=299), rf"{EMBEDDING} has shape \(300, 48\), config\.json implies \(299, 48\)"),
    "another type": (_weights(lambda w: w.update({NORM: torch.ones(48, dtype=torch.int32)})),
        rf"{NORM} has type I32; " r"only F32, F16, BF16"),
    "not finite": (_weights(lambda w: w[NORM].fill_(float("nan"))), rf"{NORM} holds numbers that are not finite"),
    "another head matrix": (_weights(lambda w: w.update({"lm_head.weight": torch.ones(300, 48)})),
        "lm_head.weight differs from"),
    "no special token": (_tokenizer_json([]),
        r"no token that starts a document is known \(it has no special tokens\); name one: --end"),
    "two tokens of one id": (_tokenizer_json([{"id": 0, "content": "<|endoftext|>", "special": True, **PLAIN_TOKEN}]),
        r"tokenizer\.json: '<\|endoftext\|>' and 'a' both have the id 0; give each token an id of its own"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_folder_is_refused_in_one_line(case: str, tmp_path: Path):
    change, reason = MALFORMED[case]
    save(tmp_path / "hf", *OTHERS["smollm2"])
    change(tmp_path / "hf")
    result = lm("import", str(tmp_path / "hf"), "-o", str(tmp_path / "out"))
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert re.search(reason, result.stderr), result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("nowhere", "not a name on the hub"),
        ("./nowhere", "not a name on the hub"),
        ("config.json", "not a folder with a config.json; text and token ids are read by lm prepare"),
    ],
)
def test_what_is_no_model_is_said(source: str, reason: str, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    result = lm("import", str(tmp_path / source), "-o", str(tmp_path / "out"))
    assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
    assert reason in result.stderr
    assert not (tmp_path / "out").exists()
