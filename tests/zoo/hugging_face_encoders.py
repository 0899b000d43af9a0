"""Encoders, and encoders with decoders, of Hugging Face."""

from __future__ import annotations

from tests.zoo.architecture import WORDS, classes
from tests.zoo.hugging_face import (
    BOTH_WAYS,
    DECODER,
    ENCODER,
    SMALL,
    causal,
    hugging,
    plain_causal,
    rows_of,
    spans,
    text_class,
    token_classes,
    translation,
)

REFORMER = dict(
    vocab_size=WORDS,
    hidden_size=32,
    attn_layers=["local", "local"],
    num_attention_heads=4,
    attention_head_size=8,
    feed_forward_size=48,
    axial_pos_shape=[4, 3],
    axial_pos_embds_dim=[16, 16],
    local_attn_chunk_length=4,
    max_position_embeddings=32,
    is_decoder=False,
)

ENCODERS = rows_of(
    bert=hugging("BertForMaskedLM", causal, **ENCODER),
    bert_of_two_sentences=hugging(
        "BertForPreTraining",
        lambda n: causal(n) | {"next_sentence_label": classes(n, 2)},
        **ENCODER,
    ),
    roberta=hugging("RobertaForSequenceClassification", text_class, **ENCODER),
    distilbert_answers_questions=hugging(
        "DistilBertForQuestionAnswering",
        spans,
        vocab_size=WORDS,
        dim=32,
        n_layers=3,
        n_heads=4,
        hidden_dim=48,
        max_position_embeddings=32,
    ),
    albert=hugging("AlbertForMaskedLM", causal, embedding_size=16, **ENCODER),
    electra=hugging("ElectraForPreTraining", token_classes, embedding_size=16, **ENCODER),
    deberta_v2=hugging(
        "DebertaV2ForTokenClassification",
        token_classes,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        **ENCODER,
    ),
    mpnet=hugging("MPNetForMaskedLM", causal, **DECODER),
    longformer=hugging(
        "LongformerForSequenceClassification", text_class, attention_window=4, **ENCODER
    ),
    big_bird=hugging(
        "BigBirdForSequenceClassification", text_class, attention_type="original_full", **ENCODER
    ),
    roformer=hugging("RoFormerForMaskedLM", causal, embedding_size=32, **ENCODER),
    convbert=hugging(
        "ConvBertForTokenClassification",
        token_classes,
        embedding_size=16,
        head_ratio=2,
        conv_kernel_size=3,
        **ENCODER,
    ),
    fnet=hugging(
        "FNetForMaskedLM",
        plain_causal,
        **(SMALL | dict(max_position_embeddings=32, type_vocab_size=2)),
    ),
    modernbert=hugging(
        "ModernBertForMaskedLM",
        causal,
        local_attention=4,
        global_attn_every_n_layers=2,
        cls_token_id=1,
        sep_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
        **DECODER,
    ),
    squeezebert=hugging(
        "SqueezeBertForSequenceClassification", text_class, embedding_size=32, **ENCODER
    ),
    reformer=(
        hugging("ReformerForSequenceClassification", text_class, chance=True, **REFORMER),
        "no dropout: it is seeded from the clock",
        hugging("ReformerForSequenceClassification", text_class, **REFORMER),
    ),
)

TRANSLATORS = rows_of(
    t5=hugging(
        "T5ForConditionalGeneration",
        translation,
        vocab_size=WORDS,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
    ),
    switch_transformers=hugging(
        "SwitchTransformersForConditionalGeneration",
        translation,
        vocab_size=WORDS,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_sparse_encoder_layers=1,
        num_decoder_layers=2,
        num_experts=4,
        num_sparse_decoder_layers=1,
        num_heads=4,
        decoder_start_token_id=0,
        router_jitter_noise=0.0,
    ),
    bart=hugging("BartForConditionalGeneration", translation, **BOTH_WAYS),
    marian=hugging("MarianMTModel", translation, **BOTH_WAYS),
    pegasus=hugging("PegasusForConditionalGeneration", translation, **BOTH_WAYS),
    m2m__100=hugging("M2M100ForConditionalGeneration", translation, **BOTH_WAYS),
    led=hugging(
        "LEDForConditionalGeneration",
        translation,
        attention_window=4,
        max_encoder_position_embeddings=32,
        max_decoder_position_embeddings=32,
        **{k: v for k, v in BOTH_WAYS.items() if k != "max_position_embeddings"},
    ),
)
