"""Forge: writes an engine for one model on one machine, and shows how it got there.

inspect → plan → emit → verify → measure → keep or discard, until the time is up. `search` is the
loop, `decisions` what it can choose from, `emit` the writer, `gate` and `measure` the judges that
no candidate can touch, `sandbox` where candidates run, `ledger` what is remembered. docs/forge.md
tells the whole story.
"""
