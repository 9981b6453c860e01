"""Forge: writes an engine for one model on one machine, and logs every attempt.

inspect → plan → emit → verify → measure → keep or discard, until the time is up. `search` is the
loop, `decisions` has the choices, `emit` writes engines, `gate` and `measure` judge them out of
their reach, `sandbox` runs candidates, `ledger` records trials. docs/forge.md explains it.
"""
