"""What a decoder costs: parameters, FLOPs, memory."""

from lm.model.cross_entropy import chunk_tokens
from lm.model.decoder import Decoder, is_normalizer


def count_parameters(decoder: Decoder) -> dict[str, int]:
    """`total`, `non_embedding` (without embeddings and head), `normalizer`."""
    total = sum(p.numel() for p in decoder.parameters())
    tables = decoder.embedding, decoder.value_embedding, decoder.head, decoder.position
    embedding = {p for m in tables if m is not None for p in m.parameters()}
    normalizer = sum(p.numel() for name, p in decoder.named_parameters() if is_normalizer(name))
    return {"total": total, "non_embedding": total - sum(p.numel() for p in embedding), "normalizer": normalizer}


def flops_per_token(decoder: Decoder) -> int:
    """Training FLOPs a token: 6 a matrix entry (embedding look-ups are free), 3 T a dimension of keys and values for causal attention."""
    config = decoder.config
    matrices = sum(p.numel() for p in decoder.blocks.parameters() if p.dim() == 2) + decoder.head.weight.numel()
    if config.value_residual == "first_layer":  # whose values are computed twice
        matrices += config.n_embd * config.kv_heads * config.value_dims
    dimensions = config.n_head * (config.key_dims + config.value_dims)
    return 6 * matrices + 3 * config.n_layer * decoder.seq_len * dimensions


def estimated_memory(decoder: Decoder, tokens: int, bf16: bool) -> int:
    """Bytes of training on `tokens` at a time, roughly: fp32 weights, gradients and two Adam moments, activations, one chunk of logits."""
    config, state = decoder.config, 16 * sum(p.numel() for p in decoder.parameters())
    heads = config.n_head * config.key_dims + config.kv_heads * config.value_dims
    saved = config.n_layer * (6 * config.n_embd + 3 * heads + 4 * config.mlp_width)  # values a token keeps for the backward pass
    return state + tokens * saved * (2 if bf16 else 4) + 12 * chunk_tokens(decoder.head.weight) * decoder.vocab_size
