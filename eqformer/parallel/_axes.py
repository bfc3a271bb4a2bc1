"""Names of mesh axes, spelled here and nowhere else."""

REPLICA = "replica"  # Everything is replicated; the batch is split.
FSDP = "fsdp"  # The batch is split, and so is the training state.
EXPERT = "expert"  # The batch is split, and so are the experts of a mixture.
PIPE = "pipe"  # The layers are split.
CONTEXT = "context"  # The sequence is split.
TENSOR = "tensor"  # Heads, hidden features and the vocabulary are split.

AXES = (REPLICA, FSDP, EXPERT, PIPE, CONTEXT, TENSOR)
BATCH_AXES = (REPLICA, FSDP, EXPERT)
