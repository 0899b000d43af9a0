"""Decoder-only Hugging Face models as a row of layers: embedding, blocks, norm with head.

Models are known by their attributes, so transformers is imported by the user's task or not at
all. A model that has the attributes and computes something else (scaled embeddings, a window) is
refused by `check_equal`, never trained wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeplan.errors import InputError

GPT2_FORM = "transformer.wte, .wpe, .drop, .h, .ln_f; lm_head"
LLAMA_FORM = "model.embed_tokens, .layers, .norm, .rotary_emb; lm_head"


def is_decoder(model: nn.Module) -> bool:
    """Whether `model` has the attributes of a form that `decoder_layers` can cut."""
    return _has(model, GPT2_FORM) or _has(model, LLAMA_FORM)


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a decoder by name: `embedding`, `block0`.., `head`.

    Raises:
        InputError: if its attention needs a mask tensor (any but `sdpa` may).
    """
    attention = getattr(getattr(model, "config", None), "_attn_implementation", "sdpa")
    if attention != "sdpa":
        raise InputError(
            f"task: model {type(model).__name__}: got attention {attention!r}, need 'sdpa', which"
            " masks by itself. Build the model with attn_implementation='sdpa'."
        )
    part = model.get_submodule
    embedding: nn.Module
    blocks: list[nn.Module]
    if _has(model, GPT2_FORM):
        embedding = _GptEmbedding(
            part("transformer.wte"), part("transformer.wpe"), part("transformer.drop")
        )
        blocks = [_Block(block) for block in part("transformer.h").children()]
        norm = part("transformer.ln_f")
    else:
        embedding = _Embedding(part("model.embed_tokens"))
        rotary = part("model.rotary_emb")
        blocks = [_RotaryBlock(block, rotary) for block in part("model.layers").children()]
        norm = part("model.norm")
    if not blocks:
        raise InputError(f"task: model {type(model).__name__}: got no blocks, need at least one")
    named = {f"block{index}": block for index, block in enumerate(blocks)}
    return {"embedding": embedding, **named, "head": _Head(norm, part("lm_head"))}


def check_equal(model: nn.Module, layers: Sequence[nn.Module], source: Tensor) -> None:
    """Proves on one micro-batch that `layers` in a row compute what `model` computes, bit for bit.

    Raises:
        InputError: if the outputs differ, or the model does not take this input.
    """
    try:
        with torch.no_grad():
            torch.manual_seed(0)
            whole = model(source, use_cache=False).logits
            torch.manual_seed(0)
            value = source
            for layer in layers:
                value = layer(value)
    except Exception as error:
        raise InputError(
            f"task: model {type(model).__name__}: forward of data(0) failed:"
            f" {type(error).__name__}: {error}"
        ) from error
    if not torch.equal(whole, value):
        raise InputError(
            f"task: model {type(model).__name__}: its layers in a row do not compute what the"
            " model computes (it scales, masks or caches in a way of its own)."
            " Give the model as a Python list of layers instead."
        )


def _has(model: nn.Module, form: str) -> bool:
    """Whether `model` has every attribute of `form`: `body.a, .b; head`."""
    body, head = form.split("; ")
    first, *rest = body.split(", ")
    names = [first, *(first.split(".")[0] + name for name in rest), head]
    modules = dict(model.named_modules(remove_duplicate=False))
    return all(name in modules for name in names)


def _positions(value: Tensor) -> Tensor:
    return torch.arange(value.shape[1], device=value.device).unsqueeze(0)


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Blocks of older transformers return a tuple whose first entry is the hidden state."""
    return result[0] if isinstance(result, tuple) else result


class _GptEmbedding(nn.Module):
    def __init__(self, tokens: nn.Module, positions: nn.Module, drop: nn.Module) -> None:
        super().__init__()
        self.tokens, self.positions, self.drop = tokens, positions, drop

    def forward(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(ids)
        dropped: Tensor = self.drop(embedded + self.positions(_positions(embedded)))
        return dropped


class _Embedding(nn.Module):
    def __init__(self, tokens: nn.Module) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(ids)
        return embedded


class _Block(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor) -> Tensor:
        return _first(self.block(hidden, attention_mask=None, use_cache=False))


class _RotaryBlock(nn.Module):
    """A block with its rotary tables: cheaper to compute in each layer than to send along."""

    def __init__(self, block: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.block, self.rotary = block, rotary

    def forward(self, hidden: Tensor) -> Tensor:
        positions = _positions(hidden)
        return _first(
            self.block(
                hidden,
                attention_mask=None,
                position_ids=positions,
                position_embeddings=self.rotary(hidden, positions),
                use_cache=False,
            )
        )


class _Head(nn.Module):
    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(hidden))
        return logits
