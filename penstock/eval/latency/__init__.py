"""How long one client waits for a whole reply, and whether speed has cost quality."""
