"""Models of Hugging Face for images, and images with texts."""

from __future__ import annotations

import torch

from tests.zoo.architecture import LENGTH, SIDE, WORDS, Architecture, classes, floats
from tests.zoo.hugging_face import (
    ENCODER,
    VISION,
    Batch,
    captions,
    hugging,
    image_class,
    mask,
    pairs,
    rows_of,
    segments,
    with_loss,
)

STAGES = dict(image_size=SIDE, depths=[1, 1], num_channels=3)
TEXT = {**ENCODER, "bos_token_id": 1, "eos_token_id": 2}
BOTH = dict(text_config=TEXT, vision_config=VISION, projection_dim=16)


def depths(number: int) -> Batch:
    """A question about an image."""
    return pairs(number) | {
        "labels": floats(number, 5).sigmoid(),
        "pixel_mask": torch.ones(2, SIDE, SIDE).long(),
    }


def pages(number: int) -> Batch:
    """Words and where they stand."""
    return {
        "input_ids": classes(number, WORDS, LENGTH),
        "bbox": torch.arange(4).expand(2, LENGTH, 4) * 7,
        "attention_mask": mask(number),
        "labels": classes(number, 2, LENGTH),
    }


_AS_THEY_ARE = rows_of(
    vit=hugging("ViTForImageClassification", image_class, **VISION),
    deit=hugging("DeiTForImageClassification", image_class, **VISION),
    beit=hugging("BeitForImageClassification", image_class, **VISION),
    dinov2=hugging("Dinov2ForImageClassification", image_class, **VISION),
    swin=hugging(
        "SwinForImageClassification",
        image_class,
        embed_dim=16,
        num_heads=[2, 4],
        window_size=4,
        patch_size=2,
        **STAGES,
    ),
    swin_v2=hugging(
        "Swinv2ForImageClassification",
        image_class,
        embed_dim=16,
        num_heads=[2, 4],
        window_size=4,
        patch_size=2,
        **STAGES,
    ),
    convnext=hugging(
        "ConvNextForImageClassification",
        image_class,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_stages=2,
    ),
    resnet_of_hugging_face=hugging(
        "ResNetForImageClassification",
        image_class,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
    ),
    regnet=hugging(
        "RegNetForImageClassification",
        image_class,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        groups_width=4,
    ),
    mobilenet_v2=hugging(
        "MobileNetV2ForImageClassification",
        image_class,
        image_size=SIDE,
        depth_multiplier=0.25,
    ),
    mobilevit=hugging(
        "MobileViTForImageClassification",
        image_class,
        image_size=SIDE,
        hidden_sizes=[16, 16, 16],
        neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 16],
        num_attention_heads=2,
    ),
    poolformer=hugging(
        "PoolFormerForImageClassification",
        image_class,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
    ),
    pvt=hugging(
        "PvtForImageClassification",
        image_class,
        image_size=SIDE,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
    ),
    segformer=hugging(
        "SegformerForSemanticSegmentation",
        segments,
        hidden_sizes=[16, 16, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
    ),
    video_mae=hugging(
        "VideoMAEForVideoClassification",
        lambda n: {"pixel_values": floats(n, 4, 3, SIDE, SIDE), "labels": classes(n, 2)},
        num_frames=4,
        tubelet_size=2,
        **VISION,
    ),
    clip=hugging("CLIPModel", with_loss, **BOTH),
    siglip=hugging(
        "SiglipModel",
        with_loss,
        text_config=TEXT | {"projection_size": 32},
        vision_config=VISION,
    ),
    vision_and_text_dual_encoder=hugging("ChineseCLIPModel", with_loss, **BOTH),
    blip=hugging(
        "BlipForConditionalGeneration",
        captions,
        text_config=TEXT | {"encoder_hidden_size": 32},
        vision_config=VISION,
        projection_dim=16,
    ),
    layoutlm=hugging(
        "LayoutLMForTokenClassification", pages, max_2d_position_embeddings=64, **ENCODER
    ),
)
VISION_MODELS = (
    *_AS_THEY_ARE,
    Architecture(
        "efficientnet",
        hugging(
            "EfficientNetForImageClassification",
            image_class,
            image_size=SIDE,
            width_coefficient=0.25,
            depth_coefficient=0.3,
            hidden_dim=320,
        ),
        reason="the sum over the micro-batches is divided by their number, in the plain loop each"
        " loss is: numbers below 1e-38 are rounded otherwise",
    ),
    Architecture(
        "vilt answers questions",
        hugging("ViltForQuestionAnswering", depths, num_labels=5, **(ENCODER | VISION)),
        draws=True,
    ),
)
