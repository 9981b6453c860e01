"""See penstock.eval.latency."""
