"""Rules from dims to mesh axes, for every family's model and for optimizer states, without allocating arrays."""

import dataclasses
import math

import equinox as eqx
import jax
import pytest
from jax.sharding import PartitionSpec as P

from eqformer import models, nn, training
from eqformer.parallel import Layout, make_mesh, partition_specs, Plan, shardings


LLAMA = models.LlamaConfig(vocab=48, embed=32, layers=4, heads=8, kv_heads=2, head_dim=4, mlp=48, bias=True)
GPT2 = models.GPT2Config(vocab=50, embed=32, layers=4, heads=8, max_seq=32, mlp=48)
JAXFORMER = models.JAXformerConfig(
    vocab=64, embed=32, blocks=4, layers_per_block=2, heads=8, latent=16, rope_dim=4, mlp=48
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(fsdp=2, pipe=2, tensor=2)


def shapes_of(numbers):
    return eqx.filter_eval_shape(lambda key: models.build(numbers, key=key), jax.random.key(0))


def by_path(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, P))
    return {nn.path_name(path): leaf for path, leaf in leaves}


def specs_of(numbers, layout, mesh):
    return by_path(partition_specs(shapes_of(numbers), layout, mesh))


def of(names, shape, mesh, **layout):
    """The spec of one array whose dims have these names."""
    module = nn.Linear(f"{names.split()[-1]} -> {' '.join(names.split()[:-1])}", key=jax.random.key(0), **shape)
    return partition_specs(module, Layout(**layout), mesh).weight


# The rules, one by one.


def test_a_dim_is_split_over_its_axis_and_others_stay_whole(mesh):
    shape = dict(heads=4, head_dim=6, embed=8)
    assert of("heads head_dim embed", shape, mesh) == P(None, None, None)
    assert of("heads head_dim embed", shape, mesh, dims={"heads": "tensor"}) == P("tensor", None, None)
    both = {"heads": "tensor", "embed": "fsdp"}
    assert of("heads head_dim embed", shape, mesh, dims=both) == P("tensor", None, "fsdp")
    assert of("heads head_dim embed", shape, mesh, dims={"mlp": "tensor"}) == P(None, None, None)


def test_an_axis_of_size_one_splits_nothing_and_needs_no_divisor(mesh):
    assert of("mlp embed", dict(mlp=7, embed=3), mesh, dims={"mlp": "context", "embed": "expert"}) == P(None, None)


def test_an_axis_splits_an_array_once_on_the_last_dim_that_asks(mesh):
    dims = {"mlp": "tensor", "embed": "tensor"}
    assert of("mlp embed", dict(mlp=4, embed=4), mesh, dims=dims) == P(None, "tensor")
    assert of("embed mlp", dict(mlp=4, embed=4), mesh, dims=dims) == P(None, "tensor")
    lenient = of("mlp embed", dict(mlp=4, embed=3), mesh, dims=dims, lenient=frozenset({"embed"}))
    assert lenient == P("tensor", None)


def test_a_lenient_dim_stays_whole_and_any_other_is_an_error(mesh):
    shape = dict(kv_heads=3, head_dim=2, embed=8)
    dims = {"kv_heads": "tensor"}
    assert of("kv_heads head_dim embed", shape, mesh, dims=dims, lenient=frozenset({"kv_heads"})) == P(None, None, None)
    with pytest.raises(ValueError) as error:
        of("kv_heads head_dim embed", shape, mesh, dims=dims)
    words = ["'kv_heads'", "'tensor'", "size 3 in weight", "2 devices"]
    assert [word for word in words if word not in str(error.value)] == []


def test_the_axis_of_a_moving_dim_splits_another_where_it_does_not_divide(mesh):
    """The largest that is free and divisible; of those that are left, the fsdp axis has taken its own before."""
    moving = lambda layers, **more: of(
        "layers mlp embed",
        dict(layers=layers, mlp=6, embed=8),
        mesh,
        dims={"layers": "tensor"},
        moving=frozenset({"layers"}),
        **more,
    )
    assert moving(4) == P("tensor", None, None)
    assert moving(3) == P(None, None, "tensor")
    assert moving(3, fsdp_axis="fsdp", smallest=1) == P(None, "tensor", "fsdp")


def test_the_fsdp_axis_takes_the_largest_dim_that_is_divisible_and_whole(mesh):
    split = lambda names, shape, **more: of(names, shape, mesh, fsdp_axis="fsdp", smallest=1, **more)
    assert split("mlp embed", dict(mlp=8, embed=4)) == P("fsdp", None)
    assert split("mlp embed", dict(mlp=9, embed=4)) == P(None, "fsdp")
    assert split("mlp embed", dict(mlp=9, embed=3)) == P(None, None)
    assert split("mlp embed", dict(mlp=8, embed=4), dims={"mlp": "tensor"}) == P("tensor", "fsdp")
    assert split("mlp embed", dict(mlp=8, embed=4), dims={"mlp": "fsdp"}) == P("fsdp", None)  # once
    assert of("mlp embed", dict(mlp=8, embed=4), mesh, fsdp_axis="fsdp", smallest=33) == P(None, None)
    assert of("mlp embed", dict(mlp=8, embed=4), mesh, fsdp_axis="fsdp", smallest=32) == P("fsdp", None)
    assert of("mlp embed", dict(mlp=8, embed=4), mesh, fsdp_axis="replica", smallest=1) == P(None, None)


def test_ensemble_dims_are_not_split_over_it(mesh):
    stack = shapes_of(dataclasses.replace(LLAMA, layers=256)).stacks[0]
    specs = partition_specs(stack, Layout(fsdp_axis="fsdp"), mesh)
    assert specs.blocks.mixer.norm.weight == P(None, "fsdp") and specs.numbers == P(None)


@pytest.mark.parametrize("layout", [Layout({"heads": "rows"}), Layout(fsdp_axis="rows")])
def test_an_axis_that_the_mesh_has_not_is_refused(mesh, layout):
    with pytest.raises(ValueError, match="'rows'.*no such axis.*'tensor'"):
        partition_specs(shapes_of(LLAMA), layout, mesh)


# Whole models.


def test_a_llama_under_a_plan_in_full(mesh):
    specs = specs_of(LLAMA, Plan(mesh, zero=3, smallest=64).layout(splits_fsdp=True), mesh)
    block = "stacks[0].blocks."
    assert specs == {
        "embedding.weight": P("tensor", "fsdp"),
        block + "sublayers[0].layer.query.weight": P("pipe", "tensor", None, "fsdp"),
        block + "sublayers[0].layer.query.bias": P("pipe", "tensor", "fsdp"),
        block + "sublayers[0].layer.key.weight": P("pipe", "tensor", None, "fsdp"),
        block + "sublayers[0].layer.key.bias": P("pipe", "tensor", None),
        block + "sublayers[0].layer.value.weight": P("pipe", "tensor", None, "fsdp"),
        block + "sublayers[0].layer.value.bias": P("pipe", "tensor", None),
        block + "sublayers[0].layer.output.weight": P("pipe", "fsdp", "tensor", None),
        block + "sublayers[0].layer.output.bias": P("pipe", "fsdp"),
        block + "sublayers[1].layer.gate.weight": P("pipe", "tensor", "fsdp"),
        block + "sublayers[1].layer.up.weight": P("pipe", "tensor", "fsdp"),
        block + "sublayers[1].layer.down.weight": P("pipe", "fsdp", "tensor"),
        block + "sublayers[0].norm.weight": P("pipe", "fsdp"),
        block + "sublayers[1].norm.weight": P("pipe", "fsdp"),
        "stacks[0].numbers": P("pipe"),
        "norm.weight": P(None),
        "head.weight": P("tensor", "fsdp"),
    }


@pytest.mark.parametrize("numbers", [LLAMA, GPT2, JAXFORMER], ids=lambda config: type(config).__name__)
def test_every_array_of_every_family_obeys_the_rules(mesh, numbers):
    shapes = shapes_of(numbers)
    layout = Plan(mesh, zero=3, smallest=64).layout(splits_fsdp=True)
    specs, names = by_path(partition_specs(shapes, layout, mesh)), by_path(nn.dims(shapes))
    axes_seen = set()
    for path, leaf in by_path(shapes).items():
        if not nn.has_shape(leaf):
            assert path not in specs
            continue
        spec = tuple(specs[path])
        assert len(spec) == leaf.ndim
        used = [axis for axis in spec if axis]
        assert len(set(used)) == len(used), path
        for name, axis, size in zip(names[path].split(), spec, leaf.shape):
            assert axis in (None, "fsdp", layout.dims.get(name)), (path, name)
            assert axis is None or size % 2 == 0
            if layout.dims.get(name) == "pipe":
                assert axis == "pipe"
        largest = max(leaf.shape)
        if leaf.size >= 64 and any(size > 3 and not axis for axis, size in zip(spec[1:], leaf.shape[1:])):
            assert "fsdp" in used, (path, spec, largest)
        axes_seen.update(used)
    assert axes_seen == {"fsdp", "pipe", "tensor"}


def test_what_is_no_array_has_no_spec_and_the_tree_is_the_models(mesh):
    mlp = nn.MLP(embed=4, mlp=8, activation=jax.nn.relu, key=jax.random.key(0))  # has no biases
    model = {"mlp": mlp, "function": jax.nn.relu, "none": None, "number": 3, "key": jax.random.key(1)}
    specs = partition_specs(model, Layout({"mlp": "tensor"}), mesh)
    found = {"up": specs["mlp"].up.weight, "down": specs["mlp"].down.weight, "key": specs["key"]}
    assert found == {"up": P("tensor", None), "down": P(None, "tensor"), "key": P()}
    assert specs["mlp"].up.bias is None and isinstance(specs["mlp"], nn.MLP)
    assert specs["function"] is specs["none"] is specs["number"] is None
    placed = shardings(specs, mesh)["mlp"].up.weight
    assert placed.spec == P("tensor", None) and placed.mesh == mesh


PUBLISHED = ["gpt2-xl", "gpt2-large", "llama-2-7b", "llama-3.1-405b", "mixtral-8x22b", "jaxformer", "qwen3-8b"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_are_laid_out_from_shapes_alone(mesh, name):
    alive = len(jax.live_arrays())
    shapes = shapes_of(name)
    layout = Plan(mesh, zero=3).layout(splits_fsdp=True)
    if name == "gpt2-xl":
        with pytest.raises(
            ValueError, match="'heads' over axis 'tensor'.* has size 25 in .* and the axis has 2 devices"
        ):
            partition_specs(shapes, layout, mesh)
        return
    specs = by_path(partition_specs(shapes, layout, mesh))
    total = a_device = 0
    for path, leaf in by_path(shapes).items():
        if nn.has_shape(leaf):
            assert isinstance(leaf, jax.ShapeDtypeStruct)
            total += leaf.size
            a_device += leaf.size // math.prod(2 for axis in specs[path] if axis)
    assert len(jax.live_arrays()) <= alive
    assert 1 / 8 <= a_device / total < 0.25  # embedding and head are not split over `pipe`


# Optimizer states.


@pytest.mark.parametrize("name", [name for name in training.OPTIMIZERS if name != "soap"])
def test_what_an_optimizer_remembers_is_laid_out_like_the_parameters(mesh, name):
    model, options = shapes_of(LLAMA), {"momentum": 0.9} if name == "sgd" else {}
    optimizer = training.optimizer(name, model, rate=0.1, paths=(), **options)
    state = eqx.filter_eval_shape(optimizer.init, model)
    specs = partition_specs(training.trainable(model), Plan(mesh, zero=1, smallest=64).layout(splits_fsdp=True), mesh)
    laid_out = optimizer.map_state(lambda _, spec: spec, state, specs, other=P())
    shapes, found = by_path(state), by_path(laid_out)
    assert shapes.keys() == found.keys()
    by_parameter = by_path(specs)
    remembered = 0
    for path, spec in found.items():
        parameter = [own for own in by_parameter if path.endswith(own)]
        if parameter:
            assert spec == by_parameter[max(parameter, key=len)] and len(spec) == shapes[path].ndim
            remembered += shapes[path].size
        else:
            assert spec == P() and shapes[path].size <= 15  # a counter, or coefficients
    trained = sum(leaf.size for leaf in jax.tree.leaves(training.trainable(model)))
    assert trained <= remembered <= 2 * trained
    norms = [spec for path, spec in found.items() if path.endswith("sublayers[0].norm.weight")]
    assert norms and set(norms) == {P("pipe", "fsdp")}
