"""Tiny random models of every convertible type, whose decays are slow enough for a wrong transition to show."""

import torch
from torch import nn

SMALL = {"vocab_size": 64, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
LOCAL_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 16}
GDN = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "head_dim": 8, **HEADS,
}  # fmt: skip
MLA = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
LINEAR_THEN_FULL = ["linear_attention", "full_attention"]
TWO = {"num_hidden_layers": 2}

CONFIGS = {
    "mamba": {**SMALL, **TWO, "state_size": 8, "use_bias": True},
    "falcon_mamba": {**SMALL, **TWO, "state_size": 8},
    "jamba": {
        **SMALL, **HEADS, "num_hidden_layers": 4, "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1,
        "num_experts": 2, "num_experts_per_tok": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "mamba_dt_rank": 4,
    },
    "zamba": {
        **SMALL, **HEADS, "num_key_value_heads": 4, "num_hidden_layers": 6, "mamba_d_state": 8, "n_mamba_heads": 2,
        "mamba_dt_rank": 4, "attn_layer_period": 3, "attn_layer_offset": 2,
    },
    "mamba2": {
        **SMALL, **TWO, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8, "expand": 2,
        "time_step_limit": (0.0, 0.4),
    },
    "bamba": {
        **SMALL, **HEADS, **TWO, "attn_layer_indices": [1], "mamba_d_state": 8, "mamba_n_heads": 8,
        "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8,
    },
    "zamba2": {
        **SMALL, **HEADS, "num_key_value_heads": 4, "num_hidden_layers": 4, "mamba_d_state": 8, "n_mamba_heads": 8,
        "mamba_headdim": 8, "mamba_ngroups": 2, "chunk_size": 8, "hybrid_layer_ids": [1, 3],
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_mem_blocks": 1,
    },
    "nemotron_h": {
        **SMALL, **HEADS, "head_dim": 8, "layers_block_type": ["mamba", "attention", "moe", "mamba"],
        "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 8,
        "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
        "moe_shared_expert_intermediate_size": 16,
    },
    "granitemoehybrid": {
        **SMALL, **HEADS, **TWO, "layer_types": ["mamba", "attention"], "mamba_d_state": 8, "mamba_n_heads": 8,
        "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8, "num_local_experts": 2,
        "num_experts_per_tok": 1, "shared_intermediate_size": 16,
    },
    "falcon_h1": {
        **SMALL, **HEADS, **TWO, "head_dim": 8, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8,
        "mamba_d_ssm": 64, "mamba_n_groups": 2, "mamba_chunk_size": 8,
    },
    "qwen3_next": {**SMALL, **GDN, **TWO, **SHARED, "layer_types": LINEAR_THEN_FULL},
    "qwen3_5_text": {**SMALL, **GDN, **TWO, "layer_types": LINEAR_THEN_FULL},
    "qwen3_5_moe_text": {**SMALL, **GDN, **TWO, **SHARED, "layer_types": LINEAR_THEN_FULL},
    "qwen4_exp_text": {
        **SMALL, **GDN, **TWO, **SHARED, "layer_types": LINEAR_THEN_FULL, "hc_count": 2, "hc_lowrank": 8,
        "ple_layer_ids": [], "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 64,
        "indexer_compress_ratio": 2,
    },
    "olmo_hybrid": {**SMALL, **GDN, **TWO, "layer_types": LINEAR_THEN_FULL, "linear_allow_neg_eigval": True},
    "kimi_linear": {
        **SMALL, **HEADS, **TWO, **EXPERTS, "num_key_value_heads": 4, "layer_types": LINEAR_THEN_FULL,
        "linear_num_heads": 4, "linear_head_dim": 8, "head_dim": 8, **MLA, "num_local_experts": 2,
    },
    "bailing_hybrid": {
        **SMALL, **HEADS, **TWO, **LOCAL_EXPERTS, **MLA, "num_key_value_heads": 4, "moe_intermediate_size": 16,
        "n_group": 1, "topk_group": 1, "head_dim": 8, "first_k_dense_replace": 1, "layer_types": LINEAR_THEN_FULL,
    },
    "minimax": {
        **SMALL, **HEADS, **TWO, **LOCAL_EXPERTS, "head_dim": 8, "layer_types": LINEAR_THEN_FULL, "block_size": 8,
    },
    "recurrent_gemma": {
        **SMALL, **HEADS, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 6, "num_key_value_heads": 1,
        "head_dim": 8,
    },
    "rwkv": {**SMALL, **TWO, "attention_hidden_size": 32, "context_length": 64},
    "xlstm": {**SMALL, **TWO, "hidden_size": 128, "num_blocks": 2, "num_heads": 4, "chunk_size": 8, "eps": 1e-14},
    "lfm2": {
        **SMALL, **HEADS, **TWO, "layer_types": ["conv", "full_attention"], "block_ff_dim": 48, "block_multiple_of": 8,
    },
    "lfm2_moe": {**SMALL, **HEADS, **TWO, **EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {**SMALL, **HEADS, **TWO, "head_dim": 8, "layer_types": ["conv", "full_attention"], "sliding_window": 6},
    "inkling_text": {
        **SMALL, **HEADS, **TWO, **EXPERTS, "head_dim": 8, "swa_head_dim": 8, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "sliding_window_size": 6, "d_rel": 4, "rel_extent": 16, "n_routed_experts": 2,
        "n_shared_experts": 1,
    },
    "gpt2": {**SMALL, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {**SMALL, **HEADS, **TWO},
    "bloom": {**SMALL, "n_layer": 2, "n_head": 6, "hidden_size": 48},
    "mpt": {**SMALL, "hidden_size": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 64},
    "llama": {**SMALL, **HEADS, **TWO},
    "qwen2": {**SMALL, **HEADS, **TWO},
    "mistral": {**SMALL, **HEADS, **TWO, "sliding_window": 6, "head_dim": 8},
    "gpt_oss": {**SMALL, **HEADS, **TWO, **LOCAL_EXPERTS, "head_dim": 8, "sliding_window": 6},
}  # fmt: skip

# Encoders, encoder-decoders and backbones without a causal head: outputs are hidden states.
BACKBONES = {
    "bert": {**SMALL, **HEADS, **TWO},
    "distilbert": {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "modernbert": {**SMALL, **HEADS, **TWO, "local_attention": 6},
    "albert": {**SMALL, **HEADS, **TWO, "embedding_size": 16},
    "t5": {**SMALL, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "gemma3_text": {**SMALL, **HEADS, **TWO, "head_dim": 8, "sliding_window": 6},
    "qwen3": {**SMALL, **HEADS, **TWO, "head_dim": 8},
    "opt": {**SMALL, **TWO, "num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {**SMALL, **HEADS, **TWO},
    "glm5_next_text": {
        **SMALL, **HEADS, **TWO, **MLA, "qk_rope_head_dim": 0, "num_key_value_heads": 4, "linear_num_heads": 4,
        "layer_types": LINEAR_THEN_FULL, "linear_head_dim": 8, "q_lora_rank": 8, "n_routed_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 16, "hc_mult": 2, "index_topk": 4, "index_head_dim": 8,
        "index_n_heads": 2, "index_kpool": 2,
    },
}  # fmt: skip


def backbone(model_type: str) -> nn.Module:
    """A random model of BACKBONES, in eval mode."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **BACKBONES[model_type])
    model = AutoModel.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3 if p.dim() >= 2 else 1)
    return model


def build(model_type: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A random model in eval mode: decays near one, norms and mixing rates off their init."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **CONFIGS[model_type])
    config._experts_implementation = "eager"  # the grouped product has no float64
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if leaf in ("A_log", "dt_bias", "dt_proj_bias") or name.endswith("dt_proj.bias"):
                p.copy_(torch.rand_like(p) * 2 - (2 if leaf == "A_log" else 3))
            elif leaf in ("time_decay", "time_first", "sinks", "recurrent_param"):
                p.copy_(torch.randn_like(p) * 0.7 - 1)
            elif leaf.startswith("time_mix"):
                p.copy_(torch.rand_like(p))
            elif "norm" in name and p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.2)
            elif "igate" in name or "fgate" in name:
                p.copy_(torch.randn_like(p) * 0.5 + ("fgate" in name and leaf == "bias"))
            elif p.dim() >= 2 and "embed" not in name:
                p.mul_(3)
    return model


# before transformers 5.24, which calls all but RWKV's `cache`
CACHE = {
    "mamba": "cache_params",
    "mamba2": "cache_params",
    "falcon_mamba": "cache_params",
    "xlstm": "cache_params",
    "rwkv": "state",
}


def cache_name(model_type: str) -> str:
    """The argument and the output of a model that is its cache."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    own = CACHE.get(model_type, "past_key_values")
    return "cache" if own != "state" and "cache" in CausalLMOutputWithPast.__dataclass_fields__ else own


def in_pieces(model: nn.Module, ids: torch.Tensor, cuts: list[int], **first: torch.Tensor) -> torch.Tensor:
    """Logits of ids [B, T] from calls of `cuts` tokens each, with the model's own cache in between."""
    from transformers import DynamicCache

    name = cache_name(model.config.model_type)
    cache, out, start = None, [], 0
    if model.config.model_type == "recurrent_gemma":
        model.model._setup_cache(model.config, ids.shape[0], ids.device, model.dtype)
        cache = DynamicCache(config=model.config)  # its output carries none
    for length in cuts:
        given = {} if cache is None else {name: cache}
        given |= {
            k: v[:, : start + length] if k == "attention_mask" else v[:, start : start + length]
            for k, v in first.items()
        }
        result = model(input_ids=ids[:, start : start + length], use_cache=True, **given)
        cache = cache if model.config.model_type == "recurrent_gemma" else result[name]
        out.append(result.logits)
        start += length
    return torch.cat(out, dim=1)
