"""The role of a tensor in a model by its name: attention, feed-forward, embeddings, norms, other."""

from __future__ import annotations

ATTENTION, FEED_FORWARD, EMBEDDINGS, NORMS, OTHER = "attention", "feed-forward", "embeddings", "norms", "other"

_WORDS = {
    EMBEDDINGS: "embed embedding embeddings embed_tokens embed_positions tok_embeddings token_embedding word_embeddings "
    "position_embeddings tokens positions wte wpe head lm_head output_head embed_out",
    ATTENTION: "attn attention self_attn cross_attn self_attention qkv c_attn wq wk wv wo wqkv q_proj k_proj v_proj o_proj "
    "out_proj query key value in_proj_weight query_key_value out",
    FEED_FORWARD: "mlp ffn feed_forward moe experts router gate up down gate_proj up_proj down_proj fc1 fc2 w1 w2 w3 c_fc "
    "linear1 linear2 dense_h_to_4h dense_4h_to_h",
}
_ROLE_OF = {word: role for role, words in _WORDS.items() for word in words.split()}


def role(name: str) -> str:
    """The role of a tensor: that of the last part of its name which has one."""
    for part in reversed(name.lower().split(".")):
        if "norm" in part or part.startswith("ln"):
            return NORMS
        if part in _ROLE_OF:
            return _ROLE_OF[part]
    return OTHER
