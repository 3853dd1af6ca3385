"""The sizes of a Megatron model that the planner needs."""


def shape_of(config, vocabulary):
    heads = config.num_attention_heads
    experts = config.num_moe_experts or 0
    inner = config.ffn_hidden_size or 4 * config.hidden_size
    return dict(layers=config.num_layers, hidden=config.hidden_size, inner=inner, heads=heads, kv_heads=config.num_query_groups or heads,
                head_dim=config.kv_channels or config.hidden_size // heads, vocabulary=vocabulary, experts=experts,
                experts_per_token=config.moe_router_topk if experts else 1, expert_inner=(config.moe_ffn_hidden_size or inner) if experts else 1)


def vocabulary_of(inners):
    """The number of tokens, padding of the table included, of a model whose chunks on this rank are given."""
    return next((int(inner.vocab_size) for inner in inners if getattr(inner, "vocab_size", None)), 1 << 31 - 1)
