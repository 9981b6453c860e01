"""See penstock.eval.correctness."""
