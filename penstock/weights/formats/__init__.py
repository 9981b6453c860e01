"""Quantised safetensors, a module for each format. They say how parts make a weight; none opens a
file.
"""
