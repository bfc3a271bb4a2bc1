"""The bytes that `plan.py` and the benchmark report equal the bytes that the compiled step sends."""

import shlex

import equinox as eqx
import jax
import plan as plan_script
import pytest
from extending import beside
from haste import HASTE
from support.command import parse

from eqformer import nn, planning
from eqformer.parallel import COLLECTIVES, CONTEXT, EXPERT, PIPE, STATE, TENSOR
from eqformer.planning import counted_bytes, sent_bytes, sum_by_cause
from eqformer.program import bytes_sent, list_transfers, read_hlo
from eqformer.recipes import lower_training_step
from eqformer.recipes._setup import make_abstract_plan, make_optimizer, make_plan, make_train_state, model_shapes


TINY = "--model.embed 64 --model.heads 8 --model.mlp 160 --seq 32 --batch 16 --optimizer.name adamw"
LLAMA, JAXFORMER = "--model.layers 4 --model.kv-heads 4", "--model.blocks 2"
NETS = "--recipe qwen3-next-byte-500k --model.net-kv-heads 4 --model.kv-heads 4 --model.dense-layers 0 1 2 3"
VECTORS = "--recipe gemma4-e-byte-400k"
FACTORS = "--lora.rank 4 --lora.maps query value output up down"
MESHES = {
    "sequence": "--mesh.fsdp 2 --mesh.tensor 4 --residual sequence",
}
WIDER = {
    "context heads": "--mesh.fsdp 2 --mesh.context 4 --context-method heads",
    "feature": "--mesh.fsdp 2 --mesh.tensor 4 --residual feature",
    "nets": f"{NETS} --mesh.fsdp 2 --mesh.tensor 4",
    "vectors of layers": f"{VECTORS} --mesh.fsdp 2 --mesh.tensor 4 --residual sequence",
    "factors": f"{FACTORS} --mesh.fsdp 8 --zero 3",
    "experts": "--recipe moe --mesh.expert 4 --mesh.fsdp 2",
    "pipe and zero": "--mesh.fsdp 4 --mesh.pipe 2 --microbatches 2 --zero 3",
    "experts, exchange": "--recipe moe --mesh.expert 4 --mesh.fsdp 2 --expert-method exchange --expert-factor 1.5",
    "experts, exchange, all kept": "--recipe moe --mesh.expert 8 --expert-method exchange --execution.remat none",
    "experts, exchange, all again": "--recipe moe --mesh.expert 4 --expert-method exchange --execution.remat full "
    "--mesh.replica 2",
    "experts, all again": "--recipe moe --mesh.expert 2 --mesh.replica 4 --execution.remat full",
    "experts and zero 3": "--recipe moe --mesh.expert 2 --mesh.fsdp 4 --zero 3",
    "experts and pipe": "--recipe moe --mesh.expert 2 --mesh.pipe 2 --mesh.fsdp 2 --microbatches 2",
    "experts and context": "--recipe moe --mesh.expert 4 --mesh.context 2",
    "experts and replicated": "--recipe moe --mesh.expert 2 --mesh.tensor 4",
    "nets, sequence": f"{NETS} --mesh.fsdp 2 --mesh.tensor 4 --residual sequence",
    "nets, feature": f"{NETS} --mesh.fsdp 2 --mesh.tensor 4 --residual feature",
    "nets, all again": f"{NETS} --mesh.fsdp 2 --mesh.tensor 4 --execution.remat full",
    "factors, copies": f"{FACTORS} --mesh.replica 8",
    "factors, zero 1": f"{FACTORS} --mesh.replica 2 --mesh.fsdp 4 --zero 1",
    "factors, zero 2": f"{FACTORS} --mesh.fsdp 8 --zero 2",
    "factors, replicated": f"{FACTORS} --mesh.fsdp 2 --mesh.tensor 4",
    "factors, sequence": f"{FACTORS} --mesh.fsdp 2 --mesh.tensor 4 --residual sequence",
    "factors, feature": f"{FACTORS} --mesh.fsdp 2 --mesh.tensor 4 --residual feature",
    "factors, pipe": f"{FACTORS} --mesh.fsdp 4 --mesh.pipe 2 --microbatches 2 --zero 3",
    "copies": "--mesh.replica 8",
    "zero 1": "--mesh.replica 2 --mesh.fsdp 4 --zero 1",
    "zero 2": "--mesh.fsdp 8 --zero 2",
    "zero 2, pieces": "--mesh.fsdp 4 --mesh.replica 2 --zero 2 --microbatches 2",
    "zero 3": "--mesh.expert 2 --mesh.fsdp 4 --zero 3",
    "zero 3, pieces": "--mesh.fsdp 4 --mesh.expert 2 --zero 3 --microbatches 2",
    "replicated": "--mesh.fsdp 2 --mesh.tensor 4",
    "replicated, all again": "--mesh.fsdp 2 --mesh.tensor 4 --execution.remat full",
    "replicated, few key heads": "--mesh.fsdp 2 --mesh.tensor 4 --model.kv-heads 2",
    "sequence, all kept": "--mesh.fsdp 2 --mesh.tensor 4 --residual sequence --execution.remat none",
    "sequence, all again": "--mesh.fsdp 2 --mesh.tensor 4 --residual sequence --execution.remat full",
    "sequence, ring": "--mesh.fsdp 2 --mesh.tensor 4 --residual sequence --overlap ring --execution.remat none",
    "feature, all again": "--mesh.fsdp 2 --mesh.tensor 4 --residual feature --execution.remat full",
    "feature, few key heads": "--mesh.fsdp 2 --mesh.tensor 4 --residual feature --model.kv-heads 2",
    "feature, latents": "--recipe jaxformer-byte-1m --mesh.fsdp 2 --mesh.tensor 4 --residual feature",
    "sequence, latents": "--recipe jaxformer-byte-1m --mesh.fsdp 2 --mesh.tensor 4 --residual sequence",
    "context ring": "--mesh.fsdp 2 --mesh.context 4",
    "context gather": "--mesh.fsdp 2 --mesh.context 4 --context-method gather",
    "context heads, latents": "--recipe jaxformer-byte-1m --mesh.fsdp 2 --mesh.context 4 --context-method heads",
    "context heads, few": "--mesh.fsdp 2 --mesh.context 4 --context-method heads --model.kv-heads 2",
    "context and sequence": "--mesh.fsdp 2 --mesh.context 2 --mesh.tensor 2 --zero 3 --residual sequence",
    "pipe": "--mesh.fsdp 4 --mesh.pipe 2 --microbatches 4 --zero 0",
    "pipe and zero 1": "--mesh.fsdp 4 --mesh.pipe 2 --microbatches 4 --zero 1",
    "pipe and zero 2": "--mesh.fsdp 2 --mesh.pipe 4 --microbatches 4 --zero 2",
    "pipe, one layer a stage": "--mesh.fsdp 2 --mesh.pipe 4 --microbatches 4 --zero 3",
    "pipe, spread": "--mesh.fsdp 4 --mesh.pipe 2 --microbatches 2 --zero 3 --schedule gpipe --edges spread",
    "pipe, chunks": "--mesh.fsdp 4 --mesh.pipe 2 --microbatches 2 --zero 3 --schedule looping --chunks 2",
    "pipe and replicated": "--mesh.pipe 2 --mesh.tensor 4 --microbatches 4",
    "pipe and sequence": "--mesh.fsdp 2 --mesh.pipe 2 --mesh.tensor 2 --microbatches 2 --zero 3 --residual sequence",
    "pipe and feature": "--mesh.fsdp 2 --mesh.pipe 2 --mesh.tensor 2 --microbatches 2 --zero 3 --residual feature",
    "pipe and context": "--mesh.fsdp 2 --mesh.pipe 2 --mesh.context 2 --microbatches 2",
}


def recipe_of(flags):
    more = JAXFORMER if "jaxformer" in flags else "" if NETS in flags or VECTORS in flags else LLAMA
    more = more if "--recipe" in f"{more} {flags}" else f"--recipe llama {more}"
    return parse(plan_script.Command, shlex.split(f"{TINY} {more} {flags}")).run


def compile_step(recipe, plan, model):
    states = make_train_state(recipe, plan, make_optimizer(recipe, model), model)
    return lower_training_step(recipe, states, plan).compile(compiler_options=HASTE)


def by_formula(recipe, plan):
    model = model_shapes(recipe)
    trained = make_optimizer(recipe, model).trained
    return sum_by_cause(sent_bytes(plan, model, rows=recipe.batch, seq=recipe.seq, trained=trained))


def by_formula_of(flags):
    recipe = recipe_of(flags)
    return by_formula(recipe, make_abstract_plan(recipe))


@pytest.mark.parametrize("name", [*MESHES, *(pytest.param(name, marks=pytest.mark.grid) for name in WIDER)])
def test_a_compiled_step_sends_what_formulas_say(name):
    recipe = recipe_of({**MESHES, **WIDER}[name])
    plan = make_plan(recipe, jax.devices())
    program = compile_step(recipe, plan, model_shapes(recipe))
    transfers = list_transfers(read_hlo(program, mesh=plan.mesh))
    counted = counted_bytes(plan, transfers)
    assert counted == pytest.approx(by_formula(recipe, plan), rel=0.03)
    # What has no name is the partitioner's, or a sum that JAX adds to a backward pass: a factor's, of a LoRA.
    unnamed = [t for t in transfers if t.named(COLLECTIVES) is None and "shard_map" in t.scopes]
    assert bytes_sent(unnamed) <= 0.02 * bytes_sent(transfers), unnamed


def silent(module):
    """A mixer of one's own that says nothing of itself, so that every device has the whole of it."""
    module.Fading = type("Fading", (module.Fading,), {"facts": lambda _: nn.MixerFacts()})


OWN = {
    "sequence": ("--mesh.fsdp 2 --mesh.tensor 4 --residual sequence", ()),
    "whole, feature": ("--mesh.fsdp 2 --mesh.tensor 4 --residual feature", (silent,)),
    "feature": ("--mesh.fsdp 2 --mesh.tensor 4 --residual feature", ()),
    "replicated, pipe": ("--mesh.fsdp 2 --mesh.tensor 2 --mesh.pipe 2 --microbatches 2", ()),
    "whole": ("--mesh.fsdp 2 --mesh.tensor 4", (silent,)),
    "whole, sequence": ("--mesh.fsdp 2 --mesh.tensor 4 --residual sequence", (silent,)),
    "whole, all again": ("--mesh.fsdp 2 --mesh.tensor 4 --residual sequence --execution.remat full", (silent,)),
    "whole, pipe": ("--mesh.fsdp 2 --mesh.tensor 2 --mesh.pipe 2 --microbatches 2", (silent,)),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", list(OWN))
def test_a_step_with_mixers_of_ones_own_sends_what_formulas_say(name, monkeypatch):
    flags, changes = OWN[name]
    recipe, module = recipe_of(flags), beside("fading")
    monkeypatch.setattr(module, "Fading", module.Fading)
    for change in changes:
        change(module)
    build = lambda: nn.with_execution(
        module.hybrid(jax.random.key(0), vocab=256, layers=4), remat=recipe.execution.remat
    )
    model = eqx.filter_eval_shape(build)
    plan = make_plan(recipe, jax.devices())
    program = compile_step(recipe, plan, model)
    counted = counted_bytes(plan, list_transfers(read_hlo(program, mesh=plan.mesh)))
    predicted = sent_bytes(
        plan, model, rows=recipe.batch, seq=recipe.seq, trained=make_optimizer(recipe, model).trained
    )
    assert counted == pytest.approx(sum_by_cause(predicted), rel=0.03)


KINDS = {"attention": "", "nets": NETS, "latents": "--recipe jaxformer-byte-1m"}


def is_mixer(kind):
    """Whether a class of `nn` stands where a block's attention does."""
    return issubclass(kind, nn.Mixer) and kind is not nn.Mixer


@pytest.mark.quick
def test_no_mixer_is_left_out():
    """Whatever `nn` has says by which dims the transforms split and the formulas count it."""
    found = {kind for kind in vars(nn).values() if isinstance(kind, type) and is_mixer(kind)}
    assert all("facts" in vars(kind) for kind in found) and len(found) > 2
    sent = {name: by_formula_of(f"{flags} --mesh.tensor 2")[TENSOR] for name, flags in KINDS.items()}
    assert min(sent.values()) > 0


def test_formula_bytes_of_factors_are_theirs_alone():
    """Four maps of 64 to 64, two of 64 and 160, in four layers, of rank 4: nothing else has a gradient."""
    numbers = 4 * 4 * (2 * (64 + 64) + (64 + 32) + 2 * (64 + 160))
    sent = by_formula_of(f"{FACTORS} --mesh.replica 8")
    assert sent == {STATE: 2 * 7 / 8 * 4 * numbers}
    assert by_formula_of("--mesh.replica 8")[STATE] > 10 * sent[STATE]  # the control


def test_formula_bytes_are_the_closed_formulas():
    tokens, embed, kv_embed, hidden = 8 * 32, 64, 32, 160
    share = 3 / 4 * tokens * 4
    loss = 2 * 3 * share  # three numbers of each token
    for stream, numbers, edges in (
        ("replicated", 8 * embed, 4 * embed * share),
        ("sequence", 10 * embed, 4 * embed * share),
        ("feature", 2 * (3 * embed + 2 * kv_embed + 2 * hidden), 2 * embed * share + 2 * 3 / 4 * 256 * embed * 4 / 4),
    ):
        sent = by_formula_of(f"--mesh.fsdp 2 --mesh.tensor 4 --residual {stream}")
        assert sent[TENSOR] == pytest.approx(4 * numbers * share + edges + loss)
    assert by_formula_of("--mesh.fsdp 2 --mesh.context 4")[CONTEXT] == 4 * 6 * kv_embed * share


def test_formula_bytes_of_experts_are_the_closed_formulas():
    tokens, embed, top_k = 16 // 8 * 32, 64, 2
    layers, ways = 4, {"gather": {}, "exchange": {"factor": 1.5}}
    for method, more in ways.items():
        flags = f"--recipe moe --mesh.expert 4 --mesh.fsdp 2 --execution.remat none --expert-method {method}"
        sent = by_formula_of(f"{flags} --expert-factor 1.5")[EXPERT]
        form = planning.expert_bytes(tokens, embed, 4, top_k=top_k, method=method, activation_bytes=4, **more)
        beside = 3 * tokens * top_k * 3 * 4 if method == "gather" else 3 / 4 * 1.5 * tokens * top_k * 4
        assert sent == layers * (form + beside)  # choices and weights are sent too


def test_a_pipeline_gathers_twice_or_where_stages_run_again_three_times():
    in_stages = "--mesh.fsdp 4 --zero 3 --mesh.pipe 2 --microbatches 4"
    one, two, again = map(by_formula_of, ("--mesh.fsdp 4 --zero 3", in_stages, f"{in_stages} --stage-remat"))
    assert two[PIPE] == 2 * 4 * 32 * 64 * 4  # rows of a microbatch: one
    edges = 3 / 4 * 256 * 64 * 4
    layers = one[STATE] - 2 * edges
    of_all_stages = 2 * 1 / 2 * 256 * 64 * 4
    # Half the layers, four times, three or four transfers; what is not split is too little to see.
    for found, transfers in ((two, 3), (again, 4)):
        assert found[STATE] == pytest.approx(layers / 2 * 4 * transfers / 3 + 2 * edges + of_all_stages, rel=0.02)


def test_a_pipelines_layers_run_forward_once_or_where_they_run_again_twice():
    share = 1 / 2 * 16 * 32 * 4
    layers, edges = 4 * 8 * 64 * share, (4 * 64 + 2 * 3) * share
    assert by_formula_of("--mesh.tensor 2 --microbatches 4")[TENSOR] == layers + edges
    in_stages = "--mesh.tensor 2 --mesh.pipe 2 --microbatches 4"
    assert by_formula_of(in_stages)[TENSOR] == layers / 2 + edges
    assert by_formula_of(f"{in_stages} --stage-remat")[TENSOR] == layers / 2 * 12 / 8 + edges
