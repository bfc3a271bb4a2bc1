"""Mixtures of experts: routers, dispatch, balance, and the products of many experts at once."""
