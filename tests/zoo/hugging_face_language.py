"""Language models of Hugging Face."""

from __future__ import annotations

import torch

from tests.zoo.architecture import WORDS
from tests.zoo.hugging_face import (
    DECODER,
    GPT,
    GROUPED,
    causal,
    encoded,
    hugging,
    plain_causal,
    rows_of,
    text_class,
)

LANGUAGE = rows_of(
    gpt__2=hugging("GPT2LMHeadModel", causal, **GPT),
    gpt__2_for_classes=hugging("GPT2ForSequenceClassification", text_class, pad_token_id=0, **GPT),
    gpt_neo=hugging(
        "GPTNeoForCausalLM",
        causal,
        vocab_size=WORDS,
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=4,
        max_position_embeddings=32,
    ),
    gpt_neox=hugging("GPTNeoXForCausalLM", causal, **DECODER),
    gpt__j=hugging("GPTJForCausalLM", causal, rotary_dim=4, **GPT),
    codegen=hugging("CodeGenForCausalLM", causal, rotary_dim=4, **GPT),
    opt=hugging(
        "OPTForCausalLM",
        causal,
        vocab_size=WORDS,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=32,
        word_embed_proj_dim=32,
    ),
    bloom=hugging(
        "BloomForCausalLM", causal, vocab_size=WORDS, hidden_size=32, n_layer=3, n_head=4
    ),
    llama=hugging("LlamaForCausalLM", causal, **GROUPED),
    llama_of_tokenizer_batches=hugging("LlamaForCausalLM", encoded, **GROUPED),
    llama_in_bfloat16=hugging("LlamaForCausalLM", plain_causal, dtype=torch.bfloat16, **GROUPED),
    mistral_with_windows=hugging("MistralForCausalLM", causal, sliding_window=4, **GROUPED),
    qwen2=hugging("Qwen2ForCausalLM", causal, **GROUPED),
    qwen3=hugging("Qwen3ForCausalLM", causal, head_dim=8, **GROUPED),
    gemma2=hugging("Gemma2ForCausalLM", causal, head_dim=8, sliding_window=4, **GROUPED),
    phi=hugging("PhiForCausalLM", causal, **DECODER),
    falcon=hugging(
        "FalconForCausalLM",
        causal,
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
    ),
    mpt=hugging(
        "MptForCausalLM",
        causal,
        vocab_size=WORDS,
        d_model=32,
        n_heads=4,
        n_layers=3,
        max_seq_len=32,
        expansion_ratio=2,
    ),
    biogpt=hugging("BioGptForCausalLM", causal, **DECODER),
    mamba=hugging(
        "MambaForCausalLM",
        plain_causal,
        vocab_size=WORDS,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=3,
    ),
    mixtral_with_balance_loss=hugging(
        "MixtralForCausalLM", causal, num_local_experts=4, output_router_logits=True, **GROUPED
    ),
    qwen3_mixture_of_experts=hugging(
        "Qwen3MoeForCausalLM",
        causal,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        output_router_logits=True,
        **GROUPED,
    ),
    xlnet=hugging(
        "XLNetLMHeadModel",
        lambda n: plain_causal(n),
        vocab_size=WORDS,
        d_model=32,
        n_layer=3,
        n_head=4,
        d_inner=48,
    ),
)
