"""See penstock.eval.throughput."""
