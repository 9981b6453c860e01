"""How often a server's model is right: grade-school problems over HTTP, judged by lm-evaluation-harness."""
