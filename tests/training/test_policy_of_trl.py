"""Policy losses equal TRL's on the same model and batch."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from text_cases import published_folder, small_model

from eqformer import PolicyBatch, training


ROWS, PROMPT, NEW = 6, 7, 9
LENGTHS = np.array([3, 9, 6, 1, 8, 4])
REWARDS = [1.0, 0.0, 0.25, 2.0, 2.0, 2.0]
# The name here, TRL's loss and ratio, and other settings of both.
CASES = [
    ("grpo", "grpo", "token", {"beta": 0.1}),
    ("grpo", "grpo", "token", {"beta": 0.1, "unbiased_kl": False}),
    ("grpo", "grpo", "token", {"temperature": 0.7}),
    ("dapo", "dapo", "token", {}),
    ("dr_grpo", "dr_grpo", "token", {}),
    ("gspo", "grpo", "sequence", {"clip_low": 0.01, "clip_high": 0.02}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return published_folder(tmp_path_factory.mktemp("trl") / "model")


def rows_of_ids() -> tuple[np.ndarray, np.ndarray]:
    """Prompts of one length and completions, whose padding is 0."""
    rng = np.random.default_rng(0)
    prompts, completions = rng.integers(1, 256, (ROWS, PROMPT)), rng.integers(1, 256, (ROWS, NEW))
    return prompts, np.where(np.arange(NEW) < LENGTHS[:, None], completions, 0)


def batch_of(old: np.ndarray, reference: np.ndarray) -> PolicyBatch:
    """The rows as a batch; the log-probabilities are those of the completions' tokens."""
    ids = np.concatenate(rows_of_ids(), axis=1).astype(np.int32)
    seq = ids.shape[1] - 1
    columns = np.arange(seq) - (PROMPT - 1)
    weights = ((columns >= 0) & (columns < LENGTHS[:, None])).astype(np.float32)
    before = np.zeros((ROWS, PROMPT - 1), np.float32)
    return PolicyBatch(
        ids[:, :-1],
        ids[:, 1:],
        weights,
        np.arange(ROWS, dtype=np.int32),
        advantages=training.group_advantages(REWARDS, 3).advantages,
        old_log_probs=np.concatenate([before, old], axis=1),
        reference_log_probs=np.concatenate([before, reference], axis=1),
    )


def known_log_probs() -> list[np.ndarray]:
    """Log-probabilities of completions, near those of the model."""
    zeros = np.zeros((ROWS, NEW), np.float32)
    own = np.asarray(training.token_log_probs(small_model(), batch_of(zeros, zeros)))[:, PROMPT - 1 :]
    rng = np.random.default_rng(2)
    return [own + rng.normal(0, 0.2, own.shape).astype(np.float32) for _ in range(2)]


def trainer_of(trl: Any, folder: Any, loss: str, ratio: str, settings: dict[str, Any]) -> Any:
    """A trainer of TRL with the model."""
    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer  # type: ignore[import-not-found]

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    clips = {"epsilon": settings.get("clip_low", 0.2)}
    clips["epsilon_high"] = settings.get("clip_high", 0.28 if loss == "dapo" else clips["epsilon"])
    args = trl.GRPOConfig(
        output_dir=str(folder / "out"),
        loss_type=loss,
        importance_sampling_level=ratio,
        beta=settings.get("beta", 0.0),
        use_bias_correction_kl=settings.get("unbiased_kl", True),
        temperature=settings.get("temperature", 1.0),
        max_completion_length=NEW,
        num_generations=3,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **clips,
    )
    return trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * ROWS),
        processing_class=tokenizer,
    )


@pytest.mark.hf
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name, loss, ratio, settings", CASES)
def test_loss_and_gradient(name, loss, ratio, settings, folder, trl):
    import torch  # type: ignore[import-not-found]

    old, reference = known_log_probs()
    prompts, completions = rows_of_ids()
    mask = np.arange(NEW) < LENGTHS[:, None]
    batch = batch_of(old, reference)
    inputs = {
        "prompt_ids": torch.tensor(prompts),
        "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "completion_ids": torch.tensor(completions),
        "completion_mask": torch.tensor(mask.astype(np.int64)),
        "advantages": torch.tensor(np.asarray(batch.advantages)),
        "old_per_token_logps": torch.tensor(old),
        "ref_per_token_logps": torch.tensor(reference),
        "num_items_in_batch": torch.tensor(int(mask.sum())),
    }
    trainer = trainer_of(trl, folder, loss, ratio, settings)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    expected = trainer._compute_loss(trainer.model, inputs)
    expected.backward()
    expected = float(expected.detach())
    theirs = trainer.model.model.norm.weight.grad.numpy()

    def run(batch: PolicyBatch) -> tuple[float, np.ndarray]:
        choices: dict[str, Any] = {key: value for key, value in settings.items() if key != "temperature"}
        choices |= {"mean": NEW} if name == "dr_grpo" else {}
        batch = dataclasses.replace(batch, temperature=settings.get("temperature", 1.0))
        gradients = training.make_gradient_function(training.policy_loss(name, **choices))
        total, aux, gradient = jax.jit(gradients)(small_model(), batch, None)
        count = float(training.loss_count(aux))
        return float(total) / count, np.asarray(gradient.norm.weight) / count

    ours, gradient = run(batch)
    assert ours == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert np.linalg.norm(gradient - theirs) < 1e-3 * np.linalg.norm(theirs)
    swapped, _ = run(dataclasses.replace(batch, old_log_probs=batch.reference_log_probs))
    assert swapped != pytest.approx(expected, rel=1e-2)  # the control
