"""Preference losses equal TRL's on the same models and rows."""

import dataclasses
import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from text_cases import CONFIG, published_folder, small_model

from eqformer import data, models, training


BETA, SEQ = 0.3, 40
ROWS = [{"prompt": f"Why {i}? ", "chosen": f"Because {i * 7}.", "rejected": f"No {i} idea"} for i in range(4)]
LABELLED = [{"prompt": f"Why {i}? ", "completion": f"Be{'cause' * i}.", "label": i % 3 == 0} for i in range(4)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("trl")
    published_folder(place / "model")
    tokenizer = data.tokenizer_files(data.ByteTokenizer(), max_length=64)
    models.save(small_model(1), place / "reference", config=CONFIG, files=tokenizer)
    return place


def trainer_of(trainer: Any, config: Any, folders, rows, **options) -> Any:
    """A trainer of TRL with the two models."""
    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer  # type: ignore[import-not-found]

    tokenizer = AutoTokenizer.from_pretrained(folders / "model")
    tokenizer.pad_token = tokenizer.eos_token
    model, reference = (AutoModelForCausalLM.from_pretrained(folders / name) for name in ("model", "reference"))
    settings = {"report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    args = config(
        output_dir=str(folders / "out"), beta=BETA, per_device_train_batch_size=len(rows), **settings, **options
    )
    return trainer(
        model=model, ref_model=reference, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )


def trl_loss(trainer: Any) -> float:
    """The loss of the first batch."""
    batch = next(iter(trainer.get_train_dataloader()))
    return float(trainer.compute_loss(trainer.model, batch))


def with_reference(batch: Any) -> Any:
    return dataclasses.replace(batch, reference_nats=np.asarray(training.row_nats(small_model(1), batch)))


def mean_loss(name: Any, batch: Any) -> float:
    total, count = training.preference_loss(name, beta=BETA)(small_model(), batch)
    return float(total) / float(training.loss_count(count))


def pairs() -> Any:
    encoder = data.ConversationEncoder(data.ByteTokenizer(), None)
    encode = lambda row: encoder.encode(data.read_example(row, location="row")[1])
    rows = [data.split_preference(row, location="row") for row in ROWS]
    return with_reference(
        data.batch_preferences([(encode(chosen), encode(rejected)) for chosen, rejected in rows], seq=SEQ)
    )


@pytest.mark.hf
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("ours, theirs", [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_losses_of_pairs(ours, theirs, folders, trl):
    found = mean_loss(ours, pairs())
    assert found == pytest.approx(
        trl_loss(trainer_of(trl.DPOTrainer, trl.DPOConfig, folders, ROWS, loss_type=[theirs])), rel=1e-4
    )
    swapped = dataclasses.replace(pairs(), reference_nats=pairs().reference_nats[::-1])
    assert mean_loss(ours, swapped) != pytest.approx(found, rel=1e-3)  # the control


@pytest.mark.hf
@pytest.mark.filterwarnings("default")
def test_kto(folders, trl):
    trainer = trainer_of(trl.KTOTrainer, trl.KTOConfig, folders, LABELLED, train_sampling_strategy="sequential")
    encoder = data.ConversationEncoder(data.ByteTokenizer(), None)
    encode = lambda prompt, text: encoder.encode(data.PromptCompletion(prompt, text))
    examples = [encode(row["prompt"], row["completion"]) for row in LABELLED]
    batch = with_reference(data.batch_labelled(examples, [row["label"] for row in LABELLED], seq=SEQ))
    # TRL estimates the reference point from each prompt with the completion of the row before it.
    others = [encode(row["prompt"], LABELLED[number - 1]["completion"]) for number, row in enumerate(LABELLED)]
    mismatched: Any = with_reference(data.batch_labelled(others, [True] * 4, seq=SEQ))
    baseline = training.kto_baseline(training.row_nats(small_model(), mismatched), mismatched.reference_nats)
    batch = dataclasses.replace(batch, baseline=np.full(4, float(baseline), np.float32))
    expected = trl_loss(trainer)
    assert mean_loss("kto", batch) == pytest.approx(expected, rel=1e-4)
    other = dataclasses.replace(batch, labels=1 - np.asarray(batch.labels))
    assert mean_loss("kto", other) != pytest.approx(expected, rel=1e-3)  # the control


@pytest.mark.hf
@pytest.mark.filterwarnings("default")
def test_the_odds_ratio_of_orpo(folders, trl):
    """TRL's loss also has the nats of the prompts; the part of the odds ratio is compared."""
    import torch  # type: ignore[import-not-found]

    orpo = importlib.import_module("trl.experimental.orpo.orpo_trainer").ORPOTrainer
    batch = pairs()
    means = -np.asarray(training.row_nats(small_model(), batch)) / batch.weights.sum(-1)
    stub = SimpleNamespace(beta=BETA, accelerator=SimpleNamespace(device="cpu"))
    losses, *_ = orpo.odds_ratio_loss(stub, torch.tensor(means[::2]), torch.tensor(means[1::2]))
    expected = float(np.mean(-means[::2])) - float(losses.mean())
    assert mean_loss("orpo", batch) == pytest.approx(expected, rel=1e-5)
