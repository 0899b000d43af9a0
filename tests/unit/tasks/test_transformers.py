"""A folder of Hugging Face as a task, and what was trained as a folder again, without network."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeplan.errors import InputError
from pipeplan.launch.train import what_is_next
from pipeplan.nested import loss_in
from pipeplan.task import Task, load
from pipeplan.tasks import save_pretrained, transformers

library = pytest.importorskip("transformers")
WORDS, LENGTH = 40, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two blocks with weights of its own, a tokenizer of words, a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    place = tmp_path_factory.mktemp("hugging") / "folder"
    torch.manual_seed(4)
    config = library.LlamaConfig(
        vocab_size=WORDS + 1,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    library.LlamaForCausalLM(config).save_pretrained(place)
    words = {"[UNK]": 0} | {f"w{number}": number for number in range(1, WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = library.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    fast.save_pretrained(place)
    text = " ".join(f"w{number * number % WORDS}" for number in range(60))
    (place / "text.txt").write_text(text, encoding="utf-8")
    np.save(place / "ids.npy", np.array([number * number % WORDS for number in range(60)]))
    return place


def made(folder: Path, **words: object) -> Task:
    """The task by its name, as the command line makes it."""
    given = {"name_or_folder": str(folder), "sequence": LENGTH, "batch": 2} | words
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return load(f"pipeplan.tasks:transformers({arguments})", seed=7)


def test_the_model_is_theirs(folder: Path) -> None:
    """Their weights, in training mode; their loss of windows of the text by number."""
    task = made(folder, data=str(folder / "text.txt"))
    theirs = library.AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(task.model, torch.nn.Module)
    assert task.model.training
    assert task.loss is None
    mine = task.model.state_dict()
    assert all(torch.equal(mine[name], value) for name, value in theirs.state_dict().items())
    inputs, target = task.microbatch(3)
    assert target is None
    assert inputs["input_ids"].shape == (2, LENGTH)
    assert torch.equal(loss_in(task.model(**inputs)), theirs(**inputs).loss)
    ids = np.load(folder / "ids.npy")
    windows = {tuple(ids[start : start + LENGTH]) for start in range(len(ids) - LENGTH + 1)}
    assert all(tuple(row) in windows for row in inputs["input_ids"].tolist())


def test_ids_are_the_tokenized_text(folder: Path) -> None:
    """A .npy file of them gives the same micro-batches; so does the same number, always."""
    text, ids = (made(folder, data=str(folder / name)) for name in ("text.txt", "ids.npy"))
    for number in (0, 5):
        one, other = text.microbatch(number)[0], ids.microbatch(number)[0]
        assert torch.equal(one["labels"], other["labels"])
    assert not torch.equal(text.microbatch(0)[0]["labels"], text.microbatch(1)[0]["labels"])


def test_what_was_trained_is_theirs_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`from_pretrained` reads the weights of a run, beside the tokenizer.

    They are written by the command that `launch` tells when the run has ended.
    """
    task = made(folder)
    assert isinstance(task.model, torch.nn.Module)
    optimizer = task.optimizer(task.model.parameters())
    inputs, _ = task.microbatch(0)
    task.model(**inputs).loss.backward()
    optimizer.step()
    trained = task.model.state_dict()
    torch.save(trained, tmp_path / "model.pt")
    arguments = f"name_or_folder={str(folder)!r}, head='CausalLM'"
    told = what_is_next(f"pipeplan.tasks:transformers({arguments})", tmp_path)
    python, flag, code = shlex.split(told.rpartition("for from_pretrained: ")[2])
    assert (python, flag) == ("python", "-c")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert "from_pretrained" not in what_is_next("train.py:task", tmp_path)
    found = library.AutoModelForCausalLM.from_pretrained(tmp_path / "trained").state_dict()
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], value) for name, value in trained.items())
    assert library.AutoTokenizer.from_pretrained(tmp_path / "trained")("w3")["input_ids"] == [3]
    before = library.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert not torch.equal(before["model.norm.weight"], found["model.norm.weight"])


def learned(tmp_path: Path) -> str:
    """A GPT-2 of 16 places."""
    config = library.GPT2Config(
        vocab_size=WORDS + 1, n_positions=16, n_embd=8, n_layer=1, n_head=1
    )
    library.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    return str(tmp_path / "gpt2")


def test_positions_that_are_computed_are_no_limit(tmp_path: Path, folder: Path) -> None:
    """Rotary ones; a learned table's rows are, less those that stand for no position."""
    config = library.LlamaConfig.from_pretrained(folder)
    config.max_position_embeddings = LENGTH
    library.LlamaForCausalLM(config).save_pretrained(tmp_path / "short")
    task = made(tmp_path / "short", sequence=2 * LENGTH)
    assert isinstance(task.model, torch.nn.Module)
    assert loss_in(task.model(**task.microbatch(0)[0])).isfinite()
    config = library.RobertaConfig(
        vocab_size=WORDS + 1,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=18,
        is_decoder=True,
    )
    library.RobertaForCausalLM(config).save_pretrained(tmp_path / "roberta")
    task = made(tmp_path / "roberta", sequence=16)
    assert isinstance(task.model, torch.nn.Module)
    task.model(**task.microbatch(0)[0])
    with pytest.raises(InputError, match="got 17, need at most 16"):
        made(tmp_path / "roberta", sequence=17)


def empty_tokens(folder: Path) -> str:
    """A model whose family has a tokenizer that needs no file: it knows no word."""
    config = library.GPTNeoXConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    library.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "neox")
    return str(folder / "neox")


def test_what_is_wrong_is_told(folder: Path, tmp_path: Path) -> None:
    """Another head or model, a file that is missing, too short, or of another tokenizer."""
    np.save(tmp_path / "other.npy", np.arange(200))
    np.save(tmp_path / "floats.npy", np.arange(60.0))
    np.save(tmp_path / "rows.npy", np.arange(60).reshape(6, 10) % WORDS)
    text, bare = str(folder / "text.txt"), tmp_path / "bare"
    library.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(bare)
    for words, message in (
        ({"head": "Casual"}, "got head 'Casual', need one of AutoModelFor"),
        ({"data": str(tmp_path / "none.txt")}, r"none.txt: cannot be read: .*Check the path"),
        ({"data": str(folder / "text.txt"), "sequence": 99}, "got 60 tokens, need 99"),
        ({"data": str(tmp_path / "other.npy")}, f"got ids 0 to 199, need 0 to {WORDS}, .*"),
        ({"dtype": "float31"}, "got dtype 'float31', need one of torch"),
        ({"dtype": "nn"}, "got dtype 'nn', need one of torch"),
        ({"batch": 0}, "batch: got 0, need at least 1"),
        ({"name_or_folder": learned(tmp_path), "sequence": 17}, "got 17, need at most 16: .*"),
        ({"data": str(tmp_path / "floats.npy")}, "got float64 of shape .60,., need whole numbers"),
        ({"data": str(tmp_path / "rows.npy")}, "got int64 of shape .6, 10., need .* in one row"),
        ({"name_or_folder": str(bare), "data": text}, f"a text, and {bare} has no tokenizer"),
        ({"name_or_folder": empty_tokens(tmp_path), "data": text}, "got no tokens of 206 char"),
    ):
        with pytest.raises(InputError, match=message):
            made(folder, **words)
    with pytest.raises(InputError, match="need a function of the micro-batch's number"):
        transformers(str(folder), head="MaskedLM", data="text.txt")
    with pytest.raises(InputError, match=r"model\.pt: got no file"):
        save_pretrained(tmp_path, str(folder), tmp_path / "trained")
    torch.save({"weight": torch.zeros(1)}, tmp_path / "model.pt")
    with pytest.raises(InputError, match="is not of"):
        save_pretrained(tmp_path, str(folder), tmp_path / "trained")


def test_a_folder_that_holds_files_stays(folder: Path, tmp_path: Path) -> None:
    """As the folder that the model came from; unless `force` says so."""
    trained = library.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    torch.save(trained, tmp_path / "model.pt")
    (tmp_path / "mine").mkdir()
    save_pretrained(tmp_path, str(folder), tmp_path / "mine")
    with pytest.raises(InputError, match=r"mine: holds files already\. .*force=True"):
        save_pretrained(tmp_path, str(folder), tmp_path / "mine")
    save_pretrained(tmp_path, str(folder), tmp_path / "mine", force=True)
    with pytest.raises(InputError, match=r"model\.pt: got a file, need a folder"):
        save_pretrained(tmp_path, str(folder), tmp_path / "model.pt", force=True)
