"""What a decoder costs: parameters, FLOPs."""

from lm.model.decoder import Decoder, is_normalizer


def count_parameters(decoder: Decoder) -> dict[str, int]:
    """`total`, `non_embedding` (without embeddings and head), `normalizer`."""
    total = sum(p.numel() for p in decoder.parameters())
    tables = decoder.embedding, decoder.value_embedding, decoder.head, decoder.position
    embedding = {p for m in tables if m is not None for p in m.parameters()}
    normalizer = sum(p.numel() for name, p in decoder.named_parameters() if is_normalizer(name))
    return {"total": total, "non_embedding": total - sum(p.numel() for p in embedding), "normalizer": normalizer}


def flops_per_token(decoder: Decoder, masked: bool = False) -> int:
    """Training FLOPs a token: 6 a matrix entry (embedding look-ups are free), 3 T a dimension of keys and values for causal attention.

    masked: count what the causal mask hides, too, as PaLM (arXiv 2204.02311, appendix B) and nanoGPT do: 6 N + 12 L H Q T.
    """
    config = decoder.config
    matrices = sum(p.numel() for p in decoder.blocks.parameters() if p.dim() == 2) + decoder.head.weight.numel()
    if config.value_residual == "first_layer":  # whose values are computed twice
        matrices += config.n_embd * config.kv_heads * config.value_dims
    dimensions = config.n_head * (config.key_dims + config.value_dims)
    return 6 * matrices + (6 if masked else 3) * config.n_layer * decoder.seq_len * dimensions
