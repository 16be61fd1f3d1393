"""Read a GGUF file as a model of transformers: metadata as config.json's fields, tensors by transformers' names, and
the tokenizer.

The format is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Names in GGUF files are from the
tables of the package gguf, which llama.cpp's converter uses.
"""

import json
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from lm.config.model_config import Llama3Scaling, Rope
from lm.errors import RunError, one_line
from lm.huggingface.fields import DEFAULT_THETA, Fields, write_rope
from lm.model.rope import AS_TRAINED, frequencies
from lm.schema import Plain

# Patterns that cut text into words before byte-level BPE, by `tokenizer.ggml.pre`; "" is the pattern of ByteLevel
# itself, which is GPT-2's.
_WORD_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + "DIGITS"
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT_REGEX = {
    "gpt-2": "",
    "smollm": r"\p{N}",
    "llama-bpe": _WORD_REGEX.replace("DIGITS", r"\p{N}{1,3}"),
    "qwen2": _WORD_REGEX.replace("DIGITS", r"\p{N}"),
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens
SPACE = "▁"  # stands for a space in sentencepiece's tokens


def _byte_bpe(metadata: dict[str, Plain], pattern: str, pre_tokenizer: str) -> Tokenizer:
    pairs = [tuple(merge.split(" ")) for merge in metadata["merges"]]
    tokenizer = Tokenizer(models.BPE(_token_ids(metadata["tokens"]), pairs, ignore_merges=pre_tokenizer == "llama-bpe"))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    splits_words = pre_tokenizer in ("gpt-2", "smollm")  # as GPT-2 does, after the pattern
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits_words)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if pre_tokenizer == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece_bpe(metadata: dict[str, Plain]) -> Tokenizer:
    """Return a BPE tokenizer as in sentencepiece, which merges across words, encodes unknown characters as bytes, and
    by default puts a space before each text."""
    tokens, token_types = metadata["tokens"], metadata["token_type"]
    scores = {
        token: score
        for token, score, kind in zip(tokens, metadata["scores"], token_types, strict=True)
        if kind == NORMAL
    }
    unknown_token = tokens[metadata.get("unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(_token_ids(tokens), _merges(scores), unk_token=unknown_token, fuse_unk=True, byte_fallback=True)
    )
    prepends_space = metadata.get("add_space_prefix", True)
    prepend_steps = [normalizers.Prepend(SPACE)] if prepends_space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend_steps, normalizers.Replace(" ", SPACE)])
    strip_steps = [decoders.Strip(" ", 1, 0)] if prepends_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip_steps]
    )
    return tokenizer


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return BPE's merges, pairs of tokens, by descending score of the merged token, as sentencepiece's files list
    scores, not merges.
    """
    halves = ((token[:n], token[n:], score) for token, score in scores.items() for n in range(1, len(token)))
    merges = [merge for merge in halves if merge[0] in scores and merge[1] in scores]
    return [(start, end) for start, end, _ in sorted(merges, key=lambda merge: (-merge[2], -len(merge[0])))]


def _token_ids(tokens: list[str]) -> dict[str, int]:
    token_ids = {token: index for index, token in enumerate(tokens)}
    if len(token_ids) < len(tokens):
        raise ValueError("it lists a token twice")
    return token_ids


# ---------------------------------------------------------------- the file


# Names of metadata after the prefix `ARCHITECTURE.`, and the same fields' names in transformers.
CONFIG_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
OPTIONAL_METADATA = (
    "attention.head_count_kv",
    "attention.key_length",
    "rope.freq_base",
    "vocab_size",
)  # every file has the others
SCALING_FIELDS = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
}  # rope.scaling.*
# Metadata after `ARCHITECTURE.` that must have this value, which lm computes; None: any value.
REQUIRED_METADATA = {"attention.causal": True, "rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.finetuned": None}
IRRELEVANT_PREFIXES = (
    "general.",
    "tokenizer.",
    "GGUF.",
    "quantize.",
    "split.",
)  # metadata that is not about the model's function
# Names of a layer's tensors, and their names in transformers after `model.layers.N.`; NON_LAYER: names of the other
# tensors.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NON_LAYER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
FREQUENCY_DIVISORS = (
    "rope_freqs.weight"  # tensor that Llama 3's converter writes: the divisor of each RoPE pair's frequency
)
ARCHITECTURES = ("llama", "qwen2", "qwen3")


class GGUF:
    """A GGUF file of a Llama, Qwen 2 or Qwen 3; its tensors are dequantised one at a time.

    Attributes:
        config: fields as in a config.json of transformers.
        tokenizer_config: the tokenizer's special tokens, as in a tokenizer_config.json.
        shapes: shapes of the tensors, by transformers' names.
        types: the number of tensors of each type, e.g. {"Q4_1": 210}.

    Raises RunError: not a GGUF file, a truncated file, another architecture, metadata that can't be used (the error
    names the key), or no package gguf to read the file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            from gguf import GGUFReader
        except ModuleNotFoundError:
            raise RunError(f"{path}: reading GGUF files needs gguf: pip install 'gguf>=0.17'") from None
        try:
            reader = GGUFReader(path)
            self._metadata = {name: field.contents() for name, field in reader.fields.items()}
            self._tensors = {self._transformers_name(tensor.name): tensor for tensor in reader.tensors}
        except Exception as error:  # all that the reader raises for damaged files
            raise RunError(f"{path}: not a readable GGUF file: {one_line(error, 160)}") from None
        self._check_tensor_ranges()
        self.shapes = {
            name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self._tensors.items()
        }
        self.type_counts = dict(Counter(tensor.tensor_type.name for tensor in self._tensors.values()))
        self.config = self._config()
        if FREQUENCY_DIVISORS in self._tensors and "rope_scaling" not in self.config:
            self.config["rope_scaling"] = self._llama3_scaling()
        self.tokenizer_config = {f"{kind}_token": self._special_token(kind) for kind in ("bos", "eos")}

    def _check_tensor_ranges(self) -> None:
        """Check where the tensors' data lie. Raises RunError if data of a tensor end beyond the file, or begin within
        another tensor.
        """
        file_size, end = self.path.stat().st_size, 0
        for name, tensor in sorted(self._tensors.items(), key=lambda item: item[1].data_offset):
            if tensor.data_offset < end:
                raise RunError(f"{self.path}: damaged: {name} begins within another tensor; fetch it again")
            end = tensor.data_offset + tensor.n_bytes
            if end > file_size:
                raise RunError(f"{self.path}: cut short: {name} ends beyond the file; fetch it again")

    def _transformers_name(self, name: str) -> str:
        """Return a tensor's name in transformers, or an unknown `name` unchanged."""
        if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
            layer, tensor_name, parameter_kind = match.groups()
            return (
                f"model.layers.{layer}.{LAYER_TENSORS[tensor_name]}.{parameter_kind}"
                if tensor_name in LAYER_TENSORS
                else name
            )
        return NON_LAYER.get(name, name)

    def _config(self) -> dict[str, Plain]:
        kind = self._metadata.get("general.architecture")
        if kind not in ARCHITECTURES:
            raise RunError(f"{self.path}: general.architecture = {kind!r}: only {', '.join(ARCHITECTURES)} are read")
        config: dict[str, Plain] = {"model_type": kind, "tie_word_embeddings": "lm_head.weight" not in self._tensors}
        scaling: dict[str, Plain] = {}
        head_sizes = {}  # metadata that must equal the head size
        for name, value in self._metadata.items():
            key = name.removeprefix(f"{kind}.")
            value = _shortest_decimal(value)
            if name.startswith(IRRELEVANT_PREFIXES) or (
                key in REQUIRED_METADATA and REQUIRED_METADATA[key] in (None, value)
            ):
                continue
            if key in CONFIG_FIELDS:
                config[CONFIG_FIELDS[key]] = value
            elif key.removeprefix("rope.scaling.") in SCALING_FIELDS and key.startswith("rope.scaling."):
                scaling[SCALING_FIELDS[key.removeprefix("rope.scaling.")]] = value
            elif key in ("rope.dimension_count", "attention.value_length"):
                head_sizes[name] = value
            else:
                raise RunError(
                    f"{self.path}: {name} = {value!r}: metadata that is not known here: the model may compute "
                    "something else"
                )
        if scaling.get("factor", 0) not in (0, 1):
            scaling.setdefault("rope_type", "linear")  # as llama.cpp reads a file without a type
        if missing_names := [
            name for name, field in CONFIG_FIELDS.items() if field not in config and name not in OPTIONAL_METADATA
        ]:
            raise RunError(f"{self.path}: there is no metadata {kind}.{missing_names[0]}: damaged?")
        size = _head_size(config)
        for name, value in head_sizes.items():
            if value != size:
                raise RunError(f"{self.path}: {name} = {value!r}: is not the size of a head, {size}")
        vocab_size, *_ = self.shapes.get("model.embed_tokens.weight") or (len(self._tokens()),)
        # GGUF's defaults of absent metadata, which are not transformers' defaults of absent fields.
        defaults = {"num_key_value_heads": config["num_attention_heads"], "head_dim": size, "vocab_size": vocab_size}
        return {
            **defaults,
            **config,
            **({"rope_scaling": scaling} if scaling.get("rope_type", "none") != "none" else {}),
        }

    def _llama3_scaling(self) -> dict[str, Plain]:
        """Return config.json's field `rope_scaling` as in Llama 3.1 to 3.3, inferred from the tensor
        `FREQUENCY_DIVISORS`; drop the tensor.

        Raises RunError if no rescaling as in Llama 3.1 to 3.3 has this tensor's divisors.
        """
        divisors = self.read(FREQUENCY_DIVISORS).double()
        theta = Fields(self.config, self.path).number("rope_theta", DEFAULT_THETA)
        factor = float(divisors.max()) if divisors.numel() else math.nan
        rope = Rope(theta, scaling=Llama3Scaling(factor))
        old_freqs, new_freqs = (
            frequencies(2 * divisors.numel(), variant, AS_TRAINED, 1, 1) for variant in (Rope(theta), rope)
        )
        if divisors.numel() * 2 != _head_size(self.config) or not torch.allclose(
            divisors, old_freqs / new_freqs, rtol=1e-5, atol=0
        ):
            reason = (
                "rescales RoPE in another way than Llama 3.1 to 3.3 do; import the model that the file was made from"
            )
            raise RunError(f"{self.path}: {FREQUENCY_DIVISORS}: {reason}")
        del self._tensors[FREQUENCY_DIVISORS], self.shapes[FREQUENCY_DIVISORS]
        return write_rope(rope)

    def _tokens(self) -> list[str]:
        """Return the tokens of the file's tokenizer; [] if the file lists none."""
        tokens = self._metadata.get("tokenizer.ggml.tokens")
        return tokens if isinstance(tokens, list) else []

    def _special_token(self, kind: str) -> str | None:
        index = self._metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return self._tokens()[index] if isinstance(index, int) and 0 <= index < len(self._tokens()) else None

    def read(self, name: str) -> Tensor:
        """Return a tensor, dequantised to fp32, with heads' dimensions in transformers' order. Raises RunError if it
        can't be read.
        """
        from gguf import dequantize

        tensor = self._tensors[name]
        try:
            value = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)).view(
                self.shapes[name]
            )
        except Exception as error:  # a type that gguf can't dequantise
            raise RunError(
                f"{self.path}: {name} ({tensor.tensor_type.name}) can't be read: {one_line(error, 160)}"
            ) from None
        projection = name.rpartition(".self_attn.")[2]
        if self.config["model_type"] == "llama" and projection.startswith(("q_proj", "k_proj")):
            # The converter puts the two dimensions of each pair that RoPE rotates side by side.
            heads = self.config["num_attention_heads" if projection.startswith("q_") else "num_key_value_heads"]
            value = value.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return value

    def tokenizer(self) -> str | None:
        """Return the file's tokenizer as the content of a tokenizer.json; None: the file has no tokenizer.

        Raises RunError: the tokenizer is damaged, or of a kind that can't be read from GGUF, so that a tokenizer.json
        must be given.
        """
        metadata = {name.removeprefix("tokenizer.ggml."): value for name, value in self._metadata.items()}
        kind, pre_tokenizer = metadata.get("model"), metadata.get("pre")
        if kind is None:
            return None
        if kind != "llama" and (kind != "gpt2" or pre_tokenizer not in tuple(SPLIT_REGEX)):
            description = f"tokenizer.ggml.model = {kind!r}, pre = {pre_tokenizer!r}"
            raise RunError(
                f"{self.path}: {description}: not a tokenizer that is read from GGUF; name its tokenizer.json with "
                "--tokenizer"
            )
        try:
            tokenizer = (
                _sentencepiece_bpe(metadata)
                if kind == "llama"
                else _byte_bpe(metadata, SPLIT_REGEX[pre_tokenizer], pre_tokenizer)
            )
            tokens = list(zip(metadata["tokens"], metadata["token_type"], strict=True))
            kinds = (CONTROL, UNKNOWN)
            tokenizer.add_special_tokens(
                [AddedToken(token, special=True, normalized=False) for token, kind in tokens if kind in kinds]
            )
            tokenizer.add_tokens(
                [AddedToken(token, normalized=False) for token, kind in tokens if kind == USER_DEFINED]
            )
        except Exception as error:  # all that the library raises
            reason = (
                f"has no tokenizer.ggml.{error.args[0]}"
                if isinstance(error, KeyError)
                else f"is damaged: {one_line(error, 160)}"
            )
            raise RunError(f"{self.path}: its tokenizer {reason}; name its tokenizer.json with --tokenizer") from None
        return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, indent=1)


def _head_size(config: dict[str, Plain]) -> int | None:
    """Return `head_dim`. Without it, return the width divided by the number of heads, rounded down; None if one of the
    two is not a whole number above 0."""
    sizes = config.get("hidden_size"), config.get("num_attention_heads")
    return config.get("head_dim") or (
        sizes[0] // sizes[1] if all(isinstance(size, int) and size > 0 for size in sizes) else None
    )


def _shortest_decimal(value: Plain) -> Plain:
    """Return the shortest decimal of a number that was stored as fp32, e.g. 1e-05 for 9.999999747e-06; other values
    unchanged.
    """
    return float(str(np.float32(value))) if isinstance(value, float) and float(np.float32(value)) == value else value
