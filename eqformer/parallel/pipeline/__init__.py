"""Pipelines: schedules as tables, the simulator that checks and draws them, and what runs them."""
