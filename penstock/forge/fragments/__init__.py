"""What engines are made of: ordinary Python files whose definitions `emit` links into one.

Two files that define the same name are alternatives of one decision. A line that ends in `# forge:
when cache=pages` is kept only in such designs, and `# forge: value` marks a constant that a design
sets. Imports between these files are removed: an engine is one file.
"""
