"""The names of mesh axes, spelled here and nowhere else."""

REPLICA = "replica"  # copies of everything; the batch is split
FSDP = "fsdp"  # the batch is split, and so is the training state
EXPERT = "expert"  # the batch is split, and so are the experts of a mixture
PIPE = "pipe"  # the layers are split
CONTEXT = "context"  # the sequence is split
TENSOR = "tensor"  # heads, hidden features and the vocabulary are split

AXES = (REPLICA, FSDP, EXPERT, PIPE, CONTEXT, TENSOR)
BATCH_AXES = (REPLICA, FSDP, EXPERT)
