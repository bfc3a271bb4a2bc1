"""Products of rows sorted by group with their groups' matrices, as experts need them."""
