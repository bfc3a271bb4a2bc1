"""Mixers that remember by a state of fixed size: convolutions and the gated delta rule."""
