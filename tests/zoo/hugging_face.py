"""Models of Hugging Face from small configurations, with their own losses and batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pipeplan.task import Task
from tests.zoo.architecture import (
    LENGTH,
    SIDE,
    WORDS,
    Architecture,
    Make,
    classes,
    floats,
    mask,
    sgd,
)

Batch = dict[str, Tensor]


def hugging(
    kind: str,
    batch: Callable[[int], Any],
    *,
    loss: Callable[..., Tensor] | None = None,
    chance: bool = False,
    **config: Any,
) -> Make:
    """The task of a class of models, without caches and random numbers (dropout).

    Args:
        kind: name of the class.
        batch: number -> what the model is called with, labels included.
        loss: of what the model returns and labels, which the model is not called with; None:
            the model's own.
        chance: leave random numbers as they are; `dtype` and `attn_implementation` are not the
            configuration's.
        config: what differs from its defaults.
    """

    def make() -> Task:
        import transformers as library

        made = getattr(library, kind)
        options = {k: config[k] for k in ("attn_implementation", "dtype") if k in config}
        words = {name: value for name, value in config.items() if name not in options}
        asked = made.config_class(**words)
        if hasattr(asked, "use_cache"):
            asked.use_cache = False
        if not chance:
            without_chance(asked)
        model = made._from_config(asked, **options)
        data = batch if loss is None else lambda number: parted(batch(number))
        return Task(model=model.train(), loss=loss, optimizer=sgd, data=data)

    return make


def parted(batch: Batch) -> tuple[Batch, Tensor]:
    """What the model is called with, and labels."""
    return {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]


def without_chance(config: Any) -> None:
    """No dropout, no dropped paths or layers, here and in configurations inside."""
    import transformers as library

    for name, value in list(vars(config).items()):
        if isinstance(value, library.PreTrainedConfig):
            without_chance(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def causal(number: int) -> Batch:
    """Ids, mask and labels, where padding is not judged."""
    ids, here = classes(number, WORDS, LENGTH), mask(number)
    return {"input_ids": ids, "attention_mask": here, "labels": ids.where(here == 1, -100)}


def plain_causal(number: int) -> Batch:
    """Without a mask."""
    ids = classes(number, WORDS, LENGTH)
    return {"input_ids": ids, "labels": ids}


def encoded(number: int) -> Any:
    """A batch as a tokenizer returns it."""
    from transformers import BatchEncoding

    return BatchEncoding(causal(number))


def text_class(number: int) -> Batch:
    """One class per text."""
    return {
        "input_ids": classes(number, WORDS - 4, LENGTH) + 4,
        "attention_mask": mask(number),
        "labels": classes(number + 9, 2),
    }


def token_classes(number: int) -> Batch:
    """One class per word."""
    return text_class(number) | {"labels": classes(number + 9, 2, LENGTH)}


def spans(number: int) -> Batch:
    """Where answers begin and end."""
    found = text_class(number)
    del found["labels"]
    begin = classes(number, LENGTH // 2)
    return found | {"start_positions": begin, "end_positions": begin + 2}


def translation(number: int) -> Batch:
    """Source with padding, target."""
    found = text_class(number)
    return found | {"labels": classes(number + 9, WORDS - 4, LENGTH - 3) + 4}


def image_class(number: int) -> Batch:
    """One class per image."""
    return {"pixel_values": floats(number, 3, SIDE, SIDE), "labels": classes(number, 2)}


def segments(number: int) -> Batch:
    """One class per pixel of larger images."""
    side = 2 * SIDE
    return {
        "pixel_values": floats(number, 3, side, side),
        "labels": classes(number, 2, side, side),
    }


def pairs(number: int) -> Batch:
    """Images and their texts."""
    return {
        "input_ids": classes(number, WORDS - 4, LENGTH) + 4,
        "attention_mask": mask(number),
        "pixel_values": floats(number, 3, SIDE, SIDE),
    }


def captions(number: int) -> Batch:
    """Images and texts that are learned."""
    found = pairs(number)
    return found | {"labels": found["input_ids"]}


def with_loss(number: int) -> Any:
    """Images and texts, and the plain argument that asks for a loss."""
    return pairs(number) | {"return_loss": True}


def speech(number: int) -> Batch:
    """Waves and letters."""
    return {"input_values": floats(number, 800), "labels": classes(number, 20, 3) + 4}


def spoken(number: int) -> Batch:
    """Spectra and words."""
    return {"input_features": floats(number, 16, 40), "labels": classes(number, WORDS - 4, 6) + 4}


SMALL = dict(vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=3)
DECODER = SMALL | dict(num_attention_heads=4, max_position_embeddings=32, pad_token_id=0)
GROUPED = DECODER | dict(num_key_value_heads=2)
ENCODER = DECODER | dict(type_vocab_size=2)
GPT = dict(vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=3, n_head=4)
BOTH_WAYS = dict(
    vocab_size=WORDS,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=2,
)
VISION = dict(
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=48,
    image_size=SIDE,
    patch_size=8,
)


def rows_of(**made: Make | tuple[Make, str, Make]) -> tuple[Architecture, ...]:
    """One architecture for each name (underscores are blanks), with its setting if it has one."""
    return tuple(
        Architecture(
            name.replace("__", "-").replace("_", " "), *(each if type(each) is tuple else (each,))
        )
        for name, each in made.items()
    )
