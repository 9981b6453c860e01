"""Simulates a load on a fleet: real routers and schedulers, on a simulated clock."""
