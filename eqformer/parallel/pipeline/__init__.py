"""Pipelines: schedules as tables, the simulator that checks and draws schedules, and the code that runs them."""
