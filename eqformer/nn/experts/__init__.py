"""Mixtures of experts: routers, dispatch, balance losses, and grouped products."""
