"""Mixers that remember by a state of fixed size: convolutions, the gated delta rule, Mamba-2."""
