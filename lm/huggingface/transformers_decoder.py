"""Measure transformers models that compute one of lm's normalizers (`lm eval hf:FOLDER`).

`TransformersDecoder` gives such a model the methods of lm's decoder that measurements call.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging

from lm.attention.catalogue import make_normalizer
from lm.attention.distance import Window
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import Normalizer
from lm.attention.options import Options
from lm.config.eval_config import NO_SCALING
from lm.config.model_config import LearnedPosition, ModelConfig, Rope
from lm.config.normalizers import LAYER_OPTIONS, LayerList
from lm.config.schema import build_named_block
from lm.config.yaml_text import parse_yaml
from lm.data.batches import Batch
from lm.errors import RunError, one_line
from lm.huggingface.attention_functions import (
    NORMALIZER_ATTRIBUTE,
    QKV_RECORD_ATTRIBUTE,
    add_normalizer_parameters,
    attention_modules,
    register,
)
from lm.huggingface.importing import open_pretrained, read_tokenizer
from lm.model.blocks import AttentionInputs, DecodingCache, ForwardContext
from lm.model.cross_entropy import Head
from lm.model.decoder import batch_layout
from lm.model.spec import ModelSpec
from lm.plain import to_plain
from lm.plugins import PLUGINS
from lm.runs.loading import LoadedModel

ATTENTION_FUNCTION_NAME = "lm_measured"  # name of the attention function
LOGIT_TOLERANCE = 1e-3  # largest difference of logits that counts as rounding


class TransformersDecoder(nn.Module):
    """This class gives a transformers model the methods of `lm.model.decoder.Decoder` that measurements call. `forward`
    returns hidden states, which `head` maps to logits.

    Args:
        model: a language model whose attention is lm's (`register`, `add_normalizer_parameters`).
        options: options of its normalizer.
        seq_len: training length in tokens.

    Raises RunError: its logits are not a matrix times the hidden states, capped or not.
    """

    takes_inference_settings = False

    def __init__(self, model: PreTrainedModel, options: Options, seq_len: int):
        super().__init__()
        text, self.model, self.seq_len = model.config.get_text_config(), model, seq_len
        self.embedding, self.vocab_size = model.get_input_embeddings(), text.vocab_size
        self.head = Head(text.hidden_size, self.vocab_size, getattr(text, "final_logit_softcapping", None))
        self.head.weight = model.get_output_embeddings().weight
        layers, n_head = attention_modules(model), text.num_attention_heads
        normalizers = [getattr(layer, NORMALIZER_ATTRIBUTE, None) for layer in layers]
        layer_spec = next(normalizer.layer for normalizer in normalizers if normalizer is not None)
        windows = [getattr(layer, "sliding_window", None) for layer in layers]
        layer_options = [Window(size=window) if window else options for window in windows]
        self._normalizers = nn.ModuleList(
            normalizer or make_normalizer(layer, layer_spec)
            for normalizer, layer in zip(normalizers, layer_options, strict=True)
        )
        kv_heads = getattr(text, "num_key_value_heads", None) or n_head
        self.config = ModelConfig(
            n_layer=len(layers), n_head=n_head, n_kv_head=None if kv_heads == n_head else kv_heads,
            head_size=layer_spec.head_size, n_embd=text.hidden_size,
            position=Rope() if hasattr(text, "rope_parameters") else LearnedPosition(),
            normalizer=LayerList(of=layer_options) if any(windows) else options,
        )  # fmt: skip
        self._layers, self.rope_scaling = layers, NO_SCALING
        self.eval()
        tokens = torch.arange(16).unsqueeze(0) % self.vocab_size
        with torch.no_grad():
            difference = (self.head(self(tokens)) - model(tokens).logits).abs().max()
        if not difference <= LOGIT_TOLERANCE:
            raise RunError(f"{type(model).__name__} computes logits by more than a matrix, which is not measured here")

    def forward(
        self, tokens: Tensor, layout: AttentionLayout | None = None, cache: DecodingCache | None = None,
        output_start: int = 0
    ) -> Tensor:  # fmt: skip
        """Return hidden states (B, T - output_start, C) of the tokens (B, T) from index `output_start` on, as
        `Decoder.forward` does.

        layout: positions in packed documents; cache: keys and values of earlier tokens, which this call extends.
        """
        arguments = {"input_ids": tokens, "use_cache": cache is not None}
        if layout is not None and layout.documents is not None:
            arguments["position_ids"] = layout.positions.expand_as(tokens)
        if cache:
            arguments["past_key_values"] = past = DynamicCache()
            for layer, state in enumerate(cache.states.get(self, ())):
                past.update(*state, layer)
        hidden = self.model.base_model(**arguments).last_hidden_state
        if cache:
            cache.states[self] = [(layer.keys, layer.values) for layer in past.layers]
            cache.n_seen += tokens.size(1)
        return hidden[:, output_start:]

    def hidden_states(self, batch: Batch, output_start: int = 0) -> Tensor:
        """Return hidden states (B, T - output_start, C) of a batch's tokens from index `output_start` on."""
        return self(batch.tokens, batch_layout(batch), output_start=output_start)

    def normalizers(self) -> list[Normalizer]:
        """Return the normalizer of each layer; a layer with a sliding window has lm's normalizer `window`."""
        return [*self._normalizers]

    def embed(
        self, tokens: Tensor, layout: AttentionLayout | None = None, cache: None = None,
        document_length: int | None = None
    ) -> tuple[Tensor, ForwardContext]:  # fmt: skip
        """Return the tokens' embeddings (B, T, C) and the context for `blocks`, with the arguments of `Decoder.embed`.

        This call runs the whole model and records every layer's queries, keys and values. `blocks` then add them to the
        context, where `lm.model.attention_stream` reads them.
        """
        layout = layout or AttentionLayout.continuation(
            0, tokens.size(1), document_length or tokens.size(1), tokens.device
        )
        for layer in self._layers:
            setattr(layer, QKV_RECORD_ATTRIBUTE, [])
        try:
            self(tokens, layout)
            self._records = [getattr(layer, QKV_RECORD_ATTRIBUTE).pop() for layer in self._layers]
        finally:
            for layer in self._layers:
                delattr(layer, QKV_RECORD_ATTRIBUTE)
        return self.embedding(tokens), ForwardContext(layout, None, 1.0, None)

    @property
    def blocks(self) -> list[Callable[[Tensor, ForwardContext], Tensor]]:
        """Return a function for each layer, called like a block of `Decoder`. It adds the layer's recorded queries,
        keys and values to the context, and returns its input x (B, T, C) unchanged."""

        def block(layer: int, x: Tensor, context: ForwardContext) -> Tensor:
            context.captured_inputs.append(AttentionInputs(x, *self._records[layer]))
            return x

        return [partial(block, layer) for layer in range(len(self._layers))]


def load_transformers_decoder(folder: Path, normalizer: str, train_length: int | None) -> LoadedModel:
    """Load a transformers model from a folder, in fp32, with lm's attention in the layers without a sliding window.

    Args:
        normalizer: a name, or a block in YAML such as `{name: ssmax, bias: true}`. Its parameters are read from the
            folder if that has them.
        train_length: training length in tokens; None: `max_position_embeddings`.

    Raises RunError, DataError or ConfigError: there is no such model, normalizer or tokenizer, or the model's attention
    can't be replaced.
    """
    source = open_pretrained(str(folder), None, None)
    with PLUGINS.trust_user_text():
        options = build_named_block(LAYER_OPTIONS, parse_yaml(normalizer, "--normalizer"), "--normalizer")
    register({ATTENTION_FUNCTION_NAME: to_plain(options)})
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation=ATTENTION_FUNCTION_NAME, dtype=torch.float32, trust_remote_code=False
        )
        add_normalizer_parameters(model, train_length)
        text = model.config.get_text_config()
        decoder = TransformersDecoder(model, options, train_length or text.max_position_embeddings)
    except (ValueError, OSError, AttributeError) as error:
        raise RunError(f"{folder}: can't be measured in transformers: {one_line(error)}") from None
    tokenizer, _, start, ends = read_tokenizer(source, None, text.vocab_size)
    spec = ModelSpec(decoder.config, text.vocab_size, decoder.seq_len, start, ends)
    return LoadedModel(decoder, spec, tokenizer, folder, origin={"source": str(folder)})
