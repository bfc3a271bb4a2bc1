"""Contenders of PyTorch and transformers, if the extra `hf` is installed; on a GPU if PyTorch can use one."""

import importlib.util
import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eqformer.models import LlamaConfig, Qwen3Config


# Models with which PyTorch is measured, and transformers' names for them.
KINDS = {LlamaConfig: "Llama", Qwen3Config: "Qwen3"}


def are_installed() -> bool:
    """Return whether PyTorch and transformers can be imported."""
    return all(importlib.util.find_spec(package) for package in ("torch", "transformers"))


def product_rate(size: int = 2048, times: int = 20) -> float:
    """Return the best FLOP/s of a product of two square matrices in float32."""
    torch = import_module("torch")
    _set_up()
    x, best = torch.full((size, size), 0.5), 0.0
    for _ in range(times):
        start = time.perf_counter()
        torch.mm(x, x)
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def build_model(config: LlamaConfig | Qwen3Config, max_length: int) -> Any:
    """Build transformers' model of a config, with random weights in float32, on PyTorch's device."""
    torch, transformers = import_module("torch"), import_module("transformers")
    _set_up()
    transformers.logging.set_verbosity_error()
    kind = KINDS[type(config)]
    hf_config = getattr(transformers, f"{kind}Config")(
        vocab_size=config.vocab,
        hidden_size=config.embed,
        intermediate_size=config.mlp,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=max_length,
        tie_word_embeddings=config.tied,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(_device()):  # On the host, drawing billions of random weights would take minutes.
        return getattr(transformers, f"{kind}ForCausalLM")(hf_config)


def train_step(
    config: LlamaConfig | Qwen3Config,
    ids: np.ndarray,
    targets: np.ndarray,
    *,
    compiled: Literal["no", "whole", "layers"],
    remat: bool = False,
    narrow: bool = False,
) -> Callable[[], float]:
    """Return a function that runs a step of forward, backward, clipping and fused AdamW, and returns the loss.

    On a GPU products are in bfloat16.

    Args:
        config: The model's configuration.
        ids: The tokens of the rows.
        targets: The tokens to be predicted.
        compiled: What `torch.compile` compiles. "no": nothing. "whole": the whole model, which takes minutes. "layers":
            one program for all layers and one for the loss, which takes seconds.
        remat: Whether the backward pass computes each layer again.
        narrow: Whether parameters, gradients and moments are in bfloat16.
    """
    torch = import_module("torch")
    device = _device()
    model = build_model(config, ids.shape[1]).train()
    model = model.to(torch.bfloat16) if narrow else model
    if remat:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    inputs, labels = (torch.tensor(x, device=device).long() for x in (ids, targets))

    encode = lambda: model.model(inputs, use_cache=False).last_hidden_state
    loss_of = lambda hidden: torch.nn.functional.cross_entropy(
        model.lm_head(hidden).view(-1, config.vocab), labels.view(-1)
    )
    run = lambda: loss_of(encode())
    if compiled == "whole":
        run = torch.compile(run)
    elif compiled == "layers":
        for layer in model.model.layers:
            layer.compile()
        loss = torch.compile(loss_of)
        run = lambda: loss(encode())

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = run()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def attention(heads: tuple[int, int, int], rows: int, seq: int) -> Callable[[], None]:
    """Return a function that runs causal attention in bfloat16 (FlashAttention on a GPU), forward and backward."""
    torch = import_module("torch")
    _set_up()
    device = _device()
    count, kv_count, head_dim = heads
    draw = lambda heads: torch.randn(rows, seq, heads, head_dim, device=device, dtype=torch.bfloat16).transpose(1, 2)
    inputs = [draw(heads).requires_grad_() for heads in (count, kv_count, kv_count)]

    def run() -> None:
        attended = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
        torch.autograd.grad(attended.float().sum(), inputs)
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def mixtral_layer(x: np.ndarray, *, mlp: int, experts: int, kind: str) -> Callable[[], None]:
    """Return a function that runs transformers' mixture, with two experts for each token, forward and backward.

    `kind` is the implementation of its experts.
    """
    torch, mixtral = import_module("torch"), _modeling("mixtral")
    _set_up()
    config = mixtral.MixtralConfig(hidden_size=x.shape[-1], intermediate_size=mlp, num_local_experts=experts)
    config._experts_implementation = kind
    layer = mixtral.MixtralSparseMoeBlock(config)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return _gradients(layer, x)


def delta_net(x: np.ndarray, *, heads: int, kv_heads: int, head_dim: int) -> Callable[[], None]:
    """Return a function that runs transformers' gated delta net, forward and backward."""
    qwen = _modeling("qwen3_next")
    _set_up()
    sizes = {"linear_num_value_heads": heads, "linear_num_key_heads": kv_heads}
    sizes |= {"linear_key_head_dim": head_dim, "linear_value_head_dim": head_dim}
    layer = qwen.Qwen3NextGatedDeltaNet(qwen.Qwen3NextConfig(hidden_size=x.shape[-1], **sizes), layer_idx=0)
    return _gradients(layer, x)


def mamba2(x: np.ndarray, *, heads: int, state: int, head_dim: int) -> Callable[[], None]:
    """Return a function that runs transformers' Mamba-2 with one group, forward and backward."""
    mamba = _modeling("mamba2")
    _set_up()
    sizes = {"num_heads": heads, "head_dim": head_dim, "state_size": state, "n_groups": 1}
    sizes |= {"hidden_size": x.shape[-1], "expand": heads * head_dim // x.shape[-1]}
    return _gradients(mamba.Mamba2Mixer(mamba.Mamba2Config(**sizes), layer_idx=0), x)


def short_conv(x: np.ndarray) -> Callable[[], None]:
    """Return a function that runs transformers' gated short convolution, forward and backward."""
    lfm = _modeling("lfm2")
    _set_up()
    config = lfm.Lfm2Config(hidden_size=x.shape[-1], num_hidden_layers=1, layer_types=["conv"])
    return _gradients(lfm.Lfm2ShortConv(config, layer_idx=0), x)


def channel_delta_net(x: np.ndarray, *, heads: int, head_dim: int) -> Callable[[], None]:
    """Return a function that runs transformers' Kimi Delta Attention, forward and backward."""
    kimi = _modeling("kimi_linear")
    _set_up()
    sizes = {"linear_num_heads": heads, "linear_head_dim": head_dim, "num_hidden_layers": 1}
    config = kimi.KimiLinearConfig(hidden_size=x.shape[-1], layer_types=["linear_attention"], **sizes)
    return _gradients(kimi.KimiLinearDeltaAttention(config, layer_idx=0), x)


def decode(config: LlamaConfig | Qwen3Config, ids: np.ndarray, new: int) -> Callable[[], Any]:
    """Return a function that runs greedy `generate` with the static cache, by a new model."""
    torch = import_module("torch")
    model = build_model(config, ids.shape[1] + new).eval()
    return greedy(model.to(torch.bfloat16 if _device() == "cuda" else torch.float32), ids, new)


def greedy(model: Any, ids: np.ndarray, new: int) -> Callable[[], Any]:
    """Return a function that runs greedy `generate` with the static cache, by a loaded model on its device."""
    torch = import_module("torch")
    inputs = torch.tensor(ids, device=model.device).long()

    def run() -> Any:
        with torch.no_grad():
            return model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                cache_implementation="static",
            )

    return run


def padded(model: Any, prompts: list[list[int]], new: list[int]) -> Callable[[], Any]:
    """Return a function that runs greedy `generate` on all prompts in one batch, padded on the left.

    All prompts get the largest number of new tokens.
    """
    torch = import_module("torch")
    longest = max(map(len, prompts))
    inputs = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])

    def run() -> Any:
        with torch.no_grad():
            options: dict[str, Any] = {"max_new_tokens": max(new), "min_new_tokens": max(new), "do_sample": False}
            return model.generate(inputs, attention_mask=mask, **options)

    return run


def read(folder: Path) -> Any:
    """Load a published folder with transformers."""
    torch = import_module("torch")
    transformers = import_module("transformers")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def as_ids(array: np.ndarray) -> Any:
    """Return ids as a tensor of PyTorch."""
    return import_module("torch").tensor(array).long()


def lora_step(folder: Path, *, rank: int, maps: Sequence[str]) -> Callable[[Mapping[str, Any], Any], float]:
    """Return a function that takes a training step with peft's LoRA (forward, backward, clipping, fused AdamW).

    The function takes the model's inputs and the target of each token (-100: no target), and returns the loss. Only
    low-rank changes of `maps`, linear maps of the published model, are trained.
    """
    torch, peft = import_module("torch"), import_module("peft")
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=list(maps))
    model = peft.get_peft_model(read(folder).train(), config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(inputs: Mapping[str, Any], targets: Any) -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = model(**inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return loss.item()

    return step


def trl_batches(
    conversations: Sequence[np.ndarray], size: int, pack_seq: int | None = None
) -> list[tuple[dict[str, Any], Any]]:
    """Return the inputs and targets of full batches, as TRL's `SFTTrainer` makes them from tokens.

    A batch is `size` conversations, padded to the longest of them. With `pack_seq`, a batch is `size` rows of at most
    `pack_seq` tokens, which are packed by best fit and then joined into one row; positions restart at each
    conversation.
    """
    torch, trainer = import_module("torch"), import_module("trl.trainer.sft_trainer")
    rows: Any = [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in conversations]
    if pack_seq is not None:
        datasets = import_module("datasets")
        datasets.disable_progress_bars()
        rows = import_module("trl").pack_dataset(datasets.Dataset.from_list(rows), pack_seq).to_list()
        # TRL returns the longest rows first, so the rows are shuffled.
        rows = [rows[row] for row in np.random.default_rng(0).permutation(len(rows))]
    collate = trainer.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=pack_seq is not None)
    batches = []
    for start in range(0, len(rows) - size + 1, size):
        inputs = collate(rows[start : start + size])
        labels = inputs.pop("labels")
        batches.append((inputs, torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]))
    return batches


def forward(model: Any, ids: np.ndarray) -> tuple[Callable[[], np.ndarray], Callable[[], Any]]:
    """Return two functions that run a loaded model: for the logits of all rows, and for the first token of one row."""
    torch = import_module("torch")
    inputs = torch.tensor(ids).long()

    def logits() -> np.ndarray:
        with torch.no_grad():
            return model(inputs, use_cache=False).logits.numpy()

    def first() -> Any:
        with torch.no_grad():
            mask = torch.ones_like(inputs[:1])
            return model.generate(inputs[:1], attention_mask=mask, max_new_tokens=1, do_sample=False, pad_token_id=0)

    return logits, first


def embed(folder: Path) -> Callable[[list[str] | str], np.ndarray]:
    """Return the function with which sentence-transformers turns texts into vectors."""
    sentence_transformers = import_module("sentence_transformers")
    _set_up()
    import_module("transformers").logging.disable_progress_bar()
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode


def _modeling(family: str) -> Any:
    """Return the Python module of a family's model in transformers."""
    return import_module(f"transformers.models.{family}.modeling_{family}")


def _device() -> str:
    """Return the device on which PyTorch computes."""
    torch = import_module("torch")
    return "cuda" if torch.cuda.is_available() else "cpu"


def _set_up() -> None:
    """Let PyTorch use all cores, and draw the same weights each time."""
    torch = import_module("torch")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)


def _gradients(layer: Any, x: np.ndarray) -> Callable[[], None]:
    """Return a function that runs a layer forward, and backward to its parameters and input."""
    torch = import_module("torch")
    inputs = torch.tensor(x, requires_grad=True)

    def run() -> None:
        layer.zero_grad(set_to_none=True)
        inputs.grad = None
        layer(inputs).square().sum().backward()

    return run
