"""How a load would run on a fleet: real routers and schedulers, on a clock that only counts."""
