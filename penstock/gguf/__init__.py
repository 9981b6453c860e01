"""GGUF files: a whole checkpoint in one file. What is here imports no torch and reads no
weights.
"""
