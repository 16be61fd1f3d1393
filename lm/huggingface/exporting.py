"""Export a trained model for transformers (`lm export --format hf`), with a model card.

A model that GPT-2, Llama, Qwen or another architecture of transformers can compute is exported as that architecture.
Any other model is exported with lm's own code, modeling_lm.py.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from torch import Tensor

from lm.config.eval_config import NO_SCALING
from lm.config.load import to_yaml
from lm.config.tree import model_function_options
from lm.data.tokenizer import TOKENIZER_CONFIG_FILE, parse_tokenizer
from lm.errors import RunError
from lm.files import new_folder, write_together
from lm.huggingface.architectures import ARCHITECTURES, HEAD_TENSOR, Architecture
from lm.huggingface.exported_code import code_files
from lm.huggingface.fields import ConfigFields
from lm.huggingface.importing import CONFIG_FILE, LM_MODEL_TYPE, WEIGHTS_FILE
from lm.model.rope import frequencies
from lm.model.spec import ModelSpec
from lm.plain import Plain, to_plain
from lm.runs.folder import TOKENIZER_FILE
from lm.runs.loading import LoadedModel, load

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

QWEN2_WORD_PATTERN = (  # pattern by which Qwen 2 cuts text into words
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def model_card(loaded_model: LoadedModel, model_type: str) -> str:
    """Return a model card in Markdown, with the header that the Hugging Face hub reads.

    It says what the model is, where its weights come from, and which configuration trained them. model_type: that of
    the exported model, as transformers names it.
    """
    spec, model, config = loaded_model.spec, loaded_model.spec.model, loaded_model.config
    label, step = model.normalizer.label(), loaded_model.step_tokens_and_data.get("step")
    texts = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---",
        f"# {loaded_model.folder.resolve().name}",
        f"{model_type}: {model.n_layer} layers of width {model.n_embd}, {model.position.label}, attention {label}.",
        f"Trained on sequences of {spec.seq_len:,} tokens.",
    ]
    if loaded_model.tokenizer is not None:
        texts.append(f"Documents start with `{spec.end_of_text}`, which the tokenizer puts before a text.")
    if model_type == LM_MODEL_TYPE:
        call = "`AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)`"
        texts.append(f"Its code is `modeling_lm.py` and lm's modules in this folder: {call}.")
    if origin := ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in loaded_model.origin.items()):
        texts.append(f"The weights were imported: {origin}.")
    if swap := loaded_model.environment.get("swap"):  # the configuration names the new normalizer alone
        texts.append(f"The weights are those of {swap['from']}, whose {swap['normalizer']} was replaced by {label}.")
    if config is not None and step:
        texts.append(f"Trained for {step:,} steps, {loaded_model.step_tokens_and_data['tokens_seen']:,} tokens.")
        summary = "<details><summary>The whole configuration</summary>"
        texts.append(f"{summary}\n\n```yaml\n{to_yaml(config)}```\n\n</details>")
    return "\n\n".join(texts) + "\n"


# ---------------------------------------------------------------- the model


def export_for_transformers(source: Path, checkpoint: str, target: Path) -> Path:
    """Write the model at `source` to the folder `target` in transformers' format, in fp32, and return `target`.

    The folder gets weights, config.json, tokenizer and model card (README.md). If transformers lacks the architecture,
    it also gets modeling_lm.py and copies of lm's modules of attention and layers.

    checkpoint: the checkpoint of a run folder: `last`, `best` or a step.

    Raises RunError: `source` holds no model, transformers can't compute the model (the message says why), or `target`
    can't be written.
    """
    loaded_model = load(source, checkpoint)
    try:
        architecture, config, tensors = export_config_and_tensors(loaded_model)
    except RunError as error:
        raise RunError(f"{source}: {error}; without --format hf it is exported for lm") from None
    with new_folder(target) as folder:
        files = {CONFIG_FILE: _json_text(config), "README.md": model_card(loaded_model, config["model_type"])}
        if architecture is None:
            normalizers = loaded_model.decoder.normalizers()
            files |= code_files({normalizer.options.name: type(normalizer) for normalizer in normalizers})
        if loaded_model.tokenizer is not None:
            tokenizer_text = (loaded_model.folder / TOKENIZER_FILE).read_text(encoding="utf-8")
            files[TOKENIZER_FILE] = add_start_token(tokenizer_text, loaded_model.spec.end_of_text)
            files[TOKENIZER_CONFIG_FILE] = _json_text(_tokenizer_config(loaded_model.spec))
        # copies: safetensors refuses views, and what layers share
        weights = {name: value.float().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
        contents = {name: content.encode() for name, content in files.items()}
        contents[WEIGHTS_FILE] = safetensors.torch.save(weights, {"format": "pt"})
        write_together({folder / name: content for name, content in contents.items()})
    return target


def export_config_and_tensors(
    loaded_model: LoadedModel,
) -> tuple[Architecture | None, dict[str, Plain], dict[str, Tensor]]:
    """Return the architecture, the config.json fields and the tensors of a model's export.

    The architecture is None if no architecture of transformers computes the model; modeling_lm.py does then. Tensors
    have their names in transformers, and are views of lm's parameters where possible.

    Raises RunError: neither an architecture of transformers nor modeling_lm.py computes the model; the message says
    why.
    """
    if match := _matching_architecture(loaded_model):
        architecture, config = match
        tensors = _transformers_tensors(architecture, config, loaded_model)
    else:
        architecture, config, tensors = None, _lm_config(loaded_model), _lm_tensors(loaded_model)
    return architecture, {**config, **_token_id_fields(loaded_model)}, tensors


def transformers_model(loaded_model: LoadedModel) -> tuple["PreTrainedModel", "PreTrainedTokenizerFast"]:
    """Return the model and the tokenizer that transformers would load from an export, without writing files.

    The model is on the decoder's device, and shares the decoder's tensors where their layout is the same.

    Raises RunError: as `export_config_and_tensors` does, or the model has no tokenizer.
    """
    import transformers

    from lm.huggingface.modeling_lm import LmForCausalLM

    tokenizer, _ = loaded_model.tokenizer_and_start_id()
    architecture, config, tensors = export_config_and_tensors(loaded_model)
    model_class = getattr(transformers, architecture.transformers_class_names[0]) if architecture else LmForCausalLM
    model = model_class.from_pretrained(None, config=model_class.config_class.from_dict(config), state_dict=tensors)
    start_tokenizer = parse_tokenizer(
        add_start_token(tokenizer.to_str(), loaded_model.spec.end_of_text), loaded_model.spec.end_of_text
    )
    fast_tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=start_tokenizer, **_tokenizer_config(loaded_model.spec)
    )
    return model.to(loaded_model.decoder.embedding.weight.device), fast_tokenizer


def _json_text(content: dict[str, Plain]) -> str:
    """Return a dict as the text of a JSON file."""
    return json.dumps(content, indent=2) + "\n"


def _matching_architecture(loaded_model: LoadedModel) -> tuple[Architecture, dict[str, Plain]] | None:
    """Return the transformers architecture that computes the model and splits text as its tokenizer does, and the
    config.json fields.

    Returns None if no architecture does both.
    """
    spec = loaded_model.spec
    for architecture in ARCHITECTURES.values():
        config = architecture.config_fields(spec)
        try:
            model_read_back = architecture.read_model_spec(ConfigFields(config, loaded_model.path)).model
        except RunError:  # it has no field for a part of the model
            continue
        matches_model = model_function_options(model_read_back) == model_function_options(spec.model)
        matches_model &= not (architecture.heads_divide_width and spec.model.n_embd % spec.model.n_head)
        if matches_model and (config["model_type"] != "qwen2" or _splits_text_as_qwen2(loaded_model)):
            return architecture, config
    return None


def _splits_text_as_qwen2(loaded_model: LoadedModel) -> bool:
    """Return whether the tokenizer normalizes and splits text as Qwen 2's does; true for a model without a tokenizer.

    AutoTokenizer always makes Qwen 2's tokenizer for a model of type qwen2, whatever tokenizer.json says.
    """
    if loaded_model.tokenizer is None:
        return True
    fields = json.loads(loaded_model.tokenizer.to_str())
    steps = (fields["pre_tokenizer"] or {}).get("pretokenizers") or []
    qwen2_split = {"type": "Split", "pattern": {"Regex": QWEN2_WORD_PATTERN}, "behavior": "Isolated", "invert": False}
    qwen2_steps = [qwen2_split, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]
    has_qwen2_steps = [
        {name: value for name, value in step.items() if name != "trim_offsets"} for step in steps
    ] == qwen2_steps
    return (
        has_qwen2_steps
        and (fields["normalizer"] or {}).get("type") == "NFC"
        and not fields["model"].get("ignore_merges")
    )


def _transformers_tensors(
    architecture: Architecture, config: dict[str, Plain], loaded_model: LoadedModel
) -> dict[str, Tensor]:
    """Return the tensors of a model of `architecture`, by their names in transformers, as views of lm's parameters
    where possible.
    """
    state, tensors = loaded_model.decoder.state_dict(), {}
    for parameter in architecture.mapped_parameters(loaded_model.spec, architecture.tensor_prefix):
        pieces = state[parameter.name].split(
            [size[-1] if parameter.is_transposed else size[0] for _, size in parameter.tensors]
        )
        pieces = [piece.t() if parameter.is_transposed else piece for piece in pieces]
        if parameter.n_interleaved_heads:
            pieces = [
                piece.unflatten(0, (3, parameter.n_interleaved_heads, -1)).transpose(0, 1).flatten(0, 2)
                for piece in pieces
            ]
        tensors |= {name: piece for (name, _), piece in zip(parameter.tensors, pieces, strict=True)}
    return tensors


def _token_id_fields(loaded_model: LoadedModel) -> dict[str, Plain]:
    """Return the config.json fields `bos_token_id`, `eos_token_id` and `pad_token_id`.

    The first is the id of the token that starts a document; the second is one id or a list of ids that end it. Both are
    None without a tokenizer. The padding id is always None, as transformers' default may lie beyond the vocabulary.
    """
    if loaded_model.tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    _, start_id = loaded_model.tokenizer_and_start_id()
    end_ids = loaded_model.end_ids
    return {"bos_token_id": start_id, "eos_token_id": end_ids if len(end_ids) > 1 else end_ids[0], "pad_token_id": None}


def add_start_token(tokenizer_json: str, end_of_text: str) -> str:
    """Return the text `tokenizer_json`, changed so that encoding puts the token `end_of_text` before a text or pair of
    texts.

    Encoding adds no other special token.
    """
    tokenizer = parse_tokenizer(tokenizer_json, end_of_text)
    start_piece = {"SpecialToken": {"id": end_of_text, "type_id": 0}}
    text_pieces = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    # Not by the class TemplateProcessing, in whose templates spaces, colons and dollars of a token would have another
    # meaning.
    fields = json.loads(tokenizer.to_str())
    fields["post_processor"] = {
        "type": "TemplateProcessing", "single": [start_piece, text_pieces[0]], "pair": [start_piece, *text_pieces],
        "special_tokens": {end_of_text: {"id": end_of_text, "ids": [tokenizer.token_to_id(end_of_text)],
            "tokens": [end_of_text]}},
    }  # fmt: skip
    return parse_tokenizer(json.dumps(fields), end_of_text).to_str()


def _tokenizer_config(spec: ModelSpec) -> dict[str, Plain]:
    """Return the content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": spec.end_of_text,
        "eos_token": (spec.end_tokens or [spec.end_of_text])[0],
        "pad_token": spec.end_of_text,
        "padding_side": "left",
        "split_special_tokens": True,  # text becomes no special token, as in lm
        "model_max_length": spec.seq_len,
        "clean_up_tokenization_spaces": False,
    }


# ---------------------------------------------------------------- with code of its own


AUTO_MAP = {
    "AutoConfig": "modeling_lm.LmConfig",
    "AutoModel": "modeling_lm.LmModel",
    "AutoModelForCausalLM": "modeling_lm.LmForCausalLM",
}
# fields of config.json that are options of lm's models, of the same names
COPIED_CONFIG_FIELDS = (
    "n_layer", "n_head", "kv_heads", "n_embd", "key_dims", "value_dims", "mlp", "mlp_width", "norm", "norm_eps",
    "bias", "has_qkv_bias", "has_mlp_bias", "qk_norm", "post_norm", "parallel", "embedding_norm", "value_residual",
    "output_gate", "gate_inputs", "exclusive", "differential", "dropout", "logit_softcap",
)  # fmt: skip
FIXED_CONFIG_FIELDS = {"model_type": LM_MODEL_TYPE, "architectures": ["LmForCausalLM"], "auto_map": AUTO_MAP}


def _lm_config(loaded_model: LoadedModel) -> dict[str, Plain]:
    """Return the config.json fields of an export with modeling_lm.py: the arguments of its class `LmConfig`.

    Raises RunError: modeling_lm.py can't compute the model; the message says why.
    """
    spec, normalizers, rope_fields = loaded_model.spec, loaded_model.decoder.normalizers(), {}
    model, rope = spec.model, spec.model.position
    if names := [options.name for options in model.normalizer.layer_options() if getattr(options, "n", "") == "sample"]:
        reason = "is a length that generation in transformers does not know; visible and fixed:N are"
        raise RunError(f"normalizer.n = sample of {names[0]} {reason}")
    if rope.rotates:
        radians = frequencies(model.key_dims, rope, NO_SCALING, spec.seq_len, spec.seq_len).tolist()
        rope_fields = {"rope_frequencies": radians, "rope_amplitude": rope.scaling.amplitude}
    return {
        **FIXED_CONFIG_FIELDS, **{name: getattr(model, name) for name in COPIED_CONFIG_FIELDS}, **rope_fields,
        "vocab_size": spec.vocab_size, "seq_len": spec.seq_len, "block": model.block.name,
        "rope_layers": [rope.rotates_in(layer) for layer in range(model.n_layer)],
        "learned_positions": rope.has_length_limit, "tie_word_embeddings": model.tied,
        "initializer_range": model.init_std, "dtype": "float32",
        "normalizers": [
            {**to_plain(normalizer.options), **normalizer.length_constants()} for normalizer in normalizers
        ],
    }  # fmt: skip


def _lm_tensors(loaded_model: LoadedModel) -> dict[str, Tensor]:
    """Return the decoder's tensors by lm's names with the prefix `model.`; a head that isn't tied is
    `lm_head.weight`.
    """
    state = loaded_model.decoder.state_dict()
    if loaded_model.spec.model.tied:
        del state["head.weight"]
    return {HEAD_TENSOR if name == "head.weight" else f"model.{name}": value for name, value in state.items()}
