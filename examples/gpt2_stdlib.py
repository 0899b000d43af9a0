"""The demo's task: a small GPT-2 learns to write Python, byte by byte.

The text is the source code of the running Python's own standard library, so nothing is downloaded.
Name it as `examples/gpt2_stdlib.py:task`, or `:tied` for the variant with shared embeddings.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from pipeplan.task import Task, task_function

VOCABULARY = 256
"""Every byte is a token."""
WINDOW = 128
"""Bytes of context."""
ROWS = 2
"""Windows in one micro-batch."""


@task_function
def task(seed: int = 0, *, tied: bool = False) -> Task:
    """GPT-2 with 8 blocks, dropout 0.1, trained with AdamW.

    The head is not tied to the embedding: a tied weight sits in the first and last layer, which
    then must share one GPU, and that leaves the planner few choices. `tied` shows that case.
    """
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=WINDOW,
        n_embd=128,
        n_layer=8,
        n_head=4,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )
    text = standard_library()

    def data(microbatch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + microbatch)
        starts = torch.randint(len(text) - WINDOW, (ROWS,), generator=generator)
        windows = torch.stack([text[start : start + WINDOW + 1] for start in starts.tolist()])
        return windows[:, :-1].long(), windows[:, 1:].long()

    return Task(
        model=GPT2LMHeadModel(config).train(),
        loss=next_byte_loss,
        # 2bw gradients are one step old; AdamW stands that at a modest rate and short memory.
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95)),
        data=data,
        unit="token",
        units_per_microbatch=ROWS * WINDOW,
    )


@task_function
def tied(seed: int = 0) -> Task:
    """The same with the head's weight tied to the embedding, as GPT-2 has it."""
    return task(seed, tied=True)


def next_byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of the next byte, in nats."""
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def standard_library() -> Tensor:
    """The top-level source files of the standard library in a row, as bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise FileNotFoundError(f"no Python source files in {folder}")
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)
