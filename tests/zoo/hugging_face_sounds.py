"""Models of Hugging Face for sounds and series, and those that draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ctc_loss

from pipeplan.task import Task
from tests.zoo.architecture import SIDE, WORDS, Architecture, Make, classes, floats
from tests.zoo.hugging_face import (
    ENCODER,
    VISION,
    Batch,
    causal,
    hugging,
    rows_of,
    speech,
    spoken,
)


def series(number: int) -> Batch:
    """What was, and what comes."""
    return {"past_values": floats(number, 32, 3), "future_values": floats(number + 9, 8, 3)}


def dated_series(number: int) -> Batch:
    """The same with features of time."""
    return {
        "past_values": floats(number, 20),
        "past_time_features": floats(number + 1, 20, 2),
        "past_observed_mask": torch.ones(2, 20),
        "future_values": floats(number + 2, 4),
        "future_time_features": floats(number + 3, 4, 2),
    }


WAVES = dict(
    vocab_size=32,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=48,
    conv_dim=(8, 8),
    conv_kernel=(10, 4),
    conv_stride=(5, 4),
    num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=2,
    num_feat_extract_layers=2,
    mask_time_length=2,
    pad_token_id=0,
)


def letters(output: Any, labels: Tensor) -> Tensor:
    """What the models' own loss is where all labels have one length (CTC, A. Graves 2006)."""
    logits = output if isinstance(output, Tensor) else output.logits  # a run gives the tensor
    chances = logits.log_softmax(-1, dtype=torch.float32).transpose(0, 1)
    times = torch.full((len(labels),), len(chances))
    lengths = torch.full((len(labels),), labels.shape[1])
    return ctc_loss(chances, labels, times, lengths, blank=0, reduction="sum")


OUTSIDE = "the loss in the task, not in the model"


def heard(kind: str, **config: Any) -> tuple[Make, str, Make]:
    """With its own loss, which looks at values, and with the same one outside of it."""
    config |= WAVES
    own, outside = (hugging(kind, speech, loss=loss, **config) for loss in (None, letters))
    return own, OUTSIDE, outside


DATED = hugging(
    "TimeSeriesTransformerForPrediction",
    dated_series,
    prediction_length=4,
    context_length=13,
    num_time_features=2,
    lags_sequence=[1, 2, 7],
    d_model=16,
    encoder_layers=2,
    decoder_layers=2,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
)


def unchecked() -> Task:
    """The series model, where distributions do not look at what they are given."""
    torch.distributions.Distribution.set_default_validate_args(False)
    return DATED()


SOUNDS_AND_SERIES = (
    *rows_of(
        wav2vec2=heard("Wav2Vec2ForCTC", apply_spec_augment=False),
        hubert=heard("HubertForCTC", apply_spec_augment=False),
        wavlm=heard("WavLMForCTC", apply_spec_augment=False),
        audio_spectrogram_transformer=hugging(
            "ASTForAudioClassification",
            lambda n: {"input_values": floats(n, 24, 16), "labels": classes(n, 2)},
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=48,
            max_length=24,
            num_mel_bins=16,
            patch_size=8,
        ),
        whisper=hugging(
            "WhisperForConditionalGeneration",
            spoken,
            num_mel_bins=16,
            max_source_positions=20,
            max_target_positions=16,
            **{
                "vocab_size": WORDS,
                "d_model": 32,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "encoder_ffn_dim": 48,
                "decoder_ffn_dim": 48,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "decoder_start_token_id": 2,
            },
        ),
        patch_tst=hugging(
            "PatchTSTForPrediction",
            series,
            num_input_channels=3,
            context_length=32,
            prediction_length=8,
            patch_length=8,
            patch_stride=8,
            d_model=16,
            num_hidden_layers=3,
            num_attention_heads=4,
            ffn_dim=32,
        ),
        time_series_transformer=(DATED, "distributions without checks of values", unchecked),
    ),
    Architecture(
        "wav2vec2 with its masks",
        *heard("Wav2Vec2ForCTC"),
        draws=True,
    ),
    Architecture(
        "vit masked autoencoder, drawn",
        hugging(
            "ViTMAEForPreTraining",
            lambda n: {"pixel_values": floats(n, 3, SIDE, SIDE)},
            decoder_hidden_size=32,
            decoder_num_hidden_layers=2,
            decoder_num_attention_heads=4,
            decoder_intermediate_size=48,
            **VISION,
        ),
        draws=True,
    ),
    Architecture(
        "bert with dropout",
        hugging("BertForMaskedLM", causal, chance=True, **ENCODER),
        draws=True,
    ),
)
