"""Parameters and gradients that are split, gathered and kept in other dtypes."""
