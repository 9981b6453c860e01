"""GGUF files: a whole checkpoint in one file. Imports no torch and reads no weights."""
