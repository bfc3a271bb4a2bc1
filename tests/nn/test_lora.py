"""LoRA: outputs against a formula in float64, what stands where it stood, and what layouts make of it."""
