"""The harness from a checkout: `python -m eval.check_server` is `penstock eval check-server`, and
so on.
"""
