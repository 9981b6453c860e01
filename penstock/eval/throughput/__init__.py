"""How many tokens a second a server really gives: prompts nobody has seen, replies that are looked at."""
