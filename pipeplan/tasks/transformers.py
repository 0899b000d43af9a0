"""A Hugging Face model with the loss that it computes itself, and back to a folder of theirs.

The package transformers is looked at only when a task is made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeplan.errors import InputError
from pipeplan.task import Task, task_function
from pipeplan.taskref import error_line
from pipeplan.tasks.data import generator, tokens
from pipeplan.tasks.training import adamw

MicroBatches = Callable[[int], Any]
"""Micro-batch number -> what the model is called with, `labels` among it."""


@task_function
def transformers(
    name_or_folder: str,
    *,
    data: str | MicroBatches | None = None,
    head: str = "CausalLM",
    batch: int = 1,
    sequence: int = 128,
    rate: float = 5e-5,
    dtype: str = "float32",
    seed: int = 0,
) -> Task:
    """A model of Hugging Face with its weights and the loss of its own, trained with AdamW.

    Args:
        name_or_folder: what `from_pretrained` takes.
        data: of a causal language model, a text that the folder's tokenizer reads, or a .npy file
            of token ids in a row: micro-batches are windows at random places. None: sequences
            that can be learned. Of any model, from Python: number -> its named arguments.
        head: as in `AutoModelForCausalLM`: CausalLM, MaskedLM, SequenceClassification, ..
        batch: windows in one micro-batch.
        sequence: tokens in one window.
        rate: of AdamW.
        dtype: of the weights, such as bfloat16.
        seed: of the windows.

    Raises:
        InputError: if there is no such model, head or dtype, the model has no place for so many
            tokens, or the data are not for it.
    """
    made, kind = _auto(head), _dtype(dtype)
    for name, value in (("batch", batch), ("sequence", sequence)):
        if value < 1:
            raise InputError(f"transformers: {name}: got {value}, need at least 1")
    if not callable(data) and head != "CausalLM":
        raise InputError(
            f"transformers: head {head}: got data {data!r}, need a function of the micro-batch's"
            " number, from Python: texts and ids are for CausalLM"
        )
    try:
        model = made.from_pretrained(name_or_folder, dtype=kind)
    except OSError as error:
        if Path(name_or_folder).is_dir():
            raise
        raise InputError(
            f"transformers: got {name_or_folder!r}, need a folder (there is none of that name in"
            f" {Path.cwd()}) or a name of the hub: {error_line(error)}"
        ) from error
    model.config.use_cache = False  # nothing is generated
    own = callable(data)
    if not callable(data):
        if (places := _positions(model)) is not None and places < sequence:
            raise InputError(
                f"transformers: sequence: got {sequence}, need at most {places}: the model has"
                " learned no more positions"
            )
        vocabulary = model.get_input_embeddings().num_embeddings
        data = _windows(name_or_folder, data, batch, sequence, vocabulary, seed)
    return Task(
        model=model.train(),
        loss=None,
        optimizer=adamw(rate),
        data=data,
        unit="sample" if own else "token",
        units_per_microbatch=None if own else batch * sequence,
    )


def save_pretrained(
    run: str | Path,
    name_or_folder: str,
    to: str | Path,
    *,
    head: str = "CausalLM",
    force: bool = False,
) -> None:
    """Write what a run has trained as a folder that `from_pretrained` reads.

    Args:
        run: the folder of `launch --out`, whose model.pt has the newest weights.
        name_or_folder: what the task was made from; its tokenizer goes along, if it has one.
        to: a folder, made if needed.
        head: as the task's.
        force: whether a folder that holds something is written into.

    Raises:
        InputError: if there is no model.pt, it is that of another model, or the folder is not
            empty.
    """
    from transformers import AutoConfig, AutoTokenizer

    if Path(to).exists() and not Path(to).is_dir():
        raise InputError(f"save_pretrained: {to}: got a file, need a folder")
    if not force and Path(to).is_dir() and any(Path(to).iterdir()):
        raise InputError(
            f"save_pretrained: {to}: holds files already. Choose another folder, or give"
            " force=True"
        )

    file = Path(run) / "model.pt"
    if not file.is_file():
        raise InputError(
            f"save_pretrained: {file}: got no file, need the --out folder of a run that has ended"
            " well; one that has not goes on with launch --resume"
        )
    weights = torch.load(file, weights_only=True)
    config = AutoConfig.from_pretrained(name_or_folder)
    dtypes = [value.dtype for value in weights.values() if value.is_floating_point()]
    model = _auto(head).from_config(config, dtype=dtypes[0] if dtypes else torch.float32)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        told = " ".join(str(error).split())
        raise InputError(
            f"save_pretrained: {file}: is not of {name_or_folder}: {told[:200]}.. Give the model"
            " that the run's task was made of"
        ) from None
    model.save_pretrained(to)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_folder)
    except (OSError, ValueError, KeyError):
        return  # a folder of weights alone
    tokenizer.save_pretrained(to)


def _auto(head: str) -> Any:
    """The class that makes models with this head."""
    import transformers as library

    found = getattr(library, f"AutoModelFor{head}", None)
    if found is None:
        raise InputError(
            f"transformers: got head {head!r}, need one of AutoModelFor..: CausalLM, MaskedLM,"
            " SequenceClassification, .."
        )
    return found


def _positions(model: torch.nn.Module) -> int | None:
    """Rows of its table of learned positions; None where it computes them (rotary, ALiBi)."""
    for name, module in model.named_modules():
        word = name.rpartition(".")[2]
        if isinstance(module, torch.nn.Embedding) and (word == "wpe" or "position" in word):
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - int(getattr(module, "offset", first))
    return None


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise InputError(
            f"transformers: got dtype {name!r}, need one of torch: float32, bfloat16, .."
        )
    return found


def _windows(
    folder: str, data: str | None, batch: int, sequence: int, vocabulary: int, seed: int
) -> MicroBatches:
    """Windows of `data` by number, each its own labels: the model shifts them."""
    learned = tokens(seed, batch, sequence, vocabulary)
    ids = None if data is None else _ids(data, folder, sequence, vocabulary)

    def drawn(microbatch: int) -> dict[str, Tensor]:
        if ids is None:
            rows, _ = learned(microbatch)
        else:
            places = len(ids) - sequence + 1
            source = generator(seed, microbatch)
            starts = torch.randint(places, (batch,), generator=source).tolist()
            rows = torch.stack([ids[start : start + sequence] for start in starts])
        return {"input_ids": rows, "labels": rows}

    return drawn


def _ids(data: str, folder: str, sequence: int, vocabulary: int) -> Tensor:
    """Token ids in a row.

    Raises:
        InputError: if the file cannot be read, is too short, or has ids that the model has not.
    """
    where = f"transformers: data {data}"
    try:
        found = np.load(data) if data.endswith(".npy") else Path(data).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(
            f"{where}: cannot be read: {error}. Check the path: a text in UTF-8, or token ids in a"
            " .npy file"
        ) from None
    if isinstance(found, str):
        ids = torch.tensor(_tokenized(found, folder, where))
    elif found.ndim == 1 and np.issubdtype(found.dtype, np.integer):
        ids = torch.from_numpy(found.astype(np.int64))
    else:
        raise InputError(
            f"{where}: got {found.dtype} of shape {found.shape}, need whole numbers in one row"
        )
    if len(ids) < sequence:
        raise InputError(
            f"{where}: got {len(ids)} tokens, need {sequence}: give a shorter sequence"
        )
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise InputError(
            f"{where}: got ids {ids.min()} to {ids.max()}, need 0 to {vocabulary - 1}, those of"
            f" the model in {folder}: tokenize with its tokenizer"
        )
    return ids


def _tokenized(text: str, folder: str, where: str) -> list[int]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{where}: is a text, and {folder} has no tokenizer that can be loaded:"
            f" {error_line(error)}. Save its tokenizer there, or give token ids in a .npy file"
        ) from None
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if text.strip() and not found:  # what transformers makes of a folder without one
        raise InputError(
            f"{where}: got no tokens of {len(text)} characters: {folder} has no tokenizer of its"
            " own. Save it there with tokenizer.save_pretrained, or give token ids in a .npy file"
        )
    return found
