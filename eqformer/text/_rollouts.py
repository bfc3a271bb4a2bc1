"""Completions that a model samples for the prompts of each training step, and the rewards of a user's function."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Key, PyTree

from .. import data, generation, nn, parallel, training
from .._files import parse_json
from .._shapes import PolicyBatch
from ._generate_texts import complete, Completion, StopStrings, TextAssembler
from ._llm import LLM, prepare_to_decode


Reward = Callable[..., Sequence[float]]
"""`(prompts, completions, **columns) -> rewards`: a number for each completion."""


def read_prompts(path: str | Path) -> list[dict[str, Any]]:
    """Read the rows of `Rollouts` from .jsonl or .parquet files, a folder of such files, or a dataset of the hub.

    Raises a `ValueError` as `data.files` does, and for the first row whose `prompt` is neither a text nor messages.
    """
    rows = list[dict[str, Any]]()
    for document in data.files(path, field=None):
        match row := parse_json(document.text):
            case {"prompt": str() | [{}, *_]}:
                rows.append(dict(row))
            case _:
                raise ValueError(
                    f"read_prompts({str(path)!r}): {document.name}: a row has a prompt, which is a text or a list of "
                    f"messages, but this row is {document.text:.80}; correct it."
                )
    return rows


class Sample(NamedTuple):
    """A completion that was sampled for a prompt, and its reward."""

    prompt: Any
    """The prompt as the row of data has it."""
    completion: Completion
    reward: float


class _Samples(NamedTuple):
    """The completions of one call of the sampler: first all completions of the first prompt, then of the second, ...

    The completions of one prompt are a *group*.
    """

    samples: list[Sample]
    prompts: list[list[int]]
    log_probs: Float[np.ndarray, "batch seq"]
    """The sampler's log-probability of each id, at the index of the id in its row."""
    advantages: training.GroupAdvantages

    def has_signal(self, group: int) -> Bool[np.ndarray, "groups"]:
        """Return which groups have rewards that are not all equal."""
        return self.advantages.stds[::group] > 0

    def replace_groups(self, other: "_Samples", pairs: Sequence[tuple[int, int]], group: int) -> "_Samples":
        """Return these samples with group `i` replaced by group `j` of the other samples, for each pair `(i, j)`.

        A group has `group` rows.
        """
        # The rows of the result, as indices of this object's rows followed by the rows of `other`.
        rows = np.arange(len(self.samples))
        for target, source in pairs:
            source_rows = len(rows) + np.arange(source * group, (source + 1) * group)
            rows[target * group : (target + 1) * group] = source_rows
        all_samples, all_prompts = self.samples + other.samples, self.prompts + other.prompts
        width = max(self.log_probs.shape[1], other.log_probs.shape[1])
        tables = [np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in (self.log_probs, other.log_probs)]
        advantages = (np.concatenate(pair)[rows] for pair in zip(self.advantages, other.advantages))
        return _Samples(
            samples=[all_samples[row] for row in rows],
            prompts=[all_prompts[row] for row in rows],
            log_probs=np.concatenate(tables)[rows],
            advantages=training.GroupAdvantages(*advantages),
        )


class Rollouts:
    """The batches of a run that learns from rewards: completions that the model samples before each step.

        rollouts = text.Rollouts(llm, rows, reward, prompts=16, group=8, max_new_tokens=64, key=jax.random.key(0))
        step = training.make_step(training.policy_loss("grpo"), optimizer)
        training.train(step, training.init_state(llm.model, optimizer), rollouts, steps=100)

    The processes of a run sample together under the plan, and only the first process calls the reward function.

    Completions depend only on the key, on the number of the step and on the weights. A run that is resumed from a
    checkpoint (`start=`) therefore gives the same numbers as an uninterrupted run, unless it stopped between two
    `updates` on one batch. Prompts are shuffled anew in each pass over the rows. Completions end with an id of
    `llm.end_ids`. Call `train` without a key: dropout would make the trainer's log-probabilities differ from the
    sampler's.

    The metrics of a step are means over its first completions, before groups are replaced: `reward`, `reward_std` (the
    standard deviation in a group), `groups_without_signal` (the share of groups whose rewards are all equal),
    `completion_tokens`, and `truncated` (the share of completions that `max_new_tokens` ended).
    """

    samples: Sequence[Sample] = ()
    """The completions of the last batch, with their rewards."""
    seq: int
    """Number of tokens of a batch's rows, enough for every prompt with its completion."""

    def __init__(
        self,
        llm: LLM,
        rows: Sequence[Mapping[str, Any]],
        reward: Reward,
        *,
        prompts: int,
        group: int,
        max_new_tokens: int,
        temperature: float = 1.0,
        scale_rewards: bool = True,
        mask_equal_groups: bool = False,
        resample: int = 0,
        mask_truncated: bool = False,
        reference: Callable[[PyTree], PyTree] | None = None,
        updates: int = 1,
        plan: parallel.Plan | None = None,
        key: Key[Array, ""],
    ):
        """Check the rows, and encode their prompts.

        Raises a `ValueError` for rows without a prompt or with other fields than the first row, and for prompts that
        have no tokens or are too long. Calling the object raises a `ValueError`, before the step is taken, if the
        reward function fails or does not return one finite number for each completion.

        Args:
            llm: The tokenizer, chat template and end ids. Only the vocabulary and the longest row of `llm.model` are
                used.
            rows: Rows of data, each with a `prompt`: a text, or a list of messages.
            reward: `reward(prompts, completions, **columns)` returns a number for each completion. Prompts are as in
                the rows, completions are texts, and columns are lists of the rows' other fields.
            prompts: Number of prompts of a step.
            group: Number of completions of each prompt, whose rewards are compared.
            max_new_tokens: Maximum number of tokens of a completion.
            temperature: The temperature of sampling, which the batches pass on to the loss.
            scale_rewards: Whether advantages are divided by the standard deviation of the group's rewards; False for
                Dr. GRPO.
            mask_equal_groups: Whether groups whose rewards are all equal have weight 0, as in DAPO.
            resample: How many times a step may sample further prompts, to replace groups whose rewards are all equal.
            mask_truncated: Whether completions that `max_new_tokens` ended have weight 0.
            reference: A function of the trained model that returns the reference of the KL divergence, such as
                `nn.without_lora`, or `lambda model: frozen` for a copy; None: no reference.
            updates: Number of steps on each batch of completions. A run that is resumed between two of these steps
                samples a new batch.
            plan: The plan of the training step, under which the sharded model also samples; None: one device.
            key: The key of the prompts' order and of all samples.
        """
        for name, value, minimum in (
            ("prompts", prompts, 1),
            ("group", group, 2),
            ("max_new_tokens", max_new_tokens, 1),
            ("updates", updates, 1),
            ("resample", resample, 0),
        ):
            if value < minimum:
                reason = ", since rewards are compared within a group" if name == "group" else ""
                raise ValueError(f"Rollouts({name}={value}): it must be at least {minimum}{reason}.")
        if not 0 < temperature < float("inf"):
            raise ValueError(
                f"Rollouts(temperature={temperature}): completions are sampled, so the temperature must be above 0."
            )
        if jax.process_count() > 1 and plan is None:
            raise ValueError(
                f"Rollouts(plan=None): {jax.process_count()} processes sample together under the plan of the step; "
                "pass that plan, or start one process."
            )
        self.llm, self.reward, self.plan, self.key = llm, reward, plan, key
        self._rows, self._columns = rows, _check_fields(rows)
        self._ids = [_encode_prompt(llm, row["prompt"], number) for number, row in enumerate(rows)]
        self._prompts, self._group, self._max_new_tokens, self._updates = prompts, group, max_new_tokens, updates
        self._temperature, self._scale, self._resample = temperature, scale_rewards, resample
        self._mask_equal_groups, self._mask_truncated, self._reference = mask_equal_groups, mask_truncated, reference
        self.seq = _fit_rows(llm.model, self._ids, max_new_tokens)
        self._batch: PolicyBatch | None = None
        self._next_step = 0
        make_log_probs = training.make_token_log_probs
        self._log_probs = eqx.filter_jit(training.token_log_probs) if plan is None else make_log_probs(plan)

    def __call__(self, run: training.Progress) -> PolicyBatch:
        """Return the batch of the step after `run.step`, sampled by the weights of the run's state."""
        if self._batch is None or run.step != self._next_step or run.step % self._updates == 0:
            self._batch = self._make_batch(run.state.model, run.step)
        self._next_step = run.step + 1
        return self._batch

    def greedy_reward(self, model: PyTree) -> float:
        """Return the mean reward of greedy completions of all rows, for example in a `Rollouts` of validation rows.

        A batch generates as many completions as a step does. Greedy completions do not depend on the key.
        """
        decoding_model, size, rewards = self._decoding_model(model), self._prompts * self._group, list[float]()
        for start in range(0, len(self._rows), size):
            # The first rows fill up the last batch, so that all batches have one shape.
            indices = [index % len(self._rows) for index in range(start, start + size)]
            _, completions = self._complete(decoding_model, indices, 0.0, self.key)
            count = min(size, len(self._rows) - start)
            rewards += self._score("for greedy completions", indices[:count], completions[:count])
        return float(np.mean(rewards))

    def _make_batch(self, model: PyTree, step: int) -> PolicyBatch:
        """Sample completions, score them, and return them as a batch on the devices of the plan."""
        first, samples = self._sample_groups(model, step)
        self.samples = samples.samples
        batch = dataclasses.replace(self._join(samples, step), row_metrics=_row_metrics(first))
        if self.plan is not None:
            rows = training.ProcessRows(self.plan, len(samples.samples))
            batch = rows.place(jax.tree.map(lambda x: x[rows.start : rows.stop], batch))
        log_probs = dict[str, Float[Array, "batch seq"]]()
        if self._updates > 1:
            log_probs["old_log_probs"] = self._log_probs(model, batch)
        if self._reference is not None:
            log_probs["reference_log_probs"] = self._log_probs(self._reference(model), batch)
        return dataclasses.replace(batch, **log_probs)

    def _sample_groups(self, model: PyTree, step: int) -> tuple[_Samples, _Samples]:
        """Return the samples of a step's prompts, before and after groups of equal rewards are replaced."""
        decoding_model = self._decoding_model(model)
        first = samples = self._sample(decoding_model, step, 0)
        for attempt in range(1, self._resample + 1):
            missing = np.flatnonzero(~samples.has_signal(self._group))
            if not len(missing):
                break
            further = self._sample(decoding_model, step, attempt)
            pairs = list(zip(missing.tolist(), np.flatnonzero(further.has_signal(self._group)).tolist()))
            samples = samples.replace_groups(further, pairs, self._group)
        return first, samples

    def _join(self, samples: _Samples, step: int) -> PolicyBatch:
        """Join prompts, completions and advantages to a batch; masked completions get weight 0."""
        completions = [sample.completion for sample in samples.samples]
        batch = data.batch_completions(
            samples.prompts,
            [completion.ids for completion in completions],
            seq=self.seq,
            first_example=step * len(completions),
            temperature=self._temperature,
        )
        is_counted = np.ones(len(completions), bool)
        if self._mask_truncated:
            is_counted &= [completion.finish_reason == "stop" for completion in completions]
        if self._mask_equal_groups:
            is_counted &= samples.advantages.stds > 0
        sampler_log_probs = np.zeros(batch.ids.shape, np.float32)
        width = min(samples.log_probs.shape[1] - 1, self.seq)
        sampler_log_probs[:, :width] = samples.log_probs[:, 1 : width + 1]  # The target of an index is the next id.
        return dataclasses.replace(
            batch,
            weights=batch.weights * is_counted[:, None].astype(np.float32),
            advantages=samples.advantages.advantages,
            sampler_log_probs=sampler_log_probs,
        )

    def _sample(self, model: generation.Model, step: int, attempt: int) -> _Samples:
        """Sample a group of completions for each prompt of a step with a model that decodes, and score them."""
        order_key, draw_key = jax.random.split(jax.random.fold_in(self.key, attempt))
        indices = np.repeat(self._choose_rows(order_key, step), self._group).tolist()
        result, completions = self._complete(
            model, indices, self._temperature, jax.random.fold_in(draw_key, step), log_probabilities="transformed"
        )
        rewards = self._score(f"for step {step + 1}", indices, completions)
        originals = [self._rows[index]["prompt"] for index in indices]
        assert result.log_probabilities is not None
        return _Samples(
            list(map(Sample, originals, completions, rewards)),
            [self._ids[index] for index in indices],
            result.log_probabilities,
            training.group_advantages(rewards, self._group, scale=self._scale),
        )

    def _complete(
        self, model: generation.Model, indices: Sequence[int], temperature: float, key: Key[Array, ""], **options: Any
    ) -> tuple[generation.Generation, list[Completion]]:
        """Generate completions for the rows with these indices; `options` are passed to `generation.generate`."""
        result = generation.generate(
            model,
            [self._ids[index] for index in indices],
            max_new_tokens=self._max_new_tokens,
            transforms=generation.sampling(temperature=temperature),
            end_of_text=list(self.llm.end_ids) or None,
            key=key,
            **options,
        )
        pairs = zip(indices, result.new_ids(), strict=True)
        return result, [complete(ids, (), self._assembler(index)) for index, ids in pairs]

    def _decoding_model(self, model: PyTree) -> generation.Model:
        """Return the trained model in the form that decodes.

        Under a plan, the weights stay on their devices. Only if a pipeline's schedule stores layers in another order
        than the order in which the model runs them, some layers are sent to other stages.
        """
        return prepare_to_decode(model if self.plan is None else self.plan.unshard(model), self.plan)

    def _choose_rows(self, key: Key[Array, ""], step: int) -> list[int]:
        """Return the indices of a step's rows; each pass over the rows has another order."""
        size, indices = len(self._rows), list[int]()
        first = step // self._updates * self._prompts  # The number of prompts of all earlier batches.
        for position in range(first, first + self._prompts):
            epoch, order_index = divmod(position, size)
            if position == first or order_index == 0:  # A new epoch has a new order.
                order = np.asarray(jax.random.permutation(jax.random.fold_in(key, epoch), size))
            indices.append(int(order[order_index]))
        return indices

    def _assembler(self, index: int) -> TextAssembler:
        """Return the assembler of a completion's text; an answer to messages does not continue the prompt's text."""
        continued = self._ids[index] if isinstance(self._rows[index]["prompt"], str) else ()
        return TextAssembler(data.TextStream(self.llm.tokenizer, continued), self.llm.end_ids, StopStrings(()))

    def _score(self, occasion: str, indices: Sequence[int], completions: Sequence[Completion]) -> list[float]:
        """Return the rewards of completions; raise a `ValueError` for a reward that fails.

        In a run of several processes, the first process calls the function, and the other processes receive its
        rewards.
        """
        call_reward = lambda: self._call_reward(occasion, indices, completions)
        return parallel.numbers_from_first_process(call_reward, len(indices))

    def _call_reward(self, occasion: str, indices: Sequence[int], completions: Sequence[Completion]) -> list[float]:
        """Call the reward function and check its result."""
        name = getattr(self.reward, "__name__", type(self.reward).__name__)
        call = f"Rollouts(reward={name}): {occasion}, of prompts {sorted(set(indices))}"
        texts = [completion.text for completion in completions]
        rows = [self._rows[index] for index in indices]
        columns = {field: [row[field] for row in rows] for field in self._columns}
        try:
            rewards = self.reward([row["prompt"] for row in rows], texts, **columns)
        except Exception as error:
            raise ValueError(f"{call}, it raised {type(error).__name__}: {error}; correct the function.") from error
        try:
            values = [float(reward) for reward in rewards]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{call}, it did not return numbers ({error}); return one for each completion.") from error
        if len(values) != len(texts):
            raise ValueError(
                f"{call}, it returned {len(values)} rewards for {len(texts)} completions; return one for each."
            )
        for number, (value, completion) in enumerate(zip(values, texts)):
            if not np.isfinite(value):
                raise ValueError(
                    f"{call}, the reward of completion {number} ({completion!r:.60}) is {value}; return finite numbers."
                )
        return values


def _check_fields(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the fields of rows beside the prompt; raise a `ValueError` where rows differ."""
    if not rows:
        raise ValueError("Rollouts(rows=[]): there is no row; give at least one, with a prompt.")
    fields = list(rows[0])
    for number, row in enumerate(rows):
        if "prompt" not in row or set(row) != set(fields):
            raise ValueError(
                f"Rollouts(rows=[...]): each row has a prompt and the fields of row 0, {sorted(fields)}, but row "
                f"{number} has {sorted(row)}; give all rows the same fields."
            )
    return [field for field in fields if field != "prompt"]


def _encode_prompt(llm: LLM, prompt: Any, number: int) -> list[int]:
    """Return the ids of a prompt: a text, or messages in the chat template."""
    if isinstance(prompt, str):
        ids = llm.tokens(prompt)
    elif llm.chat_template is None:
        raise ValueError(f"Rollouts(rows=[...]): row {number} has messages, and the LLM no chat template; give texts.")
    else:
        location = f"Rollouts(rows=[...]): row {number}"
        llm.chat_template.check_roles(prompt, location)
        try:
            rendered = llm.chat_template.render(prompt)
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from error
        ids = llm.tokenizer.encode_prompt(rendered, add_special_tokens=False).tolist()
    if not ids:
        raise ValueError(f"Rollouts(rows=[...]): the prompt of row {number} has no tokens; give a character.")
    return ids


def _fit_rows(model: generation.Model, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    """Return the number of tokens of a training row, enough for each prompt with its completion.

    Raises a `ValueError` for a model that cannot read such rows.
    """
    longest = max(map(len, prompts)) + max_new_tokens - 1
    if model.start is not None:
        raise ValueError(
            "Rollouts(llm): completions continue their prompts, but this model has an encoder; give a decoder."
        )
    if model.max_seq is not None and longest > model.max_seq:
        raise ValueError(
            f"Rollouts(max_new_tokens={max_new_tokens}): the longest prompt has {longest + 1 - max_new_tokens} tokens, "
            f"and with a completion exceeds the model's {model.max_seq} positions; leave that prompt out, or ask for "
            "fewer new tokens."
        )
    if any(encoding.changes_within(longest) for encoding in nn.modules(model, nn.PositionEncoding)):
        raise ValueError(
            f"Rollouts(llm): this model's rotary frequencies change as a row grows to {longest} tokens, so training "
            "would compute other log-probabilities of a completion than sampling; ask for shorter rows."
        )
    unit = 16 if longest <= 64 else 64
    rounded = -(-longest // unit) * unit
    return rounded if model.max_seq is None else min(rounded, model.max_seq)


def _row_metrics(samples: _Samples) -> dict[str, np.ndarray]:
    """Return the values of each row whose means over rows are metrics of the step."""
    completions = [sample.completion for sample in samples.samples]
    columns = {
        "reward": [sample.reward for sample in samples.samples],
        "reward_std": samples.advantages.stds,
        "groups_without_signal": samples.advantages.stds == 0,
        "completion_tokens": [len(completion.ids) for completion in completions],
        "truncated": [completion.finish_reason == "length" for completion in completions],
    }
    return {name: np.asarray(column, np.float32) for name, column in columns.items()}
