"""What engines are made of: ordinary Python files whose definitions `emit` links into one.

Two files that define the same name are alternatives of one decision. A line that ends in `# forge:
when cache=pages` is kept only by designs that say so, and `# forge: value` marks a constant that a
design sets. Imports among these files vanish: in the engine everything is in one place.
"""
