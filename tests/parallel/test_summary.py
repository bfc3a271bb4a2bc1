from eqformer import parallel


def test_a_plan_is_told_in_one_line():
    plan = parallel.Plan(parallel.make_mesh(fsdp=2, pipe=2, tensor=2), zero=1, schedule="1f1b", microbatches=4)
    line = "8 devices: fsdp 2 x pipe 2 x tensor 2; zero 1; replicated stream; 1f1b, 4 microbatches, bubble 25.0 %"
    assert parallel.summary(plan) == line
